"""Where attempts run: what every executor does, what those of this machine share, and the one without Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import psutil

from ...results.store.records import Attempt
from ...results.store.store import Store
from ..config import Resources
from ..grid.cell import Cell
from ..host import hardware, processes
from ..host.allocation import Allocation, Machine, MachineAllocator, is_type
from ..host.locks import GpuLocks
from ..planning import admission
from . import source_snapshot
from .warm_pool import WarmPool

DUMP_S = 1.0
"""What a hanging process gets to write down where its threads stand."""
LOOK_S = 0.02
"""Between two looks at children that run: what one had lies idle for no longer."""
Tell = Callable[[str], None]
AttemptExit = tuple[int, int]
"""(attempt id, exit code; negative for a signal, or one of failures' words for more than a code can say)."""


@dataclass(frozen=True)
class ProcessSpec:
    """A job that is ready to start: its job.json is written."""

    attempt: int
    runs: Path
    folder: str
    resources: Resources
    database: str | None
    """URL with password, handed on in the child's environment only; None for an attempt that writes a journal."""
    source: Path | None = None
    """Folder that holds the copy of the package that the attempt runs; None for the one that is installed."""
    more: bool = False
    """Whether further attempts are waiting, or may yet be asked for."""


@dataclass(frozen=True)
class ExecutorContext:
    """What an executor may want to know when it is opened."""

    store: Store
    runs: Path
    tell: Tell
    """Called with lines about machines that come, go or cannot be used."""
    address: str | None = None


class Executor(Protocol):
    """Keeps one process per running attempt. Used from one thread."""

    name: str
    writes_directly: bool
    """Whether its attempts write into the database; else each writes a journal, which the executor applies."""

    @classmethod
    def opened(cls, opening: ExecutorContext) -> Executor:
        """One that can be asked to end what others have left. Raises MachineError when its machines cannot be reached."""

    def admit(self, cells: Sequence[Cell]) -> None:
        """Makes ready for attempts of these cells and locks the GPUs that they need, until it is closed. Called once,
        before `fits` and `start`.

        Raises MachineError for a cell that no machine has room for.
        """

    def fits(self, resources: Resources) -> bool:
        """Whether an attempt of that size could start now."""

    def start(self, launch: ProcessSpec) -> None:
        """Starts the attempt's process."""

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Attempts whose process has ended, after at most `seconds`."""

    def stop(self, attempt: Attempt) -> bool:
        """Asks the attempt's process to save itself and leave; False as long as nobody knows which process that is."""

    def kill(self, attempt: Attempt, *, dump: bool = False) -> bool:
        """Ends the attempt's process at once, with `dump` after it wrote down where its threads stand; False as above."""

    def away(self, attempt: Attempt) -> bool:
        """Whether the attempt's machine cannot be reached, so that its process may live on for a while."""

    def end(self, attempts: Sequence[Attempt], runs: Path) -> set[int]:
        """Ends what is left of attempts whose supervisor is gone; returns those of which surely nothing lives."""

    def broken(self) -> str | None:
        """What of the executor itself is dead, so that no attempt can be started any more; None while all is well."""

    def close(self) -> None:
        """Ends whatever still runs and gives the machine back."""


class HostExecutor:
    """What an executor does with processes of this machine, which it knows from the database."""

    writes_directly = True

    def __init__(self) -> None:
        self._me = processes.this_process("launch")
        self._locks = GpuLocks()

    @classmethod
    def opened(cls, opening: ExecutorContext) -> Self:
        """Nothing is begun before cells are admitted."""
        return cls()

    def admit(self, cells: Sequence[Cell]) -> None:
        """Locks the GPUs that these cells need. Raises MachineError for a cell that this machine has no room for."""
        self.begin(lock_gpus_for(cells, self._locks))

    def begin(self, machine: Machine) -> None:
        """Makes ready for attempts on that much of this machine."""
        self._room = MachineAllocator(machine)

    def fits(self, resources: Resources) -> bool:
        """Whether cores, memory and a GPU, or the part of one, are left."""
        return self._room.place(resources) is not None

    def close(self) -> None:
        """Gives the GPUs back."""
        self._locks.release()

    def _child(self, attempt: Attempt) -> psutil.Process | None:
        """The attempt's process; None before it has said who it is, and when it is gone."""
        return processes.find(attempt.pid, attempt.pid_started) if attempt.pid != self._me.pid else None

    def stop(self, attempt: Attempt) -> bool:
        """Asks the attempt's process to save itself and leave."""
        child = self._child(attempt)
        if child is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        return child is not None

    def kill(self, attempt: Attempt, *, dump: bool = False) -> bool:
        """Ends the attempt's process at once."""
        child = self._child(attempt)
        if child is None:
            return False
        kill_process(child, dump=dump)
        return True

    def away(self, attempt: Attempt) -> bool:
        """Never: it is this machine."""
        return False

    def broken(self) -> str | None:
        """Never: there is nothing beside the attempts that could die."""
        return None

    def end(self, attempts: Sequence[Attempt], runs: Path) -> set[int]:
        """Ends what this machine has of them: all at once, or the last would wait for the grace of all before it.

        One that is still said to be this very process was never started; one that we descend from lives on.
        """
        here = [attempt for attempt in attempts if processes.here(attempt.host, attempt.pid_space)]
        found = {attempt.id: processes.find(attempt.pid, attempt.pid_started) for attempt in here}
        above = processes.lineage() - {self._me.pid}
        ended = {key: one for key, one in found.items() if one is None or one.pid not in above}
        processes.terminate_all([one for one in ended.values() if one is not None])
        return set(ended)


def lock_gpus_for(cells: Sequence[Cell], locks: GpuLocks) -> Machine:
    """This machine, its GPUs locked if any cell needs one. Raises MachineError for a cell that it has no room for."""
    kinds = {cell.config.resources.gpu_type for cell in cells if cell.config.resources.gpus}
    if not kinds:
        here = Machine.here()
        admission.check_placement(cells, here)
        return here
    every = hardware.gpus()
    # before any lock is taken: what does not fit the whole machine will not when another sweep has ended
    admission.check_placement(cells, Machine.here(every))
    taken = locks.take([gpu for gpu in every if any(is_type(gpu.name, kind) for kind in kinds)])
    here = Machine.here(taken)
    admission.check_placement(cells, here, held=[gpu for gpu in every if gpu not in taken])
    return here


def kill_process(child: psutil.Process, *, dump: bool) -> None:
    """Kills a process and its children, with `dump` after it wrote into its log where its threads stand.

    Never one that we descend from. Its exit code is left to whoever started it: a process that is waited for here has none there.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [child, *child.children(recursive=True)] if child.pid not in processes.lineage() else []
        if dump and family:
            child.send_signal(signal.SIGUSR1)
            time.sleep(DUMP_S)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def run_command(launch: ProcessSpec, parent: int | None = None, *, spare: bool = False) -> list[str]:
    """The command line of an attempt's process, to be completed with its parent's pid for None; `spare`, of one that hears by
    a pipe which attempt it is."""
    return [
        sys.executable, "-m", "atma_sweep.sweep.job", "--runs", str(launch.runs),
        *(["--spare"] if spare else ["--folder", launch.folder]),
        *(["--parent", str(parent)] if parent is not None else []), *(["--journal"] if launch.database is None else []),
    ]  # fmt: skip


def environment(launch: ProcessSpec, devices: str | None = None) -> dict[str, str]:
    """The child's environment: its database, its threads, and the GPUs that it may see.

    Without a GPU in its resources none is visible; `devices` names the one it gets otherwise (None: as inherited).
    """
    env = {name: value for name, value in os.environ.items() if name not in ("ATMA_DB", "RAY_AUTH_TOKEN")}
    if launch.database is not None:
        env["ATMA_DB"] = launch.database
    if launch.source is not None:
        env["PYTHONPATH"] = source_snapshot.import_path(launch.source.resolve(), env.get("PYTHONPATH"))
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env |= dict.fromkeys(threads, str(launch.resources.cpus))
    if launch.resources.gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    return env


def device_for(given: Allocation) -> str | None:
    """What CUDA_VISIBLE_DEVICES says for what an attempt was given."""
    return given.gpu.device if given.gpu is not None else None


def _knows_spares(source: Path | None) -> bool:
    """Whether the copy of the package that attempts run is new enough to wait for what it is to be."""
    return source is None or (source / "atma_sweep" / "sweep" / "attempt" / "spare.py").is_file()


class LocalExecutor(HostExecutor):
    """The same attempts without Ray: children of this process, as many at once as the machine's cores, memory and GPUs,
    or parts of them, allow.

    On a GPU the next attempt's process imports what it needs while the one before it works. Where the cores themselves train, that
    would take from the training what it gives to the start.
    """

    name = "local"
    spares_without_gpu = False

    def __init__(self) -> None:
        super().__init__()
        self._spares = WarmPool()
        self._running: dict[int, tuple[subprocess.Popen[bytes], Allocation]] = {}

    def start(self, launch: ProcessSpec) -> None:
        """Starts the attempt's process."""
        given = self._room.place(launch.resources)
        assert given is not None, "the supervisor asks fits() first"
        device, folder = device_for(given), launch.runs / launch.folder
        env, key = environment(launch, device), device or ""
        (folder / "log.txt").open("ab").close()  # what a full disk refuses is refused here, before there is a process
        child = self._spares.become(key, launch.runs, env, launch.folder)
        if child is None:
            child = processes.start(run_command(launch, os.getpid()), env, folder, apart=True)
        self._room.take(given)
        self._running[launch.attempt] = child, given
        if launch.more and (launch.resources.gpus or self.spares_without_gpu) and _knows_spares(launch.source):
            waiting = run_command(launch, os.getpid(), spare=True)
            with contextlib.suppress(OSError):  # the next attempt then starts as this one did
                self._spares.prepare(key, launch.runs, env, lambda: processes.start_waiting(waiting, env, folder))
        elif not launch.more:
            self._spares.close()

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Attempts whose process has ended."""
        deadline = time.monotonic() + seconds
        while self._running:
            ended = [attempt for attempt, (child, _) in self._running.items() if child.poll() is not None]
            left = deadline - time.monotonic()
            if ended or left <= 0:
                return [self._collect(attempt) for attempt in ended]
            time.sleep(min(LOOK_S, left))
        return []

    def _collect(self, attempt: int) -> AttemptExit:
        child, given = self._running.pop(attempt)
        self._room.give(given)
        code = child.wait()
        processes.end_group(child.pid)
        return attempt, code

    def close(self) -> None:
        """Ends the processes that still run."""
        self._spares.close()
        for child, _ in self._running.values():
            child.kill()
        for attempt in list(self._running):
            self._collect(attempt)
        super().close()
