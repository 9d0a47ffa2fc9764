"""How an attempt ended, and what happens next."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from ..results.records import AttemptState

EXIT_STOPPED = 143
EXIT_LOST = 75
"""The attempt's row belongs to nobody or to somebody else; the process left without writing."""

TRIES = 3
"""Attempts of one cell within one launch, when its process keeps dying."""


@dataclass(frozen=True)
class Ending:
    """Verdict on a process that ended without closing its attempt."""

    state: AttemptState
    cause: str
    retry: bool


def judge(exit_code: int, log: Path) -> Ending:
    """Classifies the exit code of a process whose attempt still reads `running`.

    Killed by a signal: interrupted, and tried again. Stopped on request: interrupted. Anything else: failed, with the
    last line of its log as the cause.
    """
    if exit_code == EXIT_STOPPED or exit_code == -signal.SIGTERM:
        return Ending("interrupted", "stopped before training began", retry=False)
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        hint = " (out of memory, or by hand)" if name == "SIGKILL" else ""
        return Ending("interrupted", f"process killed by {name}{hint}", retry=True)
    return Ending("failed", f"process ended with exit code {exit_code}: {last_line(log)}", retry=False)


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "no log was written"
    return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")
