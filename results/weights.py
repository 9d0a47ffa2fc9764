"""The hash of kept weights: where it is recorded, and how a file is compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

WEIGHTS_SHA256 = "weights_sha256"
"""Key of a provenance's `extra`: SHA-256 of the weights that its attempt kept, hex."""
NO_HASH = "no hash recorded: kept by an earlier version"


def recorded_hash(extra: object) -> str | None:
    """Return the SHA-256 of kept weights that the `extra` of a provenance records; None where it records none."""
    recorded = extra.get(WEIGHTS_SHA256) if isinstance(extra, Mapping) else None
    return None if recorded is None else str(recorded)


def weights_change(path: Path, address: str, recorded: str) -> str | None:
    """Return one line about a local file of kept weights that differs from its recorded SHA-256; None where it does not.

    Args:
        path: The file, or a local copy of it.
        address: Its name in the line.
        recorded: SHA-256 in hex.

    Raises:
        OSError: The file cannot be read.
    """
    from .console.output_files import sha256  # every command imports this module

    actual = sha256(path)
    return None if actual == recorded else difference(address, actual, recorded)


def difference(address: str, actual: str, recorded: str) -> str:
    """Return the line about kept weights at `address` whose SHA-256 is not the recorded one."""
    return (
        f"{address}: the kept weights have changed since they were written: SHA-256 is {actual}, recorded was {recorded}; "
        "restore the file from a copy, or train the cell again: launch its grid with --retrain"
    )
