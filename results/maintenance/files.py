"""Checks of files that the database names, and of leftovers of imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection

from ..console.text import counted
from ..exchange.bundles import local_path
from ..exchange.import_files import STAGING
from ..weights import NO_HASH, recorded_hash, weights_change
from .finding import Finding, first_names
from .walk import ATTEMPT, PROVENANCE, attempt_label, attempts, is_missing

ANNOUNCED_BYTES = 10**9
"""Size of saved weights above which a line announces that they are read."""


def missing_files(connection: Connection, runs: Path) -> list[Finding]:
    """Return findings about missing weights, missing checkpoints and leftovers of killed imports.

    At most one warning each for weights and for checkpoints, and one note per leftover folder. Of checkpoints, only the
    newest one of each cell without a finished or diverged training is checked. Files at addresses elsewhere are not
    checked.

    Args:
        connection: open connection.
        runs: runs folder; it need not exist.
    """
    weights, newest, finished = [], {}, set()
    for row in attempts(connection, ATTEMPT.kind, ATTEMPT.state, ATTEMPT.weights, ATTEMPT.checkpoint):
        if row.weights and is_missing(runs, row.weights):
            weights.append(attempt_label(row, row.weights))
        if row.kind == "train" and row.state in ("done", "diverged"):
            finished.add(row.cell_id)
        elif row.kind == "train" and row.checkpoint:
            newest[row.cell_id] = row
    # finished cells have no checkpoints, and only the newest ones are kept
    gone = [
        attempt_label(row, row.checkpoint)
        for cell, row in newest.items()
        if cell not in finished and is_missing(runs, row.checkpoint)
    ]
    findings = []
    if weights:
        findings.append(
            Finding.warning(
                f"the kept weights of {counted(len(weights), 'attempt')} are not under {runs}: {first_names(weights)}",
                "restore the folders or name them with --runs; otherwise these cells cannot be evaluated until "
                "launch --retrain trains them again",
            )
        )
    if gone:
        findings.append(
            Finding.warning(
                f"the newest checkpoint of {len(gone)} unfinished cells is not under {runs}: {first_names(gone)}",
                "restore the folders or name them with --runs; otherwise the next launch trains these cells from "
                "the first step",
            )
        )
    for folder in sorted(runs.glob(f"{STAGING}*")) if runs.is_dir() else ():
        findings.append(
            Finding.note(f"{folder} was left by an import that was killed, unless one is running", "delete it")
        )
    return findings


def changed_weights(
    connection: Connection, runs: Path, *, read: bool = True, report_progress: Callable[[str], None] = lambda line: None
) -> list[Finding]:
    """Compare saved weights under `runs` with their recorded SHA-256, and return findings.

    An error per file that differs or cannot be read; one note each for weights without a hash and for weights at an
    address elsewhere, which are not read. Missing files are skipped.

    Args:
        connection: open connection.
        runs: runs folder.
        read: False reads no file and only notes the number and size of the files.
        report_progress: receives a line before files of 1 GB (10^9 bytes) or more in total are read.
    """
    unrecorded, elsewhere, files = [], [], []
    for row in attempts(connection, ATTEMPT.weights, PROVENANCE.extra):
        if row.weights is None:
            continue
        name = attempt_label(row, row.weights)
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
            report_progress(f"reading {size}, to compare them with their hashes; --skip-weights skips this")
        findings += [finding for path, recorded in files for finding in _weights_findings(path, recorded)]
    if unrecorded:
        text = f"the kept weights of {len(unrecorded)} attempts have {NO_HASH}: {first_names(unrecorded)}"
        findings.append(Finding.note(text, "nothing to do; newly stored weights have a hash"))
    if elsewhere:
        text = (
            f"the kept weights of {len(elsewhere)} attempts are not local and were not read: {first_names(elsewhere)}"
        )
        findings.append(Finding.note(text, "nothing to do; they are compared with their hashes when they are loaded"))
    return findings


def _weights_findings(path: Path, recorded: str) -> list[Finding]:
    """Return one error if the file differs from its recorded hash or cannot be read; empty otherwise."""
    try:
        line = weights_change(path, str(path), recorded)
    except OSError as error:
        line = f"{path}: the kept weights cannot be read: {error.strerror}; make the file readable"
    if line is None:
        return []
    text, _, remedy = line.partition("; ")
    return [Finding.error(text, remedy)]
