"""The table mqar against formulas by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from atma_sweep.reports.tables import make_table
from atma_sweep.results.intervals import wilson
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner
from atma_sweep.results.store.store import Store
from scipy import stats

SHARES = {"omega": (0.9, 0.8), "off": (0.02, 0.04)}


@pytest.fixture
def own(empty: Store, make: Any) -> Store:
    """Return a sweep of two memories with two seeds each, measured on 200 rows."""
    cell, _ = make
    runs = [(level, seed, share) for level, shares in SHARES.items() for seed, share in enumerate(shares)]
    cells = [
        replace(cell(index, memory=level, seed=seed), slug=f"{level}-s{seed}")
        for index, (level, seed, _) in enumerate(runs)
    ]
    empty.record_revision("own", grid_text="x", grid_file="x", cells=cells)
    for record, (_, _, share) in zip(cells, runs, strict=True):
        attempt = empty.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
        DatabaseRecorder(empty, attempt.id, 1).measurements([
            Measurement(probe="mqar", metric="accuracy", value=share, unit="fraction", n=200, description={"chance": 1 / 64}),
            Measurement(probe="mqar", metric="exact", value=share / 2, unit="fraction", n=200),
            Measurement(probe="val", metric="val_loss", value=1 - share, unit="nats/token"),
        ])  # fmt: skip
        empty.finish_attempt(attempt.id, 1, "done")
    return empty


def test_answers_rows_and_loss_with_both_intervals(own: Store) -> None:
    table = make_table("mqar", own, "own")
    rows = {
        row[1]: {entry.heading: entry for entry in entries}
        for row, entries in zip(table.rows, table.entries, strict=True)
    }
    assert set(rows) == set(SHARES)
    omega = rows["omega"]
    assert (omega["Answers"].text, omega["Rows"].text) == ("85.0 ± 7.1", "42.5 ± 3.5")
    low, high = stats.t.interval(0.95, 1, 0.85, 0.05)
    assert (omega["Answers 95% seeds"].low, omega["Answers 95% seeds"].high) == pytest.approx(
        (max(0, low), min(1, high))
    )
    assert (omega["Rows 95% sequences"].low, omega["Rows 95% sequences"].high) == pytest.approx(wilson(85, 200))
    assert omega["Loss"].value == pytest.approx(0.15)
    assert "Chance level (a random value): 1.6 %." in table.notes
    assert table.columns[:3] == ("Type", "Mem", "Answers")
