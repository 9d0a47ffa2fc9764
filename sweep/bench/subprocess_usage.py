"""Commands in processes of their own: measured resources of a command, and rows of a child with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import MachineError
from ..host.hardware import peak_resident
from ..host.processes import exit_with_parent

LOOK_S = 0.01
MIB = 2**20
OURS = (sys.executable, "-m", "atma_sweep.cli")
"""Beginning of an `atma-sweep` command."""


class ResourceUsage(NamedTuple):
    """Wall and CPU seconds, peak bytes (0 if the system does not report them), and output of a command."""

    wall: float
    processor: float
    memory: int
    printed: str


def run_measured(command: Sequence[str], folder: Path) -> ResourceUsage:
    """Run a command in `folder`, wait for it, and return its resource usage.

    Its output and errors are left in `command.log` there, which is overwritten. The peak of memory is that of the
    command's own process, looked at every 10 ms (LOOK_S).

    Raises:
        MachineError: With the end of the output, if the command fails.
    """
    peak, over = [0], threading.Event()

    def watch(pid: int) -> None:
        # the system's maxrss of a child starts at the size of its parent
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
    return ResourceUsage(wall, account.ru_utime + account.ru_stime, peak[0], printed)


def rows_of_child(module: Sequence[str], limit_s: float) -> tuple[list[list[dict[str, Any]]], str | None]:
    """Run `python -m MODULE ARGUMENT ...` and collect its lines of JSON, with a time limit per line.

    The child and the processes that it started are killed at the end of this call, and the child ends with this
    process. It reads its arguments by `child_arguments`. Its standard error is passed through.

    Args:
        module: Name of the module, then its arguments.
        limit_s: Seconds until the first line, and between lines.

    Returns:
        (Parsed lines in order, reason why no more came). The reason is a text for a timeout or a non-zero exit code,
        and None if the child ended well.

    Raises:
        ValueError: For a line that is not JSON.
    """
    command = [sys.executable, "-m", *module, str(os.getpid())]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True)
    arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    rows: list[list[dict[str, Any]]] = []
    with contextlib.ExitStack() as ends:
        ends.callback(_end_session, child)
        reader = threading.Thread(target=_read, args=(child, arrived), daemon=True)
        reader.start()
        try:
            while (line := arrived.get(timeout=limit_s)) is not None:
                rows.append(json.loads(line))
        except queue.Empty:
            return rows, f"no result after {limit_s:g} s"
        code = child.wait()
    return rows, f"the timing process ended with exit code {code}" if code else None


def child_arguments() -> list[str]:
    """Return the arguments that `rows_of_child` passed, in its child process; from then on it ends with its parent."""
    *arguments, parent = sys.argv[1:]
    exit_with_parent(int(parent))
    return arguments


def _read(child: subprocess.Popen[bytes], arrived: queue.SimpleQueue[bytes | None]) -> None:
    """Put each line that a child prints into the queue, then None at the end; the body of a thread."""
    assert child.stdout is not None
    for line in child.stdout:
        arrived.put(line)
    arrived.put(None)


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
