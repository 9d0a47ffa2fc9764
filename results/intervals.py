"""The interval of a share, one formula for the needle probe and for reports."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # a standard normal lies within this of zero with 95%


def wilson(hits: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval (low, high) of the share hits / n; bounds in [0, 1] that include the share.

    Args:
        hits: number of successes, may be fractional.
        n: number of trials.

    Raises:
        ValueError: not 0 <= hits <= n, or n < 1.
    """
    if n < 1 or not 0 <= hits <= n:
        raise ValueError(f"{hits} of {n} is not a share")
    p = hits / n
    scale = 1 + Z_95 * Z_95 / n
    middle = (p + Z_95 * Z_95 / (2 * n)) / scale
    half = Z_95 / scale * math.sqrt(p * (1 - p) / n + Z_95 * Z_95 / (4 * n * n))
    # rounding must not exclude the share itself
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))


def wilson_of_trials(share: float, trials: int) -> tuple[float, float]:
    """Return Wilson's 95% interval (low, high) of a mean share over trials, each of which gives a share.

    A share varies less than a single right or wrong answer. The interval is therefore wide enough however strongly the
    answers of one trial depend on each other.

    Args:
        share: mean share, from 0 to 1.
        trials: number of independent trials, not of answers.

    Raises:
        ValueError: the share is outside 0 to 1, or there is no trial.
    """
    return wilson(share * trials, trials)
