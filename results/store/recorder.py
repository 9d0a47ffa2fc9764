"""Writing for a running attempt: the protocol AttemptWriter and its implementation DatabaseRecorder.

Every method of DatabaseRecorder is one transaction that first renews the attempt's heartbeat under its fencing token
(an integer that identifies one hold of the sweep). An attempt that was finished, declared dead or taken over gets
LeaseLost and nothing is written. For a locked database see DatabaseConnection.write.
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
    """Write interface of one attempt, used by the process that runs it.

    Writing the same record twice changes nothing, and a later value under the same key replaces the earlier one. Keys:
    a measurement by (probe, metric, length), an example by these and (item, position), a curve point by its step. An
    attempt that was finished, declared dead or taken over can write nothing but events. A DatabaseRecorder then raises
    LeaseLost at the call; for a journal, JournalReader raises it when it applies the line. Non-finite numbers become
    NULL. Characters that a database cannot store are replaced in strings. Times are those of the database.
    """

    def set_process(self, pid: int, started: float, *, host: str | None = None, space: str | None = None) -> None:
        """Record the process that runs the attempt, with the fields of Owner; None keeps the host."""

    def heartbeat(self) -> None:
        """Renew the heartbeat."""

    def settle(self) -> None:
        """Return when everything written so far would survive a power failure.

        A DatabaseRecorder renews the heartbeat, too. Call it before a checkpoint is written, since the curve could
        otherwise have a gap before it. Call it as well before older checkpoints are deleted, those of an earlier
        attempt included: the database might know no other.
        """

    def provenance(self, provenance: Provenance) -> None:
        """Record the provenance of the attempt; once, before its first numbers."""

    def neighbours(self) -> None:
        """Count the other attempts that used this one's GPU since it started, and store the number in its provenance.

        Does nothing without a GPU. Call it again at the end of the attempt to include those that started later.
        """

    def progress(
        self,
        step: int,
        steps_total: int | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        phase: Phase | None = None,
    ) -> None:
        """Record the progress of the attempt.

        Args:
            step: steps done.
            steps_total: steps of the complete run; None keeps this column and each of those below.
            loss: training loss in nats per token; NaN clears the column.
            tokens_per_s: current speed.
            phase: starting, training or probing.
        """

    def curve(self, points: Sequence[CurvePoint]) -> None:
        """Record points of the training curve."""

    def inherit_curve(self, from_attempt: int, up_to_step: int) -> None:
        """Copy the curve and the samples of the attempt that this one resumes, up to and including a step.

        Points and samples that this attempt already has are kept. Other measurements and examples are not copied.

        Args:
            from_attempt: id of the attempt to copy from.
            up_to_step: last step to copy.
        """

    def last_point(self) -> CurvePoint | None:
        """Return the point of this attempt's curve with the highest step.

        None without any, or if this writer does not know it.
        """

    def measurements(self, measurements: Sequence[Measurement]) -> None:
        """Record measurements. A NaN or infinite value is stored as NULL with the reason `nan: ...` or `inf: ...`."""

    def examples(self, examples: Sequence[Example]) -> None:
        """Record results of probes item by item."""

    def checkpoint(self, path: str) -> None:
        """Record the newest checkpoint that can be resumed from: a path relative to the runs folder, or a full address.

        It is durable on return, so that those of earlier attempts may be deleted.
        """

    def event(self, kind: str, message: str) -> None:
        """Record an event about the attempt; allowed after it has finished, too."""

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
        """End the attempt durably; from then on it is read-only.

        None keeps a column; the arguments are those of Store.finish_attempt.

        Args:
            state: final state: "done", "failed", "diverged" or "interrupted".
            cause: reason in words.
            traceback: Python traceback.
            exit_code: exit status of the process.
            weights: saved weights, relative to the runs folder or a full address.
            failure: failure class: "preempted", "node_lost", "infrastructure", "host_oom", "cuda_oom", "diverged",
                "code", "hang" or "pruned".

        Raises:
            ValueError: the state is `running`.
        """


MEASUREMENT_KEY = ("attempt_id", "probe", "metric", "length")
EXAMPLE_KEY = (*MEASUREMENT_KEY, "item", "position")
CURVE_KEY = ("attempt_id", "step")


def finite_or_none(value: Any) -> Any:
    """Return a number as a plain float, or None for NaN and infinities; return text in storable form.

    None, bool and int are returned as they are; numbers of numpy become floats. Raises TypeError for other types.
    """
    if isinstance(value, str):
        return storable_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    return float(value) if math.isfinite(value) else None


class DatabaseRecorder(AttemptWriter):
    """AttemptWriter on a Store.

    All methods except `event` and `last_point` raise LeaseLost; all of them raise StoreBusy.
    """

    def __init__(self, store: Store, attempt_id: int, fence: int, *, patience: float | None = None) -> None:
        """Keep the attempt and its fencing token; nothing is read or written.

        Args:
            store: database.
            attempt_id: attempt to write for.
            fence: fencing token under which it runs.
            patience: waiting time of writes in seconds; None for the store's own.
        """
        self.store = store
        self.attempt_id = attempt_id
        self.fence = fence
        self.patience = patience

    def _write(self, work: Callable[[Session], None] | None = None, *, durable: bool = False, **values: Any) -> None:
        """Renew the heartbeat, set `values` as columns of the attempt, and run `work`, all in one transaction.

        Args:
            work: function that writes, possibly called several times; None for none.
            durable: wait until the write is on the disk.
            **values: columns of the attempt; None sets NULL.

        Raises:
            LeaseLost: the attempt does not run under its fencing token.
            StoreBusy: the database could not take the write in time.
        """

        def guarded(session: Session) -> None:
            renew_heartbeat(session, self.attempt_id, self.fence, **values)
            if work is not None:
                work(session)

        self.store.write(guarded, patience=self.patience, durable=durable)

    def _upsert(self, row: Any, key: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
        """Insert rows of the attempt in one transaction, replacing those with the same key.

        Renews the heartbeat, also without rows.

        Args:
            row: mapped class of the table.
            key: columns of its unique key.
            rows: values by column, without the attempt id.
        """
        values = [{"attempt_id": self.attempt_id} | values for values in rows]

        def work(session: Session) -> None:
            if values:
                session.execute(upsert(session, row, key=key), values)

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
        """Count the attempts of the same launch and host that shared this one's GPU, into its provenance.

        An attempt counts if it has the same fencing token and had not ended when this one started. Does nothing but
        renew the heartbeat for an attempt without a recorded GPU.
        """
        # one launch at a time uses a GPU: attempts with another fencing token are stale, even without a recorded end
        this_attempt, this_source = aliased(AttemptRow), aliased(ProvenanceRow)
        neighbour_count = (
            select(func.count())
            .select_from(this_attempt)
            .join(this_source, this_source.attempt_id == this_attempt.id)
            .join(AttemptRow, (AttemptRow.fence == this_attempt.fence) & (AttemptRow.host == this_attempt.host))
            .join(ProvenanceRow, ProvenanceRow.attempt_id == AttemptRow.id)
            .where(
                this_attempt.id == self.attempt_id,
                AttemptRow.id != this_attempt.id,
                ProvenanceRow.gpu_uuid == this_source.gpu_uuid,
            )
            .where(AttemptRow.finished_at.is_(None) | (AttemptRow.finished_at > this_attempt.started_at))
        )

        def work(session: Session) -> None:
            on_gpu = (ProvenanceRow.attempt_id == self.attempt_id) & ProvenanceRow.gpu_uuid.is_not(None)
            session.execute(update(ProvenanceRow).where(on_gpu).values(co_tenants=session.scalar(neighbour_count)))

        self._write(work)

    def progress(
        self,
        step: int,
        steps_total: int | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        phase: Phase | None = None,
    ) -> None:
        """Set the step and those columns that are not None, and renew the heartbeat; NaN and infinities become NULL.

        `loss` is in nats per token.
        """
        columns = {"steps_total": steps_total, "loss": loss, "tokens_per_s": tokens_per_s, "phase": phase}
        self._write(step=step, **{name: finite_or_none(value) for name, value in columns.items() if value is not None})

    def curve(self, points: Sequence[CurvePoint]) -> None:
        self._upsert(CurvePointRow, CURVE_KEY, [finite_fields(point) for point in points])

    def inherit_curve(self, from_attempt: int, up_to_step: int) -> None:
        """Copy curve points and samples of another attempt up to and including a step; rows of this attempt are kept.

        Args:
            from_attempt: id of the attempt to copy from; an unknown one copies nothing.
            up_to_step: last step to copy.
        """
        written = (ExampleRow.probe == SAMPLES) & (ExampleRow.length <= up_to_step)
        parts: list[tuple[Any, Sequence[str], Any]] = [
            (CurvePointRow, CURVE_KEY, CurvePointRow.step <= up_to_step),
            (ExampleRow, EXAMPLE_KEY, written),
        ]

        def work(session: Session) -> None:
            """Copy the rows of both tables by INSERT ... SELECT."""
            for row, key, condition in parts:
                copied_columns = [column for column in row.__table__.columns if column.name != "attempt_id"]
                source = select(literal(self.attempt_id), *copied_columns).where(
                    row.attempt_id == from_attempt, condition
                )
                statement = upsert(session, row, key=key, replace=False)
                session.execute(
                    statement.from_select(["attempt_id", *(column.name for column in copied_columns)], source)
                )

        self._write(work)

    def measurements(self, measurements: Sequence[Measurement]) -> None:
        """Insert or replace measurements, with the database's time as `created_at`.

        A NaN or infinite value is stored as NULL with a reason. An empty sequence only renews the heartbeat.
        """
        rows = [finite_fields(_with_finite_value(measurement)) for measurement in measurements]

        def work(session: Session) -> None:
            moment = queries.now(session)
            values = [{"attempt_id": self.attempt_id, "created_at": moment} | row for row in rows]
            if values:
                session.execute(upsert(session, MeasurementRow, key=MEASUREMENT_KEY), values)

        self._write(work)

    def examples(self, examples: Sequence[Example]) -> None:
        self._upsert(ExampleRow, EXAMPLE_KEY, [finite_fields(example) for example in examples])

    def checkpoint(self, path: str) -> None:
        self._write(durable=True, checkpoint=path)

    def last_point(self) -> CurvePoint | None:
        points = self.store.curve(self.attempt_id)
        return points[-1] if points else None

    def event(self, kind: str, message: str) -> None:
        """Record the event unless the attempt already has one of the same kind and message.

        Works for finished attempts, too, needs no lease and does not renew the heartbeat. Raises AttemptUnknown for an
        attempt that does not exist.
        """
        same = select(EventRow.id).where(EventRow.attempt_id == self.attempt_id, EventRow.kind == kind)
        same = same.where(EventRow.message == storable_text(message)).limit(1)

        def work(session: Session) -> None:
            if session.scalar(same) is None:
                cell = attempt_queries.attempt(session, self.attempt_id).cell_id
                record_event(session, kind, message, cell_id=cell, attempt_id=self.attempt_id)

        self.store.write(work, patience=self.patience)

    def finish(self, state: AttemptState, **details: Any) -> None:
        self.store.finish_attempt(self.attempt_id, self.fence, state, **details)


def finite_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a curve point, a measurement or an example as columns, with non-finite numbers as None.

    Dicts stay as they are; text is returned in storable form.
    """
    return {name: value if isinstance(value, dict) else finite_or_none(value) for name, value in asdict(record).items()}


def _with_finite_value(measurement: Measurement) -> Measurement:
    """Return the measurement with a non-finite value replaced by None and a reason; others unchanged.

    A reason that the measurement already has is kept. Otherwise it starts with `nan:`, or with `inf:` for both
    infinities.
    """
    value = measurement.value
    if value is None or math.isfinite(value):
        return measurement
    code = "nan" if math.isnan(value) else "inf"
    return replace(measurement, value=None, reason=measurement.reason or f"{code}: the value is not finite")
