"""The interval of a share, one formula for the needle probe and for reports."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # a standard normal lies within this of zero with 95%


def wilson(hits: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a share of `n` trials; bounds in [0, 1].

    `hits` may be fractional. Raises ValueError unless 0 <= hits <= n and n >= 1.
    """
    if n < 1 or not 0 <= hits <= n:
        raise ValueError(f"{hits} of {n} is no share")
    p = hits / n
    scale = 1 + Z_95 * Z_95 / n
    middle = (p + Z_95 * Z_95 / (2 * n)) / scale
    half = Z_95 / scale * math.sqrt(p * (1 - p) / n + Z_95 * Z_95 / (4 * n * n))
    # rounding must not exclude the share itself
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))


def wilson_of_trials(share: float, trials: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of the mean share over trials, each of which gives a share between 0 and 1.

    A share varies less than a single right or wrong answer. The interval is therefore wide enough however strongly the
    answers of one trial depend on each other. Raises ValueError for an impossible share.
    """
    return wilson(share * trials, trials)
