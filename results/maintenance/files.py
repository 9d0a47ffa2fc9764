"""Files that the database names and that are not there, and those that nobody needs."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, select

from ..counts import counted
from ..exchange.bundles import local_path
from ..exchange.import_files import STAGING
from ..store.schema import Base
from .finding import Finding, some


def missing_files(connection: Connection, runs: Path) -> list[Finding]:
    """Weights that are gone, and checkpoints that would be gone on from; and folders of imports that were killed."""
    attempt = Base.metadata.tables["attempt"].c
    columns = (attempt.cell_id, attempt.number, attempt.kind, attempt.state, attempt.weights, attempt.checkpoint)
    weights, newest, finished = [], {}, set()
    for row in connection.execute(select(*columns).order_by(attempt.id)):
        if row.weights and _missing(runs, row.weights):
            weights.append(f"{row.cell_id} attempt {row.number} ({row.weights})")
        if row.kind == "train" and row.state in ("done", "diverged"):
            finished.add(row.cell_id)
        elif row.kind == "train" and row.checkpoint:
            newest[row.cell_id] = row
    # a finished cell has its checkpoints removed, and older ones make room for newer ones
    gone = [
        f"{cell} attempt {row.number} ({row.checkpoint})"
        for cell, row in newest.items()
        if cell not in finished and _missing(runs, row.checkpoint)
    ]
    findings = []
    if weights:
        findings.append(
            Finding(
                severity="warning",
                what=f"the kept weights of {counted(len(weights), 'attempt')} are not under {runs}: {some(weights)}",
                remedy="bring the folders back or name them with --runs; else those cells can be evaluated no more, "
                "and launch --retrain trains them again",
            )
        )
    if gone:
        findings.append(
            Finding(
                severity="warning",
                what=f"the newest checkpoint of {len(gone)} unfinished cells is not under {runs}: {some(gone)}",
                remedy="bring the folders back or name them with --runs; else the next launch starts them anew",
            )
        )
    for left in sorted(runs.glob(f"{STAGING}*")) if runs.is_dir() else ():
        findings.append(
            Finding(
                severity="note",
                what=f"{left} was left by an import that was killed, unless one is running",
                remedy="delete it",
            )
        )
    return findings


def _missing(runs: Path, address: str) -> bool:
    local = local_path(address)
    return local is not None and not (runs / local).exists()
