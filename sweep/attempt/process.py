"""The process of an attempt: the lines of its log, which never end it, and the request to stop, as it hears it."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from ...results.console.streams import UnfailingFile
from ..host import processes
from ..host.signals import STOPS
from .failures import EXIT_STOPPED

MAX_VALIDATION_LINES = 1000
"""Validations that are told of one training, evenly spread: a log stays below some hundred KiB however long it takes."""


def log_line(line: str) -> None:
    """Prints a line after the time, in UTC."""
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line}", flush=True)


def ignore_output_errors() -> None:
    """From now on nothing that this process prints can raise an OSError, of a full disk for instance."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw: Any = UnfailingFile(number, "w", closefd=False)  # a log that is cut off costs no number
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", write_through=True))


def is_logged(step: int, every: int, steps: int) -> bool:
    """Whether the validation after `step` of `steps` steps, taken after each `every`, gets a line; the last one does."""
    interval = -(-steps // (every * MAX_VALIDATION_LINES))
    return step == steps or step // every % interval == 0


SIGNAL_WAIT_S = 1.0


class StopFlag:
    """Set by the first SIGTERM; the second ends the process on the spot.

    Ctrl-C and the terminal's end are the supervisor's business; whatever is started here, a compiler, ignores them, too.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._since = 0.0
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Ray's processes have them blocked, and children inherit that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def wait_until_set(self) -> bool:
        """Whether it is set, or will be in a moment: who ends many processes one by one may tell a compiler before us."""
        deadline = time.monotonic() + SIGNAL_WAIT_S
        while not self.is_set and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.is_set

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.is_set:
            self.is_set, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > processes.ECHO_S:
            os._exit(EXIT_STOPPED)
