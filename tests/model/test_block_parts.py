"""The contract of block parts on the shipped example, networks that hold one, and parameters that are matched."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import registries
import torch
from atma_sweep.model.backbone import Backbone, build, count_parameters
from atma_sweep.model.bases import BlockPart
from atma_sweep.model.config import ModelConfig, ModelConfigError
from atma_sweep.model.inference.decode import PagedDecoder, RecomputeDecoder, make_decoder
from atma_sweep.model.registry import MIXERS
from atma_sweep.model.resolve import check_model_config
from atma_sweep.sweep.training.flops import forward_flops
from torch import Tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

WIDTH, HEADS = 12, 2
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "block-mixer" / "my_block.py"
SMALL: dict[str, Any] = {
    "d_model": 16, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "attn_every": 2, "attn_offset": 1,
    "vocab_size": 40, "attn_type": "retention", "init": "llama",
}  # fmt: skip


@pytest.fixture(autouse=True)
def example() -> Iterator[None]:
    """The example's part is registered, and forgotten afterwards."""
    spec = importlib.util.spec_from_file_location("my_block", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    with registries.scope():
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        yield


@pytest.fixture
def part() -> BlockPart:
    """The example's part with random parameters, in float64."""
    cls = MIXERS.load("retention")
    built = cls(ModelConfig(d_model=WIDTH), cls.Config(heads=HEADS))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.4, generator=draw)
    return built.double()


def inputs(length: int = 7) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@torch.no_grad()
def test_block_part_is_causal_and_repeats_itself(part: BlockPart) -> None:
    x = inputs()
    changed = x.clone()
    changed[:, 4] += 1
    before, after = part(x), part(changed)
    assert (before[:, :4] - after[:, :4]).abs().max() <= 1e-12
    assert (before[:, 4:] - after[:, 4:]).abs().amax((0, 2)).min() > 1e-6
    assert torch.equal(before, part(x))
    assert (part.evaluate(x, chunk=2) - before).abs().max() <= 1e-12


def test_block_part_gradients_are_finite_differences(part: BlockPart) -> None:
    names = [name for name, _ in part.named_parameters()]

    def call(x: Tensor, *weights: Tensor) -> Any:
        return functional_call(part, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, [inputs(4).requires_grad_(), *part.parameters()], fast_mode=True)


@torch.no_grad()
def test_block_part_steps_are_its_forward(part: BlockPart) -> None:
    """By hand from an empty state, which no step changes in place, and by the default prefill."""
    x = inputs()
    state, rows = part.empty_state(x[:, 0]), []
    for x_BD in x.unbind(1):
        before = {name: value.clone() for name, value in state.items()}
        y_BD, later = part.step(x_BD, state)  # type: ignore[misc]
        assert all(torch.equal(state[name], before[name]) for name in before)
        rows.append(y_BD)
        state = later
    assert (torch.stack(rows, 1) - part(x)).abs().max() <= 1e-12
    y_1TD, final = part.prefill(x[:1], chunk=3)
    assert (y_1TD - part(x[:1])).abs().max() <= 1e-12
    assert (final["s"] - state["s"][:1]).abs().max() <= 1e-12


@torch.no_grad()
def test_block_part_in_bfloat16_is_near_float64(part: BlockPart) -> None:
    x = inputs().bfloat16()
    exact, result = part(x.double()), part.float()(x)
    assert result.dtype == torch.bfloat16
    assert (result.double() - exact).norm() <= 0.05 * exact.norm()


@torch.no_grad()
def test_block_part_flops_are_those_that_torch_counts(part: BlockPart) -> None:
    """FLOPs of a step; the write and the decay of the state are elementwise for torch, three FLOPs an entry."""
    x = inputs()[:1, 0]
    with FlopCounterMode(display=False) as counter:
        part.step(x, part.empty_state(x))  # type: ignore[misc]
    formula = type(part).forward_flops(ModelConfig(d_model=WIDTH), part.config, 4.0)
    assert formula == counter.get_total_flops() + 3 * WIDTH * WIDTH // HEADS


@pytest.fixture
def network() -> Backbone:
    """Two gated convolutions around the part, in float64."""
    return build(ModelConfig(**SMALL), seed=3, dtype=torch.float64).eval()


@torch.no_grad()
def test_network_of_block_parts_decodes_as_its_forward(network: Backbone) -> None:
    texts = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(7))
    assert isinstance(make_decoder(network, tokens=8), PagedDecoder)
    wanted = network(texts)
    for decoder in (PagedDecoder(network, texts=3, tokens=8, page=3), RecomputeDecoder(network, texts=2, tokens=8)):
        slots = [decoder.begin(text[:3])[0] for text in texts]
        for index in range(3, 7):
            got = decoder.step(slots, texts[:, index])
            assert (got - wanted[:, index]).abs().max() <= 1e-10
        if isinstance(decoder, PagedDecoder):
            copied = decoder.fork(slots[0])
            decoder.step([slots[0]], texts[0, :1])
            assert (decoder.step([copied], texts[0, 7:8])[0] - wanted[0, 7]).abs().max() <= 1e-10
            conv_tails = 2 * 2 * 16 * 8
            assert decoder.cache_bytes(copied) == 2 * 8 * 8 * 8 + conv_tails


@torch.no_grad()
def test_chunked_evaluation_is_the_forward_pass(network: Backbone) -> None:
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(7))
    expected = network.features(tokens).hidden_BTD
    assert (network.features(tokens, chunk=4).hidden_BTD - expected).abs().max() <= 1e-12


@pytest.mark.thorough
def test_blocks_of_an_uncompilable_part_run_eagerly(network: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def uncompilable(self: BlockPart, x_BTD: Tensor) -> Tensor:
        return self.out(x_BTD) * (1 if float(x_BTD.detach().sum()) < 1e9 else 2)  # reads a value: no single graph

    kind = MIXERS.load("retention")
    monkeypatch.setattr(kind, "forward", uncompilable)
    monkeypatch.setattr(kind, "is_compilable", False)
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    eager = network.features(tokens).hidden_BTD
    network.compile_blocks("eager")
    assert torch.equal(network.features(tokens).hidden_BTD, eager)
    assert "1 of 3 blocks eager" in network.kernel_paths()["blocks"]


@pytest.mark.parametrize(("changes", "message"), [
    ({"memory": "omega"}, "without queries, keys and values for a memory"),
    ({"window": True}, "has no sliding window"),
    ({"mixers": {"retention": {"heads": 3}}}, r"heads \(3\) must divide the width \(16\)"),
])  # fmt: skip
def test_network_refuses_what_a_block_part_lacks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelConfigError, ValueError), match=message):
        Backbone(check_model_config(ModelConfig(**SMALL | changes)))


@pytest.mark.parametrize("mixer", ["retention", "wall", "nope"])
def test_matched_parameters_differ_by_a_percent_at_most(mixer: str) -> None:
    """Parameters of each block, counted from the network's own tensors; blocks of convolutions stay as they are."""
    plain = ModelConfig(**SMALL | {"d_model": 32, "attn_type": "nope"})
    matched = plain.model_copy(update={"attn_type": mixer, "match": "parameters"})
    blocks = {config.attn_type + config.match: Backbone(config).blocks for config in (plain, matched)}
    sizes = {name: [sum(p.numel() for p in block.parameters()) for block in blocks[name]] for name in blocks}
    ours, theirs = sizes[f"{mixer}parameters"], sizes["nopenone"]
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    assert ours[1] == pytest.approx(theirs[1], rel=0.01)
    hidden = blocks[f"{mixer}parameters"][1].mlp.proj.weight.shape[1]
    assert (hidden == 128) == (mixer == "nope")
    assert count_parameters(matched) - count_parameters(plain) == ours[1] - theirs[1]


def test_flops_of_a_matched_network_count_its_own_width() -> None:
    config = ModelConfig(**SMALL | {"match": "parameters", "n_layers": 2})
    hidden, d = Backbone(config).blocks[1].mlp.proj.weight.shape[1], 16
    convolution = 2 * d * 3 * d + 2 * d * d + 2 * config.conv_taps * d
    part = 2 * 4 * d * d + 5 * d * 8
    assert forward_flops(config, 32) == 6 * d * (64 + hidden) + convolution + part + 2 * d * 40


def test_match_refuses_a_mixer_larger_than_a_block() -> None:
    config = ModelConfig(**SMALL | {"match": "parameters", "mlp_ratio": 1})
    with pytest.raises(ModelConfigError, match=r"mixer retention alone has 1,024 parameters per block, .*smaller"):
        Backbone(config.model_copy(update={"n_heads": 1, "head_dim": 2}))
