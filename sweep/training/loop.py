"""The training loop of one attempt: from a model and a stream to trained weights and a curve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ...model.backbone import AuxiliaryTerms, Backbone, RandomDraws
from ..checkpoints.checkpoint import Checkpoint
from ..config import TrainConfig
from ..data.batches import Batches, MarkedTargets, StepPrefetcher
from . import schedule
from .optimizer_steps import Batch, OptimizerSteps, capture_graphs, without_capture
from .optimizers import Optimizers


class Diverged(Exception):
    """Loss or gradient became NaN or infinite: a result, not a fault."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what
        super().__init__(f"{what} is not finite at step {step}")


class Stopped(Exception):
    """The attempt was asked to stop; its state has been saved."""


@dataclass(frozen=True, kw_only=True)
class ValidationPoint:
    """One point of the curve, after `step` optimizer steps."""

    step: int
    tokens: int
    wall_s: float
    """Training seconds, validation and checkpoints excluded."""
    train_loss: float
    """Cross-entropy of the step's own batch, nats per token, or per marked token with `loss_on: marked`."""
    val_loss: float
    tokens_per_s: float
    """Over the steps since the last point."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning-rate factor of the step, 0 to 1."""
    peak_memory: int | None
    """Bytes on the GPU; None on the CPU."""


UnvalidatedPoint = tuple[float, float, float]
"""Train loss, gradient norm and tokens per second of a point whose validation is still to come."""


class TrainingHooks(Protocol):
    """What the loop tells, and asks, while it runs."""

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Called after the first step, once it is done, and about once a second."""

    def point(self, point: ValidationPoint) -> None:
        """Called at every validation."""

    def should_stop(self) -> bool:
        """Whether to save and leave now; asked before every micro-batch."""

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""

    def save(self, step: int, tokens: int, wall_s: float, pending: UnvalidatedPoint | None = None) -> None:
        """Write a checkpoint."""


@dataclass
class _Clock:
    """Training time and tokens since the last point and since the last progress report."""

    wall_s: float
    started: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    last_report: float = field(default_factory=time.perf_counter)

    def rate(self) -> float:
        return self.tokens / max(time.perf_counter() - self.started, 1e-9)

    def stop(self) -> None:
        """Adds the running interval to wall_s."""
        self.wall_s += time.perf_counter() - self.started

    def start(self) -> None:
        self.started = self.last_report = time.perf_counter()
        self.tokens = 0


@dataclass
class Trainer:
    """One model on its way through its steps; `optimizers` and `step` are what a checkpoint holds beside the weights."""

    model: Backbone
    optimizers: Optimizers
    batches: Batches
    config: TrainConfig
    seed: int
    device: torch.device
    validate: Callable[[], float]
    """Validation loss of the model as it stands, nats per token."""
    validate_every: int
    watcher: TrainingHooks
    step: int = 0
    wall_s: float = 0.0
    graphs: bool = False
    """Whether steps are captured and replayed; without CUDA their pieces are done again as they are."""
    refused: Callable[[str], None] = lambda why: None
    """Told once, with the reason, when what was to be captured could not be; the training goes on as it comes."""
    room: int | None = None
    """What the marked targets of a micro-batch are filled up to, so that shapes stay (`loss_on: marked`)."""
    _pending: UnvalidatedPoint | None = None
    _saved: int = 0
    """The step that a checkpoint holds already; 0 is rebuilt from the seed."""
    _pending_metrics: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """(step, loss, gradient norm) of the steps since the last look at their values, which waits for the device."""
    _prefetcher: StepPrefetcher = field(init=False)
    step_runner: OptimizerSteps = field(init=False)

    def __post_init__(self) -> None:
        self._prefetcher = StepPrefetcher(self.batches, self.device, self.config.micro_batch, self.room)
        capture = (capture_graphs if self.device.type == "cuda" else without_capture) if self.graphs else None
        self.step_runner = OptimizerSteps(self.objective, self.optimizers, self.config, capture, self.refused)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint."""
        self.model.load_state_dict(checkpoint.model)
        self.optimizers.load_state_dict(checkpoint.optimizers)
        self.step, self.wall_s = checkpoint.step, checkpoint.wall_s
        self._saved, self._pending = checkpoint.step, checkpoint.pending
        self.step_runner.reset()

    def run(self) -> None:
        """Trains to the end. Raises Diverged, or Stopped when the watcher asks for it.

        A stop abandons the step that is under way: what is saved is the state after the last whole one. A validation
        that is left half-way by raising Stopped is taken again by whoever goes on.
        """
        steps = self.config.steps
        clock, first = _Clock(self.wall_s), self.step + 1
        self.model.train()
        if self._pending is not None:
            self._validate(clock, self._pending)
        while self.step < steps:
            done = self.advance(self.step)
            if done is None:
                if self.step > self._saved:
                    self._save(clock)
                raise Stopped
            self.step += 1
            self._pending_metrics.append((self.step, *done))
            clock.tokens += self.config.batch_tokens
            is_validation_due = self.step % self.validate_every == 0 or self.step == steps
            if is_validation_due or self.step == first or time.perf_counter() - clock.last_report >= 1.0:
                loss, norm = self._drain_metrics()
                self.watcher.progress(self.step, loss, clock.rate())
                clock.last_report = time.perf_counter()
                if is_validation_due:
                    self._validate(clock, (loss, norm, clock.rate()))
            if self.step < steps and self.watcher.should_save(self.step):
                self._save(clock)
        self.wall_s = clock.wall_s

    def _save(self, clock: _Clock) -> None:
        if self._pending_metrics:
            self._drain_metrics()
        clock.stop()
        self.watcher.save(self.step, self.step * self.config.batch_tokens, clock.wall_s)
        self._saved = self.step
        clock.start()

    def _validate(self, clock: _Clock, pending: UnvalidatedPoint) -> None:
        clock.stop()
        loss, norm, rate = pending
        try:
            validation = self.validate()
        except Stopped:
            self.watcher.save(self.step, self.step * self.config.batch_tokens, clock.wall_s, pending)
            raise
        self._pending = None
        if not math.isfinite(validation):
            raise Diverged(self.step, "validation loss")
        self.watcher.point(
            ValidationPoint(
                step=self.step,
                tokens=self.step * self.config.batch_tokens,
                wall_s=clock.wall_s,
                train_loss=loss,
                val_loss=validation,
                tokens_per_s=rate,
                grad_norm=norm,
                lr=self.lr_factor(self.step - 1),
                peak_memory=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            )
        )
        self.model.train()
        clock.start()

    def _drain_metrics(self) -> tuple[float, float]:
        """Loss and gradient norm of the last step. Raises Diverged at the first step whose values are not finite."""
        steps, losses, norms = zip(*self._pending_metrics, strict=True)
        self._pending_metrics.clear()
        values = torch.stack([torch.stack(losses).double(), torch.stack(norms).double()]).tolist()
        for step, loss, norm in zip(steps, *values, strict=True):
            for value, what in ((loss, "loss"), (norm, "gradient norm")):
                if not math.isfinite(value):
                    raise Diverged(step, what)
        return values[0][-1], values[1][-1]

    def lr_factor(self, step: int) -> float:
        config = self.config
        return schedule.lr_factor(
            step, config.steps, constant=config.constant, decay=config.schedule, warmup=config.warmup_steps
        )

    def advance(self, step: int) -> tuple[Tensor, Tensor] | None:
        """One optimizer step; returns the batch's mean cross-entropy and the gradient norm, still on the device.

        None when it was asked to stop: then nothing has changed, since draws depend on the step alone. On CUDA it only
        queues work and never waits for it, but for the one step in which graphs are captured.
        """
        taken = self._prefetcher.take(step)
        inputs, targets = taken.inputs, taken.targets
        rows = self.config.micro_batch
        for micro in range(self.config.accumulation):
            if self.watcher.should_stop():
                self.step_runner.discard_step()
                return None
            part = slice(micro * rows, (micro + 1) * rows)
            marked = None if taken.marked is None else taken.marked[micro]
            self.step_runner.run_micro_batch(self.draw_batch(inputs[part], targets[part], step, micro, marked))
        done = self.step_runner.finish_step(self.lr_factor(step))
        if step + 1 < self.config.steps:
            self._prefetcher.prepare(step + 1)
        return done

    def draw_batch(
        self, inputs_BT: Tensor, targets_BT: Tensor, step: int, micro: int, marked: MarkedTargets | None = None
    ) -> Batch:
        """A micro-batch with all that is drawn for it."""
        config = self.config
        auxiliary = AuxiliaryTerms(
            regularizer=config.regularizer,
            sketch=config.regularizer_sketch,
            distractor=config.distractor,
            distractor_count=config.distractor_count,
            seed=self.seed,
            step=step,
            micro=micro,
        )
        drawn: RandomDraws = self.model.draw(auxiliary, *inputs_BT.shape)
        return Batch(inputs_BT, targets_BT, drawn, marked)

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Objective and mean cross-entropy of one micro-batch (docs/mechanisms.md, "Regularizers" and "Training").

        (1 - alpha) CE + alpha reg + lambda distractor. "mean": CE per token and the whole averaged over micro-batches;
        "sum": CE summed over tokens and micro-batches, auxiliary terms added once per micro-batch. With `marked` the mean is
        over the targets of the whole step that count, however they fall into micro-batches.
        """
        config = self.config
        inputs_BT, targets_BT, drawn, marked = batch
        features = self.model.features(inputs_BT, auxiliary=drawn)
        if marked is None:
            total = self.model.total_loss(features.hidden_BTD, targets_BT)
            mean = total / targets_BT.numel()
        else:
            hidden_1MD = features.hidden_BTD.flatten(0, 1).index_select(0, marked.places_M)[None]
            total = self.model.total_loss(hidden_1MD, marked.targets_M[None])
            mean = total * marked.share.to(total.dtype)
        objective = total if config.loss_reduction == "sum" else mean
        if features.regularizer is not None:
            alpha = config.regularizer_weight
            objective = (1 - alpha) * objective + alpha * features.regularizer
        if features.distractor is not None:
            objective = objective + config.distractor_weight * features.distractor
        return (objective if config.loss_reduction == "sum" else objective / config.accumulation), mean
