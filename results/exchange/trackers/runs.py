"""A sweep in the terms of experiment trackers: one run per cell, with its curve and its newest values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from ...names import safe_file_name
from ...store.records import CellRecord, CellState, CurvePoint, MeasuredValue
from ...store.store import Store

BATCH = 500
"""Number of cells whose measurements are read, and held in memory, at a time."""
CURVE = tuple(field.name for field in fields(CurvePoint) if field.name != "step")


@dataclass(frozen=True, kw_only=True)
class TrackerRun:
    """A cell with its curve and its newest values.

    `name` is its slug as a safe file name, followed by the id if several cells share the slug. `state` is that of the
    cell; start and end are those of the attempt of the curve. `curve` is sorted by step; `values` holds one measurement
    per (probe, metric, length), some with a reason instead of a value. `step` is the last one of the complete curve, 0
    without any. `tags` are the user's tags of the sweep.
    """

    name: str
    cell: CellRecord
    state: str
    started_at: datetime | None
    finished_at: datetime | None
    curve: tuple[CurvePoint, ...]
    values: tuple[MeasuredValue, ...]
    step: int = 0
    tags: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Name that the runs of all seeds of one configuration share: the slug without its seed."""
        return self.cell.slug.removesuffix(f"-s{self.cell.seed}")

    def hyperparameters(self) -> dict[str, Any]:
        """Return id, seed and tokens of the cell, its five levels and the grid's axes, by name; these never change."""
        facts = {"cell": self.cell.id, "seed": self.cell.seed, "tokens": self.cell.tokens}
        return facts | dict(self.cell.levels) | dict(self.cell.axes)

    def config(self) -> dict[str, Any]:
        """Return hyper-parameters and state, `began` and `ended` as UTC text or None, and the complete `config`."""
        from ..bundles import format_utc  # every launch imports this module

        times = {
            "began": self.started_at and format_utc(self.started_at),
            "ended": self.finished_at and format_utc(self.finished_at),
        }
        return self.hyperparameters() | {"state": self.state} | times | {"config": dict(self.cell.config)}


@dataclass(frozen=True)
class LiveTarget:
    """Receiver of the news of runs."""

    push: Callable[[TrackerRun, str | None], str]
    """Function of a run with its new points and values alone, and of the key that it returned for this run before."""
    close: Callable[[], None] = lambda: None
    """Function that ends the connection."""


def tracker_runs(store: Store, sweep: str) -> Iterator[TrackerRun]:
    """Yield the cells of the newest revision as runs, in the grid's order.

    Raises:
        SweepUnknown: there is no such sweep (at the first item).
    """
    states = store.cell_states(sweep)
    names, tags = run_names(states), store.sweep(sweep).tags
    for start in range(0, len(states), BATCH):
        batch = states[start : start + BATCH]
        values = store.measurements_of([state.cell_id for state in batch])
        for state, name in zip(batch, names[start : start + BATCH], strict=True):
            yield tracker_run(store, state, name, values[state.cell_id], tags)


def run_names(states: Sequence[CellState]) -> list[str]:
    """Return the names of the runs: slugs as safe file names, followed by the id where several cells share a slug."""
    named = Counter(state.slug for state in states)
    return [safe_file_name(state.slug) + (f"-{state.cell_id}" if named[state.slug] > 1 else "") for state in states]


def tracker_run(
    store: Store, state: CellState, name: str, values: Sequence[MeasuredValue], tags: Sequence[str]
) -> TrackerRun:
    """Return a cell as a run of that name with these measurements and tags.

    The curve, start and end are those of the newest finished training, or of the newest attempt without one. A cell
    without attempts has an empty curve and no times.
    """
    attempt_id = state.trained_attempt_id or state.attempt_id
    attempt = store.attempt(attempt_id) if attempt_id is not None else None
    curve = tuple(store.curve(attempt_id)) if attempt_id is not None else ()
    return TrackerRun(
        name=name,
        cell=store.cell(state.cell_id),
        state=state.state,
        started_at=attempt.started_at if attempt is not None else None,
        finished_at=attempt.finished_at if attempt is not None else None,
        curve=curve,
        values=tuple(values),
        step=curve[-1].step if curve else 0,
        tags=tuple(tags),
    )
