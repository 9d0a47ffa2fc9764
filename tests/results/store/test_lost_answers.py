"""Every write is done once, also when the connection dies while the server commits it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import postgres
import pytest
from atma_sweep.results.errors import CellAlreadyRunning, LeaseLost, StoreBusy
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.store import database_connection
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Example, Measurement, NewRevision, Owner, Provenance
from atma_sweep.results.store.schema import Base, EventRow, UtcTime
from atma_sweep.results.store.store import Store, open_store
from proxy import Proxy
from sqlalchemy import func, select

ME = Owner(name="ada", host="here", pid=101, started=1.5)
GRID: dict[str, Any] = {"grid_text": "x", "grid_file": "x.yaml"}
NEVER = datetime.fromtimestamp(0, UTC)
POINT = CurvePoint(step=1, tokens=1, wall_s=1.0, train_loss=1.0)


@dataclass
class Desk:
    """A database with a sweep that is held under fence 1, a finished attempt and a running one."""

    store: Store
    cells: list[Any]
    folder: Path

    def __post_init__(self) -> None:
        self.store.record_revision("quick", **GRID, cells=self.cells)
        self.store.acquire_sweep("quick", ME, 600.0)
        self.done = self.store.start_attempt(self.cells[0].id, owner=ME, fence=1)
        DatabaseRecorder(self.store, self.done.id, 1).curve([POINT])
        self.store.finish_attempt(self.done.id, 1, "done", weights="w")
        self.running = self.store.start_attempt(self.cells[1].id, owner=ME, fence=1)
        self.store.request_actions("quick", retry=["a", "b"])

    @property
    def recorder(self) -> DatabaseRecorder:
        return DatabaseRecorder(self.store, self.running.id, 1)

    def rows(self) -> dict[str, list[Any]]:
        """Everything in the database but the times, and the numbers of rows: what is undone uses them up."""
        rows_by_table = {}
        with self.store.transaction(write=False) as session:
            for table in Base.metadata.sorted_tables:
                serial = {"id", *(f"{name}_id" for name in ("sweep", "revision", "attempt"))}
                columns = [
                    column
                    for column in table.columns
                    if not isinstance(column.type, UtcTime) and column.name not in serial
                ]
                rows_by_table[table.name] = sorted(map(repr, session.execute(select(*columns))))
        return rows_by_table


def _second_attempt(desk: Desk) -> Any:
    revision = NewRevision(grid_text="y", grid_file="y.yaml", cells=desk.cells)
    return desk.store.acquire_sweep("other", ME, 60.0, revision=revision, clear_requests=True)


def _pruned(desk: Desk) -> None:
    desk.store.interrupt_dead(desk.running.id, "asked to leave")
    desk.store.mark_pruned(desk.running.id, "hopeless")


def _refused(desk: Desk) -> str:
    """A start that another attempt stands in the way of is refused, answer or no answer."""
    with pytest.raises(CellAlreadyRunning, match="attempt 1, pid 101 on here"):
        desk.store.start_attempt(desk.cells[1].id, owner=ME, fence=1)
    return str(desk.store.start_attempt(desk.cells[2].id, owner=ME, fence=1).number)


def _import(desk: Desk) -> Any:
    summary = import_bundle(desk.store, desk.folder / "quick.zip", runs=desk.folder / "runs")
    return summary.added


STORE: dict[str, Callable[[Desk], Any]] = {
    "record_revision": lambda desk: desk.store.record_revision("quick", grid_text="z", grid_file="z", cells=[]),
    "acquire_sweep": _second_attempt,
    "set_read_only": lambda desk: desk.store.set_read_only("quick"),
    "extend_revision": lambda desk: desk.store.extend_revision(
        "quick", 1, [replace(desk.cells[0], id="e" * 12)], new_forecast={}
    ),
    "renew_sweep": lambda desk: desk.store.renew_sweep("quick", 1, 60.0),
    "release_sweep": lambda desk: desk.store.release_sweep("quick", 1),
    Store.request_actions.__name__: lambda desk: desk.store.request_actions("quick", pause=True, retry=["a"]),
    Store.clear_retries.__name__: lambda desk: desk.store.clear_retries("quick", retry=["a"]),
    "start_attempt": lambda desk: replace(
        desk.store.start_attempt(desk.cells[2].id, owner=ME, fence=1, sweep="quick"),
        id=0,
        started_at=NEVER,
        heartbeat_at=NEVER,
    ),
    "set_process": lambda desk: desk.store.set_process(desk.running.id, 1, 5, 2.5),
    "finish_attempt": lambda desk: desk.store.finish_attempt(desk.running.id, 1, "failed", cause="x"),
    "interrupt_dead": lambda desk: desk.store.interrupt_dead(desk.running.id, "dead"),
    "mark_pruned": _pruned,
    Store.clear_weights.__name__: lambda desk: desk.store.clear_weights(desk.done.id),
    "add_event": lambda desk: desk.store.add_event("note", "once", sweep="quick"),
}
RECORDER: dict[str, Callable[[Desk], Any]] = {
    "event": lambda desk: desk.recorder.event("note", "once"),
    "heartbeat": lambda desk: desk.recorder.heartbeat(),
    "settle": lambda desk: desk.recorder.settle(),
    "provenance": lambda desk: desk.recorder.provenance(Provenance(config={"a": 1}, seed=1)),
    "neighbours": lambda desk: desk.recorder.neighbours(),
    "progress": lambda desk: desk.recorder.progress(3, 9, 0.5, 1.0, "training"),
    "curve": lambda desk: desk.recorder.curve([POINT]),
    "inherit_curve": lambda desk: desk.recorder.inherit_curve(desk.done.id, 1),
    "measurements": lambda desk: desk.recorder.measurements([Measurement(probe="p", metric="m", value=1.5)]),
    "examples": lambda desk: desk.recorder.examples([Example(probe="p", metric="m", item=1, value=0.5)]),
    "checkpoint": lambda desk: desk.recorder.checkpoint("c/1"),
}
FURTHER_WRITES: dict[str, Callable[[Desk], Any]] = {"a start that is refused": _refused, "an import": _import}
WRITES = STORE | RECORDER | FURTHER_WRITES


def test_every_write_method_is_covered() -> None:
    """Whoever adds one adds it to the tests below."""

    def writing(kind: type) -> set[str]:
        bodies = {name: inspect.getsource(body) for name, body in vars(kind).items() if inspect.isfunction(body)}
        calls = ("self.write(", "self._write(", "self._upsert(", "self.store.write(")
        return {name for name, text in bodies.items() if name[0] != "_" and any(call in text for call in calls)}

    assert writing(Store) == set(STORE)
    assert writing(DatabaseRecorder) == set(RECORDER)


@pytest.fixture
def desk_on(server: str, template_database: str, cells: Callable[..., Any], tmp_path: Path) -> Any:
    """Yield a function that returns a desk in a database of its own behind a proxy, and that proxy."""
    bundle = tmp_path / "quick.zip"
    local = open_store(tmp_path / "local.db", create=True)
    local.record_revision("theirs", **GRID, cells=cells(3, prefix="d"))
    local.finish_attempt(local.start_attempt(cells(1, prefix="d")[0].id, owner=ME, fence=1).id, 1, "done")
    export_sweep(local, "theirs", bundle)
    local.close()

    @contextmanager
    def opened() -> Any:
        with postgres.database(server, template=template_database) as url, Proxy(url) as proxy:
            store = open_store(proxy.url)
            yield Desk(store, cells(3), tmp_path), proxy
            store.close()

    return opened


ENDINGS = [(what, "answer") for what in WRITES] + [
    (what, how) for how in ("request", "late") for what in ("start_attempt", "release_sweep", "add_event", "an import")
]


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "how"), ENDINGS)
def test_a_write_whose_answer_is_lost_is_done_once(desk_on: Any, what: str, how: Any) -> None:
    if postgres.SERVER_URL is not None:
        pytest.skip("needs PostgreSQL of its own, behind a proxy: unset ATMA_TEST_POSTGRES")
    write = WRITES[what]
    with desk_on() as (desk, _):
        expected = write(desk), desk.rows()
    with desk_on() as (desk, proxy):
        proxy.how, proxy.lose, proxy.late_s = how, 1, 0.3
        assert (write(desk), desk.rows()) == expected
        assert proxy.lost == 1


def test_create_database_survives_a_lost_answer(postgres_url: str) -> None:
    if postgres.SERVER_URL is not None:
        pytest.skip("needs PostgreSQL of its own, behind a proxy: unset ATMA_TEST_POSTGRES")
    with Proxy(postgres_url) as proxy:
        proxy.lose = 1
        store = open_store(proxy.url, create=True)
        assert (store.sweeps(), proxy.lost) == ([], 1)
        store.close()


def test_a_transaction_that_the_server_still_holds_open_is_ended(desk_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off by a network that tells nobody, it would keep its locks, and could be committed after all."""
    monkeypatch.setattr(database_connection, "OUTCOME_TIMEOUT_S", 0.5)
    with desk_on() as (desk, proxy):
        proxy.how, proxy.lose, proxy.late_s = "late", 1, 60.0
        desk.store.add_event("note", "once")
        with desk.store.transaction(write=False) as session:
            assert session.scalar(select(func.count()).select_from(EventRow).where(EventRow.message == "once")) == 1


def test_permanently_lost_answers_end_with_a_single_line(desk_on: Any) -> None:
    with desk_on() as (desk, proxy):
        proxy.how, proxy.lose = "request", float("inf")
        with pytest.raises(StoreBusy, match="does not answer; start its server"):
            DatabaseRecorder(desk.store, desk.running.id, 1, patience=0.3).heartbeat()
        assert proxy.lost > 1
        proxy.lose = 0
        desk.store.interrupt_dead(desk.running.id, "gone")
        with pytest.raises(LeaseLost):
            desk.recorder.heartbeat()
