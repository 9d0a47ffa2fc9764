"""Errors of the library that the command line turns into one line and an exit code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..results.console.text import did_you_mean, nearest
from ..results.errors import UserError


class SweepError(UserError):
    """Something about a grid, its text or its attempts."""


class MachineError(SweepError):
    """The machine lacks something or is busy."""

    exit_code = 3
    passing = True


class GridError(SweepError):
    """A grid file that says something it may not: one line with file, line, key, what is allowed and the nearest word."""

    def __init__(
        self,
        file: Path | str,
        line: int | None,
        key: str,
        problem: str,
        allowed: Iterable[str] = (),
        word: str | None = None,
    ) -> None:
        self.file, self.line, self.key, self.problem = str(file), line, key, problem
        self.allowed = list(allowed)
        self.nearest = nearest(word, self.allowed) if word is not None else None
        text = f"{self.file}:{line}: " if line is not None else f"{self.file}: "
        text += f"{key}: {problem}" if key else problem
        if self.allowed:
            text += "; allowed: " + ", ".join(self.allowed)
        if word is not None:
            text += did_you_mean(word, self.allowed, shown=repr)
        super().__init__(" ".join(text.split()))
