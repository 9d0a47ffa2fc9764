"""Deletion of sweeps, cells and single measurements, never of data that another sweep shares.

A deletion is one transaction. Rows are counted and shown before they are deleted, and the list names the sweeps that
still request them. Files stay on the disk; the command gc finds them later.
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
from ..store.records import Attempt, CellStanding, requests_from_options, standing
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
from .finding import first_names
from .names_tags_notes import OwnerIsActive, require_idle, resolve_target
from .walk import ATTEMPT, PROVENANCE, attempt_is_alive, attempts

ATTEMPT_ROW_CLASSES = (ExampleRow, MeasurementRow, CurvePointRow, ProvenanceRow)
AttemptIsAlive = Callable[[Attempt], bool]
Condition = tuple[Any, Any]
"""A table, and the condition of the rows to delete."""
_WITHOUT_SYNC: dict[str, Any] = {"execution_options": {"synchronize_session": False}}


@dataclass(frozen=True, kw_only=True)
class RetainedCell:
    """A cell that is not deleted, and the reason."""

    cell: str
    slug: str
    why: str


@dataclass(frozen=True, kw_only=True)
class DeletionPlan:
    """A planned or executed deletion: sweeps, cells, row counts and cost."""

    sweeps: Sequence[str]
    cells: Sequence[str]
    """Ids of the cells that are deleted with all their measurements."""
    rows: dict[str, int]
    """Number of rows by table."""
    gpu_hours: float
    """Cost of the attempts: hours times GPUs."""
    cpu_hours: float
    """Hours of the attempts without a GPU."""
    kept: Sequence[RetainedCell]
    asked_by: dict[str, int]
    """Number of deleted cells that the grid of each remaining sweep requests; its next launch trains them again."""
    folders: Sequence[str] = field(repr=False)
    """Folders of the attempts, relative to the runs folder."""
    places: Sequence[str]
    """Other folders with checkpoints and weights of the attempts."""
    bytes: int = 0
    """Size of the folders; they are not deleted."""
    backup: str | None = None
    deleted: bool = False

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to delete."""
        return not self.sweeps and not self.cells

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain values: mappings, tuples, texts and numbers."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the plan as lines for the user.

        They name sweeps and number of cells, rows by table, cost, retained cells by reason, sweeps that request deleted
        cells, and files that stay. `deleted` decides the tense.
        """
        subjects = [f"sweep {name}" for name in self.sweeps] + (
            [counted(len(self.cells), "cell")] if self.cells else []
        )
        lines = [f"{'deleted' if self.deleted else 'to delete'}: {' and '.join(subjects) or 'nothing'}"]
        if not self.is_empty:
            lines.append("  rows: " + ", ".join(f"{count:,} {table}" for table, count in self.rows.items() if count))
            lines.append(
                f"  cost of these measurements: {self.gpu_hours:,.1f} GPU-hours, {self.cpu_hours:,.1f} hours on the CPU"
            )
        for reason, cells in _by_reason(self.kept).items():
            lines.append(f"  stays: {counted(len(cells), 'cell')}, {reason}: {first_names(cells)}")
        for sweep, count in self.asked_by.items():
            lines.append(f"  sweep {sweep} has {count} of these cells in its grid; its next launch trains them again")
        if self.folders and not self.is_empty:
            lines.append(f"  files: {self.bytes / 1e6:,.1f} MB of these attempts remain; atma-sweep gc removes them")
        lines += [f"  files: more in {path}; atma-sweep gc --place {path} removes them" for path in self.places]
        return lines


def _by_reason(cells: Iterable[RetainedCell]) -> dict[str, list[str]]:
    """Return the slugs of the cells by reason, both in the order of `cells`."""
    slugs_by_reason: dict[str, list[str]] = {}
    for cell in cells:
        slugs_by_reason.setdefault(cell.why, []).append(cell.slug)
    return slugs_by_reason


def plan_deletion(
    store: Store,
    names: Sequence[str],
    *,
    holds: OwnerIsActive,
    is_alive: AttemptIsAlive = attempt_is_alive,
    runs: Path | None = None,
) -> DeletionPlan:
    """Return the plan of a deletion; deletes nothing, but takes the write lock for a moment.

    A cell of a deleted sweep is deleted unless another sweep lists it, in any revision. A cell that was named is
    deleted unless two sweeps that stay list it. Cells whose weights were used to measure a remaining cell are retained.

    Args:
        store: database.
        names: sweeps, or cells by complete id or slug; a name of both means the sweep. Duplicates count once.
        holds: returns True if an owner still runs a sweep, given the end of its lease.
        is_alive: returns True if a running attempt's process is alive.
        runs: runs folder, to measure the size of the files; None skips that (size 0).

    Raises:
        CellUnknown: a name is neither a sweep nor a cell.
        CellAmbiguous: a name matches several cells.
        SweepBusy: a sweep that would lose cells is being run.
        CellAlreadyRunning: a cell is being run.
    """
    deletion = store.write(lambda session: _plan(session, names, holds, is_alive))  # a write, since it locks
    return (
        replace(deletion, bytes=sum(size_on_disk(runs / folder) for folder in deletion.folders)) if runs else deletion
    )


def execute_deletion(
    store: Store,
    planned: DeletionPlan,
    names: Sequence[str],
    *,
    holds: OwnerIsActive,
    who: str,
    is_alive: AttemptIsAlive = attempt_is_alive,
) -> DeletionPlan:
    """Delete the planned rows, all or nothing, record the event `deleted`, and return the executed plan.

    The plan is computed again in the same transaction, which is durable. No file is deleted. Raises what
    `plan_deletion` does.

    Args:
        store: database.
        planned: result of `plan_deletion`; its size and `backup` are taken over.
        names: the same names as for the plan.
        holds: as for the plan.
        who: user, for the event.
        is_alive: as for the plan.

    Returns:
        The plan with `deleted` True.

    Raises:
        StoreError: the plan is no longer the same, or other rows than planned would go; nothing was deleted.
    """

    def work(session: Session) -> DeletionPlan:
        """Compute the plan again, compare it, delete its rows, record the event, and return the executed plan."""
        current = replace(_plan(session, names, holds, is_alive), bytes=planned.bytes, backup=planned.backup)
        if current != planned:
            raise StoreError("the sweeps or cells changed meanwhile; nothing was deleted; run again")
        deleted_rows = _delete_planned(session, current)
        if deleted_rows != +Counter(current.rows):
            raise StoreError(
                f"internal error: {dict(deleted_rows)} rows would be deleted instead of {current.rows}; nothing "
                "was deleted; please report this"
            )
        subjects = [*(f"sweep {name}" for name in current.sweeps), counted(len(current.cells), "cell")]
        record_event(
            session, "deleted", f"{', '.join(subjects)}, {counted(sum(current.rows.values()), 'row')}, by {who}"
        )
        return replace(current, deleted=True)

    return store.write(work, durable=True)


def require_unshared(session: Session, cell: str, is_active: OwnerIsActive) -> None:
    """Raise an error unless measurements of a cell may be deleted, and lock its sweep until the transaction ends.

    A cell that no sweep lists passes.

    Args:
        session: open session.
        cell: cell id.
        is_active: returns True if an owner still runs a sweep, given the end of its lease.

    Raises:
        StoreError: several sweeps share the cell, in any revision.
        SweepBusy: its sweep is being run.
    """
    names = sorted(_sweeps_by_cell(session, [cell])[cell])
    if len(names) > 1:
        raise StoreError(
            f"sweeps {' and '.join(names)} share cell {cell}, so its numbers were not deleted; atma-sweep db "
            "forget deletes them for all sweeps"
        )
    for name in names:
        require_idle(lock_sweep_row(session, name), is_active, "lose numbers")


# --- what goes --------------------------------------------------------------------------------------------------------


def _plan(session: Session, names: Sequence[str], is_active: OwnerIsActive, is_alive: AttemptIsAlive) -> DeletionPlan:
    """Compute the plan in a session, and lock the rows of the affected sweeps until the transaction ends.

    `is_active` is `holds` of `plan_deletion`; the other arguments and the errors are those of `plan_deletion`. The size
    of the files stays 0.
    """
    targets = list(dict.fromkeys(resolve_target(session, name, complete=True) for name in names))
    sweeps = {name: lock_sweep_row(session, name) for kind, name in targets if kind == "sweep"}
    for row in sweeps.values():
        require_idle(row, is_active, "be deleted")
    sweep_ids = {row.id for row in sweeps.values()}
    named = {name for kind, name in targets if kind == "cell"}
    listed = select(RevisionCellRow.cell_id).join(RevisionRow, RevisionRow.id == RevisionCellRow.revision_id)
    of_sweeps = set(session.scalars(listed.where(RevisionRow.sweep_id.in_(sweep_ids)).distinct()))
    holders = _sweeps_by_cell(session, of_sweeps | named)
    retained: dict[str, str] = {}
    for cell in sorted(of_sweeps | named):
        remaining_sweeps = sorted(holders[cell] - set(sweeps))
        if len(remaining_sweeps) > (1 if cell in named else 0):
            retained[cell] = f"shared with sweep {' and '.join(remaining_sweeps)}"
    cells = (of_sweeps | named) - set(retained)
    _retain_parents(session, cells, retained)
    losers = sorted({name for cell in cells for name in holders[cell]} - set(sweeps))
    for name in losers:
        require_idle(lock_sweep_row(session, name), is_active, "lose cells")
    cell_attempts = attempts_of(session, cells)
    for attempt in cell_attempts:
        if attempt.state == "running" and is_alive(attempt):
            raise CellAlreadyRunning(
                f"cell {attempt.cell_id} is running (attempt {attempt.number}, pid {attempt.pid} on "
                f"{attempt.host}); stop it first"
            )
    hours, checkpoint_folders = _cost(session, cells)
    slugs = dict(map(tuple, queries.rows_in(session, select(CellRow.id, CellRow.slug), CellRow.id, retained)))
    return DeletionPlan(
        sweeps=tuple(sorted(sweeps)),
        cells=tuple(sorted(cells)),
        rows=_count_rows(session, sorted(cells), sweep_ids),
        gpu_hours=round(hours[True], 3),
        cpu_hours=round(hours[False], 3),
        kept=tuple(RetainedCell(cell=cell, slug=slugs[cell], why=reason) for cell, reason in retained.items()),
        asked_by=_requested_counts(session, cells, losers),
        folders=tuple(sorted(attempt.run_dir for attempt in cell_attempts)),
        places=tuple(sorted(checkpoint_folders)),
    )


def _sweeps_by_cell(session: Session, cells: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of the sweeps that list each cell, in any revision; an empty set for a cell without any."""
    sweeps_by_cell: dict[str, set[str]] = {cell: set() for cell in cells}
    query = select(RevisionCellRow.cell_id, SweepRow.name).distinct()
    query = query.join(RevisionRow, RevisionRow.id == RevisionCellRow.revision_id)
    query = query.join(SweepRow, SweepRow.id == RevisionRow.sweep_id)
    for cell, name in queries.rows_in(session, query, RevisionCellRow.cell_id, sorted(sweeps_by_cell)):
        sweeps_by_cell[cell].add(name)
    return sweeps_by_cell


def _retain_parents(session: Session, cells: set[str], retained: dict[str, str]) -> None:
    """Move cells from `cells` to `retained` if an attempt of a remaining cell has one of their attempts as parent.

    Changes both arguments; repeats until nothing moves, since a moved cell remains itself.

    Args:
        session: open session.
        cells: ids of the cells to delete.
        retained: reason by cell id.
    """
    parent = select(AttemptRow.id, AttemptRow.cell_id).subquery()
    query = select(AttemptRow.cell_id, parent.c.cell_id).join(parent, parent.c.id == AttemptRow.parent_id)
    parent_links = list(session.execute(query.where(AttemptRow.cell_id != parent.c.cell_id).distinct()))
    while more := {above: below for below, above in parent_links if above in cells and below not in cells}:
        cells -= set(more)
        retained |= {above: f"its weights were used to measure cell {below}" for above, below in more.items()}


def _cost(session: Session, cells: Iterable[str]) -> tuple[dict[bool, float], set[str]]:
    """Return the cost of these cells' attempts, and the other folders with their checkpoints.

    An attempt lasts until its end, or its last heartbeat while it has none; attempts of every state and kind count,
    also imported ones.

    Returns:
        Hours times GPUs by whether the attempt had a GPU (True, False; without a GPU plain hours); and the configured
        checkpoint folders of attempts that were not imported.
    """
    hours, checkpoint_folders = {True: 0.0, False: 0.0}, set()
    times = (ATTEMPT.started_at, ATTEMPT.finished_at, ATTEMPT.heartbeat_at, ATTEMPT.imported)
    for attempt in attempts(session, *times, PROVENANCE.gpu_count, PROVENANCE.config, cells=[*cells]):
        duration = (attempt.finished_at or attempt.heartbeat_at) - attempt.started_at
        hours[bool(attempt.gpu_count)] += max(attempt.gpu_count or 0, 1) * duration.total_seconds() / 3600
        folder = (attempt.config or {}).get("checkpoint", {}).get("path")
        if folder and not attempt.imported:
            checkpoint_folders.add(folder)
    return hours, checkpoint_folders


def _requested_counts(session: Session, cells: set[str], sweeps: Iterable[str]) -> dict[str, int]:
    """Return the number of these cells that the newest revision of each sweep lists; sweeps without any are absent."""
    n_cells = {name: len(cells & {cell for cell, _ in queries.newest_members(session, name)}) for name in sweeps}
    return {name: count for name, count in n_cells.items() if count}


# --- the rows ---------------------------------------------------------------------------------------------------------


def _conditions(cells: Sequence[str], sweeps: Iterable[int]) -> Iterable[Condition]:
    """Yield (table, condition) of the rows to delete, children before the rows that they refer to.

    A table may come several times, with conditions that exclude each other.

    Args:
        cells: ids of the cells to delete.
        sweeps: ids of the sweeps to delete.
    """
    sweep_ids = list(sweeps)
    revisions = select(RevisionRow.id).where(RevisionRow.sweep_id.in_(sweep_ids))
    yield EventRow, EventRow.sweep_id.in_(sweep_ids)
    yield RevisionCellRow, RevisionCellRow.revision_id.in_(revisions)
    yield TrialRow, TrialRow.sweep_id.in_(sweep_ids)
    yield StudyRow, StudyRow.sweep_id.in_(sweep_ids)
    for part in queries.chunked(cells):
        attempts = select(AttemptRow.id).where(AttemptRow.cell_id.in_(part))
        for table in ATTEMPT_ROW_CLASSES:
            yield table, table.attempt_id.in_(attempts)
        concerns_cells = or_(EventRow.cell_id.in_(part), EventRow.attempt_id.in_(attempts))
        yield EventRow, and_(concerns_cells, EventRow.sweep_id.is_(None))
        listed = and_(RevisionCellRow.cell_id.in_(part), RevisionCellRow.revision_id.not_in(revisions))
        yield RevisionCellRow, listed
    for part in queries.chunked(cells):
        yield AttemptRow, AttemptRow.cell_id.in_(part)
    for part in queries.chunked(cells):
        yield CellRow, CellRow.id.in_(part)
    yield RevisionRow, RevisionRow.sweep_id.in_(sweep_ids)
    yield SweepRow, SweepRow.id.in_(sweep_ids)


def _count_rows(session: Session, cells: Sequence[str], sweeps: Iterable[int]) -> dict[str, int]:
    """Return the number of rows to delete, by table; a table may have 0.

    `cells` are cell ids, `sweeps` ids of sweeps.
    """
    counts: Counter[str] = Counter()
    for table, condition in _conditions(cells, sweeps):
        counts[table.__tablename__] += session.scalar(select(func.count()).select_from(table).where(condition)) or 0
    return dict(counts)


def _delete_planned(session: Session, planned: DeletionPlan) -> Counter[str]:
    """Delete the planned rows and return their number by table; tables without any are absent.

    Events of retained sweeps lose their reference to the cells. Attempts lose their parents first. Trials of deleted
    cells are reset to `asked`, so that a study can train them again.
    """
    sweeps = list(session.scalars(select(SweepRow.id).where(SweepRow.name.in_(planned.sweeps))))
    for part in queries.chunked(planned.cells):
        attempts = select(AttemptRow.id).where(AttemptRow.cell_id.in_(part))
        # events of retained sweeps stay, and an attempt may be deleted before its parent
        of_retained_sweep = and_(EventRow.sweep_id.is_not(None), EventRow.sweep_id.not_in(sweeps))
        concerns_cells = or_(EventRow.cell_id.in_(part), EventRow.attempt_id.in_(attempts))
        session.execute(
            update(EventRow).where(of_retained_sweep, concerns_cells).values(cell_id=None, attempt_id=None),
            **_WITHOUT_SYNC,
        )
        session.execute(update(AttemptRow).where(AttemptRow.cell_id.in_(part)).values(parent_id=None), **_WITHOUT_SYNC)
        # the trial stays: if the study continues, its cell is trained again
        reset_columns = dict.fromkeys(("cell_id", "reason", "objectives", "curve", "ended_at"))
        session.execute(
            update(TrialRow).where(TrialRow.cell_id.in_(part)).values(standing="asked", **reset_columns),
            **_WITHOUT_SYNC,
        )
    return _delete_rows(session, _conditions(planned.cells, sweeps))


def _delete_rows(session: Session, conditions: Iterable[Condition]) -> Counter[str]:
    """Delete the rows that meet the conditions, in this order, and return their number by table; 0 is left out."""
    counts: Counter[str] = Counter()
    for table, condition in conditions:
        done = session.execute(delete(table).where(condition), **_WITHOUT_SYNC)
        assert isinstance(done, CursorResult)
        counts[table.__tablename__] += done.rowcount
    return +counts


# --- measurements of one cell ---


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selection of measurements by probe, context length and metric; an empty tuple selects all."""

    probes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()

    def condition(self, table: Any, attempts: Sequence[int]) -> Any:
        """Return the SQL condition of a table's rows that belong to these attempts (ids) and are selected.

        `table` is a mapped class with the columns attempt_id, probe, length and metric.
        """
        pairs = (table.probe, self.probes), (table.length, self.lengths), (table.metric, self.metrics)
        return and_(table.attempt_id.in_(attempts), *(column.in_(values) for column, values in pairs if values))

    def selects(self, probe: str, metric: str, length: int) -> bool:
        """Return True if a measurement is selected."""
        pairs = (probe, self.probes), (length, self.lengths), (metric, self.metrics)
        return all(value in values for value, values in pairs if values)


@dataclass(frozen=True, kw_only=True)
class MeasurementCount:
    """Rows to delete of one probe at one length: measurements, attempts that they belong to, and items."""

    probe: str
    length: int
    measurements: int
    attempts: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class MeasurementDeletion:
    """A planned or executed deletion of measurements of one cell.

    `asked_by` maps each sweep that requests any of them to the status that the cell then has in it.
    """

    cell: str
    slug: str
    rows: Sequence[MeasurementCount]
    asked_by: dict[str, CellStanding]
    deleted: bool = False
    selection: Selection = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return the fields except the selection as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "selection"}

    def lines(self) -> list[str]:
        """Return the plan as lines for the user.

        One line per probe and length, then one per sweep that requests any of them. A single line says so if nothing is
        selected.
        """
        if not self.rows:
            return [f"{self.cell} {self.slug}: no such measurements"]
        heading = "deleted" if self.deleted else "to delete"
        lines = [f"{self.cell} {self.slug}, {heading}:"]
        for row in self.rows:
            at = f" at {row.length}" if row.length else ""
            items = f", {counted(row.examples, 'item')} behind them" if row.examples else ""
            lines.append(
                f"  {row.probe}{at}: {counted(row.measurements, 'number')} of {counted(row.attempts, 'attempt')}{items}"
            )
        for sweep, then in self.asked_by.items():
            consequence = {
                "needs-eval": "becomes needs-eval, and the next launch measures it again",
                "weights gone": "becomes `weights gone`: it can be measured again only after a launch with --retrain",
            }.get(then, f"is {then}")
            lines.append(f"  sweep {sweep} requests them: there, the cell {consequence}")
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
    """Return the plan of a deletion of measurements of one cell; deletes nothing.

    Measurements of running attempts are not selected; attempts of every other state are included. `rows` of the plan is
    sorted by probe and length, and empty if nothing of the selection is measured.

    Args:
        store: database.
        cell: id, slug or beginning.
        probes: probes; empty for all.
        lengths: context lengths in tokens, 0 for measurements without one; empty for all.
        metrics: metrics; empty for all. At least one of the three must not be empty.
        sweep: sweep in which the cell is looked up; None for all.

    Raises:
        CellUnknown: there is no such cell.
        CellAmbiguous: several cells match.
        SweepUnknown: there is no such sweep.
        StoreError: nothing is selected, or a length, probe or metric is impossible.
        SweepReadOnly: the cell belongs to imported or published sweeps only.
    """
    if not probes and not lengths and not metrics:
        raise StoreError(
            "select measurements with --probe NAME, --length TOKENS (0 for those without a length), or both"
        )
    if wrong := [length for length in lengths if not 0 <= length < 2**31]:
        raise StoreError(
            f"--length {wrong[0]}: no measurement has such a length; atma-sweep show lists those of a cell"
        )
    selection = Selection(probes=tuple(probes), lengths=tuple(lengths), metrics=tuple(metrics))
    return store.read(_plan_measurements, store.find_cell(cell, sweep).id, selection)


def delete_measurements(
    store: Store, planned: MeasurementDeletion, *, who: str, check: Callable[[Session], None] = lambda session: None
) -> MeasurementDeletion:
    """Delete the planned measurements and their items in one transaction, and return the executed plan.

    Records the event `forgot` of the cell, also for an empty plan. The plan is computed again in the same transaction.

    Args:
        store: database.
        planned: result of `plan_measurements`.
        who: user, for the event.
        check: called in the transaction, before anything is deleted; may refuse by raising.

    Returns:
        The plan with `deleted` True.

    Raises:
        StoreError: the plan is no longer the same; nothing was deleted.
    """

    def work(session: Session) -> MeasurementDeletion:
        """Compute the plan again, compare it, delete its rows, record the event, and return the executed plan."""
        check(session)
        current = _plan_measurements(session, planned.cell, planned.selection)
        if current != planned:
            raise StoreError(
                f"the measurements of cell {planned.cell} changed meanwhile; nothing was deleted; run again"
            )
        attempts = _finished_attempt_ids(session, planned.cell)
        _delete_rows(
            session, [(table, current.selection.condition(table, attempts)) for table in (ExampleRow, MeasurementRow)]
        )
        subjects = ", ".join(f"{row.probe}{f' at {row.length}' if row.length else ''}" for row in current.rows)
        count = sum(row.measurements for row in current.rows)
        record_event(
            session, "forgot", f"{counted(count, 'number')} deleted by {who}: {subjects}", cell_id=planned.cell
        )
        return replace(current, deleted=True)

    return store.write(work)


def _finished_attempt_ids(session: Session, cell: str) -> list[int]:
    """Return the ids of a cell's attempts that are not running."""
    return [row.id for row in attempts(session, ATTEMPT.id, ATTEMPT.state, cells=[cell]) if row.state != "running"]


def _plan_measurements(session: Session, cell: str, selection: Selection) -> MeasurementDeletion:
    """Count the selected rows of a cell by (probe, length), and determine the sweeps that request them.

    `cell` is a complete id. Raises what `plan_measurements` does for names and imported sweeps.
    """
    attempts = _finished_attempt_ids(session, cell)
    key = (MeasurementRow.probe, MeasurementRow.length)
    numbers = select(*key, func.count(), func.count(MeasurementRow.attempt_id.distinct())).group_by(*key)
    items_key = (ExampleRow.probe, ExampleRow.length)
    items = select(*items_key, func.count()).group_by(*items_key).where(selection.condition(ExampleRow, attempts))
    behind = {(probe, length): count for probe, length, count in session.execute(items)}
    rows = [
        MeasurementCount(
            probe=probe, length=length, measurements=count, attempts=of, examples=behind.get((probe, length), 0)
        )
        for probe, length, count, of in session.execute(
            numbers.where(selection.condition(MeasurementRow, attempts)).order_by(*key)
        )
    ]
    if not rows:
        _check_names(session, cell, attempts, selection)
    slug, asked_by = _requesting_sweeps(session, cell, {(row.probe, row.length) for row in rows}, selection)
    return MeasurementDeletion(cell=cell, slug=slug, rows=rows, asked_by=asked_by, selection=selection)


def _check_names(session: Session, cell: str, attempts: Sequence[int], selection: Selection) -> None:
    """Raise StoreError for a probe or metric that neither the cell nor this release has.

    Args:
        session: open session.
        cell: cell id, for the message.
        attempts: ids of its finished attempts.
        selection: selected probes and metrics.
    """
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
                raise StoreError(f"{option} {quoted_short(name)}: cell {cell} has no such measurement{listed}{hint}")


def _requesting_sweeps(
    session: Session, cell: str, gone: set[tuple[str, int]], selection: Selection
) -> tuple[str, dict[str, CellStanding]]:
    """Return the cell's slug, and the cell's status after the deletion by name of the sweep.

    Only sweeps whose newest revision lists the cell and requests a deleted (probe, length) pair are included.

    Args:
        session: open session.
        cell: cell id.
        gone: (probe, length) pairs with measurements to delete.
        selection: measurements to delete.

    Raises:
        SweepReadOnly: all sweeps of the cell were imported.
    """
    newest = select(func.max(RevisionRow.id)).group_by(RevisionRow.sweep_id)
    query = select(SweepRow.name, SweepRow.read_only, RevisionRow.options).join_from(SweepRow, RevisionRow)
    query = query.join(RevisionCellRow, RevisionCellRow.revision_id == RevisionRow.id)
    query = query.where(RevisionRow.id.in_(newest), RevisionCellRow.cell_id == cell).order_by(SweepRow.name)
    holders = list(session.execute(query))
    if holders and all(read_only for _, read_only, _ in holders):
        names = ", ".join(name for name, _, _ in holders)
        raise SweepReadOnly(
            f"cell {cell} belongs to {names}, whose measurements were imported and cannot be deleted one by one"
        )
    slug, standings = queries.cell(session, cell).slug, {}
    for state in queries.states(session, [cell]):
        remaining = replace(state, measured=frozenset(key for key in state.measured if not selection.selects(*key)))
        requested = {name: requests_from_options(options) for name, _, options in holders}
        standings = {name: standing(remaining, pairs) for name, pairs in requested.items() if gone & set(pairs)}
    return slug, standings
