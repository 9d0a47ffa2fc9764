"""Where attempts run. The scheduler module holds the one on Ray; here is the plain one, and what both share."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import process
from .cell import Resources
from .room import Machine, Room, Seat

Finished = tuple[int, int]
"""(attempt id, exit code; negative for a signal)."""


@dataclass(frozen=True)
class Launch:
    """A job that is ready to start: its job.json is written."""

    attempt: int
    runs: Path
    folder: str
    resources: Resources
    database: str
    """URL with password, handed on in the child's environment only."""
    source: Path | None = None
    """Folder that holds the copy of the package that the attempt runs; None for the one that is installed."""


class Executor(Protocol):
    """Keeps one process per running attempt. Used from one thread."""

    name: str

    def fits(self, resources: Resources) -> bool:
        """Whether an attempt of that size could start now."""

    def start(self, launch: Launch) -> None:
        """Starts the attempt's process."""

    def wait(self, seconds: float) -> list[Finished]:
        """Attempts whose process has ended, after at most `seconds`."""

    def close(self) -> None:
        """Ends whatever still runs and gives the machine back."""


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
    ]


def environment(launch: Launch, devices: str | None = None) -> dict[str, str]:
    """The child's environment: its database, its threads, and the GPUs that it may see.

    Without a GPU in its resources none is visible; `devices` names the one it gets otherwise (None: as inherited).
    """
    env = dict(os.environ)
    env["ATMA_DB"] = launch.database
    if launch.source is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(launch.source.resolve()), env.get("PYTHONPATH")]))
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


class LocalExecutor:
    """The same attempts without Ray, one after another, so none shares its GPU."""

    name = "local"

    def __init__(self, machine: Machine) -> None:
        self._room = Room(machine)
        self._running: tuple[int, subprocess.Popen[bytes]] | None = None

    def fits(self, resources: Resources) -> bool:
        """One at a time, whatever its size."""
        return self._running is None

    def start(self, launch: Launch) -> None:
        """Starts the attempt's process."""
        env = environment(launch, device_for(self._room.seat(launch.resources)))
        child = process.start(run_command(launch, os.getpid()), env, launch.runs / launch.folder)
        self._running = (launch.attempt, child)

    def wait(self, seconds: float) -> list[Finished]:
        """The attempt, once its process has ended."""
        if self._running is None:
            return []
        attempt, child = self._running
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return []
        self._running = None
        return [(attempt, code)]

    def close(self) -> None:
        """Ends the process that still runs."""
        if self._running is not None:
            self._running[1].kill()
            self._running[1].wait()
            self._running = None
