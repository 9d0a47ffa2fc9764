"""Queries on sweeps, revisions and cells.

Every function takes an open session and returns plain records; none of them writes.
"""

from __future__ import annotations

import json
import marshal
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import ARRAY, String, and_, any_, bindparam, case, cast, func, select
from sqlalchemy.orm import Session

from ..console.text import did_you_mean
from ..errors import CellAmbiguous, CellUnknown, StoreError, SweepUnknown
from ..failure_classes import PRUNED
from ..names import PUBLISHED, SHIPPED, quoted_short
from .records import AXES, CellRecord, CellState, MeasurementKey, Owner, RevisionRecord, SweepSummary
from .schema import AttemptRow, Base, CellRow, MeasurementRow, RevisionCellRow, RevisionRow, SweepRow, UtcNow

Record = TypeVar("Record")
Item = TypeVar("Item")
MAX_BOUND_IDS = 500
"""Ids in one statement; databases limit the number of bound parameters."""
MAX_LISTED = 5
"""Sweeps or cells that the message about an unknown one lists."""


def columns_of(row: type[Base], record: type) -> list[Any]:
    """Return the columns of a table that are fields of a record class, in the order of the fields.

    Fields without a column of the same name are skipped.
    """
    return [getattr(row, field.name) for field in fields(record) if hasattr(row, field.name)]


def chunked(items: Collection[Item]) -> Iterator[list[Item]]:
    """Yield the items, in their order, in lists of at most 500 (MAX_BOUND_IDS); yields nothing for no items."""
    all_items = list(items)
    for start in range(0, len(all_items), MAX_BOUND_IDS):
        yield all_items[start : start + MAX_BOUND_IDS]


def rows_in(session: Session, query: Any, column: Any, ids: Collection[Any]) -> Iterator[Any]:
    """Yield the rows of a query whose column has one of these ids, in the order of the query.

    One statement runs, however many ids there are: more than 500 (MAX_BOUND_IDS) are bound as one array. Yields nothing
    without ids, and runs no statement then.
    """
    all_ids = list(ids)
    if len(all_ids) <= MAX_BOUND_IDS:
        condition = column.in_(all_ids)
    elif session.get_bind().dialect.name == "postgresql":
        condition = column == any_(bindparam("all_ids", all_ids, ARRAY(column.type)))
    else:
        condition = column.in_(select(func.json_each(json.dumps(all_ids)).table_valued("value").c.value))
    if all_ids:
        yield from session.execute(query.where(condition))


def read_records(session: Session, record: type[Record], query: Any) -> list[Record]:
    """Return the rows of a query as records, in the query's order.

    The names of the query's columns must be field names of the record; fields without a column keep their default.

    Raises:
        TypeError: a column is no field, or a field without a default has no column.
    """
    result = session.execute(query.execution_options(yield_per=MAX_BOUND_IDS))
    names = tuple(result.keys())
    shared: dict[str, str] = {}  # equal texts, such as names of metrics, are one object
    # row._mapping would take more time than everything else
    return [
        record(**dict(zip(names, [shared.setdefault(v, v) if type(v) is str else v for v in row], strict=True)))
        for row in result
    ]


def snapshot(session: Session) -> None:
    """Make all queries of this transaction, which must not have begun, see the same state of the database.

    Sets the isolation level REPEATABLE READ on PostgreSQL. Does nothing on SQLite, where every transaction has that
    property.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})


def now(session: Session) -> datetime:
    """Return the time of the database's clock, UTC."""
    moment = session.scalar(select(UtcNow()))
    assert moment is not None
    return moment


# --- sweeps ---------------------------------------------------------------------------------------------------------


def default_sweep(session: Session) -> str:
    """Return the name of the sweep launched last.

    Raises:
        SweepUnknown: there is no sweep.
    """
    name = session.scalar(select(SweepRow.name).order_by(SweepRow.launched_at.desc(), SweepRow.id.desc()).limit(1))
    if name is None:
        raise SweepUnknown("the database holds no sweep yet; launch a grid first")
    return name


def sweep_row(session: Session, name: str | None) -> SweepRow:
    """Return the mapped row (attached to the session) of the sweep, or of the one launched last for None.

    Raises:
        SweepUnknown: there is no such sweep, or no sweep at all. The message names built-in sweeps as such, lists up to
            5 existing sweeps and suggests similar names.
    """
    name = default_sweep(session) if name is None else name
    row = session.scalar(select(SweepRow).where(SweepRow.name == name))
    if row is None and name in PUBLISHED:
        raise SweepUnknown(
            f"{name} holds the paper's numbers; it is not in this database, and only report, dashboard, show, "
            "status and export support it"
        )
    if row is None and name in SHIPPED:
        raise SweepUnknown(
            f"{name} is built in; it is not in this database, and only report, dashboard, show, status and "
            f"export support it; to import it: `atma-sweep export --sweep {name}`, then `atma-sweep import "
            f"{name}.zip`"
        )
    if row is None:
        names = list(session.scalars(select(SweepRow.name)))
        listed = sorted(names)[:MAX_LISTED]
        more = len(names) - len(listed)
        raise SweepUnknown(
            (
                f"no sweep is named {quoted_short(name)}; existing sweeps: "
                f"{', '.join(listed) or 'none yet, launch a grid first'}"
            )
            + (f", and {more} more, which atma-sweep sweeps lists" if more else "")
            + did_you_mean(name, [*names, *PUBLISHED, *SHIPPED], most=3)
        )
    return row


def owner_of(row: SweepRow) -> Owner | None:
    """Return the process that holds the sweep; None for a sweep that no process holds.

    An owner whose host, pid or start time is not recorded gets "?", 0 or 0.0. The lease may have expired.
    """
    if row.owner is None:
        return None
    return Owner(
        name=row.owner,
        host=row.owner_host or "?",
        pid=row.owner_pid or 0,
        started=row.owner_started or 0.0,
        space=row.owner_space,
    )


def revision_row(session: Session, sweep_id: int, number: int | None = None) -> RevisionRow:
    """Return the mapped row of the sweep's newest revision (highest number), or of the one with this number.

    Raises:
        StoreError: the sweep has no such revision, or none at all.
    """
    query = select(RevisionRow).where(RevisionRow.sweep_id == sweep_id).order_by(RevisionRow.number.desc()).limit(1)
    row = session.scalar(query if number is None else query.where(RevisionRow.number == number))
    if row is None:
        raise StoreError(f"the sweep has no revision {number}; leave it out for the newest")
    return row


def revision(session: Session, sweep: str | None = None, number: int | None = None) -> RevisionRecord:
    """Return the record of the sweep's newest revision, or of the one with this number.

    Args:
        session: open session.
        sweep: sweep name; None for the one launched last.
        number: revision number (from 1 within the sweep); None for the newest.

    Raises:
        SweepUnknown: there is no such sweep.
        StoreError: there is no such revision.
    """
    owner = sweep_row(session, sweep)
    row = revision_row(session, owner.id, number)
    values = {field.name: getattr(row, field.name) for field in fields(RevisionRecord) if field.name != "sweep"}
    return RevisionRecord(sweep=owner.name, **values)


def _cell_state_column() -> Any:
    """Return the SQL expression of a cell's state: the state of its attempt, or `pruned`.

    `pruned` stands for an interrupted attempt whose failure class is PRUNED (a study ended it early). NULL without an
    attempt.
    """
    return case((and_(AttemptRow.state == "interrupted", AttemptRow.failure == PRUNED), PRUNED), else_=AttemptRow.state)


def sweeps(session: Session) -> list[SweepSummary]:
    """Return a summary of every sweep, the one launched last first; empty without any sweep."""
    rows = session.scalars(select(SweepRow).order_by(SweepRow.launched_at.desc(), SweepRow.id.desc()))
    return [_summary(session, row) for row in rows]


def sweep(session: Session, name: str | None = None) -> SweepSummary:
    """Return the summary of one sweep, of the one launched last for None.

    Raises:
        SweepUnknown: there is no such sweep, or no sweep at all.
    """
    return _summary(session, sweep_row(session, name))


def _summary(session: Session, row: SweepRow) -> SweepSummary:
    """Return the summary of a sweep, with the cells of its newest revision counted by state.

    A cell counts once, by its newest attempt: `new` without attempts, `pruned` if a study ended it early. States
    without cells are absent from `counts`. Raises StoreError for a sweep without a revision.
    """
    newest = _newest_attempts().subquery()
    launched = revision_row(session, row.id)
    counted = (
        select(AttemptRow.state, AttemptRow.failure, func.count())
        .select_from(RevisionCellRow)
        .outerjoin(newest, newest.c.cell_id == RevisionCellRow.cell_id)
        .outerjoin(AttemptRow, AttemptRow.id == newest.c.attempt_id)
        .where(RevisionCellRow.revision_id == launched.id)
        .group_by(AttemptRow.state, AttemptRow.failure)
    )
    counts: Counter[str] = Counter()
    for state, failure, count in session.execute(counted):
        counts["pruned" if (state, failure) == ("interrupted", PRUNED) else state or "new"] += count
    return SweepSummary(
        name=row.name,
        created_at=row.created_at,
        launched_at=row.launched_at,
        revision=launched.number,
        cells=counts.total(),
        counts=dict(counts),
        owner=owner_of(row),
        owner_since=row.owner_since,
        lease_until=row.lease_until,
        fence=row.fence,
        read_only=row.read_only,
        request=dict(row.request or {}),
        tags=tuple(row.tags or ()),
        note=row.note,
    )


# --- cells ----------------------------------------------------------------------------------------------------------


def _newest_attempts() -> Any:
    """Return a query for the newest attempt of every cell: cell_id, attempt_id."""
    return select(AttemptRow.cell_id, func.max(AttemptRow.id).label("attempt_id")).group_by(AttemptRow.cell_id)


def members(session: Session, revision_id: int) -> list[tuple[str, dict[str, str]]]:
    """Return (cell id, axes) of the cells of a revision, in the grid's order.

    `axes` maps the axes that the grid varied to their levels as text. Empty for an unknown revision.
    """
    query = select(RevisionCellRow.cell_id, RevisionCellRow.axes).where(RevisionCellRow.revision_id == revision_id)
    return [(cell, axes) for cell, axes in session.execute(query.order_by(RevisionCellRow.position))]


def newest_members(session: Session, sweep: str | None = None) -> list[tuple[str, dict[str, str]]]:
    """Return (cell id, axes) of the cells of the sweep's newest revision, in the grid's order.

    `axes` maps the axes that the grid varied to their levels as text. `sweep` None means the one launched last.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    return members(session, revision_row(session, sweep_row(session, sweep).id).id)


def revision_cell_pairs(session: Session, sweep: str | None, number: int | None, orphans: bool) -> Any:
    """Return a query for the (revision_id, cell_id) pairs that a report shows: one pair per cell.

    For an orphan, `revision_id` is the sweep's newest revision that lists it. The pairs have no order.

    Args:
        session: open session.
        sweep: sweep; None for the one launched last.
        number: revision number; None for the newest.
        orphans: select the cells that another revision of the sweep lists but this one does not, instead of those that
            it lists.

    Raises:
        SweepUnknown: there is no such sweep.
        StoreError: there is no such revision.
    """
    owner = sweep_row(session, sweep)
    selected_revision = revision_row(session, owner.id, number)
    pairs = select(func.max(RevisionCellRow.revision_id).label("revision_id"), RevisionCellRow.cell_id)
    pairs = pairs.group_by(RevisionCellRow.cell_id)
    if not orphans:
        return pairs.where(RevisionCellRow.revision_id == selected_revision.id)
    current_cells = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == selected_revision.id)
    revision_ids = select(RevisionRow.id).where(RevisionRow.sweep_id == owner.id)
    return pairs.where(RevisionCellRow.revision_id.in_(revision_ids), RevisionCellRow.cell_id.not_in(current_cells))


def _measured_keys(session: Session, pairs: Any) -> dict[str, frozenset[MeasurementKey]]:
    """Return the keys (probe, metric, length) of the measurements in finished attempts, by cell id.

    A measurement that has a reason instead of a value counts as well. Cells without a measurement are absent.

    SQL joins the keys of each cell to one text. Most cells share the same text, which is then parsed once.
    """
    key = MeasurementRow.probe + "\x1f" + MeasurementRow.metric + "\x1f" + cast(MeasurementRow.length, String)
    query = (
        select(AttemptRow.cell_id, func.aggregate_strings(key, "\x1e"))
        .select_from(pairs)
        .join(AttemptRow, AttemptRow.cell_id == pairs.c.cell_id)
        .join(MeasurementRow, MeasurementRow.attempt_id == AttemptRow.id)
        .where(AttemptRow.state == "done")
        .group_by(AttemptRow.cell_id)
    )
    parsed: dict[str, frozenset[MeasurementKey]] = {}
    keys_by_cell = {}
    for cell, joined in session.execute(query):
        if joined not in parsed:
            parts = (text.split("\x1f") for text in joined.split("\x1e"))
            parsed[joined] = frozenset((probe, metric, int(length)) for probe, metric, length in parts)
        keys_by_cell[cell] = parsed[joined]
    return keys_by_cell


def _trainings(session: Session, pairs: Any) -> tuple[dict[str, tuple[int, str | None]], dict[str, str]]:
    """Return the newest finished training and the newest checkpoint of the cells in `pairs`, both by cell id.

    For a cell of an external model, which has no training, its newest finished evaluation counts as the training.

    Returns:
        First (attempt id, path of the weights or None) of the newest finished training; cells without one are absent.
        Then the checkpoint of the newest training that recorded one, finished or not; cells without one are absent.
    """
    query = (
        select(AttemptRow.cell_id, AttemptRow.id, AttemptRow.state, AttemptRow.weights, AttemptRow.checkpoint)
        .select_from(pairs)
        .join(AttemptRow, AttemptRow.cell_id == pairs.c.cell_id)
        .where(AttemptRow.kind.in_(("train", "external")))
        .order_by(AttemptRow.id)
    )
    trained: dict[str, tuple[int, str | None]] = {}
    checkpoints: dict[str, str] = {}
    for cell, attempt, state, weights, checkpoint in session.execute(query):
        if state == "done":
            trained[cell] = (attempt, weights)
        if checkpoint is not None:
            checkpoints[cell] = checkpoint
    return trained, checkpoints


def _cell_rows(session: Session, pairs: Any) -> Iterable[Any]:
    """Return one row per pair with the columns of CellState that need no aggregation.

    The axes of AXES are separate columns; `state` is `new` without attempts, and the other columns of the newest
    attempt are then NULL. Rows are sorted by revision id, then by position in the grid.
    """
    newest = _newest_attempts().subquery()
    run_time: tuple[str, ...] = (
        "kind", "phase", "step", "steps_total", "loss", "tokens_per_s", "started_at", "heartbeat_at",
    )  # fmt: skip
    run_time += ("finished_at", "cause", "host", "pid", "pid_started")
    query = (
        select(
            CellRow.id.label("cell_id"),
            CellRow.slug,
            RevisionCellRow.position,
            CellRow.seed,
            *(getattr(CellRow, axis) for axis in AXES),
            RevisionCellRow.axes,
            CellRow.tokens_total,
            func.coalesce(_cell_state_column(), "new").label("state"),
            AttemptRow.id.label("attempt_id"),
            AttemptRow.number.label("attempt_number"),
            *(getattr(AttemptRow, name) for name in run_time),
        )
        .select_from(pairs)
        .join(
            RevisionCellRow,
            and_(RevisionCellRow.revision_id == pairs.c.revision_id, RevisionCellRow.cell_id == pairs.c.cell_id),
        )
        .join(CellRow, CellRow.id == pairs.c.cell_id)
        .outerjoin(newest, newest.c.cell_id == pairs.c.cell_id)
        .outerjoin(AttemptRow, AttemptRow.id == newest.c.attempt_id)
        .order_by(pairs.c.revision_id, RevisionCellRow.position)
    )
    return session.execute(query)


def cell_states(
    session: Session, sweep: str | None = None, *, revision: int | None = None, orphans: bool = False
) -> list[CellState]:
    """Return the sweep's cells with their progress, by three queries for any number of cells.

    The cells that a revision lists come in the grid's order; orphans by revision, then in its order.

    Args:
        session: open session.
        sweep: sweep; None for the one launched last.
        revision: revision number; None for the newest.
        orphans: return the cells that earlier or later revisions list but this one does not, instead of those that it
            lists.

    Raises:
        SweepUnknown: there is no such sweep.
        StoreError: there is no such revision.
    """
    return _states(session, revision_cell_pairs(session, sweep, revision, orphans).subquery())


def states(session: Session, cell_ids: Collection[str]) -> list[CellState]:
    """Return the state of these cells, each with its position in the newest revision of any sweep that lists it.

    Cells that no revision lists, and unknown ids, are absent. Sorted by that revision, then by position; not in the
    order of `cell_ids`.
    """
    pairs = select(func.max(RevisionCellRow.revision_id).label("revision_id"), RevisionCellRow.cell_id)
    pairs = pairs.group_by(RevisionCellRow.cell_id)
    # thousands of ids would exceed the bind limit of a statement
    if len(cell_ids) <= 500:
        pairs = pairs.where(RevisionCellRow.cell_id.in_(cell_ids))
    return [state for state in _states(session, pairs.subquery()) if state.cell_id in cell_ids]


def _states(session: Session, pairs: Any) -> list[CellState]:
    """Return the CellState of the cells in `pairs`, sorted by revision and position.

    `pairs` is a subquery of (revision_id, cell_id). Runs three queries. A cell without a finished training has None as
    `trained_attempt_id` and `weights`.
    """
    measured = _measured_keys(session, pairs)
    trained, checkpoints = _trainings(session, pairs)
    states = []
    for row in _cell_rows(session, pairs):
        values = dict(row._mapping)
        cell = values["cell_id"]
        attempt, weights = trained.get(cell, (None, None))
        levels = {axis: values.pop(axis) for axis in AXES}
        states.append(
            CellState(
                **values,
                levels=levels,
                trained_attempt_id=attempt,
                weights=weights,
                checkpoint=checkpoints.get(cell),
                measured=measured.get(cell, frozenset()),
            )
        )
    return states


def _cell_record(row: CellRow, axes: dict[str, str]) -> CellRecord:
    """Return the CellRecord of a row of `cell`, with these axes (level as text by axis of the grid)."""
    levels = {axis: getattr(row, axis) for axis in AXES}
    return CellRecord(
        id=row.id,
        slug=row.slug,
        seed=row.seed,
        levels=levels,
        config=row.config,
        axes=axes,
        tokens=row.tokens_total,
        note=row.note,
    )


def cell(session: Session, cell_id: str) -> CellRecord:
    """Return the cell with its config, and with the axes of the newest revision of any sweep that lists it.

    `axes` is empty for a cell that no revision lists.

    Raises:
        CellUnknown: there is no cell with exactly this id.
    """
    row = session.get(CellRow, cell_id)
    if row is None:
        raise CellUnknown(f"no cell has the id {cell_id!r}; `atma-sweep status` lists them")
    query = select(RevisionCellRow.axes).where(RevisionCellRow.cell_id == cell_id)
    return _cell_record(row, session.scalar(query.order_by(RevisionCellRow.revision_id.desc()).limit(1)) or {})


def configs(session: Session, cell_ids: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """Return the complete frozen config by cell id; unknown ids are absent. Equal sections are one object: read only."""
    query = select(CellRow.id, CellRow.config).execution_options(yield_per=MAX_BOUND_IDS)
    sections: dict[bytes, Any] = {}
    return {row.id: with_shared_sections(row.config, sections) for row in rows_in(session, query, CellRow.id, cell_ids)}


def with_shared_sections(config: Mapping[str, Any], sections: dict[bytes, Any]) -> dict[str, Any]:
    """Return the config with each section replaced by the equal one seen before, since most cells share most of them.

    A sweep of thousands of cells then needs the memory of its distinct sections only.

    Args:
        config: config of a cell or an attempt.
        sections: distinct sections so far, by their bytes; extended here.
    """
    return {
        name: sections.setdefault(marshal.dumps(section, 2), section)
        if isinstance(section, (dict, list, str))
        else section
        for name, section in config.items()
    }


def find_cell(session: Session, cell_name: str, sweep: str | None = None, *, source: str | None = None) -> CellRecord:
    """Return the cell that an id, a slug with or without its seed, or the beginning of either identifies.

    A complete id or slug has precedence over a slug without its seed, and that over a beginning. Each is looked for in
    the newest revision of `sweep`; without a sweep first in that of the sweep launched last, then in all cells of the
    database. The beginning of a slug never splits a number: `-s1` is not the beginning of `-s10`.

    Args:
        session: open session.
        cell_name: id, slug or beginning, as the user typed it; empty text matches nothing.
        sweep: sweep to search; None for all.
        source: with it, all cells are looked at together, without those whose `train.init_from` is this text.

    Raises:
        SweepUnknown: there is no sweep of that name.
        CellUnknown: no cell matches, or the database holds none; the message suggests similar slugs.
        CellAmbiguous: several cells match within one scope; the message lists up to five of them.
    """
    if sweep is not None:
        sweep_row(session, sweep)  # raises SweepUnknown
    columns = (CellRow.id, CellRow.slug, CellRow.seed)
    all_cells = {key: (slug, seed) for key, slug, seed in session.execute(select(*columns))}
    if not all_cells:
        raise CellUnknown("the database holds no cell yet; launch a grid first")
    scopes = [all_cells] if sweep is None else []
    if sweep is not None or source is None:
        sweep_cells = {key for key, _ in members(session, revision_row(session, sweep_row(session, sweep).id).id)}
        scopes.insert(0, {key: names for key, names in all_cells.items() if key in sweep_cells})

    def is_complete(key: str, slug: str, seed: int) -> bool:
        return cell_name in (key, slug)

    def is_seedless(key: str, slug: str, seed: int) -> bool:
        return slug == f"{cell_name}-s{seed}"

    def is_beginning(key: str, slug: str, seed: int) -> bool:
        breaks_number = cell_name[-1:].isdigit() and slug[len(cell_name) :][:1].isdigit()
        return bool(cell_name) and (key.startswith(cell_name) or (slug.startswith(cell_name) and not breaks_number))

    for fits, more in (
        (is_complete, "give more characters of the id"),
        (is_seedless, "add the seed"),
        (is_beginning, "give more characters of the id or slug"),
    ):
        for scope in scopes:
            matches = [key for key, (slug, seed) in scope.items() if fits(key, slug, seed)]
            if source is not None:
                matches = [
                    key for key in matches if cell(session, key).config.get("train", {}).get("init_from") != source
                ]
            if len(matches) == 1:
                return cell(session, matches[0])
            if matches:
                names = ", ".join(f"{key} ({scope[key][0]})" for key in sorted(matches)[:5])
                raise CellAmbiguous(f"{cell_name!r} fits {len(matches)} cells: {names}; {more}")
    slugs = [slug for slug, _ in scopes[-1].values()]
    hint = did_you_mean(cell_name, slugs, most=3) or f"; there is: {', '.join(sorted(slugs)[:MAX_LISTED])}" + (
        ", ..." if len(slugs) > MAX_LISTED else ""
    )
    raise CellUnknown(f"no cell has the id or slug {cell_name!r}{hint}")
