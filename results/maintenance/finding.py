"""The class of a check's findings, and texts that several checks share."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
MAX_NAMED = 5
"""Number of examples that a finding names."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem of a database.

    `error`: data is lost, wrong or in danger. `warning`: something does not work as it could. `note`: information.
    `remedy` says what to do.
    """

    severity: Severity
    what: str
    remedy: str

    @classmethod
    def error(cls, what: str, remedy: str) -> Finding:
        """Return a finding about data that is lost, wrong or in danger."""
        return cls(severity="error", what=what, remedy=remedy)

    @classmethod
    def warning(cls, what: str, remedy: str) -> Finding:
        """Return a finding about something that does not work as it could."""
        return cls(severity="warning", what=what, remedy=remedy)

    @classmethod
    def note(cls, what: str, remedy: str) -> Finding:
        """Return a finding for information."""
        return cls(severity="note", what=what, remedy=remedy)


def unreadable_finding(cause: str, path: Path | None) -> Finding:
    """Return an error about parts of the database, in the file `path` or on a server (None), that cannot be read."""
    remedy = restore_advice(path) if path is not None else "check the server's log, and restore the newest pg_dump"
    return Finding.error(f"parts cannot be read: {' '.join(cause.split())}", remedy)


def restore_advice(path: Path) -> str:
    """Return the advice about a damaged database file, with the newest backup in its folder if there is one.

    Backups are recognized by the names that `db backup` and `db upgrade` give; the newest is the one modified last.
    Without one the advice is to recover with sqlite3.
    """
    backups = sorted([*path.parent.glob(f"{path.name}.*.backup"), *path.parent.glob(f"{path.stem}.before-upgrade-*")])
    # next to the log of another database, a backup would be damaged at once
    away = f"stop the programs that use it and move {path} elsewhere, with its -wal and -shm"
    if backups:
        return f"{away}, then copy the newest backup to its path: {max(backups, key=os.path.getmtime)}"
    return f"{away}, then recover what can be read: sqlite3 MOVED.db .recover | sqlite3 {shlex.quote(str(path))}"


def first_names(names: list[str]) -> str:
    """Return at most five (MAX_NAMED) of the names, separated by commas; "..." stands for the others."""
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
