"""Names, tags and notes of sweeps and cells. No measurement depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from ..console.text import storable_text, without_passwords
from ..errors import CellUnknown, StoreError, SweepBusy
from ..names import NAME, PUBLISHED, quoted_short, sweep_name_problem
from ..store import queries
from ..store.records import Owner
from ..store.schema import CellRow, SweepRow
from ..store.store import Store, record_event
from ..store.sweep_lease import lock_sweep_row

OwnerIsActive = Callable[[Owner, datetime | None], bool]
"""Function that returns True if an owner still runs a sweep, given the end of its lease.

See sweep/host/processes.py.
"""
TargetKind = Literal["sweep", "cell"]
MAX_TAG_CHARS = 40
MAX_NOTE_CHARS = 4000


def require_idle(row: SweepRow, is_active: OwnerIsActive, action: str) -> None:
    """Raise SweepBusy if the sweep is being run; do nothing for a sweep without an owner.

    Args:
        row: row of the sweep.
        is_active: returns True if an owner still runs a sweep, given the end of its lease.
        action: phrase for the refused action ("be deleted"), for the message.
    """
    owner = queries.owner_of(row)
    if owner is not None and is_active(owner, row.lease_until):
        raise SweepBusy(
            f"sweep {row.name!r} is run by {owner.name} on {owner.host} (pid {owner.pid}) and cannot {action} "
            f"until it stops; atma-sweep cancel --sweep {row.name} cancels it"
        )


def rename(store: Store, name: str, new: str, *, is_active: OwnerIsActive, who: str) -> str:
    """Rename a sweep, record the event `renamed`, and return the grid file of its newest revision, as recorded.

    The same name as before is accepted. The runs folder and the grid file do not change.

    Args:
        store: database.
        name: sweep.
        new: new name.
        is_active: returns True if an owner still runs a sweep, given the end of its lease.
        who: user, for the event.

    Raises:
        SweepUnknown: there is no such sweep.
        SweepBusy: it is being run.
        StoreError: the new name is invalid or in use, or the sweep holds published numbers.
    """
    problem = sweep_name_problem(new)
    if problem is not None:
        raise StoreError(f"{quoted_short(new)} {problem}")
    if name in PUBLISHED:
        raise StoreError(f"{name} holds numbers of the paper and cannot be renamed")

    def work(session: Session) -> str:
        """Rename the locked row, record the event, and return the grid file.

        Raises SweepBusy or StoreError if the sweep is being run or the name is in use.
        """
        row = lock_sweep_row(session, name)
        require_idle(row, is_active, "be renamed")
        if new != name and session.scalar(select(SweepRow.id).where(SweepRow.name == new)) is not None:
            raise StoreError(f"there is a sweep {new} already; choose another name")
        row.name = new
        record_event(session, "renamed", f"{name} to {new} by {who}", sweep_id=row.id)
        return queries.revision_row(session, row.id).grid_file

    return store.write(work)


def tag(store: Store, name: str, tags: Sequence[str], *, remove: bool = False) -> tuple[str, ...]:
    """Add tags to a sweep, or remove them, and return the tags that it then has, sorted.

    A tag that it has already is accepted. No event is recorded; a sweep that is being run can be tagged.

    Args:
        store: database.
        name: sweep.
        tags: tags to add or remove.
        remove: remove them.

    Raises:
        SweepUnknown: there is no such sweep.
        StoreError: a tag is invalid (letters, digits, ".", "_" and "-", at most 40 characters), or a tag to remove does
            not exist; nothing was changed.
    """
    for tag_name in tags:
        if not remove and (NAME.fullmatch(tag_name) is None or len(tag_name) > MAX_TAG_CHARS):
            raise StoreError(
                f"{quoted_short(tag_name)} is not a valid tag: use letters, digits, '.', '_' and '-', at most "
                f"{MAX_TAG_CHARS}"
            )

    def work(session: Session) -> tuple[str, ...]:
        """Change the tags of the locked row, and return all its tags, sorted."""
        row = lock_sweep_row(session, name)
        have = set(row.tags or ())
        if remove and (unknown := sorted(set(tags) - have)):
            raise StoreError(
                f"sweep {name} has no tag {quoted_short(unknown[0])}; it has: {', '.join(sorted(have)) or 'none'}"
            )
        now = sorted(have - set(tags) if remove else have | set(tags))
        row.tags = now or None
        return tuple(now)

    return store.write(work)


def resolve_target(session: Session, name: str, *, complete: bool = False) -> tuple[TargetKind, str]:
    """Return ("sweep", name) for a sweep of that name, else ("cell", id) for a cell.

    Cells are looked up first in the sweep launched last, then in the entire database.

    Args:
        session: open session.
        name: name of a sweep, or id, slug or beginning of a cell.
        complete: accept only a complete id or slug of a cell.

    Raises:
        CellAmbiguous: several cells match.
        CellUnknown: neither a sweep nor a cell matches; also if the database holds no sweep.
    """
    if session.scalar(select(SweepRow.id).where(SweepRow.name == name)) is not None:
        return "sweep", name
    if session.scalar(select(SweepRow.id).limit(1)) is None:
        raise CellUnknown(f"there is neither a sweep nor a cell {quoted_short(name)}; launch a grid first")
    try:
        cell = queries.find_cell(session, name)
    except CellUnknown as error:
        raise CellUnknown(
            f"no sweep is named {quoted_short(name)} (atma-sweep sweeps lists them), and {error}"
        ) from error
    if complete and name not in (cell.id, cell.slug):
        raise CellUnknown(
            f"no sweep is named {quoted_short(name)}; if cell {cell.id} ({cell.slug}) is meant, give its complete id"
        )
    return "cell", cell.id


def note(store: Store, target: str, text: str | None) -> tuple[TargetKind, str, str | None]:
    """Set, remove or read the note of a sweep or a cell, and return (kind, name or id, note).

    The note of the result is the one afterwards; None without one. It is stored without spaces at its ends.

    Args:
        store: database.
        target: name of a sweep, or id, slug or beginning of a cell.
        text: new note; an empty text removes it, None only reads it. Passwords are removed.

    Raises:
        CellUnknown: neither a sweep nor a cell matches.
        CellAmbiguous: several cells match.
        StoreError: the note has more than 4,000 characters (MAX_NOTE_CHARS).
    """
    if text is not None and len(text) > MAX_NOTE_CHARS:
        raise StoreError(f"a note may have at most {MAX_NOTE_CHARS:,} characters, got {len(text):,}; shorten it")

    def work(session: Session) -> tuple[TargetKind, str, str | None]:
        """Resolve the target, set its note unless `text` is None, and return (kind, name or id, note)."""
        kind, name = resolve_target(session, target)
        if kind == "sweep":
            row: SweepRow | CellRow = queries.sweep_row(session, name)
        else:
            row = session.scalars(select(CellRow).where(CellRow.id == name)).one()
        if text is not None:
            row.note = without_passwords(storable_text(text.strip())) or None
        return kind, name, row.note

    return store.read(work) if text is None else store.write(work)
