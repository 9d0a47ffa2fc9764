"""The studies that go before a factorial, and the factorial with the best of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...results.store.store import Store
from ...results.studies import study_text, tuning
from ...results.studies.optuna_study import Trial
from ..data.prepare import ProgressFn
from ..grid.grid import Grid
from . import admission, cost_estimate
from .planner import Task
from .studies import StudyProgress, progress_of, space_of


@dataclass(frozen=True)
class Tuning:
    """Where the studies of a grid's `tune` stand, by level of the axis that is tuned."""

    grid: Grid
    parts: Mapping[str, StudyProgress]

    @property
    def best(self) -> dict[str, Trial]:
        """By level, its best trial so far; absent where none is done."""
        found = {
            word: study_text.best_single_objective(progress.space.search, progress.trials)
            for word, progress in self.parts.items()
        }
        return {word: trial for word, trial in found.items() if trial is not None}

    @property
    def finished(self) -> bool:
        """Whether every study was made whole, so that the factorial's cells are what they will be."""
        return all(progress.finished for progress in self.parts.values()) and self.best.keys() == self.parts.keys()

    @property
    def settled(self) -> Grid:
        """The grid whose cells have the best settings so far."""
        return replace(self.grid, tuned={word: trial.params for word, trial in self.best.items()})

    def as_option(self, store: Store) -> dict[str, Any]:
        """What the factorial's revision keeps of it: the settings that were found, and what they took."""
        tune = self.grid.tune
        assert tune is not None
        levels = []
        for word, trial in self.best.items():
            cells = list(self.parts[word].cells.values())
            levels.append(
                tuning.TunedLevel(
                    level=word, sweep=self.parts[word].space.grid.name, trial=trial.number, cell=trial.cell or "",
                    value=(trial.values or (0.0,))[0], settings=dict(trial.params),
                    hours=round(cost_estimate.hours_spent(store, cells), 4),
                )
            )  # fmt: skip
        ends = next(iter(self.parts.values())).space.ends
        unit = cost_estimate.unit_of([Task(cell, "train", [], "new") for cell in ends])
        found = tuning.TuningResult(
            per=tune.per, trials=tune.search.trials, sampler=tune.search.sampler,
            objective=next(iter(tune.search.objectives)), unit=unit, levels=tuple(levels),
        )  # fmt: skip
        return tuning.as_option(found)


def tuning_of(
    grid: Grid, root: Path, store: Store | None, *, dry: bool = False, tell: ProgressFn = admission.quiet
) -> Tuning | None:
    """The studies of a grid whose text lies under `root`; None for a grid without `tune`. Raises what expanding a grid does."""
    if grid.tune is None:
        return None
    parts = {}
    for word, part in grid.studies().items():
        space = space_of(part, admission.expand_grid(part, root, dry=dry, tell=tell)[0], root)
        assert space is not None
        parts[word] = progress_of(space, store, again=False)
    return Tuning(grid, parts)
