"""What a node says of itself. Sent to the nodes whole, so it imports nothing but the standard library."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
        "versions": versions,
        "sees": (Path(runs) / mark).is_file(),
        "time": time.time(),
    }
