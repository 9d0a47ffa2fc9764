"""Process of an attempt: log lines whose output errors never fail it, and the flag of stop requests."""

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
"""Validations logged per training, evenly spread; a log thus stays below some hundred KiB."""


def log_line(line: str) -> None:
    """Print a line to stdout that starts with date and time in UTC, to the second, and flush."""
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line}", flush=True)


def ignore_output_errors() -> None:
    """Replace this process's stdout and stderr, so that printing never raises an OSError (full disk).

    What cannot be written is lost. Output is UTF-8, unbuffered; characters that cannot be encoded are escaped.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw: Any = UnfailingFile(number, "w", closefd=False)  # a truncated log must not cost results
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", write_through=True))


def is_logged(step: int, every: int, steps: int) -> bool:
    """Return True if the validation after `step` of `steps` steps gets a log line; the last one always does.

    Every validation does, unless there are more than MAX_VALIDATION_LINES (1000); then every second, third, ...

    Args:
        step: optimizer steps done.
        every: steps between validations.
        steps: steps of the training.
    """
    interval = -(-steps // (every * MAX_VALIDATION_LINES))
    return step == steps or step // every % interval == 0


SIGNAL_WAIT_S = 1.0
"""Seconds that an error waits for a stop signal that may explain it."""


class StopFlag:
    """Flag set by the first SIGTERM; a second one, more than ECHO_S (2) seconds later, ends the process at once.

    The process then exits with 143 (EXIT_STOPPED), without cleaning up. SIGINT and SIGHUP are handled by the
    supervisor, so this process and its children, such as compilers, ignore them.
    """

    def __init__(self, *, handles_signals: bool = True) -> None:
        """Install the handlers of SIGTERM, SIGINT and SIGHUP for the whole process, and unblock these signals.

        Call it in the main thread.

        Args:
            handles_signals: False leaves the process's signals as they are; the flag is then never set by one.
        """
        self.set = False
        """True once a stop was requested."""
        self._since = 0.0
        if not handles_signals:
            return
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Ray blocks these signals in its processes, and children inherit the mask
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def wait_until_set(self) -> bool:
        """Return True if SIGTERM has arrived or arrives within a second; blocks for at most that long.

        A batch system may signal a compiler child before this process.
        """
        deadline = time.monotonic() + SIGNAL_WAIT_S
        while not self.set and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.set

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: set the flag, or exit at once at a second signal.

        A signal within 2 s (ECHO_S) of the first counts as its echo and is ignored. The exit skips all cleaning up.
        """
        if not self.set:
            self.set, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > processes.ECHO_S:
            os._exit(EXIT_STOPPED)
