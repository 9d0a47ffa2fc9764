"""Read interface of the database: StoreReader, its methods, and Snapshot, which reads one consistent state.

A Store runs each query in a transaction of its own, a Snapshot runs all of them in one.
"""

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


def as_method(
    query: Callable[Concatenate[Session, QueryArgs], Result],
) -> Callable[Concatenate[StoreReader, QueryArgs], Result]:
    """Turn a query function, whose first argument is a session, into a method of StoreReader.

    The method runs the query through `StoreReader.read` and keeps the query's other arguments, name and docstring. A
    generator must not be turned into a method of Store, which closes the session first.
    """

    @functools.wraps(query)
    def method(self: StoreReader, *args: QueryArgs.args, **options: QueryArgs.kwargs) -> Result:
        return self.read(query, *args, **options)

    del method.__wrapped__  # whose first argument is the session
    return method


class StoreReader(ABC):
    """Queries on the database. They return records (see records.py), never rows; none of them writes.

    Every query on a sweep raises SweepUnknown if it does not exist; None stands for the sweep launched last.
    """

    @abstractmethod
    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Return `work(session, *args, **options)`, called in a read-only transaction."""

    now = as_method(queries.now)
    default_sweep = as_method(queries.default_sweep)
    sweeps = as_method(queries.sweeps)
    sweep = as_method(queries.sweep)
    revision = as_method(queries.revision)
    members = as_method(queries.newest_members)
    cell_states = as_method(queries.cell_states)
    cell = as_method(queries.cell)
    configs = as_method(queries.configs)
    find_cell = as_method(queries.find_cell)
    values = as_method(attempt_queries.sweep_values)
    attempt = as_method(attempt_queries.attempt)
    attempts = as_method(attempt_queries.attempts)
    live_attempts = as_method(attempt_queries.live_attempts)
    attempts_of = as_method(attempt_queries.attempts_of)
    failures = as_method(attempt_queries.failures)
    curve = as_method(attempt_queries.curve)
    training_losses = as_method(attempt_queries.training_losses)
    samples = as_method(attempt_queries.samples)
    provenance = as_method(attempt_queries.provenance)
    provenances = as_method(attempt_queries.provenances)
    sources = as_method(attempt_queries.sources)
    training_timings = as_method(attempt_queries.training_timings)
    startup_seconds = as_method(attempt_queries.startup_seconds)
    change_token = as_method(attempt_queries.change_token)
    newest_event = as_method(attempt_queries.newest_event)
    events = as_method(attempt_queries.events)

    def states(self, cell_ids: Collection[str]) -> dict[str, CellState]:
        """Return the state of these cells by cell id, whichever sweeps list them.

        Cells that were never launched, and unknown ids, are absent.
        """
        return {state.cell_id: state for state in self.read(queries.states, cell_ids)}

    def measurements(self, cell_id: str) -> list[MeasuredValue]:
        """Return the newest measurement per (probe, metric, length) over the cell's finished attempts.

        Sorted by this key. A measurement with a reason instead of a value counts. Empty for an unknown cell.
        """
        return self.measurements_of([cell_id])[cell_id]

    def measurements_of(self, cell_ids: Collection[str]) -> dict[str, list[MeasuredValue]]:
        """Return by cell id what `measurements` returns, by one query per 500 cells."""
        ids = list(cell_ids)
        by_cell: dict[str, list[MeasuredValue]] = {id_: [] for id_ in ids}
        for start in range(0, len(ids), queries.MAX_BOUND_IDS):
            for value in self.read(attempt_queries.values, ids[start : start + queries.MAX_BOUND_IDS]):
                by_cell[value.cell_id].append(value)
        return by_cell


class Snapshot(StoreReader):
    """The database as it was at the start of one transaction.

    Made by Store.snapshot and usable until its context ends.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Return `work(session, *args, **options)`, called in the transaction of the snapshot."""
        return work(self.session, *args, **options)

    curve_arrays = as_method(attempt_queries.curve_arrays)
    item_means = as_method(attempt_queries.item_means)
    item_positions = as_method(attempt_queries.item_positions)
    item_details = as_method(attempt_queries.item_details)
