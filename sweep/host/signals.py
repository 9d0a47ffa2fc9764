"""Requests to stop: Ctrl-C, SIGTERM, and SIGHUP, which a closed terminal sends."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar

import psutil

from ...results.errors import UserError
from . import processes

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.05
GRACE_S = 8.0
"""Seconds that the main thread has to hear of a request before the process ends without it."""


_held = threading.Event()
"""Set while the main thread is within `held`."""


class Interrupted(UserError):
    """The user or the system asked to stop; everything was saved and marked."""

    def __init__(self, number: int, remedy: str = "launch again to continue") -> None:
        self.number, self.exit_code = number, 128 + number
        super().__init__(f"stopped; {remedy}")


class StopRequested(BaseException):
    """The same where nothing has to be saved; as KeyboardInterrupt, nothing but the command line catches it."""

    def __init__(self, number: int) -> None:
        self.number, self.exit_code = number, 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@dataclass
class _Request:
    number: int | None = None
    since: float = 0.0


class StopSignals:
    """Hears requests to stop: the first is noted, a later one ends the process on the spot.

    With `raises` SIGTERM and SIGHUP raise Stop where they come, as Ctrl-C raises KeyboardInterrupt. One within another
    shares its request. In a thread other than the main one, which hears no signals, it does nothing.

    Python's handlers run in the main thread alone, which may wait in native code for minutes (a backward pass whose kernels
    another thread compiles). Where nothing has to be saved, a watcher then ends the process after GRACE_S.
    """

    _open: ClassVar[list[StopSignals]] = []

    def __init__(self, *, raises: bool = False) -> None:
        self._raises = raises
        self._request = _Request()
        self._before: dict[int, object] = {}
        self._unraisable = sys.unraisablehook
        self._watcher: _Watcher | None = None

    @property
    def number(self) -> int | None:
        """Which signal has come, if one has."""
        return self._request.number

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._open:
            self._request = self._open[-1]._request
        self._open.append(self)
        for number in STOPS[1:] if self._raises else STOPS:
            # what was started with nohup is not to hear of the terminal's end
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        if self._raises:
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._again
            self._watcher = _Watcher(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._open:
            self._open.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._before and self._raises:
            sys.unraisablehook = self._unraisable
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        request = self._request
        if request.number is None:
            request.number, request.since = number, time.monotonic()
            if self._raises:
                raise StopRequested(number)
        elif time.monotonic() - request.since > processes.ECHO_S:
            os._exit(128 + number)

    def _again(self, lost: sys.UnraisableHookArgs) -> None:
        """A request that came within a callback which no exception leaves, such as one of the import system's, comes once more."""
        if not isinstance(lost.exc_value, StopRequested | KeyboardInterrupt):
            self._unraisable(lost)
            return
        number = lost.exc_value.number if isinstance(lost.exc_value, StopRequested) else signal.SIGINT
        self._request.number = None
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()


class _Watcher:
    """A thread that hears of signals as soon as they come, by the descriptor that Python's own C handler writes to."""

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self._ours, self._pythons = os.pipe()
        os.set_blocking(self._pythons, False)
        self._before = signal.set_wakeup_fd(self._pythons, warn_on_full_buffer=False)
        # the thread must not be one that signals reach while `held` keeps them from the main thread
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    def close(self) -> None:
        """Give the descriptor back and end the thread."""
        replaced = signal.set_wakeup_fd(self._before)
        if replaced not in (self._pythons, -1):  # an event loop that still runs set its own
            signal.set_wakeup_fd(replaced)
        os.close(self._pythons)

    def _watch(self) -> None:
        """End the process when the main thread has not heard of a request within GRACE_S, until the pipe is closed.

        A request that `held` keeps back counts from its end.
        """
        while number := os.read(self._ours, 1):
            if number[0] in STOPS:
                time.sleep(GRACE_S)
                while _held.is_set():
                    time.sleep(GRACE_S)
                if self._signals.number is None and StopSignals._open == [self._signals]:
                    self._end(number[0])
        os.close(self._ours)

    def _end(self, number: int) -> None:
        """Leave without the main thread, and take the processes along that it waits for."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(OSError):
            os.write(2, f"atma-sweep: stopped by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)


def _forget_parent() -> None:
    """Keep a forked child, whose signals are its own, from writing to its parent's pipe."""
    with contextlib.suppress(ValueError):  # it was forked by another thread than the main one
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_parent)


def _leave_terminal() -> None:
    """Lets output go nowhere that went to a terminal which is gone."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # what never was a terminal says ENOTTY
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), stream)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Requests to stop wait meanwhile, for whatever would not survive one: Ray starting or stopping.

    Nor do threads and processes that are started within hear any; and a handler that others set is undone.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in STOPS} if main else {}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    if main:
        _held.set()
    try:
        yield
    finally:
        if main:
            _held.clear()
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
