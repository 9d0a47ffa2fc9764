"""What is wrong with the place that a SQLite database lies in: its file system, its room, what killed backups left."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..store.copying import PART
from ..store.database import network_filesystem
from .finding import Finding

LOW_BYTES = 2**30
"""Less free space than this beside the database is worth a warning; a tenth of it is an error."""


def surroundings(path: Path) -> list[Finding]:
    """Findings about the folder of the database; nothing is read from the database itself."""
    findings = []
    table = Path("/proc/self/mountinfo")
    kind = network_filesystem(path.resolve(), table.read_text(errors="replace")) if table.exists() else None
    if kind:
        findings.append(
            Finding(
                severity="error",
                what=f"{path} lies on {kind}, a network file system, where SQLite corrupts",
                remedy="move it to a local disk, or use PostgreSQL (--db)",
            )
        )
    free, size = shutil.disk_usage(path.parent).free, path.stat().st_size
    if free < max(LOW_BYTES, 2 * size):
        findings.append(
            Finding(
                severity="error" if free < LOW_BYTES // 10 else "warning",
                what=f"{path.parent} has {free / 1e9:.2f} GB free, and the database takes {size / 1e9:.2f} GB",
                remedy="make room: an upgrade and a backup need as much again",
            )
        )
    for left in sorted(path.parent.glob(f".{path.stem}.*{PART}")):
        findings.append(
            Finding(
                severity="note",
                what=f"{left} was left by a backup that was killed, unless one is running",
                remedy="delete it",
            )
        )
    return findings
