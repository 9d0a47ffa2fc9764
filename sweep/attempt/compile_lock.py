"""Lock between processes, so that only one of several attempts compiles the same network while the others wait.

Cells of a sweep often differ only in seed or learning rate and start at the same time; each would compile the same
code.
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
"""Seconds after which an attempt stops waiting and compiles too, because the lock's holder may hang."""
LOCK_POLL_S = 0.1
"""Seconds between attempts to take the lock."""
_GRAPH_SETTINGS = {
    "micro_batch", "seq_len", "regularizer", "regularizer_source", "regularizer_sketch", "distractor", "distractor_count",
    "deterministic", "compile", "kernels", "activations", "precision", "loss_on", "recompute",
}  # fmt: skip
"""Settings under `train` that the compiled code depends on."""


def graph_key(config: CellConfig, *extra: str) -> str:
    """Return a hash, 32 hex digits, that is equal for cells whose networks compile to the same code.

    It covers all model settings but `init`, and those of training in `_GRAPH_SETTINGS`: micro-batch, length,
    regularizer, distractor, kernels, precision and more. Seed, learning rates and data play no part.

    Args:
        config: cell.
        *extra: other facts that the code depends on, such as hashes of sources and versions; their order matters.
    """
    model = config.model.model_dump(mode="json", exclude={"init"})
    train = config.train.model_dump(mode="json", include=_GRAPH_SETTINGS)
    return hashlib.sha256(repr((sorted(model.items()), sorted(train.items()), extra)).encode()).hexdigest()[:32]


class CompileLock:
    """File lock of the process that compiles one kind of network, shared through the folder of the compile cache.

    It is held from `acquire` until `mark_compiled` or `release`, or until the process ends in any way. Without a folder
    in which files can be locked, every process acquires it at once. The file `folder/key` stays; it is not empty once
    the network has been compiled.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / key
        self._file: int | None = None

    def acquire(self, meanwhile: Callable[[], None]) -> float:
        """Wait until no other process compiles this graph, at most LOCK_TIMEOUT_S (900); return the seconds waited.

        Does not wait, and does not lock, if the graph has been compiled before, or as soon as another process marks it
        as compiled. Returns normally after the timeout too, without the lock. Creates the folder and the file.

        Args:
            meanwhile: called about ten times a second while waiting; what it raises releases the lock and is passed on.
        """
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
        """Return True if there is nothing to wait for, False if another process holds the lock. Does not block.

        Takes the lock unless the graph is compiled already. Where files cannot be locked, gives up locking and returns
        True.
        """
        if self._file is None:
            return True
        try:
            # a non-empty file says that the graph is compiled: no lock is needed to read the cache
            if not os.fstat(self._file).st_size:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            self.release()
        return True

    def mark_compiled(self) -> None:
        """Note for all processes that the graph is compiled, and release the lock; call it after the first step.

        Does nothing if the file is not open. An error of writing the note is ignored.
        """
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, b"compiled\n", 0)
            self.release()

    def release(self) -> None:
        """Release the lock without having compiled; the next waiting process takes it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
