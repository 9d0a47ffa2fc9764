"""File names of checkpoints and weights, in a module without torch."""

from __future__ import annotations

PREFIX = "checkpoint-"
MODEL = "model.safetensors"
OPTIMIZERS = "optimizers.pt"
JOB = "job.json"
"""Job of an attempt, in its folder."""
WEIGHTS = "weights.safetensors"
"""Final weights of a finished training, next to its checkpoints."""
KEEP_NEWEST = 2
"""Checkpoints that a running attempt retains: the newest, and the previous one in case that is damaged."""
DIGITS = 8
"""Minimum number of digits of the step in a checkpoint's name."""


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps; names sort by step."""
    return f"{PREFIX}{step:0{DIGITS}d}"
