"""Ways in which a function ends without an answer, for processes that import it."""

from __future__ import annotations

import os
import signal

import torch
from atma_sweep.sweep.errors import GridError


def exhaust_memory() -> None:
    raise torch.OutOfMemoryError("3 GiB")


def wrong() -> None:
    raise GridError("g", None, "a", "is wrong")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
