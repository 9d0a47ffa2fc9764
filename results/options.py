"""Options that several commands share, and how they print JSON. Imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Db = Annotated[str | None, typer.Option("--db", metavar="URL|FILE", help="Database; else ATMA_DB, else atma.db here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with the names of the database's columns.")]
Executor = Annotated[str, typer.Option("--executor", help="ray, or local: the same without Ray, on this machine.")]
Address = Annotated[
    str | None, typer.Option("--address", metavar="HOST:PORT", help="The Ray cluster with that head; else none.")
]
Runs = Annotated[Path | None, typer.Option("--runs", help="Folder for artifacts; else <db name>-runs beside it.")]
Cells = Annotated[
    int | None, typer.Option("--cells", metavar="N", min=1, help="Allow a grid of so many cells; else of 20,000.")
]
SweepName = Annotated[str | None, typer.Option("--sweep", help="Sweep by name; else the one launched last.")]


def as_text(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def print_json(value: Any, *, err: bool = False) -> None:
    typer.echo(as_text(value), nl=False, err=err)


def runs_folder(runs: Path | None, db: str | None, *, write: bool = False) -> Path:
    """The folder for artifacts; with `write` only one that can be made and written to, else StoreError or WriteRefused."""
    from ..results.store import default_runs

    where = (runs or default_runs(db)).absolute()
    if write:
        from ..results.files import check_folder

        check_folder(where, "--runs")
    return where
