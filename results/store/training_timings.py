"""What finished trainings took, read to price others like them. As in queries.py, plain records, and nothing is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from .queries import in_parts
from .schema import AttemptRow, CellRow, CurvePointRow, MeasurementRow, ProvenanceRow

MOST_ALIKE = 8
"""Of trainings with the same network, losses and batch on the same kind of machine, the newest; older ones add little."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One finished training. Times in seconds; `wall_s` of a curve point is training alone, without validation."""

    attempt_id: int
    config: Mapping[str, Any]
    """What it ran with, as its provenance keeps it."""
    gpu_name: str | None
    host: str
    start_s: float | None
    """From the start of the process to the built network."""
    elapsed_s: float
    whole: bool
    """It is the cell's first attempt, so that all of its training lies in `elapsed_s`."""
    points: int
    """Of the curve; each had a validation."""
    first: tuple[int, float]
    """Tokens and wall_s at the first point."""
    last: tuple[int, float]
    tokens_per_s: float | None
    """Over the last interval of the curve."""
    probes: Mapping[tuple[str, int], float]
    """By probe and context length."""
    neighbours: int = 0
    """Other attempts that were on its GPU at the same time, at most."""
    steps: str = ""
    """Whether they were replayed as CUDA graphs or queued as they came, and why; "" of one from before there were both."""


def timed(session: Session) -> list[Timed]:
    """The newest finished trainings of every network, kind of losses, micro-batch and machine, MOST_ALIKE of each."""
    kept = _newest(session)
    ids = [row.id for row in kept]
    curves = _curves(session, ids)
    probes: dict[int, dict[tuple[str, int], float]] = {}
    for part in in_parts(ids):
        query = select(
            MeasurementRow.attempt_id, MeasurementRow.probe, MeasurementRow.length, func.max(MeasurementRow.seconds)
        ).where(MeasurementRow.attempt_id.in_(part), MeasurementRow.seconds.is_not(None))
        query = query.group_by(MeasurementRow.attempt_id, MeasurementRow.probe, MeasurementRow.length)
        for attempt, probe, length, seconds in session.execute(query):
            probes.setdefault(attempt, {})[probe, length] = float(seconds or 0.0)
    found = []
    for row in kept:
        if row.id not in curves or row.finished_at is None:
            continue
        points, first, last, rate = curves[row.id]
        found.append(
            Timed(
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


def starts(session: Session, attempt_ids: Collection[int]) -> dict[int, float]:
    """By attempt: seconds from the start of its process to the built network, for those that told."""
    found = {}
    for part in in_parts(attempt_ids):
        query = select(ProvenanceRow.attempt_id, ProvenanceRow.extra).where(ProvenanceRow.attempt_id.in_(part))
        for attempt, extra in session.execute(query):
            if isinstance(seconds := _start(extra), float):
                found[attempt] = seconds
    return found


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
        .join(ranked, and_(ranked.c.id == AttemptRow.id, ranked.c.age <= MOST_ALIKE))
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
        query = select(point.attempt_id, ends.c.points, point.tokens, point.wall_s, point.tokens_per_s).join(
            ends, and_(ends.c.attempt_id == point.attempt_id, point.step.in_((ends.c.low, ends.c.high)))
        )
        rows: dict[int, list[Any]] = {}
        for row in session.execute(query.order_by(point.attempt_id, point.step)):
            rows.setdefault(row.attempt_id, []).append(row)
        for attempt, some in rows.items():
            first, last = some[0], some[-1]
            found[attempt] = (
                last.points, (first.tokens, first.wall_s), (last.tokens, last.wall_s), last.tokens_per_s
            )  # fmt: skip
    return found
