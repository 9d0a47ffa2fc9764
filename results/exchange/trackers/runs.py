"""A sweep in the terms of experiment trackers: one run per cell, with its curve and its newest values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from ...names import safe_file_name
from ...store.records import CellRecord, CurvePoint, MeasuredValue
from ...store.store import Store

CURVE = tuple(field.name for field in fields(CurvePoint) if field.name != "step")


@dataclass(frozen=True, kw_only=True)
class TrackerRun:
    """A cell with its curve and its newest values.

    `name` is its slug as a safe file name, followed by the id if several cells share the slug. `state` is that of the
    cell; start and end are those of the attempt of the curve. `curve` is sorted by step; `values` holds one measurement
    per (probe, metric, length), some with a reason instead of a value.
    """

    name: str
    cell: CellRecord
    state: str
    started_at: datetime | None
    finished_at: datetime | None
    curve: tuple[CurvePoint, ...]
    values: tuple[MeasuredValue, ...]

    def hyperparameters(self) -> dict[str, Any]:
        """Return id, state, seed and tokens of the cell, its five levels and the grid's axes, by name."""
        facts = {"cell": self.cell.id, "state": self.state, "seed": self.cell.seed, "tokens": self.cell.tokens}
        return facts | dict(self.cell.levels) | dict(self.cell.axes)


def tracker_runs(store: Store, sweep: str) -> Iterator[TrackerRun]:
    """Yield the cells of the newest revision as runs, in the grid's order.

    The curve, start and end are those of the newest finished training, or of the newest attempt without one. A cell
    without attempts has an empty curve and no times.

    Raises:
        SweepUnknown: there is no such sweep (at the first item).
    """
    states = store.cell_states(sweep)
    values: dict[str, list[MeasuredValue]] = {state.cell_id: [] for state in states}
    for value in store.values(sweep):
        values[value.cell_id].append(value)
    named = Counter(state.slug for state in states)
    for state in states:
        attempt_id = state.trained_attempt_id or state.attempt_id
        attempt = store.attempt(attempt_id) if attempt_id is not None else None
        plain = safe_file_name(state.slug)
        yield TrackerRun(
            name=plain if named[state.slug] == 1 else f"{plain}-{state.cell_id}",
            cell=store.cell(state.cell_id),
            state=state.state,
            started_at=attempt.started_at if attempt is not None else None,
            finished_at=attempt.finished_at if attempt is not None else None,
            curve=tuple(store.curve(attempt_id)) if attempt_id is not None else (),
            values=tuple(values[state.cell_id]),
        )
