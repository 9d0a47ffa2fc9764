"""From the database to tidy pandas: one row a cell, or one row a value. Everything that draws or tests starts here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ..results.records import AXES, CellState
from ..results.store import Store
from .data import SweepData, gather

CELL_COLUMNS = ("cell", "slug", "position", "state", "seed", *AXES)
VALUE_COLUMNS = ("probe", "metric", "length", "value", "unit", "n", "low", "high", "reason", "seconds", "peak_memory")


@dataclass(frozen=True, kw_only=True)
class CompleteTable:
    """Every number of a sweep.

    `cells`: one row a cell in the grid's order: CELL_COLUMNS, the further axes that vary (`axis_columns`), then one
    float column a measurement, named by `column_name`, NaN where a cell has none. `values`: one row a value or reason,
    CELL_COLUMNS and the axes with VALUE_COLUMNS. `references`: by metric, the corpus entropies in nats per token.
    """

    sweep: str
    revision: int
    done: int
    total: int
    axis_columns: tuple[str, ...]
    cells: pd.DataFrame
    values: pd.DataFrame
    references: dict[str, tuple[float, ...]]


def column_name(probe: str, metric: str, length: int) -> str:
    """`val.val_loss`, or `clean.nats@2048` for a measurement at a context length."""
    return f"{probe}.{metric}@{length}" if length else f"{probe}.{metric}"


def _axis_column(axis: str) -> str:
    return f"axis.{axis}" if axis in CELL_COLUMNS or axis in VALUE_COLUMNS else axis


def _cell_row(cell: CellState, axes: list[str]) -> dict[str, Any]:
    row = {"cell": cell.cell_id, "slug": cell.slug, "position": cell.position, "state": cell.state, "seed": cell.seed}
    return row | dict(cell.levels) | {_axis_column(axis): cell.axes.get(axis) for axis in axes}


def _values_frame(data: SweepData, rows: dict[str, dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    long = []
    for value in data.values.values():
        given = asdict(value)
        long.append(rows[value.cell_id] | {name: given[name] for name in VALUE_COLUMNS} | {"attempt": value.attempt_id})
    frame = pd.DataFrame(long, columns=[*columns, *VALUE_COLUMNS, "attempt"])
    numbers = ["value", "low", "high", "seconds"]
    frame[numbers] = frame[numbers].astype(float)
    return frame.sort_values(["position", "probe", "metric", "length"], kind="stable", ignore_index=True)


def complete_table(store: Store, sweep: str | None = None, *, revision: int | None = None) -> CompleteTable:
    """The sweep (None: the one launched last) as frames. Raises SweepUnknown, StoreError (no such revision)."""
    data = gather(store, sweep, revision=revision)
    axes = data.extra_axes()
    rows = {cell.cell_id: _cell_row(cell, axes) for cell in data.cells}
    columns = [*CELL_COLUMNS, *(_axis_column(axis) for axis in axes)]
    cells = pd.DataFrame(list(rows.values()), columns=columns)
    wide: dict[str, list[float | None]] = {}
    for probe, metric, length in sorted({key[1:] for key in data.values}):
        found = (data.values.get((cell, probe, metric, length)) for cell in rows)
        wide[column_name(probe, metric, length)] = [value.value if value is not None else None for value in found]
    numbers = pd.DataFrame(wide, index=cells.index, dtype=float)
    return CompleteTable(
        sweep=data.sweep,
        revision=data.revision,
        done=data.done,
        total=len(data.cells),
        axis_columns=tuple(_axis_column(axis) for axis in axes),
        cells=pd.concat([cells, numbers], axis=1),
        values=_values_frame(data, rows, columns),
        references=dict(data.references),
    )
