"""Alpha spending: critical values that keep the significance level although a growing sample is tested often.

At every look (interim analysis), the share of the level that a spending function allows by then is used (Lan and
DeMets, Biometrika 70, 1983). The joint distribution of the looks is that of sums of independent normal steps,
integrated over a grid (Armitage, McPherson and Rowe, Journal of the Royal Statistical Society A 132, 1969).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from scipy import special

from .stopping_rule import OBRIEN_FLEMING, POCOCK

SpendingFunction = Callable[[float, float], float]
"""Function of (fraction of the largest sample, level) that returns the level spent by then."""
MAX_Z = 9.0
"""Number of standard errors beyond which the integrals are cut off."""
GRID_POINTS = 501
"""Points of the grid over which a look is integrated; four times as many change the eighth digit of a level."""
MIN_LEVEL = 1e-9
"""Smallest level that is distinguished from zero."""


def obrien_fleming(fraction: float, level: float) -> float:
    """Return the level spent at a fraction of the sample: little at first, nearly all at the end.

    Two-sided; each side spends half. Lan and DeMets' form, 4 (1 - Phi(z of level / 4 / root of the fraction)). The
    fraction must be above 0 and at most 1, at which all of the level is spent.
    """
    return float(4 * special.ndtr(special.ndtri(level / 4) / math.sqrt(fraction)))


def pocock(fraction: float, level: float) -> float:
    """Return the level spent at a fraction of the sample: about the same amount at every look.

    Two-sided; level * ln(1 + (e - 1) * fraction).
    """
    return level * math.log(1 + (math.e - 1) * fraction)


SPENDING_FUNCTIONS: Mapping[str, SpendingFunction] = {OBRIEN_FLEMING: obrien_fleming, POCOCK: pocock}


def critical_values(fractions: Sequence[float], *, spending: str = OBRIEN_FLEMING, level: float = 0.05) -> list[float]:
    """Return the two-sided critical value of |z| at every look, one per fraction.

    A look is significant if |z| exceeds its value; a value of 9.0 (MAX_Z) means that no level was left to spend. The
    values decrease for O'Brien-Fleming and are nearly constant for Pocock. A value depends on earlier looks, not on
    later ones.

    Args:
        fractions: share of the largest sample at each look, increasing, above 0 and at most 1.
        spending: "obrien-fleming" or "pocock".
        level: two-sided significance level of all looks together.

    Raises:
        ValueError: the fractions are empty, do not increase or exceed 1.
        KeyError: the spending function is unknown.
    """
    from scipy import optimize  # imported late: most sweeps have no stopping rule

    if not fractions or any(b <= a for a, b in zip((0.0, *fractions), fractions, strict=False)) or fractions[-1] > 1:
        raise ValueError(f"looks at {list(fractions)}: shares of the sample must grow, and end at 1 at most")
    spent, bounds = 0.0, list[float]()
    density, grid = np.zeros(0), np.zeros(0)
    before = 0.0
    for fraction in fractions:
        spent_now = SPENDING_FUNCTIONS[spending](fraction, level) - spent
        step = math.sqrt(fraction - before)
        if not bounds:
            bound = float(-special.ndtri(spent_now / 2))
        else:
            weights = density * _simpson(grid)
            excess_args = weights, grid, step, math.sqrt(fraction), spent_now
            beyond = _excess(MAX_Z, *excess_args) >= 0
            bound = MAX_Z if beyond else float(optimize.brentq(_excess, 0.0, MAX_Z, args=excess_args))
        edge = min(bound, MAX_Z) * math.sqrt(fraction)
        next_grid = np.linspace(-edge, edge, GRID_POINTS)
        if not bounds:
            density = np.exp(-(next_grid**2) / (2 * fraction)) / math.sqrt(2 * math.pi * fraction)
        else:
            steps = np.exp(-((next_grid[:, None] - grid[None, :]) ** 2) / (2 * step**2)) / math.sqrt(
                2 * math.pi * step**2
            )
            density = steps @ (density * _simpson(grid))
        grid, before, spent = next_grid, fraction, spent + spent_now
        bounds.append(bound)
    return bounds


def _excess(z: float, weights: np.ndarray, grid: np.ndarray, step: float, root: float, target: float) -> float:
    """Return the probability that the next sum lies beyond z on either side, minus the wanted probability.

    Args:
        z: critical value to test.
        weights: probability mass of the current sum at the grid points, [point].
        grid: values of the current sum, [point].
        step: standard deviation of the next step.
        root: square root of the sample fraction at the next look.
        target: wanted probability.
    """
    up, down = (special.ndtr((sign * grid - z * root) / step) for sign in (1, -1))
    return float(weights @ (up + down)) - target


def _simpson(grid: np.ndarray) -> np.ndarray:
    """Return the weights of Simpson's rule on an even grid of an odd number of points."""
    weights = np.ones(len(grid))
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    return np.asarray(weights * (grid[1] - grid[0]) / 3)


def alpha_levels(
    seeds: Sequence[int], max_seeds: int, *, spending: str = OBRIEN_FLEMING, level: float = 0.05
) -> list[float]:
    """Return the two-sided significance level of each look, one per entry of `seeds`.

    It is the nominal level at which a single test of that look would be made.

    Args:
        seeds: number of seeds at each look, increasing.
        max_seeds: number of seeds at the last possible look, at least the last of `seeds`.
        spending: "obrien-fleming" or "pocock".
        level: level of all looks together.

    Raises:
        ValueError: the numbers of seeds are empty, do not increase or exceed `max_seeds`.
    """
    return list(_cached_alpha_levels(tuple(seeds), max_seeds, spending, level))


@lru_cache(maxsize=256)
def _cached_alpha_levels(seeds: tuple[int, ...], max_seeds: int, spending: str, level: float) -> tuple[float, ...]:
    bounds = critical_values([n / max_seeds for n in seeds], spending=spending, level=level)
    return tuple(float(2 * special.ndtr(-z)) for z in bounds)


def repeated_p_value(p: float, seeds: Sequence[int], max_seeds: int, *, spending: str = OBRIEN_FLEMING) -> float:
    """Return the p value of the entire rule after these looks.

    It is the smallest level at which the last look would be significant, and valid whenever, and for whatever reason,
    the looks ended.

    Args:
        p: two-sided p value of the last look alone.
        seeds: number of seeds at each look so far, increasing.
        max_seeds: number of seeds at the last possible look.
        spending: "obrien-fleming" or "pocock".

    Returns:
        A value between 1e-9 (MIN_LEVEL) and 1; exactly 1.0 if no level below 0.999 makes the look significant.

    Source: Jennison and Turnbull, Journal of the Royal Statistical Society B 51, 1989.
    """
    from scipy import optimize

    def excess_level(log: float) -> float:
        return alpha_levels(seeds, max_seeds, spending=spending, level=math.exp(log))[-1] - p

    lowest, highest = math.log(MIN_LEVEL), math.log(0.999)
    if excess_level(highest) <= 0:
        return 1.0
    if excess_level(lowest) >= 0:
        return MIN_LEVEL
    return math.exp(float(optimize.brentq(excess_level, lowest, highest, xtol=1e-6)))
