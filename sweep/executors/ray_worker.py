"""The task of a Ray worker: one attempt as its child. It imports little, since every new worker imports it before the attempt can start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..host import processes


def run_attempt(command: Sequence[str], env: Mapping[str, str], folder: Path) -> int:
    """Run the attempt's command, completed by this worker's pid, as a child in `folder`; return its exit code.

    Ray makes each worker the leader of a process group and kills that group when the worker dies. The child stays in
    it, so that it dies with its worker.
    """
    apart = os.getpgrp() != os.getpid()
    child = processes.start([*command, "--parent", str(os.getpid())], env, folder, apart=apart)
    code = child.wait()
    processes.end_group(child.pid if apart else os.getpid())
    return code
