"""A sweep as tidy pandas frames: one row per cell, value, point of a training curve, or item of a probe.

    from atma_sweep.results import open_store

    frames = open_store("atma.db").frames("quick")
    losses = frames.measurements().query("metric == 'val_loss'")
    losses.groupby(["attn_type", "memory"])["value"].mean()

Every frame begins with the columns that identify a cell: `cell` (id), `slug`, `seed`, the five factors `attn_type`,
`reg_mode`, `distractor`, `memory`, `window`, and one column for every further axis whose level differs between cells.
That column has the axis's own name, or `axis.NAME` if the name is that of another column. Rows follow the grid. Units
are those of the database: losses nats per token unless `unit` gives another, accuracies and MFU fractions, times
seconds, sizes bytes, lengths tokens.

Types: text is `string` and levels are text. Integers are `int64` if every row has one and `Int64` otherwise. Other
numbers are `float64` with NaN for missing ones, times are `datetime64[ms, UTC]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import pandas as pd
from sqlalchemy import func, select

from . import queries
from .records import AXES, CellState, CurvePoint, Measurement, extra_axes, requests_from_options, standing
from .schema import AttemptRow, CurvePointRow, ExampleRow
from .store_reader import Snapshot

CELL = {"cell": "string", "slug": "string", "seed": "int64"} | dict.fromkeys(AXES, "string")
STATE = {
    "position": "int64", "state": "string", "standing": "string", "tokens_total": "int64", "attempt": "Int64",
    "step": "Int64", "steps_total": "Int64", "loss": "float64", "tokens_per_s": "float64",
    "started_at": "datetime64[ms, UTC]", "finished_at": "datetime64[ms, UTC]", "cause": "string",
}  # fmt: skip
DTYPES = {
    "str": "string", "str | None": "string", "int": "int64", "int | None": "Int64", "float": "float64",
    "float | None": "float64",
}  # fmt: skip
"""Data type of a column, by the annotation of the record's field."""
VALUE = {f.name: DTYPES[str(f.type)] for f in fields(Measurement) if f.name != "description"} | {"attempt": "int64"}
CURVE = {"attempt": "int64"} | {f.name: DTYPES[str(f.type)] for f in fields(CurvePoint)}
EXAMPLE = {
    "attempt": "int64", "probe": "string", "metric": "string", "length": "int64", "item": "int64",
    "item_position": "int64", "value": "float64", "detail": "object",
}  # fmt: skip
RESERVED_COLUMNS = frozenset(CELL) | set(STATE) | set(VALUE) | set(CURVE) | set(EXAMPLE)
"""Names of fixed columns, which no axis column gets."""


def column_name(probe: str, metric: str, length: int) -> str:
    """Return the column name of a measurement: `val.val_loss`, or `clean.nats@2048` at a context length.

    `length` is the context length in tokens; 0 means none and leaves the suffix out.
    """
    return f"{probe}.{metric}@{length}" if length else f"{probe}.{metric}"


class Frames:
    """Data frames of one revision of a sweep; made by Store.frames.

    Each method reads the current state of the database.
    """

    def __init__(self, snapshot: Callable[[], AbstractContextManager[Snapshot]], sweep: str, revision: int) -> None:
        """Keep the source and the revision; nothing is read yet.

        Args:
            snapshot: function that opens a Snapshot, for one call of a method each.
            sweep: name of the sweep, which must exist.
            revision: revision number, which must exist.
        """
        self.snapshot, self.sweep, self.revision = snapshot, sweep, revision

    def cells(self) -> pd.DataFrame:
        """Return one row per cell, with its progress; rows are in the grid's order.

        Columns: `position` (in the grid, from 0), `state` (of the newest attempt: new, running, done, failed, diverged,
        interrupted, pruned), `standing` (the status that `status` shows, relative to the measurements that the revision
        asked for: also needs-eval and weights gone), `tokens_total` (requested training tokens). Columns of the newest
        attempt, missing without one: `attempt` (id), `step`, `steps_total`, `loss`, `tokens_per_s`, `started_at`,
        `finished_at` and `cause`.
        """
        with self.snapshot() as snapshot:
            states = self._states(snapshot)
            requested = requests_from_options(snapshot.revision(self.sweep, self.revision).options)
        rest = list(STATE)[5:]
        rows = []
        for state in states:
            own = state.cell_id, state.position, state.state, standing(state, requested), state.tokens_total
            rows.append((*own, state.attempt_id, *(getattr(state, name) for name in rest)))
        return _build_frame(states, rows, STATE)

    def measurements(self) -> pd.DataFrame:
        """Return one row per measurement, the newest of each (cell, probe, metric, length).

        Values are those of the view `results`.

        Columns: `probe`, `metric`, `length` (context length, 0 for a measurement without one), `value` (NaN with a
        `reason`), `unit`, `n` (samples), `low` and `high` (an interval, if the probe gives one), `reason`, `seconds`,
        `peak_memory`, `source` (SHA-256 of the plugin that defines the probe, missing for a probe of the package), and
        `attempt` (id of the attempt that measured it).

        Rows are in the grid's order, within a cell by probe, metric and length. Only finished attempts count. A cell
        without measurements has no row.
        """
        with self.snapshot() as snapshot:
            states = self._states(snapshot)
            values = snapshot.values(self.sweep, revision=self.revision)
        names = [name for name in VALUE if name != "attempt"]
        rows = [(v.cell_id, *(getattr(v, name) for name in names), v.attempt_id) for v in values]
        return _build_frame(states, rows, VALUE)

    def curves(self) -> pd.DataFrame:
        """Return one row per reported step of each cell's newest finished training (of its newest attempt without one).

        Columns: `attempt`, `step` (from 0), `tokens` (trained so far), `wall_s` (training seconds so far),
        `train_loss`, `val_loss`, `tokens_per_s`, `grad_norm`, `lr` (learning-rate factor), `mfu_paper` (by the paper's
        formula), `mfu` (from the FLOPs actually executed), `peak_memory`; NaN for values that a step did not report.

        Rows are in the grid's order, within a cell by step. A cell without a curve has no row.
        """
        with self.snapshot() as snapshot:
            states = self._states(snapshot)
            cell_by_attempt = {state.trained_attempt_id or state.attempt_id: state.cell_id for state in states}
            columns = [CurvePointRow.attempt_id, *(getattr(CurvePointRow, name) for name in list(CURVE)[1:])]
            query = select(*columns).order_by(CurvePointRow.attempt_id, CurvePointRow.step)
            attempts = [attempt for attempt in cell_by_attempt if attempt is not None]
            points = queries.rows_in(snapshot.session, query, CurvePointRow.attempt_id, attempts)
            rows = [(cell_by_attempt[row[0]], *row) for row in points]
        return _build_frame(states, rows, CURVE)

    def examples(self) -> pd.DataFrame:
        """Return one row per item of a probe (a document, a trial), from the attempt that measured it last.

        Columns: `attempt`, `probe`, `metric`, `length`, `item` (an item is the same document or trial in every cell),
        `item_position` (position inside the item, such as that of the needle; 0 for none), `value`, and `detail` (a
        dictionary that the probe defines, or None).

        Only finished attempts count; the newest is chosen per (cell, probe, metric, length). Rows are in the grid's
        order, within a cell by probe, metric, length, item and position. Generated samples of the training are
        included.
        """
        columns = (ExampleRow.probe, ExampleRow.metric, ExampleRow.length)
        rows: list[tuple[Any, ...]] = []
        with self.snapshot() as snapshot:
            states = self._states(snapshot)
            for part in queries.chunked([state.cell_id for state in states]):
                newest = (
                    select(AttemptRow.cell_id, *columns, func.max(ExampleRow.attempt_id).label("attempt_id"))
                    .join(AttemptRow, AttemptRow.id == ExampleRow.attempt_id)
                    .where(AttemptRow.state == "done", AttemptRow.cell_id.in_(part))
                    .group_by(AttemptRow.cell_id, *columns)
                    .subquery()
                )
                items = (ExampleRow.item, ExampleRow.position)
                same = [getattr(newest.c, column.key) == column for column in columns]
                query = (
                    select(
                        newest.c.cell_id, ExampleRow.attempt_id, *columns, *items, ExampleRow.value, ExampleRow.detail
                    )
                    .join(newest, (newest.c.attempt_id == ExampleRow.attempt_id) & same[0] & same[1] & same[2])
                    .order_by(*columns, *items)
                )
                rows += [tuple(row) for row in snapshot.session.execute(query)]
        return _build_frame(states, rows, EXAMPLE)

    def wide(self) -> pd.DataFrame:
        """Return `cells` with one more `float64` column per measurement, named by `column_name`.

        The new columns are sorted by probe, metric and length. NaN where a cell has no value, also where it has a
        reason.
        """
        cells, values = self.cells(), self.measurements()
        columns: dict[tuple[str, str, int], dict[str, float]] = {}
        for cell, probe, metric, length, value in values[["cell", *list(VALUE)[:4]]].itertuples(index=False, name=None):
            columns.setdefault((probe, metric, length), {})[cell] = value
        numbers = {
            column_name(*key): [values_by_cell.get(cell) for cell in cells["cell"]]
            for key, values_by_cell in sorted(columns.items())
        }
        return pd.concat([cells, pd.DataFrame(numbers, index=cells.index, dtype="float64")], axis=1)

    def _states(self, snapshot: Snapshot) -> list[CellState]:
        return snapshot.cell_states(self.sweep, revision=self.revision)


def _build_frame(
    states: Sequence[CellState], rows: Sequence[tuple[Any, ...]], columns: Mapping[str, str]
) -> pd.DataFrame:
    """Return rows as a frame that begins with the columns of their cells; rows come in the grid's order.

    The leading columns are cell (the id), slug, seed, the five of AXES (attn_type, reg_mode, distractor, memory,
    window), and one per further varying axis. `columns` follow. An axis whose name is reserved gets the column
    `axis.NAME`. Within a cell the order of `rows` is kept. Every row's cell must be in `states`.

    Args:
        states: cells, in the grid's order.
        rows: tuples of a cell id followed by the values of `columns`.
        columns: data type by column name, in the order of the rows' values.
    """
    axes = extra_axes(states)
    own = CELL | {f"axis.{axis}" if axis in RESERVED_COLUMNS else axis: "string" for axis in axes}
    cells = [
        (s.cell_id, s.slug, s.seed, *(s.levels[axis] for axis in AXES), *(s.axes.get(axis) for axis in axes))
        for s in states
    ]
    index_by_cell = {state.cell_id: index for index, state in enumerate(states)}
    ordered = sorted(rows, key=lambda row: index_by_cell[row[0]])  # stable: within a cell as they came
    data = {name: [cells[index_by_cell[row[0]]][index] for row in ordered] for index, name in enumerate(own)}
    data |= {name: [row[index] for row in ordered] for index, name in enumerate(columns, 1)}
    return pd.DataFrame({name: _series(data[name], kind) for name, kind in (own | dict(columns)).items()})


def _series(values: list[Any], kind: str) -> pd.Series[Any]:
    if kind.startswith("datetime"):
        return pd.Series(pd.to_datetime(values, utc=True)).astype(kind)  # type: ignore[call-overload]
    return pd.Series(values, dtype=kind)
