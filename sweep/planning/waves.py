"""The cells that a grid's `stop` adds to those that the grid lists: the same configurations at further seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...results.errors import SweepUnknown
from ...results.store.store import Store
from ..errors import GridError
from ..grid.cell import Cell, cell_id
from ..grid.grid import Grid


def needed(grid: Grid, cells: Sequence[Cell]) -> list[Cell]:
    """Of the grid's cells those that the contrast of its rule takes, at the first seed; none without a rule.

    Raises GridError where no cells tell that contrast.
    """
    if grid.stop is None:
        return []
    from ...results.stopping.contrast_estimator import Estimator

    first = [cell for cell in cells if cell.config.seed == grid.seeds[0]]
    design = grid.chosen.design if grid.chosen is not None else None
    found = Estimator([cell.axes | cell.levels for cell in first], grid.stop.contrast, design).needed
    if not found.any():
        one, document = grid.stop.contrast, grid.document
        raise GridError(
            document.path, document.line("stop"), "stop",
            f"no two cells of the grid differ in {one.axis} alone, {one.level} against {one.reference}, where it asks for them; change "
            "exclude, within or the contrast",
        )  # fmt: skip
    return [cell for cell, there in zip(first, found.tolist(), strict=True) if there]


def at(cells: Sequence[Cell], seeds: Sequence[int]) -> list[Cell]:
    """These configurations at other seeds, seed by seed."""
    return [_at(cell, seed) for seed in seeds for cell in cells]


def _at(cell: Cell, seed: int) -> Cell:
    config = cell.config.model_copy(update={"seed": seed})
    return replace(cell, id=cell_id(config), slug=f"{cell.slug.removesuffix(str(cell.config.seed))}{seed}", config=config)  # fmt: skip


def so_far(grid: Grid, cells: Sequence[Cell], store: Store | None) -> list[Cell]:
    """The grid's cells, and after them those of the further seeds that its rule begins with or that earlier looks have asked for.

    Raises GridError where no cells tell the contrast.
    """
    own = list(cells)
    if grid.stop is None:
        return own
    some = needed(grid, own)
    further = at(some, grid.stop.seeds[len(grid.seeds) :])
    known = _members(grid.name, store)
    asked = [place for place, cell in enumerate(further) if cell.id in known]
    reached = len(grid.seeds) + (asked[-1] // len(some) + 1 if asked else 0)
    seeds = next(n for n in grid.stop.looks if n >= reached)
    there = {cell.id for cell in own}
    return own + [cell for cell in further[: (seeds - len(grid.seeds)) * len(some)] if cell.id not in there]


def _members(sweep: str, store: Store | None) -> set[str]:
    try:
        return {cell for cell, _ in store.members(sweep)} if store is not None else set()
    except SweepUnknown:
        return set()


def every(grid: Grid, cells: Sequence[Cell]) -> list[Cell]:
    """All cells that there can be: the rule's at every one of its seeds."""
    if grid.stop is None:
        return list(cells)
    there = {cell.id for cell in cells}
    return [*cells, *(one for one in at(needed(grid, cells), grid.stop.seeds) if one.id not in there)]
