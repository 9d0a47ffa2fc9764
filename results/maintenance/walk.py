"""Iteration over attempts with their provenance, files and processes, for db check, delete and db forget."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import select

from ..exchange.bundles import local_path
from ..store import queries
from ..store.records import DEAD_AFTER_S, find_process, is_local_pid
from ..store.schema import Base

TABLES = Base.metadata.tables
ATTEMPT, PROVENANCE = TABLES["attempt"].c, TABLES["provenance"].c


def attempts(session: Any, *columns: Any, cells: Collection[str] | None = None) -> Iterator[Any]:
    """Yield cell id, number and the given columns of each attempt by age, of these cells or of all.

    Rows are named tuples of SQLAlchemy; columns of PROVENANCE are None for an attempt without provenance. Attempts of
    every state and kind are included. Other columns are not read, so that a damaged one does not hide findings about the rest.

    Args:
        session: session or connection.
        *columns: columns of ATTEMPT and PROVENANCE.
        cells: cell ids; None for all.
    """
    source = TABLES["attempt"].outerjoin(TABLES["provenance"], PROVENANCE.attempt_id == ATTEMPT.id)
    query = select(ATTEMPT.cell_id, ATTEMPT.number, *columns).select_from(source).order_by(ATTEMPT.id)
    if cells is None:
        yield from session.execute(query)
    else:
        yield from queries.rows_in(session, query, ATTEMPT.cell_id, sorted(cells))


def attempt_label(row: Any, detail: str) -> str:
    """Return the text by which a finding names an attempt."""
    return f"{row.cell_id} attempt {row.number} ({detail})"


def is_gone(attempt: Any) -> bool:
    """Return True if an attempt's process should run on this host and does not.

    False for an attempt of another host; True for one on this host without a recorded pid.
    """
    return is_local_pid(attempt.host, attempt.pid_space) and find_process(attempt.pid, attempt.pid_started) is None


def attempt_is_alive(attempt: Any) -> bool:
    """Return True if a running attempt's process is alive, or, on another host, if its heartbeat is recent.

    Recent means less than 300 seconds (DEAD_AFTER_S) ago by this machine's clock. The attempt's state is not examined.
    """
    if is_local_pid(attempt.host, attempt.pid_space):
        return not is_gone(attempt)
    return datetime.now(UTC) - attempt.heartbeat_at < timedelta(seconds=DEAD_AFTER_S)


def is_missing(runs: Path, address: str) -> bool:
    """Return True if a local file that an attempt names is not under `runs`; False for remote addresses."""
    local = local_path(address)
    return local is not None and not (runs / local).exists()
