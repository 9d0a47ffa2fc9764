"""Options that several commands share, and how they print JSON. Imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import completion
from .streams import write_out

MAX_CELLS = 10**7
"""Cells of a grid; a database of 10,000 is measured."""
MAX_NUMBER = 2**31 - 1
"""Attempts, lines and context lengths that are looked for."""

Db = Annotated[
    str | None,
    typer.Option(
        "--db", metavar="URL|FILE", help="Database; without it the one that ATMA_DB names, else atma.db in this folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; its keys are named as the columns of the database.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST:PORT", help="Head of the Ray cluster to use; without it this machine alone."
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        metavar="FOLDER",
        help="Folder of checkpoints, weights, logs and corpora; without it <db name>-runs beside the database.",
    ),
]
Cells = Annotated[
    int | None,
    typer.Option(
        "--cells", metavar="N", min=1, max=MAX_CELLS, help="Allow a grid of up to N cells; without it 20,000."
    ),
]
SweepName = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="NAME",
        help="Name of the sweep; without it the one launched last.",
        autocompletion=completion.sweeps,
    ),
]

BY_NAME = "by id or slug, with or without its seed, or by the beginning of either"
"""The names of a cell that `find_cell` understands, for help texts."""


def as_text(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def print_json(value: Any, *, err: bool = False) -> None:
    write_out(as_text(value), err=err)


def runs_folder(runs: Path | None, db: str | None, *, write: bool = False) -> Path:
    """The folder for artifacts; with `write` only one that can be made and written to, else StoreError or WriteRefused."""
    from ..store.store import default_runs

    where = (runs or default_runs(db)).absolute()
    if write:
        from .output_files import check_folder

        check_folder(where, "--runs")
    return where
