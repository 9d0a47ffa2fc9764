"""The one interval of a share: what the needle probe stores and what reports work out have the same formula."""

from __future__ import annotations

import math

Z = 1.959963984540054  # a standard normal lies within this of zero with 95%


def wilson(hits: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a share of `n` trials; bounds in [0, 1]. Raises ValueError where it is no share."""
    if n < 1 or not 0 <= hits <= n:
        raise ValueError(f"{hits} of {n} is no share")
    p = hits / n
    scale = 1 + Z * Z / n
    middle = (p + Z * Z / (2 * n)) / scale
    half = Z / scale * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    # rounding must not leave the share itself outside
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))


def of_trials(share: float, trials: int) -> tuple[float, float]:
    """Wilson's interval of the mean over so many trials, each of which gives a share between 0 and 1, several answers say.

    A share varies less than an answer that is right or wrong, so the interval is at least as wide as it must be, however
    much the answers of one trial depend on each other. Raises ValueError where it is no share.
    """
    return wilson(share * trials, trials)
