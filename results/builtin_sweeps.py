"""Built-in sweeps, which every reading command can show without a database.

They are published numbers (results/paper) and shipped sweeps (results/shipped).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import paper, shipped
from .console.text import did_you_mean
from .errors import StoreMissing, SweepUnknown
from .names import PUBLISHED, SHIPPED, quoted_short
from .store.database_connection import WAIT_TIMEOUT_S
from .store.store import Store, open_store


def store_with_builtin(store: Store, sweep: str) -> Store:
    """Return the store if it holds the sweep, else, for a built-in sweep, a temporary store shared by the process.

    Built-in sweeps are those of the paper and the shipped ones. Loads the temporary store at the first request.

    Raises:
        SweepUnknown: the sweep is in neither.
        StoreError: a sweep of the user has the name of a published one (possible in old databases).
    """
    try:
        return paper.with_published(store, sweep)
    except SweepUnknown:
        if not shipped.is_shipped(sweep):
            raise
        return shipped.shipped_store(sweep)


def open_store_with_builtins(
    db: str | Path | None, sweep: str | None, *, patience: float = WAIT_TIMEOUT_S, read_only: bool = False
) -> Store:
    """Open the database, or a temporary one for a built-in sweep that it lacks or if there is no default database.

    A sweep that is not built in is not looked up here. Arguments and errors are those of `store_opener`.
    """
    return store_opener(db, sweep, patience=patience, read_only=read_only)()


def store_opener(
    db: str | Path | None, sweep: str | None, *, patience: float = WAIT_TIMEOUT_S, read_only: bool = False
) -> Callable[[], Store]:
    """Open the database, and return a function that returns it, or a temporary one with a built-in sweep.

    That function loads the built-in sweep, which takes seconds.

    Args:
        db: database URL, file, or None for the default.
        sweep: requested sweep; None for the one launched last.
        patience: seconds that reads and writes wait for a locked or unreachable database.
        read_only: no connection can change anything; a temporary database is not read-only.

    Raises:
        StoreMissing: there is no database, and it was named, by ATMA_DB too, or the sweep is not built in; the message names the
            built-in sweeps.
        StoreError: as open_store.
    """
    try:
        store = open_store(db, patience=patience, read_only=read_only)
    except StoreMissing as error:
        if not is_builtin(sweep):
            raise StoreMissing(f"{error}{_offer(sweep)}") from error
        if db is not None or os.environ.get("ATMA_DB"):
            # a misspelled path must not show other numbers than those of the file that was meant
            fact = str(error).partition(";")[0]
            remedy = "unset ATMA_DB" if db is None else "omit --db"
            raise StoreMissing(f"{fact}; sweep {sweep} is built in: {remedy} to read it without a database") from error
        return partial(paper.shared_published if paper.is_published(sweep) else shipped.shipped_store, str(sweep))
    return partial(store_with_builtin, store, str(sweep)) if is_builtin(sweep) else lambda: store


def is_builtin(sweep: str | None) -> bool:
    """Return True if it is the name of a built-in sweep."""
    return paper.is_published(sweep) or shipped.is_shipped(sweep)


def _offer(sweep: str | None) -> str:
    """Return the end of the error about a missing database, from its semicolon on.

    It names the built-in sweeps, and for a requested name those that are similar.
    """
    names = (*PUBLISHED, *SHIPPED)
    if sweep is None:
        return (
            "; these sweeps need no database: printed-v2 (the paper's numbers), "
            f"{', '.join(name for name in names if name != 'printed-v2')}"
        )
    return (
        f"; {quoted_short(sweep)} is not one of the sweeps that need no database: "
        f"{', '.join(names)}{did_you_mean(sweep, names)}"
    )


def nothing_launched(error: StoreMissing) -> list[str]:
    """Return the lines of a list of sweeps without a database: the fact (from `error`), and commands to start with."""
    return [
        f"nothing has been launched here yet: {str(error).partition(';')[0]}",
        "next:",
        "  atma-sweep launch quick --dry-run               shows the plan of twelve small models, for any laptop",
        "  atma-sweep launch quick                         trains and evaluates them",
        "  atma-sweep report --sweep printed-v2 --table 6  prints the paper's complete results, which need no database",
    ]
