"""Studies in the database: reading of searches and trials, and writing by the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from ..console.text import storable_text
from ..errors import LeaseLost
from ..forecast import OPTION_KEY, Forecast, extend_forecast, forecast_as_json, forecast_from_options
from ..store import queries, sweep_lease
from ..store.database import jsonable, upsert
from ..store.records import CellRecord, TrialStanding
from ..store.schema import StudyRow, TrialRow, UtcNow
from ..store.store import Store
from ..store.store_reader import StoreReader
from .optuna_study import Trial
from .search import Search, search_from_options

ONLY_PART = ""
"""Name of the study of a sweep that has only one."""


def search_of(store: StoreReader, sweep: str | None = None) -> Search | None:
    """Return the search of the sweep's newest revision (None: the sweep launched last).

    None for a sweep that is not a study, or whose stored search is invalid.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    return search_from_options(store.revision(sweep).options)


def trials_of(store: StoreReader, sweep: str | None = None, part: str = ONLY_PART) -> list[Trial]:
    """Return all trials of the sweep's study, by number; empty without a study.

    Args:
        store: database or snapshot.
        sweep: sweep; None for the one launched last.
        part: name of the study within the sweep; ONLY_PART for a sweep with one.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    return store.read(_read_trials, sweep, part)


def sampler_state(store: StoreReader, sweep: str | None = None, part: str = ONLY_PART) -> dict[str, Any]:
    """Return the Optuna state of the study, empty without one; the arguments are those of `trials_of`.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    return store.read(_read_memory, sweep, part)


def _read_trials(session: Session, sweep: str | None, part: str) -> list[Trial]:
    """Return all trials of a study, by number; `sweep` None means the one launched last. Raises SweepUnknown."""
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


def _read_memory(session: Session, sweep: str | None, part: str) -> dict[str, Any]:
    owner = queries.sweep_row(session, sweep)
    query = select(StudyRow.memory).where(StudyRow.sweep_id == owner.id, StudyRow.part == part)
    return dict(session.scalar(query) or {})


# --- writing: the supervisor of the sweep alone -----------------------------------------------------------------------


@dataclass(frozen=True)
class StudyWriter:
    """Writes for the study of a sweep that the caller holds under `fence`. Each call is one durable transaction.

    Every method raises LeaseLost, with nothing written, if another supervisor has taken the sweep.
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
        forecast: Forecast | None = None,
    ) -> None:
        """Insert a new trial with its cell, and update what changed with it.

        Creates the study if it is missing. A trial that is not `asked` gets its end time at once.

        Args:
            trial: new trial.
            cell: its cell, appended to the sweep's newest revision unless listed there; None for a trial without a
                cell.
            changed: earlier trials with a new Optuna state.
            memory: new Optuna state of the study; None keeps the stored one.
            forecast: predicted cost of the cell, appended to the revision's forecast if that has one and the cell is
                new; None for none.

        Raises:
            IntegrityError: the number of the trial is in use.
            LeaseLost: another supervisor has taken the sweep.
        """

        def work(session: Session, sweep_id: int) -> None:
            """Store the study, the cell, the trial and the changed trials, in this order."""
            values = {"sweep_id": sweep_id, "part": self.part, "memory": jsonable(dict(memory or {}))}
            session.execute(upsert(session, StudyRow, key=("sweep_id", "part"), replace=memory is not None), values)
            if cell is not None:
                _append_cell(session, sweep_id, cell, forecast)
            ended = {} if trial.standing == "asked" else {"ended_at": UtcNow()}
            key = {"sweep_id": sweep_id, "part": self.part, "number": trial.number, "asked_at": UtcNow()}
            session.execute(insert(TrialRow).values(**key, **ended, **_values(trial)))
            for earlier in changed:
                self._update_trial(session, sweep_id, earlier)

        self._write_if_held(work)

    def append_cells(self, cells: Sequence[CellRecord]) -> None:
        """Append cells of earlier trials that the newest revision does not list; do nothing for an empty sequence."""

        def work(session: Session, sweep_id: int) -> None:
            sweep_lease.append_cells(session, sweep_id, cells)

        if cells:
            self._write_if_held(work)

    def update_trials(self, *trials: Trial) -> None:
        """Store all changeable columns of trials; the first update to an end state sets the time of the end.

        A trial that is `asked` again loses its end time. A trial whose number does not exist is ignored.
        """

        def work(session: Session, sweep_id: int) -> None:
            for trial in trials:
                ended = None if trial.standing == "asked" else func.coalesce(TrialRow.ended_at, UtcNow())
                self._update_trial(session, sweep_id, trial, ended_at=ended)

        self._write_if_held(work)

    def _update_trial(self, session: Session, sweep_id: int, trial: Trial, **more: Any) -> None:
        """Store the changeable columns of one trial, with further columns `more`, in the caller's transaction.

        Does nothing for a number that does not exist.
        """
        row = update(TrialRow).where(
            TrialRow.sweep_id == sweep_id, TrialRow.part == self.part, TrialRow.number == trial.number
        )
        session.execute(row.values(**_values(trial), **more).execution_options(synchronize_session=False))

    def _write_if_held(self, work: Callable[[Session, int], None]) -> None:
        """Run `work(session, sweep_id)` in a durable transaction with the sweep's row locked; it may be retried.

        Raises:
            LeaseLost: the sweep's fencing token is another one.
            SweepUnknown: the sweep was deleted.
        """

        def guarded(session: Session) -> None:
            row = sweep_lease.lock_sweep_row(session, self.sweep)
            if row.fence != self.fence:
                raise LeaseLost(f"sweep {self.sweep!r} was taken over by another supervisor; this one has to stop")
            work(session, row.id)

        self.store.write(guarded, durable=True)


def _append_cell(session: Session, sweep_id: int, cell: CellRecord, forecast: Forecast | None) -> None:
    """Append a cell to the newest revision; extend the forecast if the revision has one and the cell is new.

    Does not change a forecast if `forecast` is None. `forecast` must hold one cell.
    """
    newest = queries.revision_row(session, sweep_id)
    before, listed = forecast_from_options(newest.options), queries.members(session, newest.id)
    sweep_lease.append_cells(session, sweep_id, [cell])
    if before is not None and forecast is not None and cell.id not in {cell_id for cell_id, _ in listed}:
        newest.options = dict(newest.options) | {
            OPTION_KEY: jsonable(forecast_as_json(extend_forecast(before, len(listed), forecast)))
        }


def _values(trial: Trial) -> dict[str, Any]:
    """Return the columns of a trial that may change: cell_id, params, standing, reason, objectives, curve and attrs.

    Numbers that are not finite become text, as JSON requires. An empty curve becomes None.
    """
    return {
        "cell_id": trial.cell,
        "params": jsonable(dict(trial.params)),
        "standing": trial.standing,
        "reason": None if trial.reason is None else storable_text(trial.reason),
        "objectives": None if trial.values is None else list(trial.values),
        "curve": [list(point) for point in trial.curve] or None,
        "attrs": jsonable(dict(trial.attrs)),
    }
