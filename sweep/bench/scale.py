"""Time of planning, supervising, status and relaunching for a sweep of thousands of cells.

The sweep has a database of its own. Attempts start no process: an executor writes their numbers and ends them at once.
So only this package's own work is timed, including the database, but no training and no start of Python.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ...results.store.recorder import DatabaseRecorder
from ...results.store.records import Attempt, CurvePoint, Measurement
from ...results.store.store import Store, open_store
from ..config import Resources
from ..executors.executor import AttemptExit, HostExecutor, ProcessSpec
from ..grid.grid import Grid, load_grid
from ..host import processes
from ..orchestrator import launch
from ..orchestrator.supervisor import LEASE_S, Supervisor
from ..planning import admission
from ..planning.planner import Task
from ..probes import requested
from . import scale_commands
from .scale_commands import ScaleRow

GRID = """\
name: scale
extends: tiny
axes: {{attn_type: [polar, nope], memory: [off, on], window: [off, on]}}
seeds: {seeds}
"""
COMBINATIONS = 8
MIB = 2**20


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
    rows += scale_commands.measure_reports(store, folder)
    tell("exporting and importing")
    rows += scale_commands.measure_exchange(str(store), grid.name, folder)
    tell("launching again")
    began = time.perf_counter()
    grid, grid_cells = expanded()
    outcome = launch.run(
        launch.LaunchRequest(grid=grid, cells=grid_cells, runs=runs, executor="local"), store, SilentListener()
    )
    assert outcome.finished
    rows.append(ScaleRow("launch the finished sweep again", time.perf_counter() - began, "s"))
    tell("timing dry runs")
    rows += scale_commands.measure_dry_runs(cells, folder)
    tell("training a cell and stopping it")
    return [*rows, *scale_commands.measure_stop(folder)]


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
