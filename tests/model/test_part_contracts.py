"""The contract of every mixer and memory of the registry, each alone, in float64, on tensors of odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from atma_sweep.model.bases import Memory, Mixer
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.registry import MEMORIES, MIXERS
from atma_sweep.model.resolve import check_model_config, memory_settings, mixer_settings
from registries import EVERY_MIXER, has_distractor
from torch import Tensor
from torch.func import functional_call

WIDTH, HEADS, KV_HEADS, SIZE = 10, 4, 2, 6
PARTS = [(mixer, "none") for mixer in MIXERS] + [("nope", memory) for memory in MEMORIES]
Part = Mixer | Memory
every_part = pytest.mark.parametrize(
    "part", PARTS, indirect=True, ids=lambda pair: pair[0] if pair[1] == "none" else pair[1]
)


@pytest.fixture
def part(request: pytest.FixtureRequest) -> Part:
    """A mixer, or a memory, whose parameters are all drawn anew, so that none is zero."""
    mixer, memory = request.param
    model = check_model_config(ModelConfig(
        d_model=WIDTH, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=SIZE, attn_type=mixer, memory=memory,
        memories={"omega": {"window": 2, "chunk": 3}, "atlas": {"window": 2, "chunk": 3}},
    ))  # fmt: skip
    if memory == "none":
        built: Part = MIXERS.load(mixer)(model, mixer_settings(model))
    else:
        built = MEMORIES.load(memory)(model, memory_settings(model))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.4, generator=draw)
    return built.double()


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and the block's input of 2 rows."""
    draw = torch.Generator().manual_seed(5)
    shapes = [(HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE), (WIDTH,)]
    return [torch.randn(2, length, *shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def arguments(
    part: Part, tensors: list[Tensor], window: int | None = None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    q, k, v, x = tensors
    if isinstance(part, Memory):
        return (x, q, k, v), {}
    return (q, k, v), {"window": window, **({"x_BTD": x} if part.reads_input else {})}


def outputs(
    part: Part, tensors: list[Tensor], window: int | None = None, chunk: int | None = None
) -> tuple[Tensor, ...]:
    """Return everything that `forward` gives, or `evaluate` in pieces of `chunk` tokens."""
    values, named = arguments(part, tensors, window)
    result = part(*values, **named) if chunk is None else part.evaluate(*values, **named, chunk=chunk)
    return result if isinstance(result, tuple) else (result,)


@every_part
@pytest.mark.parametrize("length", [1, 7])
@torch.no_grad()
def test_evaluation_in_pieces_is_the_forward_pass(part: Part, length: int) -> None:
    for window in (None, 3):
        full = outputs(part, inputs(length), window)
        assert full[0].shape[:2] == (2, length)
        for chunk in (1, 2, 9, 100):
            for piece, expected in zip(outputs(part, inputs(length), window, chunk), full, strict=True):
                assert (piece - expected).abs().max() <= 1e-12


@every_part
@torch.no_grad()
def test_no_token_sees_later_tokens(part: Part) -> None:
    for window in (None, 3):
        before = outputs(part, inputs(7), window)
        changed = inputs(7)
        for tensor in changed:
            tensor[:, 4] += 1
        for first, second in zip(before, outputs(part, changed, window), strict=True):
            assert (first[:, :4] - second[:, :4]).abs().max() <= 1e-12
            assert (first[:, 4] - second[:, 4]).abs().max() > 1e-6


@pytest.mark.parametrize("part", [(mixer, "none") for mixer in MIXERS], indirect=True, ids=EVERY_MIXER)
@torch.no_grad()
def test_no_query_sees_a_key_before_its_window(part: Part) -> None:
    before, changed = outputs(part, inputs(7), window=3), inputs(7)
    for tensor in changed[1:3]:
        tensor[:, 1] += 1
    for first, second in zip(before, outputs(part, changed, window=3), strict=True):
        assert (first[:, 4:] - second[:, 4:]).abs().max() <= 1e-12
        assert (first[:, 1:4] - second[:, 1:4]).abs().amax((0, *range(2, first.ndim))).min() > 1e-9


@every_part
def test_gradients_are_finite_differences(part: Part) -> None:
    """With respect to inputs and parameters, of all that the part returns."""
    tensors = [tensor.requires_grad_() for tensor in inputs(5)]
    names = [name for name, _ in part.named_parameters()]

    def call(*numbers: Tensor) -> Tensor | tuple[Tensor, ...]:
        return functional_call(part, dict(zip(names, numbers[4:], strict=True)), *arguments(part, list(numbers[:4])))

    assert torch.autograd.gradcheck(call, [*tensors, *part.parameters()], fast_mode=True)


@every_part
@torch.no_grad()
def test_a_call_repeats_itself_and_leaves_no_state(part: Part) -> None:
    before = {name: value.clone() for name, value in part.state_dict().items()}
    first = outputs(part, inputs(7))
    outputs(part, inputs(5), window=2, chunk=2)
    assert all(torch.equal(*pair) for pair in zip(first, outputs(part, inputs(7)), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in part.state_dict().items())


@every_part
@torch.no_grad()
def test_bfloat16_output_keeps_its_type_and_is_near_float64(part: Part) -> None:
    exact = outputs(part, [tensor.double() for tensor in inputs(7, torch.bfloat16)])
    for result, expected in zip(outputs(part.float(), inputs(7, torch.bfloat16)), exact, strict=True):
        assert result.dtype == torch.bfloat16
        assert (result.double() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("part", [(mixer, "none") for mixer in MIXERS if not has_distractor(mixer)], indirect=True)
def test_a_mixer_without_a_distractor_loss_refuses_it(part: Part) -> None:
    q, k, v, _ = inputs(7)
    with pytest.raises(NotImplementedError, match=f"{type(part).__name__} defines no distractor loss"):
        part.distractor_loss(q, k, v, k, v, q, window=None)


@pytest.mark.parametrize(("memory", "rates"), [
    ("deltanet", WIDTH * HEADS),  # beta
    ("gated_delta", 2 * WIDTH * HEADS),  # and gamma
    ("kda", WIDTH * HEADS + WIDTH * SIZE + SIZE * HEADS * SIZE),  # and gamma of each channel through a bottleneck
])  # fmt: skip
def test_flops_of_delta_memories_by_hand(memory: str, rates: int) -> None:
    """A token's projections of rates, gate and output, two FLOPs a weight; then what it does to each head's state [X, X]."""
    model = check_model_config(ModelConfig(
        d_model=WIDTH, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=SIZE, memory=memory
    ))  # fmt: skip
    gate_and_output = 2 * WIDTH * HEADS * SIZE
    # M k, M + u kᵀ and M q are two FLOPs an entry, gamma M is one
    state = HEADS * (2 + 2 + 2 + 1) * SIZE**2
    flops = MEMORIES.load(memory).forward_flops(model, memory_settings(model))
    assert flops == 2 * (rates + gate_and_output) + state
