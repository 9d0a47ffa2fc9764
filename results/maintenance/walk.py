"""The walk over attempts with their origins, files and processes: what db check, delete and db forget look at."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import select

from ..exchange.bundles import local_path
from ..store import queries
from ..store.records import DEAD_AFTER_S, find, here
from ..store.schema import Base

T = Base.metadata.tables
ATTEMPT, PROVENANCE = T["attempt"].c, T["provenance"].c


def attempts(session: Any, *columns: Any, cells: Collection[str] | None = None) -> Iterator[Any]:
    """Yield cell, number and these columns of ATTEMPT and PROVENANCE of each attempt by age, of these cells or of all.

    Columns that are not asked for are not read, so that a damaged one hides no finding about the others.
    """
    source = T["attempt"].outerjoin(T["provenance"], PROVENANCE.attempt_id == ATTEMPT.id)
    query = select(ATTEMPT.cell_id, ATTEMPT.number, *columns).select_from(source).order_by(ATTEMPT.id)
    if cells is None:
        yield from session.execute(query)
    else:
        yield from queries.rows_in(session, query, ATTEMPT.cell_id, sorted(cells))


def label(row: Any, detail: str) -> str:
    """Return how a finding names an attempt."""
    return f"{row.cell_id} attempt {row.number} ({detail})"


def is_gone(attempt: Any) -> bool:
    """Return whether an attempt's process would run on this host and does not."""
    return here(attempt.host, attempt.pid_space) and find(attempt.pid, attempt.pid_started) is None


def attempt_is_alive(attempt: Any) -> bool:
    """Return whether a running attempt's process lives; where that cannot be seen, whether its heartbeat is recent."""
    if here(attempt.host, attempt.pid_space):
        return not is_gone(attempt)
    return datetime.now(UTC) - attempt.heartbeat_at < timedelta(seconds=DEAD_AFTER_S)


def is_missing(runs: Path, address: str) -> bool:
    """Return whether a file that an attempt names on this machine is not under `runs`."""
    local = local_path(address)
    return local is not None and not (runs / local).exists()
