"""Whole commands over a large sweep, each in a process of its own: plans, reports, a bundle, and a launch that is stopped.

Seconds include the start of the command, memory is its peak.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ...results.store.store import Store, StoreError, StoreMissing, open_store
from ..errors import MachineError
from .subprocess_usage import MIB, OURS, run_measured


@dataclass
class ScaleRow:
    """A number with its unit."""

    what: str
    value: float
    unit: str


PLAN_GRID = """\
name: plan
extends: tiny
axes:
  attn_type: [polar, nope]
  memory: [off, on]
  window: [off, on]
  distractor: [off, on]
  train.clip: [1, 2, 3, 4, 5]
  train.muon_lr: [{levels}]
seeds: {seeds}
"""
COMBINATIONS = 80
"""Without the learning rates."""
MOST_LEVELS = 250
"""Of the learning rate; beyond that the grid grows by seeds."""


def dry_runs(cells: int, folder: Path) -> Iterator[ScaleRow]:
    """Yield rows for about that many cells, and of a dry run for ten times as many. No database, nothing prepared."""
    for wanted in (cells, 10 * cells):
        rates = min(MOST_LEVELS, max(1, round(wanted / COMBINATIONS)))
        seeds = max(1, round(wanted / COMBINATIONS / rates))
        made = COMBINATIONS * rates * seeds
        file = folder / f"plan-{made}.yaml"
        levels = ", ".join(f"{0.001 * number:.4f}" for number in range(1, rates + 1))
        file.write_text(PLAN_GRID.format(levels=levels, seeds=seeds))
        command = [*OURS, "launch", str(file), "--dry-run", "--cells", str(made)]
        took = run_measured(command, folder)
        yield ScaleRow(f"dry run of {made:,} cells, with its start", took.wall, "s")
        yield ScaleRow("memory that it takes at most", took.memory / MIB, "MiB")
        if wanted == cells:
            took = run_measured([*OURS, "plan", str(file), "--cells", str(made)], folder)
            yield ScaleRow(f"plan of {made:,} cells with its price, with its start", took.wall, "s")


COMMANDS = {
    "the figure of training losses": ("report", "--figure", "loss", "--out", "loss.svg"),
    "the dashboard": ("report", "--dashboard", "dashboard.html"),
}


def reports(store: Store, folder: Path) -> list[ScaleRow]:
    """Return rows of the reports that read every point of every curve; their files are left in `folder`.

    Raises MachineError when one of them fails.
    """
    found = []
    for name, arguments in COMMANDS.items():
        took = run_measured([*OURS, *arguments, "--db", str(store)], folder)
        found += [
            ScaleRow(f"{name}, with the start", took.wall, "s"),
            ScaleRow("of which processor", took.processor, "s"),
            ScaleRow("its memory", took.memory / MIB, "MiB"),
        ]
    return found


SCRIPT = """
import json, sys, time
from pathlib import Path
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.commands.verify import identify
what, db, sweep, file = sys.argv[1:]
store = open_store(db, create=what == "import")
began = time.perf_counter()
done = export_sweep(store, sweep, Path(file)) if what == "export" else import_bundle(store, Path(file), identify=identify)
seconds = time.perf_counter() - began
print(json.dumps([seconds, done.bytes, done.added["curve_point"]]))
"""


def exchanged(db: str, sweep: str, folder: Path) -> list[ScaleRow]:
    """Return rows of an export of that sweep and of its import into an empty database under `folder`."""
    file, found = folder / "exchanged.zip", []
    for what, where in (("export", db), ("import", str(folder / "exchanged.db"))):
        command = [sys.executable, "-c", SCRIPT, what, where, sweep, str(file)]
        took = run_measured(command, folder)
        seconds, size, points = json.loads(took.printed.splitlines()[-1])
        found += [
            ScaleRow(f"{what} it, with {points:,} curve points", seconds, "s"),
            ScaleRow("its peak memory", took.memory / MIB, "MiB"),
        ]
    return [*found, ScaleRow("the bundle", size / MIB, "MiB")]


STOP_GRID = "name: stop\nextends: tiny\nset: {train.tokens: 15_360_000}\n"
LOOK_S = 0.05


def stopped(folder: Path) -> Iterator[ScaleRow]:
    """Yield rows of a launch that is stopped; the text lies prepared in `folder`/runs. Raises MachineError when the launch does not train."""
    file, db = folder / "stop.yaml", folder / "stop.db"
    file.write_text(STOP_GRID)
    command = [*OURS, "launch", str(file), "--executor", "local", "--db", str(db), "--runs", str(folder / "runs")]
    began = time.perf_counter()
    with (folder / "stop.txt").open("w") as said:
        launch = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
    try:
        while not _trains(db):
            if launch.poll() is not None:
                raise MachineError(f"the cell to be stopped does not train: {(folder / 'stop.txt').read_text()[-500:]}")
            time.sleep(LOOK_S)
        yield ScaleRow("launch a cell until its first step", time.perf_counter() - began, "s")
        asked = time.perf_counter()
        launch.send_signal(signal.SIGINT)
        launch.wait()
        yield ScaleRow("Ctrl-C until it has saved and left", time.perf_counter() - asked, "s")
    finally:
        launch.terminate()
        launch.wait()


def _trains(db: Path) -> bool:
    try:
        store = open_store(db)
    except (StoreError, StoreMissing):
        return False  # it is only just being made
    with closing(store):
        return any(state.step for state in store.cell_states("stop")) if store.sweeps() else False
