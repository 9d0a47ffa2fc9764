"""What a plan says of a grid's `stop`: the looks so far, and what it costs if every seed is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...results.console.text import counted
from ...results.errors import SweepUnknown
from ...results.stopping import messages, stopping_rule
from ...results.store.store import Store
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..grid.sections import about
from . import cost_estimate, render, waves
from .cost_estimate import Bill

if TYPE_CHECKING:
    from ...results.stopping.interim_analysis import Looked


@dataclass(frozen=True)
class Outlook:
    """A rule before it is carried out further."""

    grid: Grid
    configurations: int
    seeds: int
    """That there are cells of from the start, or since the last look."""
    looked: Looked | None
    """What the last launch with the same rule left; None without one."""
    most: Bill
    """Of all that there can be to do."""

    def told(self) -> list[str]:
        """A sentence a line, without an end."""
        asked = self.grid.stop
        assert asked is not None
        metric = about(asked.contrast)
        lines = [messages.plan(asked, metric, self.configurations)]
        lines += [f"stop: {one}" for one in (messages.told(self.looked, metric) if self.looked is not None else ())]
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
            "looks": [{name: _known(one) for name, one in vars(look).items()} for look in looks],
            "verdict": self.looked.verdict if self.looked is not None else None,
            "price_of_all": cost_estimate.as_json(self.most),
        }


def outlook(
    grid: Grid, cells: Sequence[Cell], store: Store | None, bill: Callable[[Sequence[Cell]], Bill]
) -> Outlook | None:
    """Of a grid with its cells so far; None without a rule. `bill`: the price of what is left of some cells."""
    if grid.stop is None:
        return None
    needed = waves.needed(grid, cells)
    there = {cell.id for cell in cells}
    seeds = sum(waves.at(needed[:1], [seed])[0].id in there for seed in grid.stop.seeds)
    return Outlook(grid, len(needed), seeds, _looked(grid, store), bill(waves.every(grid, cells)))


def as_json(found: Outlook | None) -> Mapping[str, Any]:
    """Nothing without a rule."""
    return {} if found is None else {"stop": found.as_json()}


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def _looked(grid: Grid, store: Store | None) -> Looked | None:
    # SciPy, which other grids need not wait for
    from ...results.stopping.interim_analysis import looked_at

    try:
        found = looked_at(store, grid.name) if store is not None else None
    except SweepUnknown:
        return None
    return found if found is not None and found.rule == grid.stop else None
