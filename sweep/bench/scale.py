"""Time of planning, supervising, status and relaunching for a sweep of thousands of cells.

The sweep has a database of its own. Attempts start no process: an executor writes their numbers and ends them at once.
So only this package's own work is timed, including the database, but no training and no start of Python.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...results.store.recorder import DatabaseRecorder
from ...results.store.records import Attempt, CurvePoint, Measurement
from ...results.store.store import Store, StoreError, StoreMissing, open_store
from ..config import Resources
from ..errors import MachineError
from ..executors.executor import AttemptExit, HostExecutor, ProcessSpec
from ..grid.grid import Grid, load_grid
from ..host import processes
from ..orchestrator import launch
from ..orchestrator.supervisor import LEASE_S, Supervisor
from ..planning import admission
from ..planning.planner import Task
from ..probes import requested
from .subprocess_usage import MIB, OURS, run_measured

GRID = """\
name: scale
extends: tiny
axes: {{attn_type: [polar, nope], memory: [off, on], window: [off, on]}}
seeds: {seeds}
"""
COMBINATIONS = 8


@dataclass
class ScaleRow:
    """A measured number with its description and unit."""

    what: str
    value: float
    unit: str


class SilentListener:
    """Listener that reports nothing."""

    def started(self, task: Task, attempt: Any) -> None: ...
    def running(self, attempts: Sequence[Any]) -> None: ...
    def ended(self, task: Task, attempt: Any) -> None: ...
    def waiting(self, cell: Any) -> None: ...


class InstantExecutor(HostExecutor):
    """Executor whose attempts are over when they start; it writes their curve and measurements in this process."""

    name = "instant"

    def __init__(self, store: Store, points: int, requests: Sequence[tuple[str, int]]) -> None:
        """Create an idle executor.

        Args:
            store: Database that receives the numbers.
            points: Points per curve.
            requests: (Probe, context length) pairs to write for each attempt.
        """
        super().__init__()
        self.store, self.points, self.requests = store, points, requests
        self.gaps: list[float] = []
        """Seconds between the end of an attempt and the start of the next."""
        self.memory: list[int] = []
        """Bytes that this process holds, after each attempt."""
        self._ended: deque[AttemptExit] = deque()
        self._free_since: float | None = None
        self._process = psutil.Process()

    def fits(self, resources: Resources) -> bool:
        """Return True if no finished attempt waits to be collected, so that attempts run one at a time."""
        return not self._ended

    def start(self, launch: ProcessSpec) -> None:
        """Write a curve and a measurement per request (made-up numbers) for the attempt, and mark it as done.

        Appends the seconds since the last `wait` to `gaps`.
        """
        if self._free_since is not None:
            self.gaps.append(time.perf_counter() - self._free_since)
        attempt = self.store.attempt(launch.attempt)
        recorder = DatabaseRecorder(self.store, attempt.id, attempt.fence)
        steps = range(1, self.points + 1)
        recorder.curve([CurvePoint(step=n, tokens=1536 * n, wall_s=0.1 * n, train_loss=6 / n) for n in steps])
        recorder.measurements(
            [
                Measurement(probe=probe, metric=probe, length=length, value=1.0, unit="nats")
                for probe, length in self.requests
            ]
        )
        self.store.finish_attempt(attempt.id, attempt.fence, "done")
        self._ended.append((attempt.id, 0))

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Return the finished attempts with exit code 0, at once; `seconds` is ignored.

        Appends the resident bytes of this process to `memory`, and starts the time of a gap.
        """
        ended = list(self._ended)
        self._ended.clear()
        self.memory.append(self._process.memory_info().rss)
        self._free_since = time.perf_counter()
        return ended

    def end(self, attempts: Sequence[Attempt], runs: Path) -> set[int]:
        """Return the ids of all these attempts, as none is alive."""
        return {attempt.id for attempt in attempts}

    def close(self) -> None:
        """Do nothing: no process is left to end."""


def run(cells: int, points: int, folder: Path, *, tell: Callable[[str], None] = print) -> list[ScaleRow]:
    """Measure all steps of a sweep in a new database in `folder`, and return a row per number in order of measuring.

    In order: plan, record the revision, supervise, status, reports, export and import, relaunch, dry runs, and a
    stopped launch. Commands run in subprocesses.

    Args:
        cells: Number of cells, rounded to complete seeds of eight cells.
        points: Points of each cell's curve.
        folder: Empty folder for the grid, database and reports.
        tell: Called with lines of progress.

    Raises:
        MachineError: If a command fails.
    """
    file = folder / "scale.yaml"
    file.write_text(GRID.format(seeds=max(1, round(cells / COMBINATIONS))))
    runs = folder / "runs"
    tell("preparing the text")
    max_cells = 2 * cells + COMBINATIONS
    admission.expand_grid(load_grid(file, max_cells=max_cells), runs / "corpora")

    def expanded() -> tuple[Grid, list[Any]]:
        """Return the grid and its cells, read again from the file."""
        grid = load_grid(file, max_cells=max_cells)
        return grid, admission.expand_grid(grid, runs / "corpora")[0]

    began = time.perf_counter()
    grid, grid_cells = expanded()
    plan = launch.plan(launch.LaunchRequest(grid=grid, cells=grid_cells, runs=runs), None)
    rows = [ScaleRow(f"plan {len(grid_cells):,} new cells", time.perf_counter() - began, "s")]
    store = open_store(folder / "atma.db", create=True)
    owner = processes.this_process("bench")
    tell("recording the revision")
    began = time.perf_counter()
    fence = launch.claim_sweep(launch.LaunchRequest(grid=grid, cells=grid_cells, runs=runs), store, owner)
    rows.append(ScaleRow("record the revision", time.perf_counter() - began, "s"))
    tell("supervising")
    executor = InstantExecutor(
        store, points, sorted({pair for cell in grid_cells for pair in requested(cell.config.eval)})
    )
    began = time.perf_counter()
    Supervisor(store, grid.name, fence, executor, SilentListener(), runs=runs, commit=(None, None)).run(plan.training)
    rows += _supervised(executor, time.perf_counter() - began)
    store.renew_sweep(grid.name, fence, LEASE_S)
    store.release_sweep(grid.name, fence)
    tell("reading the status")
    rows += _status(store, grid.name, len(grid_cells) * points)
    tell("reporting")
    rows += measure_reports(store, folder)
    tell("exporting and importing")
    rows += measure_exchange(str(store), grid.name, folder)
    tell("launching again")
    began = time.perf_counter()
    grid, grid_cells = expanded()
    outcome = launch.run(
        launch.LaunchRequest(grid=grid, cells=grid_cells, runs=runs, executor="local"), store, SilentListener()
    )
    assert outcome.finished
    rows.append(ScaleRow("launch the finished sweep again", time.perf_counter() - began, "s"))
    tell("timing dry runs")
    rows += measure_dry_runs(cells, folder)
    tell("training a cell and stopping it")
    return [*rows, *measure_stop(folder)]


def table(rows: Sequence[ScaleRow]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| measurement | value |", "|---|---|"]
    return "\n".join(lines + [f"| {row.what} | {row.value:,.3f} {row.unit} |" for row in rows])


def _supervised(executor: InstantExecutor, seconds: float) -> list[ScaleRow]:
    """Return the supervisor's rows: time per cell, gaps between attempts, and memory.

    In order: ms per cell, median and longest gap in ms, MiB after a tenth of the cells and after all.

    Args:
        executor: Executor that has run at least one attempt.
        seconds: Seconds of all supervision.
    """
    gaps, memory = executor.gaps, executor.memory
    early = memory[len(memory) // 10]
    return [
        ScaleRow("supervise a cell, including all writes", 1e3 * seconds / max(1, len(memory)), "ms"),
        ScaleRow("idle time of a slot between two cells, median", 1e3 * statistics.median(gaps or [0.0]), "ms"),
        ScaleRow("idle time of a slot between two cells, longest", 1e3 * max(gaps, default=0.0), "ms"),
        ScaleRow("memory of the supervisor after a tenth of the cells", early / MIB, "MiB"),
        ScaleRow("memory of the supervisor after all cells", memory[-1] / MIB, "MiB"),
    ]


def _status(store: Store, sweep: str, points: int) -> list[ScaleRow]:
    """Return two rows: seconds of `atma-sweep status` as a command, and of its database queries alone.

    `points` is the number of curve points, for the text. Raises CalledProcessError if the command fails.
    """
    command = [sys.executable, "-m", "atma_sweep.cli", "status", "--db", str(store)]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    command_s = time.perf_counter() - began
    began = time.perf_counter()
    store.sweeps()
    store.revision(sweep)
    store.cell_states(sweep)
    query_s = time.perf_counter() - began
    return [
        ScaleRow(f"atma-sweep status, over {points:,} curve points, including start-up", command_s, "s"),
        ScaleRow("of which database queries, including conversion to Python objects", query_s, "s"),
    ]


# --- entire commands, each in a process of its own; seconds include their start, memory is its peak -----------------

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
PLAN_COMBINATIONS = 80
"""Combinations of the axes other than the learning rate."""
MAX_LEVELS = 250
"""Limit on the levels of the learning rate; larger grids get more seeds."""


def measure_dry_runs(cells: int, folder: Path) -> Iterator[ScaleRow]:
    """Yield rows of dry runs in subprocesses: seconds and peak MiB, and for the smaller grid the seconds of a plan.

    The grids have about `cells` and ten times as many cells. There is no database, and nothing is prepared. Grid files
    are written to `folder`. Raises MachineError if a command fails.
    """
    for num_requested in (cells, 10 * cells):
        rates = min(MAX_LEVELS, max(1, round(num_requested / PLAN_COMBINATIONS)))
        seeds = max(1, round(num_requested / PLAN_COMBINATIONS / rates))
        num_cells = PLAN_COMBINATIONS * rates * seeds
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
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not _is_training(db):
            if process.poll() is not None:
                raise MachineError(
                    f"the cell for the stop benchmark did not start training: {(folder / 'stop.txt').read_text()[-500:]}"
                )
            time.sleep(POLL_S)
        yield ScaleRow("from the launch of a cell to its first step", time.perf_counter() - began, "s")
        interrupted_at = time.perf_counter()
        process.send_signal(signal.SIGINT)
        process.wait()
        yield ScaleRow("from Ctrl-C to the saved checkpoint and exit", time.perf_counter() - interrupted_at, "s")
    finally:
        process.terminate()
        process.wait()


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
