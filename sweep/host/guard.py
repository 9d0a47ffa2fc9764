"""Guard process of each attempt, which kills the attempt when its launch is gone and it does not exit by itself.

The system notifies an attempt by SIGTERM that its launch has died. A frozen attempt (SIGSTOP, a debugger) does not
receive it, and would keep its memory and its GPU until the next launch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

CHECK_INTERVAL_S = 0.5
"""Seconds between two checks of the attempt."""


def start(parent: int, grace_s: float) -> None:
    """Start a guard of this process, an attempt started by `parent`, as a separate process, and return at once.

    Args:
        parent: Pid of the process whose death ends the attempt.
        grace_s: Seconds that the attempt then gets to save itself.
    """
    nowhere = subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, "-m", "atma_sweep.sweep.host.guard", str(os.getpid()), str(parent), str(grace_s)],
        stdin=nowhere, stdout=nowhere, stderr=nowhere,
        start_new_session=True,  # signals to the attempt's group must not reach the guard
    )  # fmt: skip


def end_after_parent(pid: int, parent: int, grace_s: float) -> None:
    """Block until the process `pid` is gone; kill it and its children if it outlives its parent by the grace period.

    After the death of the parent a frozen process is resumed first, so that it receives pending signals. The guard
    itself sends no SIGTERM. Children that the attempt had at that time are killed even if it ends within the grace
    period.

    Args:
        pid: Attempt to watch; a process that is gone already, or a zombie, ends the guard.
        parent: Pid of its parent; another parent means that the launch has died.
        grace_s: Seconds between the parent's death and SIGKILL.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        attempt = psutil.Process(pid)
        while attempt.ppid() == parent:
            if attempt.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(CHECK_INTERVAL_S)
        attempt.resume()  # it now receives signals sent while it was frozen
        family = [member for member in attempt.children(recursive=True) if member.pid != os.getpid()]
        psutil.wait_procs([attempt], timeout=grace_s)
        for member in (attempt, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def main(argv: Sequence[str]) -> None:
    """Run the guard. `argv` holds the attempt's pid, its parent's pid, and the grace period in seconds."""
    end_after_parent(int(argv[0]), int(argv[1]), float(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
