"""Options of commands that know what the sweep can do."""

from __future__ import annotations

from typing import Annotated

import typer

from ..scheduler.registry import EXECUTORS

Executor = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="|".join(EXECUTORS),
        help="Where attempts run. " + "; ".join(f"{name}: {kind.words}" for name, kind in EXECUTORS.items()) + ".",
    ),
]
