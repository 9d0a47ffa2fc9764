"""Cells at the further seeds of a grid's `stop`: which there are so far, and what a plan says of the looks and of their price."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...results.console.text import counted
from ...results.errors import SweepUnknown
from ...results.stopping import messages, stopping_rule
from ...results.store.store import Store
from ..errors import GridError
from ..grid.cell import Cell, cell_id
from ..grid.grid import Grid
from ..grid.sections import about
from . import cost_estimate, render
from .cost_estimate import Bill

if TYPE_CHECKING:
    from ...results.stopping.interim_analysis import StoppingStatus


def contrast_cells(grid: Grid, cells: Sequence[Cell]) -> list[Cell]:
    """Of the grid's cells those that the contrast of its rule takes, at the first seed; none without a rule.

    Raises GridError where no cells tell that contrast.
    """
    if grid.stop is None:
        return []
    from ...results.stopping.contrast_estimator import ContrastEstimator

    first = [cell for cell in cells if cell.config.seed == grid.seeds[0]]
    design = grid.chosen.design if grid.chosen is not None else None
    found = ContrastEstimator([cell.axes | cell.levels for cell in first], grid.stop.contrast, design).needed
    if not found.any():
        one, document = grid.stop.contrast, grid.document
        raise GridError(
            document.path, document.line("stop"), "stop",
            f"no two cells of the grid differ in {one.axis} alone, {one.level} against {one.reference}, where it asks for them; change "
            "exclude, within or the contrast",
        )  # fmt: skip
    return [cell for cell, there in zip(first, found.tolist(), strict=True) if there]


def at_seeds(cells: Sequence[Cell], seeds: Sequence[int]) -> list[Cell]:
    """These configurations at other seeds, seed by seed."""
    return [_at(cell, seed) for seed in seeds for cell in cells]


def _at(cell: Cell, seed: int) -> Cell:
    config = cell.config.model_copy(update={"seed": seed})
    return replace(cell, id=cell_id(config), slug=f"{cell.slug.removesuffix(str(cell.config.seed))}{seed}", config=config)  # fmt: skip


def with_further_seeds(grid: Grid, cells: Sequence[Cell], store: Store | None) -> list[Cell]:
    """The grid's cells, and after them those of the further seeds that its rule begins with or that earlier looks have asked for.

    Raises GridError where no cells tell the contrast.
    """
    own = list(cells)
    if grid.stop is None:
        return own
    some = contrast_cells(grid, own)
    further = at_seeds(some, grid.stop.seeds[len(grid.seeds) :])
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


def every_cell(grid: Grid, cells: Sequence[Cell]) -> list[Cell]:
    """All cells that there can be: the rule's at every one of its seeds."""
    if grid.stop is None:
        return list(cells)
    there = {cell.id for cell in cells}
    return [*cells, *(one for one in at_seeds(contrast_cells(grid, cells), grid.stop.seeds) if one.id not in there)]


@dataclass(frozen=True)
class StopOutlook:
    """A rule before it is carried out further."""

    grid: Grid
    configurations: int
    seeds: int
    """That there are cells of from the start, or since the last look."""
    looked: StoppingStatus | None
    """What the last launch with the same rule left; None without one."""
    most: Bill
    """Of all that there can be to do."""

    def told(self) -> list[str]:
        """A sentence a line, without an end."""
        asked = self.grid.stop
        assert asked is not None
        metric = about(asked.contrast)
        lines = [messages.plan(asked, metric, self.configurations)]
        lines += [
            f"stop: {one}"
            for one in (messages.status_sentences(self.looked, metric) if self.looked is not None else ())
        ]
        if self.looked is None or self.looked.verdict == "open":
            most = render.short(self.most).removeprefix("price: ")
            lines.append(
                f"stop: the price is that of {counted(self.seeds, 'seed')}; should all {asked.most} be needed, it is {most}"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """The same by names; widths in the number's own unit."""
        assert self.grid.stop is not None
        looks = self.looked.looks if self.looked is not None else ()
        return stopping_rule.as_option(self.grid.stop) | {
            "looks_after": list(self.grid.stop.looks),
            "configurations": self.configurations,
            "seeds_now": self.seeds,
            # JSON has no NaN
            "looks": [{name: None if math.isnan(one) else one for name, one in vars(look).items()} for look in looks],
            "verdict": self.looked.verdict if self.looked is not None else None,
            "price_of_all": cost_estimate.as_json(self.most),
        }


def outlook(
    grid: Grid, cells: Sequence[Cell], store: Store | None, bill: Callable[[Sequence[Cell]], Bill]
) -> StopOutlook | None:
    """Of a grid with its cells so far; None without a rule. `bill`: the price of what is left of some cells."""
    if grid.stop is None:
        return None
    needed = contrast_cells(grid, cells)
    there = {cell.id for cell in cells}
    seeds = sum(at_seeds(needed[:1], [seed])[0].id in there for seed in grid.stop.seeds)
    return StopOutlook(grid, len(needed), seeds, _looked(grid, store), bill(every_cell(grid, cells)))


def as_json(found: StopOutlook | None) -> Mapping[str, Any]:
    """Nothing without a rule."""
    return {} if found is None else {"stop": found.as_json()}


def _looked(grid: Grid, store: Store | None) -> StoppingStatus | None:
    # SciPy, which other grids need not wait for
    from ...results.stopping.interim_analysis import stopping_status

    try:
        found = stopping_status(store, grid.name) if store is not None else None
    except SweepUnknown:
        return None
    return found if found is not None and found.rule == grid.stop else None
