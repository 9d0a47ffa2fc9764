"""How long a test waits: as long as whatever it waits for may take on the slowest machine, and no test fails for being slow."""

from __future__ import annotations

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
