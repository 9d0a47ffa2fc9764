"""Facts about a node, collected on it. Sent to the nodes by value, so it imports only the standard library."""

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
"""Seconds that a trial import may take."""


def describe_node(runs: str, mark: str, packages: Sequence[str]) -> dict[str, Any]:
    """Return facts about the node that this runs on, as a dict.

    Keys: host, python (version), executable, path (PYTHONPATH or None), versions (version by package), sees (True if
    the marker file exists here), time (seconds since the epoch by this node's clock).

    Args:
        runs: Runs folder.
        mark: Name of the marker file in `runs`.
        packages: Distributions whose versions are returned; those not installed are left out.
    """
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
    """Return the reason why a new process of this node's Python cannot import the module, or None if it can.

    The reason is one line: the last one of the error output, the exit code, or a timeout after 60 s (IMPORT_S).

    Args:
        module: Dotted name.
        path: PYTHONPATH of the process; the rest of its environment is this process's.
    """
    command = [sys.executable, "-c", f"import {module}"]
    env = os.environ | {"PYTHONPATH": path}
    try:
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"importing it takes longer than {IMPORT_S:.0f} s"
    except OSError as error:
        return str(error)
    lines = result.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit code {result.returncode}") if result.returncode else None
