"""Timeouts of tests: as long as the slowest machine may need, so that no test fails for being slow.

And how servers that tests start end with them, should nobody wait any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import time
from collections.abc import Callable

import psutil

PATIENCE_S = 600.0
"""There to end a hang, not to measure anything: what must be quick is a row of `atma-sweep bench`."""


def until(true: Callable[[], object], what: object = "it", *, pause: float = 0.02) -> None:
    """Looks every `pause` seconds until `true()` is; raises AssertionError naming `what` when it never comes."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"{what() if callable(what) else what} never came"
        time.sleep(pause)


def gone(pid: int) -> None:
    """Until there is no such process, or nothing but its exit code; raises AssertionError where it stays."""

    def over() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(over, f"the end of process {pid}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def end_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` by which a killed test run leaves no server behind: the child gets that signal when its parent dies."""
    _libc()  # in the parent, where a lock that another thread holds does no harm

    def ask() -> None:
        with contextlib.suppress(AttributeError):
            _libc().prctl(1, number)  # PR_SET_PDEATHSIG

    return ask
