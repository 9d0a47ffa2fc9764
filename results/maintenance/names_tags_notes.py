"""What people call a sweep and write about it and its cells: names, tags, notes. No number depends on any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from ..console.text import storable_text, without_passwords
from ..errors import CellUnknown, StoreError, SweepBusy
from ..names import NAME, PUBLISHED, quoted_short, why_not
from ..store import queries
from ..store.records import Owner
from ..store.schema import CellRow, SweepRow
from ..store.store import Store, record_event
from ..store.sweep_lease import lock_sweep_row

OwnerIsActive = Callable[[Owner, datetime | None], bool]
"""Whether an owner still has a sweep, given the end of its lease; see sweep/host/processes.py."""
TargetKind = Literal["sweep", "cell"]
LONGEST_TAG = 40
LONGEST_NOTE = 4000


def free(row: SweepRow, holds: OwnerIsActive, what: str) -> None:
    """Raises SweepBusy when somebody runs the sweep; `what` says what it cannot do meanwhile."""
    owner = queries.owner_of(row)
    if owner is not None and holds(owner, row.lease_until):
        raise SweepBusy(
            f"sweep {row.name!r} is run by {owner.name} on {owner.host} (pid {owner.pid}) and cannot {what} meanwhile; "
            f"atma-sweep cancel --sweep {row.name} stops it"
        )


def rename(store: Store, name: str, new: str, *, holds: OwnerIsActive, who: str) -> str:
    """Calls a sweep `new`; returns the grid file that it was launched from.

    Raises SweepUnknown, SweepBusy, and StoreError for a name that no sweep can have or another one has, and for the
    paper's numbers.
    """
    problem = why_not(new)
    if problem is not None:
        raise StoreError(f"{quoted_short(new)} {problem}")
    if name in PUBLISHED:
        raise StoreError(f"{name} holds numbers of the paper and keeps its name")

    def work(session: Session) -> str:
        row = lock_sweep_row(session, name)
        free(row, holds, "be renamed")
        if new != name and session.scalar(select(SweepRow.id).where(SweepRow.name == new)) is not None:
            raise StoreError(f"there is a sweep {new} already; choose another name")
        row.name = new
        record_event(session, "renamed", f"{name} to {new} by {who}", sweep_id=row.id)
        return queries.revision_row(session, row.id).grid_file

    return store.write(work)


def tag(store: Store, name: str, tags: Sequence[str], *, remove: bool = False) -> tuple[str, ...]:
    """Adds tags to a sweep, or takes them off; returns those that it has now, sorted.

    Raises SweepUnknown, and StoreError for what is no tag, or for one to take off that it does not have.
    """
    for one in tags:
        if not remove and (NAME.fullmatch(one) is None or len(one) > LONGEST_TAG):
            raise StoreError(f"{quoted_short(one)} is no tag: letters, digits, '.', '_' and '-', at most {LONGEST_TAG}")

    def work(session: Session) -> tuple[str, ...]:
        row = lock_sweep_row(session, name)
        have = set(row.tags or ())
        if remove and (strange := sorted(set(tags) - have)):
            raise StoreError(
                f"sweep {name} has no tag {quoted_short(strange[0])}; it has: {', '.join(sorted(have)) or 'none'}"
            )
        now = sorted(have - set(tags) if remove else have | set(tags))
        row.tags = now or None
        return tuple(now)

    return store.write(work)


def resolve_target(session: Session, what: str, *, whole: bool = False) -> tuple[TargetKind, str]:
    """A sweep by that name, else a cell: ("sweep", name) or ("cell", id). `whole`: only a complete id or slug is enough.

    Raises CellAmbiguous, CellUnknown (neither).
    """
    if session.scalar(select(SweepRow.id).where(SweepRow.name == what)) is not None:
        return "sweep", what
    if session.scalar(select(SweepRow.id).limit(1)) is None:
        raise CellUnknown(f"there is neither a sweep nor a cell {quoted_short(what)}; launch a grid first")
    try:
        found = queries.find_cell(session, what)
    except CellUnknown as error:
        raise CellUnknown(
            f"no sweep is named {quoted_short(what)}, which atma-sweep sweeps lists, and {error}"
        ) from error
    if whole and what not in (found.id, found.slug):
        raise CellUnknown(
            f"no sweep is named {quoted_short(what)}; if cell {found.id} ({found.slug}) is meant, give its whole id"
        )
    return "cell", found.id


def note(store: Store, what: str, text: str | None) -> tuple[TargetKind, str, str | None]:
    """Writes a note about a sweep or a cell, an empty one takes it away, None only reads it: (kind, name or id, note).

    Raises CellUnknown, CellAmbiguous, StoreError (too long).
    """
    if text is not None and len(text) > LONGEST_NOTE:
        raise StoreError(f"a note has at most {LONGEST_NOTE:,} letters, and this one {len(text):,}; put it into a file")

    def work(session: Session) -> tuple[TargetKind, str, str | None]:
        kind, name = resolve_target(session, what)
        if kind == "sweep":
            row: SweepRow | CellRow = queries.sweep_row(session, name)
        else:
            row = session.scalars(select(CellRow).where(CellRow.id == name)).one()
        if text is not None:
            row.note = without_passwords(storable_text(text.strip())) or None
        return kind, name, row.note

    return store.read(work) if text is None else store.write(work)
