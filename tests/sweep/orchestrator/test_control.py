"""pause, resume, cancel and retry reach a running launch, are idempotent, and have no effect without one."""

from __future__ import annotations

import json
import time

import pytest
from factories import ended

from ...testing.bench import Bench
from ...testing.patience import PATIENCE_S

pytestmark = pytest.mark.slow
LONG = 128 * 400
TRAINING = "SELECT 1 FROM attempt WHERE phase = 'training' AND step > 3"


@pytest.mark.thorough
def test_pause_frees_the_machine_and_resume_changes_no_result(bench: Bench) -> None:
    bench.grid(tokens=LONG)
    process = bench.start("launch", "micro.yaml", "--executor", "local", "--only", "attn_type=nope")
    bench.wait(TRAINING)
    for _ in range(2):
        assert "saves its cells and pauses" in bench.run("pause")
    bench.wait("SELECT 1 FROM event WHERE kind = 'paused'")
    assert bench.processes() == []
    (state,) = bench.sql("SELECT state FROM attempt")[-1:]
    assert state == ("interrupted",)
    time.sleep(1.5)
    assert len(bench.sql("SELECT 1 FROM attempt")) == 1
    assert process.poll() is None
    for _ in range(2):
        bench.run("resume")
    ended(process)
    assert [row[0] for row in bench.sql("SELECT state FROM attempt ORDER BY id")] == ["interrupted", "done"]
    assert len(bench.sql("SELECT 1 FROM event WHERE kind = 'paused'")) == 1
    paused = bench.curves()
    (bench.folder / "other").mkdir()
    second = Bench(bench.folder / "other")
    second.grid(tokens=LONG)
    second.launch("--only", "attn_type=nope")
    assert second.curves() == paused


@pytest.mark.thorough
def test_cancel_saves_and_stops(bench: Bench) -> None:
    bench.grid(tokens=10 * LONG)  # it is never trained to the end
    process = bench.start("launch", "micro.yaml", "--executor", "local", "--only", "attn_type=nope")
    bench.wait(TRAINING)
    answer = json.loads(bench.run("cancel", "--json"))
    assert answer == {"sweep": "micro", "asked": "cancel", "running": True, "cells": []}
    out = ended(process, 143)
    assert "cancelled; launch again to continue" in out
    assert bench.sql("SELECT DISTINCT state FROM attempt") == [("interrupted",)]
    assert bench.sql("SELECT request FROM sweep") == [(None,)]
    for wish in ("cancel", "pause", "resume", "retry"):
        assert f"sweep micro is not running, so there is nothing to {wish}" in bench.run(wish)
    assert "no sweep is named 'nano'" in bench.run("cancel", "--sweep", "nano", code=2)


@pytest.mark.thorough
def test_finish_ends_running_cells_and_starts_none(bench: Bench) -> None:
    bench.grid(tokens=LONG)
    bench.in_turn()
    process = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait(TRAINING)
    begun = len(bench.sql("SELECT 1 FROM attempt"))
    answer = json.loads(bench.run("cancel", "--finish", "--json"))
    assert answer == {"sweep": "micro", "asked": "finish", "running": True, "cells": []}
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "running cells were finished" in out) == (143, True), out
    assert bench.sql("SELECT DISTINCT state FROM attempt") == [("done",)]
    done, total = len(bench.sql("SELECT 1 FROM attempt")), len(bench.sql("SELECT 1 FROM cell"))
    assert begun <= done < total
    assert bench.sql("SELECT request FROM sweep") == [(None,)]
    bench.launch()
    assert bench.sql("SELECT count(*), count(DISTINCT cell_id) FROM attempt") == [(total, total)]
