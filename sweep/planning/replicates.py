"""Additional seeds of a grid's stopping rule: the cells so far, the outlook on further looks, and the price."""

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
from ..grid.sections import contrast_metric
from . import cost_estimate, render
from .cost_estimate import Bill

if TYPE_CHECKING:
    from ...results.stopping.interim_analysis import StoppingStatus


def contrast_cells(grid: Grid, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells that the stopping rule's contrast compares, at the grid's first seed; empty without a rule.

    They keep the order of `cells`.

    Raises:
        GridError: If no two cells differ in the contrast's axis alone, at its level and its reference.
    """
    if grid.stop is None:
        return []
    from ...results.stopping.contrast_estimator import ContrastEstimator

    first = [cell for cell in cells if cell.config.seed == grid.seeds[0]]
    design = grid.chosen.design if grid.chosen is not None else None
    is_needed = ContrastEstimator(
        [cell.axes | cell.levels for cell in first], grid.stop.contrast, design
    ).used_configurations
    if not is_needed.any():
        contrast, document = grid.stop.contrast, grid.document
        raise GridError(
            document.path, document.line("stop"), "stop",
            f"no two cells within the levels of stop differ only in {contrast.axis} ({contrast.level} against {contrast.reference}); change "
            "exclude, within or the contrast",
        )  # fmt: skip
    return [cell for cell, is_compared in zip(first, is_needed.tolist(), strict=True) if is_compared]


def at_seeds(cells: Sequence[Cell], seeds: Sequence[int]) -> list[Cell]:
    """Return copies of the cells at other seeds: all cells at the first of `seeds`, then all at the next.

    The copies have ids and slugs of their own; everything else of the config is shared.
    """
    return [_at_seed(cell, seed) for seed in seeds for cell in cells]


def _at_seed(cell: Cell, seed: int) -> Cell:
    """Return a copy of the cell at another seed, with its own id and slug; the slug must end with the old seed."""
    config = cell.config.model_copy(update={"seed": seed})
    return replace(cell, id=cell_id(config), slug=f"{cell.slug.removesuffix(str(cell.config.seed))}{seed}", config=config)  # fmt: skip


def with_further_seeds(grid: Grid, cells: Sequence[Cell], store: Store | None) -> list[Cell]:
    """Return the grid's cells, followed by those of additional seeds that the stopping rule needs so far.

    The additional cells are those that the rule's contrast compares, seed by seed. They reach up to the first look
    (interim analysis) at or beyond the largest seed that the sweep already has in the database. A new sweep gets those
    up to the first look. Without a rule, the cells are returned alone.

    Args:
        grid: The grid.
        cells: Its cells at the seeds of the file.
        store: Database; None counts as an empty one.

    Raises:
        GridError: If the grid has no pair of cells for the rule's contrast.
    """
    own_cells = list(cells)
    if grid.stop is None:
        return own_cells
    compared = contrast_cells(grid, own_cells)
    further = at_seeds(compared, grid.stop.seeds[len(grid.seeds) :])
    member_ids = _members(grid.name, store)
    requested = [index for index, cell in enumerate(further) if cell.id in member_ids]
    reached = len(grid.seeds) + (requested[-1] // len(compared) + 1 if requested else 0)
    seeds = next(n for n in grid.stop.seeds_at_looks if n >= reached)
    cell_ids = {cell.id for cell in own_cells}
    return own_cells + [
        cell for cell in further[: (seeds - len(grid.seeds)) * len(compared)] if cell.id not in cell_ids
    ]


def _members(sweep: str, store: Store | None) -> set[str]:
    """Return the ids of the cells of a sweep; empty without a database or for an unknown sweep."""
    try:
        return {cell for cell, _ in store.members(sweep)} if store is not None else set()
    except SweepUnknown:
        return set()


def every_cell(grid: Grid, cells: Sequence[Cell]) -> list[Cell]:
    """Return the grid's cells, followed by those of all further seeds that the stopping rule may ever add.

    Without a rule, only the cells. Raises GridError if the grid has no pair of cells for the rule's contrast.
    """
    if grid.stop is None:
        return list(cells)
    cell_ids = {cell.id for cell in cells}
    return [
        *cells,
        *(cell for cell in at_seeds(contrast_cells(grid, cells), grid.stop.seeds) if cell.id not in cell_ids),
    ]


@dataclass(frozen=True)
class StopOutlook:
    """A stopping rule with its progress so far and the highest price that it may reach."""

    grid: Grid
    configurations: int
    """Number of cells per seed that the contrast compares."""
    seeds: int
    """Number of seeds with cells now."""
    last_look: StoppingStatus | None
    """Status from the last launch with the same rule; None without one."""
    max_price: Bill
    """Price of the remaining work if every seed is needed."""

    def lines(self) -> list[str]:
        """Return the rule, its last status and the highest price: one sentence per line, without a full stop.

        Each line starts with "stop: ". The price is left out once the rule has reached a verdict.
        """
        rule = self.grid.stop
        assert rule is not None
        metric = contrast_metric(rule.contrast)
        lines = [messages.rule_text(rule, metric, self.configurations)]
        lines += [
            f"stop: {sentence}"
            for sentence in (messages.status_sentences(self.last_look, metric) if self.last_look is not None else ())
        ]
        if self.last_look is None or self.last_look.verdict == "open":
            highest_price = render.price_line(self.max_price).removeprefix("price: ")
            lines.append(
                f"stop: this price is for {counted(self.seeds, 'seed')}; if all {rule.max_seeds} are needed, it is {highest_price}"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return the outlook as JSON values under the keys of `plan --json`.

        Keys: contrast, width, sure, seeds, first, wave and spending of the rule, looks_after (numbers of seeds at the
        looks), configurations, seeds_now, looks (a mapping per past look with the fields of its record), verdict (None
        before any look) and price_of_all (see `cost_estimate.as_json`). Interval widths are in the metric's own unit;
        NaN becomes None.
        """
        assert self.grid.stop is not None
        looks = self.last_look.looks if self.last_look is not None else ()
        return stopping_rule.rule_as_json(self.grid.stop) | {
            "looks_after": list(self.grid.stop.seeds_at_looks),
            "configurations": self.configurations,
            "seeds_now": self.seeds,
            # JSON has no NaN
            "looks": [
                {name: None if math.isnan(number) else number for name, number in vars(look).items()} for look in looks
            ],
            "verdict": self.last_look.verdict if self.last_look is not None else None,
            "price_of_all": cost_estimate.as_json(self.max_price),
        }


def outlook(
    grid: Grid, cells: Sequence[Cell], store: Store | None, bill: Callable[[Sequence[Cell]], Bill]
) -> StopOutlook | None:
    """Return the stopping rule's outlook; None without a rule.

    Args:
        grid: The grid.
        cells: Its cells so far, those of additional seeds included.
        store: Database; None counts as an empty one.
        bill: Returns the price of the remaining work of given cells; called once, with the cells of all possible seeds.

    Raises:
        GridError: If the grid has no pair of cells for the rule's contrast.
    """
    if grid.stop is None:
        return None
    needed = contrast_cells(grid, cells)
    cell_ids = {cell.id for cell in cells}
    seeds = sum(at_seeds(needed[:1], [seed])[0].id in cell_ids for seed in grid.stop.seeds)
    return StopOutlook(grid, len(needed), seeds, _last_look(grid, store), bill(every_cell(grid, cells)))


def as_json(stop_outlook: StopOutlook | None) -> Mapping[str, Any]:
    """Return {"stop": the outlook as JSON values}; an empty mapping without a rule."""
    return {} if stop_outlook is None else {"stop": stop_outlook.as_json()}


def _last_look(grid: Grid, store: Store | None) -> StoppingStatus | None:
    """Return the status of the stopping rule that the sweep's last launch stored.

    None without a database, a launch or a status, and if the rule has changed since.
    """
    # imports SciPy, which other grids need not load
    from ...results.stopping.interim_analysis import stopping_status

    try:
        status = stopping_status(store, grid.name) if store is not None else None
    except SweepUnknown:
        return None
    return status if status is not None and status.rule == grid.stop else None
