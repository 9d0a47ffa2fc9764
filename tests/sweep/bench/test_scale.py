"""Benchmark of large sweeps: it does the work of a real sweep, and former bottlenecks stay fast."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.bench import scale
from atma_sweep.sweep.orchestrator import supervisor


@pytest.mark.thorough
def test_scale_benchmark_finishes_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(supervisor, "POLL_S", 0.0123)
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds))[1])
    lines: list[str] = []
    rows = scale.run(16, 3, tmp_path, tell=lines.append)
    store = open_store(tmp_path / "atma.db")
    states = store.cell_states("scale")
    assert len(states) == 16
    for state in states:
        (attempt,) = store.attempts(state.cell_id)
        assert attempt.state == "done"
        assert [point.step for point in store.curve(attempt.id)] == [1, 2, 3]
    values = {row.what: row.value for row in rows}
    assert set(values) >= {"plan 16 new cells", "launch the finished sweep again"}
    assert set(values) >= {
        "from the launch of a cell to its first step",
        "from Ctrl-C to the saved checkpoint and exit",
    }
    assert (
        open_store(tmp_path / "stop.db")
        .attempts(open_store(tmp_path / "stop.db").cell_states("stop")[0].cell_id)[0]
        .state
        == "interrupted"
    )
    assert all(value > 0 for value in values.values())
    for name in ("loss.svg", "dashboard.html"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert 20 < values["peak RAM of the dashboard"] < 2000, "MiB"
    assert 0.0123 not in slept, "a slot stood empty while cells waited"
    assert lines[-3:] == ["launching again", "timing dry runs", "training a cell and stopping it"]
    assert set(values) >= {"dry run of 80 cells, including start-up", "dry run of 160 cells, including start-up"}
