"""Cells as the database has them, held sweeps, executors without processes and stand-ins for the job, for tests that need just one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atma_sweep.results.contrasts import Contrast
from atma_sweep.results.store.records import AXES, Attempt, CellRecord, CellState, Owner
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.config import DataConfig, Resources
from atma_sweep.sweep.data.prepare import prepare
from atma_sweep.sweep.executors.executor import AttemptExit, HostExecutor, ProcessSpec
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.host import processes
from atma_sweep.sweep.orchestrator.supervisor import Supervisor
from atma_sweep.sweep.planning import planner
from atma_sweep.sweep.planning.planner import Task
from machine import Quiet
from patience import PATIENCE_S

OWNER = Owner(name="ada", host="here", pid=1, started=0.0)
"""Somebody whose process nobody looks for."""


def fingerprint(data: object) -> str:
    """The hash of a corpus that nobody prepares."""
    return "f" * 64


def cell_record(key: str, slug: str = "", *, seed: int = 0, config: Mapping[str, Any] | None = None) -> CellRecord:
    """A cell as the database has it, whose id is `key` up to twelve letters."""
    levels = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True))
    id_ = (key * 12)[:12] if len(key) == 1 else key.ljust(12, "0")
    return CellRecord(
        id=id_, slug=slug or f"slug-{key}", seed=seed, levels=levels, config=dict(config or {}), tokens=10
    )


def state_of(cell: Cell, word: str = "done", **values: Any) -> CellState:
    """The state of a cell as the database tells it, empty but for its name and these values."""
    empty: dict[str, Any] = dict.fromkeys(CellState.__dataclass_fields__)
    empty |= {"cell_id": cell.id, "slug": cell.slug, "state": word, "measured": frozenset(values.pop("measured", ()))}
    return CellState(**(empty | values))


def attempt_of(**values: Any) -> Attempt:
    """An attempt, empty but for these values."""
    return Attempt(**(dict.fromkeys(Attempt.__dataclass_fields__) | values))


def contrast(axis: str, level: str, reference: str = "0", **within: str) -> Contrast:
    """A contrast of the validation loss."""
    return Contrast(
        probe="val", metric="val_loss", length=0, axis=axis, level=level, reference=reference, within=within
    )


def trainings(cells: Sequence[Cell], why: Any = "new") -> list[Task]:
    """A task for each cell that trains it."""
    return [Task(cell, "train", [], why) for cell in cells]


def record_sweep(store: Store, cells: Sequence[Cell | CellRecord], name: str = "s") -> None:
    """The sweep as a launch records it."""
    rows = [planner.to_record(cell) if isinstance(cell, Cell) else cell for cell in cells]
    store.record_revision(name, grid_text="", grid_file="g", cells=rows)


def hold_sweep(store: Store, cells: Sequence[Cell], name: str = "s", lease: float = 60.0) -> int:
    """Records the sweep and has this process run it; its fence."""
    record_sweep(store, cells, name)
    return store.acquire_sweep(name, processes.this_process("test"), lease)


def supervisor_of(
    store: Store, fence: int, executor: Any, runs: Path, *, name: str = "s", listener: Any = None
) -> Supervisor:
    """A supervisor of a sweep that is held, which tells nobody."""
    return Supervisor(store, name, fence, executor, listener or Quiet(), runs=runs, commit=(None, None))


class AtOnce(HostExecutor):
    """An executor whose attempts end at once, as `end` says; it keeps their jobs and launches."""

    name = "at once"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.jobs: list[Job] = []
        self.launches: list[ProcessSpec] = []
        self._ended: list[AttemptExit] = []

    def admit(self, cells: object) -> None: ...
    def close(self) -> None: ...
    def fits(self, resources: Resources) -> bool:
        return True

    def start(self, launch: ProcessSpec) -> None:
        self.launches.append(launch)
        self.jobs.append(Job.read(launch.runs / launch.folder))
        self._ended.append((launch.attempt, self.end_of(self.jobs[-1])))

    def end_of(self, job: Job) -> int:
        """Ends the attempt in the database; its exit code."""
        self.store.finish_attempt(job.attempt, job.fence, "done")
        return 0

    def wait(self, seconds: float) -> list[AttemptExit]:
        ended, self._ended = self._ended, []
        return ended


WAITING_JOB = """
import faulthandler, os, pathlib, signal, sys, time
folder = pathlib.Path.cwd()
def leave(*_):
    (folder / "saved").write_text("yes")
    sys.exit(143)
signal.signal(signal.SIGTERM, signal.SIG_IGN if (folder / "deaf").exists() else leave)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
faulthandler.register(signal.SIGUSR1)
print("begun", flush=True)
about = os.getpid(), " ".join(sys.argv[1:]), os.environ.get("ATMA_DB", "none"), os.environ.get("CUDA_VISIBLE_DEVICES")
(folder / "saying").write_text("|".join(map(str, about)))
(folder / "saying").rename(folder / "said")  # whole, for whoever waits for it
while not (folder / "go").exists():
    time.sleep(0.02)
sys.exit(7)
"""
"""A job for `stand_in` that ends with 7 when a file `go` lies in its folder, and with 143 after SIGTERM unless `deaf` lies there."""


def stand_in(folder: Path, job: str) -> Path:
    """A copy of the package's source in which this text is what an attempt runs."""
    module = folder / "source" / "atma_sweep" / "sweep" / "job.py"
    module.parent.mkdir(parents=True)
    for package in module.parents[:2]:
        (package / "__init__.py").touch()
    module.write_text(job)
    return folder / "source"


def prepared_text(folder: Path, runs: Path) -> Callable[[object], str]:
    """A few words of text, prepared below `runs`; what a grid's expansion asks for its fingerprint."""
    (folder / "text").mkdir(exist_ok=True)
    for name in "abcdef":
        (folder / "text" / f"{name}.txt").write_text(f"{name} few words of text")
    number = prepare(DataConfig(corpus="files", path=str(folder / "text")), runs / "corpora")
    return lambda data: number


def script(text: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of Python that runs this text, with pipes."""
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(child: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def ended(process: subprocess.Popen[str], code: int = 0, number: signal.Signals | int | None = None) -> str:
    """The output of a process that ends with this code, after this signal if there is one."""
    if number is not None:
        process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, out
    return out
