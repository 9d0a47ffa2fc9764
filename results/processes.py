"""Whether a process that the database names still runs."""

from __future__ import annotations

import psutil


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
