"""Learning-rate factor over a run."""

from __future__ import annotations

import math


def lr_factor(step: int, steps: int, *, constant: float = 0.3, decay: str = "cosine", warmup: int = 0) -> float:
    """Factor on every learning rate at `step` (0-based) of `steps`.

    docs/mechanisms.md, "Training": over the first `warmup` steps 1/warmup, 2/warmup, ... 1. Of the steps after them the
    fraction `constant` has 1, and then the factor falls to 0, with x from 0 to 1 over that span: linear is 1 - x, cosine
    half a period, wsd 1 - sqrt(x).
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
