"""Entire commands on a large sweep, each in a process of its own.

They are plans, reports, the exchange of a bundle, and a stopped launch. Seconds include the start of the command;
memory is its peak.
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
    """A measured number with its description and unit."""

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
"""Combinations of the axes other than the learning rate."""
MAX_LEVELS = 250
"""Limit on the levels of the learning rate; larger grids get more seeds."""


def measure_dry_runs(cells: int, folder: Path) -> Iterator[ScaleRow]:
    """Yield rows of dry runs in subprocesses: seconds and peak MiB, and for the smaller grid the seconds of a plan.

    The grids have about `cells` and ten times as many cells. There is no database, and nothing is prepared. Grid files
    are written to `folder`. Raises MachineError if a command fails.
    """
    for num_requested in (cells, 10 * cells):
        rates = min(MAX_LEVELS, max(1, round(num_requested / COMBINATIONS)))
        seeds = max(1, round(num_requested / COMBINATIONS / rates))
        num_cells = COMBINATIONS * rates * seeds
        file = folder / f"plan-{num_cells}.yaml"
        levels = ", ".join(f"{0.001 * number:.4f}" for number in range(1, rates + 1))
        file.write_text(PLAN_GRID.format(levels=levels, seeds=seeds))
        command = [*OURS, "launch", str(file), "--dry-run", "--cells", str(num_cells)]
        usage = run_measured(command, folder)
        yield ScaleRow(f"dry run of {num_cells:,} cells, including start-up", usage.wall, "s")
        yield ScaleRow("peak RAM of the dry run", usage.memory / MIB, "MiB")
        if num_requested == cells:
            usage = run_measured([*OURS, "plan", str(file), "--cells", str(num_cells)], folder)
            yield ScaleRow(f"plan of {num_cells:,} cells with the price, including start-up", usage.wall, "s")


REPORTS = {
    "the figure of training losses": ("report", "--figure", "loss", "--out", "loss.svg"),
    "the dashboard": ("report", "--dashboard", "dashboard.html"),
}


def measure_reports(store: Store, folder: Path) -> list[ScaleRow]:
    """Return three rows per report that reads every point of every curve: wall seconds, CPU seconds, peak MiB.

    The reports are the figure of training losses and the dashboard; their files stay in `folder`. Raises MachineError
    if a report fails.
    """
    rows = []
    for name, arguments in REPORTS.items():
        usage = run_measured([*OURS, *arguments, "--db", str(store)], folder)
        rows += [
            ScaleRow(f"{name}, including start-up", usage.wall, "s"),
            ScaleRow("of which CPU time", usage.processor, "s"),
            ScaleRow(f"peak RAM of {name}", usage.memory / MIB, "MiB"),
        ]
    return rows


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


def measure_exchange(db: str, sweep: str, folder: Path) -> list[ScaleRow]:
    """Return rows of the export of a sweep and of its import into a new database in `folder`.

    Seconds (without the start of Python) and peak MiB of each, and the size of the bundle in MiB. Raises MachineError
    if either fails.

    Args:
        db: Database that has the sweep.
        sweep: Name of the sweep.
        folder: Folder that gets the bundle and the new database.
    """
    file, rows = folder / "exchanged.zip", []
    for what, where in (("export", db), ("import", str(folder / "exchanged.db"))):
        command = [sys.executable, "-c", SCRIPT, what, where, sweep, str(file)]
        usage = run_measured(command, folder)
        seconds, size, points = json.loads(usage.printed.splitlines()[-1])
        rows += [
            ScaleRow(f"{what} the sweep, with {points:,} curve points", seconds, "s"),
            ScaleRow(f"peak RAM of the {what}", usage.memory / MIB, "MiB"),
        ]
    return [*rows, ScaleRow("size of the bundle", size / MIB, "MiB")]


STOP_GRID = "name: stop\nextends: tiny\nset: {train.tokens: 15_360_000}\n"
POLL_S = 0.05


def measure_stop(folder: Path) -> Iterator[ScaleRow]:
    """Yield two rows of a launch that is interrupted: seconds to its first step, and from Ctrl-C to its end.

    There is no time limit: the iterator waits as long as the launch lives, for the first step and after Ctrl-C. The
    launch is terminated if the iteration is given up.

    Args:
        folder: Folder that holds the prepared text under `runs`, and gets the grid, its log and its database.

    Raises:
        MachineError: If the launch ends before it trains.
    """
    file, db = folder / "stop.yaml", folder / "stop.db"
    file.write_text(STOP_GRID)
    command = [*OURS, "launch", str(file), "--executor", "local", "--db", str(db), "--runs", str(folder / "runs")]
    began = time.perf_counter()
    with (folder / "stop.txt").open("w") as log:
        launch = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not _is_training(db):
            if launch.poll() is not None:
                raise MachineError(
                    f"the cell for the stop benchmark did not start training: {(folder / 'stop.txt').read_text()[-500:]}"
                )
            time.sleep(POLL_S)
        yield ScaleRow("from the launch of a cell to its first step", time.perf_counter() - began, "s")
        interrupted_at = time.perf_counter()
        launch.send_signal(signal.SIGINT)
        launch.wait()
        yield ScaleRow("from Ctrl-C to the saved checkpoint and exit", time.perf_counter() - interrupted_at, "s")
    finally:
        launch.terminate()
        launch.wait()


def _is_training(db: Path) -> bool:
    """Return True if a cell of the sweep "stop" has done a step.

    False while the database is missing, being created, or without sweeps.
    """
    try:
        store = open_store(db)
    except (StoreError, StoreMissing):
        return False  # the launch is still creating the database
    with closing(store):
        return any(state.step for state in store.cell_states("stop")) if store.sweeps() else False
