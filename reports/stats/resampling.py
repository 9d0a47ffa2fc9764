"""Tests and intervals of matched differences, for many effects at once.

Effects over the same number of pairs share their random draws, which therefore are made once, a thousand at a time, and
are not kept: memory does not grow with the sweep. Every draw starts from RANDOM, so that tables repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

__all__ = ["EXACT", "FLIPS", "RESAMPLES", "Summary", "bootstrap", "holm", "sign_flip", "sign_test", "summaries"]

RESAMPLES = 10_000
EXACT = 30  # pairs up to which every flip of signs is counted
FLIPS = 20_000  # random flips beyond that
MANY = 200  # pairs beyond which draws are made in a way that is ten times as fast for them, and slower for fewer
CHUNK = 1_000  # draws held in memory at a time
RANDOM = 20_260
ALPHA = 0.05

Differences = Sequence[float] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What matched differences come to: mean, median, how many are above and below zero, the 95% bootstrap interval of the
    mean (NaN for fewer than two), and the p values of the sign test and of the permutation of signs."""

    mean: float
    median: float
    up: int
    down: int
    low: float
    high: float
    p_sign: float
    p_permutation: float


def summaries(samples: Sequence[Differences]) -> list[Summary]:
    """One summary a sample, in the order given; samples of one size are drawn for together."""
    arrays = [np.asarray(sample, dtype=float) for sample in samples]
    sizes: dict[int, list[int]] = {}
    for place, d in enumerate(arrays):
        sizes.setdefault(len(d), []).append(place)
    found: dict[int, Summary] = {}
    for n, places in sizes.items():
        table = np.stack([arrays[place] for place in places], axis=1)
        lows, highs = _intervals(table)
        flips = _flips(table)
        for column, place in enumerate(places):
            d = arrays[place]
            found[place] = Summary(
                mean=float(d.mean()) if n else math.nan,
                median=float(np.median(d)) if n else math.nan,
                up=int((d > 0).sum()),
                down=int((d < 0).sum()),
                low=float(lows[column]),
                high=float(highs[column]),
                p_sign=sign_test(d),
                p_permutation=float(flips[column]),
            )
    return [found[place] for place in range(len(arrays))]


def sign_test(differences: Differences) -> float:
    """Two-sided exact sign test: probability of as uneven a split of the non-zero differences by chance. 1 without any."""
    d = np.asarray(differences, dtype=float)
    up, down = int((d > 0).sum()), int((d < 0).sum())
    return float(stats.binomtest(up, up + down).pvalue) if up + down else 1.0


def sign_flip(differences: Differences) -> float:
    """Two-sided permutation test of the mean difference: how often random signs give one as large.

    Exact up to EXACT pairs (two halves of sums, combined by binary search), from FLIPS seeded draws beyond.
    """
    return float(_flips(np.asarray(differences, dtype=float)[:, None])[0])


def bootstrap(differences: Differences) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, 95%, from RESAMPLES seeded draws. NaN for fewer than two."""
    low, high = _intervals(np.asarray(differences, dtype=float)[:, None])
    return float(low[0]), float(high[0])


def holm(p_values: Sequence[float]) -> list[float]:
    """p values after Holm's correction for the whole family, in the order given."""
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]] if p_values else []


# --- tables of differences: a row a pair, a column an effect ----------------------------------------------------------


def _flips(table: np.ndarray) -> np.ndarray:
    n = len(table)
    if n <= EXACT:
        return np.array([_every_flip(column) for column in table.T])
    seen = np.abs(table.sum(axis=0)) - 1e-9 * np.abs(table).sum(axis=0)
    found = sum((np.abs(signs @ table) >= seen).sum(axis=0) for signs in _signs(n))
    return np.asarray((found + 1) / (FLIPS + 1))


def _every_flip(d: np.ndarray) -> float:
    seen = abs(float(d.sum())) - 1e-9 * float(np.abs(d).sum())
    if seen <= 0:
        return 1.0
    left, right = _half_sums(d[: len(d) // 2]), np.sort(_half_sums(d[len(d) // 2 :]))
    above = len(right) - np.searchsorted(right, seen - left, side="left")
    below = np.searchsorted(right, -seen - left, side="right")
    return float((above.sum() + below.sum()) / 2 ** len(d))


def _half_sums(d: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for x in d:
        sums = np.concatenate([sums - x, sums + x])
    return sums


def _intervals(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n, effects = table.shape
    if n < 2:
        return np.full(effects, math.nan), np.full(effects, math.nan)
    means = np.concatenate([weights @ table for weights in _weights(n)])
    low, high = np.quantile(means, [ALPHA / 2, 1 - ALPHA / 2], axis=0)
    return low, high


def _signs(n: int) -> Iterator[np.ndarray]:
    """FLIPS rows of n random signs, as [CHUNK, n] at a time."""
    draw = np.random.default_rng((RANDOM, n))
    for _ in range(FLIPS // CHUNK):
        if n <= MANY:
            yield draw.choice(np.array([-1.0, 1.0]), size=(CHUNK, n))
        else:
            bits = np.frombuffer(draw.bytes(CHUNK * ((n + 7) // 8)), dtype=np.uint8)
            yield 1.0 - 2.0 * np.unpackbits(bits.reshape(CHUNK, -1), axis=1, count=n)


def _weights(n: int) -> Iterator[np.ndarray]:
    """How often each of n pairs is drawn, RESAMPLES times, as weights that sum to 1: [CHUNK, n] at a time."""
    draw = np.random.default_rng((RANDOM, n))
    for _ in range(RESAMPLES // CHUNK):
        if n <= MANY:
            yield draw.multinomial(n, np.full(n, 1 / n), size=CHUNK) / n
        else:
            # row r counts its draws in places r n to r n + n - 1
            places = (
                draw.integers(0, n, size=(CHUNK, n), dtype=np.int32) + n * np.arange(CHUNK, dtype=np.int64)[:, None]
            )
            yield np.bincount(places.ravel(), minlength=CHUNK * n).reshape(CHUNK, n) / n
