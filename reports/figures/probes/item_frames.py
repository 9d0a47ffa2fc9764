"""The items of a probe with their places, of the attempts that the numbers of a sweep come from."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ....results.store.records import Key
from ....results.store.store import Store
from ...sweep_data import SweepData
from ..canvas.length_frames import in_grid_order


def attempts_of(data: SweepData, measure: Key) -> dict[int, str]:
    """By attempt: the cell whose number of that measure it gave."""
    values = (data.values.get((cell.cell_id, *measure)) for cell in data.cells)
    return {value.attempt_id: value.cell_id for value in values if value is not None and value.value is not None}


def places(store: Store, data: SweepData, measure: Key) -> pd.DataFrame:
    """One row a place of an item: cell, attempt, item, position and value, cells in the order of the grid."""
    behind = attempts_of(data, measure)
    columns = ["attempt", "item", "position", "value"]
    if not behind:
        return pd.DataFrame(columns=["cell", *columns])
    with store.snapshot() as seen:
        rows = seen.item_places(behind, measure)
    frame = pd.DataFrame(rows, columns=columns).astype({"attempt": int, "item": int, "position": int})
    return in_grid_order(frame.assign(cell=frame["attempt"].map(behind)), data)


def item_detail_rows(store: Store, data: SweepData, measure: Key) -> list[dict[str, Any]]:
    """One dictionary a place of an item that has a detail: cell, attempt, item, position, value and what the detail says."""
    behind = attempts_of(data, measure)
    if not behind:
        return []
    with store.snapshot() as seen:
        rows = seen.item_details(behind, measure)
    place = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    found = [
        {**detail, "cell": behind[attempt], "attempt": attempt, "item": item, "position": position, "value": value}
        for attempt, item, position, value, detail in rows
    ]
    return sorted(found, key=lambda one: place[one["cell"]])


def longest(data: SweepData, probe: str, metric: str) -> dict[str, int]:
    """By cell: the longest context length that is shown and at which it has a number."""
    found = {}
    for length in data.lengths(probe, metric, unasked=True):
        for cell in attempts_of(data, (probe, metric, length)).values():
            found[cell] = length
    return found
