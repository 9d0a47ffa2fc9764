"""Training loop of one attempt: from a model and a stream of batches to trained weights and a curve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ...model.backbone import AuxiliaryTerms, Backbone, RandomDraws
from ..checkpoints.checkpoint import Checkpoint
from ..config import TrainConfig
from ..data.batches import Batches, MarkedTargets, StepPrefetcher
from ..ranks.group import Ranks
from ..ranks.shards import broadcast_model
from . import schedule
from .optimizer_steps import Batch, OptimizerSteps, capture_graphs, without_capture
from .optimizers import Optimizers


class Diverged(Exception):
    """Loss or gradient became NaN or infinite: a result of the cell, not a fault of the machine.

    `step` is the number of optimizer steps done, the bad one included; `what` is "loss", "gradient norm" or "validation
    loss".
    """

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what
        super().__init__(f"{what} is not finite at step {step}")


class Stopped(Exception):
    """Training or measuring was stopped on request; a training's state has been saved before."""


@dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """Point of the training curve after `step` optimizer steps, without a validation."""

    step: int
    tokens: int
    """Tokens trained on so far."""
    wall_s: float
    """Training seconds, validation and checkpoints excluded; interpolated between two readings of the device."""
    train_loss: float
    """Cross-entropy of the last step's own batch, nats per token, or per marked token with `loss_on: marked`."""
    tokens_per_s: float
    """Training tokens per second since the previous validation or checkpoint, or since the attempt's start."""
    grad_norm: float
    """Global gradient norm of the last step before clipping; 0 if loss scaling skipped it."""
    lr: float
    """Learning-rate factor of the last step, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ValidationPoint(TrainingPoint):
    """Point of the training curve with a validation."""

    val_loss: float
    """Validation cross-entropy, nats per token."""
    peak_memory: int | None
    """Peak bytes allocated on the GPU by torch since the process started; None on the CPU."""


_STOP, _SAVE, _REPORT = 1, 2, 4
"""Decisions of rank 0, which every rank follows in the same step."""

UnvalidatedPoint = tuple[float, float, float]
"""(train loss, gradient norm, tokens per second) of a point whose validation has not been done yet."""


class TrainingHooks(Protocol):
    """Callbacks of the training loop: progress, validation points, checkpoints and stop requests."""

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Report progress; called after the attempt's first step, then about once a second and before every validation.

        Args:
            step: optimizer steps done.
            loss: cross-entropy of the last step's batch, nats per token.
            tokens_per_s: training tokens per second since the last point or checkpoint.
        """

    def point(self, point: ValidationPoint) -> None:
        """Record a validation point; called after every validation."""

    def training_points(self, points: Sequence[TrainingPoint]) -> None:
        """Record points between validations, one or more; called at most once before each progress or checkpoint."""

    def should_stop(self) -> bool:
        """Return True to stop now, after a checkpoint of the last complete step; called before every micro-batch."""

    def should_save(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` steps; called after every step but the last."""

    def save(self, step: int, tokens: int, wall_s: float, pending: UnvalidatedPoint | None = None) -> None:
        """Write a checkpoint of the weights and optimizers as they are now.

        Args:
            step: optimizer steps done.
            tokens: tokens trained on.
            wall_s: training seconds over all attempts, validation and checkpoints excluded.
            pending: point at this step whose validation has not been done yet; None if there is none.
        """


@dataclass
class _Clock:
    """Training seconds, and tokens since the last validation point, checkpoint or start."""

    wall_s: float
    started: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    last_report: float = field(default_factory=time.perf_counter)

    def is_report_due(self) -> bool:
        return time.perf_counter() - self.last_report >= 1.0

    def elapsed(self) -> float:
        """Return the training seconds up to now; the clock must be running."""
        return self.wall_s + time.perf_counter() - self.started

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
    """Training of one model; `optimizers`, `step` and `wall_s` are stored in checkpoints together with the weights."""

    model: Backbone
    optimizers: Optimizers
    batches: Batches
    config: TrainConfig
    seed: int
    device: torch.device
    validate: Callable[[], float]
    """Function that returns the validation loss of the model in its current state, nats per token."""
    validate_every: int
    """Steps between validations."""
    hooks: TrainingHooks
    step: int = 0
    """Optimizer steps done."""
    wall_s: float = 0.0
    """Training seconds so far, validation and checkpoints excluded."""
    graphs: bool = False
    """True to capture steps as CUDA graphs and replay them; without CUDA the captured parts are simply called again."""
    on_capture_refused: Callable[[str], None] = lambda why: None
    """Called once with the reason when steps cannot be captured; training goes on without capture."""
    marked_capacity: int | None = None
    """Number that a micro-batch's marked targets are padded to, so that shapes stay fixed; None: no padding."""
    _pending: UnvalidatedPoint | None = None
    """Point of the restored checkpoint whose validation has not been done yet."""
    _saved: int = 0
    """Step of the newest checkpoint; 0 if there is none, because step 0 is rebuilt from the seed."""
    _pending_metrics: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """(step, loss, gradient norm) of the steps whose values have not been read from the device yet."""
    _read: tuple[int, float] = (0, 0.0)
    """Last step whose values have been read from the device, and the training seconds at that time."""
    _decisions: int = 0
    """Rank 0's decisions, a sum of `_STOP`, `_SAVE` and `_REPORT`; used with several ranks alone."""
    _prefetcher: StepPrefetcher = field(init=False)
    step_runner: OptimizerSteps = field(init=False)

    def __post_init__(self) -> None:
        """Create the prefetcher of batches and the runner of steps; steps are captured if `graphs` is set."""
        share = slice(self.ranks.rank, None, self.ranks.size) if self.ranks.size > 1 else slice(None)
        self._prefetcher = StepPrefetcher(
            self.batches, self.device, self.config.micro_batch, self.marked_capacity, share
        )
        capture = (capture_graphs if self.device.type == "cuda" else without_capture) if self.graphs else None
        self.step_runner = OptimizerSteps(
            self.objective, self.optimizers, self.config, capture, self.on_capture_refused
        )

    @property
    def ranks(self) -> Ranks:
        """Ranks that train the model together; rank 0 takes the decisions of the hooks."""
        return self.optimizers.ranks

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load weights, optimizers, step and training time of a checkpoint, and drop captured CUDA graphs.

        A point of the checkpoint that was not validated yet is validated by `run` first. Weights and optimizers are
        those of rank 0's checkpoint.
        """
        if self.ranks.is_first:
            self.model.load_state_dict(checkpoint.model)
        broadcast_model(self.ranks, self.model)
        self.optimizers.load_state_dict(checkpoint.optimizers)
        self.step, self.wall_s = checkpoint.step, checkpoint.wall_s
        self._saved, self._pending = checkpoint.step, checkpoint.pending
        self.step_runner.reset()

    def run(self) -> None:
        """Train from the current step to the last one, with validations and checkpoints as the hooks ask for them.

        Validates every `validate_every` steps and after the last one. Nothing is saved at the end. If all steps are
        done already, only a pending validation runs. A stop discards the step in progress; the checkpoint holds the
        state after the last complete one. A validation that raises Stopped is repeated by the attempt that resumes from
        the checkpoint. Losses are read from the device once a second, so a divergence may be noticed some steps late,
        but never after a checkpoint. Those of the steps of `schedule.is_curve_step` become points of the curve.

        Raises:
            Diverged: a loss or gradient norm, or a validation loss, is not finite.
            Stopped: the hooks asked to stop; a checkpoint was written if there was a step since the last one.
        """
        steps = self.config.steps
        clock, first = _Clock(self.wall_s), self.step + 1
        self._read = self.step, self.wall_s
        self.model.train()
        if self._pending is not None:
            self._validate(clock, self._pending)
        self._agree(clock)
        while self.step < steps:
            done = self.train_step(self.step)
            if done is None:
                if self.step > self._saved:
                    self._save(clock)
                raise Stopped
            self.step += 1
            self._pending_metrics.append((self.step, *done))
            clock.tokens += self.config.batch_tokens
            is_validation_due = self._is_validated(self.step)
            if is_validation_due or self.step == first or self._is_report_due(clock):
                loss, norm = self._drain_metrics(clock)
                self.hooks.progress(self.step, loss, clock.rate())
                clock.last_report = time.perf_counter()
                if is_validation_due:
                    self._validate(clock, (loss, norm, clock.rate()))
            self._agree(clock)
            if self.step < steps and self._should_save():
                self._save(clock)
        self.wall_s = clock.wall_s

    def compile_first(self) -> None:
        """Let rank 0 compile the network while the others wait, so that they read the compiled code from its cache.

        Rank 0 runs its first micro-batch forward and backward and drops the gradients. Nothing happens on one rank.
        """
        if self.ranks.size > 1 and self.step < self.config.steps:
            self.ranks.first(self._rehearse)

    def _rehearse(self) -> None:
        """Run the first micro-batch of the next step forward and backward, and drop its gradients."""
        batch, part = self._prefetcher.get(self.step), slice(self.config.micro_batch)
        marked = None if batch.marked is None else batch.marked[0]
        objective, _ = self.objective(self.draw_batch(batch.inputs[part], batch.targets[part], self.step, 0, marked))
        self.optimizers.scaled(objective).backward()
        self.optimizers.zero_grad()

    def _agree(self, clock: _Clock) -> None:
        """With several ranks, take over rank 0's decisions: stop before the next step, save now, report after it."""
        if self.ranks.size > 1:
            decisions = 0
            if self.ranks.is_first and self.step < self.config.steps:
                decisions |= _STOP * self.hooks.should_stop()
                decisions |= _SAVE * (self.step > 0 and self.hooks.should_save(self.step))
                decisions |= _REPORT * clock.is_report_due()
            self._decisions = self.ranks.agree_number(decisions)

    def _should_stop(self) -> bool:
        return bool(self._decisions & _STOP) if self.ranks.size > 1 else self.hooks.should_stop()

    def _should_save(self) -> bool:
        return bool(self._decisions & _SAVE) if self.ranks.size > 1 else self.hooks.should_save(self.step)

    def _is_report_due(self, clock: _Clock) -> bool:
        return bool(self._decisions & _REPORT) if self.ranks.size > 1 else clock.is_report_due()

    def _save(self, clock: _Clock) -> None:
        """Check pending metrics, then write a checkpoint through the hooks, the clock stopped.

        Raises:
            Diverged: a loss or gradient norm since the last check is not finite; nothing was written.
        """
        if self._pending_metrics:
            self._drain_metrics(clock)
        clock.stop()
        self.hooks.save(self.step, self.step * self.config.batch_tokens, clock.wall_s)
        self._saved = self.step
        clock.start()

    def _validate(self, clock: _Clock, pending: UnvalidatedPoint) -> None:
        """Validate the model and report the point to the hooks, with the clock stopped.

        The model is in training mode afterwards.

        Args:
            clock: training clock; restarted afterwards.
            pending: (train loss, gradient norm, tokens per second) of the point.

        Raises:
            Diverged: the validation loss is not finite; no point was reported.
            Stopped: the validation was stopped; a checkpoint with the pending point has been written.
        """
        clock.stop()
        loss, norm, rate = pending
        try:
            validation = self.validate()
        except Stopped:
            self.hooks.save(self.step, self.step * self.config.batch_tokens, clock.wall_s, pending)
            raise
        self._pending = None
        if not math.isfinite(validation):
            raise Diverged(self.step, "validation loss")
        self.hooks.point(
            ValidationPoint(
                **vars(self._training_point(self.step, clock.wall_s, loss, norm, rate)),
                val_loss=validation,
                peak_memory=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            )
        )
        self.model.train()
        clock.start()

    def _is_validated(self, step: int) -> bool:
        return step % self.validate_every == 0 or step == self.config.steps

    def _drain_metrics(self, clock: _Clock) -> tuple[float, float]:
        """Read the pending metrics from the device (waits for it), forget them, and report points of the curve.

        There must be at least one. Steps that are validated become points with their validation instead.

        Returns:
            (loss, gradient norm) of the last step.

        Raises:
            Diverged: a value is not finite; it names the first such step. Points before it have been reported.
        """
        steps, losses, norms = zip(*self._pending_metrics, strict=True)
        self._pending_metrics.clear()
        values = torch.stack([torch.stack(losses).double(), torch.stack(norms).double()]).tolist()
        (read_step, read_s), rate = self._read, clock.rate()
        self._read = self.step, clock.elapsed()
        step_s = (self._read[1] - read_s) / max(1, self.step - read_step)
        points, diverged = [], None
        for step, loss, norm in zip(steps, *values, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                diverged = Diverged(step, "gradient norm" if math.isfinite(loss) else "loss")
                break
            if schedule.is_curve_step(step, self.config.steps) and not self._is_validated(step):
                wall_s = read_s + step_s * (step - read_step)
                points.append(self._training_point(step, wall_s, loss, norm, rate))
        if points:
            self.hooks.training_points(points)
        if diverged is not None:
            raise diverged
        return values[0][-1], values[1][-1]

    def _training_point(self, step: int, wall_s: float, loss: float, norm: float, rate: float) -> TrainingPoint:
        """Return the point of the curve after `step` steps.

        Args:
            step: optimizer steps done.
            wall_s: training seconds.
            loss: cross-entropy of the step's batch, nats per token.
            norm: gradient norm of the step.
            rate: training tokens per second.
        """
        return TrainingPoint(
            step=step,
            tokens=step * self.config.batch_tokens,
            wall_s=wall_s,
            train_loss=loss,
            tokens_per_s=rate,
            grad_norm=norm,
            lr=self.lr_factor(step - 1),
        )

    def lr_factor(self, step: int) -> float:
        """Return the factor on every learning rate at `step`, counted from 0, by the config's schedule."""
        config = self.config
        return schedule.lr_factor(
            step, config.steps, constant=config.constant, decay=config.schedule, warmup=config.warmup_steps
        )

    def train_step(self, step: int) -> tuple[Tensor, Tensor] | None:
        """Run optimizer step `step` (0-based); return the batch's mean cross-entropy and the gradient norm.

        Both are scalars on the device, the norm before clipping. Returns None if the hooks asked to stop before one of
        the micro-batches; weights and optimizers are then unchanged, and the step can be repeated exactly, because
        random draws depend on the step alone. On CUDA the call only queues work and does not wait for it, except in the
        step that captures graphs and with loss scaling. Also reads the next step's batch. `Trainer.step` is not
        changed.

        Raises:
            DataError: with `loss_on: marked`, no target of this or the next step is marked.
        """
        step_batch = self._prefetcher.get(step)
        inputs, targets = step_batch.inputs, step_batch.targets
        rows = self.config.micro_batch
        for index, micro in enumerate(range(self.ranks.rank, self.config.accumulation, self.ranks.size)):
            if self._should_stop():
                self.step_runner.discard_step()
                return None
            part = slice(index * rows, (index + 1) * rows)
            marked = None if step_batch.marked is None else step_batch.marked[index]
            self.step_runner.run_micro_batch(self.draw_batch(inputs[part], targets[part], step, micro, marked))
        done = self.step_runner.finish_step(self.lr_factor(step))
        if step + 1 < self.config.steps:
            self._prefetcher.prepare(step + 1)
        return done

    def draw_batch(
        self, inputs_BT: Tensor, targets_BT: Tensor, step: int, micro: int, marked: MarkedTargets | None = None
    ) -> Batch:
        """Return a micro-batch together with the random tensors drawn for it.

        They depend on the seed, `step`, `micro` and the shape alone.

        Args:
            inputs_BT: input tokens, int64, on the device.
            targets_BT: target token of each position, int64.
            step: optimizer step, counted from 0.
            micro: micro-batch within the step, counted from 0.
            marked: the targets that count in the loss; None: all.
        """
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
        """Return (objective to differentiate, mean cross-entropy) of one micro-batch, scalars.

        The objective is (1 - alpha) CE + alpha regularizer + lambda distractor, without loss scaling; a term that is
        off is left out, and without a regularizer alpha is 0. With `loss_reduction: mean`, CE is per token and
        everything is divided by the number of micro-batches. With "sum", CE is summed over tokens and micro-batches,
        and auxiliary terms are added once per micro-batch. The second result is CE in nats per token, never divided by
        the number of micro-batches.

        With marked targets, CE covers these alone. Its mean is then the micro-batch's sum, divided by the step's marked
        targets per micro-batch, so that its average over micro-batches is the mean of the whole step.
        Source: docs/reference/mechanisms.md, "Regularizers" and "Training".
        """
        config = self.config
        inputs_BT, targets_BT, drawn, marked = batch
        features = self.model.features(inputs_BT, auxiliary=drawn)
        if marked is None:
            total = self.model.total_loss(features.hidden_BTD, targets_BT)
            mean = total / targets_BT.numel()
        else:
            hidden_1MD = features.hidden_BTD.flatten(0, 1).index_select(0, marked.indices_M)[None]
            total = self.model.total_loss(hidden_1MD, marked.targets_M[None])
            mean = total * marked.share.to(total.dtype)
        objective = total if config.loss_reduction == "sum" else mean
        if features.regularizer is not None:
            alpha = config.regularizer_weight
            objective = (1 - alpha) * objective + alpha * features.regularizer
        if features.distractor is not None:
            objective = objective + config.distractor_weight * features.distractor
        return (objective if config.loss_reduction == "sum" else objective / config.accumulation), mean
