"""What the reports of a large sweep take: seconds, processor and memory of the whole command, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...results.store import Store
from ..errors import MachineError

KIB_IN_MIB = 1024
COMMANDS = {
    "the figure of training losses": ("report", "--figure", "loss", "--out", "loss.svg"),
    "the dashboard": ("report", "--dashboard", "dashboard.html"),
}


def reports(store: Store, folder: Path) -> list[tuple[str, float, str]]:
    """(what, value, unit) for the reports that read every point of every curve; their files are left in `folder`.

    Raises MachineError when one of them fails.
    """
    found = []
    for name, arguments in COMMANDS.items():
        wall, processor, memory = measured([*arguments, "--db", str(store)], folder)
        found += [
            (f"{name}, with the start", wall, "s"),
            ("of which processor", processor, "s"),
            ("its memory", memory, "MiB"),
        ]
    return found


def measured(arguments: Sequence[str], folder: Path) -> tuple[float, float, float]:
    """Seconds from start to end, seconds of processor, and MiB at most held, of a command. Raises MachineError."""
    command = [sys.executable, "-m", "atma_sweep.cli", *arguments]
    with (folder / "report.log").open("w+b") as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise MachineError(f"atma-sweep {' '.join(arguments)} failed: {log.read().decode(errors='replace')[-300:]}")
    return wall, used.ru_utime + used.ru_stime, _mib(used.ru_maxrss)


def _mib(size: int) -> float:
    """The most memory that a process held, which macOS tells in bytes and Linux in KiB."""
    return size / KIB_IN_MIB / (KIB_IN_MIB if sys.platform == "darwin" else 1)
