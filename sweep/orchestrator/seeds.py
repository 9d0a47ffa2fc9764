"""Sequential design: adds seeds to the cells of a contrast, wave by wave, until the grid's `stop` rule is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...results import forecast
from ...results.console.text import counted
from ...results.stopping import messages
from ...results.stopping.interim_analysis import StoppingStatus, is_cell_finished, stopping_status
from ...results.store.store import Store
from ..executors.executor import Tell
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..grid.sections import contrast_metric
from ..planning import cost_estimate, planner, replicates
from ..planning.cost_estimate import Pricer
from ..planning.planner import Task
from ..probes import requested
from .supervisor import CapacityCheck, TaskSource

LOOK_EVENT = "look"
"""Kind of the events that record the interim looks."""


class Seeds(TaskSource):
    """Source of further seeds for the cells of a contrast, wave by wave.

    A wave is the seeds between two interim looks of the grid's `stop` rule. The source decides from the database alone,
    so a restarted launch makes the same looks.
    """

    def __init__(
        self, grid: Grid, cells: Sequence[Cell], store: Store, fence: int, *,
        plan: Callable[[Sequence[Cell]], list[Task]], prices: Callable[[Sequence[Cell]], Pricer],
        budget_hours: float | None, tell: Tell,
    ) -> None:  # fmt: skip
        """Prepare the source for a sweep that the caller has claimed.

        Args:
            grid: Grid with a `stop` rule.
            cells: All cells of the sweep so far.
            store: Database.
            fence: Fencing token of the claim.
            plan: Returns the remaining tasks of given cells.
            prices: Returns the pricing of given cells on this machine.
            budget_hours: GPU-hours (core-hours without GPUs) that all cells may cost in total; None for no limit.
            tell: Prints one line.

        Raises:
            GridError: The grid has no pair of cells for the rule's contrast.
        """
        assert grid.stop is not None
        self.cells = list(cells)
        """All cells of the sweep, including those added by this source."""
        self.end_messages: list[str] = []
        """Sentences that say why no more seeds are added; empty while seeds may follow."""
        self._grid, self._rule, self._store, self._fence = grid, grid.stop, store, fence
        self._plan, self._prices, self._budget_hours, self._tell = plan, prices, budget_hours, tell
        self._contrast_cells = replicates.contrast_cells(grid, cells)
        self._metric = contrast_metric(self._rule.contrast)
        contrast_ids = {cell.id for cell in replicates.at_seeds(self._contrast_cells, self._rule.seeds)}
        self._pending = {cell.id for cell in cells if cell.id in contrast_ids}
        """Ids of the contrast's cells at requested seeds that are not yet known to be finished."""
        self._requested = sorted({pair for cell in cells for pair in requested(cell.config.eval)})
        self._is_finished = False

    @property
    def future_cells(self) -> list[Cell]:
        """Cells with the resources of those that may be added."""
        return list(self._contrast_cells)

    def next_tasks(self, fits: CapacityCheck) -> Sequence[Task]:
        """Return the tasks of the next wave; empty until all cells of the contrast are finished, and after the end.

        Each complete wave is one interim look, which is printed and recorded as an event. A wave without tasks, since
        other sweeps trained its cells, is followed by the next look at once. New cells are stored in the sweep's
        revision.

        Args:
            fits: Not used.

        Raises:
            LeaseLost: Another supervisor holds the sweep.
        """
        while not self._is_finished and self._wave_is_complete():
            status = stopping_status(self._store, self._grid.name)
            if status is None or status.unfinished_cells:
                return []
            tasks = self._start_next_wave(status)
            if tasks:
                return tasks
        return []

    def _wave_is_complete(self) -> bool:
        """Return True if every requested cell of the contrast is finished: measured, or diverged.

        Finished cells are removed from `_pending` and not queried again. A failed cell keeps the wave incomplete.
        """
        if self._pending:
            states = self._store.states(self._pending)
            self._pending -= {
                cell for cell, state in states.items() if is_cell_finished(self._rule, state, self._requested)
            }
        return not self._pending

    def _start_next_wave(self, status: StoppingStatus) -> list[Task]:
        """Record the look and add the seeds that it requires; return their tasks.

        Returns no tasks, and ends the source, if the rule is met or the wave would exceed the budget. Also returns
        none, without an end, if other sweeps have trained all of the wave's cells.

        Args:
            status: State of the rule, with all launched cells finished.
        """
        if status.last_look is not None and status.last_look.seeds == status.seeds_launched:
            self._record_look(messages.look_text(self._rule, status.last_look, self._metric))
        if status.seeds_wanted == status.seeds_launched:
            return self._end(messages.outcome_text(status, self._metric))
        cells = replicates.at_seeds(self._contrast_cells, self._rule.seeds[status.seeds_launched : status.seeds_wanted])
        existing_ids = {cell.id for cell in self.cells}
        cells = [cell for cell in cells if cell.id not in existing_ids]
        tasks, prices = self._plan(cells), self._prices(cells)
        if self._budget_hours is not None:
            hours_used = cost_estimate.hours_spent(self._store, self.cells)
            wave_hours = sum(prices.remaining_cost(task).hours.likely for task in tasks)
            if hours_used + wave_hours > self._budget_hours:
                unit = cost_estimate.unit_of(tasks)
                return self._end(
                    f"stopped after {counted(status.seeds_launched, 'seed')} by the budget: {hours_used:.3g} of {self._budget_hours:g} {unit} are spent, and the next wave "
                    f"costs about {wave_hours:.3g}; --budget {planner.sufficient_budget(hours_used + wave_hours)} covers it"
                )
        self._add_cells(cells, prices)
        self._pending |= {cell.id for cell in cells}
        self._tell(
            f"stop: {counted(status.seeds_wanted, 'seed')} from now on: {counted(len(cells), 'cell')} added, {len(tasks)} to run"
        )
        return tasks

    def _add_cells(self, cells: Sequence[Cell], prices: Pricer) -> None:
        """Add cells to the sweep's newest revision, with the extended cost forecast, in one transaction.

        A launch that takes over therefore finds all cells of a wave or none. A revision without a forecast gets none.
        The cells are also appended to `self.cells`.

        Args:
            cells: New cells; may be empty.
            prices: Pricing of these cells.

        Raises:
            LeaseLost: Another supervisor holds the sweep.
        """
        earlier_forecast = forecast.forecast_from_options(self._store.revision(self._grid.name).options)
        price: dict[str, Any] | None = None
        if earlier_forecast is not None:
            predicted = forecast.extend_forecast(
                earlier_forecast, len(self.cells), cost_estimate.forecast(cells, prices)
            )
            price = forecast.forecast_as_json(predicted)
        self._store.extend_revision(
            self._grid.name, self._fence, [planner.to_record(cell) for cell in cells], new_forecast=price
        )
        self.cells += cells

    def _record_look(self, look_text: str) -> None:
        """Print a look, and record it as an event (500 characters at most) unless it repeats the newest one."""
        self._tell(f"stop: {look_text}")
        message = f"{messages.contrast_text(self._rule)}: {look_text}"[:500]
        newest = self._store.newest_event(self._grid.name, [LOOK_EVENT])
        if newest is None or newest.message != message:
            self._store.add_event(LOOK_EVENT, message, sweep=self._grid.name)

    def _end(self, reason: str) -> list[Task]:
        """End the source: keep and print the reason for which no more seeds follow; return no tasks.

        Nothing is written to the database.
        """
        self._is_finished = True
        self.end_messages.append(reason)
        self._tell(f"stop: {reason}")
        return []
