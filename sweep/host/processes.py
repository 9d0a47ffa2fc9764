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

from ...results.store.records import Owner, find, here, space

GRACE_S = 10.0
"""Seconds that a process gets between SIGTERM and SIGKILL."""
ECHO_S = 2.0
"""A request to stop that comes again within these seconds is still the first one: a batch system tells every process of
a job at once, and whoever is told passes it on."""


def this_process(name: str) -> Owner:
    """The running process as an owner of sweeps and attempts."""
    me = psutil.Process()
    return Owner(name=name, host=socket.gethostname(), pid=me.pid, started=me.create_time(), space=space())


def is_alive(owner: Owner) -> bool | None:
    """Whether an owner still runs; None when it is on another host or in another PID namespace, where we cannot look."""
    if not here(owner.host, owner.space):
        return None
    return find(owner.pid, owner.started) is not None


def holds(owner: Owner, lease_until: datetime | None) -> bool:
    """Whether an owner still has what it took: its process lives, or, where we cannot look, its lease does."""
    alive = is_alive(owner)
    leased = lease_until is not None and lease_until > datetime.now(UTC)
    return leased if alive is None else alive


def lineage() -> set[int]:
    """The pids of this process and of those that it descends from."""
    me = psutil.Process()
    with contextlib.suppress(psutil.Error):
        return {me.pid, *(parent.pid for parent in me.parents())}
    return {me.pid, os.getppid()}


def terminate_all(processes: Sequence[psutil.Process], grace: float = GRACE_S) -> None:
    """Ends processes, their children and the groups that they lead: SIGTERM, then SIGKILL after `grace` seconds.

    Returns when they are gone. Never the running process or one that it descends from, whatever a database says of them.
    """
    ours = lineage()
    others = [process for process in processes if process.pid not in ours]
    family, groups = list(others), set()
    for process in others:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            family += process.children(recursive=True)
            groups |= {os.getpgid(process.pid)} & {process.pid} - {os.getpid()}
            process.terminate()
    psutil.wait_procs(others, timeout=grace)
    for group in groups:
        end_group(group)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=grace)


def start(
    command: Sequence[str], env: Mapping[str, str], folder: Path, *, apart: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a child in `folder`, its output appended to `folder`/log.txt, in our own process group.

    With `apart` in a group of its own, where a terminal's Ctrl-C reaches neither it nor the compilers that it runs.
    """
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            list(command), env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            process_group=0 if apart else None,
        )  # fmt: skip


def start_waiting(command: Sequence[str], env: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """As `start` with `apart`, for a child that hears by a pipe what it is to be; until then what it prints goes nowhere."""
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        list(command), env=dict(env), cwd=folder, stdin=pipe, stdout=nowhere, stderr=nowhere, process_group=0
    )


def end_group(group: int) -> None:
    """Kills what lives of a process group but for ourselves: what an attempt that has ended left behind."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.getpgid(pid) == group:
                os.kill(pid, signal.SIGKILL)


def has_pending(pid: int, number: int) -> bool:
    """Return whether a process was sent the signal and has not received it, since it blocks it. False where no /proc tells."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def exit_with_parent(parent: int) -> None:
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
