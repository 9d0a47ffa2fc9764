"""What a node says of itself. Sent to the nodes whole, so it imports nothing but the standard library."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMPORT_S = 60.0


def look(runs: str, mark: str, packages: Sequence[str]) -> dict[str, Any]:
    """Host, Python, versions of packages, clock, and whether the file `mark` is seen in the folder `runs`."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "path": os.environ.get("PYTHONPATH"),
        "versions": versions,
        "sees": (Path(runs) / mark).is_file(),
        "time": time.time(),
    }


def try_import(module: str, path: str) -> str | None:
    """Why a process of this node's Python with that PYTHONPATH cannot import the module: its error's last line."""
    command = [sys.executable, "-c", f"import {module}"]
    env = os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"importing it takes longer than {IMPORT_S:.0f} s"
    except OSError as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit code {done.returncode}") if done.returncode else None
