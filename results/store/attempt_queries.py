"""Reading attempts: their numbers, curves, written samples, and what finished trainings took.

As in queries.py, every function takes an open session and none of them writes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, func, literal, select
from sqlalchemy.orm import Session

from ..errors import AttemptUnknown
from ..metrics import SAMPLES
from .queries import columns_of, in_parts, read_records, revision_cell_pairs, revision_row, rows_in, sweep_row
from .records import (
    SAMPLE_METRIC,
    Attempt,
    CodeAndGpu,
    CurvePoint,
    Event,
    Key,
    MeasuredValue,
    Provenance,
    Sample,
    TrainingTiming,
)
from .schema import (
    AttemptRow,
    CellRow,
    CurvePointRow,
    EventRow,
    ExampleRow,
    MeasurementRow,
    ProvenanceRow,
    RevisionCellRow,
)

if TYPE_CHECKING:
    import numpy as np


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
    query = select(AttemptRow.id, AttemptRow.failure).where(AttemptRow.failure.is_not(None))
    return dict(rows_in(session, query, AttemptRow.id, attempt_ids))


def live_attempts(session: Session, sweep: str | None = None) -> list[Attempt]:
    """The running attempts, oldest first: of the newest revision of a sweep, or (None) of the whole database."""
    query = select(*columns_of(AttemptRow, Attempt)).where(AttemptRow.state == "running").order_by(AttemptRow.id)
    if sweep is not None:
        launched = revision_row(session, sweep_row(session, sweep).id)
        inside = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == launched.id)
        query = query.where(AttemptRow.cell_id.in_(inside))
    return read_records(session, Attempt, query)


def values(session: Session, scope: Any) -> list[MeasuredValue]:
    """The newest value per (cell, probe, metric, length) over done attempts. `scope` selects the column cell_id."""
    rank = func.row_number().over(
        partition_by=(AttemptRow.cell_id, MeasurementRow.probe, MeasurementRow.metric, MeasurementRow.length),
        order_by=MeasurementRow.attempt_id.desc(),
    )
    ranked = (
        select(*columns_of(MeasurementRow, MeasuredValue), AttemptRow.cell_id, rank.label("age"))
        .join(AttemptRow, AttemptRow.id == MeasurementRow.attempt_id)
        .where(AttemptRow.state == "done", AttemptRow.cell_id.in_(scope))
        .subquery()
    )
    kept = [column for column in ranked.c if column.name != "age"]
    return read_records(
        session,
        MeasuredValue,
        select(*kept)
        .where(ranked.c.age == 1)
        .order_by(ranked.c.cell_id, ranked.c.probe, ranked.c.metric, ranked.c.length),
    )


def sweep_values(
    session: Session, sweep: str | None = None, *, revision: int | None = None, orphans: bool = False
) -> list[MeasuredValue]:
    """The newest value per (cell, probe, metric, length) over done attempts, for the cells of cell_states."""
    return values(session, select(revision_cell_pairs(session, sweep, revision, orphans).subquery().c.cell_id))


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
    query = select(ProvenanceRow.attempt_id, *columns_of(ProvenanceRow, Provenance))
    found = [dict(row._mapping) for row in rows_in(session, query, ProvenanceRow.attempt_id, attempt_ids)]
    return {values.pop("attempt_id"): Provenance(**values) for values in found}


def sources(session: Session, attempt_ids: Collection[int]) -> dict[int, CodeAndGpu]:
    """By attempt: the code and the chip, for those that have said so."""
    columns = (ProvenanceRow.git_commit, ProvenanceRow.git_dirty, ProvenanceRow.gpu_name)
    rows = rows_in(session, select(ProvenanceRow.attempt_id, *columns), ProvenanceRow.attempt_id, attempt_ids)
    return {attempt: CodeAndGpu(commit=commit, dirty=dirty, gpu=gpu) for attempt, commit, dirty, gpu in rows}


def change_token(session: Session, sweep: str) -> str:
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


def samples(session: Session, attempts: Collection[int]) -> dict[int, list[Sample]]:
    """By attempt, in the order of steps and prompts; attempts without any are absent."""
    columns = (ExampleRow.attempt_id, ExampleRow.length, ExampleRow.item, ExampleRow.detail)
    asked = select(*columns).where(ExampleRow.probe == SAMPLES, ExampleRow.metric == SAMPLE_METRIC)
    found: dict[int, list[Sample]] = {}
    for attempt, step, item, detail in rows_in(
        session, asked.order_by(*columns[:3]), ExampleRow.attempt_id, sorted(attempts)
    ):
        told = detail or {}
        one = Sample(step=step, item=item, prompt=str(told.get("prompt", "")), text=str(told.get("text", "")))
        found.setdefault(attempt, []).append(one)
    return found


MAX_PER_GROUP = 8
"""Of trainings with the same network, losses and batch on the same kind of machine, the newest; older ones add little."""


def training_timings(session: Session) -> list[TrainingTiming]:
    """The newest finished trainings of every network, kind of losses, micro-batch and machine, MOST_ALIKE of each."""
    kept = _newest(session)
    ids = [row.id for row in kept]
    curves = _curves(session, ids)
    probes: dict[int, dict[tuple[str, int], float]] = {}
    key = (MeasurementRow.attempt_id, MeasurementRow.probe, MeasurementRow.length)
    query = select(*key, func.max(MeasurementRow.seconds)).where(MeasurementRow.seconds.is_not(None)).group_by(*key)
    for attempt, probe, length, seconds in rows_in(session, query, MeasurementRow.attempt_id, ids):
        probes.setdefault(attempt, {})[probe, length] = float(seconds or 0.0)
    found = []
    for row in kept:
        if row.id not in curves or row.finished_at is None:
            continue
        points, first, last, rate = curves[row.id]
        found.append(
            TrainingTiming(
                attempt_id=row.id,
                config=row.config,
                gpu_name=row.gpu_name,
                host=row.host,
                start_s=_start(row.extra),
                elapsed_s=_seconds(row.started_at, row.finished_at),
                whole=row.number == 1,
                points=points,
                first=first,
                last=last,
                tokens_per_s=rate,
                probes=probes.get(row.id, {}),
                neighbours=row.co_tenants or 0,
                steps=_steps(row.extra),
            )
        )
    return found


def startup_seconds(session: Session, attempt_ids: Collection[int]) -> dict[int, float]:
    """By attempt: seconds from the start of its process to the built network, for those that told."""
    query = select(ProvenanceRow.attempt_id, ProvenanceRow.extra)
    found = {id_: _start(extra) for id_, extra in rows_in(session, query, ProvenanceRow.attempt_id, attempt_ids)}
    return {attempt: seconds for attempt, seconds in found.items() if seconds is not None}


def _start(extra: object) -> float | None:
    told = extra.get("start_seconds") if isinstance(extra, Mapping) else None
    return float(told) if isinstance(told, int | float) else None


def _steps(extra: object) -> str:
    return str(extra.get("steps", "")) if isinstance(extra, Mapping) else ""


def _seconds(begun: datetime, ended: datetime) -> float:
    return (ended - begun).total_seconds()


def _newest(session: Session) -> list[Any]:
    alike = (
        CellRow.config["model"].as_string(), CellRow.reg_mode, CellRow.distractor,
        CellRow.config[("train", "micro_batch")].as_string(), ProvenanceRow.gpu_name, AttemptRow.host,
    )  # fmt: skip
    age = func.row_number().over(partition_by=alike, order_by=AttemptRow.id.desc()).label("age")
    ranked = (
        select(AttemptRow.id, age)
        .join(CellRow, CellRow.id == AttemptRow.cell_id)
        .join(ProvenanceRow, ProvenanceRow.attempt_id == AttemptRow.id)
        .where(AttemptRow.kind == "train", AttemptRow.state == "done")
        .subquery()
    )
    columns = (AttemptRow.id, AttemptRow.number, AttemptRow.host, AttemptRow.started_at, AttemptRow.finished_at)
    query = (
        select(*columns, ProvenanceRow.config, ProvenanceRow.gpu_name, ProvenanceRow.co_tenants, ProvenanceRow.extra)
        .join(ranked, and_(ranked.c.id == AttemptRow.id, ranked.c.age <= MAX_PER_GROUP))
        .join(ProvenanceRow, ProvenanceRow.attempt_id == AttemptRow.id)
    )
    return list(session.execute(query.order_by(AttemptRow.id)))


Ends = tuple[int, tuple[int, float], tuple[int, float], float | None]


def _curves(session: Session, ids: list[int]) -> dict[int, Ends]:
    """By attempt: how many points its curve has, the first and the last of them, and the speed at the last."""
    found = {}
    point = CurvePointRow
    for part in in_parts(ids):
        ends = (
            select(
                point.attempt_id,
                func.count().label("points"),
                func.min(point.step).label("low"),
                func.max(point.step).label("high"),
            )
            .where(point.attempt_id.in_(part))
            .group_by(point.attempt_id)
            .subquery()
        )
        query = select(point.attempt_id, ends.c.points, point.tokens, point.wall_s, point.tokens_per_s)
        at_end = and_(ends.c.attempt_id == point.attempt_id, point.step.in_((ends.c.low, ends.c.high)))
        query = query.join(ends, at_end)
        rows: dict[int, list[Any]] = {}
        for row in session.execute(query.order_by(point.attempt_id, point.step)):
            rows.setdefault(row.attempt_id, []).append(row)
        for attempt, some in rows.items():
            first, last = some[0], some[-1]
            found[attempt] = (
                last.points, (first.tokens, first.wall_s), (last.tokens, last.wall_s), last.tokens_per_s
            )  # fmt: skip
    return found


# --- curves and items as arrays: a sweep has millions of them, and an object of Python for each row costs more than a drawing ---

COLUMNS = 4


def item_places(session: Session, attempts: Collection[int], measure: Key) -> np.ndarray:
    """[places of all items of all attempts, 4] as float64: attempt, item, position and value, in that order; a value that is
    missing is NaN."""
    probe, metric, length = measure
    one = (ExampleRow.attempt_id, ExampleRow.item, ExampleRow.position)
    asked = select(*one, ExampleRow.value)
    asked = asked.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    return _fetched(session, asked.order_by(*one), attempts)


def item_details(session: Session, attempts: Collection[int], measure: Key) -> list[tuple[Any, ...]]:
    """Attempt, item, position, value and detail of every place that has a detail, in that order."""
    probe, metric, length = measure
    one = (ExampleRow.attempt_id, ExampleRow.item, ExampleRow.position)
    asked = select(*one, ExampleRow.value, ExampleRow.detail).where(ExampleRow.detail.is_not(None)).order_by(*one)
    asked = asked.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    return [tuple(row) for row in rows_in(session, asked, ExampleRow.attempt_id, sorted(attempts))]


def item_means(session: Session, attempts: Collection[int], measure: Key) -> np.ndarray:
    """[items of all attempts, 4] as float64: attempt, item, and the mean and the least over the item's positions.

    In the order of attempts and items. An item that lacks a value at any position is left out.
    """
    probe, metric, length = measure
    value, one = ExampleRow.value, (ExampleRow.attempt_id, ExampleRow.item)
    asked = select(*one, func.avg(value), func.min(value))
    asked = asked.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    asked = asked.group_by(*one).having(func.count() == func.count(value)).order_by(*one)
    return _fetched(session, asked, attempts)


def _fetched(session: Session, asked: Any, attempts: Collection[int]) -> np.ndarray:
    """What these COLUMNS columns are of these attempts, as float64; NULL is NaN."""
    import numpy as np  # takes as long as everything else together

    parts = []
    for part in in_parts(sorted(attempts)):
        cursor = session.connection().execute(asked.where(ExampleRow.attempt_id.in_(part))).cursor
        rows = cursor.fetchall() if cursor is not None else []
        flat = (math.nan if one is None else one for one in chain.from_iterable(rows))
        parts.append(np.fromiter(flat, dtype=np.float64, count=len(rows) * COLUMNS))
    return np.concatenate(parts).reshape(-1, COLUMNS) if parts else np.empty((0, COLUMNS))


def curve_arrays(
    session: Session, attempts: Iterable[int], columns: Sequence[str], *, having: Sequence[str] = ()
) -> Iterator[tuple[int, np.ndarray]]:
    """(attempt, its points by step as float64 [points, columns], NaN for NULL) for each attempt that has any, in turn.

    `columns` are fields of CurvePoint; points where one of `having` is NULL are left out.
    """
    import numpy as np

    table = CurvePointRow.__table__.columns
    # infinities stand for NULL on the way, since none is ever stored: numpy takes floats far faster than objects
    read = [func.coalesce(table[name], literal(math.inf)) if table[name].nullable else table[name] for name in columns]
    query: Any = select(*read).where(CurvePointRow.attempt_id == bindparam("attempt"))
    query = query.where(*(table[name].is_not(None) for name in having)).order_by(CurvePointRow.step)
    connection = session.connection()
    for attempt in attempts:
        cursor = connection.execute(query, {"attempt": attempt}).cursor
        rows = cursor.fetchall() if cursor is not None else []
        if rows:
            flat = np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=len(rows) * len(columns))
            flat[np.isinf(flat)] = np.nan
            yield attempt, flat.reshape(-1, len(columns))
