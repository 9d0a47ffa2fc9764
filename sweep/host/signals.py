"""Stop signals: Ctrl-C, SIGTERM, and the SIGHUP of a closed terminal."""

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
"""Signals that request a stop."""
RESEND_S = 0.05
"""Seconds before a lost signal is sent again."""
GRACE_S = 8.0
"""Seconds that the main thread gets to handle a signal before the process ends without it."""


_blocked = threading.Event()
"""Event that is set while the main thread is within `signals_blocked`."""


class Interrupted(UserError):
    """Error after a clean stop requested by the user or the system; everything was saved and marked."""

    def __init__(self, number: int, remedy: str = "launch again to continue") -> None:
        """Create the error for a signal; the exit code is 128 + `number`, and `remedy` ends the message."""
        self.number, self.exit_code = number, 128 + number
        super().__init__(f"stopped; {remedy}")


class StopRequested(BaseException):
    """Exception of a stop signal where nothing has to be saved.

    A BaseException, so that `except Exception` lets it pass; only the command line catches it.
    """

    def __init__(self, number: int) -> None:
        self.number, self.exit_code = number, 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@dataclass
class _StopRequest:
    """First stop signal received and its time on the monotonic clock; shared by nested `StopSignals`."""

    number: int | None = None
    since: float = 0.0


class StopSignals:
    """Context manager that handles stop signals: it records the first; a later one ends the process at once.

    Repetitions within 2 s (ECHO_S) count as the first signal. With `raises`, SIGTERM and SIGHUP raise StopRequested
    where they arrive, as Ctrl-C raises KeyboardInterrupt. A nested context shares the request of the outer one. In a
    thread other than the main one, which receives no signals, the context does nothing.

    Python runs handlers only in the main thread, which may wait in native code for minutes (a backward pass whose
    kernels another thread compiles). Where nothing has to be saved, a watcher therefore ends the process after 8 s
    (GRACE_S).
    """

    _active: ClassVar[list[StopSignals]] = []
    """Contexts that are active, outermost first."""

    def __init__(self, *, raises: bool = False) -> None:
        """Create the context; `raises` makes SIGTERM and SIGHUP raise StopRequested."""
        self._raises = raises
        self._request = _StopRequest()
        self._previous_handlers: dict[int, object] = {}
        self._unraisable = sys.unraisablehook
        self._watcher: _Watcher | None = None

    @property
    def number(self) -> int | None:
        """Signal that was received; None if there was none."""
        return self._request.number

    def __enter__(self) -> StopSignals:
        """Install the handlers; a SIGTERM or SIGHUP that is ignored (nohup) stays ignored.

        With `raises` SIGINT keeps its handler, and a watcher thread is started. Does nothing outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._active:
            self._request = self._active[-1]._request
        self._active.append(self)
        for number in STOPS[1:] if self._raises else STOPS:
            # a process started with nohup ignores SIGHUP
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._handle)
        if self._raises:
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._resend_lost_signal
            self._watcher = _Watcher(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers and stop the watcher; an exception passes on."""
        if self in self._active:
            self._active.remove(self)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._previous_handlers and self._raises:
            sys.unraisablehook = self._unraisable
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: record the first one, and raise StopRequested for it if `raises` is set.

        A later one ends the process at once, with the exit code 128 + `number`, unless it comes within 2 s (ECHO_S) of
        the first. A SIGHUP also detaches standard output and error from a terminal that is gone.
        """
        if number == signal.SIGHUP:
            _detach_terminal()
        request = self._request
        if request.number is None:
            request.number, request.since = number, time.monotonic()
            if self._raises:
                raise StopRequested(number)
        elif time.monotonic() - request.since > processes.ECHO_S:
            os._exit(128 + number)

    def _resend_lost_signal(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Send a stop signal again whose exception was swallowed by a callback, such as one of the import system.

        It is sent after 50 ms. Serves as `sys.unraisablehook`; other exceptions go to the previous hook.
        """
        if not isinstance(unraisable.exc_value, StopRequested | KeyboardInterrupt):
            self._unraisable(unraisable)
            return
        number = unraisable.exc_value.number if isinstance(unraisable.exc_value, StopRequested) else signal.SIGINT
        self._request.number = None
        timer = threading.Timer(RESEND_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


class _Watcher:
    """Thread that learns of signals at once, through the file descriptor that Python's C handler writes to.

    It ends the process if the main thread has not handled a stop signal within 8 s (GRACE_S).
    """

    def __init__(self, signals: StopSignals) -> None:
        """Install the descriptor and start the thread."""
        self._signals = signals
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        # the thread blocks stop signals, which must not reach it while `signals_blocked` blocks the main thread
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    def close(self) -> None:
        """Restore the previous descriptor and end the thread, without waiting for it.

        A descriptor that another part has set meanwhile stays.
        """
        replaced = signal.set_wakeup_fd(self._previous_fd)
        if replaced not in (self._write_end, -1):  # a running event loop has set its own descriptor
            signal.set_wakeup_fd(replaced)
        os.close(self._write_end)

    def _watch(self) -> None:
        """End the process when the main thread has not handled a signal within 8 s (GRACE_S).

        Returns when the pipe is closed. A signal that is blocked counts from the end of the block. Nothing is done
        while another context of stop signals is active within this one.
        """
        while number := os.read(self._read_end, 1):
            if number[0] in STOPS:
                time.sleep(GRACE_S)
                while _blocked.is_set():
                    time.sleep(GRACE_S)
                if self._signals.number is None and StopSignals._active == [self._signals]:
                    self._exit(number[0])
        os.close(self._read_end)

    def _exit(self, number: int) -> None:
        """End the process with the exit code 128 + `number`, without its main thread, after a line on standard error.

        All descendants are killed first, because the main thread may wait for them. Nothing is flushed or cleaned up.
        """
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(OSError):
            os.write(2, f"atma-sweep: stopped by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)


def _reset_wakeup_fd() -> None:
    """Keep a forked child, which has signals of its own, from writing to its parent's pipe."""
    with contextlib.suppress(ValueError):  # raised if a thread other than the main one forked
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_reset_wakeup_fd)


def _detach_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal is gone; files and pipes stay."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # a stream that never was a terminal gives ENOTTY
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), stream)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP during the `with` block.

    This is for operations that must not be interrupted, such as starting Ray. The signals are delivered after the
    block. Signals are blocked in the calling thread alone; threads and processes started within inherit the block. In
    the main thread, handlers that were changed within are restored.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in STOPS} if main else {}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    if main:
        _blocked.set()
    try:
        yield
    finally:
        if main:
            _blocked.clear()
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
