"""Files that the database names and that are not there, and those that nobody needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection

from ..console.text import counted
from ..exchange.bundles import local_path
from ..exchange.import_files import STAGING
from ..weights import NO_HASH, recorded_hash, weights_change
from .finding import Finding, some
from .walk import ATTEMPT, PROVENANCE, attempts, is_missing, label

ANNOUNCED_BYTES = 10**9
"""Bytes of kept weights from which on it is said beforehand that they are read."""


def missing_files(connection: Connection, runs: Path) -> list[Finding]:
    """Weights that are gone, and checkpoints that would be gone on from; and folders of imports that were killed."""
    weights, newest, finished = [], {}, set()
    for row in attempts(connection, ATTEMPT.kind, ATTEMPT.state, ATTEMPT.weights, ATTEMPT.checkpoint):
        if row.weights and is_missing(runs, row.weights):
            weights.append(label(row, row.weights))
        if row.kind == "train" and row.state in ("done", "diverged"):
            finished.add(row.cell_id)
        elif row.kind == "train" and row.checkpoint:
            newest[row.cell_id] = row
    # a finished cell has its checkpoints removed, and older ones make room for newer ones
    gone = [
        label(row, row.checkpoint)
        for cell, row in newest.items()
        if cell not in finished and is_missing(runs, row.checkpoint)
    ]
    findings = []
    if weights:
        findings.append(
            Finding.warning(
                f"the kept weights of {counted(len(weights), 'attempt')} are not under {runs}: {some(weights)}",
                "bring the folders back or name them with --runs; else those cells can be evaluated no more, "
                "and launch --retrain trains them again",
            )
        )
    if gone:
        findings.append(
            Finding.warning(
                f"the newest checkpoint of {len(gone)} unfinished cells is not under {runs}: {some(gone)}",
                "bring the folders back or name them with --runs; else the next launch starts them anew",
            )
        )
    for left in sorted(runs.glob(f"{STAGING}*")) if runs.is_dir() else ():
        findings.append(
            Finding.note(f"{left} was left by an import that was killed, unless one is running", "delete it")
        )
    return findings


def changed_weights(
    connection: Connection, runs: Path, *, read: bool = True, tell: Callable[[str], None] = lambda line: None
) -> list[Finding]:
    """Compare kept weights under `runs` with the SHA-256 that was recorded when they were written.

    Without `read` their number and size is a note instead; `tell` gets a line before much is read. Files that are missing
    are not found here.
    """
    unrecorded, elsewhere, files = [], [], []
    for row in attempts(connection, ATTEMPT.weights, PROVENANCE.extra):
        if row.weights is None:
            continue
        name = label(row, row.weights)
        local, recorded = local_path(row.weights), recorded_hash(row.extra)
        if local is None:
            elsewhere.append(name)
        elif not (runs / local).is_file():
            continue
        elif recorded is None:
            unrecorded.append(name)
        else:
            files.append((runs / local, recorded))
    size = f"{len(files)} files of kept weights, {sum(path.stat().st_size for path, _ in files) / 1e9:,.1f} GB"
    findings = []
    if files and not read:
        findings.append(
            Finding.note(f"{size}, were not read", "check without --skip-weights compares them with their hashes")
        )
    elif files:
        if sum(path.stat().st_size for path, _ in files) >= ANNOUNCED_BYTES:
            tell(f"reading {size}, to compare them with their hashes; --skip-weights leaves that out")
        findings += [finding for path, recorded in files for finding in _compared(path, recorded)]
    if unrecorded:
        what = f"the kept weights of {len(unrecorded)} attempts have {NO_HASH}: {some(unrecorded)}"
        findings.append(Finding.note(what, "nothing; what is trained from now on has a hash"))
    if elsewhere:
        what = f"the kept weights of {len(elsewhere)} attempts are not local and were not read: {some(elsewhere)}"
        findings.append(Finding.note(what, "nothing; they are compared with their hashes when they are loaded"))
    return findings


def _compared(path: Path, recorded: str) -> list[Finding]:
    """Return one error if the file differs from its recorded hash or cannot be read."""
    try:
        line = weights_change(path, str(path), recorded)
    except OSError as error:
        line = f"{path}: the kept weights cannot be read: {error.strerror}; make the file readable"
    if line is None:
        return []
    what, _, remedy = line.partition("; ")
    return [Finding.error(what, remedy)]
