"""Queries on attempts: measurements, curves, generated samples, provenance, events and training timings.

As in queries.py, every function takes an open session and none of them writes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, func, literal, select
from sqlalchemy.orm import Session

from ..errors import AttemptUnknown
from ..metrics import SAMPLES
from .queries import (
    MAX_BOUND_IDS,
    chunked,
    columns_of,
    read_records,
    revision_cell_pairs,
    revision_row,
    rows_in,
    sweep_row,
    with_shared_sections,
)
from .records import (
    SAMPLE_METRIC,
    Attempt,
    CodeAndGpu,
    CurvePoint,
    Event,
    MeasuredValue,
    MeasurementKey,
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
    """Return the attempt with this id.

    Raises:
        AttemptUnknown: there is none.
    """
    records = read_records(
        session, Attempt, select(*columns_of(AttemptRow, Attempt)).where(AttemptRow.id == attempt_id)
    )
    if not records:
        raise AttemptUnknown(f"there is no attempt {attempt_id}; `atma-sweep show CELL` lists those of a cell")
    return records[0]


def attempts(session: Session, cell_id: str) -> list[Attempt]:
    """Return all attempts of a cell, oldest first; empty for an unknown cell."""
    query = select(*columns_of(AttemptRow, Attempt)).where(AttemptRow.cell_id == cell_id).order_by(AttemptRow.id)
    return read_records(session, Attempt, query)


def attempts_of(session: Session, cell_ids: Collection[str]) -> list[Attempt]:
    """Return all attempts of these cells in one list, oldest first; unknown cells are ignored."""
    columns = columns_of(AttemptRow, Attempt)
    records = []
    for part in chunked(cell_ids):
        records += read_records(session, Attempt, select(*columns).where(AttemptRow.cell_id.in_(part)))
    return sorted(records, key=lambda attempt: attempt.id)


def failures(session: Session, attempt_ids: Collection[int]) -> dict[int, str]:
    """Return the failure class by attempt id.

    A class is "preempted", "node_lost", "infrastructure", "host_oom", "cuda_oom", "diverged", "code", "hang" or
    "pruned". Attempts without one, and unknown ones, are absent.
    """
    query = select(AttemptRow.id, AttemptRow.failure).where(AttemptRow.failure.is_not(None))
    return dict(rows_in(session, query, AttemptRow.id, attempt_ids))


def live_attempts(session: Session, sweep: str | None = None) -> list[Attempt]:
    """Return the attempts in state `running`, oldest first, whether or not their processes are alive.

    Args:
        session: open session.
        sweep: only attempts of cells that this sweep's newest revision lists, whichever launch started them; None for
            those of the entire database (not of the sweep launched last).

    Raises:
        SweepUnknown: there is no such sweep.
    """
    query = select(*columns_of(AttemptRow, Attempt)).where(AttemptRow.state == "running").order_by(AttemptRow.id)
    if sweep is not None:
        launched = revision_row(session, sweep_row(session, sweep).id)
        revision_cells = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == launched.id)
        query = query.where(AttemptRow.cell_id.in_(revision_cells))
    return read_records(session, Attempt, query)


def values(session: Session, scope: Any) -> list[MeasuredValue]:
    """Return the newest measurement per (cell, probe, metric, length) over finished attempts, sorted by this key.

    Newest is the one of the attempt with the highest id. A measurement with a reason instead of a value counts and can
    hide an older value. Attempts in other states than `done` are ignored.

    Args:
        session: open session.
        scope: cell ids, as a collection or as a query that selects the column cell_id. A collection must stay below the
            database's limit of bound parameters.
    """
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
    columns = [column for column in ranked.c if column.name != "age"]
    return read_records(
        session,
        MeasuredValue,
        select(*columns)
        .where(ranked.c.age == 1)
        .order_by(ranked.c.cell_id, ranked.c.probe, ranked.c.metric, ranked.c.length),
    )


def sweep_values(
    session: Session, sweep: str | None = None, *, revision: int | None = None, orphans: bool = False
) -> list[MeasuredValue]:
    """Return the newest measurement per (cell, probe, metric, length) over finished attempts of a sweep's cells.

    The result is sorted by this key. A measurement with a reason instead of a value counts.

    Args:
        session: open session.
        sweep: sweep; None for the one launched last.
        revision: revision number; None for the newest.
        orphans: select the cells that another revision of the sweep lists but this one does not, instead of those that
            it lists.

    Raises:
        SweepUnknown: there is no such sweep.
        StoreError: there is no such revision.
    """
    return values(session, select(revision_cell_pairs(session, sweep, revision, orphans).subquery().c.cell_id))


def curve(session: Session, attempt_id: int) -> list[CurvePoint]:
    """Return the training curve of an attempt, sorted by step; empty for an attempt without one."""
    query = select(*columns_of(CurvePointRow, CurvePoint)).where(CurvePointRow.attempt_id == attempt_id)
    return read_records(session, CurvePoint, query.order_by(CurvePointRow.step))


def training_losses(session: Session, attempt_ids: Collection[int]) -> dict[int, list[float]]:
    """Return the training losses by attempt id, by ascending step; attempts without any are absent."""
    query = select(CurvePointRow.attempt_id, CurvePointRow.train_loss).where(CurvePointRow.train_loss.is_not(None))
    losses: dict[int, list[float]] = {}
    ordered = query.order_by(CurvePointRow.attempt_id, CurvePointRow.step)
    for attempt_id, loss in rows_in(session, ordered, CurvePointRow.attempt_id, attempt_ids):
        losses.setdefault(attempt_id, []).append(loss)
    return losses


def provenance(session: Session, attempt_id: int) -> Provenance | None:
    """Return the provenance of an attempt; None while it has not recorded one, or if there is no such attempt."""
    query = select(*columns_of(ProvenanceRow, Provenance)).where(ProvenanceRow.attempt_id == attempt_id)
    return next(iter(read_records(session, Provenance, query)), None)


def provenances(session: Session, attempt_ids: Collection[int]) -> dict[int, Provenance]:
    """Return the provenance by attempt id; attempts without one are absent.

    Equal sections of configs, packages and kernels are one object: they are not to be changed.
    """
    query = select(ProvenanceRow.attempt_id, *columns_of(ProvenanceRow, Provenance))
    query = query.execution_options(yield_per=MAX_BOUND_IDS)
    shared: dict[bytes, Any] = {}
    provenance_by_attempt = {}
    for row in rows_in(session, query, ProvenanceRow.attempt_id, attempt_ids):
        values = dict(row._mapping)
        attempt = values.pop("attempt_id")
        config = with_shared_sections(values.pop("config"), shared)
        provenance_by_attempt[attempt] = Provenance(config=config, **with_shared_sections(values, shared))
    return provenance_by_attempt


def sources(session: Session, attempt_ids: Collection[int]) -> dict[int, CodeAndGpu]:
    """Return the code version and the GPU by attempt id; attempts without provenance are absent."""
    columns = (ProvenanceRow.git_commit, ProvenanceRow.git_dirty, ProvenanceRow.gpu_name)
    rows = rows_in(session, select(ProvenanceRow.attempt_id, *columns), ProvenanceRow.attempt_id, attempt_ids)
    return {attempt: CodeAndGpu(commit=commit, dirty=dirty, gpu=gpu) for attempt, commit, dirty, gpu in rows}


def change_token(session: Session, sweep: str) -> str:
    """Return a token that changes whenever something that a report of the sweep shows may have changed.

    The token is opaque text, to be compared for equality only. It covers the newest revision, owner, pending requests,
    the attempts of its cells and the curves of those that run. It is cheap, since it reads no measurements. It may also
    change because of another sweep of the database. It does not change for edits of tags or notes.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    row = sweep_row(session, sweep)
    launched = revision_row(session, row.id)
    revision_cells = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == launched.id)
    columns: list[Any] = [func.count(AttemptRow.id), func.max(AttemptRow.id), func.sum(AttemptRow.step)]
    columns += [func.count(AttemptRow.finished_at), func.count(AttemptRow.weights)]
    attempts = session.execute(select(*columns).where(AttemptRow.cell_id.in_(revision_cells))).one()
    # the largest ids in the database, from indexes: counting the sweep's own rows would take as long as reading them
    newest = [session.scalar(select(func.max(column))) for column in (MeasurementRow.id, EventRow.id)]
    alive = select(AttemptRow.id).where(AttemptRow.cell_id.in_(revision_cells), AttemptRow.state == "running")
    last = select(CurvePointRow.attempt_id, func.max(CurvePointRow.step)).where(CurvePointRow.attempt_id.in_(alive))
    curves = session.execute(last.group_by(CurvePointRow.attempt_id).order_by(CurvePointRow.attempt_id)).all()
    return repr((launched.id, row.owner, row.request, tuple(attempts), newest, [tuple(point) for point in curves]))


def newest_event(session: Session, sweep: str, kinds: Collection[str]) -> Event | None:
    """Return the newest event of these kinds about the sweep itself (not about its cells); None without any.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    query = select(*columns_of(EventRow, Event)).where(EventRow.kind.in_(kinds))
    query = query.where(EventRow.sweep_id == sweep_row(session, sweep).id)
    records = read_records(session, Event, query.order_by(EventRow.at.desc(), EventRow.id.desc()).limit(1))
    return records[0] if records else None


def events(
    session: Session, *, sweep: str | None = None, cell_id: str | None = None, limit: int | None = None
) -> Sequence[Event]:
    """Return events, oldest first; the filters apply together.

    Args:
        session: open session.
        sweep: only events of this sweep or of the cells in its newest revision; None for all events of the database
            (not those of the sweep launched last).
        cell_id: only events of this cell; None for all.
        limit: number of newest events to return; None for all.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    query = select(*columns_of(EventRow, Event)).order_by(EventRow.at.desc(), EventRow.id.desc())
    if sweep is not None:
        row = sweep_row(session, sweep)
        launched = revision_row(session, row.id)
        revision_cells = select(RevisionCellRow.cell_id).where(RevisionCellRow.revision_id == launched.id)
        query = query.where((EventRow.sweep_id == row.id) | EventRow.cell_id.in_(revision_cells))
    if cell_id is not None:
        query = query.where(EventRow.cell_id == cell_id)
    return read_records(session, Event, query.limit(limit) if limit is not None else query)[::-1]


def samples(session: Session, attempt_ids: Collection[int]) -> dict[int, list[Sample]]:
    """Return the texts that the networks generated during training, by attempt id, sorted by step and prompt number.

    Attempts without any are absent. A missing prompt or text becomes empty text.
    """
    columns = (ExampleRow.attempt_id, ExampleRow.length, ExampleRow.item, ExampleRow.detail)
    query = select(*columns).where(ExampleRow.probe == SAMPLES, ExampleRow.metric == SAMPLE_METRIC)
    samples_by_attempt: dict[int, list[Sample]] = {}
    for attempt, step, item, detail in rows_in(
        session, query.order_by(*columns[:3]), ExampleRow.attempt_id, sorted(attempt_ids)
    ):
        fields = detail or {}
        sample = Sample(step=step, item=item, prompt=str(fields.get("prompt", "")), text=str(fields.get("text", "")))
        samples_by_attempt.setdefault(attempt, []).append(sample)
    return samples_by_attempt


MAX_PER_GROUP = 8
"""Number of newest trainings that are read per group of equal network, losses, micro-batch and machine.

Older ones add little.
"""


def training_timings(session: Session) -> list[TrainingTiming]:
    """Return the timings of the newest finished trainings of the entire database, sorted by attempt id.

    At most 8 (MAX_PER_GROUP) are read per group of equal network, losses, micro-batch, GPU name and host. Trainings
    without a curve or an end are absent. `probes` of a timing holds the longest of the `seconds` of a (probe, length).
    """
    attempt_rows = _newest_trainings(session)
    ids = [row.id for row in attempt_rows]
    curves = _curve_ends(session, ids)
    probes: dict[int, dict[tuple[str, int], float]] = {}
    key = (MeasurementRow.attempt_id, MeasurementRow.probe, MeasurementRow.length)
    query = select(*key, func.max(MeasurementRow.seconds)).where(MeasurementRow.seconds.is_not(None)).group_by(*key)
    for attempt, probe, length, seconds in rows_in(session, query, MeasurementRow.attempt_id, ids):
        probes.setdefault(attempt, {})[probe, length] = float(seconds or 0.0)
    timings = []
    for row in attempt_rows:
        if row.id not in curves or row.finished_at is None:
            continue
        points, first, last, rate = curves[row.id]
        timings.append(
            TrainingTiming(
                attempt_id=row.id,
                config=row.config,
                gpu_name=row.gpu_name,
                host=row.host,
                start_s=_startup_seconds(row.extra),
                elapsed_s=_seconds(row.started_at, row.finished_at),
                is_first_attempt=row.number == 1,
                points=points,
                curve_start=first,
                curve_end=last,
                tokens_per_s=rate,
                probes=probes.get(row.id, {}),
                gpu_neighbours=row.co_tenants or 0,
                step_mode=_step_mode(row.extra),
            )
        )
    return timings


def startup_seconds(session: Session, attempt_ids: Collection[int]) -> dict[int, float]:
    """Return the seconds from the start of the job to the built network, by attempt id.

    They include the import of torch, but neither waiting for another compiling attempt nor compiling. Attempts that did
    not record it, or recorded no number, are absent.
    """
    query = select(ProvenanceRow.attempt_id, ProvenanceRow.extra)
    seconds_by_attempt = {
        id_: _startup_seconds(extra) for id_, extra in rows_in(session, query, ProvenanceRow.attempt_id, attempt_ids)
    }
    return {attempt: seconds for attempt, seconds in seconds_by_attempt.items() if seconds is not None}


def _startup_seconds(extra: object) -> float | None:
    seconds = extra.get("start_seconds") if isinstance(extra, Mapping) else None
    return float(seconds) if isinstance(seconds, int | float) else None


def _step_mode(extra: object) -> str:
    return str(extra.get("steps", "")) if isinstance(extra, Mapping) else ""


def _seconds(begun: datetime, ended: datetime) -> float:
    return (ended - begun).total_seconds()


def _newest_trainings(session: Session) -> list[Any]:
    """Return rows of the newest finished trainings, at most eight per group (MAX_PER_GROUP), sorted by attempt id.

    A group shares network config, `reg_mode`, `distractor`, micro-batch, GPU name and host. Trainings without
    provenance are absent. A row has the attempt's id, number, host, started_at and finished_at, and the provenance's
    config, gpu_name, co_tenants and extra.
    """
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


CurveEnds = tuple[int, tuple[int, float], tuple[int, float], float | None]
"""Number of validations, (tokens, wall_s) of the first and of the last of them, and the last tokens_per_s."""


def _curve_ends(session: Session, ids: list[int]) -> dict[int, CurveEnds]:
    """Return the CurveEnds by attempt id; attempts without a validation are absent.

    A single validation is both ends. Points before the first one are left out: their time includes compilation.
    """
    ends_by_attempt = {}
    point = CurvePointRow
    for part in chunked(ids):
        ends = (
            select(
                point.attempt_id,
                func.count().label("points"),
                func.min(point.step).label("low"),
                func.max(point.step).label("high"),
            )
            .where(point.attempt_id.in_(part), point.val_loss.is_not(None))
            .group_by(point.attempt_id)
            .subquery()
        )
        query = select(point.attempt_id, ends.c.points, point.tokens, point.wall_s, point.tokens_per_s)
        at_end = and_(ends.c.attempt_id == point.attempt_id, point.step.in_((ends.c.low, ends.c.high)))
        query = query.join(ends, at_end)
        rows: dict[int, list[Any]] = {}
        for row in session.execute(query.order_by(point.attempt_id, point.step)):
            rows.setdefault(row.attempt_id, []).append(row)
        for attempt, points in rows.items():
            first, last = points[0], points[-1]
            ends_by_attempt[attempt] = (
                last.points, (first.tokens, first.wall_s), (last.tokens, last.wall_s), last.tokens_per_s
            )  # fmt: skip
    return ends_by_attempt


# --- curves and items as arrays: a sweep has millions of them, and a Python object per row would take too long -------

ITEM_COLUMNS = 4


def item_positions(session: Session, attempt_ids: Collection[int], measurement_key: MeasurementKey) -> np.ndarray:
    """Return the value of each item of a probe at each of its positions, for these attempts.

    Args:
        session: open session.
        attempt_ids: attempts.
        measurement_key: (probe, metric, length) of the examples.

    Returns:
        float64 array [rows, 4] of attempt id, item, position and value, sorted in that order; NaN for a missing value.
        Attempts without such examples have no rows; the array is [0, 4] without any.
    """
    probe, metric, length = measurement_key
    key_columns = (ExampleRow.attempt_id, ExampleRow.item, ExampleRow.position)
    query = select(*key_columns, ExampleRow.value)
    query = query.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    return _fetch_array(session, query.order_by(*key_columns), attempt_ids)


def item_details(
    session: Session, attempt_ids: Collection[int], measurement_key: MeasurementKey
) -> list[tuple[Any, ...]]:
    """Return (attempt id, item, position, value, detail) of the examples that have a detail.

    The tuples are sorted by attempt id, item and position. `value` may be None; `detail` is a dict that the probe defines. `measurement_key` is (probe, metric, length).
    """
    probe, metric, length = measurement_key
    key_columns = (ExampleRow.attempt_id, ExampleRow.item, ExampleRow.position)
    query = (
        select(*key_columns, ExampleRow.value, ExampleRow.detail)
        .where(ExampleRow.detail.is_not(None))
        .order_by(*key_columns)
    )
    query = query.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    return [tuple(row) for row in rows_in(session, query, ExampleRow.attempt_id, sorted(attempt_ids))]


def item_means(session: Session, attempt_ids: Collection[int], measurement_key: MeasurementKey) -> np.ndarray:
    """Return the mean and the minimum of each item over its positions, for these attempts.

    Args:
        session: open session.
        attempt_ids: attempts.
        measurement_key: (probe, metric, length) of the examples.

    Returns:
        float64 array [rows, 4] of attempt id, item, mean and minimum, sorted by attempt and item. Items with a missing
        value at any position are left out. The array is [0, 4] without any.
    """
    probe, metric, length = measurement_key
    value, key_columns = ExampleRow.value, (ExampleRow.attempt_id, ExampleRow.item)
    query = select(*key_columns, func.avg(value), func.min(value))
    query = query.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    query = query.group_by(*key_columns).having(func.count() == func.count(value)).order_by(*key_columns)
    return _fetch_array(session, query, attempt_ids)


def _fetch_array(session: Session, query: Any, attempt_ids: Collection[int]) -> np.ndarray:
    """Return the rows of a query for these attempts as a float64 array [rows, ITEM_COLUMNS]; NaN for NULL.

    Args:
        session: open session.
        query: query on ExampleRow that selects ITEM_COLUMNS numbers, the attempt id first; the condition on the
            attempts is added here.
        attempt_ids: attempts, which are read in ascending order; without any, the array is [0, ITEM_COLUMNS].
    """
    import numpy as np  # imported late, since the import takes long

    parts = []
    for part in chunked(sorted(attempt_ids)):
        cursor = session.connection().execute(query.where(ExampleRow.attempt_id.in_(part))).cursor
        rows = cursor.fetchall() if cursor is not None else []
        flat = (math.nan if value is None else value for value in chain.from_iterable(rows))
        parts.append(np.fromiter(flat, dtype=np.float64, count=len(rows) * ITEM_COLUMNS))
    return np.concatenate(parts).reshape(-1, ITEM_COLUMNS) if parts else np.empty((0, ITEM_COLUMNS))


CURVES_PER_QUERY = 16  # a query per curve takes longer than its points
CURVE_ROWS = 4_096  # rows of curves that are Python objects at a time


def curve_arrays(
    session: Session, attempt_ids: Iterable[int], columns: Sequence[str], *, having: Sequence[str] = ()
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (attempt id, curve) for each attempt that has points, in the order of `attempt_ids`.

    A query runs for every 16 attempts, when the item of the first is requested, so the session must stay open during
    the iteration.

    Args:
        session: open session.
        attempt_ids: attempts; those without points are skipped.
        columns: fields of CurvePoint, in the order of the result's columns.
        having: fields that must not be NULL; points with a NULL in one of them are left out.

    Yields:
        Attempt id and float64 array [points, columns], sorted by step; NaN for NULL.
    """
    import numpy as np

    table = CurvePointRow.__table__.columns
    # infinity, which is never stored, stands for NULL: numpy reads floats far faster than objects
    read = [func.coalesce(table[name], literal(math.inf)) if table[name].nullable else table[name] for name in columns]
    query: Any = select(table["attempt_id"], *read).where(*(table[name].is_not(None) for name in having))
    query = query.order_by(CurvePointRow.attempt_id, CurvePointRow.step)
    remaining, width = iter(attempt_ids), 1 + len(columns)
    while part := list(islice(remaining, CURVES_PER_QUERY)):
        cursor = session.connection().execute(query.where(table["attempt_id"].in_(part))).cursor
        tables = [np.empty((0, width))]
        while cursor is not None and (rows := cursor.fetchmany(CURVE_ROWS)):
            flat = np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=len(rows) * width)
            tables.append(flat.reshape(-1, width))
        points = np.concatenate(tables)
        points[np.isinf(points)] = np.nan
        bounds = np.searchsorted(points[:, 0], [(attempt, attempt + 1) for attempt in part])
        for attempt, (start, end) in zip(part, bounds.tolist(), strict=True):
            if end > start:
                yield attempt, np.ascontiguousarray(points[start:end, 1:])
