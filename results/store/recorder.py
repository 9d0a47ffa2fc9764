"""Writing for a running attempt: the protocol AttemptWriter, and the Recorder that writes into the database itself.

Every method of the Recorder is one transaction that first renews the attempt's heartbeat under its fence: an attempt that was finished,
reaped or taken over is refused with LostLease and nothing is written. A locked database is waited for (see Store.write).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Protocol

from sqlalchemy import func, literal, select, update
from sqlalchemy.orm import Session, aliased

from ..console.text import storable_text
from ..metrics import SAMPLES
from . import attempt_queries, queries
from .database import upsert
from .records import AttemptState, CurvePoint, Example, Measurement, Phase, Provenance
from .schema import AttemptRow, CurvePointRow, EventRow, ExampleRow, MeasurementRow, ProvenanceRow
from .store import Store, record_event, renew_heartbeat


class AttemptWriter(Protocol):
    """Writes for one attempt, from the process that runs it.

    Writing the same thing twice changes nothing, and a value written later under the same key replaces the earlier one.
    An attempt that was finished, reaped or taken over writes nothing more but events: LostLease is raised, by whoever
    writes into the database; so a Recorder raises it at the call, and a journal's Reader when it applies the line.
    Numbers that are not finite become NULL. Strings lose what a database cannot hold. Times are the database's own.
    """

    def set_process(self, pid: int, started: float, *, host: str | None = None, space: str | None = None) -> None:
        """Names the process that runs the attempt, as an Owner has it; without `host` that of the attempt stays."""

    def heartbeat(self) -> None:
        """Says that the attempt lives."""

    def settle(self) -> None:
        """Returns when all that was written so far would survive a power cut.

        To be called before a checkpoint is written, or its curve could have a hole that no one notices; and so before
        older checkpoints go, those of an earlier attempt included, which would be the only ones that the database knows.
        """

    def provenance(self, provenance: Provenance) -> None:
        """Where the numbers come from; once, before the first of them."""

    def neighbours(self) -> None:
        """Counts the attempts that were on this one's GPU since it started, into its provenance; without a GPU nothing.

        Those that come later are counted when it is called again, so call it last of all, too.
        """

    def progress(
        self,
        step: int,
        steps_total: int | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        phase: Phase | None = None,
    ) -> None:
        """How far the attempt is: `loss` in nats per token. None leaves a column as it is; a NaN loss clears it."""

    def curve(self, points: Sequence[CurvePoint]) -> None:
        """Points of the training curve."""

    def inherit_curve(self, from_attempt: int, up_to_step: int) -> None:
        """Copies the curve of the attempt that this one resumes, and its samples, up to and including the step of the checkpoint.

        What this attempt already has stays.
        """

    def last_point(self) -> CurvePoint | None:
        """The point of this attempt's curve with the highest step; None without any, or where it is not known here."""

    def measurements(self, measurements: Sequence[Measurement]) -> None:
        """Numbers of a probe. A NaN or infinite value is stored as NULL with the reason `nan: ...` or `inf: ...`."""

    def examples(self, examples: Sequence[Example]) -> None:
        """Outcomes item by item."""

    def checkpoint(self, path: str) -> None:
        """Names the newest checkpoint that can be resumed from: a path relative to the runs folder, or a full address.

        Durable when this returns, so that those of earlier attempts may go.
        """

    def event(self, kind: str, message: str) -> None:
        """Notes something about the attempt for people; also after it has finished."""

    def finish(
        self,
        state: AttemptState,
        *,
        cause: str | None = None,
        traceback: str | None = None,
        exit_code: int | None = None,
        weights: str | None = None,
        failure: str | None = None,
    ) -> None:
        """Ends the attempt, durably; from then on it is read-only. None leaves a column as it is.

        Raises ValueError for the state `running`.
        """


MEASUREMENT_KEY = ("attempt_id", "probe", "metric", "length")
EXAMPLE_KEY = (*MEASUREMENT_KEY, "item", "position")
CURVE_KEY = ("attempt_id", "step")


def finite(value: Any) -> Any:
    """The number as a plain float, or None for NaN and the infinities, which SQL columns do not hold; text as it can be."""
    if isinstance(value, str):
        return storable_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    return float(value) if math.isfinite(value) else None


class DatabaseRecorder(AttemptWriter):
    """An AttemptWriter over a Store. All methods but `event` and `last_point` raise LostLease, all of them StoreBusy."""

    def __init__(self, store: Store, attempt_id: int, fence: int, *, patience: float | None = None) -> None:
        self.store = store
        self.attempt_id = attempt_id
        self.fence = fence
        self.patience = patience

    def _write(self, work: Callable[[Session], None] | None = None, *, durable: bool = False, **values: Any) -> None:
        def guarded(session: Session) -> None:
            renew_heartbeat(session, self.attempt_id, self.fence, **values)
            if work is not None:
                work(session)

        self.store.write(guarded, patience=self.patience, durable=durable)

    def _upsert(self, row: Any, key: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
        given = [{"attempt_id": self.attempt_id} | values for values in rows]

        def work(session: Session) -> None:
            if given:
                session.execute(upsert(session, row, key=key), given)

        self._write(work)

    def set_process(self, pid: int, started: float, *, host: str | None = None, space: str | None = None) -> None:
        self.store.set_process(self.attempt_id, self.fence, pid, started, host=host, space=space)

    def heartbeat(self) -> None:
        self._write()

    def settle(self) -> None:
        self._write(durable=True)

    def provenance(self, provenance: Provenance) -> None:
        values = {field.name: getattr(provenance, field.name) for field in fields(provenance)}
        values = {name: storable_text(value) if isinstance(value, str) else value for name, value in values.items()}
        self._upsert(ProvenanceRow, ("attempt_id",), [values])

    def neighbours(self) -> None:
        # only one launch has a GPU at a time: attempts under another fence, whose end nobody may have noted, are none
        mine, my_source = aliased(AttemptRow), aliased(ProvenanceRow)
        others = (
            select(func.count())
            .select_from(mine)
            .join(my_source, my_source.attempt_id == mine.id)
            .join(AttemptRow, (AttemptRow.fence == mine.fence) & (AttemptRow.host == mine.host))
            .join(ProvenanceRow, ProvenanceRow.attempt_id == AttemptRow.id)
            .where(mine.id == self.attempt_id, AttemptRow.id != mine.id, ProvenanceRow.gpu_uuid == my_source.gpu_uuid)
            .where(AttemptRow.finished_at.is_(None) | (AttemptRow.finished_at > mine.started_at))
        )

        def work(session: Session) -> None:
            on_gpu = (ProvenanceRow.attempt_id == self.attempt_id) & ProvenanceRow.gpu_uuid.is_not(None)
            session.execute(update(ProvenanceRow).where(on_gpu).values(co_tenants=session.scalar(others)))

        self._write(work)

    def progress(
        self,
        step: int,
        steps_total: int | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        phase: Phase | None = None,
    ) -> None:
        given = {"steps_total": steps_total, "loss": loss, "tokens_per_s": tokens_per_s, "phase": phase}
        self._write(step=step, **{name: finite(value) for name, value in given.items() if value is not None})

    def curve(self, points: Sequence[CurvePoint]) -> None:
        self._upsert(CurvePointRow, CURVE_KEY, [finite_fields(point) for point in points])

    def inherit_curve(self, from_attempt: int, up_to_step: int) -> None:
        written = (ExampleRow.probe == SAMPLES) & (ExampleRow.length <= up_to_step)
        parts: list[tuple[Any, Sequence[str], Any]] = [
            (CurvePointRow, CURVE_KEY, CurvePointRow.step <= up_to_step),
            (ExampleRow, EXAMPLE_KEY, written),
        ]

        def work(session: Session) -> None:
            for row, key, which in parts:
                others = [column for column in row.__table__.columns if column.name != "attempt_id"]
                source = select(literal(self.attempt_id), *others).where(row.attempt_id == from_attempt, which)
                statement = upsert(session, row, key=key, replace=False)
                session.execute(statement.from_select(["attempt_id", *(column.name for column in others)], source))

        self._write(work)

    def measurements(self, measurements: Sequence[Measurement]) -> None:
        rows = [finite_fields(_explained(measurement)) for measurement in measurements]

        def work(session: Session) -> None:
            moment = queries.now(session)
            given = [{"attempt_id": self.attempt_id, "created_at": moment} | row for row in rows]
            if given:
                session.execute(upsert(session, MeasurementRow, key=MEASUREMENT_KEY), given)

        self._write(work)

    def examples(self, examples: Sequence[Example]) -> None:
        self._upsert(ExampleRow, EXAMPLE_KEY, [finite_fields(example) for example in examples])

    def checkpoint(self, path: str) -> None:
        self._write(durable=True, checkpoint=path)

    def last_point(self) -> CurvePoint | None:
        points = self.store.curve(self.attempt_id)
        return points[-1] if points else None

    def event(self, kind: str, message: str) -> None:
        same = select(EventRow.id).where(EventRow.attempt_id == self.attempt_id, EventRow.kind == kind)
        same = same.where(EventRow.message == storable_text(message)).limit(1)

        def work(session: Session) -> None:
            if session.scalar(same) is None:
                cell = attempt_queries.attempt(session, self.attempt_id).cell_id
                record_event(session, kind, message, cell_id=cell, attempt_id=self.attempt_id)

        self.store.write(work, patience=self.patience)

    def finish(self, state: AttemptState, **told: Any) -> None:
        self.store.finish_attempt(self.attempt_id, self.fence, state, **told)


def finite_fields(record: Any) -> dict[str, Any]:
    """The fields of a curve point, a measurement or an example as the database holds them."""
    return {name: value if isinstance(value, dict) else finite(value) for name, value in asdict(record).items()}


def _explained(measurement: Measurement) -> Measurement:
    value = measurement.value
    if value is None or math.isfinite(value):
        return measurement
    code = "nan" if math.isnan(value) else "inf"
    return replace(measurement, value=None, reason=measurement.reason or f"{code}: the value is not finite")
