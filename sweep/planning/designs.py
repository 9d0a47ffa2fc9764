"""What a launch says of the partial design of its grid, also beside the one that was launched before."""

from __future__ import annotations

from collections.abc import Sequence

from ...results.console.text import counted
from ...results.designs.design_option import design_of
from ...results.errors import SweepUnknown
from ...results.store.store import Store
from ..grid.cell import Cell
from ..grid.grid import Grid


def told(grid: Grid, cells: Sequence[Cell], store: Store | None) -> list[str]:
    """Sentences of the grid's design, a line each; of one that leaves out cells of the design launched before, how many."""
    found = grid.chosen.told() if grid.chosen is not None else []
    return [*found, *_left(grid.name, cells, store)]


def _left(sweep: str, cells: Sequence[Cell], store: Store | None) -> list[str]:
    try:
        last = store.revision(sweep) if store is not None else None
    except SweepUnknown:
        last = None
    if store is None or last is None or design_of(last.options) is None:
        return []
    before = {state.cell_id for state in store.cell_states(sweep, revision=last.number)}
    gone = len(before - {cell.id for cell in cells})
    if not gone:
        return [
            f"design: all {counted(len(before), 'cell')} of the design launched before are among these {len(cells)}"
        ]
    return [
        f"design: {gone} of the {counted(len(before), 'cell')} of the design launched before are not among these {len(cells)}; they stay in the "
        "database (report --orphans). Designs hold smaller ones of the same grid, contrasts, method and model"
    ]
