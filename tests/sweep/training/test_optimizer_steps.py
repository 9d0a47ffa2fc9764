"""Steps that are replayed give the numbers of steps that are done as they come, to the last bit, and stop and resume like them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.training.loop import Stopped, Trainer
from atma_sweep.sweep.training.optimizer_steps import MAX_CAPTURE_FLOPS, Batch, should_capture, without_capture
from atma_sweep.sweep.training.optimizers import Muon, Optimizers
from registries import PAIRS
from small_training import LEVELS, Watch, recipe, small_trainer
from taped import as_tapes
from tolerances import rounding_bound
from torch import Tensor, nn

Network = Callable[..., Backbone]
CPU = torch.device("cpu")
EVERY_LEVEL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = LEVELS | {
    **{f"{mixer}+{memory}": ({"attn_type": mixer, "memory": memory}, {}) for mixer, memory in PAIRS},
    "one micro-batch": ({"memory": "gated_delta"}, {"micro_batch": 4, "warmup_steps": 2}),
}


def make_trainer(model: Backbone, config: TrainConfig, way: str, watch: Watch | None = None) -> Trainer:
    """`as it comes`, `replayed` without a capture, `taped` as a GPU would; rates in memory where the name says so."""
    trainer = small_trainer(model, config, watch)
    resident = way in ("taped", "as it comes, resident")
    optimizers = Optimizers(model.parameter_groups(), config, CPU, rates_on_device=resident)
    room = 12 if config.loss_on == "marked" else None
    trainer = replace(trainer, optimizers=optimizers, graphs=way in ("taped", "replayed"), marked_capacity=room)
    if watch is not None:
        watch.trainer = trainer
    if way == "taped":
        late_list = LateList(trainer)
        trainer.step_runner.capture = as_tapes(late_list)
    return trainer


class LateList(list[Tensor]):
    """Weights, the state of optimizers and the loss so far, as they are when they are asked for."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    def __iter__(self) -> Any:
        yield from self._trainer.model.parameters()
        for optimizer in (self._trainer.optimizers.by_name).values():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def weights(model: Backbone) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_training(
    model: Backbone, config: TrainConfig, way: str
) -> tuple[dict[str, Tensor], list[tuple[float, float]], Trainer]:
    watch = Watch()
    trainer = make_trainer(model, config, way, watch)
    trainer.run()
    return weights(model), [(point.train_loss, point.grad_norm) for point in watch.points], trainer


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.thorough
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_replayed_steps_are_steps_as_they_come(network: Network, level: str) -> None:
    settings, training = EVERY_LEVEL[level]
    config = recipe(**training)
    expected, curve, _ = run_training(network(awake=True, **settings), config, "as it comes")
    results, points, trainer = run_training(network(awake=True, **settings), config, "replayed")
    assert trainer.step_runner.replays.keys() >= {"first", "finish"}
    assert same(expected, results)
    assert points == curve


@pytest.mark.thorough
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_a_capture_finds_all_that_changes_in_memory(network: Network, level: str) -> None:
    """A tape keeps every number of Python that it was made with: rates, draws, tokens must not be among them."""
    settings, training = EVERY_LEVEL[level]
    config = recipe(**training)
    expected, curve, _ = run_training(network(awake=True, **settings), config, "as it comes, resident")
    results, points, trainer = run_training(network(awake=True, **settings), config, "taped")
    assert trainer.step_runner.replays, "captured"
    assert same(expected, results)
    assert points == curve


def test_a_number_of_python_in_a_piece_would_be_seen(network: Network) -> None:
    """The oracle itself: a factor that changes from step to step stays, on a tape, that of the step that was captured."""

    def run(way: str) -> tuple[dict[str, Tensor], Trainer]:
        model, factors = network(awake=True), itertools.count(1)
        trainer = make_trainer(model, recipe(loss_reduction="sum", clip=1e9, optimizer="adamw", adam_eps=1.0), way)
        objective = trainer.step_runner.objective

        def scaled(batch: Batch) -> tuple[Tensor, Tensor]:
            value, cross_entropy = objective(batch)
            return value * next(factors), cross_entropy

        trainer.step_runner.objective = scaled
        trainer.run()
        return weights(model), trainer

    expected, _ = run("as it comes, resident")
    results, trainer = run("taped")
    assert trainer.step_runner.replays, "captured"
    assert not same(expected, results)


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [
    ("replayed", "as it comes"), ("as it comes", "replayed"), ("replayed", "replayed"),
])  # fmt: skip
def test_stop_before_any_micro_batch_does_not_change_results(
    network: Network, tmp_path: Path, before: str, after: str
) -> None:
    config = recipe(regularizer="weak", distractor=True, tokens=4 * 24)
    assert config.accumulation == 2
    expected, curve, _ = run_training(network(awake=True), config, "as it comes")
    for ask in range(1, 2 * config.steps + 1):
        steps = (ask - 1) // 2
        folder = tmp_path / str(ask)
        first = StopOnce(folder, ask)
        stopped = network(awake=True)
        with pytest.raises(Stopped):
            make_trainer(stopped, config, before, first).run()
        assert all(p.grad is None for p in stopped.parameters())
        resumed, second = network(awake=True, seed=9 if steps else 0), Watch()
        trainer = make_trainer(resumed, config, after, second)
        state = checkpoint.load_newest(folder)
        assert (state is None) == (steps == 0)
        if state is not None:
            trainer.restore(state)
        trainer.run()
        assert same(expected, weights(resumed)), f"after a stop at ask {ask}"
        assert [(p.train_loss, p.grad_norm) for p in (*first.points, *second.points)] == curve


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [("taped", "as it comes, resident"), ("as it comes, resident", "taped")])
def test_checkpoint_moves_between_eager_and_captured_steps(
    network: Network, tmp_path: Path, before: str, after: str
) -> None:
    config = recipe(warmup_steps=3)
    expected, _, _ = run_training(network(awake=True), config, "as it comes, resident")
    with contextlib.suppress(Stopped):
        make_trainer(network(awake=True), config, before, Watch(tmp_path, 3)).run()
    state = checkpoint.load_newest(tmp_path)
    assert state is not None
    assert {
        type(group["lr"]) for optimizer_state in state.optimizers.values() for group in optimizer_state["param_groups"]
    } == {float}
    resumed = network(awake=True, seed=9)
    trainer = make_trainer(resumed, config, after)
    trainer.restore(state)
    trainer.run()
    assert same(expected, weights(resumed))


class StopOnce(Watch):
    """Stops when asked for the n-th time."""

    def __init__(self, folder: Path, ask: int) -> None:
        super().__init__(folder)
        self._remaining = ask

    def should_stop(self) -> bool:
        self._remaining -= 1
        return self._remaining == 0


@pytest.mark.thorough
def test_restoring_drops_captured_parts(network: Network, tmp_path: Path) -> None:
    """Loading puts the optimizers' state into memory of its own, which what was captured does not know."""
    config = recipe()
    expected, _, _ = run_training(network(awake=True), config, "as it comes, resident")
    model = network(awake=True)
    with contextlib.suppress(Stopped):
        make_trainer(network(awake=True), config, "taped", Watch(tmp_path, 2)).run()
    trainer = make_trainer(model, config, "taped")
    for step in range(4):
        trainer.train_step(step)
    state = checkpoint.load_newest(tmp_path)
    assert state is not None
    trainer.restore(state)
    trainer.run()
    assert same(expected, weights(model))


# --- what cannot be captured --------------------------------------------------------------------------------------


def test_part_that_reads_a_value_falls_back_to_eager(network: Network) -> None:
    config = recipe()
    expected, curve, _ = run_training(network(awake=True), config, "as it comes, resident")
    model, reasons = network(awake=True), list[str]()
    watch = Watch()
    trainer = make_trainer(model, config, "taped", watch)
    mlp = model.blocks[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) if x.sum().item() < 1e9 else x  # type: ignore[method-assign]
    trainer.step_runner.refused = reasons.append
    trainer.run()
    assert reasons == ["operation not permitted when stream is capturing"]
    assert same(expected, weights(model))
    assert [(point.train_loss, point.grad_norm) for point in watch.points] == curve


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["replayed", "taped"])
@pytest.mark.parametrize("micro", [0, 1])
def test_changing_batch_shape_falls_back_to_eager(network: Network, way: str, micro: int) -> None:
    """Noticed before the first micro-batch of a step, and between two, when half of the gradients are there."""
    config = recipe(distractor=True)
    resident = "as it comes, resident" if way == "taped" else "as it comes"

    def run(way: str) -> tuple[dict[str, Tensor], list[str]]:
        model, reasons = network(awake=True), list[str]()
        trainer = make_trainer(model, config, way)
        draw = model.draw

        def drawn(auxiliary: Any, rows: int, length: int) -> Any:
            draws = draw(auxiliary, rows, length)
            if (auxiliary.step, auxiliary.micro) >= (3, micro):
                draws.distractors = {layer: d[:, :4] for layer, d in draws.distractors.items()}
            return draws

        model.draw = drawn  # type: ignore[method-assign]
        trainer.step_runner.refused = reasons.append
        trainer.run()
        return weights(model), reasons

    expected, _ = run(resident)
    results, reasons = run(way)
    assert reasons == ["the shapes of micro-batches change from step to step"]
    assert same(expected, results)


def test_a_micro_batch_is_read_from_the_same_memory_each_time(network: Network) -> None:
    read: list[list[int]] = []
    trainer = make_trainer(network(), recipe(regularizer="weak", distractor=True), "replayed")
    objective = trainer.step_runner.objective

    def seen(batch: Batch) -> tuple[Tensor, Tensor]:
        read.append([tensor.data_ptr() for tensor in batch.tensors()])
        return objective(batch)

    trainer.step_runner.objective = seen
    trainer.run()
    assert len(read) == 10
    assert len(read[0]) == 4 + len(list(filter(trainer.model.config.is_global, range(3)))) - 1
    assert all(addresses == read[0] for addresses in read)


def test_marked_targets_beyond_capacity_are_trained_eagerly(network: Network) -> None:
    """The numbers are those of no room at all but for the order of sums."""
    reasons: list[str] = []
    expected, *_ = run_training(network(awake=True, dtype=torch.float64), recipe(loss_on="marked"), "as it comes")
    model = network(awake=True, dtype=torch.float64)
    trainer = replace(
        small_trainer(model, recipe(loss_on="marked"), graphs=True),
        marked_capacity=4,
        on_capture_refused=reasons.append,
    )
    trainer.hooks.trainer = trainer  # type: ignore[attr-defined]
    trainer.run()
    assert reasons == ["the shapes of micro-batches change from step to step"]
    assert all((expected[name] - weight).abs().max() <= 1e-9 for name, weight in weights(model).items())


def test_which_networks_are_captured() -> None:
    cuda = torch.device("cuda")
    config = TrainConfig(tokens=10**9, seq_len=512, batch_tokens=32_768, micro_batch=64)
    assert should_capture(config, 10_600_000, cuda) == (
        True,
        "a micro-batch takes 2.1e+12 FLOPs, at most the capture limit of 1e+13",
    )
    assert should_capture(config, 370_000_000, cuda)[0] is False
    edge = int(MAX_CAPTURE_FLOPS / 6 / 32_768)
    assert (should_capture(config, edge, cuda)[0], should_capture(config, edge + 1, cuda)[0]) == (True, False)
    assert should_capture(config.model_copy(update={"graphs": "on"}), 10**9, cuda) == (True, "train.graphs: on")
    assert should_capture(config.model_copy(update={"graphs": "off"}), 10, cuda) == (False, "train.graphs: off")
    assert should_capture(config.model_copy(update={"graphs": "on"}), 10, CPU) == (False, "no GPU")


# --- rates in memory ----------------------------------------------------------------------------------------------


def test_rates_in_memory_round_as_numbers_do() -> None:
    """Muon: stacks with a rate in memory against one parameter after the other with a number, to the last bit in float32."""
    for shape in ((6, 4), (4, 6), (5, 5), (11, 1, 3)):
        draws = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
        ours, theirs = ([nn.Parameter(draw.clone()) for draw in draws[:3]] for _ in range(2))
        first, second = Muon(ours, dtype=torch.float32), Muon(theirs, dtype=torch.float32)
        rate = torch.zeros((), dtype=torch.float64)
        first.param_groups[0]["lr"] = rate
        for step in range(3):
            rate.fill_(0.02 / (step + 1))
            second.param_groups[0]["lr"] = 0.02 / (step + 1)
            for a, b, grad in zip(ours, theirs, draws[3:], strict=True):
                a.grad, b.grad = grad.clone(), grad.clone()
            first.step()
            second.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), shape


def test_rates_in_memory_train_the_same_network(network: Network) -> None:
    config = recipe(warmup_steps=2, adam_weight_decay=0.01)
    expected, _, _ = run_training(network(awake=True, dtype=torch.float64), config, "as it comes")
    results, _, trainer = run_training(network(awake=True, dtype=torch.float64), config, "as it comes, resident")
    # AdamW's kernel takes its rate in single precision; what a step is off, the steps behind it enlarge
    near = rounding_bound(torch.float32, config.steps, condition=10)
    assert max(float((expected[name] - results[name]).abs().max()) for name in results) < near
    factor = trainer.lr_factor(config.steps - 1)
    assert 0 < factor < 1
    rates = [float(group["lr"]) for group in trainer.optimizers.by_name["adam"].param_groups]
    assert rates == pytest.approx([0.3 * factor, factor / 320, 0.01 * factor], rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [("as it comes", "taped"), ("taped", "as it comes")])
def test_checkpoint_moves_between_host_and_device_rates(
    network: Network, tmp_path: Path, before: str, after: str
) -> None:
    """The state moves between devices (CPU to GPU here); implementation flags do not."""
    config = recipe(warmup_steps=3)
    expected, _, _ = run_training(network(awake=True, dtype=torch.float64), config, "as it comes")
    with contextlib.suppress(Stopped):
        make_trainer(network(awake=True, dtype=torch.float64), config, before, Watch(tmp_path, 2)).run()
    state = checkpoint.load_newest(tmp_path)
    assert state is not None
    resumed = network(awake=True, seed=9, dtype=torch.float64)
    trainer = make_trainer(resumed, config, after)
    trainer.restore(state)
    trainer.run()
    near = rounding_bound(torch.float32, config.steps, condition=10)  # of rates, as above
    assert max(float((expected[name] - value).abs().max()) for name, value in weights(resumed).items()) < near
    ways = {(bool(group["fused"]), bool(group["foreach"])) for group in trainer.optimizers.by_name["adam"].param_groups}
    assert ways == ({(True, False)} if after == "taped" else {(False, True)})


def test_pieces_as_they_are_come_back() -> None:
    pieces = {"first": lambda: None}
    assert without_capture(pieces) is pieces
