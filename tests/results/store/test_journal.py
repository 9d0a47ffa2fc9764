"""Calls that went through a file leave in the database what the same calls leave there directly."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.results.store.journal import JOURNAL, JournalStore, Reader, recorder_of, settle
from atma_sweep.results.store.records import Attempt, CurvePoint, Example, Measurement, Provenance
from atma_sweep.results.store.schema import CurvePointRow, EventRow, ExampleRow, MeasurementRow, ProvenanceRow
from atma_sweep.results.store.store import LostLease, Store, open_store
from sqlalchemy import func, select

NUMBERS = (MeasurementRow, ExampleRow, CurvePointRow, ProvenanceRow, EventRow)
NAN = float("nan")


def counts(store: Store) -> list[int]:
    with store.transaction(write=False) as session:
        return [session.scalar(select(func.count()).select_from(row)) or 0 for row in NUMBERS]


@pytest.fixture
def running(store: Store, cells: Any, owner: Any) -> tuple[Attempt, Attempt]:
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(2))
    first, second = (store.start_attempt(cell.id, owner=owner, fence=3) for cell in cells(2))
    return first, second


def work(store: Store | JournalStore, attempt: Attempt) -> None:
    """What an attempt writes, everything once."""
    recorder = recorder_of(store, attempt.id, 3)
    store.set_process(attempt.id, 3, 17, 2.5)
    recorder.provenance(Provenance(config={"lr": 0.1}, seed=5, packages={"numpy": "2"}, gpu_uuid="GPU-1"))
    recorder.heartbeat()
    store.add_event("resumed", "from step 3", cell_id=attempt.cell_id, attempt_id=attempt.id)
    recorder.progress(5, 10, NAN, 99.5, "training")
    for step in (0, 5, 10):
        value = np.float32(step + 0.25) if step else NAN
        recorder.curve([CurvePoint(step=step, tokens=step, wall_s=0.1, train_loss=value, lr=1.0)])  # type: ignore[arg-type]
    recorder.checkpoint("c/1/step5")
    recorder.measurements(
        [
            Measurement(probe="clean", metric="nats", length=64, value=1 / 3, n=7),
            Measurement(probe="clean", metric="nats", length=128, value=float("inf")),
            Measurement(probe="throughput", metric="mfu", value=None, reason="n/a: no peak"),
        ]
    )
    recorder.examples([Example(probe="clean", metric="nats", item=i, value=0.5 * i, detail={"a": [i]}) for i in (0, 1)])
    recorder.neighbours()
    store.finish_attempt(attempt.id, 3, "done", exit_code=0, weights="w")


def left(store: Store, attempt: Attempt) -> list[object]:
    """What stands in the database of an attempt, without times, ids and this machine's name."""
    found = store.attempt(attempt.id)
    values = [
        (one.probe, one.metric, one.length, one.value, one.n, one.reason) for one in store.measurements(found.cell_id)
    ]
    events = [(event.kind, event.message) for event in store.events(cell_id=found.cell_id)]
    source = store.provenance(found.id)
    main = (
        found.state,
        found.pid,
        found.step,
        found.loss,
        found.tokens_per_s,
        found.phase,
        found.checkpoint,
        found.weights,
    )
    return [main, found.exit_code, values, events, store.curve(found.id), source]


def test_a_journal_leaves_what_direct_writes_leave(
    store: Store, running: tuple[Attempt, Attempt], tmp_path: Path
) -> None:
    direct, through = running
    work(store, direct)
    work(JournalStore(tmp_path / JOURNAL), through)
    reader = Reader(tmp_path / JOURNAL, store, through.id, 3)
    assert reader.apply() == 13
    assert left(store, through) == left(store, direct)
    assert [point.train_loss for point in store.curve(through.id)] == [None, 5.25, 10.25]
    assert reader.apply() == 0


def test_lines_that_were_applied_before_a_kill_are_applied_again_without_a_trace(
    store: Store, running: tuple[Attempt, Attempt], tmp_path: Path
) -> None:
    """The one who applies dies after any line, and another begins anew from the first."""
    attempt = running[0]
    work(JournalStore(tmp_path / "whole"), attempt)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    file = tmp_path / JOURNAL
    for end in range(1, len(lines)):
        file.write_bytes(b"".join(lines[:end]))
        assert Reader(file, store, attempt.id, 3).apply() == end
    before = counts(store)
    file.write_bytes(b"".join(lines))
    assert Reader(file, store, attempt.id, 3).apply() == len(lines)
    assert counts(store) == [before[0], before[1], before[2], before[3], before[4] + 1]
    assert counts(store)[:4] == [3, 2, 3, 1]
    kinds = [event.kind for event in store.events(cell_id=attempt.cell_id)]
    assert kinds == ["started", "resumed", "done"]
    with pytest.raises(LostLease):
        Reader(file, store, attempt.id, 3).apply()
    assert counts(store)[:4] == [3, 2, 3, 1]


def test_a_torn_last_line_waits_for_its_end(store: Store, running: tuple[Attempt, Attempt], tmp_path: Path) -> None:
    attempt, file = running[0], tmp_path / JOURNAL
    work(JournalStore(file), attempt)
    whole = file.read_bytes()
    cut = whole.rindex(b"finish_attempt")
    file.write_bytes(whole[:cut])
    reader = Reader(file, store, attempt.id, 3)
    assert reader.apply() == 12
    assert store.attempt(attempt.id).state == "running"
    assert reader.apply() == 0
    file.write_bytes(whole)
    assert reader.apply() == 1
    assert store.attempt(attempt.id).state == "done"


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b'{"call": "rm", "given": [], "named": {}}\n', b"[1]\n", b"{}\n"])
def test_a_line_that_cannot_be_read_ends_the_journal(
    store: Store, running: tuple[Attempt, Attempt], tmp_path: Path, damage: bytes
) -> None:
    attempt, file = running[0], tmp_path / JOURNAL
    JournalStore(file).set_process(attempt.id, 3, 17, 2.5)
    with file.open("ab") as end:
        end.write(damage)
    work(JournalStore(file), attempt)
    reader = Reader(file, store, attempt.id, 3)
    assert (reader.apply(), reader.apply()) == (1, 0)
    found = store.attempt(attempt.id)
    assert (found.state, found.pid, found.step) == ("running", 17, 0)


def test_a_full_disk_leaves_no_half_line(
    store: Store, running: tuple[Attempt, Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, journal = running[0], JournalStore(tmp_path / JOURNAL)
    real, left_over = os.write, [10]

    def write(file: int, data: bytes) -> int:
        if left_over[0] <= 0:
            raise OSError(28, "No space left on device")
        size = real(file, data[: left_over[0]])
        left_over[0] -= size
        return int(size)

    with monkeypatch.context() as patch:
        patch.setattr("os.write", write)
        with pytest.raises(OSError, match="No space"):
            journal.set_process(attempt.id, 3, 17, 2.5)
    assert (tmp_path / JOURNAL).read_bytes() == b""
    work(journal, attempt)
    assert Reader(tmp_path / JOURNAL, store, attempt.id, 3).apply() == 13


def test_the_curve_that_is_inherited_is_whole(store: Store, running: tuple[Attempt, Attempt], tmp_path: Path) -> None:
    """The first attempt's machine is gone before anybody applied a line; the second goes on from its checkpoint."""
    first = running[0]
    folder = tmp_path / first.run_dir
    folder.mkdir(parents=True)
    recorder = recorder_of(JournalStore(folder / JOURNAL), first.id, 3)
    for step in (0, 5, 7):
        recorder.curve([CurvePoint(step=step, tokens=step, wall_s=0.1, train_loss=1.0)])
    settle(store, tmp_path, first.id)
    assert store.interrupt_dead(first.id, "gone")
    settle(store, tmp_path, first.id)
    second = running[1]
    late = JournalStore(tmp_path / "late")
    recorder_of(late, second.id, 3).inherit_curve(first.id, 5)
    Reader(tmp_path / "late", store, second.id, 3).apply()
    assert [point.step for point in store.curve(second.id)] == [0, 5]


def test_a_stale_fence_is_refused(store: Store, running: tuple[Attempt, Attempt], tmp_path: Path) -> None:
    work(JournalStore(tmp_path / JOURNAL), running[0])
    with pytest.raises(LostLease):
        Reader(tmp_path / JOURNAL, store, running[0].id, 2).apply()
    assert counts(store)[:4] == [0, 0, 0, 0]


def test_a_locked_database_lets_the_journal_grow(tmp_path: Path, cells: Callable[..., Any], owner: Any) -> None:
    """Nobody who writes waits; whoever applies goes on where it was refused."""
    store = open_store(tmp_path / "atma.db", create=True, patience=0.0)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(1))
    attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=3)
    holder = sqlite3.connect(tmp_path / "atma.db", isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    work(JournalStore(tmp_path / JOURNAL), attempt)
    assert counts(store)[:4] == [0, 0, 0, 0]
    free = threading.Timer(1.0, lambda: holder.execute("ROLLBACK"))
    free.start()
    reader = Reader(tmp_path / JOURNAL, store, attempt.id, 3)
    store.patience = 60.0
    assert reader.apply() == 13
    free.join()
    assert counts(store)[:4] == [3, 2, 3, 1]
    holder.close()
