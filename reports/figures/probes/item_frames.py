"""Stored items of a probe with their positions, from the attempts that the numbers of a sweep come from."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ....results.store.records import MeasurementKey
from ....results.store.store import Store
from ...sweep_data import SweepData
from ..canvas.length_frames import in_grid_order


def cell_by_attempt_of(data: SweepData, measure: MeasurementKey) -> dict[int, str]:
    """Return the cell id by attempt id, for the attempts that gave a cell's number of this measure.

    Cells without the number have none.

    Args:
        data: The sweep.
        measure: (probe, metric, length).
    """
    values = (data.values.get((cell.cell_id, *measure)) for cell in data.cells)
    return {value.attempt_id: value.cell_id for value in values if value is not None and value.value is not None}


def item_values_frame(store: Store, data: SweepData, measure: MeasurementKey) -> pd.DataFrame:
    """Return the stored item values of a measure, one row per cell, item and position.

    Columns: cell, attempt, item, position and value. Cells are in the grid's order. Without any number the frame is
    empty, with these columns.

    Args:
        store: The database.
        data: The sweep.
        measure: (probe, metric, length).
    """
    cell_by_attempt = cell_by_attempt_of(data, measure)
    columns = ["attempt", "item", "position", "value"]
    if not cell_by_attempt:
        return pd.DataFrame(columns=["cell", *columns])
    with store.snapshot() as snapshot:
        rows = snapshot.item_positions(cell_by_attempt, measure)
    frame = pd.DataFrame(rows, columns=columns).astype({"attempt": int, "item": int, "position": int})
    return in_grid_order(frame.assign(cell=frame["attempt"].map(cell_by_attempt)), data)


def item_detail_rows(store: Store, data: SweepData, measure: MeasurementKey) -> list[dict[str, Any]]:
    """Return a dictionary per cell, item and position that has a stored detail, with cells in the grid's order.

    Its keys are the detail's fields and cell, attempt, item, position and value, which win over fields of these names.
    Without any number of the measure the list is empty.

    Args:
        store: The database.
        data: The sweep.
        measure: (probe, metric, length).
    """
    cell_by_attempt = cell_by_attempt_of(data, measure)
    if not cell_by_attempt:
        return []
    with store.snapshot() as snapshot:
        rows = snapshot.item_details(cell_by_attempt, measure)
    cell_index = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    detail_rows = [
        {
            **detail,
            "cell": cell_by_attempt[attempt],
            "attempt": attempt,
            "item": item,
            "position": position,
            "value": value,
        }
        for attempt, item, position, value, detail in rows
    ]
    return sorted(detail_rows, key=lambda row: cell_index[row["cell"]])


def longest_lengths(data: SweepData, probe: str, metric: str) -> dict[str, int]:
    """Return the longest shown context length, in tokens, at which a cell has a number, by cell id.

    Cells without a number are no keys.
    """
    lengths = {}
    for length in data.lengths(probe, metric, include_unrequested=True):
        for cell in cell_by_attempt_of(data, (probe, metric, length)).values():
            lengths[cell] = length
    return lengths
