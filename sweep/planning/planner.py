"""The plan of a launch: which cells to train or evaluate, from the grid and the database.

Nothing is started here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...results.console.text import counted
from ...results.store.records import CellRecord, CellStanding, CellState, ProbeRequest, missing_requests, standing
from ..config import CellConfig
from ..errors import GridError
from ..grid.cell import Cell
from ..grid.grid import Grid, parse_value
from ..grid.settings import level_text
from ..probes import requested
from .admission import DiskUsage

if TYPE_CHECKING:
    from .studies import StudyProgress


@dataclass(frozen=True, slots=True)
class Task:
    """An attempt to be started."""

    cell: Cell
    kind: str
    """"train" or "evaluate"."""
    missing: list[ProbeRequest]
    """(Probe, context length) pairs to measure; for a training, all that the cell requests."""
    standing: CellStanding
    """Standing of the cell (state of training and measurements) when the plan was made."""
    weights: str | None = None
    """Address of the weights to evaluate; None for a training."""
    parent_id: int | None = None
    """Id of the attempt that trained these weights; None for a training."""
    should_remeasure: bool = False
    """True measures again what the database already has."""
    alone: bool = False
    """True if nothing else may run on the machine at the same time."""
    not_before: float = 0.0
    """Earliest start, in seconds of the monotonic clock."""
    deviation: Mapping[str, Any] = field(default_factory=dict)
    """Dotted path -> value that this attempt uses instead of the cell's."""
    remaining_share: float = 1.0
    """Share of the training that is still to be done, 0 to 1."""

    @property
    def config(self) -> CellConfig:
        """The cell's config with the deviation applied; the new values are not validated.

        Each path must be section.name; the cell's own config is unchanged.
        """
        config = self.cell.config
        for path, value in self.deviation.items():
            section, name = path.split(".")
            part = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: part})
        return config


@dataclass(frozen=True)
class Budget:
    """The part of a plan that a budget covers. Hours are GPU-hours, or core-hours if no cell uses a GPU."""

    allowed: float
    """Hours of the budget, spent ones included."""
    unit: str
    """"GPU-hours" or "core-hours"."""
    spent: float
    """Hours of all attempts of the grid's cells so far: failed ones and those of other sweeps included."""
    cells: int
    """Number of tasks that are started."""
    hours: float
    """Estimated hours of the tasks that are started."""
    deferred: Sequence[Task]
    """Tasks over budget."""
    deferred_hours: float
    """Estimated hours of the deferred tasks."""

    def describe(self) -> list[str]:
        """Return one line on the budget, and a second one if tasks are deferred."""
        lines = [
            f"budget: {self.allowed:g} {self.unit}, {self.spent:.3g} spent so far; covers {counted(self.cells, 'cell')} for about "
            f"{self.hours:.3g} more"
        ]
        if self.deferred:
            lines.append(
                f"over budget: {counted(len(self.deferred), 'cell')} for about {self.deferred_hours:.3g} {self.unit} more; "
                f"--budget {sufficient_budget(self.spent + self.hours + self.deferred_hours)} covers all of them"
            )
        return lines


def sufficient_budget(hours: float) -> str:
    """Return a budget 10 % above the hours as text for `--budget`, such as "44h" (three significant digits)."""
    return f"{hours * 1.1:.3g}h"


@dataclass(frozen=True)
class Plan:
    """Tasks of a launch and the state that they follow from.

    Cells are in grid order, and so are tasks until they are reordered.
    """

    tasks: list[Task]
    standings: dict[str, CellStanding]
    """Cell id -> standing before the launch: state of training and requested measurements, such as "needs-eval"."""
    cells: list[Cell]
    num_filtered_out: int = 0
    """Number of the grid's cells that `--only` filters out."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of cells by standing."""
    disk: DiskUsage | None = None
    """Disk usage of the training; None if it was not estimated."""
    budget: Budget | None = None
    """Tasks inside and outside a budget; None without one."""
    study: StudyProgress | None = None
    """Progress of a study, whose `tasks` are those of trials already proposed; None for a factorial."""
    damaged: Sequence[str] = ()
    """One line per required file of kept weights that has changed since it was written.

    Its cell counts as `weights gone`.
    """

    before: Sequence[StudyProgress] = ()
    """Studies that run before this plan and are priced with it."""

    @property
    def num_expected_attempts(self) -> int:
        """Number of attempts to come: the tasks, running ones too, and the trials still to be proposed."""
        return len(self.tasks) + (self.study.num_remaining if self.study is not None else 0)

    def with_proposals(self) -> Plan:
        """Return a copy with random cells in place of all trials still to be proposed, for a price estimate.

        They are appended to the tasks as new trainings: those of `study`, then for each study of `before` its open
        cells and its remaining trials. Standings, cells and counts are unchanged.
        """
        cells = self.study.space.random_cells(self.study.num_remaining) if self.study is not None else []
        for study in self.before:
            cells += [
                *(study.cells[cell] for cell in sorted(study.open_cells)),
                *study.space.random_cells(study.num_remaining),
            ]
        return replace(self, tasks=[*self.tasks, *(Task(c, "train", requested(c.config.eval), "new") for c in cells)])

    @property
    def training(self) -> list[Task]:
        """Tasks that train a cell which is not running now."""
        return [task for task in self.tasks if task.kind == "train" and task.standing != "running"]

    @property
    def evaluating(self) -> list[Task]:
        """Tasks that measure missing numbers of a trained cell."""
        return [task for task in self.tasks if task.kind == "evaluate"]

    @property
    def tokens(self) -> int:
        """Number of tokens of the tasks in `training`; resumed attempts count in full."""
        return sum(task.cell.config.train.tokens for task in self.training)


def to_record(cell: Cell) -> CellRecord:
    """Return the database record of a cell; its tokens are steps x batch tokens."""
    return CellRecord(
        id=cell.id,
        slug=cell.slug,
        seed=cell.config.seed,
        levels=cell.levels,
        config=cell.config.model_dump(mode="json"),
        axes=cell.axes,
        tokens=cell.config.train.steps * cell.config.train.batch_tokens,
    )


def select(grid: Grid, cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells that pass every `axis=level,level` filter, in their order; all cells without filters.

    A level need not be written canonically.

    Args:
        grid: The grid, for the names of its axes in error messages.
        cells: Its cells, at least one.
        only: Filters of `--only`; "seed" counts as an axis.

    Raises:
        GridError: For text without "=", an unknown axis, an axis with two filters, or a level that no cell has.
    """
    rules: dict[str, set[str]] = {}
    for item in only:
        name, equals, levels = item.partition("=")
        if not equals:
            raise GridError("--only", None, item, "must read axis=level,level, for example attn_type=polar,nope")
        if name in rules:
            raise GridError("--only", None, name, "has two filters; list its levels in one: axis=level,level")
        values = {level_of(cell, name) for cell in cells}
        if values == {None}:
            allowed = [*cells[0].levels, *(axis for axis in grid.axes if axis not in cells[0].levels), "seed"]
            raise GridError("--only", None, name, "not an axis of this grid", allowed, name)
        selected = {word if name == "seed" else level_text(name, parse_value(word)) for word in levels.split(",")}
        for word in selected:
            if word not in values:
                allowed = sorted(value for value in values if value is not None)
                raise GridError("--only", None, name, f"no cell has level {word!r}", allowed, word)
        rules[name] = selected
    return [cell for cell in cells if all(level_of(cell, name) in selected for name, selected in rules.items())]


def level_of(cell: Cell, axis: str) -> str | None:
    """Return the cell's level of an axis as text; "seed" is an axis too.

    Built-in axes have a level even where the grid does not vary them. None for an axis that is neither built in nor
    varied for the cell.
    """
    if axis == "seed":
        return str(cell.config.seed)
    return cell.levels.get(axis) or cell.axes.get(axis)


def remaining_share(state: CellState | None) -> float:
    """Return the share of a cell's training that is still to be done, from 0 to 1.

    1 for a cell without a state, checkpoint or known number of steps, or whose state is not interrupted, pruned or
    failed.
    """
    if (
        state is None
        or state.state not in ("interrupted", "pruned", "failed")
        or not state.checkpoint
        or not state.steps_total
    ):
        return 1.0
    return 1.0 - min(state.step or 0, state.steps_total) / state.steps_total


def plan(
    cells: Sequence[Cell], states: Mapping[str, CellState], *, retrain: bool = False, num_filtered_out: int = 0
) -> Plan:
    """Return the plan for the cells, given their state in the database.

    There is at most one task per cell, in the given order. New, interrupted, pruned and failed cells are trained, and
    running ones too, in case their sweep does not finish them. Trained cells with missing measurements are evaluated
    from kept weights, for these measurements alone. Cells that are done or diverged, or whose weights are gone, get no
    task.

    Args:
        cells: Cells of the launch.
        states: Cell id -> state in the database; a cell without an entry is new.
        retrain: True trains cells again that lack measurements and whose weights are gone, and diverged ones.
        num_filtered_out: Number of the grid's cells that `--only` filters out; only copied to the plan.
    """
    tasks: list[Task] = []
    standings: dict[str, CellStanding] = {}
    requested_by_section: dict[int, list[ProbeRequest]] = {}
    for cell in cells:
        # most cells share their eval section; the cells keep it alive, so its id stays unique
        if id(cell.config.eval) not in requested_by_section:
            requested_by_section[id(cell.config.eval)] = requested(cell.config.eval)
        wanted = requested_by_section[id(cell.config.eval)]
        state = states.get(cell.id)
        word: CellStanding = standing(state, wanted) if state else "new"
        standings[cell.id] = word
        if word in ("new", "interrupted", "pruned", "failed", "running") or (
            retrain and word in ("weights gone", "diverged")
        ):
            tasks.append(Task(cell, "train", wanted, word, remaining_share=remaining_share(state)))
        elif word == "needs-eval":
            assert state is not None
            tasks.append(
                Task(cell, "evaluate", missing_requests(state, wanted), word, state.weights, state.trained_attempt_id)
            )
    return Plan(tasks, standings, list(cells), num_filtered_out, Counter(standings.values()))
