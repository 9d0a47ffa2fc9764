"""Behaviour of journals alone; test_attempt_writer.py compares their effect with direct writes."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.results.errors import LeaseLost
from atma_sweep.results.store.journal import JOURNAL, JournalReader, JournalRecorder, apply_remaining
from atma_sweep.results.store.recorder import AttemptWriter, DatabaseRecorder
from atma_sweep.results.store.records import Attempt, CurvePoint, Example, Measurement, Provenance
from atma_sweep.results.store.schema import CurvePointRow, EventRow, ExampleRow, MeasurementRow, ProvenanceRow
from atma_sweep.results.store.store import Store, open_store
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


def work(recorder: AttemptWriter) -> None:
    """Write everything that an attempt writes, once."""
    recorder.set_process(17, 2.5)
    recorder.provenance(Provenance(config={"lr": 0.1}, seed=5, packages={"numpy": "2"}, gpu_uuid="GPU-1"))
    recorder.heartbeat()
    recorder.event("resumed", "from step 3")
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
    recorder.finish("done", exit_code=0, weights="w")


def test_journal_lines_are_idempotent_after_a_kill(
    store: Store, running: tuple[Attempt, Attempt], tmp_path: Path
) -> None:
    """The one who applies dies after any line, and another begins anew from the first."""
    attempt = running[0]
    work(JournalRecorder(tmp_path / "whole"))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    file = tmp_path / JOURNAL
    for end in range(1, len(lines)):
        file.write_bytes(b"".join(lines[:end]))
        assert JournalReader(file, store, attempt.id, 3).apply() == end
    before = counts(store)
    file.write_bytes(b"".join(lines))
    assert JournalReader(file, store, attempt.id, 3).apply() == len(lines)
    assert counts(store) == [before[0], before[1], before[2], before[3], before[4] + 1]
    assert counts(store)[:4] == [3, 2, 3, 1]
    kinds = [event.kind for event in store.events(cell_id=attempt.cell_id)]
    assert kinds == ["started", "resumed", "done"]
    with pytest.raises(LeaseLost):
        JournalReader(file, store, attempt.id, 3).apply()
    assert counts(store)[:4] == [3, 2, 3, 1]


def test_a_torn_last_line_waits_for_its_end(store: Store, running: tuple[Attempt, Attempt], tmp_path: Path) -> None:
    attempt, file = running[0], tmp_path / JOURNAL
    work(JournalRecorder(file))
    complete = file.read_bytes()
    cut = complete.rindex(b'"finish"')
    file.write_bytes(complete[:cut])
    reader = JournalReader(file, store, attempt.id, 3)
    assert reader.apply() == 12
    assert store.attempt(attempt.id).state == "running"
    assert reader.apply() == 0
    file.write_bytes(complete)
    assert reader.apply() == 1
    assert store.attempt(attempt.id).state == "done"


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b'{"call": "rm", "given": [], "named": {}}\n', b"[1]\n", b"{}\n"])
def test_a_line_that_cannot_be_read_ends_the_journal(
    store: Store, running: tuple[Attempt, Attempt], tmp_path: Path, damage: bytes
) -> None:
    attempt, file = running[0], tmp_path / JOURNAL
    JournalRecorder(file).set_process(17, 2.5)
    with file.open("ab") as end:
        end.write(damage)
    work(JournalRecorder(file))
    reader = JournalReader(file, store, attempt.id, 3)
    assert (reader.apply(), reader.apply()) == (1, 0)
    stored = store.attempt(attempt.id)
    assert (stored.state, stored.pid, stored.step) == ("running", 17, 0)


def test_a_full_disk_leaves_no_half_line(
    store: Store, running: tuple[Attempt, Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, journal = running[0], JournalRecorder(tmp_path / JOURNAL)
    real, free_bytes = os.write, [10]

    def write(file: int, data: bytes) -> int:
        if free_bytes[0] <= 0:
            raise OSError(28, "No space left on device")
        size = real(file, data[: free_bytes[0]])
        free_bytes[0] -= size
        return int(size)

    with monkeypatch.context() as patch:
        patch.setattr("os.write", write)
        with pytest.raises(OSError, match="No space"):
            journal.set_process(17, 2.5)
    assert (tmp_path / JOURNAL).read_bytes() == b""
    work(journal)
    assert JournalReader(tmp_path / JOURNAL, store, attempt.id, 3).apply() == 13


def test_inherited_curve_is_complete(store: Store, running: tuple[Attempt, Attempt], tmp_path: Path) -> None:
    """The first attempt's machine is gone before anybody applied a line; the second goes on from its checkpoint."""
    first = running[0]
    folder = tmp_path / first.run_dir
    folder.mkdir(parents=True)
    recorder = JournalRecorder(folder / JOURNAL)
    for step in (0, 5, 7):
        recorder.curve([CurvePoint(step=step, tokens=step, wall_s=0.1, train_loss=1.0)])
    apply_remaining(store, tmp_path, first.id)
    assert store.interrupt_dead(first.id, "gone")
    apply_remaining(store, tmp_path, first.id)
    second = running[1]
    JournalRecorder(tmp_path / "late").inherit_curve(first.id, 5)
    JournalReader(tmp_path / "late", store, second.id, 3).apply()
    assert [point.step for point in store.curve(second.id)] == [0, 5]


def test_a_stale_fence_is_refused(store: Store, running: tuple[Attempt, Attempt], tmp_path: Path) -> None:
    work(JournalRecorder(tmp_path / JOURNAL))
    with pytest.raises(LeaseLost):
        JournalReader(tmp_path / JOURNAL, store, running[0].id, 2).apply()
    assert counts(store)[:4] == [0, 0, 0, 0]


def test_a_locked_database_lets_the_journal_grow(tmp_path: Path, cells: Callable[..., Any], owner: Any) -> None:
    """Nobody who writes waits; whoever applies goes on where it was refused."""
    store = open_store(tmp_path / "atma.db", create=True, patience=0.0)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(1))
    attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=3)
    holder = sqlite3.connect(tmp_path / "atma.db", isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    work(JournalRecorder(tmp_path / JOURNAL))
    assert counts(store)[:4] == [0, 0, 0, 0]
    free = threading.Timer(1.0, lambda: holder.execute("ROLLBACK"))
    free.start()
    reader = JournalReader(tmp_path / JOURNAL, store, attempt.id, 3)
    store.patience = 60.0
    assert reader.apply() == 13
    free.join()
    assert counts(store)[:4] == [3, 2, 3, 1]
    holder.close()


OLD = Path(__file__).with_name("fixtures") / "journal-0005.jsonl"


def test_a_journal_of_an_earlier_release_is_applied(
    store: Store, running: tuple[Attempt, Attempt], tmp_path: Path
) -> None:
    """Its words are those of the release that wrote it; it was left beside an attempt that was killed on another node."""
    first, second = running
    points = [CurvePoint(step=step, tokens=100 * step, wall_s=0.1, train_loss=3.0) for step in (0, 5, 7)]
    DatabaseRecorder(store, first.id, 3).curve(points)
    assert JournalReader(OLD, store, second.id, 3).apply() == 13
    stored = store.attempt(second.id)
    assert (stored.state, stored.exit_code, stored.weights) == ("done", 0, "c00000000000/1/weights.safetensors")
    assert (stored.host, stored.pid, stored.pid_started, stored.pid_space) == (
        "node-3",
        4242,
        17.5,
        "boot-1:4026531836",
    )
    assert (stored.step, stored.steps_total, stored.loss, stored.tokens_per_s, stored.phase) == (
        6, 10, None, 99.5, "training",
    )  # fmt: skip
    assert stored.checkpoint == "c00000000000/1/checkpoint-00000006"
    own = CurvePoint(step=6, tokens=600, wall_s=0.5, train_loss=2.25, lr=1.0)
    assert store.curve(second.id) == [*points[:2], own]
    values = {
        (measurement.probe, measurement.length): (measurement.value, measurement.n, measurement.reason)
        for measurement in store.measurements(second.cell_id)
    }
    assert values == {
        ("clean", 64): (1 / 3, 7, None),
        ("clean", 128): (None, None, "inf: the value is not finite"),
        ("throughput", 0): (None, None, "n/a: no peak"),
    }
    assert store.provenance(second.id) == Provenance(
        config={"lr": 0.1}, seed=5, packages={"numpy": "2"}, kernels={"wall": "reference"}, gpu_uuid="GPU-1",
        extra={"x": "NaN"}, co_tenants=0,
    )  # fmt: skip
    with store.transaction(write=False) as session:
        items = [tuple(row) for row in session.execute(select(ExampleRow.item, ExampleRow.value, ExampleRow.detail))]
    assert sorted(items) == [(0, 0.0, {"a": [0, "NaN"]}), (1, 0.5, {"a": [1, "NaN"]})]
    events = [(event.kind, event.message, event.attempt_id) for event in store.events(cell_id=second.cell_id)]
    assert events == [
        ("started", "attempt 1 (train) on here", second.id),
        ("resumed", "from step 5 of attempt 1", second.id),
        ("done", "done", second.id),
        ("storage", "checkpoints were left behind: no s3", second.id),
    ]
