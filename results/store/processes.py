"""Whether a process that the database names still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

BOOT = Path("/proc/sys/kernel/random/boot_id")
SILENCE_S = 300.0
"""An attempt on another host, where we cannot look, counts as dead after this long without a word."""


def space() -> str | None:
    """The boot and the PID namespace of this process, in which its pid means something; None where there is no /proc.

    Containers may share their host's name, and a restarted machine has the one that it had before.
    """
    try:
        return f"{BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def here(host: str | None, told: str | None) -> bool:
    """Whether a pid that was told with that host and space can be looked up from here.

    Where a space is not known, as from an older release, the name of the host decides.
    """
    ours = space()
    return host == socket.gethostname() and (told is None or ours is None or told == ours)


def find(pid: int | None, started: float | None) -> psutil.Process | None:
    """The live process with that pid and creation time; None when it is gone or the pid belongs to another by now.

    One that we may not look at is taken for the one that is meant.
    """
    if pid is None or started is None:
        return None
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return process
    return process if same else None
