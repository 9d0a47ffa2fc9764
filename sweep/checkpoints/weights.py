"""Kept weights compared with the hash that was recorded when they were written. Imports no torch."""

from __future__ import annotations

import functools
from pathlib import Path

from ...results.weights import weights_change
from ..errors import SweepError
from . import storage


class CheckpointError(SweepError):
    """Weights that are missing or damaged."""


def check_weights(path: Path, address: str, recorded: str | None) -> None:
    """Compare a local file of the kept weights at `address` with their recorded SHA-256 (None: none was recorded).

    Raises CheckpointError where they differ, OSError where the file cannot be read.
    """
    if recorded is not None and (line := weights_change(path, address, recorded)) is not None:
        raise CheckpointError(line)


def damage(address: str, recorded: str | None, *, fetch: bool = False) -> str | None:
    """Return one line about kept weights that cannot be read or differ from their recorded SHA-256; None for sound ones.

    A local file is hashed again only when its inode, size or times differ from last time. Weights elsewhere are compared
    when they are loaded, and here only with `fetch`, since that downloads them. A missing file is no damage.

    Raises StorageError.
    """
    folder, name = storage.split(address)
    location = storage.place(folder)
    is_local = isinstance(location, storage.LocalStorage)
    if recorded is None or not (fetch or is_local):
        return None
    with location.file(name) as path:
        try:
            status = path.stat()
            if not is_local:
                return weights_change(path, address, recorded)
            return _local_change(
                path, recorded, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{address}: the kept weights cannot be read: {error.strerror}; make the file readable"


@functools.lru_cache(maxsize=4096)
def _local_change(path: Path, recorded: str, version: tuple[int, ...]) -> str | None:
    """Return what `weights_change` says of one version of a local file. Raises OSError."""
    return weights_change(path, str(path), recorded)
