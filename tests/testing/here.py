"""The command line in the test's own process: imports are most of what a command takes in one of its own."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from pathlib import Path


def run_in_process(folder: Path, *arguments: str, together: bool = False) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in `folder`; `together`: both as one, in order."""
    from atma_sweep import cli

    out, code, argv = io.StringIO(), 0, sys.argv
    err = out if together else io.StringIO()
    sys.argv = ["atma-sweep", *arguments]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = argv
        gc.collect(1)  # closes the database, as the end of a process would: SQLite's locks belong to a whole process
    return code, out.getvalue(), err.getvalue()
