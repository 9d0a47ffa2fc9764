"""Which documents, rows and trials each network got right, and what the levels do to them: tests item by item.

Every network is asked the same items, so two of them can be held against each other item by item. What such a test is about
are other items like these, answered by these very networks; with several seeds also other seeds. Of other configurations it
says nothing: that is what the effects of stats/effects.py are about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from ...results.store.records import Key
from ...results.store.store import Store
from ..number_format import Column, column_of, format_length
from ..sweep_data import ReportError, SweepData
from .effects.matched_groups import Numbers, factors, level_pairs, within
from .significance.paired_tests import ALPHA, PairedTest, corrected, paired_difference_tests

ANSWERS = ("cell", "attempt", "configuration", "seed", "length", "trial", "value", "exact")


@dataclass(frozen=True)
class Items:
    """A measure item by item. C cells in the sweep's order, I items in the order of their numbers."""

    measure: Key
    """(probe, metric, length)."""
    numbers: np.ndarray
    """[I]: the item's number, which is the same document, row or trial in every cell."""
    mean: np.ndarray
    """[C, I]: the mean over the item's positions (an accuracy: the share of its digits), NaN where the cell lacks it."""
    least: np.ndarray
    """[C, I]: the least over the item's positions: 1 where an accuracy has every digit right."""


def items_of(store: Store, data: SweepData, measures: Sequence[Key]) -> list[Items]:
    """These measures item by item, of the attempts that the sweep's numbers come from; those without any are left out.

    One query a measure (one for every 500 cells), and no more in memory than what is given back.
    """
    place = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    found = []
    with store.snapshot() as seen:
        for measure in measures:
            values = ((index, data.values.get((cell, *measure))) for cell, index in place.items())
            behind = {
                value.attempt_id: index for index, value in values if value is not None and value.value is not None
            }
            rows = seen.item_means(behind, measure) if behind else np.empty((0, 4))
            if not len(rows):
                continue
            numbers, column = np.unique(rows[:, 1].astype(np.int64), return_inverse=True)
            cells = np.array([behind[attempt] for attempt in rows[:, 0].astype(np.int64).tolist()])
            mean, least = (np.full((len(place), len(numbers)), np.nan) for _ in range(2))
            mean[cells, column], least[cells, column] = rows[:, 2], rows[:, 3]
            found.append(Items(measure, numbers, mean, least))
    return found


def answers(
    store: Store,
    data: SweepData,
    probe: str = "needle",
    metric: str = "digit_accuracy",
    lengths: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Who answers which trial: a row for every cell, context length and trial.

    Columns: cell (id), attempt, configuration (the levels of every axis, which seeds share), seed, length (tokens), trial
    (its number, the same one in every cell), value (the share of its digits that are right) and exact (all of them).
    `lengths` are those that the report shows unless told. Rows follow the grid. Other probes' items go by the same name.
    Raises ReportError where nothing was stored, as in the published sweeps.
    """
    wanted = data.lengths(probe, metric) if lengths is None else lengths
    names = {cell.cell_id: ", ".join(key) for key, cells in data.configurations().items() for cell in cells}
    parts = []
    for one in items_of(store, data, [(probe, metric, length) for length in wanted]):
        rows, columns = np.nonzero(~np.isnan(one.mean))
        cells = [data.cells[row] for row in rows.tolist()]
        part = {
            "cell": [cell.cell_id for cell in cells],
            "attempt": [data.values[(cell.cell_id, *one.measure)].attempt_id for cell in cells],
            "configuration": [names[cell.cell_id] for cell in cells],
            "seed": [cell.seed for cell in cells],
            "length": one.measure[2],
            "trial": one.numbers[columns],
            "value": one.mean[rows, columns],
            "exact": one.least[rows, columns] == 1,
        }
        parts.append(pd.DataFrame(part, columns=list(ANSWERS)).assign(place=rows))
    if not parts:
        raise ReportError(
            f"sweep {data.sweep} has no items of probe {probe}: they are stored by evaluations of one's own, and no printed number has them"
        )
    return pd.concat(parts).sort_values(["place", "length", "trial"], ignore_index=True).drop(columns="place")


# --- tests ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ItemEffect(PairedTest):
    """What a level does to a measure item by item; the fields of Summary with items in place of configurations.

    `n` counts items. The differences of an item are averaged over `pairs` of configurations that differ in the axis alone, and
    crossed with seeds where there are several. `gained` and `lost` count the (pair, seed, trial)s that are right in every
    digit at this level alone and at the reference alone, and `p_mcnemar` is mcnemar's; None and NaN where nothing is right or
    wrong. `p_corrected` is p after the correction for its `family`. `where` is empty or names a mixer (`attn_type=polar`).
    """

    measure: Column
    axis: str
    level: str
    reference: str
    where: str
    pairs: int
    gained: int | None
    lost: int | None
    p_mcnemar: float
    family: str
    p_corrected: float = math.nan
    origins: tuple[tuple[str, int | None], ...]

    @property
    def sure(self) -> bool:
        """Whether it differs from zero, after the correction for its family."""
        return self.p_corrected < ALPHA


def mcnemar(net: np.ndarray) -> float:
    """Exact two-sided McNemar test, trials as clusters: net [trials] is on how many more pairs a trial is gained than lost.

    If a level does nothing, each trial's net gain is as likely to be a loss of that size: p is the share of the 2^trials ways
    to turn them whose sum is at least as large. For one pair (net -1, 0 or 1) that is McNemar's exact test.
    """
    sizes = np.abs(net[net != 0]).astype(np.int64)
    reach = int(sizes.sum())
    ways = np.zeros(2 * reach + 1)
    ways[reach] = 1.0
    for size in sizes:
        # no sum so far is further from 0 than the sizes before it, so that nothing comes round the ends
        ways = (np.roll(ways, size) + np.roll(ways, -size)) / 2
    at_least = abs(int(net.sum()))
    sums = np.abs(np.arange(-reach, reach + 1))
    return min(1.0, float(ways[sums >= at_least].sum()))


def item_measures(data: SweepData) -> list[Column]:
    """The numbers that may have items: those with a better and a worse side, at the context lengths that are shown."""
    found = []
    for probe, metric in dict.fromkeys(key[1:3] for key in data.shown):
        about = data.metric(probe, metric)
        heading = about.heading or f"{probe} {metric}"
        for length in data.lengths(probe, metric) if about.direction else ():
            name = f"{heading}@{format_length(length)}" if length else heading
            one = column_of(probe, about, name, length=length)
            found.append(one if one.percent else replace(one, decimals=max(one.decimals, 4)))
    return sorted(found, key=lambda one: one.key)


def item_effects(store: Store, data: SweepData, columns: Sequence[Column] | None = None) -> list[ItemEffect]:
    """What the levels of every axis do to every measure, item by item: over the whole sweep and in every mixer.

    Levels without a pair of cells that have the same items are left out. Corrected inside (measure, axis).
    """
    chosen = {one.key: one for one in (item_measures(data) if columns is None else columns)}
    mixers = data.levels("attn_type")
    numbers, contrasts = Numbers(data, []), []
    for axis in factors(data):
        subsets = ["", *(mixers if axis != "attn_type" and len(mixers) > 1 else ())]
        for level, reference in level_pairs(data, axis):
            made = numbers.contrasted({axis: (level, reference)})
            there: np.ndarray = np.any(np.all(made.corners >= 0, axis=-1), axis=1)
            for mixer in subsets:
                kept = there & within(made.levels, {"attn_type": mixer} if mixer else {}, len(there))
                if kept.any():
                    contrasts.append((axis, level, reference, mixer, made.corners[kept]))
    found: list[ItemEffect] = []
    for items in items_of(store, data, list(chosen)):
        column = chosen[items.measure]
        rows: list[Row] = []
        for axis, level, reference, mixer, corners in contrasts:
            about = {"measure": column, "axis": axis, "level": level, "reference": reference}
            about |= {"where": f"attn_type={mixer}" if mixer else "", "family": f"{column.heading}: {axis}"}
            if (row := _row(data, items, corners, about)) is not None:
                rows.append(row)
        found += _tested(rows, items)
    return found


Row = tuple[dict[str, Any], np.ndarray]
"""The fields of an ItemEffect but for its tests, and its differences [items, seeds]."""


def _row(data: SweepData, items: Items, corners: np.ndarray, about: dict[str, Any]) -> Row | None:
    """The differences at these corners [pairs, seeds, 2] (cells, -1 for none), where any item is known on both sides."""
    listed: np.ndarray = np.all(corners >= 0, axis=2)
    # [pairs, seeds, items]
    d = np.where(listed[..., None], items.mean[corners[..., 0]] - items.mean[corners[..., 1]], np.nan)
    known = ~np.isnan(d)
    have: np.ndarray = np.any(known, axis=2)
    if not have.any():
        return None
    counts = known.sum(axis=0)
    sample = np.where(counts, np.where(known, d, 0.0).sum(axis=0) / np.maximum(counts, 1), np.nan).T
    found: dict[str, Any] = {"gained": None, "lost": None, "p_mcnemar": math.nan}
    if data.metric(*items.measure[:2]).trials:
        right = items.least == 1
        level, reference = right[corners[..., 0]], right[corners[..., 1]]
        gained, lost = (known & level & ~reference).sum(axis=(0, 1)), (known & reference & ~level).sum(axis=(0, 1))
        found = {"gained": int(gained.sum()), "lost": int(lost.sum()), "p_mcnemar": mcnemar(gained - lost)}
    cells = [data.cells[row] for row in corners[have].T.ravel().tolist()]
    origins = tuple((cell.cell_id, data.values[(cell.cell_id, *items.measure)].attempt_id) for cell in cells)
    return about | found | {"pairs": int(np.any(have, axis=1).sum()), "origins": origins}, sample


def _tested(rows: Sequence[Row], items: Items) -> list[ItemEffect]:
    """With their tests, corrected axis by axis."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row[0]["axis"], []).append(row)
    return [one for some in families.values() for one in _summed(some, float(np.nanmax(np.abs(items.mean))))]


def _summed(rows: Sequence[Row], scale: float) -> list[ItemEffect]:
    """With their tests, corrected together; beside the largest number, `scale`, the dust of differences is small."""
    samples, scales = [sample for _, sample in rows], [scale] * len(rows)
    summed = paired_difference_tests(samples, scales)
    p_values = corrected(samples, summed, scales=scales)
    return [
        ItemEffect(**about, **asdict(one), p_corrected=p)
        for (about, _), one, p in zip(rows, summed, p_values, strict=True)
    ]
