"""Reading the database. Every function takes an open session and returns plain records; none of them writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import String, and_, case, cast, func, select
from sqlalchemy.orm import Session

from ..console.text import did_you_mean
from ..errors import CellAmbiguous, CellUnknown, StoreError, SweepUnknown
from ..failure_classes import PRUNED
from ..names import PUBLISHED, SHIPPED, quoted_short
from .records import AXES, CellRecord, CellState, Key, Owner, RevisionRecord, SweepSummary
from .schema import AttemptRow, Base, CellRow, MeasurementRow, RevisionCellRow, RevisionRow, SweepRow, UtcNow

Record = TypeVar("Record")
Item = TypeVar("Item")
AT_ONCE = 500
MOST_LISTED = 5
"""Sweeps, or cells, that the message about an unknown one names."""
"""Ids in one statement; databases limit how many it may bind."""


def columns_of(row: type[Base], record: type) -> list[Any]:
    """The columns of a table that a record has as fields, by name."""
    return [getattr(row, field.name) for field in fields(record) if hasattr(row, field.name)]


def in_parts(items: Collection[Item]) -> Iterator[list[Item]]:
    """The items in lists of at most AT_ONCE."""
    everything = list(items)
    for start in range(0, len(everything), AT_ONCE):
        yield everything[start : start + AT_ONCE]


def rows_in(session: Session, query: Any, column: Any, ids: Collection[Any]) -> Iterator[Any]:
    """Yield the rows of a query whose column is one of these ids, AT_ONCE ids a statement."""
    for part in in_parts(ids):
        yield from session.execute(query.where(column.in_(part)))


def read_records(session: Session, record: type[Record], query: Any) -> list[Record]:
    found = session.execute(query)
    names = tuple(found.keys())
    # a mapping of each row's own costs more than all the rest
    return [record(**dict(zip(names, row, strict=True))) for row in found]


def snapshot(session: Session) -> None:
    """Lets every query of this transaction, which must not have begun, see the same state of the database."""
    if session.get_bind().dialect.name == "postgresql":
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})


def now(session: Session) -> datetime:
    """The database's clock, UTC."""
    found = session.scalar(select(UtcNow()))
    assert found is not None
    return found


# --- sweeps ---------------------------------------------------------------------------------------------------------


def default_sweep(session: Session) -> str:
    """The sweep launched last. Raises SweepUnknown when there is none."""
    found = session.scalar(select(SweepRow.name).order_by(SweepRow.launched_at.desc(), SweepRow.id.desc()).limit(1))
    if found is None:
        raise SweepUnknown("the database holds no sweep yet; launch a grid first")
    return found


def sweep_row(session: Session, name: str | None) -> SweepRow:
    """The sweep of that name, or the default one. Raises SweepUnknown."""
    name = default_sweep(session) if name is None else name
    found = session.scalar(select(SweepRow).where(SweepRow.name == name))
    if found is None and name in PUBLISHED:
        raise SweepUnknown(
            f"{name} holds the paper's numbers; it is not in this database, and only report, dashboard, show, status and export know it"
        )
    if found is None and name in SHIPPED:
        raise SweepUnknown(
            f"{name} comes along with this program; it is not in this database, and only report, dashboard, show, status and export know it; "
            f"`atma-sweep export --sweep {name}`, then `atma-sweep import {name}.zip` brings it here"
        )
    if found is None:
        known = list(session.scalars(select(SweepRow.name)))
        listed = sorted(known)[:MOST_LISTED]
        more = len(known) - len(listed)
        raise SweepUnknown(
            f"no sweep is named {quoted_short(name)}; there is: {', '.join(listed) or 'none yet, launch a grid first'}"
            + (f", and {more} more, which atma-sweep sweeps lists" if more else "")
            + did_you_mean(name, [*known, *PUBLISHED, *SHIPPED], most=3)
        )
    return found


def owner_of(row: SweepRow) -> Owner | None:
    """Who holds the sweep, None when nobody does."""
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
    """A revision of the sweep, the newest unless numbered. Raises StoreError when there is none."""
    query = select(RevisionRow).where(RevisionRow.sweep_id == sweep_id).order_by(RevisionRow.number.desc()).limit(1)
    found = session.scalar(query if number is None else query.where(RevisionRow.number == number))
    if found is None:
        raise StoreError(f"the sweep has no revision {number}; name none for the newest")
    return found


def revision(session: Session, sweep: str | None = None, number: int | None = None) -> RevisionRecord:
    """What was launched: the newest revision, or the numbered one."""
    owner = sweep_row(session, sweep)
    row = revision_row(session, owner.id, number)
    values = {field.name: getattr(row, field.name) for field in fields(RevisionRecord) if field.name != "sweep"}
    return RevisionRecord(sweep=owner.name, **values)


def _state() -> Any:
    """The state of an attempt as that of its cell."""
    return case((and_(AttemptRow.state == "interrupted", AttemptRow.failure == PRUNED), PRUNED), else_=AttemptRow.state)


def sweeps(session: Session) -> list[SweepSummary]:
    """Every sweep, the one launched last first, with its newest revision's cells counted by state."""
    rows = session.scalars(select(SweepRow).order_by(SweepRow.launched_at.desc(), SweepRow.id.desc()))
    return [_summary(session, row) for row in rows]


def sweep(session: Session, name: str | None = None) -> SweepSummary:
    """One sweep, the default one without a name. Raises SweepUnknown."""
    return _summary(session, sweep_row(session, name))


def _summary(session: Session, row: SweepRow) -> SweepSummary:
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
    """The newest attempt of every cell: cell_id, attempt_id."""
    return select(AttemptRow.cell_id, func.max(AttemptRow.id).label("attempt_id")).group_by(AttemptRow.cell_id)


def members(session: Session, revision_id: int) -> list[tuple[str, dict[str, str]]]:
    """The cells of a revision in the grid's order: (cell id, axes)."""
    query = select(RevisionCellRow.cell_id, RevisionCellRow.axes).where(RevisionCellRow.revision_id == revision_id)
    return [(cell, axes) for cell, axes in session.execute(query.order_by(RevisionCellRow.position))]


def newest_members(session: Session, sweep: str | None = None) -> list[tuple[str, dict[str, str]]]:
    """`members` of the newest revision. Raises SweepUnknown."""
    return members(session, revision_row(session, sweep_row(session, sweep).id).id)


def revision_cell_pairs(session: Session, sweep: str | None, number: int | None, orphans: bool) -> Any:
    """Which (revision, cell) pairs a report shows: one revision's, or those that the newest one dropped."""
    owner = sweep_row(session, sweep)
    shown = revision_row(session, owner.id, number)
    pairs = select(func.max(RevisionCellRow.revision_id).label("revision_id"), RevisionCellRow.cell_id)
    pairs = pairs.group_by(RevisionCellRow.cell_id)
    if not orphans:
        return pairs.where(RevisionCellRow.revision_id == shown.id)
    kept = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == shown.id)
    ours = select(RevisionRow.id).where(RevisionRow.sweep_id == owner.id)
    return pairs.where(RevisionCellRow.revision_id.in_(ours), RevisionCellRow.cell_id.not_in(kept))


def _measured(session: Session, pairs: Any) -> dict[str, frozenset[Key]]:
    """By cell: its keys. Joined to one text a cell in SQL, since most cells of a sweep share it: parsed once."""
    key = MeasurementRow.probe + "\x1f" + MeasurementRow.metric + "\x1f" + cast(MeasurementRow.length, String)
    query = (
        select(AttemptRow.cell_id, func.aggregate_strings(key, "\x1e"))
        .select_from(pairs)
        .join(AttemptRow, AttemptRow.cell_id == pairs.c.cell_id)
        .join(MeasurementRow, MeasurementRow.attempt_id == AttemptRow.id)
        .where(AttemptRow.state == "done")
        .group_by(AttemptRow.cell_id)
    )
    parsed: dict[str, frozenset[Key]] = {}
    found = {}
    for cell, joined in session.execute(query):
        if joined not in parsed:
            parts = (text.split("\x1f") for text in joined.split("\x1e"))
            parsed[joined] = frozenset((probe, metric, int(length)) for probe, metric, length in parts)
        found[cell] = parsed[joined]
    return found


def _trainings(session: Session, pairs: Any) -> tuple[dict[str, tuple[int, str | None]], dict[str, str]]:
    """By cell: the newest finished training with its weights, and the newest checkpoint of any training; of a model from
    elsewhere, which has none, the newest finished evaluation."""
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
            func.coalesce(_state(), "new").label("state"),
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
    """The sweep's cells in the grid's order and how far they are; `orphans`: those that the newest one dropped.

    Three queries for any number of cells. Raises SweepUnknown, StoreError (no such revision).
    """
    return _states(session, revision_cell_pairs(session, sweep, revision, orphans).subquery())


def states(session: Session, cell_ids: Collection[str]) -> list[CellState]:
    """The given cells, whichever sweeps list them, each at its place in the newest revision that does."""
    pairs = select(func.max(RevisionCellRow.revision_id).label("revision_id"), RevisionCellRow.cell_id)
    pairs = pairs.group_by(RevisionCellRow.cell_id)
    # a handful goes into the query; thousands would exceed what one statement may bind
    if len(cell_ids) <= 500:
        pairs = pairs.where(RevisionCellRow.cell_id.in_(cell_ids))
    return [state for state in _states(session, pairs.subquery()) if state.cell_id in cell_ids]


def _states(session: Session, pairs: Any) -> list[CellState]:
    measured = _measured(session, pairs)
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


def _record(row: CellRow, axes: dict[str, str]) -> CellRecord:
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
    """The cell with its config, and the axes of the newest revision that lists it. Raises CellUnknown."""
    row = session.get(CellRow, cell_id)
    if row is None:
        raise CellUnknown(f"no cell has the id {cell_id!r}; `atma-sweep status` lists them")
    query = select(RevisionCellRow.axes).where(RevisionCellRow.cell_id == cell_id)
    return _record(row, session.scalar(query.order_by(RevisionCellRow.revision_id.desc()).limit(1)) or {})


def configs(session: Session, cell_ids: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """By cell: its complete frozen config."""
    rows = rows_in(session, select(CellRow.id, CellRow.config), CellRow.id, cell_ids)
    return {row.id: row.config for row in rows}


def find_cell(session: Session, asked: str, sweep: str | None = None) -> CellRecord:
    """Return the cell meant by an id, a slug with or without its seed, or the beginning of either.

    A complete id or slug counts before one without its seed, and that before a beginning. Each is looked for in the
    sweep that is named, and without one in the newest, then in all. The beginning of a slug breaks no number in two:
    `-s1` is not the beginning of `-s10`.

    Raises:
        SweepUnknown: there is no sweep of that name.
        CellUnknown: no cell fits; the message holds the nearest slugs.
        CellAmbiguous: several cells fit; the message holds some of them.
    """
    if sweep is not None:
        sweep_row(session, sweep)  # raises SweepUnknown
    columns = (CellRow.id, CellRow.slug, CellRow.seed)
    everywhere = {key: (slug, seed) for key, slug, seed in session.execute(select(*columns))}
    if not everywhere:
        raise CellUnknown("the database holds no cell yet; launch a grid first")
    inside = {key for key, _ in members(session, revision_row(session, sweep_row(session, sweep).id).id)}
    scopes = [{key: names for key, names in everywhere.items() if key in inside}]
    scopes += [everywhere] if sweep is None else []

    def is_complete(key: str, slug: str, seed: int) -> bool:
        return asked in (key, slug)

    def is_seedless(key: str, slug: str, seed: int) -> bool:
        return slug == f"{asked}-s{seed}"

    def is_beginning(key: str, slug: str, seed: int) -> bool:
        breaks_number = asked[-1:].isdigit() and slug[len(asked) :][:1].isdigit()
        return bool(asked) and (key.startswith(asked) or (slug.startswith(asked) and not breaks_number))

    for fits, more in (
        (is_complete, "give more letters of the id"),
        (is_seedless, "add the seed"),
        (is_beginning, "give more letters of the id or slug"),
    ):
        for scope in scopes:
            found = [key for key, (slug, seed) in scope.items() if fits(key, slug, seed)]
            if len(found) == 1:
                return cell(session, found[0])
            if found:
                names = ", ".join(f"{key} ({scope[key][0]})" for key in sorted(found)[:5])
                raise CellAmbiguous(f"{asked!r} fits {len(found)} cells: {names}; {more}")
    slugs = [slug for slug, _ in scopes[-1].values()]
    near = did_you_mean(asked, slugs, most=3) or f"; there is: {', '.join(sorted(slugs)[:MOST_LISTED])}" + (
        ", ..." if len(slugs) > MOST_LISTED else ""
    )
    raise CellUnknown(f"no cell has the id or slug {asked!r}{near}")
