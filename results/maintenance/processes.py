"""Attempts that are marked running and do not run."""

from __future__ import annotations

from sqlalchemy import Connection, select

from ..counts import counted
from ..store.processes import find, here
from ..store.schema import Base
from .finding import Finding, some


def dead(connection: Connection) -> list[Finding]:
    """Attempts marked running whose process, on this host, is gone."""
    attempt = Base.metadata.tables["attempt"].c
    query = select(attempt.cell_id, attempt.number, attempt.pid, attempt.pid_started, attempt.host, attempt.pid_space)
    gone = [
        f"{row.cell_id} attempt {row.number} (pid {row.pid})"
        for row in connection.execute(query.where(attempt.state == "running"))
        if here(row.host, row.pid_space) and find(row.pid, row.pid_started) is None
    ]
    if not gone:
        return []
    return [
        Finding(
            severity="warning",
            what=f"marked running, and the process is gone: {counted(len(gone), 'attempt')}: {some(gone)}",
            remedy="launch the grid again; it marks them interrupted and goes on from their checkpoints",
        )
    ]
