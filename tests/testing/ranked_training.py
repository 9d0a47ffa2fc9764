"""Trainings in float64 on several ranks, run by `run_ranks`; functions lie here because other processes import them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.data.batches import Batches
from atma_sweep.sweep.ranks.group import Ranks
from atma_sweep.sweep.training import sharded
from atma_sweep.sweep.training.loop import Stopped, Trainer
from atma_sweep.sweep.training.sharded import build_optimizers
from small_training import CPU, MARKS, STREAM, recipe

MODEL = {
    "d_model": 8, "n_layers": 4, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "vocab_size": 29, "window_size": 5,
    "init": "llama",
}  # fmt: skip

sharded.GROUP = 128  # two 8 x 8 matrices, so that those of one shape are updated in several groups


class Recorder:
    """Hooks that record points, and save on rank 0 into a folder."""

    def __init__(self, ranks: Ranks, folder: Path | None, saves: tuple[int, ...], stop: int) -> None:
        self.ranks, self.folder, self.saves, self.stop = ranks, folder, saves, stop
        self.trainer: Any = None
        self.points: list[Any] = []

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None: ...

    def point(self, point: Any) -> None:
        self.points.append((point.step, point.train_loss, point.val_loss, point.grad_norm))

    def training_points(self, points: Any) -> None: ...

    def should_stop(self) -> bool:
        return self.ranks.is_first and self.trainer.step >= self.stop > 0

    def should_save(self, step: int) -> bool:
        return self.ranks.is_first and step in self.saves

    def save(self, step: int, tokens: int, wall_s: float, pending: Any = None) -> None:
        state = self.trainer.optimizers.state_dict()
        if self.ranks.is_first and self.folder is not None:
            checkpoint.save(
                self.folder, self.trainer.model, state, step=step, tokens=tokens, wall_s=wall_s, pending=pending
            )


def network(**changes: Any) -> Backbone:
    return build(ModelConfig(**(MODEL | changes)), seed=3, dtype=torch.float64)


def train(
    ranks: Ranks, model_changes: dict[str, Any], train_changes: dict[str, Any], folder: str | None = None,
    saves: tuple[int, ...] = (), stop: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Train to the end or to a stop, from the folder's newest checkpoint if it has one; return weights and curve."""
    model, config = network(**model_changes), recipe(**train_changes)
    hooks = Recorder(ranks, None if folder is None else Path(folder), saves, stop)
    marks = [MARKS] if config.loss_on == "marked" else None
    batches = Batches([STREAM], config.seq_len, config.batch_tokens // config.seq_len, 0, True, marks=marks)

    def validate() -> float:
        with torch.no_grad():
            inputs, targets = batches.step(999)
            return float(model.token_losses(model.features(inputs).hidden_BTD, targets).mean())

    trainer = hooks.trainer = Trainer(
        model=model, optimizers=build_optimizers(model, config, CPU, ranks), batches=batches,
        config=config, seed=0, device=CPU, validate=validate, validate_every=1, hooks=hooks,
    )  # fmt: skip
    if folder is not None and (state := checkpoint.load_newest(folder)) is not None:
        trainer.restore(state)
    begun = trainer.step
    with contextlib.suppress(Stopped):
        trainer.run()
    return {
        "begun": begun,
        "step": trainer.step,
        "points": hooks.points,
        "weights": {name: p.detach().clone() for name, p in model.state_dict().items()},
        "owned": sum(
            p in optimizer.state
            for optimizer in trainer.optimizers.by_name.values()
            for p in trainer.optimizers.parameters
        ),
        "parameters": len(trainer.optimizers.parameters),
        "saved": trainer.optimizers.state_dict(),
    }


def overflow(ranks: Ranks) -> tuple[bool, float, list[float]]:
    """Return (step applied, loss scale, weights) after a step whose gradient overflows on the last rank alone."""
    model, config = network(), recipe(precision="fp16")
    optimizers = build_optimizers(model, config, CPU, ranks)
    before = [p.detach().clone() for p in model.parameters()]
    optimizers.expect_gradients()
    for index, parameter in enumerate(model.parameters()):
        value = float("inf") if index == 3 and ranks.rank == ranks.size - 1 else 1.0
        parameter.grad = torch.full_like(parameter, value)
    optimizers.clip(1.0)
    optimizers.update()
    assert optimizers.scaling is not None
    moved = [float((p - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True)]
    return optimizers.scaling.skipped == 0, optimizers.scaling.scale, moved
