"""Rebuilds of a served page: after every change of its sweep, never without one, and at a limited rate."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from atma_sweep.reports.dashboard.server import page_cache as module
from atma_sweep.reports.dashboard.server.page_cache import PageCache
from atma_sweep.results.errors import StoreBusy
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Measurement
from atma_sweep.results.store.store import Store, open_store
from patience import until
from sqlalchemy import event
from synthetic import OWNER, synthetic_sweep


@pytest.fixture
def store(blank: Path, tmp_path: Path) -> Store:
    """Return a store with four finished cells."""
    store = open_store(shutil.copy(blank, tmp_path / "atma.db"))
    synthetic_sweep(store, 4, 5)
    return store


class Clock:
    """Clock that a test sets by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock_of_test = Clock()
    monkeypatch.setattr(module, "time", clock_of_test)
    return clock_of_test


class Maker:
    """Makes blocks that count how often they were made, in so many seconds each."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.builds, self.seconds = clock, 0, 0.0
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self, store: Store, sweep: str) -> tuple[str, Mapping[str, bytes]]:
        self.go.wait(30)
        self.clock.now += self.seconds
        if self.error is not None:
            raise self.error
        self.builds += 1
        return sweep, {"core": b"%d" % self.builds, "answer": b"0"}


def idle(newest: PageCache) -> bool:
    return newest._rebuild_thread is None


def changed(store: Store) -> None:
    store.add_event("told", "something happened", sweep="big")


def test_cache_does_not_rebuild_without_changes(store: Store, clock: Clock) -> None:
    make = Maker(clock)
    newest = PageCache(store, "big", make)
    for _ in range(50):
        clock.now += 2
        assert newest.poll()["version"] == 1
    assert make.builds == 1


def test_cache_checks_database_once_per_second(store: Store, clock: Clock) -> None:
    newest = PageCache(store, "big", Maker(clock))
    queries = []
    event.listen(store.engine, "begin", lambda connection: queries.append(clock.now))
    for _ in range(40):
        clock.now += 0.1
        newest.poll()
    assert len(queries) in (3, 4)


def test_cache_rebuilds_in_background(store: Store, clock: Clock) -> None:
    make = Maker(clock)
    newest = PageCache(store, "big", make)
    changed(store)
    make.go.clear()
    clock.now += 2
    assert newest.poll()["version"] == 1
    clock.now += 2
    assert newest.poll()["version"] == 1, "while it is made"
    make.go.set()
    until(lambda: idle(newest))
    assert newest.poll()["version"] == 2
    assert (newest.build.blocks["core"], newest.find_version(1).blocks["core"]) == (b"2", b"1")  # type: ignore[union-attr]
    assert newest.find_version(3) is None


def test_it_rests_four_times_as_long_as_it_took(store: Store, clock: Clock) -> None:
    make = Maker(clock)
    newest = PageCache(store, "big", make)
    make.seconds = 10.0
    changed(store)
    clock.now += 2
    newest.poll()
    until(lambda: idle(newest))
    changed(store)
    for _ in range(39):
        clock.now += 1
        newest.poll()
        assert idle(newest)
    clock.now += 2
    newest.poll()
    until(lambda: idle(newest))
    assert newest.build.version == 3
    assert newest.find_version(1) is None, "two are kept"


def test_cache_reports_trouble_until_it_passes(store: Store, clock: Clock) -> None:
    make = Maker(clock)
    newest = PageCache(store, "big", make)
    make.error = StoreBusy("atma.db is locked\x1b[2J by another program; close it and launch again")
    changed(store)
    clock.now += 2
    newest.poll()
    until(lambda: idle(newest))
    assert newest.poll() == {
        "version": 1,
        "at": newest.poll()["at"],
        "trouble": "atma.db is locked\ufffd[2J by another program; close it",
    }
    make.error = None
    clock.now += 2
    newest.poll()
    until(lambda: newest.build.version == 2)
    assert newest.poll()["trouble"] is None


CHANGES: dict[str, Callable[[Store, DatabaseRecorder, int], object]] = {
    "a step": lambda store, recorder, attempt: recorder.progress(3, 10, 2.5, 100.0),
    "a point": lambda store, recorder, attempt: recorder.curve([CurvePoint(step=9, tokens=9, wall_s=1.0, train_loss=2.0)]),
    "a number": lambda store, recorder, attempt: recorder.measurements([Measurement(probe="val", metric="val_loss", value=2.0)]),
    "an end": lambda store, recorder, attempt: store.finish_attempt(attempt, 1, "done", weights="w"),
    "a wish": lambda store, recorder, attempt: store.request_actions("big", pause=True),
    "an event": lambda store, recorder, attempt: changed(store),
    "an owner": lambda store, recorder, attempt: store.acquire_sweep("big", OWNER, 60),
    "a launch": lambda store, recorder, attempt: store.record_revision("big", grid_text="axes: {a: 1}\n", grid_file="big.yaml", cells=[]),
    "an attempt": lambda store, recorder, attempt: store.start_attempt(f"{1:012x}", owner=OWNER, fence=1),
}  # fmt: skip


@pytest.mark.parametrize("what", list(CHANGES))
def test_every_change_leaves_its_mark(store: Store, what: str) -> None:
    running = store.start_attempt(f"{0:012x}", owner=OWNER, fence=1)
    recorder = DatabaseRecorder(store, running.id, 1)
    before = store.change_token("big")
    assert store.change_token("big") == before
    CHANGES[what](store, recorder, running.id)
    assert store.change_token("big") != before


def test_weights_that_are_gone_leave_their_mark(store: Store) -> None:
    attempt = store.start_attempt(f"{0:012x}", owner=OWNER, fence=1)
    store.finish_attempt(attempt.id, 1, "done", weights="w")
    before = store.change_token("big")
    store.clear_weights(attempt.id)
    assert store.change_token("big") != before


def test_a_heartbeat_alone_changes_nothing_on_the_page(store: Store) -> None:
    attempt = store.start_attempt(f"{0:012x}", owner=OWNER, fence=1)
    before = store.change_token("big")
    time.sleep(0.01)
    DatabaseRecorder(store, attempt.id, 1).heartbeat()
    assert store.change_token("big") == before


def test_a_mark_reads_no_numbers(store: Store) -> None:
    """Seven small queries, whatever the sweep holds, and of the measurements only the last one's id."""
    statements: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    store.change_token("big")
    selects = [text for text in statements if text.startswith("SELECT")]
    assert len(selects) <= 8
    assert [text for text in selects if "FROM measurement" in text] == [
        "SELECT max(measurement.id) AS max_1 \nFROM measurement"
    ]
