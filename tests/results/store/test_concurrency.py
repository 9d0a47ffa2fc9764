"""Many processes at once, killed processes, and a database that somebody else keeps locked."""

import multiprocessing
import os
import signal
import sqlite3
import threading
import time

import pytest
from atma_sweep.results.errors import CellAlreadyRunning, StoreBusy, SweepBusy
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Measurement, Owner
from atma_sweep.results.store.schema import EventRow, MeasurementRow, SweepRow
from atma_sweep.results.store.store import open_store
from patience import PATIENCE_S
from sqlalchemy import func, insert, select

FORK = multiprocessing.get_context("fork")
PROCESSES = 16


def race(work, count=PROCESSES):
    """Runs work(index) in that many processes that start together; returns what each put out, sorted by index."""
    results, start = FORK.Queue(), FORK.Barrier(count)

    def run(index):
        start.wait()
        try:
            results.put((index, work(index)))
        except BaseException as error:
            results.put((index, f"{type(error).__name__}: {error}"))
            raise

    processes = [FORK.Process(target=run, args=(index,)) for index in range(count)]
    for process in processes:
        process.start()
    outcomes = sorted(results.get(timeout=PATIENCE_S) for _ in range(count))
    for process in processes:
        process.join(timeout=PATIENCE_S)
    return [result for _, result in outcomes]


def quick(store, cells):
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells)


@pytest.mark.thorough
def test_concurrent_processes_create_a_single_database(url, cells):
    def work(index):
        with_cells = open_store(url, create=True)
        number = with_cells.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(3))
        return number, len(with_cells.cell_states())

    assert race(work) == [(1, 3)] * PROCESSES


@pytest.mark.thorough
def test_start_attempt_succeeds_in_a_single_process(store, url, cells):
    quick(store, cells(1))

    def work(index):
        try:
            mine = open_store(url).start_attempt(
                cells(1)[0].id, owner=Owner(name=str(index), host="h", pid=index, started=0.0), fence=index
            )
        except CellAlreadyRunning:
            return "taken"
        return mine.number

    assert sorted(map(str, race(work))) == ["1"] + ["taken"] * (PROCESSES - 1)
    assert len(store.attempts(cells(1)[0].id)) == 1


@pytest.mark.thorough
def test_acquire_sweep_succeeds_in_a_single_process(store, url, cells):
    quick(store, cells(1))

    def work(index):
        me = Owner(name=str(index), host="h", pid=index, started=0.0)
        try:
            return str(open_store(url).acquire_sweep("quick", me, 60, is_alive=lambda held: True))
        except SweepBusy:
            return "busy"

    assert sorted(race(work)) == ["1"] + ["busy"] * (PROCESSES - 1)


@pytest.mark.thorough
def test_no_update_is_lost(store, url, cells):
    quick(store, cells(1))

    def work(index):
        mine = open_store(url)

        def add(session):
            seen = session.scalar(select(SweepRow.owner_pid).with_for_update()) or 0
            session.query(SweepRow).update({"owner_pid": seen + 1})

        for _ in range(10):
            mine.write(add)
        return "done"

    assert race(work, 8) == ["done"] * 8
    with store.transaction(write=False) as session:
        assert session.scalar(select(SweepRow.owner_pid)) == 80


def test_a_store_survives_a_fork(store, cells):
    quick(store, cells(2))  # the parent has used its connection
    assert race(lambda index: len(store.cell_states()), 3) == [2, 2, 2]
    assert len(store.cell_states()) == 2


def test_threads_share_a_store(store, cells, owner):
    quick(store, cells(6))
    attempts = [store.start_attempt(cell.id, owner=owner, fence=1) for cell in cells(6)]

    def work(attempt):
        recorder = DatabaseRecorder(store, attempt.id, 1)
        for step in range(5):
            recorder.curve([CurvePoint(step=step, tokens=step, wall_s=0.0, train_loss=float(attempt.id))])

    threads = [threading.Thread(target=work, args=(attempt,)) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[point.train_loss for point in store.curve(attempt.id)] for attempt in attempts] == [
        [float(attempt.id)] * 5 for attempt in attempts
    ]


def test_a_killed_writer_leaves_no_half_and_no_lock(store, url, cells, owner):
    quick(store, cells(1))
    attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=1)
    reached, never = FORK.Event(), FORK.Event()

    def work():
        with open_store(url).transaction() as session:
            session.execute(insert(EventRow).values(at=store.attempt(attempt.id).started_at, kind="half", message="x"))
            reached.set()
            never.wait()

    process = FORK.Process(target=work)
    process.start()
    assert reached.wait(PATIENCE_S)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    DatabaseRecorder(store, attempt.id, 1).measurements([Measurement(probe="p", metric="m", value=1.0)])
    with store.transaction(write=False) as session:
        assert session.scalar(select(func.count()).select_from(EventRow).where(EventRow.kind == "half")) == 0
        assert session.scalar(select(func.count()).select_from(MeasurementRow)) == 1


@pytest.fixture
def impatient(monkeypatch):
    """The driver gives up on a lock after 100 ms, so that our own waiting is what is tested."""
    monkeypatch.setattr("atma_sweep.results.store.database.BUSY_MS", 100)


def test_a_lock_held_for_seconds_is_waited_for(tmp_path, cells, owner, impatient):
    store = open_store(tmp_path / "test.db", create=True)
    quick(store, cells(1))
    attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=1)
    holder = sqlite3.connect(tmp_path / "test.db", isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(2.0, lambda: holder.execute("COMMIT"))
    release.start()
    start = time.monotonic()
    DatabaseRecorder(store, attempt.id, 1).measurements([Measurement(probe="p", metric="m", value=1.5)])
    assert time.monotonic() - start > 1.5
    release.join()
    holder.close()
    store.finish_attempt(attempt.id, 1, "done")
    assert [value.value for value in store.measurements(cells(1)[0].id)] == [1.5]


def test_patience_ends_with_a_single_clear_line(tmp_path, cells, owner, impatient):
    store = open_store(tmp_path / "test.db", create=True)
    quick(store, cells(1))
    attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=1)
    holder = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="is locked"):
        DatabaseRecorder(store, attempt.id, 1, patience=0.3).heartbeat()
    assert store.cell_states()[0].state == "running"  # readers never wait
    holder.close()
    DatabaseRecorder(store, attempt.id, 1).heartbeat()
