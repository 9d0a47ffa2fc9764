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
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy import special

from .sign_flip_test import ALPHA, find_zero_crossing

DUST = 1e-12  # of the largest difference: a standard error below it is none
FINE = 1e-9  # of a standard error: how closely half an interval is found
STEP = 0.4  # of the trapezoid rule in the logarithm of a chi-square; many degrees of freedom: as many of its deviations
REACH = (
    9.0  # standard normal deviates: a chi-square beyond the quantiles of these is left out, 1e-19 of it on each side
)

IntervalAndP = tuple[float, float, float]
"""Low, high and p of a mean of zero; NaN where there is no variance to judge by."""


def student_interval(d: np.ndarray) -> IntervalAndP:
    """Student's t of independent differences [n]."""
    if len(d) < 2:
        return math.nan, math.nan, math.nan
    return _interval(float(d.mean()), float(d.var(ddof=1)) / len(d), len(d) - 1, float(np.abs(d).max()))


def crossed(table: np.ndarray) -> IntervalAndP | None:
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
    weight = 1 / (2 * seeds - 3)
    generalized = _generalized(v1, configurations - 1, g * v2, seeds - 1, g * t * e, DUST * error)

    def p(distance: float) -> float:
        satterthwaite = 2 * float(special.stdtr(df, -distance / error))
        return satterthwaite + weight * (generalized(distance) - satterthwaite)

    mean, far = float(means.mean()), error
    while p(far) >= ALPHA:
        far *= 2
    half = find_zero_crossing(lambda distance: ALPHA - p(distance), 0.0, far, FINE * error)
    return mean - half, mean + half, p(abs(mean))


def _generalized(v1: float, df1: int, v2: float, df2: int, offset: float, least: float) -> Callable[[float], float]:
    """Return the generalized p of a distance of the mean from zero: twice the mean of Phi(-distance / s) over
    s^2 = v1 df1 / A + max(0, v2 df2 / B - offset), where A and B are chi-squares of df1 and df2 degrees of freedom.

    Where B leaves the second part at zero, the mean over A is Student's t. The rest is smooth in ln A and ln B, to the very end of
    that range, so the trapezoid rule converges there faster than any power of its step. `least` bounds s from below.
    """
    end = math.log(v2 * df2 / offset) if v2 > 0 and offset > 0 else math.inf if v2 > 0 else -math.inf
    log_b, weight_b = _log_chi_square_below(df2, end)
    log_a, weight_a = _log_chi_square(df1)
    variance = v1 * df1 * np.exp(-log_a)[:, None] + np.maximum(0.0, v2 * df2 * np.exp(-log_b) - offset)
    spread, weight = np.sqrt(np.maximum(variance, least**2)), weight_a[:, None] * weight_b
    alone = float(special.chdtrc(df2, math.exp(end))) if end < math.inf else 0.0
    error = max(math.sqrt(v1), least)

    def p(distance: float) -> float:
        student_t = 2 * float(special.stdtr(df1, -distance / error))
        return alone * student_t + 2 * float((special.ndtr(-distance / spread) * weight).sum())

    return p


def _bounds(df: int) -> tuple[float, float, float]:
    """Return the range of the logarithm of a chi-square within REACH, and the step of the trapezoid rule in it."""
    tail = float(special.ndtr(-REACH))
    # of few degrees of freedom the range is wide and the density skewed, of many it is nearly normal with variance 2 / df
    low = (2 / df) * (math.log(tail) + math.lgamma(df / 2 + 1)) + math.log(2)
    return low, math.log(float(special.chdtri(df, tail))), STEP * min(1.0, 2 * math.sqrt(2 / df))


def _log_density(df: int, log: np.ndarray) -> np.ndarray:
    """Return the density of the logarithm of a chi-square."""
    return np.exp(df / 2 * (log - math.log(2)) - np.exp(log) / 2 - math.lgamma(df / 2))


@lru_cache(maxsize=64)
def _log_chi_square(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes over the logarithm of a chi-square with `df` degrees of freedom, and their weights."""
    low, high, step = _bounds(df)
    nodes = np.arange(low, high + step, step)
    return nodes, step * _log_density(df, nodes)


def _log_chi_square_below(df: int, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Return such nodes and weights of that part of the distribution that lies below `end`."""
    if end == -math.inf:  # seeds that agree exactly: nothing lies below, and Student's t is left
        return np.empty(0), np.empty(0)
    low, high, step = _bounds(df)
    if end > high:
        return _log_chi_square(df)
    # end - ln(1 + e^y) runs from `end` to the left, and its derivative vanishes at the end
    y = np.arange(-2 * REACH, max(end - low, 0.0) + step, step)
    nodes = end - np.logaddexp(0.0, y)
    return nodes, step * special.expit(y) * _log_density(df, nodes)


@lru_cache(maxsize=256)
def _of_seeds(there: bytes, seeds: int) -> np.ndarray | None:
    """From sums of a seed to its least-squares effect beside configurations: the inverse of the normal equations with
    configurations swept out, by which runs there are. None where no configuration ties some seeds to the others."""
    table = np.frombuffer(there, dtype=bool).reshape(-1, seeds)
    if not _is_connected(table):
        return None
    normal = np.diag(table.sum(axis=0).astype(float)) - table.T @ (table / table.sum(axis=1, keepdims=True))
    # only equal effects of all seeds are free, so a multiple of their projection makes it regular: no rank has to be guessed
    free, scale = np.full((seeds, seeds), 1 / seeds), float(len(table))
    return np.asarray(np.linalg.inv(normal + scale * free) - free / scale)


def _is_connected(table: np.ndarray) -> bool:
    """Return whether configurations that have runs [configurations, seeds] tie every seed to every other."""
    reached = np.arange(table.shape[1]) == 0
    while True:
        further = table[(table & reached).any(axis=1)].any(axis=0) | reached
        if (further == reached).all():
            return bool(reached.all())
        reached = further


def _interval(mean: float, variance: float, df: float, scale: float) -> IntervalAndP:
    error = math.sqrt(variance)
    if error <= DUST * scale:
        return math.nan, math.nan, math.nan
    half = float(special.stdtrit(df, 1 - ALPHA / 2)) * error
    p = 2 * float(special.stdtr(df, -abs(mean) / error))
    return mean - half, mean + half, p
