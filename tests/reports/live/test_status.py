"""`status`, `show` and `export`: a pause, one meaning a word, and the sweeps of the paper."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, CurvePoint, Measurement, Owner
from atma_sweep.results.store.store import Store, open_store

Run = Callable[..., tuple[int, str, str]]
ME = Owner(name="launch", host=socket.gethostname(), pid=os.getpid(), started=psutil.Process().create_time())
TRAIN = {"muon_lr": 0.02, "embedding_lr": 0.3, "head_lr": 0.003125, "scalar_lr": 0.01}


@pytest.fixture
def run(command_line: Run) -> Run:
    return command_line


def cell(index: int) -> CellRecord:
    levels = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True))
    config = {"train": TRAIN | ({"optimizer": "adamw", "matrix_lr": 1e-4} if index else {})}
    return CellRecord(id=f"{index:012x}", slug=f"cell-{index}", seed=index, levels=levels, config=config, tokens=1000)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store with a sweep `demo`, whose second attempt has an id that differs from its number."""
    store_of_sweep = open_store(tmp_path / "atma.db", create=True)
    options = {"requested": [["val", 0]]}
    store_of_sweep.record_revision(
        "demo", grid_text="", grid_file="demo.yaml", options=options, cells=[cell(0), cell(1)]
    )
    for index, state in ((0, "failed"), (1, "failed"), (0, "done")):
        attempt = store_of_sweep.start_attempt(cell(index).id, owner=ME, fence=0, steps_total=10)
        recorder = DatabaseRecorder(store_of_sweep, attempt.id, 0)
        recorder.curve([CurvePoint(step=5, tokens=500, wall_s=1.0, train_loss=2.0, lr=0.25)])
        recorder.measurements([Measurement(probe="val", metric="val_loss", value=2.5, unit="nats/token")])
        store_of_sweep.finish_attempt(attempt.id, 0, state)  # type: ignore[arg-type]
    return store_of_sweep


@pytest.mark.thorough
def test_status_text_of_a_paused_sweep(run: Run, store: Store) -> None:
    assert "pause" not in run("status")[1]
    assert json.loads(run("status", "--json")[1])[0]["paused"] is None
    fence = store.acquire_sweep("demo", ME, 60)
    assert run("pause")[0] == 0
    who = f"by {getpass.getuser()} on {socket.gethostname()}"
    pending_text = f"  pausing, requested {who}; continue with atma-sweep resume"
    assert pending_text in run("status")[1].splitlines()
    store.add_event("paused", "sweep demo", sweep="demo")
    assert run("pause")[0] == 0
    (line,) = [line for line in run("status")[1].splitlines() if "paused since" in line]
    assert re.fullmatch(
        rf"  paused since \d{{4}}-\d\d-\d\d \d\d:\d\d UTC, requested {re.escape(who)}; continue with atma-sweep resume",
        line,
    )
    paused = json.loads(run("status", "--json")[1])[0]["paused"]
    assert paused["asked"] == who
    assert paused["since"] is not None
    store.release_sweep("demo", fence)
    assert "not running; launch it again" in run("status")[1]
    store.acquire_sweep("demo", ME, 60)
    assert run("resume")[0] == 0
    assert "pause" not in run("status")[1]


def test_pause_without_a_recorded_requester(run: Run, store: Store) -> None:
    store.acquire_sweep("demo", ME, 60)
    store.request_actions("demo", pause=True)
    assert "  pausing; continue with atma-sweep resume" in run("status")[1].splitlines()


def test_cell_details_text_of_rates_and_attempts(run: Run, store: Store) -> None:
    lines = run("show", "cell-0")[1].splitlines()
    curve_at = lines.index("curve (1 point): ▁")
    head = lines[curve_at + 2].split("   ")
    assert "schedule factor" in head
    assert "learning rate" not in head
    rates = "muon_lr 0.02, embedding_lr 0.3, head_lr 0.003125, scalar_lr 0.01"
    assert f"  learning rates: schedule factor x {rates}" in lines
    with_adamw = "matrix_lr 0.0001, embedding_lr 0.3, head_lr 0.003125, scalar_lr 0.01"
    assert f"  learning rates: schedule factor x {with_adamw}" in run("show", "cell-1")[1].splitlines()
    numbers = {attempt.number: attempt.id for attempt in store.attempts(cell(0).id)}
    assert numbers == {1: 1, 2: 3}
    assert next(line for line in lines if line.endswith("attempt_id 3")).startswith("  attempt 2: done in ")
    assert lines[-3:] == ["measurements (attempt 2):", "  val", "    val_loss (nats/token)  2.5"]


@pytest.mark.parametrize("database", ["none", "another"])
def test_commands_accept_printed_sweeps(
    run: Run, tmp_path: Path, request: pytest.FixtureRequest, database: str
) -> None:
    if database == "another":
        request.getfixturevalue("store")
    code, out, err = run("status", "--sweep", "printed-v2")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "printed-v2 (revision 1, printed in arXiv:2606.25156v2): 120 cells: 120 done",
        "  published numbers, not run here; atma-sweep report shows them",
    ]
    code, out, _ = run("show", "polar-baseline-d0-m1-w0-s0", "--sweep", "printed-v1")
    assert code == 0
    assert "attempts: none; published numbers of arXiv:2606.25156v1, as printed and as logged" in out.splitlines()
    assert "(attempt" not in out
    code, out, _ = run("export", "--sweep", "printed-v2", "--to", "csv", "--what", "cells")
    assert (code, out) == (0, "printed-v2-cells.csv: 120 rows of cells of sweep printed-v2\n")
    assert len((tmp_path / "printed-v2-cells.csv").read_text().splitlines()) == 121
    code, _, err = run("status", "--watch", "--sweep", "printed-v2")
    assert (code, err) == (
        2,
        "atma-sweep: printed-v2 holds numbers of the paper and never runs; leave --watch out\n",
    )


def test_truncated_sweep_list_gives_the_number_hidden(run: Run, store: Store) -> None:
    for index in range(7):
        store.record_revision(f"g{index}", grid_text="", grid_file="g.yaml", cells=[cell(0)])
    _, _, err = run("status", "--sweep", "zzzzzzzzz")
    assert "existing sweeps: demo, g0, g1, g2, g3, and 3 more, which atma-sweep sweeps lists\n" in err
    _, _, err = run("show", "cell-0", "--sweep", "g9")
    assert re.search(r", and 3 more, which atma-sweep sweeps lists; did you mean g\d, g\d or g\d\?\n", err)
    output = run("status")[1]
    assert all(re.search(rf"^{name} \(revision", output, re.MULTILINE) for name in ("demo", "g0", "g6"))
