"""What a check finds, and the words that several kinds of findings share. Each kind has a file of its own beside this one."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
SHOWN = 5
"""Examples that a finding names."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    `error`: numbers are lost, wrong or about to be. `warning`: something does not work as it could. `note`: worth
    knowing. `remedy` is what to do about it.
    """

    severity: Severity
    what: str
    remedy: str

    @classmethod
    def error(cls, what: str, remedy: str) -> Finding:
        """Numbers are lost, wrong or about to be."""
        return cls(severity="error", what=what, remedy=remedy)

    @classmethod
    def warning(cls, what: str, remedy: str) -> Finding:
        """Something does not work as it could."""
        return cls(severity="warning", what=what, remedy=remedy)

    @classmethod
    def note(cls, what: str, remedy: str) -> Finding:
        """Something is worth knowing."""
        return cls(severity="note", what=what, remedy=remedy)


def unreadable(why: str, path: Path | None) -> Finding:
    """A part of the database, in the file `path` or on a server, that it cannot read itself."""
    remedy = restore(path) if path is not None else "look at the server's log, and restore the newest pg_dump"
    return Finding.error(f"parts cannot be read: {' '.join(why.split())}", remedy)


def restore(path: Path) -> str:
    """What to do about a damaged file."""
    kept = sorted([*path.parent.glob(f"{path.name}.*.backup"), *path.parent.glob(f"{path.stem}.before-upgrade-*")])
    # with another database's log beside it, a backup would be damaged at once
    away = f"stop what uses it and move {path} away, with its -wal and -shm"
    if kept:
        return f"{away}, then give its name to a copy of the newest backup: {max(kept, key=os.path.getmtime)}"
    return f"{away}, then save what can be saved: sqlite3 MOVED.db .recover | sqlite3 {shlex.quote(str(path))}"


def some(names: list[str]) -> str:
    """The first of them."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
