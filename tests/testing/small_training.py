"""Whole trainings of a few steps on the CPU, for tests that compare their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.data.batches import Batches
from atma_sweep.sweep.training.loop import Trainer, TrainingPoint, ValidationPoint
from atma_sweep.sweep.training.optimizers import Optimizers
from torch import Tensor

CPU = torch.device("cpu")
STREAM = np.random.default_rng(0).integers(0, 29, 400).astype(np.uint16)
MARKS = (np.random.default_rng(5).random(400) < 0.3).astype(np.uint16)
"""Which tokens of the stream count for `loss_on: marked`."""
LEVELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"window": True, "attn_type": "rope"}, {}),
    "memory": ({"memory": "gated_delta", "attn_type": "nope"}, {}),
    "everything": ({"memory": "gated_delta", "window": True}, {"distractor": True, "regularizer": "zipfian"}),
    "strong, summed": (
        {"attn_type": "rope"}, {"distractor": True, "regularizer": "strong", "loss_reduction": "sum"},
    ),
    "dropout": ({"dropout": 0.25, "attn_type": "nope"}, {"regularizer": "weak"}),
    "positions": ({"positions": "label", "position_settings": {"label": {"length": 9}}}, {}),
    "warm-up": ({"memory": "gated_delta"}, {"warmup_steps": 2}),
    "adamw": ({"attn_type": "nope"}, {"optimizer": "adamw", "adam_weight_decay": 0.1, "schedule": "linear"}),
    "marked": ({}, {"loss_on": "marked"}),
    "tied": ({"tie_head": True, "logit_cap": "none", "attn_type": "nope"}, {"clip": 0.05}),
}  # fmt: skip
"""Settings of networks and of trainings that take every path of a step."""
SMALL = {"tokens": 5 * 24, "seq_len": 6, "batch_tokens": 24, "micro_batch": 2, "regularizer_sketch": 5}


@dataclass
class Watch:
    """Records what the loop tells; with a folder it writes checkpoints there. It asks for a stop and for saves as it is told to."""

    folder: Path | None = None
    stop: int = 0
    """Steps after which it stops; 0: never."""
    stop_at_ask: int | None = None
    """Stops when asked for the n-th time, from 1: in the midst of a step, perhaps."""
    saves: tuple[int, ...] = ()
    """Steps after which a checkpoint is due."""
    trainer: Trainer | None = None
    n_polls: int = 0
    points: list[ValidationPoint] = field(default_factory=list)
    training: list[TrainingPoint] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None:
        self.messages.append(step)

    def point(self, point: ValidationPoint) -> None:
        self.points.append(point)

    def training_points(self, points: Sequence[TrainingPoint]) -> None:
        self.training += points

    def should_stop(self) -> bool:
        assert self.trainer is not None
        self.n_polls += 1
        return self.n_polls == self.stop_at_ask or self.trainer.step >= self.stop > 0

    def should_save(self, step: int) -> bool:
        return step in self.saves

    def save(self, step: int, tokens: int, wall_s: float, pending: Any = None) -> None:
        self.saved.append((step, tokens))
        if self.folder is not None:
            assert self.trainer is not None
            model, state = self.trainer.model, self.trainer.optimizers.state_dict()
            checkpoint.save(self.folder, model, state, step=step, tokens=tokens, wall_s=wall_s, pending=pending)


def recipe(**changes: Any) -> TrainConfig:
    return TrainConfig(**(SMALL | changes))


def small_trainer(
    model: Backbone, config: TrainConfig, watch: Watch | None = None, *, seed: int = 0, graphs: bool = False,
    every: int = 1, validate: Callable[[], float] = lambda: 1.0,
) -> Trainer:  # fmt: skip
    """A trainer of the model on a random stream of 29 words, which validates `every` so many steps."""
    watch = watch or Watch()
    marks = [MARKS] if config.loss_on == "marked" else None
    batches = Batches([STREAM], config.seq_len, config.batch_tokens // config.seq_len, seed, True, marks=marks)
    watch.trainer = Trainer(
        model=model, optimizers=Optimizers(model.parameter_groups(), config, CPU, head_blocks=model.head_blocks()), batches=batches, config=config,
        seed=seed, device=CPU, validate=validate, validate_every=every, hooks=watch, graphs=graphs,
    )  # fmt: skip
    return watch.trainer


def trained(model: Backbone, config: TrainConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """The weights at the end."""
    small_trainer(model, config, seed=seed).run()
    return {name: p.detach().clone() for name, p in model.named_parameters()}
