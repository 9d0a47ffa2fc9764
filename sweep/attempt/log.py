"""What an attempt says of itself: a few lines for people in its log.txt, and nothing that could end it."""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime
from typing import Any

from ...results.console.streams import UnfailingFile

MOST = 1000
"""Validations that are told of one training, evenly spread: a log stays below some hundred KiB however long it takes."""


def say(line: str) -> None:
    """Prints a line after the time, in UTC."""
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line}", flush=True)


def never_fail() -> None:
    """From now on nothing that this process prints can raise an OSError, of a full disk for instance."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw: Any = UnfailingFile(number, "w", closefd=False)  # a log that is cut off costs no number
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", write_through=True))


def told(step: int, every: int, steps: int) -> bool:
    """Whether the validation after `step` of `steps` steps, taken after each `every`, gets a line; the last one does."""
    apart = -(-steps // (every * MOST))
    return step == steps or step // every % apart == 0
