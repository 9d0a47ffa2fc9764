"""Processes of the ranks after the first: start, watch, and the fault of the rank that failed first.

Rank 0 is the attempt's own process. It starts the others and watches them; they record nothing and end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..host import processes

CHECK_INTERVAL_S = 0.05
"""Seconds between two looks at the processes of the ranks."""
SETTLE_S = 3.0
"""Seconds that a rank with a lost connection waits for the fault that caused it."""
END_S = 5.0
"""Seconds that ranks get to end by themselves after rank 0 has finished or stopped."""
ABANDON_S = 10.0
"""Seconds after the fault of another rank until an attempt whose rank 0 is blocked ends without it."""
ABORT_TAIL = 8000
"""Characters at the end of an aborted rank's log that are searched for the reason."""
_LOST_PEER = re.compile(
    r"gloo|NCCL|ProcessGroup|process group|TCPStore|DistStore|recvValue|connection (closed|reset|refused|was aborted)|"
    r"broken pipe|failed to recv|watchdog",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"time(d)?[ -]?out", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RankFault:
    """Fault that ended one rank; its fields are the keys of rank-R.error.json."""

    rank: int
    monotonic: float
    """Time of the fault on the monotonic clock, which all processes of a machine share, in seconds."""
    wall: float
    """Time of the fault in seconds since 1970."""
    cause: str
    """Cause in one line, without the rank."""
    exit_code: int
    """Exit code of the rank, negative for a signal."""
    failure: str | None = None
    """Failure class; None if the rank reported none, so that exit code and log decide."""
    traceback: str | None = None
    is_consequence: bool = False
    """True for a lost connection to another rank, which has most likely failed before."""

    @property
    def order(self) -> tuple[bool, float]:
        """Key that is smallest for the fault that came first; lost connections come after everything else."""
        return self.is_consequence, self.monotonic


class FirstFault(Exception):
    """Fault of the rank that failed first, in an attempt of several ranks; the message is its cause in one line."""

    def __init__(self, fault: RankFault, size: int) -> None:
        """Keep the fault; `size` is the number of ranks."""
        super().__init__(f"rank {fault.rank} of {size}: {fault.cause}")
        self.fault = fault


def error_path(folder: Path, rank: int) -> Path:
    """Return the file in an attempt's folder that a failing rank writes its fault to."""
    return folder / f"rank-{rank}.error.json"


def log_path(folder: Path, rank: int) -> Path:
    """Return the log of a rank in an attempt's folder."""
    return folder / ("log.txt" if rank == 0 else f"rank-{rank}.log")


def is_lost_peer(message: str) -> bool:
    """Return True if an error message says that the connection to another rank was lost or timed out."""
    return _LOST_PEER.search(message) is not None


def is_timeout(message: str) -> bool:
    """Return True if an error message says that another rank did not answer in time."""
    return is_lost_peer(message) and _TIMEOUT.search(message) is not None


def fault_of(rank: int, error: BaseException, *, cause: str, failure: str, trace: str | None, code: int) -> RankFault:
    """Return the fault of a rank that an exception ends now.

    Args:
        rank: The rank.
        error: The exception; its text tells lost connections from other errors.
        cause: Cause in one line.
        failure: Failure class of the exception by itself. A lost connection is "infrastructure", or "hang" if the other
            rank did not answer in time.
        trace: Traceback.
        code: Exit code.
    """
    text = f"{type(error).__module__}.{type(error).__name__}: {error}"
    lost = is_lost_peer(text) and failure in ("code", "infrastructure")
    if lost:
        failure = "hang" if is_timeout(text) else "infrastructure"
    return RankFault(
        rank=rank, monotonic=time.monotonic(), wall=time.time(), cause=cause, exit_code=code, failure=failure,
        traceback=trace, is_consequence=lost,
    )  # fmt: skip


def write_fault(folder: Path, fault: RankFault) -> None:
    """Write a rank's fault into the attempt's folder, aside first and then renamed; an OSError is ignored."""
    path = error_path(folder, fault.rank)
    with contextlib.suppress(OSError):
        aside = path.with_name(f"{path.name}.part")
        aside.write_text(json.dumps(asdict(fault), indent=1))
        aside.replace(path)


def follow_first(parent: int) -> None:
    """Make this process a rank after the first: it ends at once with rank 0, and stop requests are rank 0's to hear.

    SIGTERM, SIGINT and SIGHUP are ignored, also by its children. On Linux the kernel kills this process when the thread
    of rank 0 that started it ends, even in the middle of a collective operation; elsewhere a thread polls.

    Args:
        parent: Pid of rank 0.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes.die_with_parent(parent)


class RankProcesses:
    """Processes of the ranks from 1 on, started and watched by rank 0.

    `first_fault` and `end` are called by the main thread. If it is blocked, in a collective operation for example, the
    watching thread ends the attempt instead of it. Only one of them decides.
    """

    def __init__(self, size: int, folder: Path) -> None:
        """Prepare the processes of an attempt with `size` ranks in its folder; nothing is started."""
        self.size, self.folder = size, folder
        self.has_joined = False
        """True once all ranks have met; before that, rank 0 may wait for a dead one, so it is abandoned at once."""
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, RankFault] = {}
        self._decision = threading.Lock()
        """Held, and never released, by the thread that ends the attempt."""
        self._over = threading.Event()
        self._is_ending = False
        """True once this process kills the ranks, so that their ends are no faults any more."""

    def start(self, command: Sequence[str], env: dict[str, str], abandon: Callable[[FirstFault], None]) -> None:
        """Start a process per rank and the thread that watches them. Call it in the main thread.

        Args:
            command: Command line of a rank, without its number, which is appended as `--rank R`.
            env: Entire environment of the processes.
            abandon: Called in the watching thread when another rank has failed and the main thread does not end the
                attempt within `ABANDON_S` (10); it must end this process.

        Raises:
            OSError: A log cannot be opened, or a process cannot be created; those that were started are killed.
        """
        try:
            for rank in range(1, self.size):
                error_path(self.folder, rank).unlink(missing_ok=True)
                with log_path(self.folder, rank).open("ab") as log:
                    self.children[rank] = subprocess.Popen(
                        [*command, "--rank", str(rank)], env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                        stderr=subprocess.STDOUT,
                    )  # fmt: skip
        except OSError:
            self._kill()
            raise
        threading.Thread(target=self._watch, args=(abandon,), daemon=True, name="ranks").start()

    def _watch(self, abandon: Callable[[FirstFault], None]) -> None:
        """Wait for the fault of a rank; then give the main thread time to end the attempt, and end it otherwise."""
        while not self._over.wait(CHECK_INTERVAL_S):
            if self.look_for_faults():
                break
        else:
            return
        if self._over.wait(SETTLE_S):  # meanwhile the ranks that lost their connection report it
            return
        first = min(self.look_for_faults(), key=lambda fault: fault.order)
        self._kill()  # they record nothing, and the main thread's collective operations fail without them
        if self.has_joined and self._over.wait(ABANDON_S - SETTLE_S):
            return
        if self._decision.acquire(blocking=False):
            abandon(FirstFault(first, self.size))

    def look_for_faults(self) -> list[RankFault]:
        """Return the faults of ranks so far: by their report, else by exit code or signal of those that have ended.

        Ends with exit code 0 and after a stop request (143) are no faults.
        """
        for rank, child in self.children.items():
            if rank in self._exits or self._is_ending:
                continue
            code = child.poll()
            fault = self.reported_fault(rank) or (None if code is None else self._unreported(rank, code))
            if fault is not None:
                self._exits[rank] = fault
        return list(self._exits.values())

    def reported_fault(self, rank: int) -> RankFault | None:
        """Return the fault that a rank has written; None if there is none that can be read."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return RankFault(**json.loads(error_path(self.folder, rank).read_text()))
        return None

    def _unreported(self, rank: int, code: int) -> RankFault | None:
        """Return the fault of a rank that ended without a report; None for an end that is no fault.

        NCCL's watchdog aborts a process that lost another one; that is told by the end of its log.
        """
        if code in (0, 128 + signal.SIGTERM):
            return None
        cause = f"ended with exit code {code}"
        if code == -signal.SIGABRT:
            with contextlib.suppress(OSError):
                tail = log_path(self.folder, rank).read_text(errors="replace")[-ABORT_TAIL:]
                if is_lost_peer(tail):
                    error = RuntimeError(tail)
                    cause = "aborted by the watchdog of NCCL, since another rank did not answer"
                    return fault_of(rank, error, cause=cause, failure="infrastructure", trace=tail, code=code)
        if code < 0:
            with contextlib.suppress(ValueError):
                cause = f"killed by {signal.Signals(-code).name}"
        return RankFault(rank=rank, monotonic=time.monotonic(), wall=time.time(), cause=cause, exit_code=code)

    def first_fault(self, own: RankFault) -> RankFault:
        """Return the fault that came first, after an exception in rank 0, and end the other ranks.

        If rank 0 lost a connection, it waits up to `SETTLE_S` (3) seconds for the fault that caused it. Blocks for ever
        if the watching thread ends the attempt already.

        Args:
            own: Fault of rank 0.
        """
        self._decision.acquire()
        self._over.set()
        deadline = time.monotonic() + (SETTLE_S if own.is_consequence else 0.0)
        while True:
            faults = [own, *self.look_for_faults()]
            if any(not fault.is_consequence for fault in faults) or time.monotonic() >= deadline:
                break
            time.sleep(CHECK_INTERVAL_S)
        self._kill()
        if not own.is_consequence and any(fault.cause == own.cause for fault in faults[1:]):
            return own  # every rank fails alike, so the others' reports say no more
        return min(faults, key=lambda fault: fault.order)

    def end(self) -> None:
        """Wait up to `END_S` (5) seconds for the ranks to end, and kill those that do not; any end is accepted.

        Call it once rank 0 has finished or stopped. Blocks for ever if the watching thread ends the attempt already.
        """
        self._decision.acquire()
        self._over.set()
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and any(child.poll() is None for child in self.children.values()):
            time.sleep(CHECK_INTERVAL_S)
        self._kill()

    def _kill(self) -> None:
        """Kill the ranks and their children with SIGKILL and wait for the ranks' ends."""
        self._is_ending = True
        for child in self.children.values():
            if child.poll() is None:
                processes.kill_family(child.pid)
                child.wait()


def rank_command(runs: Path, folder: str, size: int, rendezvous: str) -> list[str]:
    """Return the command line of a rank after the first, without its number, for this process's Python.

    Args:
        runs: Folder that the attempt's folder is relative to.
        folder: The attempt's folder.
        size: Number of ranks.
        rendezvous: HOST:PORT at which the ranks meet.
    """
    return [
        sys.executable, "-m", "atma_sweep.sweep.job", "--runs", str(runs), "--folder", folder, "--parent", str(os.getpid()),
        "--ranks", str(size), "--rendezvous", rendezvous,
    ]  # fmt: skip


def rank_environment(size: int) -> dict[str, str]:
    """Return the environment of the other ranks: this process's, without the database, and its threads divided.

    Args:
        size: Number of ranks.
    """
    env = {name: value for name, value in os.environ.items() if name != "ATMA_DB"}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        if env.get(name, "").isdigit():
            env[name] = str(max(1, int(env[name]) // size))
    return env
