"""Looking more than once: critical values that keep the level however often a growing sample is tested.

Lan and DeMets, Biometrika 70, 1983: at every look the share of the level that a spending function allows by then is used up. The
joint distribution of the looks is that of sums of independent normal steps, integrated over a grid (Armitage, McPherson and
Rowe, Journal of the Royal Statistical Society A 132, 1969).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from .stopping_rule import OBRIEN_FLEMING, POCOCK

SpendingFunction = Callable[[float, float], float]
MAX_Z = 9.0
"""Beyond so many standard errors nothing is integrated."""
GRID_POINTS = 501
"""Points of the grid over which a look is integrated; four times as many change the eighth digit of a level."""
MIN_LEVEL = 1e-9
"""A level below which none is told apart."""


def obrien_fleming(fraction: float, level: float) -> float:
    """Little at first, nearly all of the level at the end; each side spends half."""
    return float(4 * special.ndtr(special.ndtri(level / 4) / math.sqrt(fraction)))


def pocock(fraction: float, level: float) -> float:
    """About the same at every look."""
    return level * math.log(1 + (math.e - 1) * fraction)


SPENDING_FUNCTIONS: Mapping[str, SpendingFunction] = {OBRIEN_FLEMING: obrien_fleming, POCOCK: pocock}


def critical_values(fractions: Sequence[float], *, spending: str = OBRIEN_FLEMING, level: float = 0.05) -> list[float]:
    """The |z| that a difference must reach at every look, two-sided; `fractions` are the shares of the largest sample that each
    look has, growing and at most 1. Raises ValueError where they are not."""
    if not fractions or any(b <= a for a, b in zip((0.0, *fractions), fractions, strict=False)) or fractions[-1] > 1:
        raise ValueError(f"looks at {list(fractions)}: shares of the sample must grow, and end at 1 at most")
    spent, found = 0.0, list[float]()
    density, grid = np.zeros(0), np.zeros(0)
    before = 0.0
    for fraction in fractions:
        wanted = SPENDING_FUNCTIONS[spending](fraction, level) - spent
        step = math.sqrt(fraction - before)
        if not found:
            bound = float(-special.ndtri(wanted / 2))
        else:
            weights = density * _simpson(grid)
            asked = weights, grid, step, math.sqrt(fraction), wanted
            beyond = _excess(MAX_Z, *asked) >= 0
            bound = MAX_Z if beyond else float(optimize.brentq(_excess, 0.0, MAX_Z, args=asked))
        edge = min(bound, MAX_Z) * math.sqrt(fraction)
        ahead = np.linspace(-edge, edge, GRID_POINTS)
        if not found:
            density = np.exp(-(ahead**2) / (2 * fraction)) / math.sqrt(2 * math.pi * fraction)
        else:
            steps = np.exp(-((ahead[:, None] - grid[None, :]) ** 2) / (2 * step**2)) / math.sqrt(2 * math.pi * step**2)
            density = steps @ (density * _simpson(grid))
        grid, before, spent = ahead, fraction, spent + wanted
        found.append(bound)
    return found


def _excess(z: float, weights: np.ndarray, grid: np.ndarray, step: float, root: float, wanted: float) -> float:
    """How much more than wanted the next sum lies beyond z, on either side."""
    up, down = (special.ndtr((sign * grid - z * root) / step) for sign in (1, -1))
    return float(weights @ (up + down)) - wanted


def _simpson(grid: np.ndarray) -> np.ndarray:
    """Weights of Simpson's rule on an even grid of an odd number of points."""
    weights = np.ones(len(grid))
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    return np.asarray(weights * (grid[1] - grid[0]) / 3)


def levels(seeds: Sequence[int], most: int, *, spending: str = OBRIEN_FLEMING, level: float = 0.05) -> list[float]:
    """The two-sided level that the interval of each look has, by how many seeds it is made from and how many there can be."""
    return list(_levels(tuple(seeds), most, spending, level))


@lru_cache(maxsize=256)
def _levels(seeds: tuple[int, ...], most: int, spending: str, level: float) -> tuple[float, ...]:
    bounds = critical_values([n / most for n in seeds], spending=spending, level=level)
    return tuple(float(2 * special.ndtr(-z)) for z in bounds)


def repeated_p_value(p: float, seeds: Sequence[int], most: int, *, spending: str = OBRIEN_FLEMING) -> float:
    """The p value that the last of these looks is worth, of the whole rule: the least level at which its own `p` would be sure.

    It is valid whenever, and for whatever reason, looking ended (Jennison and Turnbull, Journal of the Royal Statistical Society B 51, 1989).
    """

    def short(log: float) -> float:
        return levels(seeds, most, spending=spending, level=math.exp(log))[-1] - p

    least, largest = math.log(MIN_LEVEL), math.log(0.999)
    if short(largest) <= 0:
        return 1.0
    if short(least) >= 0:
        return MIN_LEVEL
    return math.exp(float(optimize.brentq(short, least, largest, xtol=1e-6)))
