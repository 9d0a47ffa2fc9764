"""Task of a Ray worker: runs one attempt as a child process.

Imports little, since every new worker imports it before its attempt can start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..host import processes


def run_attempt(command: Sequence[str], env: Mapping[str, str], folder: Path) -> int:
    """Run the attempt's command as a child, block until it ends, and return its exit code (negative for a signal).

    Afterwards kill what is left of its process group. Ray makes each worker the leader of a process group and kills
    that group when the worker dies. The child stays in the group, so that it dies with its worker. A worker that leads
    no group gives the child a group of its own.

    Args:
        command: Command line, to which this worker's pid is appended as --parent.
        env: Entire environment of the child.
        folder: Working folder, whose log.txt the output is appended to.

    Raises:
        OSError: The log cannot be opened or the process cannot be created.
    """
    own_group = os.getpgrp() != os.getpid()
    child = processes.start_child([*command, "--parent", str(os.getpid())], env, folder, own_group=own_group)
    code = child.wait()
    processes.kill_group(child.pid if own_group else os.getpid())
    return code
