"""Operating-system processes: who we are, who still lives, how a child starts and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from ..results.processes import find as find
from ..results.records import Owner

GRACE_S = 10.0
"""Seconds that a process gets between SIGTERM and SIGKILL."""
ECHO_S = 2.0
"""A request to stop that comes again within these seconds is still the first one: a batch system tells every process of
a job at once, and whoever is told passes it on."""


def this_process(name: str) -> Owner:
    """The running process as an owner of sweeps and attempts."""
    me = psutil.Process()
    return Owner(name=name, host=socket.gethostname(), pid=me.pid, started=me.create_time())


def is_alive(owner: Owner) -> bool | None:
    """Whether an owner still runs; None when it is on another host, where we cannot look."""
    if owner.host != socket.gethostname():
        return None
    return find(owner.pid, owner.started) is not None


def holds(owner: Owner, lease_until: datetime | None) -> bool:
    """Whether an owner still has what it took: its process lives, or, where we cannot look, its lease does."""
    alive = is_alive(owner)
    leased = lease_until is not None and lease_until > datetime.now(UTC)
    return leased if alive is None else alive


def end(pid: int | None, started: float | None, grace: float = GRACE_S) -> None:
    """Ends a process and its children: SIGTERM, then SIGKILL after `grace` seconds. Returns when they are gone."""
    process = find(pid, started)
    if process is not None:
        end_all([process], grace)


def end_all(processes: Sequence[psutil.Process], grace: float = GRACE_S) -> None:
    """The same for several at once."""
    family = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += process.children(recursive=True)
            process.terminate()
    psutil.wait_procs(processes, timeout=grace)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=grace)


def start(command: Sequence[str], env: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Starts a child in `folder`, its output appended to `folder`/log.txt, in our own process group."""
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            list(command), env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def die_with(parent: int) -> None:
    """Asks for SIGTERM when `parent`, our parent process, dies; at once when it is dead already."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
    elif sys.platform != "linux":
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
