"""Learning-rate factor over a run."""

from __future__ import annotations

import math


def factor(step: int, steps: int, *, constant: float = 0.3, decay: str = "cosine") -> float:
    """Factor on every learning rate at `step` (0-based) of `steps`: 1 for the fraction `constant`, then down to 0.

    docs/mechanisms.md, "Training": linear is (1 - progress) / (1 - constant); cosine is half a period over the same span.
    """
    progress = step / steps
    if progress < constant or constant >= 1:
        return 1.0
    left = (1 - progress) / (1 - constant)
    return left if decay == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - left)))
