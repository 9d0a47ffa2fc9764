"""Grid and database -> what is new, resumable, done, failed. Decides; runs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...results.console.text import counted
from ...results.store.records import CellRecord, CellState, Request, Standing, missing, standing
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
    """One attempt that ought to be made."""

    cell: Cell
    kind: str
    """train or evaluate."""
    missing: list[Request]
    why: Standing
    weights: str | None = None
    parent_id: int | None = None
    repeat: bool = False
    """Measure again what the database has already."""
    alone: bool = False
    """With nothing else beside it on the machine."""
    not_before: float = 0.0
    """On the monotonic clock."""
    deviation: Mapping[str, Any] = field(default_factory=dict)
    """Settings to run with other than the cell's, by dotted path."""
    rest: float = 1.0
    """The share of the training that is still to do."""

    @property
    def config(self) -> CellConfig:
        """The cell's config with the deviation."""
        found = self.cell.config
        for path, value in self.deviation.items():
            section, name = path.split(".")
            part = getattr(found, section).model_copy(update={name: value})
            found = found.model_copy(update={section: part})
        return found


@dataclass(frozen=True)
class Budget:
    """What a budget allows now. Hours are GPU-hours, or core-hours where no cell has a GPU."""

    allowed: float
    unit: str
    spent: float
    """By all attempts of the grid's cells so far, whichever launch and sweep made them, those that failed too."""
    cells: int
    hours: float
    """Of what is started."""
    left: Sequence[Task]
    left_hours: float

    def describe(self) -> list[str]:
        """One line, and one on what is left."""
        lines = [
            f"budget: {self.allowed:g} {self.unit}, {self.spent:.3g} spent so far; {counted(self.cells, 'cell')} for about "
            f"{self.hours:.3g} fit"
        ]
        if self.left:
            lines.append(
                f"left for later: {counted(len(self.left), 'cell')}, which would cost about {self.left_hours:.3g} more; "
                f"--budget {enough(self.spent + self.hours + self.left_hours)} takes them all"
            )
        return lines


def enough(hours: float) -> str:
    """A budget of at least so many hours, a tenth rounded up."""
    return f"{hours * 1.1:.3g}h"


@dataclass(frozen=True)
class Plan:
    """What a launch would do; `cells` are in grid order, and `tasks` too until somebody puts them in another."""

    tasks: list[Task]
    standings: dict[str, Standing]
    """Cell id -> where it stands before the launch."""
    cells: list[Cell]
    left_out: int = 0
    """Cells of the grid that --only keeps out of this launch."""
    counts: Counter[str] = field(default_factory=Counter)
    disk: DiskUsage | None = None
    """What the training needs; None when the plan was made without a look at the disk."""
    budget: Budget | None = None
    """What a budget allows of it, and what it leaves; None without one."""
    study: StudyProgress | None = None
    """Of a study: where it stands; `tasks` are those of trials that were begun."""
    damaged: Sequence[str] = ()
    """One line for each file of kept weights that is wanted and has changed since it was written; its cell counts as `weights gone`."""

    before: Sequence[StudyProgress] = ()
    """The studies that go before it, where they are to be priced with it."""

    @property
    def expected(self) -> int:
        """Attempts that are to come, those of trials that are still to be proposed too."""
        return len(self.tasks) + (self.study.left if self.study is not None else 0)

    def with_proposals(self) -> Plan:
        """The plan as if studies had proposed the rest of their trials at random: what it may cost."""
        cells = self.study.space.drawn(self.study.left) if self.study is not None else []
        for one in self.before:
            cells += [*(one.cells[cell] for cell in sorted(one.open)), *one.space.drawn(one.left)]
        return replace(self, tasks=[*self.tasks, *(Task(c, "train", requested(c.config.eval), "new") for c in cells)])

    @property
    def training(self) -> list[Task]:
        """Tasks that train a cell which nobody trains at this moment."""
        return [task for task in self.tasks if task.kind == "train" and task.why != "running"]

    @property
    def evaluating(self) -> list[Task]:
        """Tasks that measure what a trained cell lacks."""
        return [task for task in self.tasks if task.kind == "evaluate"]

    @property
    def tokens(self) -> int:
        """Tokens to train, those of resumed attempts counted whole."""
        return sum(task.cell.config.train.tokens for task in self.training)


def record(cell: Cell) -> CellRecord:
    """A cell as the database keeps it."""
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
    """The cells that every `axis=level,level` filter lets through. Raises GridError for an unknown axis or level."""
    rules: dict[str, set[str]] = {}
    for item in only:
        name, equals, levels = item.partition("=")
        if not equals:
            raise GridError("--only", None, item, "must read axis=level,level, for example attn_type=polar,nope")
        values = {level_of(cell, name) for cell in cells}
        if values == {None}:
            known = [*cells[0].levels, *(axis for axis in grid.axes if axis not in cells[0].levels), "seed"]
            raise GridError("--only", None, name, "not an axis of this grid", known, name)
        words = {word if name == "seed" else level_text(name, parse_value(word)) for word in levels.split(",")}
        for word in words:
            if word not in values:
                known = sorted(value for value in values if value is not None)
                raise GridError("--only", None, name, f"no cell has level {word!r}", known, word)
        rules[name] = words
    return [cell for cell in cells if all(level_of(cell, name) in words for name, words in rules.items())]


def level_of(cell: Cell, axis: str) -> str | None:
    """The cell's level of an axis, the seed being one; None when the grid does not vary that path for the cell."""
    if axis == "seed":
        return str(cell.config.seed)
    return cell.levels.get(axis) or cell.axes.get(axis)


def remaining_share(state: CellState | None) -> float:
    """The share of a cell's training that is still to do: 1 without a checkpoint."""
    if (
        state is None
        or state.state not in ("interrupted", "pruned", "failed")
        or not state.checkpoint
        or not state.steps_total
    ):
        return 1.0
    return 1.0 - min(state.step or 0, state.steps_total) / state.steps_total


def plan(cells: Sequence[Cell], states: Mapping[str, CellState], *, retrain: bool = False, left_out: int = 0) -> Plan:
    """Compares the cells asked for with what the database has.

    New, interrupted, pruned and failed cells are trained, and so are running ones, should the sweep that runs them not finish
    them; trained ones that lack a measurement are evaluated from kept
    weights; diverged ones are a result. `retrain` trains cells whose weights are gone, and diverged ones, again.
    """
    tasks: list[Task] = []
    standings: dict[str, Standing] = {}
    asked: dict[int, list[Request]] = {}
    for cell in cells:
        # most cells of a grid share their eval section, which the cells keep alive
        if id(cell.config.eval) not in asked:
            asked[id(cell.config.eval)] = requested(cell.config.eval)
        wanted = asked[id(cell.config.eval)]
        state = states.get(cell.id)
        word: Standing = standing(state, wanted) if state else "new"
        standings[cell.id] = word
        if word in ("new", "interrupted", "pruned", "failed", "running") or (
            retrain and word in ("weights gone", "diverged")
        ):
            tasks.append(Task(cell, "train", wanted, word, rest=remaining_share(state)))
        elif word == "needs-eval":
            assert state is not None
            tasks.append(Task(cell, "evaluate", missing(state, wanted), word, state.weights, state.trained_attempt_id))
    return Plan(tasks, standings, list(cells), left_out, Counter(standings.values()))
