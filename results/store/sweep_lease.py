"""Who runs a sweep, and what was launched: the writes of a claim, each inside a transaction of its caller."""

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
    """A sweep as it stood when its holder was looked for."""

    fence: int
    lease_until: datetime | None
    holder: Owner | None
    since: datetime | None
    expired: bool
    new: bool = False
    """Nobody has launched it yet."""


def seen(session: Session, name: str, *, new: bool) -> LeaseState:
    """The sweep as it stands. Raises SweepReadOnly, and SweepUnknown unless it may be `new`."""
    if new and session.scalar(select(SweepRow.id).where(SweepRow.name == name)) is None:
        return LeaseState(0, None, None, None, True, new=True)
    row = queries.sweep_row(session, name)
    _open(row)
    expired = row.lease_until is None or row.lease_until < queries.now(session)
    return LeaseState(row.fence, row.lease_until, queries.owner_of(row), row.owner_since, expired)


def busy(name: str, read_lease: LeaseState, *, known: bool) -> str:
    """Why the sweep cannot be had. `known`: its holder was seen to live; else only its lease says so."""
    assert read_lease.holder is not None
    who = f"{read_lease.holder.name} on {read_lease.holder.host} (pid {read_lease.holder.pid})"
    until = (
        f" (its lease ends {read_lease.lease_until:%H:%M:%S} UTC)"
        if read_lease.lease_until is not None and not known
        else ""
    )
    return f"sweep {name!r} is run by {who} since {read_lease.since:%Y-%m-%d %H:%M:%S} UTC; stop that one first, or wait for it{until}"


def claim_sweep(
    session: Session,
    *,
    name: str,
    owner: Owner,
    lease_seconds: float,
    seen: LeaseState,
    revision: NewRevision | None,
    forget: bool,
) -> int | None:
    """Gives the sweep to `owner` and records the revision; None, and nothing is changed, when it stands otherwise than seen."""
    if seen.new:
        _add(session, name)
    row = _locked(session, name)
    if row is None or (row.fence, row.lease_until) != (seen.fence, seen.lease_until):
        return None
    _open(row)
    if revision is not None:
        if revision.beside is None:
            _launched_now(session, row)
        else:
            row.launched_at = queries.sweep_row(session, revision.beside).launched_at - timedelta(milliseconds=1)
        write_revision(session, row, revision)
    moment = queries.now(session)
    row.owner, row.owner_host, row.owner_pid, row.owner_started = owner.name, owner.host, owner.pid, owner.started
    row.owner_space = owner.space
    row.owner_since, row.lease_until = moment, moment + timedelta(seconds=lease_seconds)
    row.fence = seen.fence + 1
    if forget:
        row.request = None
    session.flush()
    return row.fence


def lock_or_create(session: Session, name: str) -> SweepRow:
    """The sweep, made when missing, its row locked, and the one launched last from now on. Raises SweepReadOnly."""
    _add(session, name)
    row = _locked(session, name)
    if row is None:
        raise SweepUnknown(f"sweep {name!r} was deleted at this moment; try again")
    _open(row)
    _launched_now(session, row)
    return row


def write_revision(session: Session, sweep: SweepRow, given: NewRevision) -> int:
    """The number of the revision that holds: the newest if nothing differs from it, else one more."""
    newest = session.scalar(
        select(RevisionRow).where(RevisionRow.sweep_id == sweep.id).order_by(RevisionRow.number.desc()).limit(1)
    )
    listed = [(cell.id, dict(cell.axes)) for cell in given.cells]
    options = jsonable(dict(given.options))  # as it will be read back, so that a relaunch compares equal
    asked = given.grid_text, forecast.without_forecast(options)
    same = newest is not None and (newest.grid_text, forecast.without_forecast(newest.options)) == asked
    if newest is not None and same and queries.members(session, newest.id) == listed:
        return newest.number
    revision = RevisionRow(
        sweep_id=sweep.id,
        number=newest.number + 1 if newest is not None else 1,
        grid_text=given.grid_text,
        grid_file=given.grid_file,
        options=options,
        git_commit=given.commit,
        git_dirty=given.dirty,
        created_at=queries.now(session),
    )
    session.add(revision)
    session.flush()
    _list_cells(session, revision.id, given.cells, 0, revision.created_at)
    return revision.number


def extend_newest(session: Session, name: str, fence: int, cells: Sequence[CellRecord], price: object) -> None:
    """See Store.extend_revision."""
    row = lock_sweep_row(session, name)
    if row.fence != fence or row.owner is None:
        raise LeaseLost(f"sweep {name!r} was taken over by another supervisor; this one has to stop")
    newest = append_cells(session, row.id, cells)
    if price is not None:
        newest.options = dict(newest.options) | {forecast.OPTION: jsonable(price)}


def append_cells(session: Session, sweep_id: int, cells: Sequence[CellRecord]) -> RevisionRow:
    """Adds to the sweep's newest revision, after all others, those of these cells that it does not list; returns the revision."""
    newest = queries.revision_row(session, sweep_id)
    listed = {cell for cell, _ in queries.members(session, newest.id)}
    further = [cell for cell in cells if cell.id not in listed]
    last = session.scalar(select(func.max(RevisionCellRow.position)).where(RevisionCellRow.revision_id == newest.id))
    _list_cells(session, newest.id, further, 0 if last is None else last + 1, queries.now(session))
    return newest


def _list_cells(session: Session, revision_id: int, cells: Sequence[CellRecord], first: int, moment: datetime) -> None:
    """Make the cells that are missing, and list all of them in a revision from position `first` on."""
    if cells:
        rows = [cell_values(cell) | {"created_at": moment} for cell in cells]
        session.execute(upsert(session, CellRow, key=("id",), replace=False), rows)
        links = [
            {"revision_id": revision_id, "cell_id": cell.id, "position": position, "axes": dict(cell.axes)}
            for position, cell in enumerate(cells, first)
        ]
        session.execute(insert(RevisionCellRow), links)


def request_actions(session: Session, name: str, wishes: Mapping[str, Any]) -> dict[str, Any]:
    """See Store.ask."""
    row = lock_sweep_row(session, name)
    asked = dict(row.request or {})
    for wish, value in wishes.items():
        asked[wish] = sorted({*asked.get(wish, ()), *value}) if isinstance(value, list | tuple) else value
    asked = {wish: value for wish, value in asked.items() if value is not None and value != []}
    row.request = asked or None
    return asked


def clear_retries(session: Session, name: str, retry: Collection[str]) -> None:
    """See Store.answered."""
    row = lock_sweep_row(session, name)
    asked = dict(row.request or {})
    left = sorted({*asked.pop("retry", ())} - {*retry})
    row.request = (asked | ({"retry": left} if left else {})) or None


def lock_sweep_row(session: Session, name: str) -> SweepRow:
    """The row as it is now, locked until the transaction ends, so that nobody takes the sweep up. Raises SweepUnknown."""
    row = queries.sweep_row(session, name)
    session.refresh(row, with_for_update=True)
    return row


def _add(session: Session, name: str) -> None:
    moment = queries.now(session)
    made = {"name": name, "created_at": moment, "launched_at": moment, "fence": 0, "read_only": False}
    session.execute(upsert(session, SweepRow, key=("name",), replace=False), made)


def _locked(session: Session, name: str) -> SweepRow | None:
    """The row; on PostgreSQL whoever else writes to it waits until we are done, as on SQLite every writer does."""
    return session.scalars(select(SweepRow).where(SweepRow.name == name).with_for_update()).one_or_none()


def _open(row: SweepRow) -> None:
    if row.read_only:
        raise SweepReadOnly(f"sweep {row.name!r} holds imported results; launch under another name with --name")


def _launched_now(session: Session, row: SweepRow) -> None:
    """Makes it the sweep launched last, even with a clock that was set back."""
    newest = session.scalar(select(SweepRow.launched_at).order_by(SweepRow.launched_at.desc()).limit(1))
    row.launched_at = max(queries.now(session), (newest or row.launched_at) + timedelta(milliseconds=1))
    session.flush()


def cell_values(cell: CellRecord) -> dict[str, Any]:
    """The columns of the table `cell`, but for the moment."""
    values = {"id": cell.id, "slug": cell.slug, "seed": cell.seed, "config": dict(cell.config)}
    return values | {"tokens_total": cell.tokens} | dict(cell.levels)
