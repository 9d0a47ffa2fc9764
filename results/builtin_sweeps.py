"""Sweeps that every reading command knows, whatever the database holds: published numbers, and sweeps of ours that come along."""

from __future__ import annotations

from pathlib import Path

from . import paper, shipped
from .console.text import did_you_mean
from .errors import StoreMissing, SweepUnknown
from .names import PUBLISHED, SHIPPED, quoted_short
from .store.database_connection import WAIT_TIMEOUT_S
from .store.store import Store, open_store


def store_with_builtin(store: Store, sweep: str) -> Store:
    """The store itself when it holds the sweep, else, for one that is known, a temporary one that the whole process shares.

    Raises SweepUnknown, and StoreError when a sweep of one's own has a published name, from a time when it could.
    """
    try:
        return paper.with_published(store, sweep)
    except SweepUnknown:
        if not shipped.is_shipped(sweep):
            raise
        return shipped.shared(sweep)


def open_store_with_builtins(
    db: str | Path | None, sweep: str | None, *, patience: float = WAIT_TIMEOUT_S, read_only: bool = False
) -> Store:
    """The database; when a known sweep is asked for that it lacks, or there is no database, a temporary one with that.

    Opened, and raises, as open_store does; StoreMissing names the sweeps that need no database.
    """
    try:
        store = open_store(db, patience=patience, read_only=read_only)
    except StoreMissing as error:
        if paper.is_published(sweep):
            return paper.shared_published(str(sweep))
        if shipped.is_shipped(sweep):
            return shipped.shared(str(sweep))
        raise StoreMissing(f"{error}{_offer(sweep)}") from error
    return store_with_builtin(store, str(sweep)) if paper.is_published(sweep) or shipped.is_shipped(sweep) else store


def _offer(sweep: str | None) -> str:
    """Return the end of an error about a missing database: the sweeps that need none, or those nearest to the name."""
    names = (*PUBLISHED, *SHIPPED)
    if sweep is None:
        return f"; without one there is --sweep printed-v2, the numbers of the paper, and {', '.join(name for name in names if name != 'printed-v2')}"
    return f"; {quoted_short(sweep)} is none of the sweeps that need no database: {', '.join(names)}{did_you_mean(sweep, names)}"


def nothing_launched(error: StoreMissing) -> list[str]:
    """Return what a list of sweeps says where there is no database yet: the fact, and commands to begin with."""
    return [
        f"nothing has been launched here yet: {str(error).partition(';')[0]}",
        "next:",
        "  atma-sweep launch quick --dry-run               shows the plan of twelve small models, for any laptop",
        "  atma-sweep launch quick                         trains and evaluates them",
        "  atma-sweep report --sweep printed-v2 --table 6  prints the paper's complete results, which need no database",
    ]
