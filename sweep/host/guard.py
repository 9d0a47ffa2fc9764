"""A small process beside each attempt, which ends it when its launch is gone and it does not leave by itself.

The system tells an attempt with SIGTERM that its launch has died. One that is frozen (SIGSTOP, a debugger) does not hear
that, and would keep its memory and its GPU until somebody launches again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

LOOK_S = 0.5


def start(parent: int, grace: float) -> None:
    """Has this process, an attempt started by `parent`, watched. It gets `grace` seconds to save itself."""
    nowhere = subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, "-m", "atma_sweep.sweep.host.guard", str(os.getpid()), str(parent), str(grace)],
        stdin=nowhere, stdout=nowhere, stderr=nowhere,
        start_new_session=True,  # what stops or kills the attempt's group does not reach it
    )  # fmt: skip


def watch(pid: int, parent: int, grace: float) -> None:
    """Returns when the process `pid` is gone, by itself or, after its parent was no longer `parent`, by SIGKILL."""
    with contextlib.suppress(psutil.NoSuchProcess):
        attempt = psutil.Process(pid)
        while attempt.ppid() == parent:
            if attempt.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(LOOK_S)
        attempt.resume()  # now it hears what it was sent while it was frozen
        family = [member for member in attempt.children(recursive=True) if member.pid != os.getpid()]
        psutil.wait_procs([attempt], timeout=grace)
        for member in (attempt, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def main(argv: Sequence[str]) -> None:
    """Pid of the attempt, pid of whoever started it, seconds of grace."""
    watch(int(argv[0]), int(argv[1]), float(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
