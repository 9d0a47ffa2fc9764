"""Shell completion of sweeps, cells and metrics, by the standard library's SQLite alone, for speed.

Completion never prints an error: without a readable database it offers fewer words.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from ..names import DATABASE, PUBLISHED, SHIPPED

READING_COMMANDS = ("dashboard", "export", "report", "show", "status")
"""Commands that can show built-in sweeps."""
MAX_CELLS = 300
WAIT_S = 0.1
"""Seconds to wait for the lock of a database."""

Offer = str | tuple[str, str]
"""A word, or a word and its description."""
Completion = Callable[[typer.Context, str], list[Offer]]


def silent(names: Completion) -> Completion:
    """Return the completion function with every exception turned into an empty offer; for use as a decorator."""

    @functools.wraps(names)
    def complete(ctx: typer.Context, incomplete: str) -> list[Offer]:
        try:
            return names(ctx, incomplete)
        except Exception:  # noqa: BLE001 - a message would be printed into the line that the user is typing
            return []

    return complete


@silent
def sweeps(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the sweeps of the database, the one launched last first, and built-in ones if the command shows them.

    Commands that show them are dashboard, export, report, show and status. The typed text is not considered; typer
    filters the offers.
    """
    own = _rows(ctx, "SELECT name FROM sweep ORDER BY launched_at DESC")
    return [*own, *((*PUBLISHED, *SHIPPED) if ctx.info_name in READING_COMMANDS else ())]


@silent
def reference_sweeps(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the sweeps to compare with: built-in ones, then those of the database."""
    return [*PUBLISHED, *SHIPPED, *_rows(ctx, "SELECT name FROM sweep ORDER BY launched_at DESC")]


@silent
def cells(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the slugs that begin with the typed text, sorted, at most 300 (MAX_CELLS): of one sweep or of all cells.

    The option --sweep, if it stands before on the line, names the sweep; cells of all its revisions are offered.
    """
    sweep = ctx.params.get("sweep")
    pattern = incomplete.replace("!", "!!").replace("%", "!%").replace("_", "!_") + "%"
    where, values = "slug LIKE ? ESCAPE '!'", [pattern]
    if isinstance(sweep, str):
        where += (
            " AND id IN (SELECT m.cell_id FROM revision_cell m JOIN revision r ON r.id = m.revision_id"
            " JOIN sweep s ON s.id = r.sweep_id WHERE s.name = ?)"
        )
        values.append(sweep)
    return _rows(ctx, f"SELECT DISTINCT slug FROM cell WHERE {where} ORDER BY slug LIMIT {MAX_CELLS}", values)


@silent
def sweeps_and_cells(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the names of sweeps, then the slugs of cells."""
    return [*sweeps(ctx, incomplete), *cells(ctx, incomplete)]


@silent
def metrics(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the metrics of all probes of the package."""
    from ..metrics import METRICS

    return list(dict.fromkeys(name for _, name in METRICS))


def _rows(ctx: typer.Context, query: str, values: Any = ()) -> list[Offer]:
    """Return the first column of a query as text; empty without a readable SQLite database, and for PostgreSQL.

    Args:
        ctx: context of the completion; its option --db names the database, else ATMA_DB, else the default file.
        query: SQL with placeholders.
        values: values of the placeholders.
    """
    address = str(ctx.params.get("db") or os.environ.get("ATMA_DB") or DATABASE).removeprefix("sqlite:///")
    path = Path(address).expanduser().absolute()
    if "://" in address or not path.is_file():
        return []
    import sqlite3  # every command imports this module

    # without a write-ahead log the file is complete, and SQLite need not create one to read it
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=WAIT_S)) as connection:
            return [str(row[0]) for row in connection.execute(query, values)]
    except sqlite3.Error:
        return []
