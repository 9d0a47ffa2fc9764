"""Leases of sweeps and revisions: the writes of a launch, each inside a transaction of its caller."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from .. import forecast
from ..errors import LeaseLost, SweepReadOnly, SweepUnknown
from . import queries
from .database import jsonable, upsert
from .records import CellRecord, NewRevision, Owner
from .schema import CellRow, RevisionCellRow, RevisionRow, SweepRow


@dataclass(frozen=True)
class LeaseState:
    """Lease of a sweep at one moment: fencing token, end of the lease, holder, and since when it holds the sweep.

    `fence` increases with every hold, and a write under an older token is refused. `holder` is the last process that
    took the sweep and did not release it, even if the lease has expired; None if no process holds it.
    """

    fence: int
    lease_until: datetime | None
    holder: Owner | None
    since: datetime | None
    expired: bool
    """True if the lease has ended by the database's clock, or if there is none."""
    new: bool = False
    """True for a sweep that was never launched."""


def read_lease(session: Session, name: str, *, new: bool) -> LeaseState:
    """Return the lease of the sweep; reads only.

    Args:
        session: open session.
        name: sweep.
        new: True if the sweep need not exist; a missing one gives a LeaseState with `new`, token 0 and no holder.

    Raises:
        SweepReadOnly: the sweep was imported.
        SweepUnknown: there is no such sweep, and `new` is False.
    """
    if new and session.scalar(select(SweepRow.id).where(SweepRow.name == name)) is None:
        return LeaseState(0, None, None, None, True, new=True)
    row = queries.sweep_row(session, name)
    _require_writable(row)
    expired = row.lease_until is None or row.lease_until < queries.now(session)
    return LeaseState(row.fence, row.lease_until, queries.owner_of(row), row.owner_since, expired)


def busy_message(name: str, lease: LeaseState, *, is_holder_alive: bool) -> str:
    """Return the message about a sweep that another owner holds: its name, host, pid and the time since when (UTC).

    Args:
        name: sweep.
        lease: its lease, with a holder.
        is_holder_alive: True if the holder's process was seen; otherwise the message also names the end of its lease.
    """
    assert lease.holder is not None
    who = f"{lease.holder.name} on {lease.holder.host} (pid {lease.holder.pid})"
    until = (
        f" (its lease ends {lease.lease_until:%H:%M:%S} UTC)"
        if lease.lease_until is not None and not is_holder_alive
        else ""
    )
    return (
        f"sweep {name!r} is run by {who} since {lease.since:%Y-%m-%d %H:%M:%S} UTC; stop that launch first, or wait "
        f"until it ends{until}"
    )


def claim_sweep(
    session: Session,
    *,
    name: str,
    owner: Owner,
    lease_seconds: float,
    expected: LeaseState,
    revision: NewRevision | None,
    clear_requests: bool,
) -> int | None:
    """Give the sweep to `owner`, record the revision, and return the new fencing token.

    Runs in the caller's transaction and locks the row of the sweep. The holder of the lease is not examined here: the
    caller decides whether the sweep may be taken.

    Args:
        session: open session.
        name: sweep.
        owner: process that takes the sweep.
        lease_seconds: duration of the lease, from now.
        expected: lease as the caller has read it; a sweep that it calls new is created.
        revision: launch to record; it also makes the sweep the one launched last, or dates it just before the sweep
            that it accompanies. None records nothing and keeps the launch time.
        clear_requests: discard the requests that were made to an earlier launch.

    Returns:
        The token, one more than the expected one. None, with nothing changed, if the lease is no longer the expected
        one.

    Raises:
        SweepReadOnly: the sweep was imported.
        SweepUnknown: the sweep that the revision accompanies does not exist.
    """
    if expected.new:
        _insert_if_missing(session, name)
    row = _lock_row(session, name)
    if row is None or (row.fence, row.lease_until) != (expected.fence, expected.lease_until):
        return None
    _require_writable(row)
    if revision is not None:
        if revision.companion_of is None:
            _mark_launched_last(session, row)
        else:
            row.launched_at = queries.sweep_row(session, revision.companion_of).launched_at - timedelta(milliseconds=1)
        write_revision(session, row, revision)
    moment = queries.now(session)
    row.owner, row.owner_host, row.owner_pid, row.owner_started = owner.name, owner.host, owner.pid, owner.started
    row.owner_space = owner.space
    row.owner_since, row.lease_until = moment, moment + timedelta(seconds=lease_seconds)
    row.fence = expected.fence + 1
    if clear_requests:
        row.request = None
    session.flush()
    return row.fence


def lock_or_create(session: Session, name: str) -> SweepRow:
    """Return the row of the sweep, created if missing and locked, and make the sweep the one launched last.

    The lock lasts until the caller's transaction ends.

    Raises:
        SweepUnknown: the sweep was deleted at this moment.
        SweepReadOnly: the sweep was imported.
    """
    _insert_if_missing(session, name)
    row = _lock_row(session, name)
    if row is None:
        raise SweepUnknown(f"sweep {name!r} was deleted at this moment; try again")
    _require_writable(row)
    _mark_launched_last(session, row)
    return row


def write_revision(session: Session, sweep: SweepRow, new_revision: NewRevision) -> int:
    """Return the number of the revision that describes the launch: the newest if it is equal, else a new one.

    Two launches are equal if grid text, options (without the forecast), cells, their order and their axes are equal;
    file name and code version do not count. A new revision has the next number, from 1, and adds the cells that are
    missing; existing cells do not change. Only the newest revision is compared.
    """
    newest = session.scalar(
        select(RevisionRow).where(RevisionRow.sweep_id == sweep.id).order_by(RevisionRow.number.desc()).limit(1)
    )
    listed = [(cell.id, dict(cell.axes)) for cell in new_revision.cells]
    options = jsonable(dict(new_revision.options))  # as it will be read back, so that a relaunch compares equal
    requested = new_revision.grid_text, forecast.without_forecast(options)
    same = newest is not None and (newest.grid_text, forecast.without_forecast(newest.options)) == requested
    if newest is not None and same and queries.members(session, newest.id) == listed:
        return newest.number
    revision = RevisionRow(
        sweep_id=sweep.id,
        number=newest.number + 1 if newest is not None else 1,
        grid_text=new_revision.grid_text,
        grid_file=new_revision.grid_file,
        options=options,
        git_commit=new_revision.commit,
        git_dirty=new_revision.dirty,
        created_at=queries.now(session),
    )
    session.add(revision)
    session.flush()
    _list_cells(session, revision.id, new_revision.cells, 0, revision.created_at)
    return revision.number


def extend_newest(session: Session, name: str, fence: int, cells: Sequence[CellRecord], new_forecast: object) -> None:
    """Append cells to the newest revision of a sweep that the caller holds, and replace its forecast.

    Cells that the revision lists already are skipped; those that the database lacks are created. `new_forecast` None
    keeps the forecast (the predicted times in the revision's options).

    Raises:
        LeaseLost: the sweep is not held under the fencing token `fence`.
        SweepUnknown: there is no such sweep.
    """
    row = lock_sweep_row(session, name)
    if row.fence != fence or row.owner is None:
        raise LeaseLost(f"sweep {name!r} was taken over by another supervisor; this one has to stop")
    newest = append_cells(session, row.id, cells)
    if new_forecast is not None:
        newest.options = dict(newest.options) | {forecast.OPTION_KEY: jsonable(new_forecast)}


def append_cells(session: Session, sweep_id: int, cells: Sequence[CellRecord]) -> RevisionRow:
    """Append the cells that the sweep's newest revision does not list to its end, and return that revision.

    Cells that the database lacks are created; the forecast does not change. Returns the mapped row, attached to the
    session.

    Args:
        session: session of a write transaction.
        sweep_id: id of the sweep.
        cells: cells to append, in this order.
    """
    newest = queries.revision_row(session, sweep_id)
    listed = {cell for cell, _ in queries.members(session, newest.id)}
    new_cells = [cell for cell in cells if cell.id not in listed]
    last = session.scalar(select(func.max(RevisionCellRow.position)).where(RevisionCellRow.revision_id == newest.id))
    _list_cells(session, newest.id, new_cells, 0 if last is None else last + 1, queries.now(session))
    return newest


def _list_cells(session: Session, revision_id: int, cells: Sequence[CellRecord], first: int, moment: datetime) -> None:
    """Create the cells that are missing, and list all of `cells` in a revision; do nothing for an empty sequence.

    The revision must not list any of them yet. Existing cells do not change.

    Args:
        session: open session.
        revision_id: revision.
        cells: cells in the order of their positions.
        first: position of the first one.
        moment: time of creation for new cells.
    """
    if cells:
        rows = [cell_values(cell) | {"created_at": moment} for cell in cells]
        session.execute(upsert(session, CellRow, key=("id",), replace=False), rows)
        links = [
            {"revision_id": revision_id, "cell_id": cell.id, "position": position, "axes": dict(cell.axes)}
            for position, cell in enumerate(cells, first)
        ]
        session.execute(insert(RevisionCellRow), links)


def request_actions(session: Session, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into the pending requests of a sweep, store them, and return all that are pending.

    Args:
        session: open session.
        name: sweep.
        changes: values by name of the request. Lists are united with the pending ones and sorted; an empty list adds
            nothing. Other values replace the pending one; None removes the request.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    row = lock_sweep_row(session, name)
    requests = dict(row.request or {})
    for action, value in changes.items():
        requests[action] = sorted({*requests.get(action, ()), *value}) if isinstance(value, list | tuple) else value
    requests = {wish: value for wish, value in requests.items() if value is not None and value != []}
    row.request = requests or None
    return requests


def clear_retries(session: Session, name: str, retry: Collection[str]) -> None:
    """Remove the cell ids `retry` from the pending retry request of a sweep; ids that are not pending are ignored.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    row = lock_sweep_row(session, name)
    requests = dict(row.request or {})
    remaining = sorted({*requests.pop("retry", ())} - {*retry})
    row.request = (requests | ({"retry": remaining} if remaining else {})) or None


def lock_sweep_row(session: Session, name: str) -> SweepRow:
    """Return the current row of the sweep, locked until the transaction ends, so that no process takes the sweep.

    The lock is a row lock of PostgreSQL; on SQLite the write transaction of the caller has the same effect.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    row = queries.sweep_row(session, name)
    session.refresh(row, with_for_update=True)
    return row


def _insert_if_missing(session: Session, name: str) -> None:
    moment = queries.now(session)
    values = {"name": name, "created_at": moment, "launched_at": moment, "fence": 0, "read_only": False}
    session.execute(upsert(session, SweepRow, key=("name",), replace=False), values)


def _lock_row(session: Session, name: str) -> SweepRow | None:
    """Return the locked row, or None if it does not exist.

    On PostgreSQL other writers of the row wait until this transaction ends; SQLite has one writer at a time anyway.
    """
    return session.scalars(select(SweepRow).where(SweepRow.name == name).with_for_update()).one_or_none()


def _require_writable(row: SweepRow) -> None:
    if row.read_only:
        raise SweepReadOnly(f"sweep {row.name!r} holds imported results; launch under another name with --name")


def _mark_launched_last(session: Session, row: SweepRow) -> None:
    """Make this the sweep launched last, even if the clock was set back.

    Its launch time becomes now, or one millisecond after the newest launch time in the database if that is later.
    """
    newest = session.scalar(select(SweepRow.launched_at).order_by(SweepRow.launched_at.desc()).limit(1))
    row.launched_at = max(queries.now(session), (newest or row.launched_at) + timedelta(milliseconds=1))
    session.flush()


def cell_values(cell: CellRecord) -> dict[str, Any]:
    """Return the columns id, slug, seed, config, tokens_total and the five levels of a row of `cell`."""
    values = {"id": cell.id, "slug": cell.slug, "seed": cell.seed, "config": dict(cell.config)}
    return values | {"tokens_total": cell.tokens} | dict(cell.levels)
