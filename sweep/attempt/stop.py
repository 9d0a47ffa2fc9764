"""The request to stop, as an attempt hears it."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from ..host import processes
from ..host.signals import STOPS
from .failures import EXIT_STOPPED

TOLD_S = 1.0


class StopFlag:
    """Set by the first SIGTERM; the second ends the process on the spot.

    Ctrl-C and the terminal's end are the supervisor's business; whatever is started here, a compiler, ignores them, too.
    """

    def __init__(self) -> None:
        self.set = False
        self._since = 0.0
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Ray's processes have them blocked, and children inherit that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def comes(self) -> bool:
        """Whether it is set, or will be in a moment: who ends many processes one by one may tell a compiler before us."""
        deadline = time.monotonic() + TOLD_S
        while not self.set and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.set

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.set:
            self.set, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > processes.ECHO_S:
            os._exit(EXIT_STOPPED)
