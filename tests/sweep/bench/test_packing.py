"""Benchmark of concurrency: its numbers equal those of the database, and impossible requests are refused early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from atma_sweep.results.store.records import Attempt
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.bench import packing, report
from atma_sweep.sweep.bench.packing import PackingResult, PackingRow
from atma_sweep.sweep.errors import SweepError

SMALL = ("train.tokens=6144", "eval.lengths=[128]", "eval.validate_every=2", "eval.validation_tokens=2048")


def row(attempts: int, rate: float) -> PackingRow:
    return PackingRow(attempts, 4, 8.0, rate, 1800.0, 1.25, 2.5, 0.5, 1.0, 0.25)


def test_packing_table_marks_the_best_and_states_mps() -> None:
    result = PackingResult("quick", "NVIDIA H200", False, (row(1, 1000.0), row(2, 3500.4)))
    lines = packing.table(result).splitlines()
    assert lines[3] == "| **2** | 4 | 8.0 | 3,500 | 1,800 | 1.2 | 2.5 | 0.5 | 1.0 | 0.2 |"
    assert {line.count("|") for line in lines[:4]} == {11}
    assert "MPS does not run" in lines[-1]
    assert "MPS runs" in packing.table(PackingResult("quick", "NVIDIA H200", True, result.rows))
    assert json.loads(json.dumps(report.as_dict(result)))["rows"][1]["tokens_per_s"] == 3500.4


def test_packing_refuses_more_attempts_than_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "usable_cores", lambda: 3)
    with pytest.raises(SweepError, match="this machine has 3; give at most 3"):
        packing.run("quick", [4], tmp_path, sets=SMALL, only=["attn_type=nope"], tell=lambda line: None)
    assert list(tmp_path.glob("runs-4/*/*/job.json")) == []


def test_packing_unseen_phases_have_zero_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of two consecutive attempts, against sums by hand."""

    class FixedStore:
        def curve(self, attempt: int) -> list[object]:
            return [type("Point", (), {"wall_s": 2.0 + attempt})()]

    class Settings:
        train = type("Train", (), {"steps": 10, "batch_tokens": 100})()

    cell = type("Cell", (), {"config": Settings()})()
    watch = packing.PhaseTimer(lambda line: None)
    watch.began, watch.over = {1: 10.0, 2: 20.0}, {1: 18.0, 2: 30.0}
    watch.trained, watch.stepped, watch.probed = {1: 11.0, 2: 22.0}, {1: 12.5}, {1: 17.0}
    row = packing.packing_row(FixedStore(), [cell, cell], 1, watch)  # type: ignore[arg-type, list-item]
    assert (row.seconds, row.tokens_per_s, row.cells_per_hour) == (20.0, 100.0, 360.0)
    assert (row.starting_s, row.training_s) == ((2.5 + 2.0) / 2, (1.5 + 4.0) / 2)
    assert (row.validating_s, row.probing_s) == ((3.0 + 4.0) / 2, 0.5)
    assert row.between_s == 1.0


@pytest.mark.thorough
def test_packing_retrains_cells_for_each_attempt_count(tmp_path: Path) -> None:
    lines: list[str] = []
    result = packing.run(
        "quick", [1, 2], tmp_path, sets=SMALL, only=["attn_type=nope", "memory=off"], tell=lines.append
    )
    assert result.gpu is None
    assert result.mps is None
    most = []
    numbers = []
    for entry in result.rows:
        store = open_store(tmp_path / f"{entry.attempts}.db")
        states = store.cell_states("bench")
        attempts: list[Attempt] = [attempt for state in states for attempt in store.attempts(state.cell_id)]
        assert [attempt.state for attempt in attempts] == ["done", "done"]
        edges = [(a.started_at, 1) for a in attempts] + [(a.finished_at, -1) for a in attempts]
        alive = [sum(step for _, step in sorted(edges)[: n + 1]) for n in range(4)]  # type: ignore[type-var]
        most.append(max(alive))
        numbers.append([[point.val_loss for point in store.curve(attempt.id)] for attempt in attempts])
        assert entry.cells == 2
        assert entry.tokens_per_s == pytest.approx(2 * 6144 / entry.seconds)
        lived = [(a.finished_at - a.started_at).total_seconds() for a in attempts]  # type: ignore[operator]
        parts = entry.starting_s + entry.training_s + entry.validating_s + entry.probing_s
        # no less than attempts say of themselves, and no more than there was from the first start to the last end
        assert sum(lived) / 2 - 0.5 < parts
        assert 2 * parts <= entry.attempts * (entry.seconds + 0.1)
    assert most == [1, 2]
    assert sorted(numbers[0]) == sorted(numbers[1]), "what runs beside a cell touches no number of it"
    assert lines[0] == "1 at once: 2 cells"


def test_packing_parses_attempt_counts() -> None:
    assert packing.parse_attempts("8,1, 2") == [1, 2, 8]
    for wrong in ("", "0", "1,,2", "two", "-1", "1.5"):
        with pytest.raises(SweepError, match="give whole numbers from 1 up"):
            packing.parse_attempts(wrong)
