"""The permutation test of signs, its inversion into an interval, and the random signs that tests of a family share.

If a level does nothing, each matched difference is as likely to be +d as -d, so the observed sum is one of 2^n equally likely ones.
The values of the effect that this test does not reject at 5% are the interval; its ends are means of subsets of the
differences (Hartigan 1969). Exact up to EXACT differences; beyond, from FLIPS draws that are the same for all samples of one
size and for every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from scipy import special

ALPHA = 0.05
LEAST = 6  # differences below which no split of signs reaches 5%
MAX_EXACT_N = 30  # differences up to which every flip of signs is counted
LISTED = 16  # differences up to which all flips are written down; beyond, two halves of them are combined
RANDOM_FLIPS = 20_000  # random flips beyond EXACT
CHUNK = 1_000  # draws held in memory at a time
SAMPLES = 64  # samples worked on at a time
DUST = 1e-9  # of the sum of sizes: what a sum may be off by
FINE = 1e-6  # of the range: how closely an end of an interval is found by halves
RANDOM = 20_260


def sign_flip_interval(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every column of `table` [differences, samples]: the two-sided p of a mean of zero, and the ends of the 95% interval.

    p = share of flips of signs whose sum is at least as large; an interval leaves out zero if and only if its p < 0.05.
    Below LEAST differences an interval is everything (NaN).
    """
    n, samples = table.shape
    if n < LEAST:
        nothing = np.full(samples, math.nan)
        return sign_flip_p_values(table), nothing, nothing.copy()
    if LISTED < n <= MAX_EXACT_N:
        p = sign_flip_p_values(table)
        low = np.array([_end_by_halves(d) for d in table.T])
        high = np.array([-_end_by_halves(-d) for d in table.T])
    else:
        method = _listed if n <= LISTED else _drawn
        # as many numbers at a time, whatever n is
        step = min(SAMPLES, (1 << LISTED + 4) >> n) if n <= LISTED else SAMPLES
        parts = [method(table[:, start : start + step]) for start in range(0, samples, step)]
        p, low, high = (np.concatenate(some) for some in zip(*parts, strict=True))
    # a sum that is zero but for its last bits counts as reached; so must the end of the interval that it makes
    held = p >= ALPHA
    return p, np.where(held, np.minimum(low, 0), low), np.where(held, np.maximum(high, 0), high)


def sign_flip_p_values(table: np.ndarray) -> np.ndarray:
    """The p of `sign_flip_interval` alone, at a tenth of the time."""
    n = len(table)
    if n <= MAX_EXACT_N:
        return np.array([_by_halves(d) for d in table.T])
    seen = _seen(table)
    reached = sum(((np.abs(flips @ table) >= seen).sum(axis=0) for flips in random_sign_blocks(n)), np.zeros(len(seen)))
    return np.asarray((reached + 1) / (RANDOM_FLIPS + 1))


def random_sign_blocks(n: int) -> Iterator[np.ndarray]:
    """FLIPS rows of n random signs, as [CHUNK, n] at a time, the same ones every time."""
    draw = np.random.default_rng((RANDOM, n))
    for _ in range(RANDOM_FLIPS // CHUNK):
        bits = np.frombuffer(draw.bytes(CHUNK * ((n + 7) // 8)), dtype=np.uint8)
        # in bytes for as long as possible: with thousands of differences, floats take longer to make than to multiply
        turned = np.unpackbits(bits.reshape(CHUNK, -1), axis=1, count=n).view(np.int8)
        turned *= -2
        turned += 1
        yield turned.astype(float)


def _seen(table: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(table.sum(axis=0)) - DUST * np.abs(table).sum(axis=0))


@cache
def _subsets(n: int) -> tuple[np.ndarray, np.ndarray]:
    """All subsets of n, the empty one first and those without the last in the first half: [n, 2^n] of 0 and 1; 1 / size of all but
    the empty one."""
    found = np.ascontiguousarray(((np.arange(1 << n) >> np.arange(n)[:, None]) & 1).astype(float))
    return found, 1 / found[:, 1:].sum(axis=0)


def _rank(flips: int) -> int:
    """Which of the sorted means of non-empty subsets is the lower end, counted from 1: below it, 2 (1 + smaller ones) / flips < ALPHA."""
    return math.ceil(ALPHA * flips / 2 - DUST) - 1


def _listed(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    subsets, parts = _subsets(len(table))
    flips = subsets.shape[1]
    sums = table.T @ subsets
    # the second half are the complements of the first, whose sums are as far from zero
    half = sums[:, : flips // 2]
    p = (np.abs(table.sum(axis=0)[:, None] - 2 * half) >= _seen(table)[:, None]).mean(axis=1)
    means = sums[:, 1:] * parts
    low, high = _rank(flips) - 1, means.shape[1] - _rank(flips)
    means.partition((low, high), axis=1)
    return p, means[:, low].copy(), means[:, high].copy()  # a view would keep all means in memory


def _drawn(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each draw, the differences with a minus and the others are two subsets; theta is reached by a draw where one of the
    two means is at most theta (or, from above, at least)."""
    n, samples = table.shape
    total, seen = table.sum(axis=0), _seen(table)
    reached = np.zeros(samples)
    lows, highs = np.empty((RANDOM_FLIPS, samples)), np.empty((RANDOM_FLIPS, samples))
    for start, flips in zip(range(0, RANDOM_FLIPS, CHUNK), random_sign_blocks(n), strict=True):
        sums = flips @ table
        reached += (np.abs(sums) >= seen).sum(axis=0)
        minus = (n - flips.sum(axis=1, keepdims=True)) / 2
        with np.errstate(invalid="ignore"):
            sides = (total - sums) / 2 / minus, (total + sums) / 2 / (n - minus)
        # the draw without a minus, or without a plus, reaches every theta
        whole = (minus == 0) | (minus == n)
        lows[start : start + CHUNK] = np.where(whole, -np.inf, np.minimum(*sides))
        highs[start : start + CHUNK] = np.where(whole, np.inf, np.maximum(*sides))
    place = math.ceil(ALPHA * (RANDOM_FLIPS + 1) - DUST) - 1
    # copies: a view would keep the ends of all draws in memory
    low = np.partition(lows.T, place - 1, axis=1)[:, place - 1].copy()
    high = np.partition(highs.T, RANDOM_FLIPS - place, axis=1)[:, RANDOM_FLIPS - place].copy()
    return (reached + 1) / (RANDOM_FLIPS + 1), low, high


# --- two halves -------------------------------------------------------------------------------------------------------


def _half_sums(d: np.ndarray) -> np.ndarray:
    """The sums of all subsets, the empty one first."""
    sums = np.zeros(1)
    for x in d:
        sums = np.concatenate([sums, sums + x])
    return sums


def _halves(d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _half_sums(d[: len(d) // 2]), _half_sums(d[len(d) // 2 :])


def _by_halves(d: np.ndarray) -> float:
    """The exact p of one sample: sums of subsets of one half beside the sorted ones of the other, by binary search."""
    total, dust = float(d.sum()), DUST * float(np.abs(d).sum())
    seen = abs(total) - dust
    if seen <= 0:
        return 1.0
    left, right = _halves(d)
    left, right = np.sort(left), np.sort(right)
    # |total - 2 (l + r)| >= seen
    below = np.searchsorted(right, (total - seen) / 2 - left, side="right")
    above = len(right) - np.searchsorted(right, (total + seen) / 2 - left, side="left")
    return float((below.sum() + above.sum()) / 2 ** len(d))


def _end_by_halves(d: np.ndarray) -> float:
    """The lower end of one sample's interval: the smallest theta with enough subsets whose mean is at most theta.

    That count is nearly a normal distribution in theta, so a search on its quantiles takes few steps.
    """
    n, spread = len(d), float(d.max() - d.min())
    if spread <= DUST * float(np.abs(d).max()):
        return float(d.mean())
    (left, right), (left_sizes, right_sizes) = _halves(d), _halves(np.ones(n))
    flips = 1 << n
    wanted = float(special.ndtri((_rank(flips) - 0.5) / flips))
    step = float(d.std()) / math.sqrt(n - 1)
    low = float(d.mean()) - 2.1 * step
    high = low + 0.2 * step
    # a search for values that rise, or nearly so, is much faster
    order = np.argsort(low * left_sizes - left)
    left, left_sizes = left[order], left_sizes[order]

    @cache
    def above(theta: float) -> float:
        ordered = np.sort(right - theta * right_sizes)
        # the empty subset has no mean
        count = int(np.searchsorted(ordered, theta * left_sizes - left, side="right").sum()) - 1
        return float(special.ndtri((count + 0.25) / flips)) - wanted

    while above(low) > 0:
        low, high = low - 2 * (high - low), low
    while above(high) < 0:
        low, high = high, high + 2 * (high - low)
    return find_zero_crossing(above, low, high, FINE * spread)


def find_zero_crossing(above: Callable[[float], float], low: float, high: float, width: float) -> float:
    """Where a rising function goes from 0 or less at `low` to more at `high`: a point above 0, at most `width` beyond the crossing.

    Regula falsi, the end that stays halved in weight (Dowell and Jarratt, BIT 11, 1971). Not scipy.optimize's: its import takes longer than a
    hundred ends, and every table would pay for it.
    """
    below, over, side = above(low), above(high), 0
    width = max(width, 8 * math.ulp(max(abs(low), abs(high))))
    while high - low > width:
        inside = low + (high - low) * below / (below - over)
        # half a width off the nearer end, so that the bracket closes from both sides
        inside = min(max(inside, low + width / 2), high - width / 2)
        value = above(inside)
        if value > 0:
            high, over, below = inside, value, below / 2 if side > 0 else below
        else:
            low, below, over = inside, value, over / 2 if side < 0 else over
        side = 1 if value > 0 else -1
    return high
