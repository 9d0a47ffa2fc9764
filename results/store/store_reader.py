"""What can be asked of a database: of a Store, each question in a transaction of its own, or of one Snapshot of it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from . import attempt_queries, queries
from .records import (
    CellState,
    MeasuredValue,
)

Result = TypeVar("Result")
QueryArgs = ParamSpec("QueryArgs")


def asking(
    query: Callable[Concatenate[Session, QueryArgs], Result],
) -> Callable[Concatenate[StoreReader, QueryArgs], Result]:
    """Return the method of Reads that asks a query, with the query's arguments and description."""

    @functools.wraps(query)
    def ask(self: StoreReader, *args: QueryArgs.args, **options: QueryArgs.kwargs) -> Result:
        return self.read(query, *args, **options)

    del ask.__wrapped__  # whose first argument is the session
    return ask


class StoreReader(ABC):
    """The questions. Their answers are records (see records.py), never rows; nothing here writes.

    Raises SweepUnknown for a sweep that is not there; of None the sweep launched last is meant.
    """

    @abstractmethod
    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """`work` with a session and then the arguments, in a transaction that only reads."""

    now = asking(queries.now)
    default_sweep = asking(queries.default_sweep)
    sweeps = asking(queries.sweeps)
    sweep = asking(queries.sweep)
    revision = asking(queries.revision)
    members = asking(queries.newest_members)
    cell_states = asking(queries.cell_states)
    cell = asking(queries.cell)
    configs = asking(queries.configs)
    find_cell = asking(queries.find_cell)
    values = asking(attempt_queries.sweep_values)
    attempt = asking(attempt_queries.attempt)
    attempts = asking(attempt_queries.attempts)
    live_attempts = asking(attempt_queries.live_attempts)
    attempts_of = asking(attempt_queries.attempts_of)
    failures = asking(attempt_queries.failures)
    curve = asking(attempt_queries.curve)
    samples = asking(attempt_queries.samples)
    provenance = asking(attempt_queries.provenance)
    provenances = asking(attempt_queries.provenances)
    sources = asking(attempt_queries.sources)
    timed = asking(attempt_queries.training_timings)
    starts = asking(attempt_queries.startup_seconds)
    mark = asking(attempt_queries.change_token)
    newest_event = asking(attempt_queries.newest_event)
    events = asking(attempt_queries.events)

    def states(self, cell_ids: Collection[str]) -> dict[str, CellState]:
        """How far these cells are, by id, whichever sweeps list them; cells that were never launched are absent."""
        return {state.cell_id: state for state in self.read(queries.states, cell_ids)}

    def measurements(self, cell_id: str) -> list[MeasuredValue]:
        """The newest value per (probe, metric, length) over the cell's done attempts."""
        return self.read(attempt_queries.values, [cell_id])


class Snapshot(StoreReader):
    """The database as it was when its transaction began; made by Store.snapshot and usable until it ends."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """`work` on the snapshot's session."""
        return work(self.session, *args, **options)

    curve_arrays = asking(attempt_queries.curve_arrays)
    item_means = asking(attempt_queries.item_means)
    item_places = asking(attempt_queries.item_places)
    item_details = asking(attempt_queries.item_details)
