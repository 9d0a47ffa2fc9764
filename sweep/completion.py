"""Shell completion of names that only the sweep package knows: grids and probes."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from ..grids import GRIDS
from ..results.console.completion import Offer, silent


@silent
def grids(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the names of the shipped grids, and the YAML files in the folder that `incomplete` names.

    Names are not filtered by `incomplete`; files come with their folder, sorted. Errors give an empty list.
    """
    folder = os.path.dirname(incomplete)
    files = sorted(Path(folder).glob("*.y*ml"))
    return [*sorted(path.stem for path in GRIDS.glob("*.yaml")), *(os.path.join(folder, path.name) for path in files)]


@silent
def probes(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the names of the built-in probes."""
    from .probes import PROBES

    return list(PROBES)
