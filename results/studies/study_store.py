"""Studies as the database holds them: what was searched, every trial, and what the sampler remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from ..console.text import storable_text
from ..errors import LeaseLost
from ..forecast import OPTION, Forecast, as_option, extended, forecast_of
from ..store import queries, sweep_lease
from ..store.database import jsonable, upsert
from ..store.records import CellRecord, TrialStanding
from ..store.schema import StudyRow, TrialRow, UtcNow
from ..store.store import Store
from ..store.store_reader import StoreReader
from .optuna_study import Trial
from .search import Search, search_from

ONLY_PART = ""
"""The part of a sweep that has one study."""


def search_of(store: StoreReader, sweep: str | None = None) -> Search | None:
    """What the sweep's newest revision searches (None: the sweep launched last); None for a sweep that is no study.

    Raises SweepUnknown.
    """
    return search_from(store.revision(sweep).options)


def trials_of(store: StoreReader, sweep: str | None = None, part: str = ONLY_PART) -> list[Trial]:
    """Every trial of the sweep's study by number. Raises SweepUnknown."""
    return store.read(_trials, sweep, part)


def sampler_state(store: StoreReader, sweep: str | None = None, part: str = ONLY_PART) -> dict[str, Any]:
    """What the sampler remembers of the study as a whole. Raises SweepUnknown."""
    return store.read(_memory, sweep, part)


def _trials(session: Session, sweep: str | None, part: str) -> list[Trial]:
    owner = queries.sweep_row(session, sweep)
    query = select(TrialRow).where(TrialRow.sweep_id == owner.id, TrialRow.part == part).order_by(TrialRow.number)
    return [
        Trial(
            number=row.number,
            params=row.params,
            standing=cast(TrialStanding, row.standing),
            values=None if row.objectives is None else tuple(row.objectives),
            curve=tuple((int(rung), value) for rung, value in row.curve or ()),
            attrs=row.attrs,
            cell=row.cell_id,
            reason=row.reason,
        )
        for row in session.scalars(query)
    ]


def _memory(session: Session, sweep: str | None, part: str) -> dict[str, Any]:
    owner = queries.sweep_row(session, sweep)
    query = select(StudyRow.memory).where(StudyRow.sweep_id == owner.id, StudyRow.part == part)
    return dict(session.scalar(query) or {})


# --- writing: the supervisor of the sweep alone -----------------------------------------------------------------------


@dataclass(frozen=True)
class StudyWriter:
    """Writes for the study of a sweep that the caller holds under `fence`; each call is one transaction, durable at its end.

    Every method raises LostLease when somebody else has taken the sweep since; then nothing was written.
    """

    store: Store
    sweep: str
    fence: int
    part: str = ONLY_PART

    def propose(
        self,
        trial: Trial,
        cell: CellRecord | None,
        changed: Sequence[Trial] = (),
        memory: Mapping[str, Any] | None = None,
        price: Forecast | None = None,
    ) -> None:
        """A new trial with its cell, which the sweep's newest revision lists from then on, what a sampler now remembers
        of earlier trials and of the whole, and what the cell is expected to take. Raises IntegrityError for a number that is taken."""

        def work(session: Session, sweep_id: int) -> None:
            kept = {"sweep_id": sweep_id, "part": self.part, "memory": jsonable(dict(memory or {}))}
            session.execute(upsert(session, StudyRow, key=("sweep_id", "part"), replace=memory is not None), kept)
            if cell is not None:
                _list(session, sweep_id, cell, price)
            ended = {} if trial.standing == "asked" else {"ended_at": UtcNow()}
            key = {"sweep_id": sweep_id, "part": self.part, "number": trial.number, "asked_at": UtcNow()}
            session.execute(insert(TrialRow).values(**key, **ended, **_values(trial)))
            for one in changed:
                self._write(session, sweep_id, one)

        self._held(work)

    def enlist(self, cells: Sequence[CellRecord]) -> None:
        """Cells of earlier trials that the newest revision does not list."""

        def work(session: Session, sweep_id: int) -> None:
            sweep_lease.append_cells(session, sweep_id, cells)

        if cells:
            self._held(work)

    def tell(self, *trials: Trial) -> None:
        """Trials as they now are."""

        def work(session: Session, sweep_id: int) -> None:
            for one in trials:
                ended = None if one.standing == "asked" else func.coalesce(TrialRow.ended_at, UtcNow())
                self._write(session, sweep_id, one, ended_at=ended)

        self._held(work)

    def _write(self, session: Session, sweep_id: int, trial: Trial, **more: Any) -> None:
        row = update(TrialRow).where(
            TrialRow.sweep_id == sweep_id, TrialRow.part == self.part, TrialRow.number == trial.number
        )
        session.execute(row.values(**_values(trial), **more).execution_options(synchronize_session=False))

    def _held(self, work: Callable[[Session, int], None]) -> None:
        def whole(session: Session) -> None:
            row = sweep_lease.lock_sweep_row(session, self.sweep)
            if row.fence != self.fence:
                raise LeaseLost(f"sweep {self.sweep!r} was taken over by another supervisor; this one has to stop")
            work(session, row.id)

        self.store.write(whole, durable=True)


def _list(session: Session, sweep_id: int, cell: CellRecord, price: Forecast | None) -> None:
    newest = queries.revision_row(session, sweep_id)
    before, listed = forecast_of(newest.options), queries.members(session, newest.id)
    sweep_lease.append_cells(session, sweep_id, [cell])
    if before is not None and price is not None and cell.id not in {one for one, _ in listed}:
        newest.options = dict(newest.options) | {OPTION: jsonable(as_option(extended(before, len(listed), price)))}


def _values(trial: Trial) -> dict[str, Any]:
    return {
        "cell_id": trial.cell,
        "params": jsonable(dict(trial.params)),
        "standing": trial.standing,
        "reason": None if trial.reason is None else storable_text(trial.reason),
        "objectives": None if trial.values is None else list(trial.values),
        "curve": [list(point) for point in trial.curve] or None,
        "attrs": jsonable(dict(trial.attrs)),
    }
