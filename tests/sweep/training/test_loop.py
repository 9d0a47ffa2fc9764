"""The training loop: its objective, its gradients, its resumption, its ends."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone
from atma_sweep.sweep.attempt import cell_runner
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.data.batches import Batches
from atma_sweep.sweep.grid.settings import AXES
from atma_sweep.sweep.training.loop import Diverged, Stopped, Trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_training import LEVELS, Watch, small_trainer
from small_training import recipe as small_recipe
from tiers import shared_out
from torch import Tensor

Network = Callable[..., Backbone]
RESUMED = ("attn_type=polar", "dropout")
"""Levels whose trainings are resumed in the first tier."""
recipe = functools.partial(small_recipe, tokens=4 * 24)


def trainer(
    model: Backbone, config: TrainConfig, watch: Watch | None = None, *, every: int = 3, seed: int = 0
) -> Trainer:
    """Its validation loss is a sum over the weights."""

    def validate() -> float:
        return float(sum(p.detach().double().square().sum() for p in model.parameters()))

    return small_trainer(model, config, watch, seed=seed, every=every, validate=validate)


def gradients(model: Backbone) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def accumulate(model: Backbone, config: TrainConfig, step: int = 0) -> tuple[dict[str, Tensor], float]:
    """Gradients and mean cross-entropy of one step of the loop, without the update."""
    training = trainer(model, config)
    inputs, targets = training.batches.step(step)
    losses = []
    for micro in range(config.accumulation):
        part = slice(micro * config.micro_batch, (micro + 1) * config.micro_batch)
        objective, mean = training.objective(training.draw_batch(inputs[part], targets[part], step, micro))
        objective.backward()
        losses.append(mean.item())
    return gradients(model), sum(losses) / len(losses)


# --- the objective ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["plain", "window", "memory"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_accumulation_equals_a_big_batch(network: Network, level: str, reduction: str) -> None:
    settings = LEVELS[level][0]
    models = [network(awake=True, dtype=torch.float64, **settings) for _ in range(3)]
    gradients = [
        accumulate(model, recipe(micro_batch=rows, loss_reduction=reduction))
        for model, rows in zip(models, (1, 2, 4), strict=True)
    ]
    for grads, loss in gradients[1:]:
        assert loss == pytest.approx(gradients[0][1], abs=1e-12)
        assert grads.keys() == gradients[0][0].keys()
        for name, grad in grads.items():
            assert (grad - gradients[0][0][name]).abs().max() <= 1e-12 * (24 if reduction == "sum" else 1), name


def test_summed_and_mean_losses_differ_by_the_tokens_of_a_step(network: Network) -> None:
    mean, _ = accumulate(network(awake=True, dtype=torch.float64), recipe())
    total, _ = accumulate(network(awake=True, dtype=torch.float64), recipe(loss_reduction="sum"))
    for name, grad in mean.items():
        assert (24 * grad - total[name]).abs().max() <= 1e-11


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("regularizer", "distractor"), [
    ("baseline", False), ("baseline", True), ("weak", False), ("weak", True), ("strong", True), ("zipfian", True),
])  # fmt: skip
def test_the_objective_is_the_formula(network: Network, regularizer: str, distractor: bool, reduction: str) -> None:
    """(1 - alpha) CE + alpha reg + lambda distractor, terms taken one by one from the network."""
    config = recipe(
        regularizer=regularizer,
        distractor=distractor,
        loss_reduction=reduction,
        regularizer_weight=0.25,
        distractor_weight=0.5,
    )
    model = network(awake=True, dtype=torch.float64)
    training = trainer(model, config, seed=4)
    inputs, targets = (part[:2] for part in training.batches.step(2))
    objective, mean = training.objective(training.draw_batch(inputs, targets, 2, 1))

    auxiliary = AuxiliaryTerms(
        regularizer=regularizer, sketch=5, distractor=distractor, distractor_count=None, seed=4, step=2, micro=1
    )
    terms = model.features(inputs, auxiliary=auxiliary)
    cross_entropy = torch.nn.functional.cross_entropy(
        model(inputs).flatten(0, 1), targets.flatten(), reduction="sum" if reduction == "sum" else "mean"
    )
    alpha = 0.25 if regularizer != "baseline" else 0.0
    expected = (1 - alpha) * cross_entropy.item()
    if regularizer != "baseline":
        assert terms.regularizer is not None
        expected += alpha * terms.regularizer.item()
    if distractor:
        assert terms.distractor is not None
        expected += 0.5 * terms.distractor.item()
    expected /= 1 if reduction == "sum" else config.accumulation
    assert objective.item() == pytest.approx(expected, rel=1e-12)
    assert mean.item() == pytest.approx(cross_entropy.item() / (12 if reduction == "sum" else 1), rel=1e-12)


def test_weights_of_zero_switch_the_terms_off_exactly(network: Network) -> None:
    off, _ = accumulate(network(awake=True, dtype=torch.float64), recipe())
    config = recipe(regularizer="weak", distractor=True, regularizer_weight=0, distractor_weight=0)
    on, _ = accumulate(network(awake=True, dtype=torch.float64), config)
    assert max(float((on[name] - off[name]).abs().max()) for name in off) <= 1e-14


def test_draws_differ_between_steps_micro_batches_and_seeds(network: Network) -> None:
    config = recipe(regularizer="weak", distractor=True)
    model = network(awake=True, dtype=torch.float64)
    inputs, targets = (part[:2] for part in trainer(model, config).batches.step(0))

    def objective(training: Trainer, step: int, micro: int) -> float:
        return training.objective(training.draw_batch(inputs, targets, step, micro))[0].item()

    values = {
        (seed, step, micro): objective(trainer(model, config, seed=seed), step, micro)
        for seed in (0, 1) for step in (0, 1) for micro in (0, 1)
    }  # fmt: skip
    assert len(set(values.values())) == 8
    assert objective(trainer(model, config), 1, 1) == values[0, 1, 1]


# --- a step -------------------------------------------------------------------------------------------------------


def test_step_clips_the_global_norm_and_reports_it_unclipped(network: Network) -> None:
    grads, loss = accumulate(network(awake=True), recipe())
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    model = network(awake=True)
    training = trainer(model, recipe(clip=norm / 4))
    clipped: list[dict[str, Tensor]] = []
    training.optimizers.update = lambda: clipped.append(gradients(model))  # type: ignore[method-assign]
    actual_loss, actual_norm = training.train_step(0)
    assert float(actual_norm) == pytest.approx(norm, rel=1e-5)
    assert float(actual_loss) == pytest.approx(loss, rel=1e-6)
    for name, grad in clipped[0].items():
        assert (grad - grads[name] / 4).abs().max() <= 1e-5 * (1 + grads[name].abs().max()), name


def test_a_small_gradient_is_not_clipped(network: Network) -> None:
    grads, _ = accumulate(network(awake=True), recipe())
    model = network(awake=True)
    training = trainer(model, recipe(clip=1e6))
    seen: list[dict[str, Tensor]] = []
    training.optimizers.update = lambda: seen.append(gradients(model))  # type: ignore[method-assign]
    training.train_step(0)
    assert all(torch.equal(seen[0][name], grads[name]) for name in grads)


@pytest.mark.parametrize(("init", "dead"), [("zero-ends-and-conv-in", True), ("zero-ends", False)])
def test_published_convolutions_never_train_and_intended_ones_do(network: Network, init: str, dead: bool) -> None:
    """docs/reference/mechanisms.md, "Decisions", through whole training steps with Muon, decay and clipping."""
    model = network(init=init)
    convs = [block.mix for block in model.blocks if not hasattr(block.mix, "mixer")]
    start = [(mix.in_proj.weight.detach().clone(), mix.conv.weight.detach().clone()) for mix in convs]
    training = trainer(model, recipe(tokens=24 * 5))
    grads: list[float] = []
    update = training.optimizers.update

    def spy() -> None:
        for mix in convs:
            parts = (mix.in_proj.weight, mix.in_proj.bias, mix.conv.weight, mix.out_proj.weight)
            grads.append(max(float(p.grad.abs().max()) for p in parts))
        update()

    training.optimizers.update = spy  # type: ignore[method-assign]
    training.run()
    assert len(grads) == 2 * 5
    if dead:
        assert grads == [0.0] * 10
        for mix, (weight, _) in zip(convs, start, strict=True):
            assert torch.equal(mix.in_proj.weight, weight)
            assert not mix.in_proj.weight.any()
            assert mix.out_proj.bias.abs().max() > 0, "the one thing that learns"
    else:
        assert min(grads[-2:]) > 0
        for mix, (weight, taps) in zip(convs, start, strict=True):
            assert (mix.in_proj.weight - weight).abs().max() > 1e-3
            assert (mix.conv.weight - taps).abs().max() > 1e-3


@pytest.mark.thorough
def test_training_learns_a_simple_stream(network: Network) -> None:
    """The loss of the last of forty steps is 1.29 nats, 0.36 below the bound; rounding moves it far less."""
    model = network()
    config = recipe(tokens=24 * 40)
    watch = Watch()
    batches = Batches([(np.arange(400) % 7).astype(np.uint16)], 6, 4, 0, True)
    replace(trainer(model, config, watch, every=10), batches=batches).run()
    assert watch.points[0].train_loss < math.log(29)
    assert watch.points[-1].train_loss < math.log(7) - 0.3, "more than which of the seven tokens are in use"


# --- the run ------------------------------------------------------------------------------------------------------


def test_validation_points_hold_the_training_state(network: Network) -> None:
    watch = Watch()
    training = trainer(network(), recipe(tokens=24 * 7 + 23), watch, every=3)
    training.run()
    assert [p.step for p in watch.points] == [3, 6, 7]
    assert [p.tokens for p in watch.points] == [72, 144, 168]
    assert [p.lr for p in watch.points] == pytest.approx([training.lr_factor(step) for step in (2, 5, 6)])
    assert watch.points[0].lr == 1.0 > watch.points[1].lr > watch.points[2].lr > 0
    assert all(p.peak_memory is None and p.tokens_per_s > 0 and p.grad_norm > 0 for p in watch.points)
    walls = [p.wall_s for p in watch.points]
    assert walls == sorted(walls)
    assert training.wall_s == walls[-1] > 0
    assert (training.step, watch.messages) == (7, [1, 3, 6, 7])
    assert watch.points[-1].val_loss == training.validate()
    assert watch.points[0].val_loss != watch.points[1].val_loss


def test_validation_does_not_disturb_training(network: Network) -> None:
    often, seldom = network(), network()
    trainer(often, recipe(), every=1).run()
    trainer(seldom, recipe(), every=100).run()
    assert all(torch.equal(a, b) for a, b in zip(often.parameters(), seldom.parameters(), strict=True))
    assert often.training


def test_checkpoints_are_written_when_due_but_not_at_the_end(network: Network) -> None:
    watch = Watch(saves=(1, 3, 4))
    trainer(network(), recipe(), watch).run()
    assert watch.saved == [(1, 24), (3, 72)]


def test_a_stop_saves_first(network: Network, tmp_path: Path) -> None:
    watch = Watch(folder=tmp_path, stop=2)
    training = trainer(network(), recipe(), watch)
    with pytest.raises(Stopped):
        training.run()
    assert watch.saved == [(2, 48)]
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.tokens) == (2, 48)
    assert newest.wall_s > 0


def test_a_stop_at_the_last_step_finishes(network: Network) -> None:
    watch = Watch(stop=4)
    trainer(network(), recipe(), watch).run()
    assert watch.saved == []
    assert watch.points[-1].step == 4


def numbers(*watches: Watch) -> list[tuple[float, ...]]:
    """The curve, without what depends on the clock."""
    return [(p.step, p.train_loss, p.val_loss, p.grad_norm, p.lr) for watch in watches for p in watch.points]


def same(a: Backbone, b: Backbone) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def overrides(axis: str, level: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and training settings of one level of one axis."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "train": {}}
    for path, value in AXES[axis].levels()[level].items():
        section, name = path.split(".")
        sections[section][name] = value
    return sections["model"], sections["train"]


EVERY_LEVEL = {
    f"{axis}={level}": overrides(axis, level)
    for axis in AXES
    for level in AXES[axis].levels()
    if ":" not in level and (axis, level) != ("attn_type", "none")
}
"""Levels of all axes but layers of fla, which need a GPU, and no mixer, which needs a memory."""


@pytest.mark.parametrize("level", shared_out([*EVERY_LEVEL, *LEVELS], lambda level: level in RESUMED))
def test_resuming_anywhere_equals_never_having_stopped(network: Network, tmp_path: Path, level: str) -> None:
    """A stop before every micro-batch there is: between steps, and in the midst of one."""
    settings, train_settings = (EVERY_LEVEL | LEVELS)[level]
    config = recipe(**train_settings)
    assert config.accumulation == 2
    straight, uninterrupted = network(**settings), Watch()
    trainer(straight, config, uninterrupted, every=2).run()
    assert uninterrupted.n_polls == 8
    for ask in range(1, uninterrupted.n_polls + 1):
        steps = (ask - 1) // 2
        folder = tmp_path / str(ask)
        first = Watch(folder=folder, stop_at_ask=ask)
        stopped = network(**settings)
        with pytest.raises(Stopped):
            trainer(stopped, config, first, every=2).run()
        assert first.saved == ([(steps, 24 * steps)] if steps else [])
        assert gradients(stopped) == {}
        # another seed: everything that counts must come out of the checkpoint
        resumed, second = network(seed=99 if steps else 0, **settings), Watch()
        training = trainer(resumed, config, second, every=2)
        state = checkpoint.load_newest(folder)
        if state is not None:
            training.restore(state)
        assert training.step == steps
        training.run()
        assert same(straight, resumed), f"after a stop at ask {ask}"
        assert numbers(first, second) == numbers(uninterrupted)


@pytest.mark.thorough
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(asks=st.lists(st.integers(1, 12), max_size=5), saves=st.sets(st.integers(1, 5)))
def test_any_chain_of_stops_and_saves_gives_the_same_run(
    network: Network, tmp_path_factory: pytest.TempPathFactory, asks: list[int], saves: set[int]
) -> None:
    model, train_settings = LEVELS["everything"]
    config = recipe(tokens=6 * 24, **train_settings)
    straight, uninterrupted = network(**model), Watch()
    trainer(straight, config, uninterrupted, every=1).run()
    folder, watches = tmp_path_factory.mktemp("chain"), []
    for ask in [*asks, None]:
        watch = Watch(folder=folder, stop_at_ask=ask, saves=tuple(saves))
        watches.append(watch)
        training = trainer(network(**model), config, watch, every=1)
        state = checkpoint.load_newest(folder)
        if state is not None:
            training.restore(state)
        with contextlib.suppress(Stopped):
            training.run()
        if training.step == config.steps:
            break
    assert same(straight, training.model)
    assert numbers(*watches) == numbers(uninterrupted)


def test_stop_after_a_save_or_resumption_writes_no_checkpoint(network: Network, tmp_path: Path) -> None:
    watch = Watch(folder=tmp_path, stop=2, saves=(2,))
    with pytest.raises(Stopped):
        trainer(network(), recipe(), watch).run()
    assert watch.saved == [(2, 48)]
    again = Watch(folder=tmp_path, stop_at_ask=1)
    training = trainer(network(), recipe(), again)
    state = checkpoint.load_newest(tmp_path)
    assert state is not None
    training.restore(state)
    with pytest.raises(Stopped):
        training.run()
    assert again.saved == []


@pytest.fixture
def exactly() -> Iterator[Callable[[], None]]:
    """Switches deterministic operations on; off again after the test."""
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield cell_runner.enable_determinism
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if before is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = before


@pytest.mark.thorough
@pytest.mark.parametrize(
    "level", ["plain", "window", "memory", "everything", "strong, summed", "reg_mode=weak", "reg_mode=discrete"]
)
def test_deterministic_operations_change_nothing_on_the_cpu(
    network: Network, level: str, exactly: Callable[[], None]
) -> None:
    settings, training = (EVERY_LEVEL | LEVELS)[level]
    plain, free = network(awake=True, **settings), Watch()
    trainer(plain, recipe(**training), free, every=1).run()
    exactly()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    bound, watched = network(awake=True, **settings), Watch()
    trainer(bound, recipe(**training, deterministic=True), watched, every=1).run()
    assert same(plain, bound)
    assert numbers(watched) == numbers(free)


def test_resuming_a_finished_run_does_nothing(network: Network, tmp_path: Path) -> None:
    model = network()
    training = trainer(model, recipe())
    training.run()
    before = [p.detach().clone() for p in model.parameters()]
    watch = Watch()
    again = trainer(model, recipe(), watch)
    again.step, again.wall_s = 4, 1.5
    again.run()
    assert (watch.points, again.wall_s) == ([], 1.5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


# --- divergence ---------------------------------------------------------------------------------------------------


def test_a_poisoned_weight_is_divergence(network: Network) -> None:
    model = network()
    training = trainer(model, recipe(), every=1)
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    with pytest.raises(Diverged, match="loss is not finite at step 1") as caught:
        training.run()
    assert (caught.value.step, caught.value.what) == (1, "loss")


def test_an_absurd_learning_rate_is_divergence(network: Network) -> None:
    config = recipe(tokens=24 * 30, scalar_lr=1e18, embedding_lr=1e18, muon_lr=1e18, head_lr=1e18)
    with pytest.raises(Diverged, match=r"is not finite at step \d+"):
        trainer(network(), config, every=1).run()


def test_an_infinite_gradient_alone_is_divergence(network: Network) -> None:
    model = network(awake=True)
    model.head.bias.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(Diverged, match="gradient norm is not finite at step 1"):
        trainer(model, recipe(), every=1).run()


def test_divergence_names_the_failed_step_when_read_later(network: Network) -> None:
    model, watch = network(awake=True), Watch(saves=(6,))
    training = trainer(model, recipe(tokens=24 * 8), watch, every=100)
    update = training.optimizers.update

    def poison() -> None:
        update()
        if training.step == 2:  # the third update, so the fourth step is the first to see it
            with torch.no_grad():
                model.head.bias[3] = float("inf")

    training.optimizers.update = poison  # type: ignore[method-assign]
    with pytest.raises(Diverged, match="loss is not finite at step 4") as caught:
        training.run()
    assert (caught.value.step, training.step, watch.saved, watch.points) == (4, 6, [], [])


def test_the_curve_up_to_a_divergence_stays(network: Network) -> None:
    model, watch = network(awake=True), Watch()
    training = trainer(model, recipe(tokens=24 * 8), watch, every=1)
    training.validate = lambda: 1.0 if training.step < 3 else float("nan")
    with pytest.raises(Diverged, match="validation loss is not finite at step 3"):
        training.run()
    assert [point.step for point in watch.points] == [1, 2]
    assert all(math.isfinite(point.train_loss + point.grad_norm) for point in watch.points)


def test_a_diverged_state_is_never_saved_nor_reported(network: Network) -> None:
    model, watch = network(), Watch(saves=(1, 2))
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    with pytest.raises(Diverged):
        trainer(model, recipe(), watch, every=100).run()
    assert (watch.saved, watch.points) == ([], [])


@pytest.mark.parametrize("validation", [1, 2])
def test_interrupted_validation_is_repeated(network: Network, tmp_path: Path, validation: int) -> None:
    """At a point within the run and at its end: the curve has the point once, with the numbers of its step."""
    straight, uninterrupted = network(), Watch()
    trainer(straight, recipe(), uninterrupted, every=2).run()
    first, stopped = Watch(folder=tmp_path), network()
    training = trainer(stopped, recipe(), first, every=2)
    validate, calls = training.validate, iter(range(9))

    def interrupted() -> float:
        if next(calls) == validation - 1:
            raise Stopped
        return validate()

    training.validate = interrupted
    with pytest.raises(Stopped):
        training.run()
    assert first.saved == [(2 * validation, 48 * validation)]
    state = checkpoint.load_newest(tmp_path)
    assert state is not None
    resumed, second = network(seed=99), Watch()
    training = trainer(resumed, recipe(), second, every=2)
    training.restore(state)
    training.run()
    assert same(straight, resumed)
    assert numbers(first, second) == numbers(uninterrupted)
    assert [point.step for point in (*first.points, *second.points)] == [2, 4]
