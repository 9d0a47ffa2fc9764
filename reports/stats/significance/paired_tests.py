"""Tests and 95% intervals of matched (paired) differences, with correction for families of tests.

The unit is a configuration: the levels of all axes but the compared one. Its seeds are repeated observations, not
further units. docs/explanation/statistics.md has the formulas, their sources and the coverage of the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from ....renamed import old_names
from .crossed_interval import crossed_interval, student_interval
from .sign_flip_test import ALPHA as ALPHA
from .sign_flip_test import (
    MAX_EXACT_N,
    MIN_TEST_N,
    RANDOM_FLIPS,
    ROUNDING_TOLERANCE,
    map_sign_blocks,
    sign_flip_interval,
)

TIE_TOLERANCE = 1e-9
"""A difference of at most this share of the numbers behind it is none: what is left of a subtraction of equals."""
FITTED = "least-squares"
LOOKS = "looks"
METHOD_LABELS = {
    "sign-flip": f"sign-flip permutation test over configurations, exact up to {MAX_EXACT_N}, inverted for the interval",
    "t": f"Student's t over configurations where there are fewer than {MIN_TEST_N}",
    "crossed": "configurations crossed with seeds, weighted mean of Satterthwaite's and the generalized p",
    "seeds": "Student's t over the seeds of the only configuration, which says nothing about others",
    FITTED: "least squares over the cells of a partial design, with variances robust to unequal spread (HC3) where there are enough cells, else the pooled variance",
    LOOKS: "Student's t over the seeds of exactly these configurations, at the level left by the sequential stopping rule `stop`",
    "none": "no test: a single run, or no variance",
}
"""Description of the procedure behind interval and p, by `PairedTest.method`."""

Differences = Sequence[float] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Result of a paired test: mean and median difference, 95% interval and p values.

    `n` configurations have up to `seeds` runs each. `mean`, `median` and the counts `up`, `down` and `ties` (above,
    below and at zero) are over the means of configurations; mean and median are NaN for an empty sample. `low`, `high`
    and `p` (two-sided, of a mean of zero) belong to one procedure: the interval excludes zero if and only if p < 0.05.
    All three are NaN for the method `none`. `p_sign` is the exact two-sided sign test without ties, 1 if all are ties.
    `method` is "sign-flip", "t", "crossed", "seeds", "least-squares" (partial designs), "looks" (stopping rule) or
    "none".
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
    """Return one paired test per sample, in the order of the samples.

    The first procedure that applies is used: Student's t over the runs, for one configuration with several seeds
    (method `seeds`). Crossed random effects, with several seeds in a design that can separate them (`crossed`).
    Student's t over configuration means, for fewer than 6 configurations (`t`). The sign-flip permutation test of
    configuration means and its inversion (`sign-flip`). The first three need a variance: without one, for a single run
    and for an empty sample the method is `none`, with NaN for low, high and p.

    Args:
        samples: Arrays [configuration], or [configuration, seed] with NaN (or infinity) where a run is missing.
            Configurations and seeds without any run are dropped.
        scales: For each sample, the largest absolute value of the numbers that were subtracted. Differences of at most
            1e-9 times it, or times the largest difference, are ties and set to 0. None stands for 0, which
            cannot recognise a sample of ties only.
    """
    scales = [0.0] * len(samples) if scales is None else scales
    tables = [_clean_table(sample, scale) for sample, scale in zip(samples, scales, strict=True)]
    means = [_means(table, scale) for table, scale in zip(tables, scales, strict=True)]
    results: list[tuple[str, float, float, float]] = [
        _test_by_design(table, d) for table, d in zip(tables, means, strict=True)
    ]
    sizes: dict[int, list[int]] = {}
    for index, (method, *_) in enumerate(results):
        if method == "sign-flip":
            sizes.setdefault(len(means[index]), []).append(index)
    for indices in sizes.values():
        p, low, high = sign_flip_interval(np.stack([means[index] for index in indices], axis=1))
        for column, index in enumerate(indices):
            results[index] = ("sign-flip", float(low[column]), float(high[column]), float(p[column]))
    return [_paired_test(table, d, result) for table, d, result in zip(tables, means, results, strict=True)]


def correct_family(
    samples: Sequence[Differences],
    summed: Sequence[PairedTest],
    keys: Sequence[Sequence[Hashable]] | None = None,
    scales: Sequence[float] | None = None,
) -> list[float]:
    """Return the p values of a family of tests, corrected for multiple testing; NaN for a test without p.

    The correction is Westfall and Young's step-down maxT if every test with a p is a sign-flip test, else Holm's. Tests
    without p (method `none`) do not count for the size of the family.

    Args:
        samples: Differences of each test, [configuration] or [configuration, seed].
        summed: Results of `paired_difference_tests` for these samples.
        keys: Configuration of each row of each sample; tests with a common configuration share its flips. None: rows at
            equal positions belong together if all samples have the same length; otherwise Holm's correction is used.
        scales: Largest absolute value behind each sample, as for `paired_difference_tests`.

    Returns:
        One p value per test, in the order of `samples`.
    """
    return correct_families([(samples, summed, keys, scales)])[0]


FamilyOfTests = tuple[
    Sequence[Differences], Sequence[PairedTest], Sequence[Sequence[Hashable]] | None, Sequence[float] | None
]
"""Arguments of the correction of one family: samples, results, keys, scales."""


def correct_families(families: Sequence[FamilyOfTests]) -> list[list[float]]:
    """Return the corrected p values of several families, each given as (samples, results, keys, scales).

    Each family is corrected by itself: by step-down maxT if every test with a p is a sign-flip test (and keys are
    given, or samples are of equal length), else by Holm. One call is several times faster than one call per family,
    since families of one size share their random flips.

    Returns:
        One list per family, one p value per test, in the order given; NaN for a test without p.
    """
    tests = [
        [test for test, test_result in enumerate(summed) if test_result.method != "none"]
        for _, summed, _, _ in families
    ]
    by_flips = [_sign_flip_family(*family, test_indices) for family, test_indices in zip(families, tests, strict=True)]
    flipped = iter(max_t_of_families([family for family in by_flips if family is not None]))
    p_values = []
    for (_, summed, _, _), test_indices, family in zip(families, tests, by_flips, strict=True):
        p_of_tests = holm([summed[test].p for test in test_indices]) if family is None else next(flipped)
        by_test = dict(zip(test_indices, p_of_tests, strict=True))
        p_values.append([by_test.get(test, math.nan) for test in range(len(summed))])
    return p_values


def _sign_flip_family(
    samples: Sequence[Differences],
    summed: Sequence[PairedTest],
    keys: Sequence[Sequence[Hashable]] | None,
    scales: Sequence[float] | None,
    tests: Sequence[int],
) -> SignFlipFamily | None:
    """Return (samples, keys, p values) of a family for `max_t_of_families`, over the tests in `tests` only.

    The samples are means of configurations over their seeds, [configuration]; configurations without a run are dropped.

    Args:
        samples: Differences of each test.
        summed: Results of the tests.
        keys: Configuration of each row of each sample; None for positions.
        scales: Largest absolute value behind each sample; None for the largest difference.
        tests: Indices of the tests that have a p value.

    Returns:
        None if there is no test, if one is no sign-flip test, or if `keys` is None and the samples differ in length.
    """
    if not tests or not all(summed[test].method == "sign-flip" for test in tests):
        return None
    if keys is None and len({len(samples[test]) for test in tests}) == 1:
        keys = [range(len(sample)) for sample in samples]
    if keys is None:
        return None
    scales = [0.0] * len(samples) if scales is None else scales
    tables = [_clean_table(samples[test], scales[test], drop_empty=False) for test in tests]
    present = [np.isfinite(table).any(axis=1) for table in tables]
    d = [_means(table[rows], scales[test]) for table, rows, test in zip(tables, present, tests, strict=True)]
    named = [
        keys[test] if rows.all() else [key for key, is_present in zip(keys[test], rows, strict=True) if is_present]
        for rows, test in zip(present, tests, strict=True)
    ]
    return d, named, [summed[test].p for test in tests]


def _sign_test_p(up: int, down: int) -> float:
    """Return the exact two-sided p value of the sign test; 1 without any sign."""
    return min(1.0, 2 * float(special.bdtr(min(up, down), up + down, 0.5))) if up + down else 1.0


def _clean_table(sample: Differences, scale: float, *, drop_empty: bool = True) -> np.ndarray:
    """Return a copy of a sample as [configuration, seed] with ties set to 0 and missing runs set to NaN.

    Missing are numbers that are not finite. Rows and columns without any run are removed, unless `drop_empty` is False.
    Ties are differences of at most 1e-9 times the larger of `scale` and the largest absolute difference.
    """
    table = np.array(sample, dtype=float)
    table = table[:, None] if table.ndim == 1 else table
    is_present = np.isfinite(table)
    largest = max(scale, float(np.abs(table[is_present]).max())) if is_present.any() else scale
    table[is_present & (np.abs(np.where(is_present, table, 0.0)) <= TIE_TOLERANCE * largest)] = 0.0
    table[~is_present] = math.nan
    return table[is_present.any(axis=1)][:, is_present.any(axis=0)] if drop_empty and not is_present.all() else table


def _means(table: np.ndarray, scale: float) -> np.ndarray:
    """Return the mean of each configuration over its seeds, [configuration], with ties set to 0.

    Args:
        table: Differences [configuration, seed], NaN where a run is missing; every row needs a run. With one column it
            is returned as it is.
        scale: Largest absolute value behind the differences; means of at most 1e-9 times it, or times the largest
            difference, are ties.
    """
    if table.shape[1] == 1 or not table.size:
        return table.reshape(len(table), -1)[:, 0] if table.size else np.zeros(0)
    is_present = np.isfinite(table)
    values = np.where(is_present, table, 0.0)
    d = values.sum(axis=1) / is_present.sum(axis=1)
    return np.where(np.abs(d) <= TIE_TOLERANCE * max(scale, float(np.abs(values).max())), 0.0, d)


def _test_by_design(table: np.ndarray, d: np.ndarray) -> tuple[str, float, float, float]:
    """Return (method, low, high, p) of a sample, by its number of configurations and seeds.

    `sign-flip` comes with NaN, since the caller tests such samples together. For the other procedures a sample without
    a variance gives the method `none` and NaN.

    Args:
        table: Differences [configuration, seed], NaN where a run is missing.
        d: Means of the configurations, [configuration].
    """
    several = bool((np.isfinite(table).sum(axis=1) > 1).any()) if table.size else False
    method, interval_and_p = "sign-flip", (math.nan, math.nan, math.nan)
    if several and len(d) == 1:
        method, interval_and_p = "seeds", student_interval(table[np.isfinite(table)])
    elif several and (crossed_result := crossed_interval(table)) is not None:
        method, interval_and_p = "crossed", crossed_result
    elif len(d) < MIN_TEST_N:
        method, interval_and_p = "t", student_interval(d)
    if method != "sign-flip" and math.isnan(interval_and_p[2]):
        method = "none"
    return method, *interval_and_p


def _paired_test(table: np.ndarray, d: np.ndarray, method_and_interval: tuple[str, float, float, float]) -> PairedTest:
    """Return the PairedTest of a sample from its table, its configuration means and (method, low, high, p)."""
    method, low, high, p = method_and_interval
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
        p_sign=_sign_test_p(up, down),
        method=method,
    )


# --- correction for a family of tests ---------------------------------------------------------------------------------


MAX_ENUMERATED_FAMILY_N = 14  # largest number of configurations for which all flips of a family are enumerated
MIN_GROUP_SIZE = 8  # smallest mean number of configurations per group for which products by groups are worthwhile


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values after Holm's step-down correction for the whole family, in the order given.

    NaN stands for no test: it stays NaN and does not count for the size of the family. Corrected values are at most 1.
    """
    # statsmodels' multipletests is not used, since it runs the garbage collector in every call
    corrected_p = np.array(p_values, dtype=float)
    indices = np.flatnonzero(np.isfinite(corrected_p))
    order = indices[np.argsort(corrected_p[indices], kind="stable")]
    corrected_p[order] = np.minimum(1, np.maximum.accumulate(corrected_p[order] * np.arange(len(order), 0, -1)))
    return [float(p) for p in corrected_p]


SignFlipFamily = tuple[Sequence[np.ndarray], Sequence[Sequence[Hashable]], Sequence[float]]
"""Tests of a family as `max_t_of_families` takes them: samples, keys and uncorrected p values."""


def max_t_of_families(families: Sequence[SignFlipFamily]) -> list[list[float]]:
    """Return step-down maxT p values of sign-flip tests, family by family in the order given.

    A flip turns all differences of a configuration in every sample at once, which preserves the dependence between the
    tests. The statistic of a test is |sum d| / sqrt(sum d^2), 0 if all d are 0. It is a monotone form of |Student's t|
    whose variance under flips is 1 for every n; d is not centred. No corrected p is below its uncorrected one. All
    flips are enumerated up to 14 configurations in the family. Beyond, 20,000 random flips, the same in every run, are
    shared by all families with the same number of configurations; p is (reached + 1) / (draws + 1).

    Args:
        families: (samples, keys, p values) of each family: the differences of each test [configuration] without NaN,
            the configuration of each difference, and the uncorrected p values.

    Returns:
        One list of p values per family, in the order of its samples.

    Source:
        Westfall and Young 1993.
    """
    by_size: dict[int, list[int]] = {}
    for index, (_, keys, _) in enumerate(families):
        by_size.setdefault(len(set().union(*keys)), []).append(index)
    p_values: list[list[float]] = [[]] * len(families)
    for indices in by_size.values():
        studied = [_studentised(*families[index][:2]) for index in indices]
        counted = _reached_shares([family[:3] for family in studied])
        for index, (_, _, _, order), reached in zip(indices, studied, counted, strict=True):
            uncorrected = families[index][2]
            stepped = np.empty(len(order))
            stepped[order] = np.maximum.accumulate(reached)
            p_values[index] = [
                float(max(p, uncorrected_p)) for p, uncorrected_p in zip(stepped, uncorrected, strict=True)
            ]
    return p_values


def _studentised(
    samples: Sequence[np.ndarray], keys: Sequence[Sequence[Hashable]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the scaled differences and the statistics of a family, the largest statistic first.

    The statistic of a test is |sum d| / sqrt(sum d^2), 0 if all d are 0: neither centred nor divided by a standard
    deviation. The returned differences are already divided by sqrt(sum d^2), so the statistic under a flip is the
    absolute sum of a flipped column.

    Args:
        samples: Differences of each test, [n] without NaN.
        keys: Configuration of each difference of each test.

    Returns:
        (scaled differences [configuration, test], 0 where a test lacks a configuration; statistic of each test [test];
        number of the group of each configuration [configuration]; index of each test in `samples` [test]). Tests are in
        sorted order, configurations in order of first appearance. A group shares the tests that it takes part in; groups
        are numbered in order of first appearance, too.
    """
    index_by_key = {
        key: index for index, key in enumerate(dict.fromkeys(key for sample_keys in keys for key in sample_keys))
    }
    table, takes_part = np.zeros((len(index_by_key), len(samples))), np.zeros((len(index_by_key), len(samples)), bool)
    for column, (d, sample_keys) in enumerate(zip(samples, keys, strict=True)):
        rows = [index_by_key[key] for key in sample_keys]
        np.add.at(table[:, column], rows, d)
        takes_part[rows, column] = True
    numbers: dict[bytes, int] = {}
    groups = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in takes_part], dtype=np.int64)
    sizes = np.sqrt([float((np.asarray(d) ** 2).sum()) for d in samples])
    # if all differences are zero, the statistic is 0
    table /= np.where(sizes > 0, sizes, 1.0)
    observed = np.abs(table.sum(axis=0))
    order = np.argsort(-observed, kind="stable")
    return table[:, order], observed[order], groups, order


def _reached_shares(families: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Return the maxT p values of families with equal numbers of configurations, before monotonisation.

    Args:
        families: (scaled differences [configuration, test], observed statistics [test], group numbers [configuration])
            with the most extreme test first, as `_studentised` returns them.

    Returns:
        For each family an array [test]: the share of flips whose largest statistic among that test and all less extreme
        ones is at least the observed one. The identity flip counts, so no share is 0.
    """
    n = len(families[0][0])
    if n <= MAX_ENUMERATED_FAMILY_N:
        # a flip and its opposite have the same statistic
        half = 1 << max(n - 1, 0)
        all_flips = 1.0 - 2.0 * ((np.arange(half)[:, None] >> np.arange(n)) & 1)
        return [_count_reached(np.abs(all_flips @ table).T, observed, n) / half for table, observed, _ in families]
    # families of one design have equal groups of configurations and are multiplied together
    by_groups: dict[bytes, list[int]] = {}
    for index, (_, _, groups) in enumerate(families):
        by_groups.setdefault(groups.tobytes(), []).append(index)
    designs = [
        (indices, GroupedProduct(np.hstack([families[index][0] for index in indices]), families[indices[0]][2]))
        for indices in by_groups.values()
    ]

    def count_draws(_: int, flips: np.ndarray) -> list[np.ndarray]:
        """Return the number of these flips that reach each observed statistic, family by family."""
        counts: list[np.ndarray] = [np.empty(0)] * len(families)
        flips = np.ascontiguousarray(flips.T)
        for indices, product in designs:
            sizes, start = product.of(flips), 0
            np.abs(sizes, out=sizes)
            for index in indices:
                observed = families[index][1]
                counts[index] = _count_reached(sizes[start : start + len(observed)], observed, n)
                start += len(observed)
        return counts

    parts = map_sign_blocks(n, count_draws)
    return [np.asarray((np.sum(counts, axis=0) + 1) / (RANDOM_FLIPS + 1)) for counts in zip(*parts, strict=True)]


class GroupedProduct:
    """Product of sign flips and a table that is zero outside blocks of configurations and tests.

    Most tests cover one stratum, so that a plain product would spend nearly all of its time on zeros.
    """

    def __init__(self, table: np.ndarray, groups: np.ndarray) -> None:
        """Divide the table into its blocks.

        Args:
            table: Scaled differences, [configuration, test].
            groups: Number of the group of each configuration, [configuration]; members of a group have the same zeros,
                besides differences that happen to be 0.
        """
        n_groups = int(groups.max()) + 1
        if n_groups * MIN_GROUP_SIZE > len(groups):  # products of a few rows each are slower than a plain one
            groups, n_groups = np.zeros_like(groups), 1
        self._columns = table.shape[1]
        self._blocks: list[tuple[np.ndarray | slice, np.ndarray, np.ndarray]] = []
        for number in range(n_groups):
            rows = np.flatnonzero(groups == number)
            columns = np.flatnonzero((table[rows] != 0).any(axis=0))
            block = np.ascontiguousarray(table[np.ix_(rows, columns)].T)
            # neighbours are a view of the flips, which takes no time; others are copied for each product
            neighbours = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
            self._blocks.append((slice(rows[0], rows[-1] + 1) if neighbours else rows, columns, block))

    def of(self, flips: np.ndarray) -> np.ndarray:
        """Return the table times `flips` [configuration, flip], [test, flip]: rows of flips are contiguous in memory."""
        sums = np.zeros((self._columns, flips.shape[1]))
        for rows, columns, block in self._blocks:
            sums[columns] += block @ flips[rows]
        return sums


def _count_reached(sizes: np.ndarray, observed: np.ndarray, n: int) -> np.ndarray:
    """Return, for each test, the number of flips whose step-down maximum reaches the observed statistic, [test].

    The step-down maximum of a test is the largest statistic among it and the tests after it (less extreme ones).

    Args:
        sizes: Statistics under the flips, [test, flip]; overwritten.
        observed: Observed statistics, [test]; a sum below by rounding only counts as reached.
        n: Number of configurations of the family.
    """
    largest = np.maximum.accumulate(sizes[::-1], axis=0, out=sizes[::-1])[::-1]
    return np.count_nonzero(largest >= (observed - ROUNDING_TOLERANCE * math.sqrt(n))[:, None], axis=1).astype(float)


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
