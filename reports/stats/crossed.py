"""The interval of a mean over configurations and seeds, where both are drawn at random and cross each other.

A difference is d = mu + a(configuration) + b(seed) + e. Seeds are shared by configurations (a seed draws the same data and
weights for all), so neither runs nor configurations alone are independent. The mean of the means of configurations has the
variance V1 / C + max(0, g (V2 - t E)): V1 between the means of the C configurations, V2 between the seeds as an
additive fit has them, E the residual's; t and g follow from which cells there are (balanced: 1 / C and 1 / seeds).

p is a mean of two. Satterthwaite's (1946) takes the variance for known with as many degrees of freedom as its parts suggest; with few
seeds these often agree by chance, V2 counts for nothing, and p is too small. Weerahandi's generalized p (1993) averages over
what V1 and V2 leave open, and is too large where seeds do nothing. It has the weight 1 / (2 seeds - 3): all of it with two seeds, a third with
three, by which intervals hold the truth as often as docs/statistics.md says.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special

from .flips import ALPHA, crossing

__all__ = ["crossed", "student"]

DUST = 1e-12  # of the largest difference: a standard error below it is none
FINE = 1e-9  # of a standard error: how closely half an interval is found
NODES = 20  # of an average over a chi-square, by Gauss and Legendre over its quantiles

Interval = tuple[float, float, float]
"""Low, high and p of a mean of zero; NaN where there is no variance to judge by."""


def student(d: np.ndarray) -> Interval:
    """Student's t of independent differences [n]."""
    if len(d) < 2:
        return math.nan, math.nan, math.nan
    return _interval(float(d.mean()), float(d.var(ddof=1)) / len(d), len(d) - 1, float(np.abs(d).max()))


def crossed(table: np.ndarray) -> Interval | None:
    """The interval of `table` [configurations, seeds], NaN where a run is missing. None where the design does not tell
    configurations, seeds and the rest apart: too few runs, or parts of it without a common seed."""
    there = np.isfinite(table)
    configurations, seeds = table.shape
    rest = int(there.sum()) - configurations - seeds + 1
    if configurations < 2 or seeds < 2 or rest < 1:
        return None
    weights = there / there.sum(axis=1, keepdims=True)
    if (inverse := _of_seeds(there.tobytes(), seeds)) is None:
        return None
    values = np.where(there, table, 0.0)
    means = (values * weights).sum(axis=1)
    of_seeds = inverse @ (np.where(there, values - means[:, None], 0.0).sum(axis=0))
    left = np.where(there, values - means[:, None] - of_seeds + (weights @ of_seeds)[:, None], 0.0)
    e = float((left**2).sum()) / rest
    v1 = float(means.var(ddof=1)) / configurations
    v2 = float(of_seeds.var(ddof=1))
    t = float(np.trace(inverse)) / (seeds - 1)
    g = float((weights.mean(axis=0) ** 2).sum()) - float(weights.var(axis=0, ddof=1).sum()) / configurations
    shared = g * (v2 - t * e)
    variance, squares = v1, v1**2 / (configurations - 1)
    if shared > 0:
        variance += shared
        squares += (g * v2) ** 2 / (seeds - 1) + (g * t * e) ** 2 / rest
    # what is taken off can leave next to nothing, which knows no less than its parts do
    df = max(variance**2 / squares if squares > 0 else 1.0, min(configurations, seeds) - 1.0)
    error = math.sqrt(variance)
    if error <= DUST * float(np.abs(values).max()):
        return math.nan, math.nan, math.nan
    ones, others = _chances(configurations - 1), _chances(seeds - 1)
    possible = v1 * ones[0][:, None] + np.maximum(0.0, g * (v2 * others[0] - t * e))
    spread, share = np.sqrt(np.maximum(possible, (DUST * error) ** 2)), ones[1][:, None] * others[1]
    weight = 1 / (2 * seeds - 3)

    def p(distance: float) -> float:
        known = 2 * float(special.stdtr(df, -distance / error))
        return known + weight * (2 * float((special.ndtr(-distance / spread) * share).sum()) - known)

    mean, far = float(means.mean()), error
    while p(far) >= ALPHA:
        far *= 2
    half = crossing(lambda distance: ALPHA - p(distance), 0.0, far, FINE * error)
    return mean - half, mean + half, p(abs(mean))


@lru_cache(maxsize=64)
def _chances(df: int) -> tuple[np.ndarray, np.ndarray]:
    """What a true variance may be, as a multiple of its estimate with these degrees of freedom, and the weight of each."""
    points, weights = np.polynomial.legendre.leggauss(NODES)
    return df / special.chdtri(df, (1 - points) / 2), weights / 2


@lru_cache(maxsize=256)
def _of_seeds(there: bytes, seeds: int) -> np.ndarray | None:
    """From sums of a seed to its least-squares effect beside configurations: the inverse of the normal equations with
    configurations swept out, by which runs there are. None where no configuration ties some seeds to the others."""
    table = np.frombuffer(there, dtype=bool).reshape(-1, seeds)
    normal = np.diag(table.sum(axis=0).astype(float)) - table.T @ (table / table.sum(axis=1, keepdims=True))
    return np.linalg.pinv(normal) if np.linalg.matrix_rank(normal) == seeds - 1 else None


def _interval(mean: float, variance: float, df: float, scale: float) -> Interval:
    error = math.sqrt(variance)
    if error <= DUST * scale:
        return math.nan, math.nan, math.nan
    half = float(special.stdtrit(df, 1 - ALPHA / 2)) * error
    p = 2 * float(special.stdtr(df, -abs(mean) / error))
    return mean - half, mean + half, p
