"""What a command took, run in a process of its own: seconds, processor, and the most memory that it held."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import MachineError
from ..machine.hardware import peak_resident

LOOK_S = 0.01
MIB = 2**20
OURS = (sys.executable, "-m", "atma_sweep.cli")
"""What a command of ours begins with."""


class Used(NamedTuple):
    """Seconds from start to end and of processor, bytes at most held (0 where the system does not say), and the output."""

    wall: float
    processor: float
    memory: int
    printed: str


def used(command: Sequence[str], folder: Path) -> Used:
    """Runs a command in `folder`. Raises MachineError with the end of what it printed when it fails."""
    peak, over = [0], threading.Event()

    def watch(pid: int) -> None:
        # the system's own account of a child (maxrss) begins with the size of who started it
        while not over.wait(LOOK_S):
            peak[0] = max(peak[0], peak_resident(pid) or 0)

    with (folder / "command.log").open("w+b") as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        watcher = threading.Thread(target=watch, args=(process.pid,))
        watcher.start()
        _, status, account = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        over.set()
        watcher.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        printed = log.read().decode(errors="replace")
    if process.returncode:
        raise MachineError(f"{' '.join(command)[:200]} failed: {printed[-300:]}")
    return Used(wall, account.ru_utime + account.ru_stime, peak[0], printed)
