"""Deleting sweeps, cells and single measurements: in one transaction, and never what another sweep shares.

Nothing is deleted before it was counted and shown, and the list says which sweeps ask for it and will want it again. Files stay
where they are: nobody owns them afterwards, and gc finds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import CursorResult, and_, delete, func, or_, select, update
from sqlalchemy.orm import Session

from ..console.output_files import size_on_disk
from ..console.text import counted, did_you_mean
from ..errors import CellAlreadyRunning, StoreError, SweepReadOnly
from ..metrics import METRICS
from ..names import quoted_short
from ..store import queries
from ..store.attempt_queries import attempts_of
from ..store.records import Attempt, Standing, requests_from_options, standing
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
from ..store.store import Store, record_event
from ..store.sweep_lease import lock_sweep_row
from .finding import some
from .names_tags_notes import OwnerIsActive, free, resolve_target
from .walk import ATTEMPT, PROVENANCE, attempt_is_alive, attempts

ATTEMPT_ROW_CLASSES = (ExampleRow, MeasurementRow, CurvePointRow, ProvenanceRow)
AttemptIsAlive = Callable[[Attempt], bool]
Condition = tuple[Any, Any]
"""A table, and which of its rows go."""
_UNSEEN: dict[str, Any] = {"execution_options": {"synchronize_session": False}}


@dataclass(frozen=True, kw_only=True)
class RetainedCell:
    """A cell that stays, and why."""

    cell: str
    slug: str
    why: str


@dataclass(frozen=True, kw_only=True)
class DeletionPlan:
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
    kept: Sequence[RetainedCell]
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


def _by_reason(kept: Iterable[RetainedCell]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in kept:
        found.setdefault(one.why, []).append(one.slug)
    return found


def plan(
    store: Store,
    names: Sequence[str],
    *,
    holds: OwnerIsActive,
    lives: AttemptIsAlive = attempt_is_alive,
    runs: Path | None = None,
) -> DeletionPlan:
    """What `execute_deletion` would delete: each name is a sweep, else a cell by its whole id or its slug.

    A cell of a sweep goes unless another sweep lists it, in any revision; a cell that was named goes unless two sweeps
    list it. `holds` says whether an owner still runs a sweep, `attempt_is_alive` whether an attempt runs; `runs` is where its files lie.
    Raises CellUnknown, CellAmbiguous, SweepBusy (somebody runs a sweep that would lose cells), CellTaken (a cell is being run).
    """
    found = store.write(lambda session: _plan(session, names, holds, lives))  # a write, since it locks
    return replace(found, bytes=sum(size_on_disk(runs / folder) for folder in found.folders)) if runs else found


def execute_deletion(
    store: Store,
    found: DeletionPlan,
    names: Sequence[str],
    *,
    holds: OwnerIsActive,
    who: str,
    lives: AttemptIsAlive = attempt_is_alive,
) -> DeletionPlan:
    """Deletes what `plan` found for the same names, all or nothing; an event tells that `who` did.

    The plan is made again in the same transaction: when it is another by now, StoreError is raised and nothing changes.
    Raises what `plan` does.
    """

    def work(session: Session) -> DeletionPlan:
        now = replace(_plan(session, names, holds, lives), bytes=found.bytes, backup=found.backup)
        if now != found:
            raise StoreError("the sweeps or cells changed meanwhile; nothing was deleted, look again")
        gone = _delete(session, now)
        if gone != +Counter(now.rows):
            raise StoreError(f"{dict(gone)} rows would go and not {now.rows}; nothing was deleted, please report this")
        what = [*(f"sweep {name}" for name in now.sweeps), counted(len(now.cells), "cell")]
        record_event(session, "deleted", f"{', '.join(what)}, {counted(sum(now.rows.values()), 'row')}, by {who}")
        return replace(now, deleted=True)

    return store.write(work, durable=True)


def require_unshared(session: Session, cell: str, holds: OwnerIsActive) -> None:
    """Before numbers of a cell are deleted. Raises StoreError where sweeps share it, SweepBusy where somebody runs its sweep."""
    names = sorted(_holders(session, [cell])[cell])
    if len(names) > 1:
        raise StoreError(
            f"sweeps {' and '.join(names)} share cell {cell}, so that its numbers stay; atma-sweep db forget deletes them for all"
        )
    for name in names:
        free(lock_sweep_row(session, name), holds, "lose numbers")


# --- what goes --------------------------------------------------------------------------------------------------------


def _plan(session: Session, names: Sequence[str], holds: OwnerIsActive, lives: AttemptIsAlive) -> DeletionPlan:
    targets = list(dict.fromkeys(resolve_target(session, name, whole=True) for name in names))
    sweeps = {name: lock_sweep_row(session, name) for kind, name in targets if kind == "sweep"}
    for row in sweeps.values():
        free(row, holds, "be deleted")
    doomed = {row.id for row in sweeps.values()}
    named = {name for kind, name in targets if kind == "cell"}
    listed = select(RevisionCellRow.cell_id).join(RevisionRow, RevisionRow.id == RevisionCellRow.revision_id)
    of_sweeps = set(session.scalars(listed.where(RevisionRow.sweep_id.in_(doomed)).distinct()))
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
        free(lock_sweep_row(session, name), holds, "lose cells")
    tried = attempts_of(session, cells)
    for one in tried:
        if one.state == "running" and lives(one):
            raise CellAlreadyRunning(
                f"cell {one.cell_id} is being run (attempt {one.number}, pid {one.pid} on {one.host}); stop that first"
            )
    hours, places = _cost(session, cells)
    slugs = dict(map(tuple, queries.rows_in(session, select(CellRow.id, CellRow.slug), CellRow.id, why)))
    return DeletionPlan(
        sweeps=tuple(sorted(sweeps)),
        cells=tuple(sorted(cells)),
        rows=_count(session, sorted(cells), doomed),
        gpu_hours=round(hours[True], 3),
        cpu_hours=round(hours[False], 3),
        kept=tuple(RetainedCell(cell=cell, slug=slugs[cell], why=said) for cell, said in why.items()),
        asked_by=_asking(session, cells, losers),
        folders=tuple(sorted(one.run_dir for one in tried)),
        places=tuple(sorted(places)),
    )


def _holders(session: Session, cells: Iterable[str]) -> dict[str, set[str]]:
    """By cell: the sweeps that list it, in any revision."""
    found: dict[str, set[str]] = {cell: set() for cell in cells}
    query = select(RevisionCellRow.cell_id, SweepRow.name).distinct()
    query = query.join(RevisionRow, RevisionRow.id == RevisionCellRow.revision_id)
    query = query.join(SweepRow, SweepRow.id == RevisionRow.sweep_id)
    for cell, name in queries.rows_in(session, query, RevisionCellRow.cell_id, sorted(found)):
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


def _cost(session: Session, cells: Iterable[str]) -> tuple[dict[bool, float], set[str]]:
    """Return the hours of these cells' attempts, times GPUs, by whether they had any; and where else they kept checkpoints."""
    hours, places = {True: 0.0, False: 0.0}, set()
    times = (ATTEMPT.started_at, ATTEMPT.finished_at, ATTEMPT.heartbeat_at, ATTEMPT.imported)
    for one in attempts(session, *times, PROVENANCE.gpu_count, PROVENANCE.config, cells=[*cells]):
        took = (one.finished_at or one.heartbeat_at) - one.started_at
        hours[bool(one.gpu_count)] += max(one.gpu_count or 0, 1) * took.total_seconds() / 3600
        place = (one.config or {}).get("checkpoint", {}).get("path")
        if place and not one.imported:
            places.add(place)
    return hours, places


def _asking(session: Session, cells: set[str], sweeps: Iterable[str]) -> dict[str, int]:
    """By sweep: how many of these cells its newest revision lists, where it lists any."""
    asked = {name: len(cells & {cell for cell, _ in queries.newest_members(session, name)}) for name in sweeps}
    return {name: count for name, count in asked.items() if count}


# --- the rows ---------------------------------------------------------------------------------------------------------


def _conditions(cells: Sequence[str], sweeps: Iterable[int]) -> Iterable[Condition]:
    """(table, condition) of the rows that go, in an order in which nothing is left that refers to what is gone."""
    doomed = list(sweeps)
    revisions = select(RevisionRow.id).where(RevisionRow.sweep_id.in_(doomed))
    yield EventRow, EventRow.sweep_id.in_(doomed)
    yield RevisionCellRow, RevisionCellRow.revision_id.in_(revisions)
    yield TrialRow, TrialRow.sweep_id.in_(doomed)
    yield StudyRow, StudyRow.sweep_id.in_(doomed)
    for part in queries.in_parts(cells):
        attempts = select(AttemptRow.id).where(AttemptRow.cell_id.in_(part))
        for table in ATTEMPT_ROW_CLASSES:
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


def _delete(session: Session, found: DeletionPlan) -> Counter[str]:
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
    return _removed(session, _conditions(found.cells, sweeps))


def _removed(session: Session, conditions: Iterable[Condition]) -> Counter[str]:
    """Delete rows; by table, how many went."""
    gone: Counter[str] = Counter()
    for table, condition in conditions:
        done = session.execute(delete(table).where(condition), **_UNSEEN)
        assert isinstance(done, CursorResult)
        gone[table.__tablename__] += done.rowcount
    return +gone


# --- measurements of one cell ---


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Measurements by probe, context length and metric; of an empty one all."""

    probes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()

    def where(self, table: Any, attempts: Sequence[int]) -> Any:
        """The condition of a table's rows that belong to these attempts and are selected."""
        pairs = (table.probe, self.probes), (table.length, self.lengths), (table.metric, self.metrics)
        return and_(table.attempt_id.in_(attempts), *(column.in_(values) for column, values in pairs if values))

    def holds(self, probe: str, metric: str, length: int) -> bool:
        """Return True if a measurement is selected."""
        pairs = (probe, self.probes), (length, self.lengths), (metric, self.metrics)
        return all(value in values for value, values in pairs if values)


@dataclass(frozen=True, kw_only=True)
class MeasurementCount:
    """What goes of one probe at one length: numbers (in how many attempts) and the single items behind them."""

    probe: str
    length: int
    measurements: int
    attempts: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class MeasurementDeletion:
    """What would be deleted of a cell, and `asked_by`: the sweeps that ask for it, with where the cell then stands in them."""

    cell: str
    slug: str
    rows: Sequence[MeasurementCount]
    asked_by: dict[str, Standing]
    deleted: bool = False
    selection: Selection = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: value for name, value in asdict(self).items() if name != "selection"}

    def lines(self) -> list[str]:
        """For people."""
        if not self.rows:
            return [f"{self.cell} {self.slug}: nothing of that is measured"]
        said = "deleted" if self.deleted else "to delete"
        lines = [f"{self.cell} {self.slug}, {said}:"]
        for row in self.rows:
            at = f" at {row.length}" if row.length else ""
            items = f", {counted(row.examples, 'item')} behind them" if row.examples else ""
            lines.append(
                f"  {row.probe}{at}: {counted(row.measurements, 'number')} of {counted(row.attempts, 'attempt')}{items}"
            )
        for sweep, then in self.asked_by.items():
            how = {
                "needs-eval": "becomes needs-eval, and the next launch measures it again",
                "weights gone": "becomes `weights gone`: it can be measured again only after a launch with --retrain",
            }.get(then, f"is {then}")
            lines.append(f"  sweep {sweep} asks for it: there the cell {how}")
        return lines


def plan_measurements(
    store: Store,
    cell: str,
    *,
    probes: Sequence[str] = (),
    lengths: Sequence[int] = (),
    metrics: Sequence[str] = (),
    sweep: str | None = None,
) -> MeasurementDeletion:
    """What `forget` would delete: the numbers of finished attempts of the cell, of these probes, lengths and metrics.

    None of one means all of them, but not of all three. Raises CellUnknown, CellAmbiguous, SweepUnknown, StoreError (neither
    probe nor length, or a length that no number can have), SweepReadOnly for a cell of imported or published sweeps alone.
    """
    if not probes and not lengths and not metrics:
        raise StoreError(
            "say which measurements: --probe NAME, --length TOKENS (0 for those without a length), or both"
        )
    if wrong := [length for length in lengths if not 0 <= length < 2**31]:
        raise StoreError(
            f"--length {wrong[0]}: no measurement has such a length; atma-sweep show lists those of a cell"
        )
    selection = Selection(probes=tuple(probes), lengths=tuple(lengths), metrics=tuple(metrics))
    return store.read(_forgetting, store.find_cell(cell, sweep).id, selection)


def forget(
    store: Store, found: MeasurementDeletion, *, who: str, check: Callable[[Session], None] = lambda session: None
) -> MeasurementDeletion:
    """Deletes what `plan_measurements` found, at once, and notes in an event that `who` did; returns what was there to delete.

    The plan is made again in the same transaction: when it is another by now, StoreError is raised and nothing changes.
    `check` is called in that transaction, too, and may refuse by raising.
    """

    def work(session: Session) -> MeasurementDeletion:
        check(session)
        now = _forgetting(session, found.cell, found.selection)
        if now != found:
            raise StoreError(
                f"the measurements of cell {found.cell} changed meanwhile; nothing was deleted, look again"
            )
        attempts = _finished(session, found.cell)
        _removed(session, [(table, now.selection.where(table, attempts)) for table in (ExampleRow, MeasurementRow)])
        what = ", ".join(f"{row.probe}{f' at {row.length}' if row.length else ''}" for row in now.rows)
        count = sum(row.measurements for row in now.rows)
        record_event(session, "forgot", f"{counted(count, 'number')} deleted by {who}: {what}", cell_id=found.cell)
        return replace(now, deleted=True)

    return store.write(work)


def _finished(session: Session, cell: str) -> list[int]:
    """Ids of the attempts of a cell that do not run."""
    return [row.id for row in attempts(session, ATTEMPT.id, ATTEMPT.state, cells=[cell]) if row.state != "running"]


def _forgetting(session: Session, cell: str, selection: Selection) -> MeasurementDeletion:
    """Look up what is selected of a cell, and who asks for it."""
    attempts = _finished(session, cell)
    key = (MeasurementRow.probe, MeasurementRow.length)
    numbers = select(*key, func.count(), func.count(MeasurementRow.attempt_id.distinct())).group_by(*key)
    items_key = (ExampleRow.probe, ExampleRow.length)
    items = select(*items_key, func.count()).group_by(*items_key).where(selection.where(ExampleRow, attempts))
    behind = {(probe, length): count for probe, length, count in session.execute(items)}
    rows = [
        MeasurementCount(
            probe=probe, length=length, measurements=count, attempts=of, examples=behind.get((probe, length), 0)
        )
        for probe, length, count, of in session.execute(
            numbers.where(selection.where(MeasurementRow, attempts)).order_by(*key)
        )
    ]
    if not rows:
        _check_names(session, cell, attempts, selection)
    slug, asked_by = _asked_by(session, cell, {(row.probe, row.length) for row in rows}, selection)
    return MeasurementDeletion(cell=cell, slug=slug, rows=rows, asked_by=asked_by, selection=selection)


def _check_names(session: Session, cell: str, attempts: Sequence[int], selection: Selection) -> None:
    """Raise StoreError for a probe or metric that neither the cell has numbers of nor this release knows."""
    for option, names, column in (
        ("--probe", selection.probes, MeasurementRow.probe),
        ("--metric", selection.metrics, MeasurementRow.metric),
    ):
        own = sorted(session.scalars(select(column).distinct().where(MeasurementRow.attempt_id.in_(attempts))))
        standard = {pair[option == "--metric"] for pair in METRICS}
        for name in names:
            if name not in own and name not in standard:
                listed = f"; it has: {', '.join(own)}" if own else ""
                hint = did_you_mean(name, own or standard)
                raise StoreError(f"{option} {quoted_short(name)}: cell {cell} has no such numbers{listed}{hint}")


def _asked_by(
    session: Session, cell: str, gone: set[tuple[str, int]], selection: Selection
) -> tuple[str, dict[str, Standing]]:
    """The cell's slug, and by sweep whose newest revision asks for any of it: where the cell stands without."""
    newest = select(func.max(RevisionRow.id)).group_by(RevisionRow.sweep_id)
    query = select(SweepRow.name, SweepRow.read_only, RevisionRow.options).join_from(SweepRow, RevisionRow)
    query = query.join(RevisionCellRow, RevisionCellRow.revision_id == RevisionRow.id)
    query = query.where(RevisionRow.id.in_(newest), RevisionCellRow.cell_id == cell).order_by(SweepRow.name)
    holders = list(session.execute(query))
    if holders and all(read_only for _, read_only, _ in holders):
        names = ", ".join(name for name, _, _ in holders)
        raise SweepReadOnly(f"cell {cell} belongs to {names} alone, whose numbers were imported; they stay as they are")
    slug, found = queries.cell(session, cell).slug, {}
    for state in queries.states(session, [cell]):
        without = replace(state, measured=frozenset(key for key in state.measured if not selection.holds(*key)))
        asked = {name: requests_from_options(options) for name, _, options in holders}
        found = {name: standing(without, pairs) for name, pairs in asked.items() if gone & set(pairs)}
    return slug, found
