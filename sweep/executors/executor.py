"""Executor protocol, the base class of executors on this machine, and the executor that needs no Ray."""

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
"""Seconds that a hanging process gets to write its threads' stack traces."""
CHECK_INTERVAL_S = 0.02
"""Seconds between two checks of running children. Resources of an ended child stay idle for at most this long."""
Tell = Callable[[str], None]
"""Function that prints one line."""
AttemptExit = tuple[int, int]
"""(attempt id, exit code). The code is negative for a signal, or a constant such as NODE_LOST for an end without exit
code."""


@dataclass(frozen=True)
class ProcessSpec:
    """Attempt that is ready to start; its job.json is written."""

    attempt: int
    """Id of the attempt."""
    runs: Path
    """Runs folder."""
    folder: str
    """Folder of the attempt, relative to `runs`."""
    resources: Resources
    """Resources that the attempt needs."""
    database: str | None
    """URL with password, passed on in the child's environment only; None for an attempt that writes a journal."""
    source: Path | None = None
    """Folder of the code snapshot that the attempt runs; None for the installed package."""
    has_more: bool = False
    """True if further attempts are waiting or may be added."""


@dataclass(frozen=True)
class ExecutorContext:
    """Everything an executor needs to open: database, runs folder, output function and cluster address."""

    store: Store
    runs: Path
    """Runs folder."""
    tell: Tell
    """Called with lines about machines that join, leave or cannot be used."""
    address: str | None = None
    """HOST:PORT of the cluster; None for executors without one."""


class Executor(Protocol):
    """Runs one process per attempt. Used from one thread."""

    name: str
    writes_directly: bool
    """True if its attempts write into the database; else each writes a journal, which the executor applies."""

    @classmethod
    def open(cls, context: ExecutorContext) -> Executor:
        """Return an executor that can end orphaned attempts already.

        Raises MachineError when its machines cannot be reached.
        """

    def admit(self, cells: Sequence[Cell]) -> None:
        """Lock the GPUs that these cells need, until the executor is closed, and prepare for their attempts.

        Called once, before `fits` and `start`.

        Raises:
            MachineError: No machine is large enough for a cell, or all its GPUs are locked.
        """

    def fits(self, resources: Resources) -> bool:
        """Return True if an attempt with these resources could start now, beside those that run."""

    def start(self, spec: ProcessSpec) -> None:
        """Start the attempt's process and allocate its resources. Called only after `fits` returned True.

        Returns before the process has done anything. A process that cannot start is reported by `wait`, or by an
        OSError.
        """

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Return the attempts whose process has ended, after at most about `seconds`; their resources are free again.

        Empty if none has. Each end is returned once.
        """

    def stop(self, attempt: Attempt) -> bool:
        """Ask the attempt's process to save a checkpoint and exit; return False while the process is not known yet."""

    def kill(self, attempt: Attempt, *, dump: bool = False) -> bool:
        """Kill the attempt's process; return False while the process is not known yet.

        Its end is still reported by `wait`.

        Args:
            attempt: Attempt to kill.
            dump: True to have it write its threads' stack traces into its log first.
        """

    def is_unreachable(self, attempt: Attempt) -> bool:
        """Return True if the attempt's machine cannot be reached, so that its process may live on for a while."""

    def end(self, attempts: Sequence[Attempt], runs: Path) -> set[int]:
        """Terminate attempts whose supervisor is gone; block until they have ended.

        Args:
            attempts: Orphaned attempts of any host, none of them started by this executor.
            runs: Runs folder.

        Returns:
            The ids of those attempts whose processes are certainly gone; attempts out of reach are left out.
        """

    def failure(self) -> str | None:
        """Return why the executor itself can start no more attempts; None while it is healthy."""

    def close(self) -> None:
        """Kill the processes that still run and release the machines."""


class HostExecutor:
    """Base of executors whose attempts are processes of this machine, found by the pid in the database."""

    writes_directly = True

    def __init__(self) -> None:
        self._this_process = processes.this_process("launch")
        self._locks = GpuLocks()

    @classmethod
    def open(cls, context: ExecutorContext) -> Self:
        """Return the executor; nothing starts before cells are admitted. The context is not used."""
        return cls()

    def admit(self, cells: Sequence[Cell]) -> None:
        """Lock the GPUs that these cells need and start on this machine.

        Raises:
            MachineError: This machine is too small for a cell, or all its GPUs are locked.
        """
        self.start_on(lock_gpus_for(cells, self._locks))

    def start_on(self, machine: Machine) -> None:
        """Prepare to run attempts with the cores, memory and GPUs of `machine`, which is this machine or a part of it."""
        self._allocator = MachineAllocator(machine)

    def fits(self, resources: Resources) -> bool:
        """Return True if enough cores, memory and GPU capacity are free."""
        return self._allocator.find_allocation(resources) is not None

    def close(self) -> None:
        """Release the GPU locks."""
        self._locks.release()

    def _child(self, attempt: Attempt) -> psutil.Process | None:
        """Return the attempt's process; None before it has recorded its pid, and when it is gone."""
        return (
            processes.find_process(attempt.pid, attempt.pid_started) if attempt.pid != self._this_process.pid else None
        )

    def stop(self, attempt: Attempt) -> bool:
        """Send SIGTERM to the attempt's process; return False if the process is unknown or gone.

        Does not wait for its end.
        """
        child = self._child(attempt)
        if child is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        return child is not None

    def kill(self, attempt: Attempt, *, dump: bool = False) -> bool:
        """Kill the attempt's process and its children with SIGKILL; return False if the process is unknown or gone.

        Args:
            attempt: Attempt to kill, with its pid as the database has it.
            dump: True to have it write its threads' stack traces into its log first, which takes 1 s (DUMP_S).
        """
        child = self._child(attempt)
        if child is None:
            return False
        kill_process(child, dump=dump)
        return True

    def is_unreachable(self, attempt: Attempt) -> bool:
        """Return False: attempts run on this machine."""
        return False

    def failure(self) -> str | None:
        """Return None: this executor has no processes of its own that could fail."""
        return None

    def end(self, attempts: Sequence[Attempt], runs: Path) -> set[int]:
        """Terminate those of the attempts that belong to this machine, all at the same time; return their ids.

        Blocks until they are gone, at most twice the grace period: SIGTERM, then SIGKILL after the first. Attempts that
        survive both are returned, too. Attempts whose process is gone already
        are returned, too. An attempt whose pid is this process was never started. It is returned, and this process
        lives on. An attempt that this process descends from is left alive and not returned.

        Args:
            attempts: Orphaned attempts, of any machine.
            runs: Not used.
        """
        local = [attempt for attempt in attempts if processes.is_local_pid(attempt.host, attempt.pid_space)]
        processes_by_attempt = {
            attempt.id: processes.find_process(attempt.pid, attempt.pid_started) for attempt in local
        }
        ancestors = processes.own_and_ancestor_pids() - {self._this_process.pid}
        ended = {
            key: process
            for key, process in processes_by_attempt.items()
            if process is None or process.pid not in ancestors
        }
        processes.terminate_all([process for process in ended.values() if process is not None])
        return set(ended)


def lock_gpus_for(cells: Sequence[Cell], locks: GpuLocks) -> Machine:
    """Return this machine with the GPUs that it locks for these cells.

    Without a cell that needs a GPU, nothing is locked and the machine has no GPU. GPUs that another sweep holds are
    left out.

    Args:
        cells: Cells whose attempts will run here.
        locks: Receives the locks of all free GPUs of the needed types, not only of as many as the cells need.

    Raises:
        MachineError: The machine is too small for a cell, or other sweeps hold all the GPUs.
    """
    gpu_types = {cell.config.resources.gpu_type for cell in cells if cell.config.resources.gpus}
    if not gpu_types:
        machine = Machine.local()
        admission.check_placement(cells, machine)
        return machine
    all_gpus = hardware.query_gpus()
    # checked before locking: a cell too large for the entire machine will never fit
    admission.check_placement(cells, Machine.local(all_gpus))
    locked = locks.acquire(
        [gpu for gpu in all_gpus if any(is_type(gpu.name, kind) for kind in gpu_types)], least_gpus(cells)
    )
    machine = Machine.local(locked)
    admission.check_placement(cells, machine, held=[gpu for gpu in all_gpus if gpu not in locked])
    return machine


def least_gpus(cells: Sequence[Cell]) -> int:
    """Return the smallest number of GPUs with which any of these cells could start; 1 without a cell that needs several."""
    return max(1, min((int(cell.config.resources.gpus) for cell in cells if cell.config.resources.gpus), default=1))


def kill_process(child: psutil.Process, *, dump: bool) -> None:
    """Kill a process and its children with SIGKILL. Ignores a process that is gone.

    Does nothing if it is this process or an ancestor of it. The exit code is left to the parent: waiting for the
    process here would consume it.

    Args:
        child: Process to kill.
        dump: True to have it write its threads' stack traces into its log first, which takes 1 s (DUMP_S).
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [child, *child.children(recursive=True)] if child.pid not in processes.own_and_ancestor_pids() else []
        if dump and family:
            for member in family:  # each rank has a log of its own; the signal would end other children, as compilers
                with contextlib.suppress(psutil.Error):
                    if member == child or "--rank" in member.cmdline():
                        member.send_signal(signal.SIGUSR1)
            time.sleep(DUMP_S)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def attempt_command(spec: ProcessSpec, parent: int | None = None, *, spare: bool = False) -> list[str]:
    """Return the command line of an attempt's process, for this process's Python.

    Args:
        spec: Attempt to run. Without a database it writes a journal (`--journal`).
        parent: Pid of the process whose death ends the attempt; None to append `--parent PID` later.
        spare: True for a warm process, which reads the attempt's folder from standard input later.
    """
    return [
        sys.executable, "-m", "atma_sweep.sweep.job", "--runs", str(spec.runs),
        *(["--spare"] if spare else ["--folder", spec.folder]),
        *(["--parent", str(parent)] if parent is not None else []), *(["--journal"] if spec.database is None else []),
    ]  # fmt: skip


def attempt_environment(spec: ProcessSpec, devices: str | None = None) -> dict[str, str]:
    """Return the entire environment of an attempt's process.

    It is this process's environment without ATMA_DB and RAY_AUTH_TOKEN, with these set: ATMA_DB (if the attempt writes
    to the database), PYTHONPATH (if it runs a snapshot), the thread counts of OpenMP, MKL and OpenBLAS (its cores), and
    CUDA_VISIBLE_DEVICES.

    Args:
        spec: Attempt to run. Without GPUs in its resources, CUDA_VISIBLE_DEVICES is empty.
        devices: Value of CUDA_VISIBLE_DEVICES for an attempt with a GPU; None to inherit it.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("ATMA_DB", "RAY_AUTH_TOKEN")}
    if spec.database is not None:
        env["ATMA_DB"] = spec.database
    if spec.source is not None:
        env["PYTHONPATH"] = source_snapshot.import_path(spec.source.resolve(), env.get("PYTHONPATH"))
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env |= dict.fromkeys(threads, str(spec.resources.cpus))
    if spec.resources.gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    return env


def visible_device(allocation: Allocation) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES for an allocation; None without a GPU.

    Rank r of the attempt uses the device of index r among these.
    """
    return ",".join(gpu.device for gpu in allocation.gpus) or None


def _supports_warm_start(source: Path | None) -> bool:
    """Return True if the code snapshot in `source` is new enough to start as a warm process.

    Always True for None, the installed package.
    """
    return source is None or (source / "atma_sweep" / "sweep" / "attempt" / "spare.py").is_file()


class LocalExecutor(HostExecutor):
    """Executor without Ray: attempts are children of this process, as many at once as cores, memory and GPUs allow.

    On a GPU, a warm process imports the next attempt's modules while the current one works. On the CPU this would take
    cores from the training, so there is none.
    """

    name = "local"
    has_cpu_warm_pool = False
    """True to keep warm processes for attempts without a GPU as well."""

    def __init__(self) -> None:
        super().__init__()
        self._warm_pool = WarmPool()
        self._running: dict[int, tuple[subprocess.Popen[bytes], Allocation]] = {}

    def start(self, spec: ProcessSpec) -> None:
        """Start the attempt in a warm process if one fits, else in a new one.

        If more attempts follow and this one has a GPU, a warm process for the next one is started on the same GPU. If
        none follows, unused warm processes are killed.

        Raises:
            OSError: The log cannot be written or no process can be created; nothing was started then.
        """
        allocation = self._allocator.find_allocation(spec.resources)
        assert allocation is not None, "the supervisor asks fits() first"
        device, folder = visible_device(allocation), spec.runs / spec.folder
        env, key = attempt_environment(spec, device), device or ""
        (folder / "log.txt").open("ab").close()  # raises on a full disk before a process exists
        child = self._warm_pool.claim(key, spec.runs, env, spec.folder)
        if child is None:
            child = processes.start_child(attempt_command(spec, os.getpid()), env, folder, own_group=True)
        self._allocator.allocate(allocation)
        self._running[spec.attempt] = child, allocation
        if spec.has_more and (spec.resources.gpus or self.has_cpu_warm_pool) and _supports_warm_start(spec.source):
            warm_command = attempt_command(spec, os.getpid(), spare=True)
            with contextlib.suppress(OSError):  # without a warm process the next attempt starts normally
                self._warm_pool.refill(
                    key, spec.runs, env, lambda: processes.start_piped_child(warm_command, env, folder)
                )
        elif not spec.has_more:
            self._warm_pool.close()

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Return the attempts whose process has ended, after at most `seconds`; [] at once when nothing runs.

        Returns as soon as one has ended.
        """
        deadline = time.monotonic() + seconds
        while self._running:
            ended = [attempt for attempt, (child, _) in self._running.items() if child.poll() is not None]
            remaining_s = deadline - time.monotonic()
            if ended or remaining_s <= 0:
                return [self._collect(attempt) for attempt in ended]
            time.sleep(min(CHECK_INTERVAL_S, remaining_s))
        return []

    def _collect(self, attempt: int) -> AttemptExit:
        """Release an ended attempt's resources, kill what is left of its process group, and return (id, exit code)."""
        child, allocation = self._running.pop(attempt)
        self._allocator.release(allocation)
        code = child.wait()
        processes.kill_group(child.pid)
        return attempt, code

    def close(self) -> None:
        """Kill warm and running processes with SIGKILL, and release the GPU locks."""
        self._warm_pool.close()
        for child, _ in self._running.values():
            child.kill()
        for attempt in list(self._running):
            self._collect(attempt)
        super().close()
