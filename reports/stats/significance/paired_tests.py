"""Tests and intervals of matched differences, for many effects at once.

The unit is a configuration: the levels of all axes but the one in question. Its seeds are no further configurations.
docs/statistics.md has the formulas, their sources, and how often the intervals hold the truth.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from ....renamed import old_names
from .crossed_interval import crossed, student_interval
from .sign_flip_test import ALPHA as ALPHA
from .sign_flip_test import CHUNK, DUST, LEAST, MAX_EXACT_N, RANDOM_FLIPS, random_sign_blocks, sign_flip_interval

TIE_TOLERANCE = 1e-9
"""A difference of at most this share of the numbers behind it is none: what is left of a subtraction of equals."""
FITTED = "least-squares"
LOOKS = "looks"
METHODS = {
    "sign-flip": f"permutation of signs over configurations, exact up to {MAX_EXACT_N}, and its inversion",
    "t": f"Student's t over fewer than {LEAST} configurations",
    "crossed": "configurations crossed with seeds, Satterthwaite's and a generalized p",
    "seeds": "Student's t over the seeds of the only configuration, so of no other",
    FITTED: "least squares over the cells of a partial design, with variances that bear unequal spread (HC3) where there are cells to spare, else the pooled one",
    LOOKS: "Student's t over the seeds of the very configurations listed, at the level that the looks of the rule `stop` leave",
    "none": "no test: one run, or no variance to judge by",
}
"""How an interval and its p were made."""

Differences = Sequence[float] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """What matched differences come to.

    `n` configurations with up to `seeds` runs each; mean, median, and counts above, below and at zero are over the means of
    configurations. `low`, `high` and `p` (of a mean of zero) belong together: the 95% interval leaves out zero if and only
    if p < 0.05; all three are NaN by the method `none`. `p_sign` is the exact sign test's, ties left out. `method` is one of METHODS.
    """

    n: int
    seeds: int
    mean: float
    median: float
    up: int
    down: int
    ties: int
    low: float
    high: float
    p: float
    p_sign: float
    method: str


def paired_difference_tests(samples: Sequence[Differences], scales: Sequence[float] | None = None) -> list[PairedTest]:
    """One summary a sample, in the order given.

    A sample is an array [configurations], or [configurations, seeds] with NaN where a run is missing. `scales` are the
    largest numbers, in size, that the differences of each sample were taken from: differences within TIE of them are ties. Left out,
    the largest difference itself stands for them, which cannot tell where all are ties.
    """
    scales = [0.0] * len(samples) if scales is None else scales
    tables = [_cleaned(sample, scale) for sample, scale in zip(samples, scales, strict=True)]
    means = [_means(table, scale) for table, scale in zip(tables, scales, strict=True)]
    found: list[tuple[str, float, float, float]] = [_by_model(table, d) for table, d in zip(tables, means, strict=True)]
    sizes: dict[int, list[int]] = {}
    for place, (method, *_) in enumerate(found):
        if method == "sign-flip":
            sizes.setdefault(len(means[place]), []).append(place)
    for places in sizes.values():
        p, low, high = sign_flip_interval(np.stack([means[place] for place in places], axis=1))
        for column, place in enumerate(places):
            found[place] = ("sign-flip", float(low[column]), float(high[column]), float(p[column]))
    return [_summary(table, d, some) for table, d, some in zip(tables, means, found, strict=True)]


def corrected(
    samples: Sequence[Differences],
    summed: Sequence[PairedTest],
    keys: Sequence[Sequence[Hashable]] | None = None,
    scales: Sequence[float] | None = None,
) -> list[float]:
    """The p values of a family, corrected for its size, in the order given; NaN where a member has none.

    Westfall and Young's maxT where every member is tested by flips of signs, Holm's otherwise. `keys` name the configuration
    of every row of each sample, as its flips are common to all members that have it; left out, rows at one place belong together where
    all samples have the same number of them, else Holm's is used.
    """
    return corrected_families([(samples, summed, keys, scales)])[0]


FamilyOfTests = tuple[
    Sequence[Differences], Sequence[PairedTest], Sequence[Sequence[Hashable]] | None, Sequence[float] | None
]
"""The arguments of `corrected`."""


def corrected_families(families: Sequence[FamilyOfTests]) -> list[list[float]]:
    """Return the p values of `corrected` of every family, each given by its arguments: together they take a fraction of the time."""
    tests = [[test for test, one in enumerate(summed) if one.method != "none"] for _, summed, _, _ in families]
    by_flips = [_flips_of(*family, some) for family, some in zip(families, tests, strict=True)]
    flipped = iter(max_t_of_families([family for family in by_flips if family is not None]))
    p_values = []
    for (_, summed, _, _), some, family in zip(families, tests, by_flips, strict=True):
        p_of_tests = holm([summed[test].p for test in some]) if family is None else next(flipped)
        by_test = dict(zip(some, p_of_tests, strict=True))
        p_values.append([by_test.get(test, math.nan) for test in range(len(summed))])
    return p_values


def _flips_of(
    samples: Sequence[Differences],
    summed: Sequence[PairedTest],
    keys: Sequence[Sequence[Hashable]] | None,
    scales: Sequence[float] | None,
    tests: Sequence[int],
) -> Family | None:
    """Return the tests of a family as `max_t_of_families` takes them; None where it cannot take them."""
    if not tests or not all(summed[place].method == "sign-flip" for place in tests):
        return None
    if keys is None and len({len(samples[place]) for place in tests}) == 1:
        keys = [range(len(sample)) for sample in samples]
    if keys is None:
        return None
    scales = [0.0] * len(samples) if scales is None else scales
    tables = [_cleaned(samples[place], scales[place], rows=False) for place in tests]
    known = [np.isfinite(table).any(axis=1) for table in tables]
    d = [_means(table[rows], scales[place]) for table, rows, place in zip(tables, known, tests, strict=True)]
    named = [
        [key for key, there in zip(keys[place], rows, strict=True) if there]
        for rows, place in zip(known, tests, strict=True)
    ]
    return d, named, [summed[place].p for place in tests]


def _signs_alone(up: int, down: int) -> float:
    return min(1.0, 2 * float(special.bdtr(min(up, down), up + down, 0.5))) if up + down else 1.0


def _cleaned(sample: Differences, scale: float, *, rows: bool = True) -> np.ndarray:
    """A sample as [configurations, seeds] with ties as 0 and, with `rows`, without rows and columns that hold nothing."""
    table = np.array(sample, dtype=float)
    table = table[:, None] if table.ndim == 1 else table
    there = np.isfinite(table)
    largest = max(scale, float(np.abs(table[there]).max())) if there.any() else scale
    table[there & (np.abs(np.where(there, table, 0.0)) <= TIE_TOLERANCE * largest)] = 0.0
    table[~there] = math.nan
    return table[there.any(axis=1)][:, there.any(axis=0)] if rows and not there.all() else table


def _means(table: np.ndarray, scale: float) -> np.ndarray:
    """The mean of each configuration over its seeds."""
    if table.shape[1] == 1 or not table.size:
        return table.reshape(len(table), -1)[:, 0] if table.size else np.zeros(0)
    there = np.isfinite(table)
    values = np.where(there, table, 0.0)
    d = values.sum(axis=1) / there.sum(axis=1)
    return np.where(np.abs(d) <= TIE_TOLERANCE * max(scale, float(np.abs(values).max())), 0.0, d)


def _by_model(table: np.ndarray, d: np.ndarray) -> tuple[str, float, float, float]:
    """Method, low, high and p of a sample; NaN for `sign-flip`, which many samples do at once."""
    several = bool((np.isfinite(table).sum(axis=1) > 1).any()) if table.size else False
    method, found = "sign-flip", (math.nan, math.nan, math.nan)
    if several and len(d) == 1:
        method, found = "seeds", student_interval(table[np.isfinite(table)])
    elif several and (known := crossed(table)) is not None:
        method, found = "crossed", known
    elif len(d) < LEAST:
        method, found = "t", student_interval(d)
    if method != "sign-flip" and math.isnan(found[2]):
        method = "none"
    return method, *found


def _summary(table: np.ndarray, d: np.ndarray, found: tuple[str, float, float, float]) -> PairedTest:
    method, low, high, p = found
    up, down = int((d > 0).sum()), int((d < 0).sum())
    return PairedTest(
        n=len(d),
        seeds=int(np.isfinite(table).sum(axis=1).max()) if table.size else 0,
        mean=float(d.mean()) if len(d) else math.nan,
        median=float(np.median(d)) if len(d) else math.nan,
        up=up,
        down=down,
        ties=len(d) - up - down,
        low=low,
        high=high,
        p=p,
        p_sign=_signs_alone(up, down),
        method=method,
    )


# --- correction for a family of tests ---------------------------------------------------------------------------------


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
"""The tests of a family, as `max_t_of_families` takes them: samples, keys, and uncorrected p values."""


def max_t_of_families(families: Sequence[Family]) -> list[list[float]]:
    """Return step-down maxT p values (Westfall and Young 1993) of tests of signs, family by family in the order given.

    Samples are differences, keys name the configuration of each: a flip turns all differences of a configuration, in
    every sample, at once, so that the dependence between the tests is kept. The statistic is studentised, |sum d| / sqrt(sum d^2),
    which is Student's t in a form whose variance is 1 under flips for every n. No p falls below its own uncorrected one.
    Every flip is counted up to LISTED configurations, FLIPS draws beyond; these are drawn once for all families of one size.
    """
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
    for flips in random_sign_blocks(n):
        for count, (table, seen) in zip(counts, families, strict=True):
            count += _count(flips, table, seen)
    return [count / (RANDOM_FLIPS + 1) for count in counts]


def _count(flips: np.ndarray, table: np.ndarray, seen: np.ndarray) -> np.ndarray:
    total = np.zeros(len(seen))
    for start in range(0, len(flips), CHUNK):
        sizes = np.abs(flips[start : start + CHUNK] @ table)
        largest = np.maximum.accumulate(sizes[:, ::-1], axis=1)[:, ::-1]
        total += (largest >= seen - DUST * math.sqrt(len(table))).sum(axis=0)
    return total


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
