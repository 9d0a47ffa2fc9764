"""Adds seeds to the cells of a contrast, wave by wave, until its grid's `stop` says that it is known closely enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...results import forecast
from ...results.console.text import counted
from ...results.stopping import messages
from ...results.stopping.interim_analysis import StoppingStatus, finished, stopping_status
from ...results.store.store import Store
from ..executors.executor import Tell
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..grid.sections import about
from ..planning import cost_estimate, planner, replicates
from ..planning.cost_estimate import Pricer
from ..planning.planner import Task
from ..probes import requested
from .supervisor import CapacityCheck, TaskSource

LOOK = "look"
"""Kind of the events that keep what was seen, and when."""


class Seeds(TaskSource):
    """Further seeds, wave by wave, as the database alone decides: a launch that goes on makes the same looks."""

    def __init__(
        self, grid: Grid, cells: Sequence[Cell], store: Store, fence: int, *,
        plan: Callable[[Sequence[Cell]], list[Task]], prices: Callable[[Sequence[Cell]], Pricer],
        allowed: float | None, tell: Tell,
    ) -> None:  # fmt: skip
        """`cells`: all of the sweep so far, which `fence` holds. `plan`: the tasks that are left of some cells. `allowed`: hours that
        they may cost in all."""
        assert grid.stop is not None
        self.cells = list(cells)
        """All of the sweep, those that were added too."""
        self.told: list[str] = []
        """How it ended, a sentence each."""
        self._grid, self._rule, self._store, self._fence = grid, grid.stop, store, fence
        self._plan, self._prices, self._allowed, self._tell = plan, prices, allowed, tell
        self._needed = replicates.contrast_cells(grid, cells)
        self._metric = about(self._rule.contrast)
        mine = {one.id for one in replicates.at_seeds(self._needed, self._rule.seeds)}
        self._pending = {cell.id for cell in cells if cell.id in mine}
        """Cells of the contrast that are not known to be finished."""
        self._requested = sorted({pair for cell in cells for pair in requested(cell.config.eval)})
        self._over = False

    @property
    def likely(self) -> list[Cell]:
        """Cells with the resources of those that it may add."""
        return list(self._needed)

    def further(self, fits: CapacityCheck) -> Sequence[Task]:
        """The next wave, once all cells of the contrast are finished and the look says that they are not enough."""
        while not self._over and self._all_there():
            seen = stopping_status(self._store, self._grid.name)
            if seen is None or seen.waiting:
                return []
            tasks = self._wave(seen)
            if tasks:
                return tasks
        return []

    def _all_there(self) -> bool:
        if self._pending:
            states = self._store.states(self._pending)
            self._pending -= {cell for cell, state in states.items() if finished(self._rule, state, self._requested)}
        return not self._pending

    def _wave(self, seen: StoppingStatus) -> list[Task]:
        """Notes the look, and adds the seeds that it asks for; no tasks where that is none, or all of them are trained already."""
        if seen.last is not None and seen.last.seeds == seen.asked:
            self._note(messages.look_text(self._rule, seen.last, self._metric))
        if seen.further == seen.asked:
            return self._end(messages.outcome_text(seen, self._metric))
        cells = replicates.at_seeds(self._needed, self._rule.seeds[seen.asked : seen.further])
        known = {cell.id for cell in self.cells}
        cells = [cell for cell in cells if cell.id not in known]
        tasks, prices = self._plan(cells), self._prices(cells)
        if self._allowed is not None:
            used = cost_estimate.hours_spent(self._store, self.cells)
            cost = sum(prices.of(task).hours.likely for task in tasks)
            if used + cost > self._allowed:
                unit = cost_estimate.unit_of(tasks)
                return self._end(
                    f"stopped after {counted(seen.asked, 'seed')} by the budget: {used:.3g} of {self._allowed:g} {unit} are spent, and the next wave "
                    f"costs about {cost:.3g}; --budget {planner.enough(used + cost)} takes it"
                )
        self._add(cells, prices)
        self._pending |= {cell.id for cell in cells}
        self._tell(
            f"stop: {counted(seen.further, 'seed')} from now on: {counted(len(cells), 'cell')} more, {len(tasks)} to do"
        )
        return tasks

    def _add(self, cells: Sequence[Cell], prices: Pricer) -> None:
        """To the sweep's newest revision, in one transaction, so that whoever goes on finds all of a wave or nothing."""
        before = forecast.forecast_of(self._store.revision(self._grid.name).options)
        told: dict[str, Any] | None = None
        if before is not None:
            predicted = forecast.extended(before, len(self.cells), cost_estimate.forecast(cells, prices))
            told = forecast.as_option(predicted)
        self._store.extend_revision(self._grid.name, self._fence, [planner.record(cell) for cell in cells], price=told)
        self.cells += cells

    def _note(self, found: str) -> None:
        self._tell(f"stop: {found}")
        message = f"{messages.contrast_text(self._rule)}: {found}"[:500]
        before = self._store.newest_event(self._grid.name, [LOOK])
        if before is None or before.message != message:
            self._store.add_event(LOOK, message, sweep=self._grid.name)

    def _end(self, why: str) -> list[Task]:
        self._over = True
        self.told.append(why)
        self._tell(f"stop: {why}")
        return []
