"""What checkpoints and weights are called, for those who must not import torch to know it."""

from __future__ import annotations

PREFIX = "checkpoint-"
MODEL = "model.safetensors"
OPTIMIZERS = "optimizers.pt"
WEIGHTS = "weights.safetensors"
"""The kept weights of a finished training, beside its checkpoints."""
KEPT = 2
"""Checkpoints that a running attempt leaves behind: the newest, and the one before should that be damaged."""
DIGITS = 8
"""Of the step in a checkpoint's name, at least."""


def name_of(step: int) -> str:
    """The name of the checkpoint after `step` steps; names sort by step."""
    return f"{PREFIX}{step:0{DIGITS}d}"
