"""Which documents, rows and trials each network got right: the items that probes store beside their numbers.

Every network is asked the same items, so two of them can be held against each other item by item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...results.store.records import Key
from ...results.store.store import Store
from ..data import ReportError, SweepData

__all__ = ["Items", "answers", "items_of"]

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
