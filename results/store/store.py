"""The database of results: what may be written to it, by whom, and what can be asked of it.

Thread and process rules. A Store may be shared by threads and used after a fork; every method is one transaction.
A supervisor (the owner of a sweep) calls record_revision, acquire/renew/release_sweep, start_attempt, set_process and
interrupt_dead; the process of an attempt writes through recorder.Recorder and calls finish_attempt; anybody may read.
Finished attempts are read-only, but for `weights`, which forget_weights clears when the files are gone, and for what
mark_pruned says of an interrupted one.
Every method waits while the database is locked or its server away, up to `patience` seconds, then raises StoreBusy.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from ..arguments import COUNT, FLAG, NUMBER, PATH, TEXT, check_argument
from ..console.text import storable_text, without_passwords
from ..errors import CellAlreadyRunning, LeaseLost, StoreError, StoreMissing, SweepBusy
from ..failure_classes import PREEMPTED, PRUNED
from . import attempt_queries, queries, sweep_lease
from .database import check_revision, file_of, place, refuse_network, revision_of, shown, translate_driver_errors
from .database_connection import WAIT_TIMEOUT_S, DatabaseConnection
from .records import Attempt, AttemptState, CellRecord, Kind, NewRevision, Owner
from .schema import AttemptRow, EventRow, SweepRow, UtcNow
from .store_reader import Snapshot, StoreReader
from .upgrading import create_database, create_scratch

if TYPE_CHECKING:
    from .frames import Frames


IsAlive = Callable[[Owner], bool | None]


def open_store(
    url_or_path: str | Path | None = None,
    *,
    create: bool = False,
    patience: float = WAIT_TIMEOUT_S,
    read_only: bool = False,
) -> Store:
    """The database at the given place: a URL, a file, or None for ATMA_DB, else atma.db in the working folder.

    `create` makes a missing or empty one; many processes may do so at once. `patience`: seconds that a write waits for
    a locked database. `read_only`: no connection of this store can change anything. An existing database is never
    migrated here.

    Raises StoreMissing, StoreOutdated, StoreTooNew, StoreBusy, and StoreError for a file that is no database of ours,
    for SQLite on a network file system and for a URL that we do not understand; TypeError for an argument of another type.
    """
    if not isinstance(url_or_path, URL):
        check_argument("open_store", "url_or_path", url_or_path, PATH, optional=True)
    check_argument("open_store", "create", create, FLAG)
    check_argument("open_store", "patience", patience, NUMBER)
    check_argument("open_store", "read_only", read_only, FLAG)
    url = place(url_or_path)
    path = file_of(url)
    if path is not None:
        if path.is_dir():
            raise StoreError(f"{path} is a folder, not a database; name a file with --db")
        if not create and not path.exists():
            raise StoreMissing(f"there is no database {path}; launch a grid first, or name the database with --db")
        refuse_network(path)
    if create and (path is None or not path.exists() or path.stat().st_size == 0):
        create_database(url)
    store = Store(url_or_path if path is None else path, patience=patience, read_only=read_only)
    try:
        with translate_driver_errors(url), store.transaction(write=False) as session:
            found = revision_of(session.connection())
        if found is None and create:
            store.close()  # of a file that another process could not make, and has removed
            create_database(url)
        else:
            check_revision(found, shown(url))
    except BaseException:
        store.close()
        raise
    return store


def scratch_store(name: str, fill: Callable[[Store], object]) -> Store:
    """Make a temporary database and fill it; its file is removed when the store is no longer used."""
    folder = tempfile.mkdtemp(prefix=f"atma-{name}-")
    try:
        file = Path(folder) / f"{name}.db"
        create_scratch(file)
        store = open_store(file)
        weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
        fill(store)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return store


def default_runs(url_or_path: str | Path | None = None) -> Path:
    """The runs folder of a database that need not exist yet."""
    return Store(url_or_path).runs


class Store(DatabaseConnection, StoreReader):
    """An open database. Made by open_store; pickles as its address."""

    # --- sweeps: supervisors only -----------------------------------------------------------------------------------

    def record_revision(
        self,
        name: str,
        *,
        grid_text: str,
        grid_file: str,
        options: Mapping[str, Any] | None = None,
        commit: str | None = None,
        dirty: bool | None = None,
        cells: Sequence[CellRecord],
    ) -> int:
        """Records a launch and returns the number of the revision that holds (from 1).

        Adds the sweep and the cells that are missing, and a revision when the grid's text, the options, the cells,
        their order or their axes differ from the newest one. Always makes the sweep the one launched last. Who launches
        gives it to acquire_sweep instead. Raises SweepReadOnly.
        """
        given = NewRevision(
            grid_text=grid_text, grid_file=grid_file, options=options or {}, commit=commit, dirty=dirty, cells=cells
        )
        return self.write(
            lambda session: sweep_lease.write_revision(session, sweep_lease.lock_or_create(session, name), given)
        )

    def set_read_only(self, name: str, read_only: bool = True) -> None:
        """Closes a sweep to launches (an import does so), or opens it again. Raises SweepUnknown."""

        def work(session: Session) -> None:
            queries.sweep_row(session, name).read_only = read_only

        self.write(work)

    def acquire_sweep(
        self,
        name: str,
        owner: Owner,
        lease_seconds: float,
        *,
        is_alive: IsAlive = lambda owner: None,
        revision: NewRevision | None = None,
        forget: bool = False,
    ) -> int:
        """Makes `owner` the sweep's supervisor until the lease ends; returns its fencing number, one more each time.

        `is_alive` says of another holder: True (it keeps the sweep, even with an expired lease), False (it is taken
        over at once) or None (unknown, as on another host: the lease decides, on the database's clock). With `revision`
        the sweep may be new, and what is launched is recorded in the same transaction, so that a launch that is refused
        leaves nothing behind. `forget`: what was asked of an earlier launch is not asked of this one.
        Raises SweepBusy, SweepUnknown, SweepReadOnly.
        """
        while True:
            seen = self.read(sweep_lease.seen, name, new=revision is not None)
            if seen.holder is not None and not seen.holder.same_process(owner):
                alive = is_alive(seen.holder)
                if alive or (alive is None and not seen.expired):
                    raise SweepBusy(sweep_lease.busy(name, seen, known=alive is not None))
            take = partial(sweep_lease.claim_sweep, name=name, owner=owner, lease_seconds=lease_seconds, seen=seen)
            fence = self.write(partial(take, revision=revision, forget=forget))
            if fence is not None:
                return fence

    def extend_revision(self, name: str, fence: int, cells: Sequence[CellRecord], *, price: object = None) -> None:
        """Adds cells to the newest revision of a sweep that the caller holds, after those that it lists, in one transaction that is
        durable at its end; `price` takes the place of what the revision keeps as its forecast. Raises LostLease.
        """
        self.write(lambda session: sweep_lease.extend_newest(session, name, fence, cells, price), durable=True)

    def renew_sweep(self, name: str, fence: int, lease_seconds: float) -> None:
        """Extends the lease from now. Raises LostLease when somebody else has taken the sweep since."""

        def work(session: Session) -> None:
            until = queries.now(session) + timedelta(seconds=lease_seconds)
            query = update(SweepRow).where(SweepRow.name == name, SweepRow.fence == fence, SweepRow.owner.is_not(None))
            if not _changed(session, query.values(lease_until=until)):
                raise LeaseLost(f"sweep {name!r} was taken over by another supervisor; this one has to stop")

        self.write(work)

    def release_sweep(self, name: str, fence: int) -> bool:
        """Gives the sweep up. False when it was no longer ours; then nothing changes."""
        query = update(SweepRow).where(SweepRow.name == name, SweepRow.fence == fence, SweepRow.owner.is_not(None))
        columns = ("owner", "owner_host", "owner_pid", "owner_started", "owner_space", "owner_since", "lease_until")
        free = dict.fromkeys(columns)
        return self.write(lambda session: _changed(session, query.values(free)))

    def ask(self, name: str, **wishes: Any) -> dict[str, Any]:
        """Adds to what people ask of whoever runs the sweep; None withdraws a wish. Returns all that is asked now.

        Wishes: `pause`, `finish`, `cancel` (true), `retry` (cell ids, beside those that are asked for already).
        Raises SweepUnknown.
        """
        return self.write(lambda session: sweep_lease.request_actions(session, name, wishes))

    def answered(self, name: str, *, retry: Collection[str]) -> None:
        """Takes these cells from those that are to be tried again; others that were asked for meanwhile stay."""
        self.write(lambda session: sweep_lease.clear_retries(session, name, retry))

    def asked(self, name: str) -> dict[str, Any]:
        """What people ask of whoever runs the sweep. Raises SweepUnknown."""
        return self.read(lambda session: dict(queries.sweep_row(session, name).request or {}))

    # --- attempts: supervisors, and the process that runs one -------------------------------------------------------

    def start_attempt(
        self,
        cell_id: str,
        *,
        kind: Kind = "train",
        parent_id: int | None = None,
        owner: Owner,
        fence: int,
        sweep: str | None = None,
        steps_total: int | None = None,
        deviation: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """A new running attempt of the cell, numbered after its last, with its folder `<cell>/<number>`.

        The database itself lets only one attempt of a cell run. With `sweep`, the caller must still hold that sweep
        under `fence`. Its process is `owner` until set_process names another.
        Raises CellTaken, CellUnknown, AttemptUnknown (the parent), LostLease (the sweep was taken over).
        """

        def work(session: Session) -> Attempt:
            if sweep is not None and queries.sweep_row(session, sweep).fence != fence:
                raise LeaseLost(f"sweep {sweep!r} was taken over by another supervisor; this one has to stop")
            if parent_id is not None:
                attempt_queries.attempt(session, parent_id)
            earlier = attempt_queries.attempts(session, queries.cell(session, cell_id).id)
            number = max((attempt.number for attempt in earlier), default=0) + 1
            moment = queries.now(session)
            row = AttemptRow(
                cell_id=cell_id,
                number=number,
                kind=kind,
                parent_id=parent_id,
                state="running",
                fence=fence,
                owner=owner.name,
                host=owner.host,
                pid=owner.pid,
                pid_started=owner.started,
                pid_space=owner.space,
                started_at=moment,
                heartbeat_at=moment,
                step=0,
                steps_total=steps_total,
                phase="starting",
                run_dir=f"{cell_id}/{number}",
                deviation=dict(deviation) if deviation else None,
            )
            session.add(row)
            session.flush()
            record_event(
                session, "started", f"attempt {number} ({kind}) on {owner.host}", cell_id=cell_id, attempt_id=row.id
            )
            return attempt_queries.attempt(session, row.id)

        try:
            return self.write(work, durable=True)
        except IntegrityError as error:
            live = [attempt for attempt in self.attempts(cell_id) if attempt.state == "running"]
            who = f" (attempt {live[0].number}, pid {live[0].pid} on {live[0].host})" if live else ""
            raise CellAlreadyRunning(
                f"cell {cell_id} has a live attempt already{who}; wait for it or stop it"
            ) from error

    def set_process(
        self,
        attempt_id: int,
        fence: int,
        pid: int,
        started: float,
        *,
        host: str | None = None,
        space: str | None = None,
    ) -> None:
        """Names the process that runs the attempt: as an Owner has it. Raises LostLease."""
        values: dict[str, Any] = {"pid": pid, "pid_started": started, "pid_space": space}
        values |= {"host": host} if host else {}
        self.write(lambda session: renew_heartbeat(session, attempt_id, fence, **values))

    def finish_attempt(
        self,
        attempt_id: int,
        fence: int,
        state: AttemptState,
        *,
        cause: str | None = None,
        traceback: str | None = None,
        exit_code: int | None = None,
        checkpoint: str | None = None,
        weights: str | None = None,
        failure: str | None = None,
    ) -> None:
        """Ends a running attempt, durably; from then on it is read-only. None leaves a column as it is.

        Raises LostLease when the attempt is not running under that fence any more; then nothing was written.
        """
        require_end_state(state)
        cause = without_passwords(cause) if cause is not None else None
        given: dict[str, Any] = {"cause": cause, "traceback": without_passwords(traceback or "") or None}
        given = {name: storable_text(said) for name, said in given.items() if said is not None} | {
            "exit_code": exit_code
        }
        given |= {"checkpoint": checkpoint, "weights": weights, "failure": failure}
        values = {name: value for name, value in given.items() if value is not None}

        def work(session: Session) -> None:
            renew_heartbeat(session, attempt_id, fence, state=state, finished_at=UtcNow(), **values)
            cell = session.scalar(select(AttemptRow.cell_id).where(AttemptRow.id == attempt_id))
            record_event(session, state, cause or state, cell_id=cell, attempt_id=attempt_id)

        self.write(work, durable=True)

    def interrupt_dead(self, attempt_id: int, cause: str) -> bool:
        """Marks a running attempt interrupted, after the caller has made sure that its process is gone.

        False when it was not running any more. A process that lives after all is refused from then on (LostLease).
        """

        def work(session: Session) -> bool:
            dead = update(AttemptRow).where(AttemptRow.id == attempt_id, AttemptRow.state == "running")
            ended = {
                "state": "interrupted",
                "finished_at": UtcNow(),
                "cause": storable_text(cause),
                "failure": PREEMPTED,
            }
            if not _changed(session, dead.values(**ended)):
                return False
            cell = session.scalar(select(AttemptRow.cell_id).where(AttemptRow.id == attempt_id))
            record_event(session, "interrupted", cause, cell_id=cell, attempt_id=attempt_id)
            return True

        return self.write(work)

    def mark_pruned(self, attempt_id: int, why: str) -> None:
        """Notes of an interrupted attempt that it was ended early and its cell given up, durably; any other is left alone."""

        def work(session: Session) -> None:
            ended = update(AttemptRow).where(AttemptRow.id == attempt_id, AttemptRow.state == "interrupted")
            if _changed(session, ended.values(failure=PRUNED, cause=storable_text(why))):
                cell = session.scalar(select(AttemptRow.cell_id).where(AttemptRow.id == attempt_id))
                record_event(session, PRUNED, why, cell_id=cell, attempt_id=attempt_id)

        self.write(work, durable=True)

    def forget_weights(self, attempt_id: int) -> None:
        """Notes that the kept weights of an attempt are gone, or are to go: it is on the disk when this returns."""
        gone = update(AttemptRow).where(AttemptRow.id == attempt_id).values(weights=None)
        self.write(lambda session: _changed(session, gone), durable=True)

    def add_event(
        self,
        kind: str,
        message: str,
        *,
        sweep: str | None = None,
        cell_id: str | None = None,
        attempt_id: int | None = None,
    ) -> None:
        """Notes something for people. Raises SweepUnknown."""

        def work(session: Session) -> None:
            sweep_id = queries.sweep_row(session, sweep).id if sweep is not None else None
            record_event(session, kind, message, sweep_id=sweep_id, cell_id=cell_id, attempt_id=attempt_id)

        self.write(work)

    # --- reading at one moment; the single questions are those of Reads ---------------------------------------------

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Every question asked of it is answered from the same state of the database, whoever writes meanwhile."""
        with self.transaction(write=False) as session:
            queries.snapshot(session)
            yield Snapshot(session)

    def frames(self, sweep: str | None = None, *, revision: int | None = None) -> Frames:
        """The sweep (None: the one launched last) as pandas frames: see frames.Frames.

        Raises SweepUnknown, StoreError, and TypeError for an argument of another type.
        """
        check_argument("frames", "sweep", sweep, TEXT, optional=True)
        check_argument("frames", "revision", revision, COUNT, optional=True)
        from .frames import Frames  # pandas takes as long to import as everything else together

        found = self.revision(sweep, revision)
        return Frames(self.snapshot, found.sweep, found.number)


def require_end_state(state: AttemptState) -> None:
    """Raises ValueError for the one state that is no end of an attempt."""
    if state == "running":
        raise ValueError("an attempt cannot finish as 'running'")


def renew_heartbeat(session: Session, attempt_id: int, fence: int, **values: Any) -> None:
    """A heartbeat, with new column values. Raises LostLease unless the attempt is running under that fence."""
    query = update(AttemptRow).where(
        AttemptRow.id == attempt_id, AttemptRow.fence == fence, AttemptRow.state == "running"
    )
    if not _changed(session, query.values(heartbeat_at=UtcNow(), **values)):
        raise LeaseLost(f"attempt {attempt_id} is no longer ours (finished, reaped or taken over); nothing was written")


def _changed(session: Session, query: Any) -> bool:
    return bool(session.execute(query.execution_options(synchronize_session=False)).rowcount)  # type: ignore[attr-defined]


def record_event(session: Session, kind: str, message: str, **about: Any) -> None:
    """Notes an event, now."""
    session.execute(insert(EventRow).values(at=UtcNow(), kind=kind, message=storable_text(message), **about))
