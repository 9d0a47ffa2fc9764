"""Hashes of saved weights: the recorded value, and the comparison with a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

WEIGHTS_SHA256 = "weights_sha256"
"""Key in a provenance's `extra`: SHA-256 (hex) of the weights that its attempt saved."""
INITIAL_WEIGHTS = "initial_weights"
"""Key in a provenance's `extra`: source, sha256, new and unused tensors of the weights that a training began from."""
NO_HASH = "no hash recorded: kept by an earlier version"


def recorded_hash(extra: object) -> str | None:
    """Return the SHA-256 of saved weights in the `extra` of a provenance; None if it records none."""
    recorded = extra.get(WEIGHTS_SHA256) if isinstance(extra, Mapping) else None
    return None if recorded is None else str(recorded)


def weights_change(path: Path, address: str, recorded: str) -> str | None:
    """Return a message if a local file of saved weights differs from its recorded SHA-256; None if it is equal.

    Reads the entire file.

    Args:
        path: the file, or a local copy of it.
        address: its name in the message.
        recorded: SHA-256 in hex, lower case.

    Raises:
        OSError: the file cannot be read.
    """
    from .console.output_files import sha256  # every command imports this module

    actual = sha256(path)
    return None if actual == recorded else hash_mismatch_text(address, actual, recorded)


def hash_mismatch_text(address: str, actual: str, recorded: str) -> str:
    """Return the message about saved weights whose SHA-256 differs from the recorded one.

    Args:
        address: path or address of the weights.
        actual: SHA-256 of the file, hex.
        recorded: recorded SHA-256, hex.
    """
    return (
        f"{address}: the kept weights have changed since they were written: SHA-256 is {actual}, recorded was {recorded}; "
        "restore the file from a copy, or train the cell again: launch its grid with --retrain"
    )


def describe_initial(report: Mapping[str, Any]) -> str:
    """Return one line about the initial weights of a cell from the JSON values of its report."""
    parts = [f"initial weights of {report['source']} ({str(report['sha256'])[:12]})"]
    for name, text in (("new", "new tensors"), ("unused", "unused tensors of the source")):
        if report.get(name):
            parts.append(f"{text}: {', '.join(report[name])}")
    return "; ".join(parts)
