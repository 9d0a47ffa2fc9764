"""How much a number varies between runs that ought to agree, stratum by stratum, and the differences that can be seen beside it.

The spread comes from seeds where the sweep has several; else, for some sweeps, from *near-replicates*: cells that differ in
their regularizer alone. They are near only where its weight is nearly nothing: beside a loss that is summed over the
micro-batch (train.loss_reduction: sum), in every mode but `strong`; and never for speed, which it does cost.
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
from ...sweep_data import WEIGHTED_SUFFIX, SweepData, cell_level
from ..significance.paired_tests import ALPHA
from ..significance.trial_intervals import independent_trials

POWER = 0.8
SEEDS = "seeds"
NEAR = "reg_mode"
TREATMENT = "strong"
"""The mode whose weight is not nearly nothing."""
SPEED = "throughput"
FINE = 1e-6
"""How closely a factor is found, of itself."""
NODES, WEIGHTS = (x / 2 for x in np.polynomial.legendre.leggauss(32))
NODES = NODES + 0.5
"""Points of (0, 1) and their weights, by Gauss and Legendre."""


@dataclass(frozen=True)
class Spread:
    """Pooled standard deviation of a number between runs that ought to agree, its degrees of freedom, and the groups it comes
    from. `kind` is `seeds` or `near-replicates`. `floor` is the least that an accuracy varies, by its trials alone: 0 for
    other numbers."""

    kind: str
    sd: float
    df: int
    groups: int
    floor: float = 0.0

    @property
    def used(self) -> float:
        """The standard deviation to plan and judge with: not below the floor."""
        return max(self.sd, self.floor)


class Replicate(NamedTuple):
    """A run that ought to agree with those of the same `group`, and how far it lies from their mean."""

    cell: CellState
    attempt: int
    group: int
    value: float
    difference: float


def spread(data: SweepData, column: Column, where: Mapping[str, str] | None = None) -> Spread | None:
    """The spread of a number: between seeds where the sweep has several, else between near-replicates. `where` keeps only cells
    at those levels. None where there is no such group."""
    wanted = (where or {}).items()
    some = [one for one in _known(data, column) if all(cell_level(one.cell, axis) == level for axis, level in wanted)]
    return _pooled(data, column, some)


def noise_by_stratum(data: SweepData, column: Column) -> dict[tuple[str, ...], Spread]:
    """The spread within every stratum that has one, by its levels of STRATA: what varies much in one may stand still in another."""
    return _by(data, column, STRATUM_AXES)


def _by(data: SweepData, column: Column, axes: Sequence[str]) -> dict[tuple[str, ...], Spread]:
    found = {key: _pooled(data, column, part) for key, part in _parts(data, column, axes).items()}
    return {key: one for key, one in found.items() if one is not None}


def _parts(data: SweepData, column: Column, axes: Sequence[str]) -> dict[tuple[str, ...], list[_Number]]:
    parts: dict[tuple[str, ...], list[_Number]] = {}
    for one in _known(data, column):
        parts.setdefault(tuple(one.cell.levels[axis] for axis in axes), []).append(one)
    return parts


class _Number(NamedTuple):
    cell: CellState
    given: MeasuredValue
    value: float


def _known(data: SweepData, column: Column) -> list[_Number]:
    found = ((cell, data.given(cell, column)) for cell in data.cells)
    return [_Number(cell, given, given.value) for cell, given in found if given is not None and given.value is not None]


def replicates(data: SweepData, column: Column) -> dict[tuple[str, ...], tuple[Spread, list[Replicate]]]:
    """Within every stratum that has a spread, by its levels of STRATA: the spread, and the runs that it comes from."""
    found = {}
    for key, part in _parts(data, column, STRATUM_AXES).items():
        spread = _measured(data, column, part)
        if spread is not None:
            groups = (group for group in _grouped(data, column, part)[1] if len(group) > 1)
            found[key] = (
                spread,
                [
                    Replicate(one.cell, one.given.attempt_id, place, one.value, one.value - mean)
                    for place, group in enumerate(groups)
                    for mean in [fmean(one.value for one in group)]
                    for one in group
                ],
            )
    return found


def printed(data: SweepData, cell: CellState, column: Column) -> Spread | None:
    """Of a mean over runs that was printed, the spread that stands beside it, 0 where none does; None of any other number."""
    told = data.printed_spread(cell, column)
    return Spread(SEEDS, told[1] or 0.0, max(told[0] - 1, 1), 1) if told is not None else None


def _pooled(data: SweepData, column: Column, some: Sequence[_Number]) -> Spread | None:
    return _printed(data, column, some) or _measured(data, column, some)


def _printed(data: SweepData, column: Column, some: Sequence[_Number]) -> Spread | None:
    """Of numbers that are means over runs, pooled from the standard deviations that are printed beside them."""
    told = (data.printed_spread(one.cell, column) for one in some)
    known = [(n - 1, sd) for n, sd in filter(None, told) if sd is not None and n > 1]
    df = sum(part for part, _ in known)
    return Spread(SEEDS, math.sqrt(sum(part * sd**2 for part, sd in known) / df), df, len(known)) if known else None


def _measured(data: SweepData, column: Column, some: Sequence[_Number]) -> Spread | None:
    kind, groups = _grouped(data, column, some)
    df = sum(len(group) - 1 for group in groups)
    if not df:
        return None
    # a group of one is its own mean and adds nothing
    apart = (one.value - mean for group in groups for mean in [fmean(one.value for one in group)] for one in group)
    several = sum(len(group) > 1 for group in groups)
    return Spread(kind, math.hypot(*apart) / math.sqrt(df), df, several, _floor(data, column, some))


def _grouped(data: SweepData, column: Column, some: Sequence[_Number]) -> tuple[str, list[list[_Number]]]:
    """The runs that ought to agree, and what makes them so: seeds where any configuration has several; none where no two do."""
    near = [one for one in some if column.probe != SPEED and is_regularizer_negligible(data, one.cell)]
    skipped = AXES.index(NEAR)
    for kind, numbers in ((SEEDS, some), ("near-replicates", near)):
        groups: dict[tuple[str, ...], list[_Number]] = {}
        for one in numbers:
            key = data.levels_of(one.cell)
            if kind != SEEDS:
                key = (*key[:skipped], *key[skipped + 1 :], str(one.cell.seed))
            groups.setdefault(key, []).append(one)
        if any(len(group) > 1 for group in groups.values()):
            return kind, list(groups.values())
    return "", []


def is_loss_summed(data: SweepData, cell: CellState) -> bool:
    """Whether the cell's loss is a sum over tokens."""
    return bool(data.setting(cell, "train.loss_reduction") == "sum")


def is_regularizer_negligible(data: SweepData, cell: CellState) -> bool:
    """Whether the cell's regularizer is nearly nothing beside a loss that is a sum."""
    return is_loss_summed(data, cell) and data.setting(cell, "train.regularizer") != TREATMENT


def _floor(data: SweepData, column: Column, some: Sequence[_Number]) -> float:
    """Standard deviation of an accuracy that its trials alone explain, at the mean of these cells by Jeffreys: also where no
    trial of any of them was right. 0 for what is no accuracy."""
    base = column.metric.removesuffix(WEIGHTED_SUFFIX)
    if not some or not data.metric(column.probe, base).trials:
        return 0.0
    averaged = column.metric != base
    lengths = data.averaged(column.probe, base) if averaged else [column.length]
    variance = 0.0
    for length in lengths:
        given = (data.value(one.cell.cell_id, column.probe, base, length) if averaged else one.given for one in some)
        known = [value for value in given if value is not None]
        sizes = [(value.value or 0.0, n) for value in known if (n := independent_trials(value, data.values))]
        if not sizes:
            return 0.0
        every = sum(n for _, n in sizes)
        share = (sum(share * n for share, n in sizes) + 0.5) / (every + 1)
        weight = length / sum(lengths) if len(lengths) > 1 else 1.0
        variance += weight**2 * share * (1 - share) / (every / len(sizes))
    return math.sqrt(variance)


def detectable(found: Spread, pairs: int) -> float:
    """The smallest true difference that a mean over so many pairs shows with 80% power at a two-sided 5%, the standard deviation
    being known with the spread's degrees of freedom only: `detectable_factor` times it."""
    return detectable_factor(pairs, found.df) * found.used


@cache
def detectable_factor(pairs: int, df: int) -> float:
    """How many standard deviations of a run a mean over so many pairs must differ by, to be seen with 80% power at a two-sided 5%.

    The standard deviation is known with `df` degrees of freedom only; the power is averaged over what that leaves open
    (`power_of`). One pair has no spread of its own and is held against the sweep's: sqrt(2) (t(0.975) + t(0.8)), t with `df`.
    """
    if pairs < 2:
        return float((special.stdtrit(df, 1 - ALPHA / 2) + special.stdtrit(df, POWER)) * math.sqrt(2))
    need, have = _needed(np.array([pairs])), _roots(np.array([df])) * math.sqrt(pairs / 2)
    low, high = 0.0, 1.0
    while _shown(need, high * have)[0] < POWER:
        low, high = high, 2 * high
    while high - low > FINE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _shown(need, middle * have)[0] >= POWER else (middle, high)
    return high


def power_of(pairs: np.ndarray, df: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """The power of Student's t over so many pairs, two or more, at a two-sided 5%, for a difference of `ratios` times a
    standard deviation that is known with `df` degrees of freedom.

    The pairs' own estimate is V of the true one, that of `df` W of it: the difference is seen where
    Z + sqrt(pairs / 2) ratio W > t(0.975; pairs - 1) V. Given V and W that is a normal distribution's; over both it is averaged.
    """
    return _shown(_needed(pairs), _roots(df) * (np.sqrt(pairs / 2) * ratios)[:, None])


def _shown(need: np.ndarray, have: np.ndarray) -> np.ndarray:
    return np.asarray(special.ndtr(have[:, None, :] - need[:, :, None]) @ WEIGHTS @ WEIGHTS)


def _needed(pairs: np.ndarray) -> np.ndarray:
    """t(0.975; pairs - 1) V at NODES: [pairs, node]."""
    return np.asarray(_roots(pairs - 1) * special.stdtrit(pairs - 1, 1 - ALPHA / 2)[:, None])


def _roots(df: np.ndarray) -> np.ndarray:
    """sqrt(chi2 / df) at NODES: [df, node]."""
    return np.asarray(np.sqrt(special.chdtri(df[:, None], 1 - NODES) / df[:, None]))
