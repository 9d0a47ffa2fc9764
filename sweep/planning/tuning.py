"""Studies that run before a factorial, and the factorial with the best settings of each."""

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
    """Progress of the studies of a grid's `tune`."""

    grid: Grid
    studies: Mapping[str, StudyProgress]
    """Level of the tuned axis -> progress of its study."""

    @property
    def best(self) -> dict[str, Trial]:
        """Level -> its best trial so far by the single objective; levels without a finished trial are missing."""
        trials = {
            word: study_text.best_single_objective(progress.space.search, progress.trials)
            for word, progress in self.studies.items()
        }
        return {word: trial for word, trial in trials.items() if trial is not None}

    @property
    def finished(self) -> bool:
        """True if every study is finished and has a best trial, so that the factorial's cells are final."""
        return all(progress.finished for progress in self.studies.values()) and self.best.keys() == self.studies.keys()

    @property
    def tuned_grid(self) -> Grid:
        """A copy of the grid with the best settings so far at each level.

        Levels without a finished trial keep the settings of the file.
        """
        return replace(self.grid, tuned={word: trial.params for word, trial in self.best.items()})

    def as_option(self, store: Store) -> dict[str, Any]:
        """Return the tuning result as the factorial's revision stores it, as JSON values.

        Keys: per (the axis), trials (per level), sampler, objective, unit (of hours), levels. Per level with a best
        trial it has level, sweep (name of the study), trial (number), cell (id), value (of the objective), settings,
        and hours spent on the whole study.

        Args:
            store: Database, from which the hours are counted.
        """
        tune = self.grid.tune
        assert tune is not None
        levels = []
        for word, trial in self.best.items():
            cells = list(self.studies[word].cells.values())
            levels.append(
                tuning.TunedLevel(
                    level=word, sweep=self.studies[word].space.grid.name, trial=trial.number, cell=trial.cell or "",
                    value=(trial.values or (0.0,))[0], settings=dict(trial.params),
                    hours=round(cost_estimate.hours_spent(store, cells), 4),
                )
            )  # fmt: skip
        ends = next(iter(self.studies.values())).space.corner_cells
        unit = cost_estimate.unit_of([Task(cell, "train", [], "new") for cell in ends])
        result = tuning.TuningResult(
            per=tune.per, trials=tune.search.trials, sampler=tune.search.sampler,
            objective=next(iter(tune.search.objectives)), unit=unit, levels=tuple(levels),
        )  # fmt: skip
        return tuning.tuning_as_json(result)


def tuning_of(
    grid: Grid, root: Path, store: Store | None, *, dry: bool = False, tell: ProgressFn = admission.ignore_progress
) -> Tuning | None:
    """Return the progress of the studies that tune a grid; None for a grid without `tune`.

    Failed trials are not retried: they stay failed. Text of the studies is prepared unless `dry`.

    Args:
        grid: The grid.
        root: Folder of the prepared corpora.
        store: Database; None counts as an empty one.
        dry: True writes no text; see `admission.expand_grid`. Its remarks are dropped.
        tell: Called with the progress of preparing text.

    Raises:
        GridError: If a study's grid is not valid.
        MachineError: Without `dry`, if its text is not prepared and would have to be downloaded.
        SweepError: If a stored trial's settings now give another cell.
    """
    if grid.tune is None:
        return None
    studies = {}
    for word, part in grid.studies().items():
        space = space_of(part, admission.expand_grid(part, root, dry=dry, tell=tell)[0], root)
        assert space is not None
        studies[word] = progress_of(space, store, retry_failed=False)
    return Tuning(grid, studies)
