"""A process that is ready before there is an attempt for it: it has imported what takes seconds, and waits to be told which it is.

It has run nothing, holds no memory of a GPU and becomes one attempt at most. See `executors/warm_pool.py` for who keeps it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

IMPORTS = ("torch._inductor.compile_fx", "torch._dynamo", "triton", "atma_sweep.sweep.attempt.cell_runner")
"""What a training on a GPU imports, the slowest first; none of them speaks to a GPU."""


def wait_for_folder(runs: Path) -> str | None:
    """The folder, relative to `runs`, of the attempt that this process has become, or None: there is none for it.

    It is read as a line from standard input. From then on the process stands in that folder and writes into its log, as one that was
    started there does. Raises OSError when it cannot.
    """
    initial_environment, broken = dict(os.environ), False
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # the attempt's to tell, should it need it
        except Exception:  # noqa: BLE001, the attempt is to meet it anew, and to tell it
            broken = True
            break
    for name in os.environ.keys() - initial_environment.keys():
        del os.environ[name]  # torch's compiler notes its own folder for what it makes, which would go before ours
    folder = sys.stdin.readline().rstrip("\n")
    if not folder:
        return None
    initial_folder, attempt_folder = os.getcwd(), runs / folder
    os.chdir(attempt_folder)
    sys.path[:] = [str(attempt_folder) if entry == initial_folder else entry for entry in sys.path]
    with open(os.devnull, "rb") as nothing, (attempt_folder / "log.txt").open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if broken:
        # a second import of what failed half-way would tell another story than the first
        command = list(sys.orig_argv)
        at = command.index("--spare")
        command[at : at + 1] = ["--folder", folder]
        os.execv(sys.executable, command)
    return folder
