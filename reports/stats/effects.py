"""What the levels do: matched pairs, interactions, spread, intervals and Pareto fronts.

A pair is two cells that agree on every axis and the seed but for the axis in question, so each effect is a mean of
differences within the sweep. One run a cell says nothing of seeds: the spread comes from seeds where the sweep has
several, else from near-replicates (cells that differ in their regularizer alone, whose weight is nearly nothing).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ...results.store.records import AXES
from ..columns import complete_columns
from ..data import ReportError, SweepData
from ..numbers import Column
from .resampling import ALPHA, Summary, corrected, summaries

__all__ = [
    "Effect", "Interaction", "Spread", "accuracies", "detectable", "effects", "factors", "interactions",
    "matched_pairs", "measures", "numbers_of", "origins_of", "pareto", "reference_level",
    "seed_robustness", "spread", "spreads_by_configuration",
]  # fmt: skip

POWER = 0.8
NEAR = "reg_mode"

Untested = tuple[dict[str, Any], np.ndarray, float]
"""The fields of an effect or an interaction but for its tests, its differences, and the largest number behind them."""


# --- accuracies ---------------------------------------------------------------------------------------------------


def accuracies(data: SweepData) -> pd.DataFrame:
    """Every accuracy of the sweep with the 95% interval of its trials (trials.py); `n` counts answers.

    Columns: cell, attempt, probe, metric, length, value, n, low, high; shares as fractions. An accuracy without a sample
    count has no interval (NaN).
    """
    rows = []
    for value in data.values.values():
        if value.value is None or not data.metric(value.probe, value.metric).trials:
            continue
        about = {"cell": value.cell_id, "attempt": value.attempt_id, "probe": value.probe, "metric": value.metric}
        rows.append(
            about | {"length": value.length, "value": value.value, "n": value.n, "low": value.low, "high": value.high}
        )
    columns = ["cell", "attempt", "probe", "metric", "length", "value", "n", "low", "high"]
    return pd.DataFrame(rows, columns=columns).astype({"value": float, "low": float, "high": float})


# --- the design -----------------------------------------------------------------------------------------------------


def measures(data: SweepData, *, at_least: int = 2) -> list[Column]:
    """The numbers of the complete results that at least so many cells have, a decimal more than is printed of losses."""
    found = []
    for column in complete_columns(data):
        count = sum((cell.cell_id, column.probe, column.metric, column.length) in data.values for cell in data.cells)
        if count >= at_least and numbers_of(data, column).shape[0] >= at_least:
            found.append(replace(column, decimals=column.decimals if column.percent else 3))
    return list({(c.probe, c.metric, c.length): c for c in found}.values())


def factors(data: SweepData) -> list[str]:
    """The axes that vary, the five first; the seed is none of them."""
    return [axis for axis in AXES if len(data.levels(axis)) > 1] + data.extra_axes()


def numbers_of(data: SweepData, column: Column) -> pd.DataFrame:
    """One row a cell that has the number: cell, attempt, seed, every axis, value."""
    axes = (*AXES, *data.extra_axes())
    rows = []
    for cell in data.cells:
        value = data.value(cell.cell_id, column.probe, column.metric, column.length)
        if value is not None and value.value is not None:
            row: dict[str, Any] = {"cell": cell.cell_id, "attempt": value.attempt_id, "seed": cell.seed}
            row |= {axis: cell.levels[axis] if axis in AXES else cell.axes.get(axis, "-") for axis in axes}
            rows.append(row | {"value": value.value})
    return pd.DataFrame(rows, columns=["cell", "attempt", "seed", *axes, "value"])


def reference_level(levels: Sequence[str]) -> str:
    """The level that the others are held against: off, baseline, else the grid's first."""
    return next((word for word in ("off", "baseline") if word in levels), levels[0])


@dataclass(frozen=True, kw_only=True)
class Tested(Summary):
    """Differences in a measure, summed up and tested; in the measure's own unit, shares as fractions.

    `p_holm` is the p corrected for every test made together with this one. `origins` are the cells and attempts of the
    differences.
    """

    measure: Column
    p_holm: float
    origins: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, kw_only=True)
class Effect(Tested):
    """The difference that a level makes, over matched pairs. `where` names a subset (`attn_type=polar`) or is empty for the
    whole sweep."""

    axis: str
    level: str
    reference: str
    where: str
    pairs: int


def _matched(frame: pd.DataFrame, axis: str, reference: str, keys: Sequence[str], end: str) -> pd.DataFrame:
    """Every row at another level of an axis beside the row at `reference` that agrees on all keys, whose columns get `end`."""
    there = frame[frame[axis] != reference]
    here = frame[frame[axis] == reference].drop(columns=axis)
    return there.merge(here, on=list(keys), suffixes=("", end))


def _pairs(data: SweepData, numbers: pd.DataFrame, axis: str) -> pd.DataFrame:
    """The pairs of all levels of an axis with its reference, in the order of the cells."""
    keys = [name for name in (*AXES, *data.extra_axes(), "seed") if name != axis]
    pairs = _matched(numbers, axis, reference_level(data.levels(axis)), keys, "_ref")
    return pairs.assign(difference=pairs["value"] - pairs["value_ref"])


def matched_pairs(
    data: SweepData, column: Column, axis: str, level: str, where: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """The pairs of cells at `level` and at the reference level of an axis that agree on all other axes and the seed.

    Columns: every axis and seed, value and value_ref, difference (level minus reference), cell, cell_ref and their
    attempts. `where` keeps only cells at those levels. A cell without a partner, or without the number, is left out.
    """
    pairs = _pairs(data, numbers_of(data, column), axis)
    for name, wanted in {**(where or {}), axis: level}.items():
        pairs = pairs[pairs[name] == wanted]
    return pairs.reset_index(drop=True)


def origins_of(frame: pd.DataFrame, *suffixes: str) -> tuple[tuple[str, int | None], ...]:
    """The (cell, attempt) pairs of a frame of pairs or fours, whose columns `cell` and `attempt` end in these."""
    return tuple(
        (str(cell), int(attempt))
        for end in suffixes
        for cell, attempt in zip(frame[f"cell{end}"].tolist(), frame[f"attempt{end}"].tolist(), strict=True)
    )


def _levels_of(frame: pd.DataFrame, name: str) -> dict[str, pd.DataFrame]:
    return {str(level): part for level, part in frame.groupby(name, sort=False)}


def _of_axis(data: SweepData, column: Column, numbers: pd.DataFrame, axis: str, within: bool) -> Iterator[Untested]:
    """The effects of an axis: every level over the whole sweep and, with `within`, in every mixer."""
    reference = reference_level(data.levels(axis))
    mixers = data.levels("attn_type") if within and axis != "attn_type" else []
    by_level = _levels_of(_pairs(data, numbers, axis), axis)
    for level in data.levels(axis):
        if level not in by_level:
            continue
        by_mixer = _levels_of(by_level[level], "attn_type") if len(mixers) > 1 else {}
        subsets = [("", by_level[level])]
        subsets += [(f"attn_type={mixer}", by_mixer[mixer]) for mixer in mixers if mixer in by_mixer]
        for where, pairs in subsets:
            about = {"measure": column, "axis": axis, "level": level, "reference": reference, "where": where}
            about |= {"pairs": len(pairs), "origins": origins_of(pairs, "", "_ref")}
            yield about, pairs["difference"].to_numpy(dtype=float), _largest(pairs, "value", "value_ref")


def effects(data: SweepData, columns: Sequence[Column] | None = None, *, within: bool = True) -> list[Effect]:
    """The effect of every level of every axis on every measure: over the whole sweep, and `within` every mixer.

    Holm's correction is over the whole list. Levels without a single pair are left out.
    """
    found: list[Untested] = []
    for column in measures(data) if columns is None else columns:
        numbers = numbers_of(data, column)
        for axis in factors(data):
            found += _of_axis(data, column, numbers, axis, within)
    return [Effect(**fields) for fields in _tested(found)]


def _largest(frame: pd.DataFrame, *columns: str) -> float:
    return float(frame[list(columns)].abs().to_numpy().max(initial=0.0))


def _tested(found: Sequence[Untested]) -> Iterable[dict[str, Any]]:
    samples, scales = [differences for _, differences, _ in found], [scale for *_, scale in found]
    summed = summaries(samples, scales)
    for (about, *_), summary, p in zip(found, summed, corrected(samples, summed, scales=scales), strict=True):
        yield about | asdict(summary) | {"p_holm": p}


@dataclass(frozen=True, kw_only=True)
class Interaction(Tested):
    """How much more a level does at a level of a second axis than at that axis's reference: differences of differences
    over matched fours of cells."""

    axes: tuple[str, str]
    levels: tuple[str, str]
    references: tuple[str, str]
    fours: int


def interactions(data: SweepData, columns: Sequence[Column] | None = None) -> list[Interaction]:
    """Every two-way interaction on every measure; Holm's correction is over the whole list."""
    found: list[Untested] = []
    for column in measures(data) if columns is None else columns:
        numbers = numbers_of(data, column)
        pairs = {axis: _pairs(data, numbers, axis) for axis in factors(data)}
        for axes in combinations(factors(data), 2):
            found += _of_axes(data, column, pairs[axes[0]], axes)
    return [Interaction(**fields) for fields in _tested(found)]


def _of_axes(data: SweepData, column: Column, pairs: pd.DataFrame, axes: tuple[str, str]) -> Iterator[Untested]:
    """The interactions of two axes; `pairs` are those of the first."""
    first, second = axes
    references = (reference_level(data.levels(first)), reference_level(data.levels(second)))
    keys = [name for name in (*AXES, *data.extra_axes(), "seed") if name != second]
    fours = _matched(pairs, second, references[1], keys, "_b")
    by_levels = dict(iter(fours.groupby([first, second], sort=False)))
    for a in data.levels(first):
        for b in data.levels(second):
            if (part := by_levels.get((a, b))) is None:
                continue
            about = {"measure": column, "axes": axes, "levels": (a, b), "references": references, "fours": len(part)}
            about["origins"] = origins_of(part, "", "_ref", "_b", "_ref_b")
            scale = _largest(part, "value", "value_ref", "value_b", "value_ref_b")
            yield about, (part["difference"] - part["difference_b"]).to_numpy(dtype=float), scale


# --- spread ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """How much a number varies between runs that ought to agree: pooled standard deviation, its degrees of freedom, and
    the groups it comes from. `kind` is `seeds` or `near-replicates`."""

    kind: str
    sd: float
    df: int
    groups: int


def spread(data: SweepData, column: Column, where: Mapping[str, str] | None = None) -> Spread | None:
    """The spread of a number: between seeds where the sweep has several, else between cells that differ in their
    regularizer alone. `where` keeps only cells at those levels. None where there is no such group."""
    frame = numbers_of(data, column)
    for name, wanted in (where or {}).items():
        frame = frame[frame[name] == wanted]
    axes = [*AXES, *data.extra_axes()]
    for kind, keys in (("seeds", axes), ("near-replicates", [axis for axis in (*axes, "seed") if axis != NEAR])):
        groups = frame.groupby(keys)["value"]
        sizes = groups.size()
        df = int((sizes - 1).sum())
        if df:
            # a group of one is its own mean and adds nothing
            squares = float(((frame["value"] - groups.transform("mean")) ** 2).sum())
            return Spread(kind, math.sqrt(squares / df), df, int((sizes > 1).sum()))
    return None


def spreads_by_configuration(data: SweepData, column: Column) -> dict[tuple[str, ...], Spread]:
    """The spread of every configuration on its own, by its levels of AXES without the regularizer: between all its cells,
    which differ in their regularizer and their seed alone."""
    frame = numbers_of(data, column)
    found = {}
    for key, group in frame.groupby([axis for axis in AXES if axis != NEAR])["value"]:
        if len(group) > 1:
            found[tuple(map(str, key))] = Spread("near-replicates", float(group.std()), len(group) - 1, 1)
    return found


def detectable(found: Spread, pairs: int) -> float:
    """The smallest true difference that a mean over so many pairs shows with 80% power at a two-sided 5%:
    (t(0.975) + t(0.8)) sd sqrt(2 / pairs), t with the spread's degrees of freedom."""
    t = float(stats.t.ppf(1 - ALPHA / 2, found.df) + stats.t.ppf(POWER, found.df))
    return t * found.sd * math.sqrt(2 / pairs)


def seed_robustness(data: SweepData, column: Column) -> Spread:
    """The spread between seeds. Raises ReportError where every configuration has one run: then nothing can be said."""
    found = spread(data, column)
    if found is None or found.kind != "seeds":
        raise ReportError(
            f"every configuration of sweep {data.sweep} has one run (n = 1): nothing can be said of seeds; launch it with seeds: 3"
        )
    return found


# --- quality against speed ------------------------------------------------------------------------------------------


def pareto(points: Sequence[tuple[float, float]], directions: tuple[int, int] = (1, 1)) -> list[bool]:
    """Which points no other beats: none is at least as good in both coordinates and better in one. `directions` is 1 where
    more is better, -1 where less is."""
    scaled = [(x * directions[0], y * directions[1]) for x, y in points]

    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] >= a[0] and b[1] >= a[1] and b != a for b in scaled)

    return [not beaten(point) for point in scaled]
