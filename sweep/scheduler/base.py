"""Where attempts run. The scheduler module holds the one on Ray; here is the plain one, and what both share."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from ...results.store.records import Attempt
from ..config import Resources
from ..machine import processes
from ..machine.allocation import Machine, Room, Seat
from . import source_snapshot

DUMP_S = 1.0
"""What a hanging process gets to write down where its threads stand."""
LOOK_S = 0.02
"""Between two looks at children that run: a seat stands empty for no longer."""
Finished = tuple[int, int]
"""(attempt id, exit code; negative for a signal, or one of failures' words for more than a code can say)."""


@dataclass(frozen=True)
class Launch:
    """A job that is ready to start: its job.json is written."""

    attempt: int
    runs: Path
    folder: str
    resources: Resources
    database: str | None
    """URL with password, handed on in the child's environment only; None for an attempt that writes a journal."""
    source: Path | None = None
    """Folder that holds the copy of the package that the attempt runs; None for the one that is installed."""


class Executor(Protocol):
    """Keeps one process per running attempt. Used from one thread."""

    name: str
    writes_directly: bool
    """Whether its attempts write into the database; else each writes a journal, which the executor applies."""

    def fits(self, resources: Resources) -> bool:
        """Whether an attempt of that size could start now."""

    def start(self, launch: Launch) -> None:
        """Starts the attempt's process."""

    def wait(self, seconds: float) -> list[Finished]:
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


class OnThisMachine:
    """What an executor does with processes of this machine, which it knows from the database."""

    writes_directly = True

    def __init__(self) -> None:
        self._me = processes.this_process("launch")

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
        end_at_once(child, dump=dump)
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
        processes.end_all([one for one in ended.values() if one is not None])
        return set(ended)


def end_at_once(child: psutil.Process, *, dump: bool) -> None:
    """Kills a process and its children, with `dump` after it wrote into its log where its threads stand."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = child.create_time()
        if dump:
            child.send_signal(signal.SIGUSR1)
            time.sleep(DUMP_S)
        processes.end(child.pid, started, grace=0)


def run_command(launch: Launch, parent: int) -> list[str]:
    """The command line of an attempt's process."""
    return [
        sys.executable,
        "-m",
        "atma_sweep.sweep.job",
        "--runs",
        str(launch.runs),
        "--folder",
        launch.folder,
        "--parent",
        str(parent),
        *(["--journal"] if launch.database is None else []),
    ]


def environment(launch: Launch, devices: str | None = None) -> dict[str, str]:
    """The child's environment: its database, its threads, and the GPUs that it may see.

    Without a GPU in its resources none is visible; `devices` names the one it gets otherwise (None: as inherited).
    """
    env = dict(os.environ)
    for name in ("ATMA_DB", "RAY_AUTH_TOKEN"):
        env.pop(name, None)
    if launch.database is not None:
        env["ATMA_DB"] = launch.database
    if launch.source is not None:
        env["PYTHONPATH"] = source_snapshot.import_path(launch.source.resolve(), env.get("PYTHONPATH"))
    threads = str(launch.resources.cpus)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        env[name] = threads
    if launch.resources.gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    return env


def device_for(seat: Seat | None) -> str | None:
    """What CUDA_VISIBLE_DEVICES says for a seat."""
    return seat.gpu.device if seat is not None and seat.gpu is not None else None


class LocalExecutor(OnThisMachine):
    """The same attempts without Ray: children of this process, as many at once as the machine's cores, memory and GPUs,
    or parts of them, allow."""

    name = "local"

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._room = Room(machine)
        self._running: dict[int, tuple[subprocess.Popen[bytes], Seat]] = {}

    def fits(self, resources: Resources) -> bool:
        """Whether cores, memory and a GPU, or the part of one, are left."""
        return self._room.seat(resources) is not None

    def start(self, launch: Launch) -> None:
        """Starts the attempt's process."""
        seat = self._room.seat(launch.resources)
        assert seat is not None, "the supervisor asks fits() first"
        env = environment(launch, device_for(seat))
        child = processes.start(run_command(launch, os.getpid()), env, launch.runs / launch.folder, apart=True)
        self._room.take(seat)
        self._running[launch.attempt] = child, seat

    def wait(self, seconds: float) -> list[Finished]:
        """Attempts whose process has ended."""
        deadline = time.monotonic() + seconds
        while self._running:
            ended = [attempt for attempt, (child, _) in self._running.items() if child.poll() is not None]
            if ended:
                return [self._collect(attempt) for attempt in ended]
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(LOOK_S, left))
        return []

    def _collect(self, attempt: int) -> Finished:
        child, seat = self._running.pop(attempt)
        self._room.give(seat)
        code = child.wait()
        processes.end_group(child.pid)
        return attempt, code

    def close(self) -> None:
        """Ends the processes that still run."""
        for child, _ in self._running.values():
            child.kill()
        for attempt in list(self._running):
            self._collect(attempt)
