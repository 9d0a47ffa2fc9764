"""Agent of one cluster node: its GPUs and the attempts that run there. Independent of Ray.

The supervisor polls every node, and each poll extends the node's lease by LEASE_S. When the lease ends, since network
or supervisor are gone, the node asks its attempts to save and exit, kills the rest, and closes for good. The supervisor
declares a node lost only after that must have happened, so a cell never has two live attempts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from ..attempt.failures import OomWatch, record_start_failure
from ..errors import MachineError
from ..host import allocation, hardware, processes
from ..host.locks import GpuLocks
from .executor import AttemptExit, ProcessSpec, attempt_command, attempt_environment, kill_process

LEASE_S = float(os.environ.get("ATMA_NODE_LEASE_S", 60.0))
"""Seconds that attempts go on without a poll by the supervisor."""
FIRST_POLL_TIMEOUT_S = 300.0
"""Seconds that a node waits for its first poll; no attempt starts before."""
POLL_S = 1.0
"""Seconds that a poll waits for an attempt to end."""
CHECK_INTERVAL_S = 0.1
"""Seconds between two checks while a poll or a start waits."""
JOB_MODULE = "atma_sweep.sweep.job"


def presumed_dead_after(lease: float = LEASE_S, grace: float = processes.GRACE_S) -> float:
    """Return the seconds after sending an unanswered poll when the node's attempts are certainly gone.

    The grace period counts twice: the node asks, then kills, and its clock may be a little slower.

    Args:
        lease: Duration of the node's lease in seconds.
        grace: Seconds between SIGTERM and SIGKILL.
    """
    return lease + 2 * grace


class NodeAgent:
    """Attempts of one supervisor on this machine. Methods may be called from several threads."""

    def __init__(
        self, *, lease: float = LEASE_S, grace: float = processes.GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Start an agent without attempts. Someone must call `tick` for its lease to end.

        Args:
            lease: Duration of the lease in seconds, on `clock`. The first lease, before any poll, lasts 300 s
                (FIRST_POLL_TIMEOUT_S) at least.
            grace: Seconds between SIGTERM and SIGKILL.
            clock: Monotonic clock.
        """
        self._lease, self._grace, self._clock = lease, grace, clock
        self._lock = threading.RLock()
        # an attempt gets SIGTERM when the thread that started it ends, so one lasting thread starts all
        self._starter = ThreadPoolExecutor(1)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, AttemptExit] = {}
        self._locks = GpuLocks()
        self._oom_watch = OomWatch()
        self._polled = threading.Event()
        self._last_answer = clock()
        self._lease_end = self._last_answer + max(lease, FIRST_POLL_TIMEOUT_S)
        self.is_closed = False
        """True once the agent has closed; no attempt starts after that."""

    # --- called by the supervisor -----------------------------------------------------------------------------------

    def lock_gpus(self, gpu_types: Iterable[str | None], at_least: int = 1) -> tuple[allocation.Machine, str]:
        """Lock this node's free GPUs of the given types until the agent closes.

        Args:
            gpu_types: Labels of GPU types, None for any type; empty to lock nothing.
            at_least: Lock nothing if fewer are free.

        Returns:
            This machine with its locked GPUs, and the reason why it has none. The reason is "" if it has some, if none
            was requested, and if the node has no GPU of these types. An error of the GPU query or of the locks becomes
            the reason.
        """
        labels = list(gpu_types)
        if not labels:
            return allocation.Machine.local(), ""
        try:
            matching = [
                gpu for gpu in hardware.query_gpus() if any(allocation.is_type(gpu.name, kind) for kind in labels)
            ]
            locked = self._locks.acquire(matching, at_least) if matching else []
        except MachineError as error:
            return allocation.Machine.local(), str(error)
        return allocation.Machine.local(locked), ""

    def start(self, spec: ProcessSpec, device: str | None) -> None:
        """Start an attempt's process. An attempt that cannot be started counts as ended, and `poll` returns it.

        Blocks until another thread has called this agent's `poll` for the first time, and then until the process
        exists. Call it from a thread other than the one that polls. Does nothing once the agent is closed.

        Args:
            spec: Attempt to start.
            device: Value of CUDA_VISIBLE_DEVICES; None to inherit it.
        """
        self._starter.submit(self._start_child, spec, device).result()

    def _start_child(self, spec: ProcessSpec, device: str | None) -> None:
        """Carry out `start` in the one thread that starts all processes: wait for the first poll, then start the child.

        The wait blocks this thread until another one calls `poll`, or the agent is closed; then nothing is started. An
        OSError is recorded in the attempt's log and as its exit.
        """
        while not self._polled.wait(CHECK_INTERVAL_S) and not self.is_closed:
            pass
        with self._lock:
            if self.is_closed:
                return
            folder = spec.runs / spec.folder
            try:
                child = processes.start_child(
                    attempt_command(spec, os.getpid()), attempt_environment(spec, device), folder
                )
            except OSError as error:
                self._ended[spec.attempt] = (spec.attempt, record_start_failure(folder / "log.txt", error))
            else:
                self._children[spec.attempt] = child

    def poll(self, acknowledged: Sequence[int]) -> list[AttemptExit] | None:
        """Return (attempt id, exit code) of ended attempts not yet acknowledged, and extend the lease.

        None once the agent is closed without attempts; a closing agent extends nothing. Waits up to 1 s (POLL_S) for an
        attempt to end. The new lease counts from the previous answer, which the supervisor has received by now. A poll
        delayed by the network therefore extends the lease no further than the supervisor assumes.

        Args:
            acknowledged: Ids of ended attempts from the previous answer, which are forgotten. Others are returned
                again.
        """
        with self._lock:
            if not self.is_closed:
                # there is no previous answer yet
                self._lease_end = (self._last_answer if self._polled.is_set() else self._clock()) + self._lease
                self._polled.set()
            for attempt in acknowledged:
                self._ended.pop(attempt, None)
        deadline = time.monotonic() + POLL_S
        while True:
            with self._lock:
                self._collect()
                ended = list(self._ended.values())
                if self.is_closed and not self._children:
                    return None
            if ended or time.monotonic() >= deadline:
                break
            time.sleep(CHECK_INTERVAL_S)
        with self._lock:
            self._last_answer = self._clock()
        return ended

    def stop(self, attempt: int) -> None:
        """Ask an attempt to save a checkpoint and exit (SIGTERM), without waiting for it; an unknown id is ignored."""
        with self._lock:
            child = self._children.get(attempt)
            if child is not None:
                child.terminate()

    def kill(self, attempt: int, *, dump: bool = False) -> None:
        """Kill an attempt and its children; an unknown id is ignored.

        Args:
            attempt: Id of the attempt.
            dump: True to have it write its threads' stack traces into its log first, which takes 1 s (DUMP_S).
        """
        with self._lock:
            child = self._children.get(attempt)
        if child is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                kill_process(psutil.Process(child.pid), dump=dump)

    def end_orphans(self, folders: Sequence[Path], process_ids: Sequence[tuple[int | None, float | None]] = ()) -> None:
        """Terminate attempts of other supervisors on this node; return when they are gone.

        This agent's own attempts are spared. Processes that are gone already are ignored.

        Args:
            folders: Absolute folders of the attempts, found in command lines.
            process_ids: (pid, creation time) of the attempts, None where unknown.
        """
        with self._lock:
            own_pids = {child.pid for child in self._children.values()}
        by_pid = {process.pid: process for process in _find_processes(folders)}
        by_pid |= {
            process.pid: process
            for process in (processes.find_process(*identity) for identity in process_ids)
            if process is not None
        }
        processes.terminate_all([process for pid, process in by_pid.items() if pid not in own_pids], self._grace)

    def close(self) -> None:
        """Terminate every attempt, release the GPUs, and refuse further attempts; return when all are gone.

        Attempts get SIGTERM, and SIGKILL after the grace period. Their exits are still returned by `poll`.
        """
        with self._lock:
            self.is_closed = True
            running = []
            for child in self._children.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    running.append(psutil.Process(child.pid))
        processes.terminate_all(running, self._grace)
        with self._lock:
            self._collect()
            self._children.clear()
            self._locks.release()

    # --- internal ---------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Close the agent if its lease has ended; return True if it is closed. To be called several times a second.

        Closing blocks until the attempts are gone.
        """
        with self._lock:
            has_expired = not self.is_closed and self._clock() > self._lease_end
            self.is_closed = self.is_closed or has_expired
        if has_expired:
            self.close()
        return self.is_closed

    def _collect(self) -> None:
        """Move ended children to the exits that `poll` returns. The caller holds the lock.

        A SIGKILL becomes OOM_KILLED if the system has killed a process for lack of memory since the last child ended.
        """
        codes = {attempt: code for attempt, child in self._children.items() if (code := child.poll()) is not None}
        for attempt, code in self._oom_watch.mark(codes).items():
            del self._children[attempt]
            self._ended[attempt] = (attempt, code)


def _find_processes(folders: Sequence[Path]) -> list[psutil.Process]:
    """Return the processes of attempts in these folders, found by their command lines.

    Just started ones therefore count, too. Processes that cannot be read are skipped.

    Args:
        folders: Absolute folders of attempts.
    """
    folder_names = {str(folder) for folder in folders}
    matches = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError, IndexError):
            line = candidate.cmdline()
            if JOB_MODULE in line:
                runs, folder = line[line.index("--runs") + 1], line[line.index("--folder") + 1]
                if str(Path(runs) / folder) in folder_names:
                    matches.append(candidate)
    return matches


CLOSE_S = processes.GRACE_S + 5.0
"""Seconds that a closing agent needs at most."""


class Agent(NodeAgent):
    """NodeAgent as a Ray actor, which watches its own lease and ends its process afterwards."""

    def __init__(self, lease: float) -> None:
        """Start the agent and the thread that watches its lease of `lease` seconds."""
        super().__init__(lease=lease)
        threading.Thread(target=self._watch_lease, daemon=True).start()

    def _watch_lease(self) -> None:
        """Tick until the agent has closed, then exit the process after 15 s (CLOSE_S).

        So a poll still learns of the end. Runs in a thread of its own, for as long as the actor lives.
        """
        while not self.tick():
            time.sleep(0.2)
        # a last poll still learns of the end; if the driver is gone, Ray ends this process anyway
        time.sleep(CLOSE_S)
        os._exit(0)
