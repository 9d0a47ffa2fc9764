"""Errors that the command line reports as one line with an exit code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..results.console.text import closest_match, did_you_mean
from ..results.errors import UserError


class SweepError(UserError):
    """Raised for a problem with a grid, its text or its attempts."""


class MachineError(SweepError):
    """Raised when the machine lacks something or is busy; exit code 3, and a later try may succeed."""

    exit_code = 3
    passing = True


class PartRefused(SweepError):
    """Raised for a part of the network that cannot run on the device, on which a later try fails too; exit code 3."""

    exit_code = 3


class GridError(SweepError):
    """Raised for invalid content of a grid file: one line with file, line, key, allowed values and the nearest one."""

    def __init__(
        self,
        file: Path | str,
        line: int | None,
        key: str,
        problem: str,
        allowed: Iterable[str] = (),
        word: str | None = None,
    ) -> None:
        """Build the one-line message "FILE:LINE: KEY: PROBLEM; allowed: ..." and a suggestion.

        Args:
            file: Grid file, or the option that held the value.
            line: Line in the file, from 1; None without one.
            key: Key path as text; "" for the whole file.
            problem: Text of the problem.
            allowed: Allowed values, which the message lists if there are any.
            word: Word that may be a misspelling of an allowed value; the message suggests the nearest. None suggests
                none.
        """
        self.file, self.line, self.key, self.problem = str(file), line, key, problem
        self.allowed = list(allowed)
        self.nearest = closest_match(word, self.allowed) if word is not None else None
        text = f"{self.file}:{line}: " if line is not None else f"{self.file}: "
        text += f"{key}: {problem}" if key else problem
        if self.allowed:
            text += "; allowed: " + ", ".join(self.allowed)
        if word is not None:
            text += did_you_mean(word, self.allowed, shown=repr)
        super().__init__(" ".join(text.split()))
