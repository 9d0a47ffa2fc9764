"""Spare process of the warm pool: it has done the slow imports and waits for an attempt to become.

The attempt's folder comes as a line on standard input. A spare process has run nothing, uses no GPU memory, and becomes
at most one attempt. executors/warm_pool.py manages such processes.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

IMPORTS = ("torch._inductor.compile_fx", "torch._dynamo", "triton", "atma_sweep.sweep.attempt.cell_runner")
"""Modules that a training on a GPU imports, the slowest first; importing them does not touch a GPU."""


def wait_for_folder(runs: Path) -> str | None:
    """Import what takes long, then wait for an attempt's folder on standard input and become that attempt.

    Blocks until a line or the end of standard input comes. Then it changes the working directory (and its entry in
    sys.path) to the folder, redirects stdout and stderr to its log.txt and standard input to nothing. Environment
    variables that the imports have set are removed. If an import failed, the process replaces itself by a fresh one for
    the folder and does not return.

    Args:
        runs: folder that the attempt's folder is relative to.

    Returns:
        The folder, relative to `runs`; None if standard input closed without one, or the line is empty.

    Raises:
        OSError: the folder cannot be entered or its log cannot be opened.
    """
    initial_environment, broken = dict(os.environ), False
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # the attempt reports it if it needs the module
        except Exception:  # noqa: BLE001, a fresh process repeats the import and reports the error
            broken = True
            break
    for name in os.environ.keys() - initial_environment.keys():
        del os.environ[name]  # e.g. the compile cache folder that torch's compiler sets, which would override ours
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
        # importing a half-imported module again would raise another error than the first time
        command = list(sys.orig_argv)
        at = command.index("--spare")
        command[at : at + 1] = ["--folder", folder]
        os.execv(sys.executable, command)
    return folder
