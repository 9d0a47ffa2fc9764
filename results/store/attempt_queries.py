"""Reading attempts and their numbers. As in queries.py, every function takes an open session and none of them writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ..errors import AttemptUnknown
from .queries import columns_of, in_parts, membership, read_records, revision_row, sweep_row
from .records import Attempt, CurvePoint, Event, Provenance, Source, Value
from .schema import AttemptRow, CurvePointRow, EventRow, MeasurementRow, ProvenanceRow, RevisionCellRow


def attempt(session: Session, attempt_id: int) -> Attempt:
    """One attempt. Raises AttemptUnknown."""
    found = read_records(session, Attempt, select(*columns_of(AttemptRow, Attempt)).where(AttemptRow.id == attempt_id))
    if not found:
        raise AttemptUnknown(f"there is no attempt {attempt_id}; `atma-sweep show CELL` lists those of a cell")
    return found[0]


def attempts(session: Session, cell_id: str) -> list[Attempt]:
    """Every attempt of a cell, oldest first."""
    query = select(*columns_of(AttemptRow, Attempt)).where(AttemptRow.cell_id == cell_id).order_by(AttemptRow.id)
    return read_records(session, Attempt, query)


def attempts_of(session: Session, cell_ids: Collection[str]) -> list[Attempt]:
    """Every attempt of these cells, oldest first."""
    columns = columns_of(AttemptRow, Attempt)
    found = []
    for part in in_parts(cell_ids):
        found += read_records(session, Attempt, select(*columns).where(AttemptRow.cell_id.in_(part)))
    return sorted(found, key=lambda attempt: attempt.id)


def failures(session: Session, attempt_ids: Collection[int]) -> dict[int, str]:
    """By attempt: the class of its failure, where one was recorded."""
    found: dict[int, str] = {}
    for part in in_parts(attempt_ids):
        query = select(AttemptRow.id, AttemptRow.failure).where(AttemptRow.id.in_(part))
        found |= {attempt: str(failure) for attempt, failure in session.execute(query) if failure is not None}
    return found


def live_attempts(session: Session, sweep: str | None = None) -> list[Attempt]:
    """The running attempts, oldest first: of the newest revision of a sweep, or (None) of the whole database."""
    query = select(*columns_of(AttemptRow, Attempt)).where(AttemptRow.state == "running").order_by(AttemptRow.id)
    if sweep is not None:
        launched = revision_row(session, sweep_row(session, sweep).id)
        inside = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == launched.id)
        query = query.where(AttemptRow.cell_id.in_(inside))
    return read_records(session, Attempt, query)


def values(session: Session, scope: Any) -> list[Value]:
    """The newest value per (cell, probe, metric, length) over done attempts. `scope` selects the column cell_id."""
    rank = func.row_number().over(
        partition_by=(AttemptRow.cell_id, MeasurementRow.probe, MeasurementRow.metric, MeasurementRow.length),
        order_by=MeasurementRow.attempt_id.desc(),
    )
    ranked = (
        select(*columns_of(MeasurementRow, Value), AttemptRow.cell_id, rank.label("age"))
        .join(AttemptRow, AttemptRow.id == MeasurementRow.attempt_id)
        .where(AttemptRow.state == "done", AttemptRow.cell_id.in_(scope))
        .subquery()
    )
    kept = [column for column in ranked.c if column.name != "age"]
    return read_records(
        session,
        Value,
        select(*kept)
        .where(ranked.c.age == 1)
        .order_by(ranked.c.cell_id, ranked.c.probe, ranked.c.metric, ranked.c.length),
    )


def sweep_values(
    session: Session, sweep: str | None, number: int | None = None, *, orphans: bool = False
) -> list[Value]:
    """`values` for the cells that `cell_states` lists."""
    return values(session, select(membership(session, sweep, number, orphans).subquery().c.cell_id))


def curve(session: Session, attempt_id: int) -> list[CurvePoint]:
    """The training curve of an attempt by step."""
    query = select(*columns_of(CurvePointRow, CurvePoint)).where(CurvePointRow.attempt_id == attempt_id)
    return read_records(session, CurvePoint, query.order_by(CurvePointRow.step))


def provenance(session: Session, attempt_id: int) -> Provenance | None:
    """Where the attempt's numbers come from, None when it has not said so yet."""
    query = select(*columns_of(ProvenanceRow, Provenance)).where(ProvenanceRow.attempt_id == attempt_id)
    return next(iter(read_records(session, Provenance, query)), None)


def provenances(session: Session, attempt_ids: Collection[int]) -> dict[int, Provenance]:
    """By attempt: where its numbers come from, for those that have said so."""
    columns = columns_of(ProvenanceRow, Provenance)
    found = {}
    for part in in_parts(attempt_ids):
        query = select(ProvenanceRow.attempt_id, *columns).where(ProvenanceRow.attempt_id.in_(part))
        for row in session.execute(query):
            values = dict(row._mapping)
            attempt = values.pop("attempt_id")
            found[attempt] = Provenance(**values)
    return found


def sources(session: Session, attempt_ids: Collection[int]) -> dict[int, Source]:
    """By attempt: the code and the chip, for those that have said so."""
    columns = (ProvenanceRow.git_commit, ProvenanceRow.git_dirty, ProvenanceRow.gpu_name)
    found = {}
    for part in in_parts(attempt_ids):
        query = select(ProvenanceRow.attempt_id, *columns).where(ProvenanceRow.attempt_id.in_(part))
        for attempt, commit, dirty, gpu in session.execute(query):
            found[attempt] = Source(commit=commit, dirty=dirty, gpu=gpu)
    return found


def mark(session: Session, sweep: str) -> str:
    """Another text after whatever happened that a report of the sweep may show: few queries, of which none reads its numbers.

    It may change, too, for what happened to another sweep of the database. Raises SweepUnknown.
    """
    row = sweep_row(session, sweep)
    launched = revision_row(session, row.id)
    inside = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == launched.id)
    columns: list[Any] = [func.count(AttemptRow.id), func.max(AttemptRow.id), func.sum(AttemptRow.step)]
    columns += [func.count(AttemptRow.finished_at), func.count(AttemptRow.weights)]
    attempts = session.execute(select(*columns).where(AttemptRow.cell_id.in_(inside))).one()
    # ids of the whole database, from its indexes: to count a sweep's own numbers would take as long as reading them
    newest = [session.scalar(select(func.max(column))) for column in (MeasurementRow.id, EventRow.id)]
    alive = select(AttemptRow.id).where(AttemptRow.cell_id.in_(inside), AttemptRow.state == "running")
    last = select(CurvePointRow.attempt_id, func.max(CurvePointRow.step)).where(CurvePointRow.attempt_id.in_(alive))
    curves = session.execute(last.group_by(CurvePointRow.attempt_id).order_by(CurvePointRow.attempt_id)).all()
    return repr((launched.id, row.owner, row.request, tuple(attempts), newest, [tuple(one) for one in curves]))


def newest_event(session: Session, sweep: str, kinds: Collection[str]) -> Event | None:
    """What happened last, of these kinds, to the sweep itself; None when nothing of the kind did."""
    query = select(*columns_of(EventRow, Event)).where(EventRow.kind.in_(kinds))
    query = query.where(EventRow.sweep_id == sweep_row(session, sweep).id)
    found = read_records(session, Event, query.order_by(EventRow.at.desc(), EventRow.id.desc()).limit(1))
    return found[0] if found else None


def events(
    session: Session, *, sweep: str | None = None, cell_id: str | None = None, limit: int | None = None
) -> Sequence[Event]:
    """What happened, oldest first; with a limit the newest ones. A sweep's events include those of its cells."""
    query = select(*columns_of(EventRow, Event)).order_by(EventRow.at.desc(), EventRow.id.desc())
    if sweep is not None:
        row = sweep_row(session, sweep)
        launched = revision_row(session, row.id)
        inside = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == launched.id)
        query = query.where((EventRow.sweep_id == row.id) | EventRow.cell_id.in_(inside))
    if cell_id is not None:
        query = query.where(EventRow.cell_id == cell_id)
    return read_records(session, Event, query.limit(limit) if limit is not None else query)[::-1]
