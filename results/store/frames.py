"""A sweep as tidy pandas frames: one row a cell, a value, a point of a training curve, or an item of a probe.

    from atma_sweep.results import open_store

    frames = open_store("atma.db").frames("quick")
    losses = frames.measurements().query("metric == 'val_loss'")
    losses.groupby(["attn_type", "memory"])["value"].mean()

Every frame begins with what tells cells apart: `cell` (id), `slug`, `seed`, the five factors `attn_type`, `reg_mode`,
`distractor`, `memory`, `window`, and one column for every further axis whose level differs between cells, under the axis's
own name (`axis.NAME` where a column is called so already). Rows follow the grid. Units are those of the database:
losses nats per token unless `unit` says otherwise, accuracies and MFU fractions, times seconds, sizes bytes, lengths tokens.

Types: text is `string`, levels are text, whole numbers are `int64` where every row has one and `Int64` else, other numbers
`float64` with NaN for none, times `datetime64[ms, UTC]`.
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
"""Types of columns by those of a record's fields."""
VALUE = {f.name: DTYPES[str(f.type)] for f in fields(Measurement) if f.name != "description"} | {"attempt": "int64"}
CURVE = {"attempt": "int64"} | {f.name: DTYPES[str(f.type)] for f in fields(CurvePoint)}
EXAMPLE = {
    "attempt": "int64", "probe": "string", "metric": "string", "length": "int64", "item": "int64",
    "item_position": "int64", "value": "float64", "detail": "object",
}  # fmt: skip
TAKEN = frozenset(CELL) | set(STATE) | set(VALUE) | set(CURVE) | set(EXAMPLE)
"""Names of columns, which no axis gets."""


def column_name(probe: str, metric: str, length: int) -> str:
    """`val.val_loss`, or `clean.nats@2048` for a measurement at a context length."""
    return f"{probe}.{metric}@{length}" if length else f"{probe}.{metric}"


class Frames:
    """One revision of a sweep; made by Store.frames. Each method reads the database as it is when it is called."""

    def __init__(self, snapshot: Callable[[], AbstractContextManager[Snapshot]], sweep: str, revision: int) -> None:
        self.snapshot, self.sweep, self.revision = snapshot, sweep, revision

    def cells(self) -> pd.DataFrame:
        """One row a cell, with how far it is.

        `position` (in the grid, from 0), `state` (of the newest attempt: new, running, done, failed, diverged,
        interrupted), `standing` (the word that status shows: also needs-eval and weights gone), `tokens_total` (training
        tokens asked for); of the newest attempt `attempt` (id), `step`, `steps_total`, `loss`, `tokens_per_s`,
        `started_at`, `finished_at` and `cause`, missing where there is none.
        """
        with self.snapshot() as seen:
            states = self._states(seen)
            asked = requests_from_options(seen.revision(self.sweep, self.revision).options)
        rest = list(STATE)[5:]
        rows = []
        for state in states:
            own = state.cell_id, state.position, state.state, standing(state, asked), state.tokens_total
            rows.append((*own, state.attempt_id, *(getattr(state, name) for name in rest)))
        return _tidy(states, rows, STATE)

    def measurements(self) -> pd.DataFrame:
        """One row a number, or the reason why there is none: the newest of each (cell, probe, metric, length).

        `probe`, `metric`, `length` (context length, 0 when it is not about one), `value` (NaN with a `reason`), `unit`,
        `n` (samples), `low` and `high` (an interval, where the probe gives one), `reason`, `seconds`, `peak_memory`,
        `source` (SHA-256 of the plugin whose probe it is, missing for one of the package), and the `attempt` that measured it. The values are those of the view `results`.
        """
        with self.snapshot() as seen:
            states = self._states(seen)
            values = seen.values(self.sweep, revision=self.revision)
        names = [name for name in VALUE if name != "attempt"]
        rows = [(v.cell_id, *(getattr(v, name) for name in names), v.attempt_id) for v in values]
        return _tidy(states, rows, VALUE)

    def curves(self) -> pd.DataFrame:
        """One row a reported step of each cell's newest finished training, or of its newest attempt while there is none.

        `attempt`, `step` (from 0), `tokens` (trained so far), `wall_s` (training seconds so far), `train_loss`,
        `val_loss`, `tokens_per_s`, `grad_norm`, `lr` (the learning-rate factor), `mfu_paper` (the paper's formula), `mfu`
        (FLOPs really done), `peak_memory`; NaN where a step reported none.
        """
        with self.snapshot() as seen:
            states = self._states(seen)
            shown = {state.trained_attempt_id or state.attempt_id: state.cell_id for state in states}
            columns = [CurvePointRow.attempt_id, *(getattr(CurvePointRow, name) for name in list(CURVE)[1:])]
            query = select(*columns).order_by(CurvePointRow.attempt_id, CurvePointRow.step)
            attempts = [attempt for attempt in shown if attempt is not None]
            found = queries.rows_in(seen.session, query, CurvePointRow.attempt_id, attempts)
            rows = [(shown[row[0]], *row) for row in found]
        return _tidy(states, rows, CURVE)

    def examples(self) -> pd.DataFrame:
        """One row an item of a probe (a document, a trial), of the attempt that measured it last.

        `attempt`, `probe`, `metric`, `length`, `item` (the same item is the same document or trial in every cell),
        `item_position` (where in it, such as the needle's place; 0 when it has none), `value`, and `detail` (a dictionary
        of the probe's own, or None).
        """
        columns = (ExampleRow.probe, ExampleRow.metric, ExampleRow.length)
        rows: list[tuple[Any, ...]] = []
        with self.snapshot() as seen:
            states = self._states(seen)
            for part in queries.in_parts([state.cell_id for state in states]):
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
                rows += [tuple(row) for row in seen.session.execute(query)]
        return _tidy(states, rows, EXAMPLE)

    def wide(self) -> pd.DataFrame:
        """`cells`, and one `float64` column a measurement, named by `column_name`, NaN where a cell has no value."""
        cells, values = self.cells(), self.measurements()
        columns: dict[tuple[str, str, int], dict[str, float]] = {}
        for cell, probe, metric, length, value in values[["cell", *list(VALUE)[:4]]].itertuples(index=False, name=None):
            columns.setdefault((probe, metric, length), {})[cell] = value
        numbers = {
            column_name(*key): [found.get(cell) for cell in cells["cell"]] for key, found in sorted(columns.items())
        }
        return pd.concat([cells, pd.DataFrame(numbers, index=cells.index, dtype="float64")], axis=1)

    def _states(self, seen: Snapshot) -> list[CellState]:
        return seen.cell_states(self.sweep, revision=self.revision)


def _tidy(states: Sequence[CellState], rows: Sequence[tuple[Any, ...]], columns: Mapping[str, str]) -> pd.DataFrame:
    """Rows that begin with the cell's id, as a frame with the cells' own columns before theirs, in the grid's order."""
    axes = extra_axes(states)
    own = CELL | {f"axis.{axis}" if axis in TAKEN else axis: "string" for axis in axes}
    cells = [
        (s.cell_id, s.slug, s.seed, *(s.levels[axis] for axis in AXES), *(s.axes.get(axis) for axis in axes))
        for s in states
    ]
    place = {state.cell_id: index for index, state in enumerate(states)}
    ordered = sorted(rows, key=lambda row: place[row[0]])  # stable: within a cell as they came
    data = {name: [cells[place[row[0]]][index] for row in ordered] for index, name in enumerate(own)}
    data |= {name: [row[index] for row in ordered] for index, name in enumerate(columns, 1)}
    return pd.DataFrame({name: _series(data[name], kind) for name, kind in (own | dict(columns)).items()})


def _series(values: list[Any], kind: str) -> pd.Series[Any]:
    if kind.startswith("datetime"):
        return pd.Series(pd.to_datetime(values, utc=True)).astype(kind)  # type: ignore[call-overload]
    return pd.Series(values, dtype=kind)
