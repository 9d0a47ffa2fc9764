"""Of attempts that would compile the same network at the same time, one does, and the others wait for what it made.

Cells of a sweep often differ in their seed or their learning rate alone, and start side by side: each would compile the same for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from ..config import CellConfig

LOCK_TIMEOUT_S = 900.0
"""After which an attempt compiles beside the one that it waited for, which may hang."""
LOCK_POLL_S = 0.1
_GRAPH_SETTINGS = {
    "micro_batch", "seq_len", "regularizer", "regularizer_source", "regularizer_sketch", "distractor", "distractor_count",
    "deterministic", "compile", "kernels", "activations", "precision", "loss_on",
}  # fmt: skip
"""Settings under `train` on which depends what is compiled."""


def graph_key(config: CellConfig, *extra: str) -> str:
    """The same for cells whose networks are compiled to the same code. `extra`: what else decides, as sources and versions do."""
    model = config.model.model_dump(mode="json", exclude={"init"})
    train = config.train.model_dump(mode="json", include=_GRAPH_SETTINGS)
    return hashlib.sha256(repr((sorted(model.items()), sorted(train.items()), extra)).encode()).hexdigest()[:32]


class CompileLock:
    """The right to be the one that compiles a kind of network, between processes that share a folder for what is compiled.

    Kept from `acquire` until `mark_compiled`, or until the process ends, however it does. Without a folder where files can be locked there are no
    turns.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / key
        self._file: int | None = None

    def acquire(self, meanwhile: Callable[[], None]) -> float:
        """Until nobody else compiles it; seconds that this took. `meanwhile` is called ten times a second, and may raise."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not self._try_acquire() and time.monotonic() - began <= LOCK_TIMEOUT_S:
                meanwhile()
                time.sleep(LOCK_POLL_S)
        except BaseException:
            self.release()
            raise
        return time.monotonic() - began

    def _try_acquire(self) -> bool:
        """Whether there is nobody to wait for."""
        if self._file is None:
            return True
        try:
            # what has been compiled once is found, by any number at a time
            if not os.fstat(self._file).st_size:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            self.release()
        return True

    def mark_compiled(self) -> None:
        """The first step is done: all that it needed is compiled."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, b"compiled\n", 0)
            self.release()

    def release(self) -> None:
        """Nothing was compiled: whoever waits takes it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
