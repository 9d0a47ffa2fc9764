"""Run-to-run standard deviation between replicate runs, by stratum, and the differences detectable with it.

Replicates are seeds where the sweep has several. For some sweeps they are *near-replicates* instead: cells that differ
in their regularizer only. These count only where the regularizer's weight is negligible: beside a loss summed over the
micro-batch (train.loss_reduction: sum) and in every mode but `strong`. They never count for speed, which a regularizer
does cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy import special

from ....results.contrasts import STRATUM_AXES
from ....results.store.records import AXES, CellState, MeasuredValue
from ...number_format import Column
from ...sweep_data import WEIGHTED_SUFFIX, SweepData, cached_result, cell_level
from ..significance.paired_tests import ALPHA
from ..significance.trial_intervals import independent_trials

POWER = 0.8
"""Statistical power of detectable differences."""
SEEDS = "seeds"
NEAR_REPLICATE_AXIS = "reg_mode"
"""Axis in which near-replicates may differ: the regularizer."""
EFFECTIVE_MODE = "strong"
"""Regularizer mode whose weight is not negligible."""
SPEED_PROBE = "throughput"
FACTOR_PRECISION = 1e-6
"""Relative precision of a detectable factor."""
NODES, WEIGHTS = (x / 2 for x in np.polynomial.legendre.leggauss(32))
"""Gauss-Legendre nodes and weights on (0, 1)."""
NODES = NODES + 0.5
"""Points of (0, 1) and their weights, by Gauss and Legendre."""


@dataclass(frozen=True)
class NoiseEstimate:
    """Noise estimate: pooled standard deviation between replicate runs, in the measure's own unit.

    Shares are fractions. `df` are its degrees of freedom (runs minus groups), `groups` the number of groups with
    several runs behind it. `kind` is `seeds` or `near-replicates`. `floor` is the standard deviation that an accuracy
    has from its finite number of trials alone; 0 for other numbers and for printed standard deviations.
    """

    kind: str
    sd: float
    df: int
    groups: int
    floor: float = 0.0

    @property
    def effective_sd(self) -> float:
        """Standard deviation for planning and tests: the pooled one, but at least the floor."""
        return max(self.sd, self.floor)


class Replicate(NamedTuple):
    """A replicate run: cell, attempt id, index of its `group`, value, and difference from the group's mean.

    The mean includes the run itself. Groups are counted from 0 within a stratum.
    """

    cell: CellState
    attempt: int
    group: int
    value: float
    difference: float


def pooled_noise(data: SweepData, column: Column, where: Mapping[str, str] | None = None) -> NoiseEstimate | None:
    """Return the noise estimate of a number, between seeds if any configuration has several, or near-replicates.

    Near-replicates are runs that differ in their regularizer only, where its weight is negligible; they never count for
    speed. Numbers that are printed means use the standard deviations printed beside them, if there is one.

    Args:
        data: The sweep.
        column: The number.
        where: Level by axis, as text; only cells at all of these levels are used. None for all cells.

    Returns:
        The within-group standard deviation, pooled by degrees of freedom. None without a group of two replicates.
    """
    required = (where or {}).items()
    cell_values = [
        cell_value
        for cell_value in _measured_values(data, column)
        if all(cell_level(cell_value.cell, axis) == level for axis, level in required)
    ]
    return _noise_of(data, column, cell_values)


def noise_by_stratum(data: SweepData, column: Column) -> dict[tuple[str, ...], NoiseEstimate]:
    """Return the noise estimate within every stratum that has one, by its (mixer, memory) levels.

    Each is the pooled standard deviation within groups of replicates of the stratum's cells alone (`pooled_noise`), so
    strata may differ in the kind of their replicates: seeds or near-replicates. Strata without replicates are left out.
    The order is that of the first cell with the number.
    """
    return cached_result(data, ("noise", column), lambda: _noise_by_axes(data, column, STRATUM_AXES))


def _noise_by_axes(data: SweepData, column: Column, axes: Sequence[str]) -> dict[tuple[str, ...], NoiseEstimate]:
    """Return the noise estimates of cells with equal levels of `axes`, by these levels, where there is one."""
    by_levels = {key: _noise_of(data, column, part) for key, part in _values_by_levels(data, column, axes).items()}
    return {key: noise for key, noise in by_levels.items() if noise is not None}


def _values_by_levels(data: SweepData, column: Column, axes: Sequence[str]) -> dict[tuple[str, ...], list[_CellValue]]:
    """Return the cells with the number, by their levels of `axes` (of the fixed AXES), in order of first appearance."""
    parts: dict[tuple[str, ...], list[_CellValue]] = {}
    for cell_value in _measured_values(data, column):
        parts.setdefault(tuple(cell_value.cell.levels[axis] for axis in axes), []).append(cell_value)
    return parts


class _CellValue(NamedTuple):
    """A cell, its stored measurement, and the number in it."""

    cell: CellState
    measured: MeasuredValue
    value: float


def _measured_values(data: SweepData, column: Column) -> list[_CellValue]:
    """Return the cells that have the number, with its value, in the sweep's order."""
    return [
        _CellValue(cell, measured, measured.value)
        for cell, measured in data.measured_values(data.cells, column)
        if measured is not None and measured.value is not None
    ]


def replicates(data: SweepData, column: Column) -> dict[tuple[str, ...], tuple[NoiseEstimate, list[Replicate]]]:
    """Return, for every stratum with replicate runs, (noise estimate, runs of its groups), by (mixer, memory).

    The estimate is the measured one: printed standard deviations are ignored. Runs that are alone in their group are
    left out. Runs come group by group.
    """
    by_stratum = {}
    for key, part in _values_by_levels(data, column, STRATUM_AXES).items():
        spread = _measured_noise(data, column, part)
        if spread is not None:
            groups = (group for group in _replicate_groups(data, column, part)[1] if len(group) > 1)
            by_stratum[key] = (
                spread,
                [
                    Replicate(
                        cell_value.cell,
                        cell_value.measured.attempt_id,
                        group_index,
                        cell_value.value,
                        cell_value.value - mean,
                    )
                    for group_index, group in enumerate(groups)
                    for mean in [fmean(cell_value.value for cell_value in group)]
                    for cell_value in group
                ],
            )
    return by_stratum


def printed_noise(data: SweepData, cell: CellState, column: Column) -> NoiseEstimate | None:
    """Return the noise printed beside a mean over runs, of kind `seeds`; None if the number is no printed mean.

    It is that of the one cell; `data` holds the published numbers. The sd is 0 if none is printed. Degrees of freedom
    are runs - 1, but at least 1.
    """
    printed_spread = data.printed_spread(cell, column)
    return (
        NoiseEstimate(SEEDS, printed_spread[1] or 0.0, max(printed_spread[0] - 1, 1), 1)
        if printed_spread is not None
        else None
    )


def _noise_of(data: SweepData, column: Column, cell_values: Sequence[_CellValue]) -> NoiseEstimate | None:
    """Return the noise of these values, from printed standard deviations or else replicates; None without either."""
    return _printed_noise_of(data, column, cell_values) or _measured_noise(data, column, cell_values)


def _printed_noise_of(data: SweepData, column: Column, cell_values: Sequence[_CellValue]) -> NoiseEstimate | None:
    """Return the noise pooled from the standard deviations printed beside means over runs; None without any.

    Weights are the degrees of freedom, runs - 1; means of one run, or without a printed sd, are left out. The kind is
    `seeds`.
    """
    printed_spreads = (data.printed_spread(cell_value.cell, column) for cell_value in cell_values)
    df_and_sd = [(n - 1, sd) for n, sd in filter(None, printed_spreads) if sd is not None and n > 1]
    df = sum(group_df for group_df, _ in df_and_sd)
    return (
        NoiseEstimate(SEEDS, math.sqrt(sum(part * sd**2 for part, sd in df_and_sd) / df), df, len(df_and_sd))
        if df_and_sd
        else None
    )


def _measured_noise(data: SweepData, column: Column, cell_values: Sequence[_CellValue]) -> NoiseEstimate | None:
    """Return the noise pooled over replicate groups, weighted by degrees of freedom; None without replicates.

    Deviations are from the mean of each group. The floor of an accuracy is that of all cells, alone or not.
    """
    kind, groups = _replicate_groups(data, column, cell_values)
    df = sum(len(group) - 1 for group in groups)
    if not df:
        return None
    # a group of a single run contributes zero
    deviations = (
        cell_value.value - mean
        for group in groups
        for mean in [fmean(cell_value.value for cell_value in group)]
        for cell_value in group
    )
    several = sum(len(group) > 1 for group in groups)
    return NoiseEstimate(
        kind, math.hypot(*deviations) / math.sqrt(df), df, several, _binomial_floor(data, column, cell_values)
    )


def _replicate_groups(
    data: SweepData, column: Column, cell_values: Sequence[_CellValue]
) -> tuple[str, list[list[_CellValue]]]:
    """Return the kind of replicates and their groups; groups of a single run are included.

    Args:
        data: The sweep.
        column: The number; it decides only that the speed probe (throughput) has no near-replicates.
        cell_values: Cells with their values, which are grouped.

    Returns:
        ("seeds", groups by configuration) if any configuration has several seeds; else ("near-replicates", groups by
        configuration without regularizer, and seed), from cells with a negligible regularizer alone; ("", []) if no two
        runs are replicates, so for speed whenever no configuration has several seeds.
    """
    skipped = AXES.index(NEAR_REPLICATE_AXIS)
    for kind in (SEEDS, "near-replicates"):
        groups: dict[tuple[str, ...], list[_CellValue]] = {}
        for cell_value in cell_values:
            if kind != SEEDS and (column.probe == SPEED_PROBE or not is_regularizer_negligible(data, cell_value.cell)):
                continue
            key = data.levels_of(cell_value.cell)
            if kind != SEEDS:
                key = (*key[:skipped], *key[skipped + 1 :], str(cell_value.cell.seed))
            groups.setdefault(key, []).append(cell_value)
        if any(len(group) > 1 for group in groups.values()):
            return kind, list(groups.values())
    return "", []


def is_loss_summed(data: SweepData, cell: CellState) -> bool:
    """Return True if the cell's loss is a sum over tokens rather than a mean."""
    return bool(data.setting(cell, "train.loss_reduction") == "sum")


def is_regularizer_negligible(data: SweepData, cell: CellState) -> bool:
    """Return True if the cell's loss is summed over tokens and its regularizer mode is not `strong`.

    A config that records neither setting gives False.
    """
    return is_loss_summed(data, cell) and data.setting(cell, "train.regularizer") != EFFECTIVE_MODE


def _binomial_floor(data: SweepData, column: Column, cell_values: Sequence[_CellValue]) -> float:
    """Return the standard deviation that an accuracy has from its number of trials, at the mean of these cells.

    It is sqrt(p (1 - p) / n), where n is the mean number of independent trials of a cell. p is the share over all
    trials with 0.5 added to either count (Jeffreys), so it is positive even if no trial was right. For a
    length-weighted average the variances of the lengths are combined. 0 for a number that is no accuracy, without
    cells, or if a length has no count of trials.
    """
    base = column.metric.removesuffix(WEIGHTED_SUFFIX)
    if not cell_values or not data.metric(column.probe, base).trials:
        return 0.0
    averaged = column.metric != base
    lengths = data.averaged_lengths(column.probe, base) if averaged else [column.length]
    variance = 0.0
    for length in lengths:
        measured_values = (
            data.value(cell_value.cell.cell_id, column.probe, base, length) if averaged else cell_value.measured
            for cell_value in cell_values
        )
        present = [value for value in measured_values if value is not None]
        sizes = [(value.value or 0.0, n) for value in present if (n := independent_trials(value, data.values))]
        if not sizes:
            return 0.0
        total_trials = sum(n for _, n in sizes)
        pooled_share = (sum(share * n for share, n in sizes) + 0.5) / (total_trials + 1)
        weight = length / sum(lengths) if len(lengths) > 1 else 1.0
        variance += weight**2 * pooled_share * (1 - pooled_share) / (total_trials / len(sizes))
    return math.sqrt(variance)


def detectable(noise: NoiseEstimate, pairs: int) -> float:
    """Return the smallest true difference that a mean over `pairs` pairs shows with 80% power at a two-sided 5%.

    It is `detectable_factor` times `noise.effective_sd`, in the measure's unit. A pair is two runs; their standard
    deviation is that of a single run.
    """
    return detectable_factor(pairs, noise.df) * noise.effective_sd


@cache
def detectable_factor(pairs: int, df: int) -> float:
    """Return the detectable difference in units of a run's standard deviation: 80% power, two-sided 5%; cached.

    The test is Student's t over the pairs, with pairs - 1 degrees of freedom. The standard deviation used for planning
    is known with `df` degrees of freedom only, and the power is averaged over that uncertainty (`power_of`). A single
    pair has no variance of its own, so its factor is sqrt(2) (t(0.975) + t(0.8)), t with `df`.

    Args:
        pairs: Number of matched pairs; below 2 counts as one.
        df: Degrees of freedom of the standard deviation, at least 1.
    """
    if pairs < 2:
        return float((special.stdtrit(df, 1 - ALPHA / 2) + special.stdtrit(df, POWER)) * math.sqrt(2))
    thresholds, effects = _critical_values(np.array([pairs])), _scale_quantiles(np.array([df])) * math.sqrt(pairs / 2)
    low, high = 0.0, 1.0
    while _power(thresholds, high * effects)[0] < POWER:
        low, high = high, 2 * high
    while high - low > FACTOR_PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _power(thresholds, middle * effects)[0] >= POWER else (middle, high)
    return high


def power_of(pairs: np.ndarray, df: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """Return the power of Student's t test over matched pairs at a two-sided 5%, from 0 to 1.

    The pairs' own standard deviation estimate is V times the true one, that of `df` is W times it. The difference
    counts as detected if Z + sqrt(pairs / 2) ratio W > t(0.975; pairs - 1) V, so only on its own side. Given V and W
    this is a normal probability; it is averaged over both.

    Args:
        pairs: Number of pairs, at least 2, [n].
        df: Degrees of freedom of the planning standard deviation, [n]; not those of the test.
        ratios: Difference over the planning standard deviation of a single run, [n].

    Returns:
        Powers [n].
    """
    return _power(_critical_values(pairs), _scale_quantiles(df) * (np.sqrt(pairs / 2) * ratios)[:, None])


def _power(thresholds: np.ndarray, effects: np.ndarray) -> np.ndarray:
    """Return the power averaged over both standard deviations, [n].

    Args:
        thresholds: Critical values of the test at quantiles of V, [n, node].
        effects: Standardised differences at quantiles of W, [n, node].
    """
    return np.asarray(special.ndtr(effects[:, None, :] - thresholds[:, :, None]) @ WEIGHTS @ WEIGHTS)


def _critical_values(pairs: np.ndarray) -> np.ndarray:
    """Return t(0.975; pairs - 1) V at NODES, [n, node], for numbers of pairs [n] of at least 2."""
    return np.asarray(_scale_quantiles(pairs - 1) * special.stdtrit(pairs - 1, 1 - ALPHA / 2)[:, None])


def _scale_quantiles(df: np.ndarray) -> np.ndarray:
    """Return the quantiles of sqrt(chi2 / df) at the probabilities NODES, [n, node], for degrees of freedom [n]."""
    return np.asarray(np.sqrt(special.chdtri(df[:, None], 1 - NODES) / df[:, None]))
