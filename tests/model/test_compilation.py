"""The compiled network against the eager one: every combination of parts, one graph, compiled once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.kernels.dispatch import use_torch_backend
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, build
from atma_sweep.model.compilation import MIX_ORDER_FLAG, CompileError, compile_full_graph
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.registry import REGULARIZERS
from registries import EVERY_MEMORY, PAIRS, has_distractor
from tiers import long_form, only_long
from torch import Tensor
from torch._dynamo.utils import counters

SMALL = {"d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 61, "window_size": 8}
TWO_BLOCKS = {"n_layers": 2, "attn_every": 2, "attn_offset": 1}
"""A local layer and a global one."""
TOKENS = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(3))
WITH_MEMORY = "polar", "nope", "rope"
"""Mixers beside which each regularizer is compiled: it reads the stream after a block, whatever the mixer."""
LEVELS = WITH_MEMORY, EVERY_MEMORY, (False, True), (False, True)
"""attn_type, memory, window, distractor"""
REGULARIZER_NAMES = sorted(REGULARIZERS)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder for compiled code."""
    return tmp_path_factory.mktemp("compiled")


def network(wake: Callable[[Backbone], None], **settings: Any) -> Backbone:
    model = build(ModelConfig(**(SMALL | settings)), seed=0)
    wake(model)
    return model


def auxiliary(regularizer: str, distractor: bool, **changes: int) -> AuxiliaryTerms:
    return AuxiliaryTerms(regularizer, 5, distractor, None, **({"seed": 0, "step": 3, "micro": 1} | changes))


def numbers(model: Backbone, terms: AuxiliaryTerms | None, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    """Everything that a training step makes: features, terms, loss and every gradient."""
    model.zero_grad()
    features = model.features(tokens[:, :-1], auxiliary=terms)
    results = {"hidden": features.hidden_BTD, "loss": model.total_loss(features.hidden_BTD, tokens[:, 1:])}
    for name, value in (("regularizer", features.regularizer), ("distractor", features.distractor)):
        if value is not None:
            results[name] = value
    sum(value for name, value in results.items() if name != "hidden").backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().clone() for name, value in (results | grads).items()}


def differ(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest difference, relative to the largest entry of a tensor, at least 1e-3."""
    assert first.keys() == second.keys()
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
        for a, b in zip(first.values(), second.values(), strict=True)
    )


def assert_compiled_equals_eager(
    model: Backbone, eager: dict[str, Tensor], terms: AuxiliaryTerms | None, *, near: float = 1e-6
) -> None:
    """The same numbers from one graph without a break."""
    assert differ(numbers(model, terms), eager) <= near
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == 1


def combinations() -> list[tuple[str, str, bool, bool, str]]:
    """Every pair of parts with and without window and distractor; then each regularizer beside every level of every part."""
    plain, dealt = [], []
    for mixer, memory in PAIRS:
        losses = (False, True) if has_distractor(mixer) else (False,)
        plain += [(mixer, memory, window, loss, "baseline") for window, loss in product((False, True), losses)]
    turns = max(len(level) for level in LEVELS)
    for turn, (index, regularizer) in product(range(turns), enumerate(REGULARIZER_NAMES)):
        attn_type = WITH_MEMORY[(turn + index) % len(WITH_MEMORY)]
        memory = EVERY_MEMORY[turn % len(EVERY_MEMORY)]
        dealt.append((attn_type, memory, (turn + index) % 2 == 0, (turn + index // 2) % 2 == 0, regularizer))
    return plain + dealt


def test_regularizers_meet_every_level() -> None:
    dealt = [row for row in combinations() if row[4] != "baseline"]
    for position, levels in enumerate(LEVELS):
        assert {(row[position], row[4]) for row in dealt} == set(product(levels, REGULARIZER_NAMES))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attn_type", "memory", "window", "distractor", "regularizer"),
    [*combinations()[::2], *long_form(*combinations()[1::2])],
)
def test_compiled_graph_equals_eager(
    attn_type: str, memory: str, window: bool, distractor: bool, regularizer: str, wake: Callable[[Backbone], None]
) -> None:
    model = network(wake, attn_type=attn_type, memory=memory, window=window, **TWO_BLOCKS)
    terms = auxiliary(regularizer, distractor)
    eager = numbers(model, terms)
    assert ("distractor" in eager, "regularizer" in eager) == (distractor, regularizer != "baseline")
    model.compile_blocks("eager")
    assert model.kernel_paths()["blocks"].startswith("eager torch ")
    assert_compiled_equals_eager(model, eager, terms)


@pytest.mark.thorough
def test_full_graph_with_fp8_products(wake: Callable[[Backbone], None]) -> None:
    model = network(wake, attn_type="polar", memory="gated_delta", **TWO_BLOCKS)
    terms = auxiliary("weak", True)
    plain = numbers(model, terms)
    model.use_fp8()
    eager = numbers(model, terms)
    assert differ(eager, plain) > 1e-3
    model.compile_blocks("eager")
    assert_compiled_equals_eager(model, eager, terms)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("regional", [False, True])
def test_fp8_forbids_mixed_order_reductions(
    fp8: bool, regional: bool, wake: Callable[[Backbone], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []

    def compiled(part: Any, *, options: Any, **_: Any) -> Any:
        recorded.append(options)
        return part

    monkeypatch.setattr(torch, "compile", compiled)
    model = network(wake, attn_type="polar", memory="none", **TWO_BLOCKS)
    if fp8:
        model.use_fp8()
        assert "casts" in model.kernel_paths()
    model.compile_blocks(regional=regional)
    # the compiler's own name for it: if it has another one some day, this says so
    assert MIX_ORDER_FLAG in importlib.import_module("torch._inductor").list_options()
    assert recorded == [{MIX_ORDER_FLAG: False} if fp8 else None] * (2 if regional else 1)


@pytest.mark.thorough
def test_full_graph_with_every_attention_switch(wake: Callable[[Backbone], None]) -> None:
    """And dropout and labels of other steps are no reason to compile again."""
    model = network(
        wake, attn_type="polar", logit_cap=None, mlp="swiglu", mlp_ratio=2, residual="normed", dropout=0.25, tie_head=True,
        qk_norm=False, output_gate=False, bias=False, positions="label", position_settings={"label": {"length": 30}},
        **TWO_BLOCKS,
    )  # fmt: skip
    steps = [auxiliary("weak", True, step=step) for step in (3, 4)]
    eager = [numbers(model, terms) for terms in steps]
    assert not torch.equal(eager[0]["hidden"], eager[1]["hidden"])
    model.compile_blocks("aot_eager")
    for terms, expected in zip(steps, eager, strict=True):
        assert_compiled_equals_eager(model, expected, terms, near=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("terms", [None, "distractor_count"])
def test_full_graph_serves_different_requests(terms: str | None, wake: Callable[[Backbone], None]) -> None:
    """Evaluation without auxiliary terms, and a number of distractors that is not the length."""
    model = network(wake, attn_type="polar", window=True)
    auxiliary_terms = None if terms is None else AuxiliaryTerms("baseline", 5, True, 7, 0, 0, 0)
    eager = numbers(model, auxiliary_terms)
    model.compile_blocks("eager")
    assert differ(numbers(model, auxiliary_terms), eager) <= 1e-6
    with torch.no_grad():
        at_once = model.features(TOKENS, full_context=True).hidden_BTD
        chunked = model.features(TOKENS, full_context=True, chunk=7).hidden_BTD
    assert (at_once - chunked).abs().max() <= 1e-5


@only_long
@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("attn_type", "window", "regularizer", "distractor", "layers"), [
    ("polar", True, "baseline", True, 1), ("rope", False, "zipfian", False, 2),
])  # fmt: skip
def test_generated_code_gives_the_eager_numbers(
    attn_type: str, window: bool, regularizer: str, distractor: bool, layers: int, wake: Callable[[Backbone], None],
    compiled: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The last layer is global. A cache of its own, so that what an earlier run compiled is not what is tested."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    parts = {"n_layers": layers, "attn_every": layers, "attn_offset": layers - 1}
    model = network(wake, attn_type=attn_type, window=window, **parts)
    terms = auxiliary(regularizer, distractor)
    eager = numbers(model, terms)
    model.compile_blocks()
    assert model.kernel_paths()["blocks"].startswith("inductor torch ")
    assert differ(numbers(model, terms), eager) <= 1e-5
    assert counters["stats"]["unique_graphs"] == 1
    assert any(compiled.iterdir())


@pytest.mark.thorough
def test_compiled_once(wake: Callable[[Backbone], None]) -> None:
    """Another step, seed, micro-batch, batch, learning rate or weight is no reason to compile again; a length is."""
    model = network(wake, attn_type="polar", memory="gated_delta", window=True)
    first = auxiliary("weak", True)
    eager = [numbers(model, auxiliary("weak", True, step=step), TOKENS.flip(0)) for step in (3, 4)]
    model.compile_blocks("aot_eager")
    numbers(model, first)
    with torch.compiler.set_stance("fail_on_recompile"):
        for index, step in enumerate((3, 4)):
            results = numbers(model, auxiliary("weak", True, step=step), TOKENS.flip(0))
            assert differ(results, eager[index]) <= 1e-5
        for change in ({"seed": 5}, {"micro": 0}, {"step": 1000}):
            results = numbers(model, auxiliary("weak", True, **change))
            assert not torch.equal(results["regularizer"], eager[0]["regularizer"])
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for lr in (0.1, 0.05, 0.0):
            sgd.param_groups[0]["lr"] = lr
            losses.append(float(numbers(model, first)["loss"]))
            sgd.step()
        assert len(set(losses)) == 3
        state = {name: value * 1.01 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        assert float(numbers(model, first)["loss"]) != losses[-1]
        with pytest.raises(RuntimeError, match="recompil"):
            numbers(model, first, TOKENS[:, :10])
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.thorough
def test_draws_of_a_step_are_those_of_the_eager_network(wake: Callable[[Backbone], None]) -> None:
    """They are made outside the graph: a fresh network that is compiled first gives what an eager one gives later."""
    compiled, eager = (network(wake, attn_type="nope") for _ in range(2))
    compiled.compile_blocks("eager")
    for step in (7, 2):
        first, second = (numbers(model, auxiliary("strong", True, step=step)) for model in (compiled, eager))
        assert differ(first, second) <= 1e-6


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("attn_type", "distractor"), [("polar", True), ("rope", False)])
def test_compiled_kernels_follow_plain_torch_for_100_steps(
    attn_type: str, distractor: bool, record_property: Callable[[str, object], None]
) -> None:
    import numpy as np
    from atma_sweep.sweep.config import TrainConfig
    from atma_sweep.sweep.data.batches import Batches
    from atma_sweep.sweep.training.loop import Trainer
    from atma_sweep.sweep.training.optimizers import Optimizers

    device = torch.device("cuda")
    stream = np.random.default_rng(0).zipf(1.3, 400_000).clip(max=5002).astype(np.uint16)
    settings = ModelConfig(
        d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, vocab_size=5003, window_size=100,
        attn_type=attn_type, memory="gated_delta",
    )  # fmt: skip
    config = TrainConfig(
        tokens=100 * 4096, seq_len=256, batch_tokens=4096, micro_batch=16, regularizer="weak", distractor=distractor
    )

    class Quiet:
        def __getattr__(self, name: str) -> Callable[..., bool]:
            return lambda *args, **named: False

    def curve(plain: bool) -> tuple[list[float], dict[str, str]]:
        use_torch_backend(plain)
        model = build(settings, seed=0, device=device, dtype=torch.bfloat16)
        if not plain:
            model.compile_blocks()
        trainer = Trainer(
            model=model, optimizers=Optimizers(model.parameter_groups(), config, device),
            batches=Batches([stream], 256, 16, 0, True), config=config, seed=0, device=device, validate=lambda: 0.0,
            validate_every=100, hooks=Quiet(),  # type: ignore[arg-type]
        )  # fmt: skip
        done = [trainer.train_step(step) for step in range(config.steps)]
        return [float(result[0]) for result in done if result is not None], model.kernel_paths()

    try:
        (fast, paths), (plain, plain_paths) = curve(False), curve(True)
    finally:
        use_torch_backend(False)
    assert len(fast) == len(plain) == 100
    assert all(reason.startswith(("torch", "eager")) for reason in plain_paths.values()), plain_paths
    assert not any(reason.startswith("torch") for reason in paths.values()), paths
    gap = max(abs(a - b) / b for a, b in zip(fast, plain, strict=True))
    print(
        f"{attn_type}: largest relative difference of a loss {gap:.3g}, from {plain[0]:.3f} to {plain[-1]:.3f}; {paths}"
    )
    record_property(attn_type, gap)
    assert plain[-1] < 0.9 * plain[0]
    assert gap < 2e-2


@pytest.mark.thorough
@pytest.mark.usefixtures("registries")
def test_compile_error_names_the_setting() -> None:
    from atma_sweep.model import Mixer, register_mixer

    @register_mixer("asks")
    class Asks(Mixer):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
            return q if float(q.sum()) > 0 else -q

    try:
        sizes = {"d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 29}
        model = build(ModelConfig(**sizes, attn_type="asks"), seed=0)  # type: ignore[arg-type]
        model.compile_blocks("eager")
        with pytest.raises(CompileError, match=r"cannot be compiled: .*; set train\.compile: off"):
            model.features(torch.randint(29, (2, 19)))
    finally:
        torch._dynamo.reset()


def test_compile_error_has_heading_and_debug_context() -> None:
    def odd(x: Tensor) -> Tensor:
        if x.ndim == 1:
            raise ValueError("one dimension")
        return x

    with pytest.raises(CompileError, match=r"compiled: [^:]+: raised exception ValueError.*one dimension.*; set train"):
        compile_full_graph(odd, "eager")(torch.ones(3))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attn_type", "memory", "regularizer"),
    [("nope", "none", "baseline"), ("polar", "gated_delta", "zipfian"), ("rope", "none", "strong")],
)
def test_a_graph_for_each_kind_of_block_gives_the_eager_numbers(
    attn_type: str, memory: str, regularizer: str, wake: Callable[[Backbone], None]
) -> None:
    """Five blocks of two kinds, and what follows them: three graphs, and none more for another step."""
    model = network(wake, attn_type=attn_type, memory=memory, n_layers=5, dropout=0.25)
    first, second = (auxiliary(regularizer, True, step=step) for step in (3, 4))
    eager = [numbers(model, terms) for terms in (first, second)]
    model.compile_blocks("aot_eager", regional=True)
    assert model.kernel_paths()["blocks"].startswith("aot_eager, block by block, torch ")
    for terms, expected in zip((first, second), eager, strict=True):
        assert differ(numbers(model, terms), expected) < 1e-6
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]
    model.compile_blocks("aot_eager")  # the whole network, from now on
    assert differ(numbers(model, first), eager[0]) < 1e-6


def test_compile_error_of_a_single_block(wake: Callable[[Backbone], None]) -> None:
    model = network(wake, attn_type="nope", **TWO_BLOCKS)
    mlp = model.blocks[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) if x.sum().item() < 1e30 else x  # type: ignore[method-assign]
    model.compile_blocks("aot_eager", regional=True)
    with pytest.raises(CompileError, match=r"cannot be compiled: .*; set train\.compile: off"):
        numbers(model, None)
