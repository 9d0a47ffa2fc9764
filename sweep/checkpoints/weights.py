"""Verification of final weights against the hash that was recorded when they were written. Imports no torch."""

from __future__ import annotations

import functools
from pathlib import Path

from ...results.weights import weights_change
from ..errors import SweepError
from . import storage


class CheckpointError(SweepError):
    """Exception for weights that are missing or damaged."""


def check_weights(path: Path, address: str, recorded: str | None) -> None:
    """Compare a local copy of final weights with their recorded SHA-256.

    Args:
        path: Local file.
        address: Address of the weights, for the error message.
        recorded: SHA-256 in hex; None skips the check.

    Raises:
        CheckpointError: The hashes differ.
        OSError: The file cannot be read.
    """
    if recorded is not None and (line := weights_change(path, address, recorded)) is not None:
        raise CheckpointError(line)


def damage(address: str, recorded: str | None, *, fetch: bool = False) -> str | None:
    """Return one line about final weights that are damaged, or None.

    Damaged are weights that cannot be read or differ from their recorded SHA-256. A missing file is no damage. Nothing
    is checked without a recorded hash. A local file is hashed again only when its inode, size or times have changed
    since this process last did so.

    Args:
        address: Address of the weights, a full one.
        recorded: SHA-256 in hex; None skips the check.
        fetch: Download and compare remote weights too, which are otherwise checked only when they are loaded.

    Raises:
        StorageAddressError: The address is invalid.
        StorageError: The storage location cannot be reached.
    """
    folder, name = storage.split(address)
    location = storage.open_storage(folder)
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
    """Return the result of `weights_change` for one version of a local file, cached: None if it is unchanged.

    Args:
        path: The file.
        recorded: SHA-256 in hex.
        version: Inode, size and times of the file, as part of the cache's key.

    Raises:
        OSError: The file cannot be read.
    """
    return weights_change(path, str(path), recorded)
