"""Contract of all attempt writers: the same calls leave the same rows, and the same calls are refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from atma_sweep.results.errors import LeaseLost
from atma_sweep.results.store.journal import JournalReader, JournalRecorder
from atma_sweep.results.store.recorder import AttemptWriter, DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Example, Measurement, Owner, Provenance
from atma_sweep.results.store.schema import Base, UtcTime
from atma_sweep.results.store.store import Store
from sqlalchemy import select, text

NAN, INF = math.nan, math.inf
POINT = CurvePoint(step=4, tokens=400, wall_s=2.0, train_loss=1.5, val_loss=1.75, lr=0.5, peak_memory=2**40)
TABLES = ("attempt", "provenance", "curve_point", "measurement", "example", "event")
CALLS: dict[str, Callable[[AttemptWriter], Any]] = {
    "set_process": lambda writer: writer.set_process(17, 2.5, host="node-3", space="boot"),
    "heartbeat": lambda writer: writer.heartbeat(),
    "settle": lambda writer: writer.settle(),
    "provenance": lambda writer: writer.provenance(
        Provenance(config={"lr": 0.1}, seed=5, gpu_uuid="GPU-1", kernels={"wall": "reference"})
    ),
    "neighbours": lambda writer: writer.neighbours(),
    "progress": lambda writer: writer.progress(5, 10, 1.25, 99.5, "training"),
    "curve": lambda writer: writer.curve([POINT]),
    "inherit_curve": lambda writer: writer.inherit_curve(1, 3),
    "measurements": lambda writer: writer.measurements([Measurement(probe="val", metric="val_loss", value=1.5, n=7)]),
    "examples": lambda writer: writer.examples([Example(probe="val", metric="nats", item=3, value=0.5)]),
    "checkpoint": lambda writer: writer.checkpoint("c/1/step5"),
    "finish": lambda writer: writer.finish("done", exit_code=0, weights="w"),
}
"""Every call that an attempt which is no longer ours is refused."""
FREE = {"event", "last_point"}


@dataclass
class Desk:
    """A running attempt (fence 3) of the cell of an earlier one with a curve, in a database of its own."""

    store: Store
    folder: Path
    through: str
    cell: Any
    owner: Owner
    readers: list[JournalReader] = field(default_factory=list)
    journals: int = 0

    def __post_init__(self) -> None:
        self.store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=[self.cell])
        earlier = self.store.start_attempt(self.cell.id, owner=self.owner, fence=2)
        points = [CurvePoint(step=step, tokens=step, wall_s=0.5, train_loss=9.0) for step in range(5)]
        DatabaseRecorder(self.store, earlier.id, 2).curve(points)
        self.store.interrupt_dead(earlier.id, "gone")
        assert earlier.id == 1
        self.attempt = self.store.start_attempt(self.cell.id, owner=self.owner, fence=3, steps_total=8)
        self.ends = {1: points[-1]}
        self.writer = self.another(3)

    def another(self, fence: int) -> AttemptWriter:
        """Return a further writer for the same attempt."""
        if self.through == "direct":
            return DatabaseRecorder(self.store, self.attempt.id, fence)
        self.journals += 1
        file = self.folder / f"{self.journals}.jsonl"
        self.readers.append(JournalReader(file, self.store, self.attempt.id, fence))
        return JournalRecorder(file, self.ends)

    def deliver(self) -> None:
        """Whatever was written is in the database afterwards."""
        for reader in self.readers:
            reader.apply()

    def rows(self, *, times: bool = False) -> dict[str, list[Any]]:
        """Everything that the database holds of the attempt, but the numbers of rows."""
        rows_by_table = {}
        with self.store.transaction(write=False) as session:
            for name in TABLES:
                table = Base.metadata.tables[name]
                columns = [
                    column
                    for column in table.columns
                    if column.name != "id" and (times or not isinstance(column.type, UtcTime))
                ]
                whose = table.c.id if name == "attempt" else table.c.attempt_id
                query = select(*columns).where(whose == self.attempt.id)
                rows_by_table[name] = sorted((dict(row._mapping) for row in session.execute(query)), key=repr)
        return rows_by_table

    def row(self, name: str) -> dict[str, Any]:
        (single,) = self.rows(times=True)[name]
        return single  # type: ignore[no-any-return]


@pytest.fixture(params=["direct", "journal"])
def desk(request: pytest.FixtureRequest, store: Store, tmp_path: Path, cells: Any, owner: Owner) -> Desk:
    return Desk(store, tmp_path, request.param, cells(1)[0], owner)


def test_writers_implement_every_call_of_the_protocol() -> None:
    """A method that a writer lacked would be the protocol's empty one, which writes nothing."""
    methods = {name for name in vars(AttemptWriter) if name[0] != "_"}
    assert methods == set(CALLS) | FREE
    for kind in (DatabaseRecorder, JournalRecorder):
        assert methods <= set(vars(kind))
        assert "__init__" in vars(kind)
        for name in methods - {"finish"}:
            assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(AttemptWriter, name))


class TestContract:
    def test_what_stands_in_the_database_afterwards(self, desk: Desk) -> None:
        for name, call in CALLS.items():
            if name == "finish":
                desk.writer.event("resumed", "from step 3 of attempt 1")
            call(desk.writer)
        desk.writer.event("storage", "left behind")
        desk.deliver()
        rows = desk.rows()
        attempt, provenance = rows["attempt"][0], rows["provenance"][0]
        expected = {
            "state": "done", "pid": 17, "pid_started": 2.5, "host": "node-3", "pid_space": "boot", "step": 5,
            "steps_total": 10, "loss": 1.25, "tokens_per_s": 99.5, "phase": "training", "checkpoint": "c/1/step5",
            "weights": "w", "exit_code": 0, "cause": None, "traceback": None, "failure": None, "number": 2, "fence": 3,
        }  # fmt: skip
        assert {name: attempt[name] for name in expected} == expected
        expected = {"config": {"lr": 0.1}, "seed": 5, "gpu_uuid": "GPU-1", "co_tenants": 0, "packages": {}, "host": ""}
        expected |= {"kernels": {"wall": "reference"}}
        assert {name: provenance[name] for name in expected} == expected
        inherited = [CurvePoint(step=step, tokens=step, wall_s=0.5, train_loss=9.0) for step in range(4)]
        assert desk.store.curve(desk.attempt.id) == [*inherited, POINT]
        assert len(desk.store.curve(1)) == 5, "the earlier attempt keeps its own"
        (value,) = desk.store.measurements(desk.cell.id)
        assert (value.probe, value.metric, value.length, value.value, value.n) == ("val", "val_loss", 0, 1.5, 7)
        assert [(e["probe"], e["metric"], e["item"], e["position"], e["value"]) for e in rows["example"]] == [
            ("val", "nats", 3, 0, 0.5)
        ]
        events = [event for event in desk.store.events(cell_id=desk.cell.id) if event.attempt_id == desk.attempt.id]
        assert [(event.kind, event.message) for event in events] == [
            ("started", "attempt 2 (train) on here"), ("resumed", "from step 3 of attempt 1"), ("done", "done"),
            ("storage", "left behind"),
        ]  # fmt: skip
        assert {event.cell_id for event in events} == {desk.cell.id}

    def test_the_same_twice_is_once_and_the_later_wins(self, desk: Desk) -> None:
        for name in [*CALLS, *CALLS]:
            if name != "finish":
                CALLS[name](desk.writer)
        desk.writer.event("note", "once")
        desk.writer.event("note", "once")
        desk.deliver()
        counts = {name: len(rows) for name, rows in desk.rows().items()}
        assert counts == {"attempt": 1, "provenance": 1, "curve_point": 5, "measurement": 1, "example": 1, "event": 2}
        desk.writer.measurements([Measurement(probe="val", metric="val_loss", value=2.5)])
        desk.writer.examples([Example(probe="val", metric="nats", item=3, value=None)])
        desk.writer.curve([CurvePoint(step=4, tokens=401, wall_s=3.0, train_loss=1.0)])
        desk.writer.inherit_curve(1, 4)  # which replaces nothing
        desk.writer.event("note", "another")
        desk.deliver()
        rows = desk.rows()
        assert {name: len(listed) for name, listed in rows.items()} == counts | {"event": 3}
        assert (rows["measurement"][0]["value"], rows["measurement"][0]["n"]) == (2.5, None)
        assert rows["example"][0]["value"] is None
        assert desk.store.curve(desk.attempt.id)[-1] == CurvePoint(step=4, tokens=401, wall_s=3.0, train_loss=1.0)

    @pytest.mark.thorough
    @pytest.mark.parametrize("how", ["another fence", "reaped", "finished"])
    def test_who_is_not_its_writer_any_more_is_refused(self, desk: Desk, how: str) -> None:
        if how == "reaped":
            desk.store.interrupt_dead(desk.attempt.id, "gone")
        elif how == "finished":
            desk.writer.finish("failed", cause="x")
            desk.deliver()
        before = desk.rows(times=True)
        for name, call in CALLS.items():
            desk.readers.clear()
            stale = desk.another(2 if how == "another fence" else 3)
            if name == "settle" and desk.through == "journal":
                call(stale)  # writes nothing, so there is nothing to refuse
                continue
            with pytest.raises(LeaseLost, match="nothing was written"):
                self.written(desk, call, stale)
            assert desk.rows(times=True) == before

    @staticmethod
    def written(desk: Desk, call: Callable[[AttemptWriter], Any], writer: AttemptWriter) -> None:
        call(writer)
        desk.deliver()

    def test_an_event_may_come_after_the_end(self, desk: Desk) -> None:
        desk.writer.finish("done")
        desk.writer.event("storage", "left behind")
        desk.deliver()
        assert [event["kind"] for event in desk.rows()["event"]].count("storage") == 1

    def test_running_is_no_end(self, desk: Desk) -> None:
        before = desk.rows()
        with pytest.raises(ValueError, match="cannot finish as 'running'"):
            desk.writer.finish("running")
        desk.deliver()
        assert desk.rows() == before

    def test_numbers_that_are_not_finite(self, desk: Desk) -> None:
        desk.writer.measurements(
            [
                Measurement(probe="p", metric="nan", value=NAN, low=NAN, high=1.0),
                Measurement(probe="p", metric="inf", value=-INF, reason="diverged: loss left the range"),
            ]
        )
        desk.writer.curve([CurvePoint(step=1, tokens=1, wall_s=1.0, train_loss=INF, grad_norm=NAN, lr=-INF)])
        desk.writer.examples([Example(probe="p", metric="m", item=0, value=NAN, detail={"logits": [1.0, INF, -INF]})])
        config = {"weight": NAN, "a": [-INF, np.float32("nan"), np.int64(3), {"é": None}]}
        desk.writer.examples([Example(probe="p", metric="m", item=1, value=None, detail=None)])
        desk.writer.provenance(Provenance(config=config, seed=0, extra={"nested": {"x": [INF]}}))
        desk.writer.progress(1, loss=1.0)
        desk.writer.progress(2, loss=NAN, tokens_per_s=INF)
        desk.deliver()
        rows = desk.rows()
        values = {row["metric"]: (row["value"], row["low"], row["high"], row["reason"]) for row in rows["measurement"]}
        assert values == {
            "nan": (None, None, 1.0, "nan: the value is not finite"),
            "inf": (None, None, None, "diverged: loss left the range"),
        }
        assert desk.store.curve(desk.attempt.id) == [CurvePoint(step=1, tokens=1, wall_s=1.0, train_loss=None)]
        assert (rows["example"][0]["value"], rows["example"][0]["detail"]) == (
            None, {"logits": [1.0, "Infinity", "-Infinity"]},
        )  # fmt: skip
        expected = {"weight": "NaN", "a": ["-Infinity", "NaN", 3, {"é": None}]}
        assert list(rows["provenance"][0]["config"].items()) == list(expected.items()), "in the order given"
        with desk.store.transaction(write=False) as session:  # not the JSON word null
            assert session.scalar(text("SELECT COUNT(*) FROM example WHERE detail IS NULL")) == 1
        assert rows["provenance"][0]["extra"] == {"nested": {"x": ["Infinity"]}}
        assert [rows["attempt"][0][name] for name in ("step", "loss", "tokens_per_s")] == [2, None, None]

    def test_writers_accept_numpy_numbers_and_any_mapping(self, desk: Desk) -> None:
        third = np.float32(1 / 3)
        desk.writer.curve([CurvePoint(step=1, tokens=2**40, wall_s=1.0, train_loss=third)])  # type: ignore[arg-type]
        desk.writer.measurements([Measurement(probe="p", metric="m", value=np.float64(0.1), n=2**40)])
        packages = MappingProxyType({"torch": "2"})
        desk.writer.provenance(
            Provenance(config={"path": Path("a/b")}, seed=2**40, packages=packages, extra={"n": third})
        )
        desk.deliver()
        rows = desk.rows()
        assert (rows["curve_point"][0]["train_loss"], rows["curve_point"][0]["tokens"]) == (float(third), 2**40)
        assert (rows["measurement"][0]["value"], rows["measurement"][0]["n"]) == (0.1, 2**40)
        expected = {"config": {"path": "a/b"}, "seed": 2**40, "packages": {"torch": "2"}, "extra": {"n": float(third)}}
        assert {name: rows["provenance"][0][name] for name in expected} == expected

    def test_text_that_is_long_or_strange(self, desk: Desk) -> None:
        long = "quote ' \" % _ \\ : ; -- $1 %s {} \U0001f600 e\u0301" + "ü\u2028" * 100_000
        desk.writer.measurements(
            [
                Measurement(probe="p", metric="m", reason=f"oom: {long}"),
                Measurement(probe="p\0", metric="\udc80", value=1.0),
            ]
        )
        desk.writer.event("note", f"a\0b\udc80{long}")
        desk.writer.provenance(Provenance(config={"key": "\udc80"}, seed=0, host="h\0", extra={"long": long}))
        desk.writer.checkpoint(long)
        cause = f"postgresql://me:secret@host/db is away\0 {long}"
        desk.writer.finish("failed", cause=cause, traceback=f"{cause}\nline 2", failure="code", exit_code=1)
        desk.deliver()
        rows = desk.rows()
        assert sorted((row["probe"], row["metric"], row["reason"]) for row in rows["measurement"]) == [
            ("p", "m", f"oom: {long}"), ("p\ufffd", "?", None),
        ]  # fmt: skip
        assert f"a\ufffdb?{long}" in [row["message"] for row in rows["event"]]
        expected = {"config": {"key": "?"}, "host": "h\ufffd", "extra": {"long": long}}
        assert {name: rows["provenance"][0][name] for name in expected} == expected
        attempt = rows["attempt"][0]
        assert (attempt["checkpoint"], attempt["failure"], attempt["exit_code"]) == (long, "code", 1)
        assert attempt["cause"].endswith(f" is away\ufffd {long}")
        assert attempt["traceback"] == f"{attempt['cause']}\nline 2"
        assert "secret" not in repr(rows)

    def test_times_are_those_of_the_database_in_utc(self, desk: Desk) -> None:
        begun = desk.row("attempt")["heartbeat_at"]
        for name in ("heartbeat", "progress", "measurements"):
            CALLS[name](desk.writer)
            desk.deliver()
            beat = desk.row("attempt")["heartbeat_at"]
            assert beat >= begun
            begun = beat
        CALLS["finish"](desk.writer)
        desk.deliver()
        attempt, value = desk.row("attempt"), desk.row("measurement")
        times = (attempt["started_at"], value["created_at"], attempt["finished_at"])
        assert times == tuple(sorted(times))
        assert all(abs(datetime.now(UTC) - moment) < timedelta(hours=1) and moment.tzinfo == UTC for moment in times)

    def test_last_point_has_the_highest_step(self, desk: Desk) -> None:
        assert desk.writer.last_point() is None
        desk.writer.curve([])
        assert desk.writer.last_point() is None
        desk.writer.curve([CurvePoint(step=2, tokens=2, wall_s=0.5, train_loss=NAN, tokens_per_s=INF)])
        own = CurvePoint(step=2, tokens=2, wall_s=0.5, train_loss=None)
        assert desk.writer.last_point() == own
        desk.writer.curve([CurvePoint(step=1, tokens=1, wall_s=0.25, train_loss=1.0)])
        assert desk.writer.last_point() == own
        desk.writer.inherit_curve(1, 4)
        assert desk.writer.last_point() == CurvePoint(step=4, tokens=4, wall_s=0.5, train_loss=9.0)
        desk.deliver()
        assert [point.step for point in desk.store.curve(desk.attempt.id)] == [0, 1, 2, 3, 4]
