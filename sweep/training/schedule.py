"""Learning-rate schedule, and the steps whose losses are stored."""

from __future__ import annotations

import math


def lr_factor(step: int, steps: int, *, constant: float = 0.3, decay: str = "cosine", warmup: int = 0) -> float:
    """Return the factor on every learning rate at `step` (0-based) of `steps`, from 0 to 1.

    During warm-up it rises linearly: 1/warmup, 2/warmup, ... 1. Then it stays 1 for the fraction `constant` of the
    other steps, and falls towards 0 over the rest; 0 would be reached at step `steps`, one after the last. With
    `constant` 1 or more it never falls.
    Source: docs/reference/mechanisms.md, "Training".

    Args:
        step: optimizer step, counted from 0, below `steps`.
        steps: steps of the whole training, warm-up included; more than `warmup`.
        constant: fraction of the steps after warm-up with factor 1.
        decay: shape of the fall for x from 0 to 1: "linear" 1 - x, "wsd" 1 - sqrt(x), any other name ("cosine") half a
            cosine period.
        warmup: steps of warm-up.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    if progress < constant or constant >= 1:
        return 1.0
    remaining = (1 - progress) / (1 - constant)
    if decay == "linear":
        return remaining
    if decay == "wsd":
        return 1 - math.sqrt(max(0.0, 1 - remaining))
    return 0.5 * (1 + math.cos(math.pi * (1 - remaining)))


CURVE_STEPS = 100
"""Evenly spaced steps of a training whose losses are stored, besides validations and powers of two."""


def is_curve_step(step: int, steps: int) -> bool:
    """Return True if the training loss after `step` of `steps` steps, counted from 1, is a point of the curve.

    Those are powers of two, so that a curve begins with the first step, and at most 100 evenly spaced steps.
    """
    return step & (step - 1) == 0 or step % -(-steps // CURVE_STEPS) == 0
