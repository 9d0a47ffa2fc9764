"""Names that a shell completes and that only the sweep knows: grids and probes."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from ..grids import GRIDS
from ..results.console.completion import Offer, silent


@silent
def grids(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the shipped grids, and the grid files in the folder of what is typed."""
    folder = os.path.dirname(incomplete)
    files = sorted(Path(folder).glob("*.y*ml"))
    return [*sorted(path.stem for path in GRIDS.glob("*.yaml")), *(os.path.join(folder, path.name) for path in files)]


@silent
def probes(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the probes of this release."""
    from .probes import PROBES

    return list(PROBES)
