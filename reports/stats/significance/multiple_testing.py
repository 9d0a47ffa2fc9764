"""p values corrected for how many tests a family holds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from .sign_flip_test import CHUNK, DUST, FLIPS, signs

__all__ = ["holm", "max_t", "max_t_of_families"]

LISTED = 14  # configurations up to which every flip of a family is counted


def holm(p_values: Sequence[float]) -> list[float]:
    """p values after Holm's correction for the whole family, in the order given. NaN is no test and counts for none."""
    # not statsmodels' multipletests, which collects the garbage of the whole process at every call
    found = np.array(p_values, dtype=float)
    known = np.flatnonzero(np.isfinite(found))
    order = known[np.argsort(found[known], kind="stable")]
    found[order] = np.minimum(1, np.maximum.accumulate(found[order] * np.arange(len(order), 0, -1)))
    return [float(p) for p in found]


Family = tuple[Sequence[np.ndarray], Sequence[Sequence[Hashable]], Sequence[float]]
"""The tests of a family, as `max_t` takes them: samples, keys, and uncorrected p values."""


def max_t(samples: Sequence[np.ndarray], keys: Sequence[Sequence[Hashable]], alone: Sequence[float]) -> list[float]:
    """Step-down maxT p values (Westfall and Young 1993) of tests of signs, in the order given.

    `samples` are differences, `keys` name the configuration of each: a flip turns all differences of a configuration, in
    every sample, at once, so that the dependence between the tests is kept. The statistic is studentised, |sum d| / sqrt(sum d^2),
    which is Student's t in a form whose variance is 1 under flips for every n. `alone` are the uncorrected p values: none falls below its own.
    Every flip is counted up to LISTED configurations, FLIPS draws beyond.
    """
    return max_t_of_families([(samples, keys, alone)])[0]


def max_t_of_families(families: Sequence[Family]) -> list[list[float]]:
    """Return the p values of `max_t` of every family; random signs are drawn once for all families of one size."""
    studied = [_studentised(samples, keys) for samples, keys, _ in families]
    by_size: dict[int, list[int]] = {}
    for index, (table, _, _) in enumerate(studied):
        by_size.setdefault(len(table), []).append(index)
    p_values: list[list[float]] = [[]] * len(families)
    for indices in by_size.values():
        counted = _reached([studied[index][:2] for index in indices])
        for index, reached in zip(indices, counted, strict=True):
            order, alone = studied[index][2], families[index][2]
            stepped = np.empty(len(order))
            stepped[order] = np.maximum.accumulate(reached)
            p_values[index] = [float(max(p, own)) for p, own in zip(stepped, alone, strict=True)]
    return p_values


def _studentised(
    samples: Sequence[np.ndarray], keys: Sequence[Sequence[Hashable]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the differences of a family as [configuration, test], the statistic of each test, and their order in `samples`.

    Tests stand from the largest statistic to the smallest.
    """
    places = {key: place for place, key in enumerate(dict.fromkeys(key for some in keys for key in some))}
    table = np.zeros((len(places), len(samples)))
    for column, (d, some) in enumerate(zip(samples, keys, strict=True)):
        np.add.at(table[:, column], [places[key] for key in some], d)
    sizes = np.sqrt([float((np.asarray(d) ** 2).sum()) for d in samples])
    # without a difference that is not zero there is nothing to flip, and the statistic is 0
    table /= np.where(sizes > 0, sizes, 1.0)
    seen = np.abs(table.sum(axis=0))
    order = np.argsort(-seen, kind="stable")
    return table[:, order], seen[order], order


def _reached(families: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Return, for families of one size, the share of flips that have, among a test and all less extreme ones (columns from the
    most extreme on), one as large as seen."""
    n = len(families[0][0])
    if n <= LISTED:
        # a flip and its opposite are alike
        half = 1 << max(n - 1, 0)
        every = 1.0 - 2.0 * ((np.arange(half)[:, None] >> np.arange(n)) & 1)
        return [_count(every, table, seen) / half for table, seen in families]
    counts = [np.ones(len(seen)) for _, seen in families]
    for flips in signs(n):
        for count, (table, seen) in zip(counts, families, strict=True):
            count += _count(flips, table, seen)
    return [count / (FLIPS + 1) for count in counts]


def _count(flips: np.ndarray, table: np.ndarray, seen: np.ndarray) -> np.ndarray:
    total = np.zeros(len(seen))
    for start in range(0, len(flips), CHUNK):
        sizes = np.abs(flips[start : start + CHUNK] @ table)
        largest = np.maximum.accumulate(sizes[:, ::-1], axis=1)[:, ::-1]
        total += (largest >= seen - DUST * math.sqrt(len(table))).sum(axis=0)
    return total
