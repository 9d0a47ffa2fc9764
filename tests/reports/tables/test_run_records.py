"""The table budget, of attempts whose times are known."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from atma_sweep.reports.tables import make_table
from atma_sweep.results.paper import open_published
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, Owner, Provenance
from atma_sweep.results.store.schema import AttemptRow
from atma_sweep.results.store.store import Store, open_store

ME = Owner(name="ada", host="here", pid=1, started=0.0)
LEVELS = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True))
CELLS = [
    CellRecord(id=f"{n:012x}", slug=f"{kind}-s{n % 2}", seed=n % 2, levels=LEVELS, config={"resources": {"gpus": 0.5}}, tokens=9)
    for n, kind in enumerate(("a", "a", "b", "b"))
]  # fmt: skip


def attempt(
    store: Store, cell: CellRecord, state: str, took: float, *, start: float = 0, train: float = 0, probe: float = 0
) -> None:
    """Record an attempt of a cell that took so many seconds, of which start, training and probing are given."""
    attempt = store.start_attempt(cell.id, owner=ME, fence=1)
    recorder = DatabaseRecorder(store, attempt.id, 1)
    if state == "done":
        recorder.provenance(Provenance(config={}, seed=0, extra={"start_seconds": start}))
        recorder.measurements(
            [
                Measurement(probe="throughput", metric="train_seconds", value=train, unit="s"),
                *(
                    Measurement(probe="val", metric=metric, value=1.0, unit="nats", seconds=probe)
                    for metric in ("val_loss", "val_loss_full")
                ),
            ]
        )
    if state != "running":
        store.finish_attempt(attempt.id, 1, state)  # type: ignore[arg-type]
    with store.transaction() as session:
        row = session.get(AttemptRow, attempt.id)
        assert row is not None
        row.heartbeat_at = row.started_at + timedelta(seconds=took)
        if state != "running":
            row.finished_at = row.heartbeat_at


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two done cells of kind a, the second after a loss of 100 s of which 60 s were gone on from; b: failed, and running."""
    store = open_store(tmp_path / "atma.db", create=True)
    price = {
        "place": "H200", "of": [0, 0, 1, 1],
        "groups": [{"calibrated": [0.1, 0.125, 0.2], "FLOPs": [0.05, 0.25, 0.5]}, {"FLOPs": [1, 2, 3]}],
    }  # fmt: skip
    store.record_revision(
        "g", grid_text="a: 1\n", grid_file="g.yaml", options={"requested": [["val", 0]], "price": price}, cells=CELLS
    )
    attempt(store, CELLS[0], "done", 720, start=20, train=600, probe=50)
    attempt(store, CELLS[1], "interrupted", 100)
    attempt(store, CELLS[1], "done", 560, start=20, train=570, probe=30)
    attempt(store, CELLS[2], "failed", 36)
    attempt(store, CELLS[3], "running", 1000)
    return store


def test_hours_by_hand(store: Store) -> None:
    """Half a GPU each: 720 + 100 + 560 s are 690 GPU-seconds of kind a."""
    table = make_table("budget", store)
    first, second, every = table.raw
    assert first["row"]["Cells like"] == "a"
    assert (first["done"], first["predicted_hours"], first["sources"]) == (2, 0.25, ["calibrated"])
    assert first["predicted_flops"] == (0.1, 0.5, 1.0)
    parts = {"start": 20 + 20, "training": 600 + 570, "probing": 50 + 30, "rest": 50, "lost": 100 - 60}
    for part, seconds in parts.items():
        assert first[f"{part}_hours"] == pytest.approx(seconds / 2 / 3600), part
    assert (
        first["took_hours"] == pytest.approx((720 + 100 + 560) / 2 / 3600) == pytest.approx(sum(parts.values()) / 7200)
    )
    assert first["ratio"] == pytest.approx(690 / 3600 / 0.25)
    assert (second["done"], second["predicted_hours"], second["ratio"]) == (0, None, None)
    assert second["lost_hours"] == pytest.approx(18 / 3600)
    assert every["row"]["Done"] == "2 of 4"
    assert every["lost_hours"] == pytest.approx((40 + 36) / 2 / 3600)
    assert every["ratio"] == first["ratio"], "of what is done"


def test_without_a_prediction_the_hours_stand_alone(store: Store) -> None:
    store.record_revision(
        "g", grid_text="a: 2\n", grid_file="g.yaml", options={"requested": [["val", 0]]}, cells=CELLS[:2]
    )
    table = make_table("budget", store)
    (row,) = table.raw
    assert (row["predicted_hours"], row["ratio"]) == (None, None)
    assert row["took_hours"] == pytest.approx(690 / 3600)
    assert "The launch stored no prediction." in table.notes


def test_published_cells_have_no_hours() -> None:
    table = make_table("budget", open_published(), "printed-v2")
    assert (table.rows, table.notes[-1]) == ((), "Published cells have no recorded hours.")
