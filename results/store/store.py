"""The results database: the class Store, which writes and reads, and functions that open or create one.

Thread and process rules: A Store may be shared by threads and used after a fork; every method is one transaction. A
supervisor (the owner of a sweep) calls record_revision, acquire/renew/release_sweep, start_attempt, set_process and
interrupt_dead. The process of an attempt writes through recorder.DatabaseRecorder and calls finish_attempt; every
process may read.

Finished attempts are read-only with two exceptions: the method that clears `weights` when the files are deleted, and
mark_pruned, which changes the failure class of an interrupted attempt.

Every method waits while the database is locked or its server is unreachable, up to `patience` seconds, then raises
StoreBusy.
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
from .database import (
    check_revision,
    redacted_url,
    refuse_network,
    resolve_url,
    revision_of,
    sqlite_file,
    translate_driver_errors,
)
from .database_connection import WAIT_TIMEOUT_S, DatabaseConnection
from .records import Attempt, AttemptKind, AttemptState, CellRecord, NewRevision, Owner
from .schema import AttemptRow, EventRow, SweepRow, UtcNow
from .store_reader import Snapshot, StoreReader
from .upgrading import create_database, create_temporary_database

if TYPE_CHECKING:
    from .frames import Frames


IsAlive = Callable[[Owner], bool | None]
"""Function that returns True for a live process, False for a dead one, None for one that cannot be inspected."""


def open_store(
    url_or_path: str | Path | None = None,
    *,
    create: bool = False,
    patience: float = WAIT_TIMEOUT_S,
    read_only: bool = False,
) -> Store:
    """Open the database at a URL or file; None opens the one in ATMA_DB, else atma.db in the working folder.

    Args:
        url_or_path: database URL, file, or None for the default.
        create: create a missing or empty database; several processes may do so at once.
        patience: seconds that a read or write waits for a locked or unreachable database.
        read_only: no connection of this store can change anything.

    Returns:
        A Store at the current schema revision. An existing database of an older release is never migrated here.

    Raises:
        StoreMissing: there is no database, or it is empty.
        StoreOutdated: it belongs to an older release.
        StoreTooNew: it belongs to a newer release.
        StoreBusy: it stays locked or unreachable.
        StoreError: the file is not a database of this program, SQLite would work on a network file system, or the URL
            is not supported.
        TypeError: an argument has the wrong type.
    """
    if not isinstance(url_or_path, URL):
        check_argument("open_store", "url_or_path", url_or_path, PATH, optional=True)
    check_argument("open_store", "create", create, FLAG)
    check_argument("open_store", "patience", patience, NUMBER)
    check_argument("open_store", "read_only", read_only, FLAG)
    url = resolve_url(url_or_path)
    path = sqlite_file(url)
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
            revision = revision_of(session.connection())
        if revision is None and create:
            store.close()  # of a file that another process could not make, and has removed
            create_database(url)
        else:
            check_revision(revision, redacted_url(url))
    except BaseException:
        store.close()
        raise
    return store


def temporary_store(name: str, fill: Callable[[Store], object]) -> Store:
    """Create a temporary database, call `fill(store)` on it, and return the open store.

    The database is a SQLite file in a new folder of the system's temporary folder. The folder is deleted when the store
    is no longer referenced, or at once if `fill` raises; the error goes on to the caller. `name` becomes part of the
    folder's and the file's name. The result of `fill` is ignored.
    """
    folder = tempfile.mkdtemp(prefix=f"atma-{name}-")
    try:
        file = Path(folder) / f"{name}.db"
        create_temporary_database(file)
        store = open_store(file)
        weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
        fill(store)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return store


def default_runs(url_or_path: str | Path | None = None) -> Path:
    """Return the default runs folder (the folder of checkpoints and weights) of a database that need not exist yet."""
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
        """Record a launch and return the number (from 1) of the revision that describes it.

        Adds the sweep and the cells that are missing. Adds a revision only if the grid's text, the options (without the
        forecast), the cells, their order or their axes differ from the newest one. Always makes the sweep the one
        launched last, even if a process holds it. A launch that also runs the sweep passes its revision to
        acquire_sweep instead.

        Args:
            name: sweep.
            grid_text: text of the grid.
            grid_file: path of the grid, for the record.
            options: options of the launch, as JSON values; None for none.
            commit: git commit of the code.
            dirty: True if the working tree had changes.
            cells: cells in the grid's order; existing ones do not change.

        Raises:
            SweepReadOnly: the sweep was imported.
        """
        new_revision = NewRevision(
            grid_text=grid_text, grid_file=grid_file, options=options or {}, commit=commit, dirty=dirty, cells=cells
        )
        return self.write(
            lambda session: sweep_lease.write_revision(session, sweep_lease.lock_or_create(session, name), new_revision)
        )

    def set_read_only(self, name: str, read_only: bool = True) -> None:
        """Close a sweep to launches (as an import does), or open it again with `read_only` False.

        Raises:
            SweepUnknown: there is no such sweep.
        """

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
        clear_requests: bool = False,
    ) -> int:
        """Make `owner` the sweep's supervisor until the lease ends, and return the fencing token.

        The token (an integer that identifies this hold of the sweep) increases by one each time. An owner that holds
        the sweep already gets a new token as well. If another process changes the lease meanwhile, the claim is
        repeated.

        Args:
            name: sweep.
            owner: process that takes the sweep.
            lease_seconds: duration of the lease, from now.
            is_alive: called with another owner that holds the sweep. True: that owner keeps the sweep, even with an
                expired lease. False: the sweep is taken over at once. None (unknown, as on another host): the lease
                decides, by the database's clock.
            revision: with a revision the sweep may be new, and the launch is recorded in the same transaction; a
                refused launch changes nothing.
            clear_requests: discard the requests (pause, finish, cancel, retry) that were made to an earlier launch.

        Raises:
            SweepBusy: another owner holds the sweep.
            SweepUnknown: there is no such sweep and no revision.
            SweepReadOnly: the sweep was imported.
        """
        while True:
            lease = self.read(sweep_lease.read_lease, name, new=revision is not None)
            if lease.holder is not None and not lease.holder.is_same_process(owner):
                alive = is_alive(lease.holder)
                if alive or (alive is None and not lease.expired):
                    raise SweepBusy(sweep_lease.busy_message(name, lease, is_holder_alive=alive is not None))
            claim = partial(
                sweep_lease.claim_sweep, name=name, owner=owner, lease_seconds=lease_seconds, expected=lease
            )
            fence = self.write(partial(claim, revision=revision, clear_requests=clear_requests))
            if fence is not None:
                return fence

    def extend_revision(
        self, name: str, fence: int, cells: Sequence[CellRecord], *, new_forecast: object = None
    ) -> None:
        """Append cells to the newest revision of a sweep that the caller holds, in one durable transaction.

        Cells that the database lacks are created. The revision keeps its number.

        Args:
            name: sweep.
            fence: fencing token of the caller.
            cells: cells to append in this order; those that the revision lists already are skipped.
            new_forecast: replaces the forecast in the revision's options; None keeps it.

        Raises:
            LeaseLost: the sweep is not held, or is held under another token.
            SweepUnknown: there is no such sweep.
        """
        self.write(lambda session: sweep_lease.extend_newest(session, name, fence, cells, new_forecast), durable=True)

    def renew_sweep(self, name: str, fence: int, lease_seconds: float) -> None:
        """Extend the lease to `lease_seconds` from now by the database's clock; an expired lease is renewed as well.

        Raises:
            LeaseLost: no process holds the sweep under the token `fence` (it was taken over, released or deleted).
        """

        def work(session: Session) -> None:
            until = queries.now(session) + timedelta(seconds=lease_seconds)
            query = update(SweepRow).where(SweepRow.name == name, SweepRow.fence == fence, SweepRow.owner.is_not(None))
            if not _changes_row(session, query.values(lease_until=until)):
                raise LeaseLost(f"sweep {name!r} was taken over by another supervisor; this one has to stop")

        self.write(work)

    def release_sweep(self, name: str, fence: int) -> bool:
        """Give up the sweep: clear its owner and lease; the fencing token stays.

        Returns:
            False, with nothing changed, if the sweep does not exist or is not held under the token `fence`.
        """
        query = update(SweepRow).where(SweepRow.name == name, SweepRow.fence == fence, SweepRow.owner.is_not(None))
        columns = ("owner", "owner_host", "owner_pid", "owner_started", "owner_space", "owner_since", "lease_until")
        free = dict.fromkeys(columns)
        return self.write(lambda session: _changes_row(session, query.values(free)))

    def request_actions(self, name: str, **changes: Any) -> dict[str, Any]:
        """Add requests to the process that runs the sweep, and return all pending requests.

        Stores them for the process to read; does not wait for it and does not require that one runs.

        Args:
            name: sweep.
            **changes: `pause`, `finish`, `cancel` (True, or None to withdraw the request), `retry` (list of cell ids,
                added to those that are pending; None withdraws all).

        Returns:
            Pending requests by name; the cell ids of `retry` are sorted.

        Raises:
            SweepUnknown: there is no such sweep.
        """
        return self.write(lambda session: sweep_lease.request_actions(session, name, changes))

    def clear_retries(self, name: str, *, retry: Collection[str]) -> None:
        """Remove these cell ids from the pending `retry` request; cells that were requested in the meantime stay.

        Ids that are not pending are ignored.

        Raises:
            SweepUnknown: there is no such sweep.
        """
        self.write(lambda session: sweep_lease.clear_retries(session, name, retry))

    def pending_requests(self, name: str) -> dict[str, Any]:
        """Return the pending requests to the process that runs the sweep, by name; empty for none.

        `pause`, `finish` and `cancel` are True; `retry` is a list of cell ids.

        Raises:
            SweepUnknown: there is no such sweep.
        """
        return self.read(lambda session: dict(queries.sweep_row(session, name).request or {}))

    # --- attempts: supervisors, and the process that runs one -------------------------------------------------------

    def start_attempt(
        self,
        cell_id: str,
        *,
        kind: AttemptKind = "train",
        parent_id: int | None = None,
        owner: Owner,
        fence: int,
        sweep: str | None = None,
        steps_total: int | None = None,
        deviation: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """Create a running attempt of the cell, with the next number of the cell and the run folder `<cell>/<number>`.

        The attempt starts in phase `starting` at step 0; its folder is not created. Records the event `started`. The
        transaction is durable. The database itself allows one running attempt per cell.

        Args:
            cell_id: complete id of the cell.
            kind: "train", "evaluate" (kept weights) or "external" (a model from elsewhere).
            parent_id: attempt whose weights or checkpoint this one uses.
            owner: process that runs the attempt, until set_process names another.
            fence: fencing token under which the attempt writes.
            sweep: sweep that the caller must still hold under `fence`; None skips the check.
            steps_total: training steps of the complete run.
            deviation: settings in which the attempt differs from the cell's config, by dotted path; an empty one is
                stored as None.

        Returns:
            The attempt as stored.

        Raises:
            CellAlreadyRunning: the cell has a running attempt.
            CellUnknown: there is no such cell.
            AttemptUnknown: there is no attempt `parent_id`.
            LeaseLost: another supervisor holds the sweep.
            SweepUnknown: there is no sweep of that name.
        """

        def work(session: Session) -> Attempt:
            """Check the sweep and the parent, insert the attempt and its event, and return the attempt."""
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
                f"cell {cell_id} already has an attempt in state running{who}; wait for it or stop it"
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
        """Record the process that runs the attempt, and renew the attempt's heartbeat.

        Args:
            attempt_id: attempt.
            fence: fencing token under which it runs.
            pid: process id.
            started: creation time of the process, seconds since the epoch.
            host: host name; None or empty text keeps the recorded one.
            space: boot and PID namespace in which `pid` is valid; None stores None (unknown).

        Raises:
            LeaseLost: the attempt does not run under that fencing token; nothing was written.
        """
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
        """End a running attempt durably and record an event; from then on the attempt is read-only.

        The end is the database's current time. The kind of the event is `state`, its message `cause` (without one,
        `state`).

        Args:
            attempt_id: attempt.
            fence: fencing token under which it runs.
            state: final state: "done", "failed", "diverged" or "interrupted".
            cause: reason in words; passwords are removed. None keeps this column and each of those below.
            traceback: Python traceback; passwords are removed. Empty text keeps the column, too.
            exit_code: exit status of the process.
            checkpoint: newest checkpoint, relative to the runs folder or a full address.
            weights: saved weights, relative to the runs folder or a full address.
            failure: failure class: "preempted", "node_lost", "infrastructure", "host_oom", "cuda_oom", "diverged",
                "code", "hang" or "pruned".

        Raises:
            ValueError: the state is `running`.
            LeaseLost: the attempt no longer runs under that fencing token; nothing was written.
        """
        require_end_state(state)
        cause = without_passwords(cause) if cause is not None else None
        columns: dict[str, Any] = {"cause": cause, "traceback": without_passwords(traceback or "") or None}
        columns = {name: storable_text(text) for name, text in columns.items() if text is not None} | {
            "exit_code": exit_code
        }
        columns |= {"checkpoint": checkpoint, "weights": weights, "failure": failure}
        values = {name: value for name, value in columns.items() if value is not None}

        def work(session: Session) -> None:
            renew_heartbeat(session, attempt_id, fence, state=state, finished_at=UtcNow(), **values)
            cell = session.scalar(select(AttemptRow.cell_id).where(AttemptRow.id == attempt_id))
            record_event(session, state, cause or state, cell_id=cell, attempt_id=attempt_id)

        self.write(work, durable=True)

    def interrupt_dead(self, attempt_id: int, cause: str) -> bool:
        """Mark a running attempt as interrupted; the caller has verified that its process is gone.

        Needs no fencing token. Sets the failure class PREEMPTED and the end (now), and records the event `interrupted`
        with the cause. A process that is alive after all gets LeaseLost from then on.

        Returns:
            False, with nothing changed, if the attempt was not running or does not exist.
        """

        def work(session: Session) -> bool:
            """Update the attempt if it is running, record the event, and return True if it was running."""
            dead = update(AttemptRow).where(AttemptRow.id == attempt_id, AttemptRow.state == "running")
            ended = {
                "state": "interrupted",
                "finished_at": UtcNow(),
                "cause": storable_text(cause),
                "failure": PREEMPTED,
            }
            if not _changes_row(session, dead.values(**ended)):
                return False
            cell = session.scalar(select(AttemptRow.cell_id).where(AttemptRow.id == attempt_id))
            record_event(session, "interrupted", cause, cell_id=cell, attempt_id=attempt_id)
            return True

        return self.write(work)

    def mark_pruned(self, attempt_id: int, why: str) -> None:
        """Mark an interrupted attempt as ended early by a study, durably, and record the event `pruned`.

        The state stays `interrupted`; the failure class becomes PRUNED and the cause becomes `why`. Attempts in other
        states do not change, and no event is recorded for them.
        """

        def work(session: Session) -> None:
            ended = update(AttemptRow).where(AttemptRow.id == attempt_id, AttemptRow.state == "interrupted")
            if _changes_row(session, ended.values(failure=PRUNED, cause=storable_text(why))):
                cell = session.scalar(select(AttemptRow.cell_id).where(AttemptRow.id == attempt_id))
                record_event(session, PRUNED, why, cell_id=cell, attempt_id=attempt_id)

        self.write(work, durable=True)

    def clear_weights(self, attempt_id: int) -> None:
        """Record durably that the saved weights of an attempt are deleted or about to be deleted.

        Deletes no file. An unknown attempt is ignored.
        """
        gone = update(AttemptRow).where(AttemptRow.id == attempt_id).values(weights=None)
        self.write(lambda session: _changes_row(session, gone), durable=True)

    def add_event(
        self,
        kind: str,
        message: str,
        *,
        sweep: str | None = None,
        cell_id: str | None = None,
        attempt_id: int | None = None,
    ) -> None:
        """Record an event about a sweep, a cell or an attempt, at the current time of the database.

        Args:
            kind: a short word, such as `started`.
            message: text for people.
            sweep: name of the sweep that the event is about; None for none (not for the sweep launched last).
            cell_id: cell that the event is about.
            attempt_id: attempt that the event is about.

        Raises:
            SweepUnknown: there is no such sweep.
        """

        def work(session: Session) -> None:
            sweep_id = queries.sweep_row(session, sweep).id if sweep is not None else None
            record_event(session, kind, message, sweep_id=sweep_id, cell_id=cell_id, attempt_id=attempt_id)

        self.write(work)

    # --- consistent reads; the single queries are methods of StoreReader ---------------------------------------------

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Yield a Snapshot, whose queries all see the same state of the database despite concurrent writes.

        It holds one read transaction until the context ends and is not usable afterwards.
        """
        with self.transaction(write=False) as session:
            queries.snapshot(session)
            yield Snapshot(session)

    def frames(self, sweep: str | None = None, *, revision: int | None = None) -> Frames:
        """Return the sweep (None: the one launched last) as pandas data frames: see frames.Frames.

        Fixes the sweep and the revision now; each method of the result reads the database anew.

        Args:
            sweep: sweep name.
            revision: revision number; None for the one that is newest now.

        Raises:
            SweepUnknown: there is no such sweep.
            StoreError: there is no such revision.
            TypeError: an argument has the wrong type.
        """
        check_argument("frames", "sweep", sweep, TEXT, optional=True)
        check_argument("frames", "revision", revision, COUNT, optional=True)
        from .frames import Frames  # pandas takes as long to import as everything else together

        record = self.revision(sweep, revision)
        return Frames(self.snapshot, record.sweep, record.number)


def require_end_state(state: AttemptState) -> None:
    """Raise ValueError for `running`, the one state that does not end an attempt."""
    if state == "running":
        raise ValueError("an attempt cannot finish as 'running'")


def renew_heartbeat(session: Session, attempt_id: int, fence: int, **values: Any) -> None:
    """Renew the heartbeat of an attempt and set further columns, in the caller's transaction.

    Args:
        session: open session.
        attempt_id: attempt.
        fence: fencing token under which it must run.
        **values: columns of the attempt and their new values; None sets NULL.

    Raises:
        LeaseLost: the attempt does not exist, has ended, or runs under another fencing token.
    """
    query = update(AttemptRow).where(
        AttemptRow.id == attempt_id, AttemptRow.fence == fence, AttemptRow.state == "running"
    )
    if not _changes_row(session, query.values(heartbeat_at=UtcNow(), **values)):
        raise LeaseLost(
            f"attempt {attempt_id} no longer belongs to this process (finished, marked as dead or taken over); "
            "nothing was written"
        )


def _changes_row(session: Session, query: Any) -> bool:
    return bool(session.execute(query.execution_options(synchronize_session=False)).rowcount)  # type: ignore[attr-defined]


def record_event(session: Session, kind: str, message: str, **references: Any) -> None:
    """Insert an event with the current time of the database, in the caller's transaction.

    `references` are the columns `sweep_id` (a number), `cell_id` and `attempt_id` of the event. Characters that a
    database cannot store are replaced in the message.
    """
    session.execute(insert(EventRow).values(at=UtcNow(), kind=kind, message=storable_text(message), **references))
