"""One node of a cluster, as an agent on it holds it: its GPUs and the attempts that run there. Knows nothing of Ray.

The supervisor polls every node, and each poll lends the node its attempts for LEASE_S. A node that is not polled, since
the network or the supervisor is gone, asks its attempts to save themselves and leave, kills what stays, and is over for
good. The supervisor in turn gives a node up only when that must have happened, so a cell never has two live attempts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from ..attempt.failures import OOM_KILLED, not_started, oom_kills
from ..errors import MachineError
from ..host import allocation, hardware, processes
from ..host.locks import GpuLocks
from .executor import AttemptExit, ProcessSpec, environment, kill_process, run_command

LEASE_S = float(os.environ.get("ATMA_NODE_LEASE_S", 60.0))
"""How long attempts go on without a word from the supervisor."""
FIRST_S = 300.0
"""How long a node waits for its first poll; nothing starts before."""
POLL_S = 1.0
"""How long a poll waits for an attempt to end."""
LOOK_S = 0.1
JOB = "atma_sweep.sweep.job"


def presumed_dead_after(lease: float = LEASE_S, grace: float = processes.GRACE_S) -> float:
    """Seconds after the sending of a poll that has no answer, when the node's attempts are surely gone.

    Twice the grace: the node asks, then kills, and its clock may be a little slower.
    """
    return lease + 2 * grace


class NodeAgent:
    """The attempts of one supervisor on this machine. Its methods may be called from several threads."""

    def __init__(
        self, *, lease: float = LEASE_S, grace: float = processes.GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`lease` and `grace` in seconds, on `clock`."""
        self._lease, self._grace, self._clock = lease, grace, clock
        self._lock = threading.RLock()
        # an attempt gets SIGTERM when the thread that started it ends, so one thread starts all
        self._starter = ThreadPoolExecutor(1)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, AttemptExit] = {}
        self._locks = GpuLocks()
        self._oom_kills = oom_kills()
        self._polled = threading.Event()
        self._answered = clock()
        self._until = self._answered + max(lease, FIRST_S)
        self.over = False
        """Whether it has given up; no attempt starts after that."""

    # --- what the supervisor asks -----------------------------------------------------------------------------------

    def hold(self, kinds: Iterable[str | None]) -> tuple[allocation.Machine, str]:
        """This machine, with those of its GPUs of the given types that are locked from now on; why there is none, or ""."""
        wanted = list(kinds)
        if not wanted:
            return allocation.Machine.here(), ""
        try:
            found = [gpu for gpu in hardware.gpus() if any(allocation.is_type(gpu.name, kind) for kind in wanted)]
            taken = self._locks.take(found) if found else []
        except MachineError as error:
            return allocation.Machine.here(), str(error)
        return allocation.Machine.here(taken), ""

    def start(self, launch: ProcessSpec, device: str | None) -> None:
        """Starts an attempt's process; one that cannot be started has ended at once."""
        self._starter.submit(self._start, launch, device).result()

    def _start(self, launch: ProcessSpec, device: str | None) -> None:
        while not self._polled.wait(LOOK_S) and not self.over:
            pass
        with self._lock:
            if self.over:
                return
            folder = launch.runs / launch.folder
            try:
                child = processes.start(run_command(launch, os.getpid()), environment(launch, device), folder)
            except OSError as error:
                self._ended[launch.attempt] = (launch.attempt, not_started(folder / "log.txt", error))
            else:
                self._children[launch.attempt] = child

    def poll(self, seen: Sequence[int]) -> list[AttemptExit] | None:
        """Attempts that have ended, but for those that the supervisor has `seen`; None when the node is over and empty.

        Extends the lease, counted from the answer before, which the supervisor has by now: a poll that the network held
        back lends no more than the supervisor knows of.
        """
        with self._lock:
            if not self.over:
                # the first poll comes right after the answer that let the supervisor send it
                self._until = (self._answered if self._polled.is_set() else self._clock()) + self._lease
                self._polled.set()
            for attempt in seen:
                self._ended.pop(attempt, None)
        deadline = time.monotonic() + POLL_S
        while True:
            with self._lock:
                self._collect()
                ended = list(self._ended.values())
                if self.over and not self._children:
                    return None
            if ended or time.monotonic() >= deadline:
                break
            time.sleep(LOOK_S)
        with self._lock:
            self._answered = self._clock()
        return ended

    def stop(self, attempt: int) -> None:
        """Asks an attempt to save itself and leave."""
        with self._lock:
            child = self._children.get(attempt)
            if child is not None:
                child.terminate()

    def kill(self, attempt: int, *, dump: bool = False) -> None:
        """Ends an attempt at once, with `dump` after it wrote into its log where its threads stand."""
        with self._lock:
            child = self._children.get(attempt)
        if child is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                kill_process(psutil.Process(child.pid), dump=dump)

    def end(self, folders: Sequence[Path], known: Sequence[tuple[int | None, float | None]] = ()) -> None:
        """Ends what is left here of other supervisors' attempts; returns when it is gone.

        By their folders, and by pid and creation time where they are known.
        """
        with self._lock:
            ours = {child.pid for child in self._children.values()}
        found = {one.pid: one for one in _attempts(folders)}
        found |= {one.pid: one for one in (processes.find(*who) for who in known) if one is not None}
        processes.terminate_all([one for pid, one in found.items() if pid not in ours], self._grace)

    def close(self) -> None:
        """Ends every attempt, gives the GPUs back, and is over."""
        with self._lock:
            self.over = True
            found = []
            for child in self._children.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(child.pid))
        processes.terminate_all(found, self._grace)
        with self._lock:
            self._collect()
            self._children.clear()
            self._locks.release()

    # --- what it does by itself -------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Ends everything when the lease has run out; whether it is over. To be called several times a second."""
        with self._lock:
            late = not self.over and self._clock() > self._until
            self.over = self.over or late
        if late:
            self.close()
        return self.over

    def _collect(self) -> None:
        for attempt, child in list(self._children.items()):
            code = child.poll()
            if code is None:
                continue
            kills = oom_kills()
            killed, self._oom_kills = kills > self._oom_kills, kills
            del self._children[attempt]
            self._ended[attempt] = (attempt, OOM_KILLED if killed and code == -signal.SIGKILL else code)


def _attempts(folders: Sequence[Path]) -> list[psutil.Process]:
    """Processes of attempts in these folders, by their command lines: one that has only just started is found, too."""
    wanted = {str(folder) for folder in folders}
    found = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError, IndexError):
            line = candidate.cmdline()
            if JOB in line:
                runs, folder = line[line.index("--runs") + 1], line[line.index("--folder") + 1]
                if str(Path(runs) / folder) in wanted:
                    found.append(candidate)
    return found


CLOSE_S = processes.GRACE_S + 5.0


class Agent(NodeAgent):
    """A Node as an actor: looks after its lease by itself and ends its process when that is over."""

    def __init__(self, lease: float) -> None:
        super().__init__(lease=lease)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.tick():
            time.sleep(0.2)
        # whoever polls still hears that it is over; with the driver gone, Ray ends this process anyway
        time.sleep(CLOSE_S)
        os._exit(0)
