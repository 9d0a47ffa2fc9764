"""How many attempts at once finish the most cells: whole cells of a grid, from the start of the first attempt to the last number.

Every number of attempts trains the same cells anew, in a database of its own under a temporary folder, on children of this
process (executor `local`). On a GPU an attempt gets that part of it; CUDA takes turns between processes unless NVIDIA's MPS runs.
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

from ...results.console.text import counted
from ...results.store.records import Attempt
from ...results.store.store import Store, open_store
from ..config import Resources
from ..errors import GridError, SweepError
from ..executors.executor import LocalExecutor
from ..grid.cell import Cell
from ..grid.grid import Grid, load_grid
from ..host import hardware, processes
from ..host.hardware import cores
from ..orchestrator import launch
from ..orchestrator.supervisor import LEASE_S
from ..planning import admission
from ..planning.planner import Task, select

MPS = ("nvidia-cuda-mps", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
"""Processes of it, as the kernel shows them: cut to fifteen letters, or whole."""


@dataclass(frozen=True)
class PackingRow:
    """Cells at so many attempts at once; seconds are means over the attempts."""

    attempts: int
    cells: int
    seconds: float
    """From the start of the first attempt to the end of the last."""
    tokens_per_s: float
    """Training tokens of all cells over those seconds."""
    cells_per_hour: float
    starting_s: float
    """From the supervisor's start of the process to the end of its first step, with all that is compiled or loaded for it."""
    training_s: float
    """Steps alone, after the first."""
    validating_s: float
    """Between the steps: validation, checkpoints."""
    probing_s: float
    """After the last step: probes, weights, the end of the process."""
    between_s: float
    """That a place for an attempt stood empty while others worked, for each cell; at the end of the sweep, too."""


@dataclass(frozen=True)
class PackingResult:
    """What held for all of them, and a row for each number of attempts at once."""

    grid: str
    gpu: str | None
    """The type of GPU; None where the cells use none."""
    mps: bool | None
    """Whether NVIDIA's MPS runs on this machine; None without a GPU."""
    rows: tuple[PackingRow, ...]


@dataclass
class Watch:
    """A supervisor's Listener that notes when an attempt is first seen in each phase; the supervisor looks every 0.2 s."""

    tell: Callable[[str], None]
    began: dict[int, float] = field(default_factory=dict)
    trained: dict[int, float] = field(default_factory=dict)
    stepped: dict[int, float] = field(default_factory=dict)
    """When the first step was over."""
    probed: dict[int, float] = field(default_factory=dict)
    over: dict[int, float] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    causes: list[str] = field(default_factory=list)

    def started(self, task: Task, attempt: Attempt) -> None:
        """The process is starting."""
        self.began[attempt.id] = time.monotonic()

    def running(self, attempts: Sequence[Attempt]) -> None:
        """Where they stand."""
        now = time.monotonic()
        for one in attempts:
            if one.phase in ("training", "probing"):
                self.trained.setdefault(one.id, now)
            if one.step or one.phase == "probing":
                self.stepped.setdefault(one.id, now)
            if one.phase == "probing":
                self.probed.setdefault(one.id, now)

    def ended(self, task: Task, attempt: Attempt) -> None:
        """However it did."""
        self.over[attempt.id] = time.monotonic()
        self.ends[attempt.state] += 1
        if attempt.state != "done":
            self.causes.append(f"{task.cell.slug} {attempt.state}: {attempt.cause}")
        self.tell(f"  {task.cell.slug} {attempt.state} after {self.over[attempt.id] - self.began[attempt.id]:.1f} s")

    def waiting(self, cell: Cell) -> None:
        """Nobody else has this database."""


class _Packed(LocalExecutor):
    """As local, for so many attempts at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def fits(self, resources: Resources) -> bool:
        """Whether one more may start."""
        return len(self._running) < self._most and super().fits(resources)


def numbers(words: str) -> list[int]:
    """Of attempts at once, as `--attempts` says them. Raises SweepError."""
    found = [int(word) for word in words.replace(" ", "").split(",") if word.isdecimal() and int(word)]
    if len(found) != words.count(",") + 1:
        raise SweepError(f"--attempts {words}: give whole numbers from 1 up with commas between, as in 1,2,4")
    return sorted(set(found))


def check(attempts: Sequence[int], cells: Sequence[Cell]) -> None:
    """Before the work: that so many attempts have a core each, or whatever the cells ask for. Raises SweepError."""
    each, most = max(cell.config.resources.cpus for cell in cells), max(attempts)
    if each * most > cores():
        raise SweepError(
            f"--attempts {most}: a cell asks for {counted(each, 'core')} and this machine has {cores()}; "
            f"give at most {max(1, cores() // each)}, or --set resources.cpus"
        )


def load(grid: str, sets: Sequence[str], only: Sequence[str], attempts: int, runs: Path) -> tuple[Grid, list[Cell]]:
    """The grid, with a part of a GPU for each of so many attempts where its cells use one, and the cells to train."""
    loaded, every = _expanded(grid, sets, runs)
    wanted = {cell.config.resources.gpus for cell in every}
    if wanted != {0} and attempts > 1:
        loaded, every = _expanded(grid, [*sets, f"resources.gpus={1 / attempts!r}"], runs)
    return loaded, select(loaded, every, only) if only else every


def _expanded(grid: str, sets: Sequence[str], runs: Path) -> tuple[Grid, list[Cell]]:
    loaded = load_grid(grid, sets=list(sets), rename="bench")
    if loaded.search is not None or loaded.tune is not None:
        raise GridError("GRID", None, grid, "a study has no cells before it runs; give a factorial", [], grid)
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
    """A row for each number of attempts at once, in databases under `folder`; `prepared` holds corpora that are not to be made again.

    Raises SweepError when a cell does not end as done, GridError, MachineError.
    """
    corpora_of = prepared or folder / "corpora"
    corpora_of.mkdir(parents=True, exist_ok=True)
    rows: list[PackingRow] = []
    cells: list[Cell] = []
    for number in attempts:
        runs = folder / f"runs-{number}"
        runs.mkdir()
        (runs / "corpora").symlink_to(corpora_of.absolute(), target_is_directory=True)
        loaded, cells = load(grid, sets, only, number, runs)
        check([number], cells)
        tell(f"{number} at once: {counted(len(cells), 'cell')}")
        store = open_store(folder / f"{number}.db", create=True)
        rows.append(_measured(store, loaded, cells, number, runs, tell))
    here = hardware.gpus() if any(cell.config.resources.gpus for cell in cells) else []
    kinds = ", ".join(sorted({gpu.name for gpu in here})) or None
    return PackingResult(grid, kinds, mps_runs() if here else None, tuple(rows))


def _measured(
    store: Store, grid: Grid, cells: Sequence[Cell], number: int, runs: Path, tell: Callable[[str], None]
) -> PackingRow:
    request = launch.LaunchRequest(grid=grid, cells=list(cells), runs=runs, executor="local")
    watch = Watch(tell)
    fence = launch.claim(request, store, processes.this_process("bench"))
    try:
        with closing(_Packed(number)) as executor:
            tasks = launch.plan(request, store).tasks
            launch.run_tasks(store, [(grid.name, fence, tasks)], watch, executor, runs=runs, commit=None)
        store.renew_sweep(grid.name, fence, LEASE_S)
    finally:
        store.release_sweep(grid.name, fence)
    if watch.causes:
        raise SweepError(f"{number} at once: {'; '.join(watch.causes[:3])}; the numbers would be those of other work")
    return row_of(store, cells, number, watch)


def row_of(store: Store, cells: Sequence[Cell], number: int, watch: Watch) -> PackingRow:
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
        attempts=number,
        cells=len(cells),
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        cells_per_hour=3600 * len(cells) / seconds,
        starting_s=fmean(stepped[key] - watch.began[key] for key in watch.over),
        training_s=fmean(steps.values()),
        validating_s=fmean(max(0.0, probed[key] - stepped[key] - steps[key]) for key in watch.over),
        probing_s=fmean(watch.over[key] - probed[key] for key in watch.over),
        between_s=max(0.0, number * seconds - busy) / len(cells),
    )


def mps_runs() -> bool:
    """Whether a daemon of NVIDIA's MPS runs that processes started here would use."""
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        return (Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "control").exists()
    names = {one.info["name"] for one in psutil.process_iter(["name"])}
    return any(name in names or name[:15] in names for name in MPS[1:])


def table(found: PackingResult) -> str:
    """Markdown; the number of attempts with the most tokens a second is bold."""
    best = max(found.rows, key=lambda row: row.tokens_per_s)
    heads = "attempts at once|cells|seconds|tokens/s|cells/h|to the first step, s|steps, s|validation, s|probes, s|idle, s".split(
        "|"
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in found.rows:
        name = f"**{row.attempts}**" if row is best else str(row.attempts)
        parts = (row.starting_s, row.training_s, row.validating_s, row.probing_s, row.between_s)
        lines.append(
            f"| {name} | {row.cells} | {row.seconds:,.1f} | {row.tokens_per_s:,.0f} | {row.cells_per_hour:,.0f} | "
            + " | ".join(f"{part:.1f}" for part in parts)
            + " |"
        )
    mps = "MPS runs" if found.mps else "MPS does not run, so attempts on one GPU take turns"
    where = f"{found.gpu}; {mps}" if found.gpu is not None else "on the CPU"
    last = f"Grid {found.grid}, {where}. Start to idle: seconds of a cell, means; phases are seen every 0.2 s."
    return "\n".join([*lines, "", last])
