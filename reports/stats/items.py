"""Item-level results and tests: documents, rows and trials that each network got right, compared item by item.

Every network answers the same items, so networks can be compared item by item. Such a test generalises to other items
of this kind for these very networks and, with several seeds, to other seeds. It says nothing about other
configurations; those are covered by stats/effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from ...results.store.records import MeasurementKey
from ...results.store.store import Store
from ..number_format import Column, column_of, format_length
from ..sweep_data import ReportError, SweepData
from .effects.matched_groups import MetricMatrix, level_pairs, subset_mask, varying_axes
from .significance.paired_tests import ALPHA, PairedTest, correct_family, paired_difference_tests

ANSWERS = ("cell", "attempt", "configuration", "seed", "length", "trial", "value", "exact")


@dataclass(frozen=True)
class Items:
    """A measure item by item, for C cells in the sweep's order and I items in the order of their numbers.

    An item is a document, a row or a trial that every cell answers.
    """

    measure: MeasurementKey
    """(probe, metric, context length in tokens)."""
    numbers: np.ndarray
    """Number of each item, [I]; the same document, row or trial in every cell."""
    mean: np.ndarray
    """Mean over the positions of an item, [C, I] (accuracy: share of its digits); NaN where a cell lacks it."""
    item_minimum: np.ndarray
    """Minimum over the positions of an item, [C, I]; 1 where every digit of an accuracy is right."""


def items_of(store: Store, data: SweepData, measures: Sequence[MeasurementKey]) -> list[Items]:
    """Return the items of each measure, from the attempts behind the sweep's numbers.

    Measures without stored items are left out. Reads the database in one snapshot, one query per measure and 500 cells,
    and holds only the returned arrays in memory.

    Args:
        store: The database.
        data: The sweep.
        measures: (probe, metric, context length) of each measure; the result is in this order.
    """
    index_by_cell = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    items = []
    with store.snapshot() as snapshot:
        for measure in measures:
            values = ((index, data.values.get((cell, *measure))) for cell, index in index_by_cell.items())
            index_by_attempt = {
                value.attempt_id: index for index, value in values if value is not None and value.value is not None
            }
            rows = snapshot.item_means(index_by_attempt, measure) if index_by_attempt else np.empty((0, 4))
            if not len(rows):
                continue
            numbers, column = np.unique(rows[:, 1].astype(np.int64), return_inverse=True)
            cells = np.array([index_by_attempt[attempt] for attempt in rows[:, 0].astype(np.int64).tolist()])
            mean, minimum = (np.full((len(index_by_cell), len(numbers)), np.nan) for _ in range(2))
            mean[cells, column], minimum[cells, column] = rows[:, 2], rows[:, 3]
            items.append(Items(measure, numbers, mean, minimum))
    return items


def answers_frame(
    store: Store,
    data: SweepData,
    probe: str = "needle",
    metric: str = "digit_accuracy",
    lengths: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return a frame of answers with one row for every cell, context length and trial that was answered.

    Columns: cell (id), attempt (id), configuration (levels of every axis joined by ", ", without the seed), seed,
    length (tokens), trial (its number, the same in every cell), value (share of its digits that are right, a fraction),
    exact (True if all are). Rows follow the grid, then length, then trial. The items of other probes use the same
    columns: value is the mean over the positions of an item.

    Args:
        store: The database.
        data: The sweep.
        probe: Name of the probe.
        metric: Name of the metric.
        lengths: Context lengths in tokens; None for those that the report shows.

    Raises:
        ReportError: No items are stored, as for the published sweeps.
    """
    selected_lengths = data.lengths(probe, metric) if lengths is None else lengths
    names = {cell.cell_id: ", ".join(key) for key, cells in data.configurations().items() for cell in cells}
    parts = []
    for items in items_of(store, data, [(probe, metric, length) for length in selected_lengths]):
        rows, columns = np.nonzero(~np.isnan(items.mean))
        cells = [data.cells[row] for row in rows.tolist()]
        part = {
            "cell": [cell.cell_id for cell in cells],
            "attempt": [data.values[(cell.cell_id, *items.measure)].attempt_id for cell in cells],
            "configuration": [names[cell.cell_id] for cell in cells],
            "seed": [cell.seed for cell in cells],
            "length": items.measure[2],
            "trial": items.numbers[columns],
            "value": items.mean[rows, columns],
            "exact": items.item_minimum[rows, columns] == 1,
        }
        parts.append(pd.DataFrame(part, columns=list(ANSWERS)).assign(place=rows))
    if not parts:
        raise ReportError(
            f"sweep {data.sweep} has no items of probe {probe}: printed numbers have none, and a bundle may lack them (export --no-examples)"
        )
    return pd.concat(parts).sort_values(["place", "length", "trial"], ignore_index=True).drop(columns="place")


# --- tests ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ItemEffect(PairedTest):
    """Effect of a level on a measure, tested item by item: level minus reference.

    The fields of PairedTest count items instead of configurations. The difference of an item is averaged over `pairs`
    of configurations that differ in the axis only, and crossed with seeds if there are several. `gained` and `lost`
    count the (pair, seed, item) combinations with every digit right at this level only and at the reference only.
    `p_mcnemar` is their McNemar test with items as clusters, not corrected. They are None and NaN for measures without
    right and wrong. `p_corrected` is p after the correction for its `family` (measure and axis). `where` is empty for
    the full sweep or names a mixer (`attn_type=polar`).
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
    def is_significant(self) -> bool:
        """True if the difference from zero is significant (alpha 0.05) after the correction for its family."""
        return self.p_corrected < ALPHA


def mcnemar(net: np.ndarray) -> float:
    """Return the p value of an exact two-sided McNemar test with trials as clusters.

    Without an effect, each trial's net gain is as likely to be a loss of that size. p is the share of the 2^trials sign
    assignments whose absolute sum is at least the observed one; 1 if no trial has a net gain. For one pair (net -1, 0
    or 1) it is McNemar's exact test.

    Args:
        net: Number of pairs that gain a trial minus the number that lose it, [trial], integers.
    """
    sizes = np.abs(net[net != 0]).astype(np.int64)
    reach = int(sizes.sum())
    distribution = np.zeros(2 * reach + 1)
    distribution[reach] = 1.0
    for size in sizes:
        # no partial sum exceeds the sizes so far, so np.roll wraps only zeros around
        distribution = (np.roll(distribution, size) + np.roll(distribution, -size)) / 2
    at_least = abs(int(net.sum()))
    sums = np.abs(np.arange(-reach, reach + 1))
    return min(1.0, float(distribution[sums >= at_least].sum()))


def item_measures(data: SweepData) -> list[Column]:
    """Return the columns that may have items: measures with a better side, at each shown length, sorted by key.

    The key is (probe, metric, length). Columns that are no percentages have at least four decimals.
    """
    columns = []
    for probe, metric in dict.fromkeys(key[1:3] for key in data.shown_values):
        description = data.metric(probe, metric)
        heading = description.heading or f"{probe} {metric}"
        for length in data.lengths(probe, metric) if description.direction else ():
            name = f"{heading}@{format_length(length)}" if length else heading
            column = column_of(probe, description, name, length=length)
            columns.append(column if column.percent else replace(column, decimals=max(column.decimals, 4)))
    return sorted(columns, key=lambda column: column.key)


def item_effects(store: Store, data: SweepData, columns: Sequence[Column] | None = None) -> list[ItemEffect]:
    """Return the effect of every pair of levels of every axis on every measure, item by item.

    Effects are over the full sweep and, for axes other than the mixer, within every mixer; all of them are corrected
    within (measure, axis). Levels without a pair of cells that have a common item are left out, and so are measures
    without stored items. Measures keep their order.

    Args:
        store: The database.
        data: The sweep.
        columns: Measures; None for `item_measures(data)`.
    """
    columns_by_key = {column.key: column for column in (item_measures(data) if columns is None else columns)}
    mixers = data.levels("attn_type")
    numbers, contrasts = MetricMatrix(data, []), []
    for axis in varying_axes(data):
        subsets = ["", *(mixers if axis != "attn_type" and len(mixers) > 1 else ())]
        for level, reference in level_pairs(data, axis):
            matched = numbers.differences_between({axis: (level, reference)})
            has_pair: np.ndarray = np.any(np.all(matched.corners >= 0, axis=-1), axis=1)
            for mixer in subsets:
                mask = has_pair & subset_mask(matched.levels, {"attn_type": mixer} if mixer else {}, len(has_pair))
                if mask.any():
                    contrasts.append((axis, level, reference, mixer, matched.corners[mask]))
    effects: list[ItemEffect] = []
    for items in items_of(store, data, list(columns_by_key)):
        column = columns_by_key[items.measure]
        rows: list[Row] = []
        for axis, level, reference, mixer, corners in contrasts:
            fields = {"measure": column, "axis": axis, "level": level, "reference": reference}
            fields |= {"where": f"attn_type={mixer}" if mixer else "", "family": f"{column.heading}: {axis}"}
            if (row := _row(data, items, corners, fields)) is not None:
                rows.append(row)
        effects += _item_effects(rows, items)
    return effects


Row = tuple[dict[str, Any], np.ndarray]
"""Fields of an ItemEffect except those of its tests, and its differences [item, seed]."""


def _row(data: SweepData, items: Items, corners: np.ndarray, fields: dict[str, Any]) -> Row | None:
    """Return the fields and differences of an effect; None if no item is present on both sides of a pair.

    Args:
        data: The sweep.
        items: Items of the measure.
        corners: Cell indices (level, reference), -1 for none, [pair, seed, 2].
        fields: Fields of ItemEffect that the caller knows: measure, axis, level, reference, where, family.

    Returns:
        (fields with `pairs`, `origins`, `gained`, `lost` and `p_mcnemar`; differences averaged over pairs [item, seed],
        NaN where no pair has the item).
    """
    listed: np.ndarray = np.all(corners >= 0, axis=2)
    # [pairs, seeds, items]
    differences = np.where(listed[..., None], items.mean[corners[..., 0]] - items.mean[corners[..., 1]], np.nan)
    present = ~np.isnan(differences)
    has_item: np.ndarray = np.any(present, axis=2)
    if not has_item.any():
        return None
    counts = present.sum(axis=0)
    sample = np.where(counts, np.where(present, differences, 0.0).sum(axis=0) / np.maximum(counts, 1), np.nan).T
    mcnemar_fields: dict[str, Any] = {"gained": None, "lost": None, "p_mcnemar": math.nan}
    if data.metric(*items.measure[:2]).trials:
        right = items.item_minimum == 1
        level, reference = right[corners[..., 0]], right[corners[..., 1]]
        gained, lost = (present & level & ~reference).sum(axis=(0, 1)), (present & reference & ~level).sum(axis=(0, 1))
        mcnemar_fields = {"gained": int(gained.sum()), "lost": int(lost.sum()), "p_mcnemar": mcnemar(gained - lost)}
    cells = [data.cells[row] for row in corners[has_item].T.ravel().tolist()]
    origins = tuple((cell.cell_id, data.values[(cell.cell_id, *items.measure)].attempt_id) for cell in cells)
    return fields | mcnemar_fields | {"pairs": int(np.any(has_item, axis=1).sum()), "origins": origins}, sample


def _item_effects(rows: Sequence[Row], items: Items) -> list[ItemEffect]:
    """Return the tested effects of one measure, corrected axis by axis.

    Those of an axis stay together, in their order.
    """
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row[0]["axis"], []).append(row)
    return [
        effect
        for family_rows in families.values()
        for effect in _family_effects(family_rows, float(np.nanmax(np.abs(items.mean))))
    ]


def _family_effects(rows: Sequence[Row], scale: float) -> list[ItemEffect]:
    """Return the tested effects of one family, in order, with their corrected p values.

    Args:
        rows: Fields and differences of each effect.
        scale: Largest absolute number behind the differences, relative to which ties are found.
    """
    samples, scales = [sample for _, sample in rows], [scale] * len(rows)
    summed = paired_difference_tests(samples, scales)
    p_values = correct_family(samples, summed, scales=scales)
    return [
        ItemEffect(**fields, **asdict(test), p_corrected=p)
        for (fields, _), test, p in zip(rows, summed, p_values, strict=True)
    ]
