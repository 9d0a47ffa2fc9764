"""Whole trainings of a few steps on the CPU, for tests that compare their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.data.batches import Batches
from atma_sweep.sweep.training.loop import Point, Stopped, Trainer
from atma_sweep.sweep.training.optimizers import Optimizers
from torch import Tensor

CPU = torch.device("cpu")
STREAM = np.random.default_rng(0).integers(0, 29, 400).astype(np.uint16)
MARKS = (np.random.default_rng(5).random(400) < 0.3).astype(np.uint16)
"""Which tokens of the stream count for `loss_on: marked`."""
SMALL = {"tokens": 5 * 24, "seq_len": 6, "batch_tokens": 24, "micro_batch": 2, "regularizer_sketch": 5}


class Watch:
    """Keeps the curve; with a folder it saves after `stop` steps and leaves."""

    def __init__(self, folder: Path | None = None, stop: int = 0) -> None:
        self.folder, self.stop = folder, stop
        self.trainer: Trainer | None = None
        self.points: list[Point] = []

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Nobody asks."""

    def point(self, point: Point) -> None:
        self.points.append(point)

    def should_stop(self) -> bool:
        assert self.trainer is not None
        return self.trainer.step == self.stop > 0

    def should_save(self, step: int) -> bool:
        return False

    def save(self, step: int, tokens: int, wall_s: float, pending: Any = None) -> None:
        assert self.trainer is not None
        assert self.folder is not None
        state = self.trainer.optimizers.state_dict()
        checkpoint.save(self.folder, self.trainer.model, state, step=step, tokens=tokens, wall_s=wall_s)


def recipe(**changes: Any) -> TrainConfig:
    return TrainConfig(**(SMALL | changes))


def small_trainer(
    model: Backbone, config: TrainConfig, watch: Watch | None = None, *, seed: int = 0, graphs: bool = False
) -> Trainer:
    """A trainer of the model on a random stream of 29 words."""
    watch = watch or Watch()
    marks = [MARKS] if config.loss_on == "marked" else None
    batches = Batches([STREAM], config.seq_len, config.batch_tokens // config.seq_len, seed, True, marks=marks)
    watch.trainer = Trainer(
        model=model, optimizers=Optimizers(model.parameter_groups(), config, CPU), batches=batches, config=config,
        seed=seed, device=CPU, validate=lambda: 1.0, validate_every=1, watcher=watch, graphs=graphs,
    )  # fmt: skip
    return watch.trainer


def trained(model: Backbone, config: TrainConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """The weights at the end."""
    small_trainer(model, config, seed=seed).run()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained_in_two(
    first: Backbone, second: Backbone, config: TrainConfig, folder: Path, stop: int
) -> dict[str, Tensor]:
    """The same, `second` going on from the checkpoint that `first` left after `stop` steps."""
    try:
        small_trainer(first, config, Watch(folder, stop)).run()
    except Stopped:
        state = checkpoint.newest(folder)
    assert state is not None
    later = small_trainer(second, config)
    later.restore(state)
    later.run()
    return {name: p.detach().clone() for name, p in second.named_parameters()}
