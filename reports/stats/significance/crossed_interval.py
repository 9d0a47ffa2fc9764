"""Confidence interval of a mean over configurations crossed with seeds, both treated as random effects.

A difference is d = mu + a(configuration) + b(seed) + e. Configurations share seeds (a seed draws the same data and
weights for each of them), so neither runs nor configurations are independent. The mean of the configuration means has
the variance V1 / C + max(0, g (V2 - t E)). V1 is the variance between the means of the C configurations, V2 that
between the seed effects of an additive fit, and E the residual variance. t and g follow from the pattern of present
runs (balanced: both are 1 / C).

p is a weighted mean of two p values. Satterthwaite's takes the variance as known, with the degrees of freedom that its
parts suggest. With few seeds these often agree by chance, V2 is then dropped, and p is too small. Weerahandi's
generalized p averages over the uncertainty of V1 and V2 and is too large where seeds have no effect. Its weight is 1 /
(2 seeds - 3): 1 with two seeds, a third with three. docs/explanation/statistics.md has the coverage of the intervals.

Source:
    Satterthwaite 1946; Weerahandi 1993.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special

from .sign_flip_test import ALPHA, find_zero_crossing

ROUNDING_TOLERANCE = 1e-12  # share of the largest difference: a smaller standard error is rounding
HALF_WIDTH_PRECISION = 1e-9  # precision of half the interval, as a share of a standard error
LOG_STEP = 0.4  # step of the trapezoid rule in ln X, X a chi-square; with many df in standard deviations of ln X
NEGLIGIBLE_WEIGHT = 1e-15  # weight of a node that changes no p above MIN_P_OF_LIKELY by more than a millionth of it
MIN_P_OF_LIKELY = 1e-5
TINY_P = 1e-300  # stands for a p of 0, which has no logarithm
MAX_DEVIATE = 9.0  # normal deviates whose quantiles bound the chi-square: 1e-19 is cut off on each side

IntervalAndP = tuple[float, float, float]
"""(low, high, p): 95% interval and two-sided p of a mean of zero; all NaN without a variance."""


def student_interval(d: np.ndarray) -> IntervalAndP:
    """Return (low, high, p) of the mean of independent differences [n] by Student's t with n - 1 degrees of freedom.

    The interval is the 95% one, p is two-sided for a mean of zero. All three are NaN for fewer than two differences, or
    if the standard error is only rounding.
    """
    if len(d) < 2:
        return math.nan, math.nan, math.nan
    return _interval(float(d.mean()), float(d.var(ddof=1)) / len(d), len(d) - 1, float(np.abs(d).max()))


def crossed_interval(table: np.ndarray) -> IntervalAndP | None:
    """Return (low, high, p) of the mean over configurations and seeds as crossed random effects.

    The mean is that of the configuration means. The interval is the 95% one and symmetric; p is two-sided for a mean of
    zero, a weighted mean of Satterthwaite's and the generalized p (see the module's docstring).

    Args:
        table: Differences [configuration, seed], NaN where a run is missing; every configuration needs a run.

    Returns:
        All three NaN if all variance is rounding. None (no tuple) if the design cannot separate configurations, seeds
        and residual: fewer than two of either, no residual degree of freedom, or seeds that no chain of common
        configurations connects.
    """
    has_run = np.isfinite(table)
    configurations, seeds = table.shape
    if (design := _crossed_design(has_run.tobytes(), seeds)) is None:
        return None
    rest, weights, trace_factor, seed_weight = design.rest, design.weights, design.trace_factor, design.seed_weight
    values = np.where(has_run, table, 0.0)
    means = (values * weights).sum(axis=1)
    of_seeds = design.seed_effects @ (np.where(has_run, values - means[:, None], 0.0).sum(axis=0))
    residuals = np.where(has_run, values - means[:, None] - of_seeds + (weights @ of_seeds)[:, None], 0.0)
    e = float((residuals**2).sum()) / rest
    v1 = float(means.var(ddof=1)) / configurations
    seed_variance = float(of_seeds.var(ddof=1))
    seed_part = seed_weight * (seed_variance - trace_factor * e)
    variance, squared_parts = v1, v1**2 / (configurations - 1)
    if seed_part > 0:
        variance += seed_part
        squared_parts += (seed_weight * seed_variance) ** 2 / (seeds - 1) + (seed_weight * trace_factor * e) ** 2 / rest
    # after the subtraction the variance can be near zero: its df are at least those of its smallest part
    df = max(variance**2 / squared_parts if squared_parts > 0 else 1.0, min(configurations, seeds) - 1.0)
    error = math.sqrt(variance)
    if error <= ROUNDING_TOLERANCE * float(np.abs(values).max()):
        return math.nan, math.nan, math.nan
    weight = 1 / (2 * seeds - 3)
    generalized = _generalized(
        v1,
        configurations - 1,
        seed_weight * seed_variance,
        seeds - 1,
        seed_weight * trace_factor * e,
        ROUNDING_TOLERANCE * error,
    )

    def p(distance: float) -> float:
        """Return the weighted p value of the hypothesis that the true mean lies `distance` from the observed one."""
        satterthwaite = 2 * float(special.stdtr(df, -distance / error))
        return satterthwaite + weight * (generalized(distance) - satterthwaite)

    mean = float(means.mean())
    half = _half_width(p, float(special.stdtrit(df, 1 - ALPHA / 2)) * error, HALF_WIDTH_PRECISION * error)
    return mean - half, mean + half, p(abs(mean))


def _half_width(p: Callable[[float], float], start: float, precision: float) -> float:
    """Return the distance at which p falls to ALPHA, up to `precision`.

    ln p against ln distance is nearly a straight line, so that the search takes a third of the steps that p takes.

    Args:
        p: p value by distance, decreasing.
        start: First guess, above 0.
        precision: Largest distance from the solution.
    """

    @cache
    def above(log_distance: float) -> float:
        """Return the logarithm of ALPHA over p at this logarithm of a distance."""
        return math.log(ALPHA) - math.log(max(p(math.exp(log_distance)), TINY_P))

    low = high = math.log(start)
    step = 0.05
    while above(low) > 0:
        low, high, step = low - step, low, 2 * step
    while above(high) <= 0:
        low, high, step = high, high + step, 2 * step
    return math.exp(find_zero_crossing(above, low, high, precision / math.exp(high)))


def _generalized(v1: float, df1: int, v2: float, df2: int, offset: float, min_error: float) -> Callable[[float], float]:
    """Return a function that maps a distance from the mean (at least 0) to Weerahandi's generalized p value.

    The two-sided p value is twice the mean of Phi(-distance / s) over s^2 = v1 df1 / A + max(0, v2 df2 / B - offset),
    where A and B are independent chi-squares of df1 and df2 degrees of freedom. Where B makes the second part zero, the
    mean over A is Student's t. The rest is smooth in ln A and ln B, so the trapezoid rule converges there faster than
    any power of its step.

    Args:
        v1: Estimated variance of the first part (configurations), as its share of the variance of the mean.
        df1: Its degrees of freedom.
        v2: Estimated variance of the second part (seeds), before the subtraction of `offset`.
        df2: Its degrees of freedom.
        offset: Residual variance that is subtracted from the second part.
        min_error: Lower bound of s.
    """
    end = math.log(v2 * df2 / offset) if v2 > 0 and offset > 0 else math.inf if v2 > 0 else -math.inf
    log_b, weight_b = _log_chi_square_below(df2, end)
    log_a, weight_a = _log_chi_square(df1)
    variance = v1 * df1 * np.exp(-log_a)[:, None] + np.maximum(0.0, v2 * df2 * np.exp(-log_b) - offset)
    spread, weight = np.sqrt(np.maximum(variance, min_error**2)), weight_a[:, None] * weight_b
    zero_share = float(special.chdtrc(df2, math.exp(end))) if end < math.inf else 0.0
    error = max(math.sqrt(v1), min_error)

    likely = weight > NEGLIGIBLE_WEIGHT
    nodes = (spread[likely], weight[likely]), (spread, weight)

    def p(distance: float) -> float:
        """Return the generalized p value of this distance."""
        student_t = zero_share * 2 * float(special.stdtr(df1, -distance / error))
        for spreads, weights in nodes:
            value = student_t + 2 * float((special.ndtr(-distance / spreads) * weights).sum())
            if value > MIN_P_OF_LIKELY:  # far out the unlikely nodes count, too
                break
        return value

    return p


def _bounds(df: int) -> tuple[float, float, float]:
    """Return (low, high, step) of the trapezoid rule over ln X, X a chi-square, within nine normal deviates.

    The bounds are values of ln X, not of X.
    """
    tail = float(special.ndtr(-MAX_DEVIATE))
    # with few df the range is wide and the density skewed, with many it is nearly normal with variance 2 / df
    low = (2 / df) * (math.log(tail) + math.lgamma(df / 2 + 1)) + math.log(2)
    return low, math.log(float(special.chdtri(df, tail))), LOG_STEP * min(1.0, 2 * math.sqrt(2 / df))


def _log_density(df: int, log: np.ndarray) -> np.ndarray:
    """Return the density of ln X at the points `log`, where X is a chi-square with `df` degrees of freedom."""
    return np.exp(df / 2 * (log - math.log(2)) - np.exp(log) / 2 - math.lgamma(df / 2))


@lru_cache(maxsize=64)
def _log_chi_square(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (nodes, weights) of the trapezoid rule over ln X, X a chi-square with `df` degrees of freedom; cached."""
    low, high, step = _bounds(df)
    nodes = np.arange(low, high + step, step)
    return nodes, step * _log_density(df, nodes)


def _log_chi_square_below(df: int, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (nodes, weights) of the trapezoid rule over the part of ln X that lies below `end`, X a chi-square.

    Weights include the density. Both are empty for `end` = -inf.

    Args:
        df: Degrees of freedom of X.
        end: Upper end of ln X (not of X).
    """
    if end == -math.inf:  # equal seeds: nothing lies below, and Student's t remains
        return np.empty(0), np.empty(0)
    low, high, step = _bounds(df)
    if end > high:
        return _log_chi_square(df)
    # ln X = end - ln(1 + e^y) decreases from `end`, where its derivative vanishes
    offsets = np.arange(-2 * MAX_DEVIATE, max(end - low, 0.0) + step, step)
    nodes = end - np.logaddexp(0.0, offsets)
    return nodes, step * special.expit(offsets) * _log_density(df, nodes)


class _CrossedDesign(NamedTuple):
    """Quantities of an interval that depend on the present runs alone: the same for every measure.

    `rest` are the residual degrees of freedom, `weights` [configuration, seed] average the runs of a configuration.
    `seed_effects` [seed, seed] maps, for each seed, the sum of its differences minus the means of their configurations
    to the least-squares effects, which sum to zero: the pseudo-inverse of the normal equations of the additive model
    after elimination of the configurations. `seed_weight` and `trace_factor` are g and t of the module's docstring.
    """

    rest: int
    weights: np.ndarray
    seed_effects: np.ndarray
    seed_weight: float
    trace_factor: float


@lru_cache(maxsize=256)
def _crossed_design(has_run_bytes: bytes, seeds: int) -> _CrossedDesign | None:
    """Return the design of a pattern of present runs; cached.

    Args:
        has_run_bytes: Bytes of the boolean table [configuration, seed] of present runs.
        seeds: Number of seeds.

    Returns:
        None for fewer than two configurations or seeds, without a residual degree of freedom, or if some seeds share no
        configuration with the others, directly or through a chain.
    """
    table = np.frombuffer(has_run_bytes, dtype=bool).reshape(-1, seeds)
    configurations = len(table)
    rest = int(table.sum()) - configurations - seeds + 1
    if configurations < 2 or seeds < 2 or rest < 1 or not _is_connected(table):
        return None
    weights = table / table.sum(axis=1, keepdims=True)
    normal = np.diag(table.sum(axis=0).astype(float)) - table.T @ weights
    # the null space is equal effects of all seeds: adding its projection makes the matrix regular
    free = np.full((seeds, seeds), 1 / seeds)
    seed_effects = np.linalg.inv(normal + configurations * free) - free / configurations
    seed_weight = float((weights.mean(axis=0) ** 2).sum()) - float(weights.var(axis=0, ddof=1).sum()) / configurations
    return _CrossedDesign(rest, weights, seed_effects, seed_weight, float(np.trace(seed_effects)) / (seeds - 1))


def _is_connected(table: np.ndarray) -> bool:
    """Return True if chains of common configurations connect every seed to every other one.

    Args:
        table: Boolean table [configuration, seed] of present runs.
    """
    reached = np.arange(table.shape[1]) == 0
    while True:
        extended = table[(table & reached).any(axis=1)].any(axis=0) | reached
        if (extended == reached).all():
            return bool(reached.all())
        reached = extended


def _interval(mean: float, variance: float, df: float, scale: float) -> IntervalAndP:
    """Return (low, high, p) of Student's t for a mean: the 95% interval, and p two-sided for a mean of zero.

    All three are NaN if the standard error is at most 1e-12 times `scale`.

    Args:
        mean: The mean.
        variance: Variance of the mean (not of one observation).
        df: Degrees of freedom of the variance.
        scale: Largest absolute value of the data, relative to which rounding is judged.
    """
    error = math.sqrt(variance)
    if error <= ROUNDING_TOLERANCE * scale:
        return math.nan, math.nan, math.nan
    half = float(special.stdtrit(df, 1 - ALPHA / 2)) * error
    p = 2 * float(special.stdtr(df, -abs(mean) / error))
    return mean - half, mean + half, p
