"""Sign-flip permutation test, its inversion into a confidence interval, and shared random signs.

If a level has no effect, each matched difference is as likely to be +d as -d, so the observed sum is one of 2^n equally
likely ones. The interval holds the effects that this test does not reject at 5%; its ends are means of subsets of the
differences. The test is exact up to MAX_EXACT_N differences. Beyond, it uses RANDOM_FLIPS draws, the same for all
samples of one size and in every run.

Source:
    Hartigan 1969.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import numpy as np
from scipy import special

from ....results.console.cores import usable_cores

ALPHA = 0.05
MIN_TEST_N = 6  # smallest number of differences with which p can fall below 5%
MAX_EXACT_N = 30  # largest number of differences for which every flip is counted
MAX_ENUMERATED_N = 16  # largest number of differences whose flips are enumerated; beyond, two halves are combined
RANDOM_FLIPS = 20_000  # number of random flips beyond MAX_EXACT_N
SIGN_BLOCK = 1_000  # draws per block in memory
MAX_PART_SIGNS = 250_000  # random signs that a thread holds at a time
SAMPLE_BLOCK = 64  # samples per block
ROUNDING_TOLERANCE = 1e-9  # rounding tolerance of a sum, as a share of the sum of absolute values
END_PRECISION = 1e-6  # precision of an interval end by halves, as a share of the range of the differences
RANDOM_SEED = 20_260
MAX_THREADS = 4  # threads that share the random flips; each holds a part of the signs

Result = TypeVar("Result")


def sign_flip_interval(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sign-flip test of every column, with the 95% interval of its mean by test inversion.

    A flip gives each difference of a column a random sign; the statistic is the absolute sum, not studentised. All
    flips count up to 30 differences; beyond, 20,000 fixed random ones and the observed one.

    Args:
        table: Differences [difference, sample], without NaN.

    Returns:
        (p, low, high), each [sample]. p is two-sided: the share of flips whose absolute sum is at least the observed
        one. The interval excludes zero if and only if p < 0.05. Ends are NaN with fewer than six differences; p is then
        still given.
    """
    n, samples = table.shape
    if n < MIN_TEST_N:
        nothing = np.full(samples, math.nan)
        return sign_flip_p_values(table), nothing, nothing.copy()
    if MAX_ENUMERATED_N < n <= MAX_EXACT_N:
        p = sign_flip_p_values(table)
        low = np.array([_split_half_lower_end(d) for d in table.T])
        high = np.array([-_split_half_lower_end(-d) for d in table.T])
    else:
        method = _enumerated_test if n <= MAX_ENUMERATED_N else _sampled_test
        # blocks have the same number of elements for every n
        step = min(SAMPLE_BLOCK, (1 << MAX_ENUMERATED_N + 4) >> n) if n <= MAX_ENUMERATED_N else SAMPLE_BLOCK
        parts = [method(table[:, start : start + step]) for start in range(0, samples, step)]
        p, low, high = (np.concatenate(blocks) for blocks in zip(*parts, strict=True))
    # a sum of zero up to rounding counts as reached, so the interval must then include zero
    is_accepted = p >= ALPHA
    return p, np.where(is_accepted, np.minimum(low, 0), low), np.where(is_accepted, np.maximum(high, 0), high)


def sign_flip_p_values(table: np.ndarray) -> np.ndarray:
    """Return the two-sided p values of `sign_flip_interval`, [sample], in a tenth of the time.

    Args:
        table: Differences [difference, sample], without NaN.
    """
    n = len(table)
    if n <= MAX_EXACT_N:
        return np.array([_split_half_p(d) for d in table.T])
    observed = _observed_size(table)
    reached = sum(
        ((np.abs(flips @ table) >= observed).sum(axis=0) for flips in random_sign_blocks(n)), np.zeros(len(observed))
    )
    return np.asarray((reached + 1) / (RANDOM_FLIPS + 1))


def random_sign_blocks(n: int) -> Iterator[np.ndarray]:
    """Yield 20,000 rows (RANDOM_FLIPS) of n random signs (+1.0 or -1.0) in blocks [1,000, n].

    The signs depend on n alone and are the same in every call and process.
    """
    for bits in _random_bit_blocks(n):
        yield _signs_of_bits(bits, n)


def map_sign_blocks(n: int, work: Callable[[int, np.ndarray], Result]) -> list[Result]:
    """Return `work(start, signs)` of all draws of `random_sign_blocks`, in order and in parts that fit in a cache.

    Several threads work at once, on the cores that this process may use. NumPy releases the interpreter's lock, and
    the results do not depend on the number of threads.

    Args:
        n: Number of differences.
        work: Function of the number of draws before the part, and its signs [draw, n].
    """
    rows = max(1, SIGN_BLOCK // math.ceil(n * SIGN_BLOCK / MAX_PART_SIGNS))

    def part_result(part: tuple[int, np.ndarray]) -> Result:
        start, bits = part
        return work(start, _signs_of_bits(bits, n))

    blocks = zip(range(0, RANDOM_FLIPS, SIGN_BLOCK), _random_bit_blocks(n), strict=True)
    parts = [(start + row, bits[row : row + rows]) for start, bits in blocks for row in range(0, SIGN_BLOCK, rows)]
    with ThreadPoolExecutor(min(MAX_THREADS, usable_cores())) as pool:
        return list(pool.map(part_result, parts))


def _random_bit_blocks(n: int) -> Iterator[np.ndarray]:
    """Yield the signs of `random_sign_blocks` as bits, in blocks of bytes [1,000, bytes of n bits]."""
    draw = np.random.default_rng((RANDOM_SEED, n))
    for _ in range(RANDOM_FLIPS // SIGN_BLOCK):
        bits = np.frombuffer(draw.bytes(SIGN_BLOCK * ((n + 7) // 8)), dtype=np.uint8)
        yield bits.reshape(SIGN_BLOCK, -1)


def _signs_of_bits(bits: np.ndarray, n: int) -> np.ndarray:
    """Return the signs [row, n], as floats, of rows of bytes: -1.0 for a bit that is set."""
    # bytes as long as possible: with many differences, floats take longer to create than to multiply
    turned = np.unpackbits(bits, axis=1, count=n).view(np.int8)
    turned *= -2
    turned += 1
    return turned.astype(float)


def _observed_size(table: np.ndarray) -> np.ndarray:
    """Return the absolute sum of each column, reduced by the rounding tolerance, [sample]."""
    return np.asarray(np.abs(table.sum(axis=0)) - ROUNDING_TOLERANCE * np.abs(table).sum(axis=0))


@cache
def _subsets(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all subsets of n elements and the inverse of their sizes; cached, and not to be changed.

    Returns:
        (membership [n, 2^n] of 0.0 and 1.0, the empty subset first and those without the last element in the first
        half; 1 / size of all but the empty subset [2^n - 1]).
    """
    subsets = np.ascontiguousarray(((np.arange(1 << n) >> np.arange(n)[:, None]) & 1).astype(float))
    return subsets, 1 / subsets[:, 1:].sum(axis=0)


def _lower_end_rank(flips: int) -> int:
    """Return the rank, counted from 1, of the lower interval end among the sorted means of non-empty subsets.

    Means of a smaller rank r have 2 r / flips < ALPHA and are rejected.

    Args:
        flips: Number of sign flips, 2^n.
    """
    return math.ceil(ALPHA * flips / 2 - ROUNDING_TOLERANCE) - 1


def _enumerated_test(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (p, low, high), each [sample], from an enumeration of all 2^n flips of `table` [difference, sample].

    Interval ends are means of subsets of the differences. Memory grows with 2^n times the number of samples.
    """
    subsets, parts = _subsets(len(table))
    flips = subsets.shape[1]
    sums = table.T @ subsets
    # subsets of the second half are complements of the first, with the same absolute statistic
    half = sums[:, : flips // 2]
    p = (np.abs(table.sum(axis=0)[:, None] - 2 * half) >= _observed_size(table)[:, None]).mean(axis=1)
    means = sums[:, 1:] * parts
    low, high = _lower_end_rank(flips) - 1, means.shape[1] - _lower_end_rank(flips)
    # one rank at a time, which numpy has a several times faster method for
    means.partition(low, axis=1)
    means[:, low + 1 :].partition(high - low - 1, axis=1)
    return p, means[:, low].copy(), means[:, high].copy()  # a view would keep all means in memory


def _sampled_test(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (p, low, high), each [sample], from 20,000 random flips of `table` [difference, sample].

    Each draw splits the differences into two subsets, those with a minus and the others. A draw reaches an effect theta
    if one of the two means is at most theta (or at least theta, for the upper end). p is (reached + 1) / 20,001, and
    the ends invert that p.
    """
    n, samples = table.shape
    # a row per sample, so that every pass below runs along contiguous draws
    rows, total, observed = table.T, table.sum(axis=0)[:, None], _observed_size(table)[:, None]
    lows, highs = np.empty((samples, RANDOM_FLIPS)), np.empty((samples, RANDOM_FLIPS))

    def add_draws(start: int, flips: np.ndarray) -> np.ndarray:
        """Write the ends of these draws to `lows` and `highs`; return how many of them reach each sample's sum."""
        sums = rows @ flips.T
        reached = np.count_nonzero(np.abs(sums) >= observed, axis=1)
        minus = (n - flips.sum(axis=1)) / 2
        # a draw with a single sign reaches every theta
        has_single_side = (minus == 0) | (minus == n)
        minus[has_single_side] = n / 2
        # in place: new arrays would take as long as the arithmetic
        minus_theta = np.subtract(total, sums)
        minus_theta *= 0.5 / minus
        sums += total
        sums *= 0.5 / (n - minus)
        low, high = lows[:, start : start + len(flips)], highs[:, start : start + len(flips)]
        np.minimum(minus_theta, sums, out=low)
        np.maximum(minus_theta, sums, out=high)
        low[:, has_single_side], high[:, has_single_side] = -np.inf, np.inf
        return reached

    reached = sum(map_sign_blocks(n, add_draws), np.zeros(samples))
    rank = math.ceil(ALPHA * (RANDOM_FLIPS + 1) - ROUNDING_TOLERANCE) - 1
    lows.partition(rank - 1, axis=1)
    highs.partition(RANDOM_FLIPS - rank, axis=1)
    # copies: a view would keep the ends of all draws in memory
    low, high = lows[:, rank - 1].copy(), highs[:, RANDOM_FLIPS - rank].copy()
    return (reached + 1) / (RANDOM_FLIPS + 1), low, high


# --- two halves -------------------------------------------------------------------------------------------------------


def _half_sums(d: np.ndarray) -> np.ndarray:
    """Return the sums of all subsets of `d`, [2^n], the empty subset first."""
    sums = np.zeros(1)
    for x in d:
        sums = np.concatenate([sums, sums + x])
    return sums


def _halves(d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the subset sums of the first and of the second half of `d`."""
    return _half_sums(d[: len(d) // 2]), _half_sums(d[len(d) // 2 :])


def _split_half_p(d: np.ndarray) -> float:
    """Return the exact two-sided p value of one sample [n], from subset sums of its two halves (meet in the middle).

    1 if the sum is zero up to rounding. Takes 2^(n/2) memory.
    """
    total, dust = float(d.sum()), ROUNDING_TOLERANCE * float(np.abs(d).sum())
    observed = abs(total) - dust
    if observed <= 0:
        return 1.0
    first_half, second_sums = _halves(d)
    first_half, second_sums = np.sort(first_half), np.sort(second_sums)
    # |total - 2 (first + second)| >= observed
    below = np.searchsorted(second_sums, (total - observed) / 2 - first_half, side="right")
    above = len(second_sums) - np.searchsorted(second_sums, (total + observed) / 2 - first_half, side="left")
    return float((below.sum() + above.sum()) / 2 ** len(d))


def _split_half_lower_end(d: np.ndarray) -> float:
    """Return the lower end of the 95% interval of one sample [n], up to 1e-6 of the range of its differences.

    It is the smallest theta with enough subsets whose mean is at most theta. The number of such subsets is nearly
    normal in theta, so a root search on its normal quantiles takes few steps. Equal differences give their mean.
    """
    n, spread = len(d), float(d.max() - d.min())
    if spread <= ROUNDING_TOLERANCE * float(np.abs(d).max()):
        return float(d.mean())
    (first_sums, second_sums), (first_sizes, second_sizes) = _halves(d), _halves(np.ones(n))
    flips = 1 << n
    target = float(special.ndtri((_lower_end_rank(flips) - 0.5) / flips))
    step = float(d.std()) / math.sqrt(n - 1)
    low = float(d.mean()) - 2.1 * step
    high = low + 0.2 * step
    # searchsorted is much faster on nearly sorted values
    order = np.argsort(low * first_sizes - first_sums)
    first_sums, first_sizes = first_sums[order], first_sizes[order]

    @cache
    def above(theta: float) -> float:
        """Return the normal quantile of the share of subsets with a mean of at most theta, minus the required one.

        Cached by theta.
        """
        ordered = np.sort(second_sums - theta * second_sizes)
        # the empty subset has no mean
        count = int(np.searchsorted(ordered, theta * first_sizes - first_sums, side="right").sum()) - 1
        return float(special.ndtri((count + 0.25) / flips)) - target

    while above(low) > 0:
        low, high = low - 2 * (high - low), low
    while above(high) < 0:
        low, high = high, high + 2 * (high - low)
    return find_zero_crossing(above, low, high, END_PRECISION * spread)


def find_zero_crossing(above: Callable[[float], float], low: float, high: float, width: float) -> float:
    """Return a point where an increasing function is above zero, at most `width` beyond its zero crossing.

    scipy.optimize is not used: its import takes longer than a hundred searches, and every table would pay for it.

    Args:
        above: The function.
        low: Start of the bracket, where the function is at most 0.
        high: End of the bracket, where it is above 0.
        width: Largest distance from the crossing; at least eight units in the last place.

    Source:
        Regula falsi with a halved weight of a retained end (Illinois): Dowell and Jarratt, BIT 11, 1971.
    """
    below, over, side = above(low), above(high), 0
    width = max(width, 8 * math.ulp(max(abs(low), abs(high))))
    while high - low > width:
        inside = low + (high - low) * below / (below - over)
        # at least half a width from either end, so that the bracket shrinks from both sides
        inside = min(max(inside, low + width / 2), high - width / 2)
        value = above(inside)
        if value > 0:
            high, over, below = inside, value, below / 2 if side > 0 else below
        else:
            low, below, over = inside, value, over / 2 if side < 0 else over
        side = 1 if value > 0 else -1
    return high
