"""Deleting sweeps and cells with all that was measured of them: in one transaction, and never what another sweep shares.

Nothing is deleted before it was counted and shown. Files stay where they are: nobody owns them afterwards, and gc finds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import CursorResult, and_, delete, func, or_, select, update
from sqlalchemy.orm import Session

from ..console.output_files import bytes_under
from ..console.text import counted
from ..errors import CellTaken, StoreError
from ..store import queries
from ..store.attempt_queries import attempts_of
from ..store.records import SILENCE_S, Attempt, find, here
from ..store.schema import (
    AttemptRow,
    CellRow,
    CurvePointRow,
    EventRow,
    ExampleRow,
    MeasurementRow,
    ProvenanceRow,
    RevisionCellRow,
    RevisionRow,
    StudyRow,
    SweepRow,
    TrialRow,
)
from ..store.store import Store
from .finding import some
from .names_tags_notes import Holds, free, held_still, meant, say

OF_ATTEMPTS = (ExampleRow, MeasurementRow, CurvePointRow, ProvenanceRow)
Lives = Callable[[Attempt], bool]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A cell that stays, and why."""

    cell: str
    slug: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """What goes, or has gone."""

    sweeps: Sequence[str]
    cells: Sequence[str]
    """By id: those that go with everything that was measured of them."""
    rows: dict[str, int]
    """By table."""
    gpu_hours: float
    """What the attempts took: hours times GPUs."""
    cpu_hours: float
    """The same of attempts without a GPU."""
    kept: Sequence[Kept]
    asked_by: dict[str, int]
    """By sweep that stays: how many of the cells its grid asks for, so that its next launch trains them again."""
    folders: Sequence[str] = field(repr=False)
    """Of the attempts, relative to the runs folder."""
    places: Sequence[str]
    """Where else they kept checkpoints and weights."""
    bytes: int = 0
    """What lies in the folders; it stays."""
    backup: str | None = None
    deleted: bool = False

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to delete."""
        return not self.sweeps and not self.cells

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        what = [f"sweep {name}" for name in self.sweeps] + ([counted(len(self.cells), "cell")] if self.cells else [])
        lines = [f"{'deleted' if self.deleted else 'to delete'}: {' and '.join(what) or 'nothing'}"]
        if not self.nothing:
            lines.append("  rows: " + ", ".join(f"{count:,} {table}" for table, count in self.rows.items() if count))
            lines.append(f"  measured in: {self.gpu_hours:,.1f} GPU-hours, {self.cpu_hours:,.1f} hours on the CPU")
        for why, cells in _by_reason(self.kept).items():
            lines.append(f"  stays: {counted(len(cells), 'cell')}, {why}: {some(cells)}")
        for sweep, count in self.asked_by.items():
            lines.append(f"  sweep {sweep} asks for {count} of these cells, and its next launch trains them again")
        if self.folders and not self.nothing:
            lines.append(f"  files: {self.bytes / 1e6:,.1f} MB of these attempts stay until atma-sweep gc")
        lines += [f"  files: more lie in {place}; atma-sweep gc --place {place}" for place in self.places]
        return lines


def _by_reason(kept: Iterable[Kept]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in kept:
        found.setdefault(one.why, []).append(one.slug)
    return found


def lives(attempt: Attempt) -> bool:
    """Whether a running attempt's process lives; where that cannot be seen, whether it was heard of not long ago."""
    if here(attempt.host, attempt.pid_space):
        return find(attempt.pid, attempt.pid_started) is not None
    return datetime.now(UTC) - attempt.heartbeat_at < timedelta(seconds=SILENCE_S)


def plan(
    store: Store, names: Sequence[str], *, holds: Holds, lives: Lives = lives, runs: Path | None = None
) -> Deletion:
    """What `delete_all` would delete: each name is a sweep, else a cell by its whole id or its slug.

    A cell of a sweep goes unless another sweep lists it, in any revision; a cell that was named goes unless two sweeps
    list it. `holds` says whether an owner still runs a sweep, `lives` whether an attempt runs; `runs` is where its files lie.
    Raises CellUnknown, CellAmbiguous, SweepBusy (somebody runs a sweep that would lose cells), CellTaken (a cell is being run).
    """
    found = store.write(lambda session: _plan(session, names, holds, lives))  # a write, since it locks
    return (
        replace(found, bytes=sum(bytes_under(runs / folder) for folder in found.folders)) if runs is not None else found
    )


def delete_all(
    store: Store, found: Deletion, names: Sequence[str], *, holds: Holds, who: str, lives: Lives = lives
) -> Deletion:
    """Deletes what `plan` found for the same names, all or nothing; an event tells that `who` did.

    The plan is made again in the same transaction: when it is another by now, StoreError is raised and nothing changes.
    Raises what `plan` does.
    """

    def work(session: Session) -> Deletion:
        now = replace(_plan(session, names, holds, lives), bytes=found.bytes, backup=found.backup)
        if now != found:
            raise StoreError("the sweeps or cells changed meanwhile; nothing was deleted, look again")
        gone = _delete(session, now)
        if gone != +Counter(now.rows):
            raise StoreError(f"{dict(gone)} rows would go and not {now.rows}; nothing was deleted, please report this")
        what = [*(f"sweep {name}" for name in now.sweeps), counted(len(now.cells), "cell")]
        say(session, "deleted", f"{', '.join(what)}, {counted(sum(now.rows.values()), 'row')}, by {who}")
        return replace(now, deleted=True)

    return store.write(work, durable=True)


def alone(session: Session, cell: str, holds: Holds) -> None:
    """Before numbers of a cell are deleted. Raises StoreError where sweeps share it, SweepBusy where somebody runs its sweep."""
    names = sorted(_holders(session, [cell])[cell])
    if len(names) > 1:
        raise StoreError(
            f"sweeps {' and '.join(names)} share cell {cell}, so that its numbers stay; atma-sweep db forget deletes them for all"
        )
    for name in names:
        free(held_still(session, name), holds, "lose numbers")


# --- what goes --------------------------------------------------------------------------------------------------------


def _plan(session: Session, names: Sequence[str], holds: Holds, lives: Lives) -> Deletion:
    targets = list(dict.fromkeys(meant(session, name, whole=True) for name in names))
    sweeps = {name: held_still(session, name) for kind, name in targets if kind == "sweep"}
    for row in sweeps.values():
        free(row, holds, "be deleted")
    doomed = {row.id for row in sweeps.values()}
    named = {name for kind, name in targets if kind == "cell"}
    of_sweeps = set(session.scalars(_linked().where(RevisionRow.sweep_id.in_(doomed))))
    holders = _holders(session, of_sweeps | named)
    why: dict[str, str] = {}
    for cell in sorted(of_sweeps | named):
        others = sorted(holders[cell] - set(sweeps))
        if len(others) > (1 if cell in named else 0):
            why[cell] = f"shared with sweep {' and '.join(others)}"
    cells = (of_sweeps | named) - set(why)
    _keep_parents(session, cells, why)
    losers = sorted({name for cell in cells for name in holders[cell]} - set(sweeps))
    for name in losers:
        free(held_still(session, name), holds, "lose cells")
    attempts = attempts_of(session, cells)
    for one in attempts:
        if one.state == "running" and lives(one):
            raise CellTaken(
                f"cell {one.cell_id} is being run (attempt {one.number}, pid {one.pid} on {one.host}); stop that first"
            )
    hours = _hours(session, cells)
    return Deletion(
        sweeps=tuple(sorted(sweeps)),
        cells=tuple(sorted(cells)),
        rows=_count(session, sorted(cells), doomed),
        gpu_hours=round(hours[True], 3),
        cpu_hours=round(hours[False], 3),
        kept=tuple(Kept(cell=cell, slug=_slug(session, cell), why=said) for cell, said in why.items()),
        asked_by=_asked_by(session, cells, losers),
        folders=tuple(sorted(one.run_dir for one in attempts)),
        places=_places(session, cells),
    )


def _linked() -> Any:
    return select(RevisionCellRow.cell_id).join(RevisionRow, RevisionRow.id == RevisionCellRow.revision_id).distinct()


def _holders(session: Session, cells: Iterable[str]) -> dict[str, set[str]]:
    """By cell: the sweeps that list it, in any revision."""
    found: dict[str, set[str]] = {cell: set() for cell in cells}
    for part in queries.in_parts(sorted(found)):
        query = select(RevisionCellRow.cell_id, SweepRow.name).distinct()
        query = query.join(RevisionRow, RevisionRow.id == RevisionCellRow.revision_id)
        query = query.join(SweepRow, SweepRow.id == RevisionRow.sweep_id)
        for cell, name in session.execute(query.where(RevisionCellRow.cell_id.in_(part))):
            found[cell].add(name)
    return found


def _keep_parents(session: Session, cells: set[str], why: dict[str, str]) -> None:
    """Takes out of `cells` those on whose attempts an attempt of a cell that stays is built."""
    parent = select(AttemptRow.id, AttemptRow.cell_id).subquery()
    query = select(AttemptRow.cell_id, parent.c.cell_id).join(parent, parent.c.id == AttemptRow.parent_id)
    across = list(session.execute(query.where(AttemptRow.cell_id != parent.c.cell_id).distinct()))
    while more := {above: below for below, above in across if above in cells and below not in cells}:
        cells -= set(more)
        why |= {above: f"on whose weights cell {below} was measured" for above, below in more.items()}


def _hours(session: Session, cells: Iterable[str]) -> dict[bool, float]:
    found = {True: 0.0, False: 0.0}
    for part in queries.in_parts(sorted(cells)):
        query = select(AttemptRow.started_at, AttemptRow.finished_at, AttemptRow.heartbeat_at, ProvenanceRow.gpu_count)
        query = query.outerjoin(ProvenanceRow, ProvenanceRow.attempt_id == AttemptRow.id)
        for began, ended, heard, gpus in session.execute(query.where(AttemptRow.cell_id.in_(part))):
            found[bool(gpus)] += max(gpus or 0, 1) * ((ended or heard) - began).total_seconds() / 3600
    return found


def _slug(session: Session, cell: str) -> str:
    return session.scalars(select(CellRow.slug).where(CellRow.id == cell)).one()


def _asked_by(session: Session, cells: set[str], sweeps: Iterable[str]) -> dict[str, int]:
    newest = {name: queries.revision_row(session, queries.sweep_row(session, name).id).id for name in sweeps}
    asked = {name: len(cells & {cell for cell, _ in queries.members(session, row)}) for name, row in newest.items()}
    return {name: count for name, count in asked.items() if count}


def _places(session: Session, cells: Iterable[str]) -> tuple[str, ...]:
    found = set()
    for part in queries.in_parts(sorted(cells)):
        query = select(ProvenanceRow.config).join(AttemptRow, AttemptRow.id == ProvenanceRow.attempt_id)
        query = query.where(AttemptRow.cell_id.in_(part), AttemptRow.imported.is_(False))
        found |= {config.get("checkpoint", {}).get("path") for config in session.scalars(query)}
    return tuple(sorted(place for place in found if place))


# --- the rows ---------------------------------------------------------------------------------------------------------


def _conditions(cells: Sequence[str], sweeps: Iterable[int]) -> Iterable[tuple[Any, Any]]:
    """(table, condition) of the rows that go, in an order in which nothing is left that refers to what is gone."""
    doomed = list(sweeps)
    revisions = select(RevisionRow.id).where(RevisionRow.sweep_id.in_(doomed))
    yield EventRow, EventRow.sweep_id.in_(doomed)
    yield RevisionCellRow, RevisionCellRow.revision_id.in_(revisions)
    yield TrialRow, TrialRow.sweep_id.in_(doomed)
    yield StudyRow, StudyRow.sweep_id.in_(doomed)
    for part in queries.in_parts(cells):
        attempts = select(AttemptRow.id).where(AttemptRow.cell_id.in_(part))
        for table in OF_ATTEMPTS:
            yield table, table.attempt_id.in_(attempts)
        about = or_(EventRow.cell_id.in_(part), EventRow.attempt_id.in_(attempts))
        yield EventRow, and_(about, EventRow.sweep_id.is_(None))
        listed = and_(RevisionCellRow.cell_id.in_(part), RevisionCellRow.revision_id.not_in(revisions))
        yield RevisionCellRow, listed
    for part in queries.in_parts(cells):
        yield AttemptRow, AttemptRow.cell_id.in_(part)
    for part in queries.in_parts(cells):
        yield CellRow, CellRow.id.in_(part)
    yield RevisionRow, RevisionRow.sweep_id.in_(doomed)
    yield SweepRow, SweepRow.id.in_(doomed)


def _count(session: Session, cells: Sequence[str], sweeps: Iterable[int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for table, condition in _conditions(cells, sweeps):
        found[table.__tablename__] += session.scalar(select(func.count()).select_from(table).where(condition)) or 0
    return dict(found)


def _delete(session: Session, found: Deletion) -> Counter[str]:
    """Deletes the rows; by table, how many went."""
    sweeps = list(session.scalars(select(SweepRow.id).where(SweepRow.name.in_(found.sweeps))))
    for part in queries.in_parts(found.cells):
        attempts = select(AttemptRow.id).where(AttemptRow.cell_id.in_(part))
        # what happened to a sweep that stays, stays; and an attempt may go before its parent
        kept = and_(EventRow.sweep_id.is_not(None), EventRow.sweep_id.not_in(sweeps))
        about = or_(EventRow.cell_id.in_(part), EventRow.attempt_id.in_(attempts))
        session.execute(update(EventRow).where(kept, about).values(cell_id=None, attempt_id=None), **_UNSEEN)
        session.execute(update(AttemptRow).where(AttemptRow.cell_id.in_(part)).values(parent_id=None), **_UNSEEN)
        # a proposal stays, and its cell is trained again should the study go on
        again = dict.fromkeys(("cell_id", "reason", "objectives", "curve", "ended_at"))
        session.execute(update(TrialRow).where(TrialRow.cell_id.in_(part)).values(standing="asked", **again), **_UNSEEN)
    gone: Counter[str] = Counter()
    for table, condition in _conditions(found.cells, sweeps):
        done = session.execute(delete(table).where(condition), **_UNSEEN)
        assert isinstance(done, CursorResult)
        gone[table.__tablename__] += done.rowcount
    return +gone


_UNSEEN: dict[str, Any] = {"execution_options": {"synchronize_session": False}}
