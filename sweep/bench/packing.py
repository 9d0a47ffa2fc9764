"""Benchmark of concurrency: the number of simultaneous attempts that finishes the most cells per hour.

Each number of attempts trains the same cells from scratch, from the start of the first attempt to the last measurement,
with a database of its own in a temporary folder. Attempts are children of this process (executor `local`). On a GPU
each attempt gets an equal share of it; CUDA takes turns between processes unless NVIDIA's MPS runs.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import psutil

from ...results.console.cores import usable_cores
from ...results.console.text import counted
from ...results.store.records import Attempt
from ...results.store.store import Store, open_store
from ..config import Resources
from ..errors import GridError, SweepError
from ..executors.executor import LocalExecutor
from ..grid.cell import Cell
from ..grid.grid import Grid, load_grid
from ..host import hardware, processes
from ..orchestrator import launch
from ..orchestrator.supervisor import LEASE_S
from ..planning import admission
from ..planning.planner import Task, select

MPS = ("nvidia-cuda-mps", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
"""Names of its processes as the kernel reports them, cut to fifteen characters or in full."""


@dataclass(frozen=True)
class PackingRow:
    """Results for one number of simultaneous attempts; seconds of phases are means over the attempts."""

    attempts: int
    cells: int
    seconds: float
    """From the start of the first attempt to the end of the last."""
    tokens_per_s: float
    """Training tokens of all cells over those seconds."""
    cells_per_hour: float
    starting_s: float
    """From the start of the process to the end of its first step, including compilation and loading."""
    training_s: float
    """Steps after the first one."""
    validating_s: float
    """Time between steps: validation and checkpoints."""
    probing_s: float
    """Time after the last step: probes, weights, and the end of the process."""
    between_s: float
    """Idle time of a slot per cell while others work, including the end of the sweep."""


@dataclass(frozen=True)
class PackingResult:
    """Results of the benchmark: common facts, and one row per number of simultaneous attempts."""

    grid: str
    gpu: str | None
    """Types of GPU; None if the cells use none."""
    mps: bool | None
    """True if NVIDIA's MPS runs on this machine; None without a GPU."""
    rows: tuple[PackingRow, ...]


@dataclass
class PhaseTimer:
    """Listener of a supervisor that records when each attempt is first seen in a phase; it is polled every 0.2 s.

    Keys of its mappings are attempt ids, values seconds of the monotonic clock.
    """

    tell: Callable[[str], None]
    """Called with a line at the end of each attempt."""
    began: dict[int, float] = field(default_factory=dict)
    """Attempt id -> start of its process."""
    trained: dict[int, float] = field(default_factory=dict)
    """Attempt id -> time at which it was first seen training."""
    stepped: dict[int, float] = field(default_factory=dict)
    """Attempt id -> time at which its first step was over."""
    probed: dict[int, float] = field(default_factory=dict)
    """Attempt id -> time at which it was first seen probing."""
    over: dict[int, float] = field(default_factory=dict)
    """Attempt id -> its end."""
    ends: Counter[str] = field(default_factory=Counter)
    """Final state of attempts -> their number."""
    causes: list[str] = field(default_factory=list)
    """A line per attempt that did not end as done."""

    def started(self, task: Task, attempt: Attempt) -> None:
        """Record the start of the process."""
        self.began[attempt.id] = time.monotonic()

    def running(self, attempts: Sequence[Attempt]) -> None:
        """Record when training, the first step and probing of each attempt were first seen.

        A later phase counts as sight of the earlier ones.
        """
        now = time.monotonic()
        for attempt in attempts:
            if attempt.phase in ("training", "probing"):
                self.trained.setdefault(attempt.id, now)
            if attempt.step or attempt.phase == "probing":
                self.stepped.setdefault(attempt.id, now)
            if attempt.phase == "probing":
                self.probed.setdefault(attempt.id, now)

    def ended(self, task: Task, attempt: Attempt) -> None:
        """Record the end of an attempt and, unless it is done, its cause; report it with its duration in seconds."""
        self.over[attempt.id] = time.monotonic()
        self.ends[attempt.state] += 1
        if attempt.state != "done":
            self.causes.append(f"{task.cell.slug} {attempt.state}: {attempt.cause}")
        self.tell(f"  {task.cell.slug} {attempt.state} after {self.over[attempt.id] - self.began[attempt.id]:.1f} s")

    def waiting(self, cell: Cell) -> None:
        """Do nothing: no other process uses this database."""


class _LimitedExecutor(LocalExecutor):
    """LocalExecutor limited to a fixed number of simultaneous attempts."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._max_attempts = most

    def fits(self, resources: Resources) -> bool:
        """Return True if the limit and the machine allow one more attempt."""
        return len(self._running) < self._max_attempts and super().fits(resources)


def parse_attempts(text: str) -> list[int]:
    """Return the sorted, distinct numbers of simultaneous attempts of `--attempts`, such as "1,2,4".

    Raises SweepError for anything but whole numbers from 1 up with commas between.
    """
    numbers = [int(word) for word in text.replace(" ", "").split(",") if word.isdecimal() and int(word)]
    if len(numbers) != text.count(",") + 1:
        raise SweepError(f"--attempts {text}: give whole numbers from 1 up, separated by commas, such as 1,2,4")
    return sorted(set(numbers))


def check(attempts: Sequence[int], cells: Sequence[Cell]) -> None:
    """Raise SweepError if the machine has fewer cores than the largest number of attempts requires.

    Args:
        attempts: Numbers of simultaneous attempts, at least one.
        cells: The cells, at least one; the largest `resources.cpus` counts.
    """
    each, max_attempts = max(cell.config.resources.cpus for cell in cells), max(attempts)
    if each * max_attempts > usable_cores():
        raise SweepError(
            f"--attempts {max_attempts}: a cell needs {counted(each, 'core')}, and this machine has {usable_cores()}; "
            f"give at most {max(1, usable_cores() // each)}, or lower resources.cpus with --set"
        )


def load(grid: str, sets: Sequence[str], only: Sequence[str], attempts: int, runs: Path) -> tuple[Grid, list[Cell]]:
    """Return the grid, renamed to "bench", and its selected cells; their text is prepared if necessary.

    If any cell uses a GPU and there are several attempts, every cell gets 1 / attempts of a GPU.

    Args:
        grid: Path or name of the grid.
        sets: Overrides of `--set`.
        only: Filters of `--only`; empty selects all.
        attempts: Number of simultaneous attempts.
        runs: Folder of the runs, with the prepared corpora.

    Raises:
        GridError: If the grid is not valid, or a study.
        MachineError: If text would have to be downloaded.
    """
    loaded, cells = _expanded(grid, sets, runs)
    gpu_shares = {cell.config.resources.gpus for cell in cells}
    if gpu_shares != {0} and attempts > 1:
        loaded, cells = _expanded(grid, [*sets, f"resources.gpus={1 / attempts!r}"], runs)
    return loaded, select(loaded, cells, only) if only else cells


def _expanded(grid: str, sets: Sequence[str], runs: Path) -> tuple[Grid, list[Cell]]:
    """Return the grid, renamed to "bench", and its cells; prepares their text under `runs`/corpora.

    Raises GridError for a study.
    """
    loaded = load_grid(grid, sets=list(sets), rename="bench")
    if loaded.search is not None or loaded.tune is not None:
        raise GridError("GRID", None, grid, "a study has no cells before it runs; give a factorial grid", [], grid)
    return loaded, admission.expand_grid(loaded, runs / "corpora")[0]


def run(
    grid: str,
    attempts: Sequence[int],
    folder: Path,
    *,
    sets: Sequence[str] = (),
    only: Sequence[str] = (),
    prepared: Path | None = None,
    tell: Callable[[str], None] = print,
) -> PackingResult:
    """Train the cells once per number of simultaneous attempts, from scratch, and return the results.

    Blocks until all are done. Writes to `folder` a database N.db and a folder runs-N per number N of attempts.

    Args:
        grid: Path or name of the grid.
        attempts: Numbers of simultaneous attempts, at least one.
        folder: Empty folder for databases and runs.
        sets: Overrides of `--set`.
        only: Filters of `--only`.
        prepared: Folder of prepared corpora to use, to which missing ones are added; None takes one under `folder`.
        tell: Called with lines of progress.

    Returns:
        The results, with a row per number of attempts in the order given.

    Raises:
        SweepError: If a cell does not finish, or the machine has too few cores.
        GridError: If the grid is not valid, or a study.
        MachineError: If the cells do not fit on the machine, or text would have to be downloaded.
    """
    corpora_of = prepared or folder / "corpora"
    corpora_of.mkdir(parents=True, exist_ok=True)
    rows: list[PackingRow] = []
    cells: list[Cell] = []
    for attempts_at_once in attempts:
        runs = folder / f"runs-{attempts_at_once}"
        runs.mkdir()
        (runs / "corpora").symlink_to(corpora_of.absolute(), target_is_directory=True)
        loaded, cells = load(grid, sets, only, attempts_at_once, runs)
        check([attempts_at_once], cells)
        tell(f"{attempts_at_once} at once: {counted(len(cells), 'cell')}")
        store = open_store(folder / f"{attempts_at_once}.db", create=True)
        rows.append(_measured(store, loaded, cells, attempts_at_once, runs, tell))
    gpus = hardware.query_gpus() if any(cell.config.resources.gpus for cell in cells) else []
    kinds = ", ".join(sorted({gpu.name for gpu in gpus})) or None
    return PackingResult(grid, kinds, mps_runs() if gpus else None, tuple(rows))


def _measured(
    store: Store, grid: Grid, cells: Sequence[Cell], attempts_at_once: int, runs: Path, tell: Callable[[str], None]
) -> PackingRow:
    """Return the row of one number of attempts, training the cells in `store`; blocks until they are done.

    The sweep's lease is claimed and released again. Raises SweepError if a cell does not finish.
    """
    request = launch.LaunchRequest(grid=grid, cells=list(cells), runs=runs, executor="local")
    watch = PhaseTimer(tell)
    fence = launch.claim_sweep(request, store, processes.this_process("bench"))
    try:
        with closing(_LimitedExecutor(attempts_at_once)) as executor:
            tasks = launch.plan(request, store).tasks
            launch.run_tasks(store, [(grid.name, fence, tasks)], watch, executor, runs=runs, commit=None)
        store.renew_sweep(grid.name, fence, LEASE_S)
    finally:
        store.release_sweep(grid.name, fence)
    if watch.causes:
        raise SweepError(
            f"{attempts_at_once} at once: a cell did not finish ({'; '.join(watch.causes[:3])}), so the timings are not comparable"
        )
    return packing_row(store, cells, attempts_at_once, watch)


def packing_row(store: Store, cells: Sequence[Cell], attempts_at_once: int, watch: PhaseTimer) -> PackingRow:
    """Return the row of one number of attempts from the recorded times and curves.

    Phases are means over the attempts in seconds, the row's `seconds` reach from the first start to the last end. A
    phase that was too short to be seen has length 0.

    Args:
        store: Database with the curves of the attempts.
        cells: The cells, all of which have finished; their tokens give the rate.
        attempts_at_once: Number of simultaneous attempts.
        watch: Recorded times of at least one attempt.
    """
    seconds = max(watch.over.values()) - min(watch.began.values())
    tokens = sum(cell.config.train.steps * cell.config.train.batch_tokens for cell in cells)
    steps = {key: (store.curve(key)[-1].wall_s or 0.0) for key in watch.over}
    # a phase too short to be seen has no length
    trained = {key: watch.trained.get(key, watch.over[key]) for key in watch.over}
    stepped = {key: max(trained[key], watch.stepped.get(key, trained[key])) for key in watch.over}
    steps = {key: max(0.0, steps[key] - (stepped[key] - trained[key])) for key in watch.over}
    probed = {key: max(stepped[key], watch.probed.get(key, watch.over[key])) for key in watch.over}
    busy = sum(watch.over[key] - watch.began[key] for key in watch.over)
    return PackingRow(
        attempts=attempts_at_once,
        cells=len(cells),
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        cells_per_hour=3600 * len(cells) / seconds,
        starting_s=fmean(stepped[key] - watch.began[key] for key in watch.over),
        training_s=fmean(steps.values()),
        validating_s=fmean(max(0.0, probed[key] - stepped[key] - steps[key]) for key in watch.over),
        probing_s=fmean(watch.over[key] - probed[key] for key in watch.over),
        between_s=max(0.0, attempts_at_once * seconds - busy) / len(cells),
    )


def mps_runs() -> bool:
    """Return True if an MPS daemon of NVIDIA runs that new processes would use.

    With CUDA_MPS_PIPE_DIRECTORY set, its control pipe decides; otherwise the names of the machine's processes do
    (nvidia-cuda-mps, -control and -server).
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        return (Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "control").exists()
    names = {process.info["name"] for process in psutil.process_iter(["name"])}
    return any(name in names or name[:15] in names for name in MPS[1:])


def table(result: PackingResult) -> str:
    """Return the rows as a Markdown table with a note below; the row with the most tokens per second is bold.

    Columns: attempts at once, cells, seconds, tokens/s, cells per hour, and the mean seconds of a cell to its first
    step, in steps, in validation, in probes, and idle.
    """
    best = max(result.rows, key=lambda row: row.tokens_per_s)
    heads = "attempts at once|cells|seconds|tokens/s|cells/h|to first step (s)|steps (s)|validation (s)|probes (s)|idle (s)".split(
        "|"
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in result.rows:
        name = f"**{row.attempts}**" if row is best else str(row.attempts)
        parts = (row.starting_s, row.training_s, row.validating_s, row.probing_s, row.between_s)
        lines.append(
            f"| {name} | {row.cells} | {row.seconds:,.1f} | {row.tokens_per_s:,.0f} | {row.cells_per_hour:,.0f} | "
            + " | ".join(f"{part:.1f}" for part in parts)
            + " |"
        )
    mps = "MPS runs" if result.mps else "MPS does not run, so attempts on one GPU take turns"
    where = f"{result.gpu}; {mps}" if result.gpu is not None else "on the CPU"
    last = (
        f"Grid {result.grid}, {where}. From first step to idle: mean seconds per cell; phases are sampled every 0.2 s."
    )
    return "\n".join([*lines, "", last])
