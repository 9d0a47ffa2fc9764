"""What can be asked of a database: of a Store, each question in a transaction of its own, or of one Snapshot of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.orm import Session

from . import attempt_queries, queries
from .attempt_queries import samples
from .records import (
    Attempt,
    CellRecord,
    CellState,
    CurvePoint,
    Event,
    Key,
    Provenance,
    RevisionRecord,
    Sample,
    Source,
    SweepSummary,
    Timed,
    Value,
)

if TYPE_CHECKING:
    import numpy as np

Result = TypeVar("Result")


class Reads(ABC):
    """The questions. Their answers are records (see records.py), never rows; nothing here writes."""

    @abstractmethod
    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """`work` with a session and then the arguments, in a transaction that only reads."""

    def now(self) -> datetime:
        """The database's clock, UTC."""
        return self.read(queries.now)

    def default_sweep(self) -> str:
        """The sweep launched last. Raises SweepUnknown when there is none."""
        return self.read(queries.default_sweep)

    def sweeps(self) -> list[SweepSummary]:
        """Every sweep, the one launched last first."""
        return self.read(queries.sweeps)

    def sweep(self, name: str | None = None) -> SweepSummary:
        """One sweep (None: the one launched last) with its newest revision's cells counted. Raises SweepUnknown."""
        return self.read(queries.sweep, name)

    def revision(self, sweep: str | None = None, number: int | None = None) -> RevisionRecord:
        """What was launched: the newest revision of the sweep, or the numbered one. Raises SweepUnknown, StoreError."""
        return self.read(queries.revision, sweep, number)

    def members(self, sweep: str | None = None) -> list[tuple[str, dict[str, str]]]:
        """The cells of the sweep's newest revision in the grid's order: (cell id, axes). Raises SweepUnknown."""
        return self.read(queries.newest_members, sweep)

    def timed(self) -> list[Timed]:
        """What the newest finished trainings of each kind took, whichever sweeps list them."""
        return self.read(attempt_queries.timed)

    def starts(self, attempt_ids: Collection[int]) -> dict[int, float]:
        """By attempt: seconds from the start of its process to the built network, for those that told."""
        return self.read(attempt_queries.starts, attempt_ids)

    def cell_states(
        self, sweep: str | None = None, *, revision: int | None = None, orphans: bool = False
    ) -> list[CellState]:
        """The sweep's cells in the grid's order and how far they are; `orphans`: those that the newest one dropped.

        Three queries for any number of cells. Raises SweepUnknown, StoreError (no such revision).
        """
        return self.read(queries.cell_states, sweep, revision, orphans=orphans)

    def states(self, cell_ids: Collection[str]) -> dict[str, CellState]:
        """How far these cells are, by id, whichever sweeps list them; cells that were never launched are absent."""
        return {state.cell_id: state for state in self.read(queries.states, cell_ids)}

    def values(self, sweep: str | None = None, *, revision: int | None = None, orphans: bool = False) -> list[Value]:
        """The newest value per (cell, probe, metric, length) over done attempts, for the cells of cell_states."""
        return self.read(attempt_queries.sweep_values, sweep, revision, orphans=orphans)

    def measurements(self, cell_id: str) -> list[Value]:
        """The newest value per (probe, metric, length) over the cell's done attempts."""
        return self.read(attempt_queries.values, [cell_id])

    def cell(self, cell_id: str) -> CellRecord:
        """The cell of that id with its config. Raises CellUnknown."""
        return self.read(queries.cell, cell_id)

    def configs(self, cell_ids: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """By cell: its complete frozen config."""
        return self.read(queries.configs, cell_ids)

    def find_cell(self, asked: str, sweep: str | None = None) -> CellRecord:
        """The cell of an id, a slug with or without its seed, or the beginning of either.

        Raises CellUnknown with near ones, CellAmbiguous, SweepUnknown.
        """
        return self.read(queries.find_cell, asked, sweep)

    def attempt(self, attempt_id: int) -> Attempt:
        """One attempt. Raises AttemptUnknown."""
        return self.read(attempt_queries.attempt, attempt_id)

    def attempts(self, cell_id: str) -> list[Attempt]:
        """Every attempt of a cell, oldest first."""
        return self.read(attempt_queries.attempts, cell_id)

    def live_attempts(self, sweep: str | None = None) -> list[Attempt]:
        """The running attempts of a sweep's newest revision, or (None) of the whole database. Raises SweepUnknown."""
        return self.read(attempt_queries.live_attempts, sweep)

    def attempts_of(self, cell_ids: Collection[str]) -> list[Attempt]:
        """Every attempt of these cells, oldest first."""
        return self.read(attempt_queries.attempts_of, cell_ids)

    def failures(self, attempt_ids: Collection[int]) -> dict[int, str]:
        """By attempt: the class of its failure (cuda_oom, code, hang, ...), where one was recorded."""
        return self.read(attempt_queries.failures, attempt_ids)

    def curve(self, attempt_id: int) -> list[CurvePoint]:
        """The training curve of an attempt by step."""
        return self.read(attempt_queries.curve, attempt_id)

    def samples(self, attempt_ids: Collection[int]) -> dict[int, list[Sample]]:
        """By attempt: what the network wrote while it was trained, for those that were asked to."""
        return self.read(samples, attempt_ids)

    def provenance(self, attempt_id: int) -> Provenance | None:
        """Where an attempt's numbers come from, None when it has not said so yet."""
        return self.read(attempt_queries.provenance, attempt_id)

    def provenances(self, attempt_ids: Collection[int]) -> dict[int, Provenance]:
        """By attempt: where its numbers come from, for those that have said so."""
        return self.read(attempt_queries.provenances, attempt_ids)

    def sources(self, attempt_ids: Collection[int]) -> dict[int, Source]:
        """The same without all that takes room: the code and the chip."""
        return self.read(attempt_queries.sources, attempt_ids)

    def mark(self, sweep: str) -> str:
        """Another text after whatever happened that a report of the sweep may show. Raises SweepUnknown."""
        return self.read(attempt_queries.mark, sweep)

    def newest_event(self, sweep: str, kinds: Collection[str]) -> Event | None:
        """What happened last, of these kinds, to the sweep itself. Raises SweepUnknown."""
        return self.read(attempt_queries.newest_event, sweep, kinds)

    def events(
        self, *, sweep: str | None = None, cell_id: str | None = None, limit: int | None = None
    ) -> Sequence[Event]:
        """What happened, oldest first; with a limit the newest ones. Raises SweepUnknown."""
        return self.read(attempt_queries.events, sweep=sweep, cell_id=cell_id, limit=limit)


class Snapshot(Reads):
    """The database as it was when its transaction began; made by Store.snapshot and usable until it ends."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """`work` on the snapshot's session."""
        return work(self.session, *args, **options)

    def curve_arrays(
        self, attempt_ids: Iterable[int], columns: Sequence[str], *, having: Sequence[str] = ()
    ) -> Iterator[tuple[int, np.ndarray]]:
        """See attempt_queries.curve_arrays."""
        return attempt_queries.curve_arrays(self.session, attempt_ids, columns, having=having)

    def item_means(self, attempt_ids: Collection[int], measure: Key) -> np.ndarray:
        """See attempt_queries.item_means."""
        return attempt_queries.item_means(self.session, attempt_ids, measure)

    def item_places(self, attempt_ids: Collection[int], measure: Key) -> np.ndarray:
        """See attempt_queries.item_places."""
        return attempt_queries.item_places(self.session, attempt_ids, measure)

    def item_details(self, attempt_ids: Collection[int], measure: Key) -> list[tuple[Any, ...]]:
        """See attempt_queries.item_details."""
        return attempt_queries.item_details(self.session, attempt_ids, measure)
