"""Names that a shell completes: sweeps, cells and metrics. They come from the standard library's SQLite alone, to be quick.

A completion is silent: without a database, or with one that cannot be read, it offers less.
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

READERS = ("dashboard", "export", "report", "show", "status")
"""Commands that know the sweeps which come along."""
MOST_CELLS = 300
WAIT_S = 0.1
"""For the lock of a database that is written to."""

Offer = str | tuple[str, str]
"""A word, or a word and its description."""
Completion = Callable[[typer.Context, str], list[Offer]]


def silent(names: Completion) -> Completion:
    """Return the completion that offers nothing where `names` fails, whatever the failure."""

    @functools.wraps(names)
    def complete(ctx: typer.Context, incomplete: str) -> list[Offer]:
        try:
            return names(ctx, incomplete)
        except Exception:  # noqa: BLE001 - a message would be printed into the line that is being typed
            return []

    return complete


@silent
def sweeps(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the sweeps of the database, the one launched last first, and those that come along."""
    own = _rows(ctx, "SELECT name FROM sweep ORDER BY launched_at DESC")
    return [*own, *((*PUBLISHED, *SHIPPED) if ctx.info_name in READERS else ())]


@silent
def reference_sweeps(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the sweeps to compare with: those that come along, and those of the database."""
    return [*PUBLISHED, *SHIPPED, *_rows(ctx, "SELECT name FROM sweep ORDER BY launched_at DESC")]


@silent
def cells(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the slugs of the sweep that --sweep names, else of every cell, that begin so."""
    sweep = ctx.params.get("sweep")
    pattern = incomplete.replace("!", "!!").replace("%", "!%").replace("_", "!_") + "%"
    where, values = "slug LIKE ? ESCAPE '!'", [pattern]
    if isinstance(sweep, str):
        where += (
            " AND id IN (SELECT m.cell_id FROM revision_cell m JOIN revision r ON r.id = m.revision_id"
            " JOIN sweep s ON s.id = r.sweep_id WHERE s.name = ?)"
        )
        values.append(sweep)
    return _rows(ctx, f"SELECT DISTINCT slug FROM cell WHERE {where} ORDER BY slug LIMIT {MOST_CELLS}", values)


@silent
def sweeps_and_cells(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the names of sweeps, then the slugs of cells."""
    return [*sweeps(ctx, incomplete), *cells(ctx, incomplete)]


@silent
def metrics(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the metrics of every probe that the program knows."""
    from ..metrics import METRICS

    return list(dict.fromkeys(name for _, name in METRICS))


def _rows(ctx: typer.Context, query: str, values: Any = ()) -> list[Offer]:
    """Return the first column of a query; nothing without a SQLite database."""
    word = str(ctx.params.get("db") or os.environ.get("ATMA_DB") or DATABASE).removeprefix("sqlite:///")
    path = Path(word).expanduser().absolute()
    if "://" in word or not path.is_file():
        return []
    import sqlite3  # every command imports this module

    # without a log beside it the file is all there is, and SQLite need not make one to read it
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=WAIT_S)) as connection:
            return [str(row[0]) for row in connection.execute(query, values)]
    except sqlite3.Error:
        return []
