"""Command-line options that several commands of the sweep share."""

from __future__ import annotations

from typing import Annotated

import typer

from ...results.console import completion
from ..completion import grids, probes
from ..executors.registry import EXECUTORS

GridName = Annotated[
    str,
    typer.Argument(
        metavar="GRID", help="Grid file, or the name of a shipped grid such as quick.", autocompletion=grids
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting of every cell, such as train.tokens=5e4; needs --name; repeatable.",
    ),
]
Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Name of the sweep, instead of the grid's own.")
]
Executor = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="|".join(EXECUTORS.own),
        help="Where attempts run. "
        + "; ".join(f"{name}: {kind.description}" for name, kind in EXECUTORS.own.items())
        + ".",
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="MONEY/h", help="Price of a GPU-hour, or of a core-hour on the CPU, such as 2.50/h."
    ),
]
ProbeNames = Annotated[list[str] | None, typer.Option(autocompletion=probes)]
CellName = Annotated[str, typer.Argument(autocompletion=completion.cells)]
NamedSweep = Annotated[str | None, typer.Option(autocompletion=completion.sweeps)]
"""For `Documented` commands, each of which says what they mean there."""
