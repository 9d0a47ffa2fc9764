"""Studies: the cell of a trial's settings, and the progress of a study from the database."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...results.errors import SweepUnknown
from ...results.store.records import CellStanding, standing
from ...results.store.store import Store
from ...results.studies import study_store, study_text
from ...results.studies.optuna_study import Trial, best_trial_numbers
from ...results.studies.search import LevelChoice, Range, Search
from ..data import corpora
from ..data.corpora import PreparedCorpus
from ..data.registry import CORPORA
from ..errors import GridError, SweepError
from ..grid.cell import Cell
from ..grid.expansion import SEARCH, Expansion
from ..grid.grid import Grid
from ..probes import requested

DIGITS = 4
"""Significant digits of a proposed number; more would only lengthen names."""


@dataclass(frozen=True)
class TrialSpace:
    """Cells that a study may propose; they share one text. `corner_cells` are the cells at the ends of its ranges."""

    grid: Grid
    corner_cells: Sequence[Cell]
    """Distinct cells at the ends of the ranges, at least one."""
    prepared_corpus: PreparedCorpus | None = None
    """The corpus, if it was prepared under a name."""

    @property
    def search(self) -> Search:
        """The study's declaration."""
        assert self.grid.search is not None
        return self.grid.search

    @cached_property
    def _expansion(self) -> Expansion:
        """Factory of the trials' cells; every trial has the corpus fingerprint of the corner cells."""
        fingerprint = self.corner_cells[0].config.data.fingerprint or ""
        return self.grid.expansion(lambda data: fingerprint, lambda name: self.prepared_corpus)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_expansion"}

    def cell(self, params: Mapping[str, Any]) -> Cell:
        """Return the cell with these settings at the grid's seed.

        Args:
            params: Setting path or axis -> value; settings that are not listed keep the grid's value.

        Raises:
            GridError: If the settings are not valid together.
        """
        return self._expansion.cells(params, None)[0]

    def random_cells(self, count: int) -> list[Cell]:
        """Return `count` cells with random settings that stand for trials not proposed yet; equal for equal counts."""
        chance = random.Random(count)
        return [self._random_cell(chance) for _ in range(count)]

    def _random_cell(self, chance: random.Random) -> Cell:
        """Return a cell with randomly drawn settings, or the first corner cell if the draw is not valid.

        A list of levels gives a random level, an interval the point at a random fraction of it.
        """
        params = {
            path: chance.choice(domain.levels) if isinstance(domain, LevelChoice) else domain.at(chance.random())
            for path, domain in self.search.ranges.items()
        }
        try:
            return self.cell(self.rounded(params))
        except GridError:
            return self.corner_cells[0]

    def rounded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with floats rounded to 4 significant digits (DIGITS), where that stays inside the range.

        Integers, levels of a list, zero, and floats of a range with steps are unchanged.
        """
        return {path: _rounded(self.search.ranges[path], value) for path, value in params.items()}


def space_of(grid: Grid, corner_cells: Sequence[Cell], root: Path) -> TrialSpace | None:
    """Return the trial space of a grid; None for a grid without a study.

    Args:
        grid: The grid.
        corner_cells: Cells at the ends of its ranges, at least one; their text is that of every trial.
        root: Folder of the prepared corpora, in which a corpus that is not registered is looked up by name.

    Raises:
        CorpusError: If the manifest of that corpus is damaged.
    """
    if grid.search is None:
        return None
    name = corner_cells[0].config.data.corpus
    return TrialSpace(grid, corner_cells, corpora.find_prepared(name, root) if name not in CORPORA else None)


def _rounded(domain: Range, value: Any) -> Any:
    """Return a value rounded to 4 significant digits (DIGITS).

    Only floats of an interval without steps are rounded, and only if the result stays inside the interval. Zero, other
    types and levels of a list are returned unchanged.
    """
    if isinstance(domain, LevelChoice) or not isinstance(value, float) or domain.step is not None or not value:
        return value
    short = round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
    return short if domain.low <= short <= domain.high else value


@dataclass(frozen=True)
class StudyProgress:
    """Progress of a study: its trials with the standing that database and cells give them now, and their cells."""

    space: TrialSpace
    trials: tuple[Trial, ...] = ()
    cells: Mapping[str, Cell] = field(default_factory=dict)
    """Id -> cell, in the order of proposal."""
    standings: Mapping[str, CellStanding] = field(default_factory=dict)
    """Cell id -> standing."""

    @property
    def num_remaining(self) -> int:
        """Number of trials still to be proposed: `trials` of the search minus those proposed so far, at least 0."""
        return study_text.remaining_trials(self.space.search, self.trials)

    @property
    def open_cells(self) -> set[str]:
        """Ids of the cells whose trials are proposed but not finished."""
        return {trial.cell for trial in self.trials if trial.standing == "asked" and trial.cell is not None}

    @property
    def counts(self) -> Counter[str]:
        """Number of trials by standing."""
        return study_text.count_standings(self.trials)

    def describe(self) -> str:
        """Return one line: size, sampler and objectives of the search, trials by standing, best value."""
        return study_text.describe_study(self.space.search, self.trials)

    def as_json(self) -> dict[str, Any]:
        """Return the search and its trials as JSON values."""
        return study_text.study_as_json(self.space.search, self.trials)

    def best(self) -> list[str]:
        """Return a line for each trial that no other trial dominates; a single best one with a single objective.

        The line has the trial's number, cell id, objective values and settings. Empty without a finished trial.
        """
        numbers = best_trial_numbers(self.space.search, self.trials)
        return [f"best: {self._line(self.trials[number])}" for number in numbers]

    def _line(self, trial: Trial) -> str:
        values = zip(self.space.search.objectives, trial.values or (), strict=True)
        params = ", ".join(f"{path} {value}" for path, value in trial.params.items())
        return f"trial {trial.number}, cell {trial.cell}: {', '.join(f'{name} {value:.5g}' for name, value in values)}; {params}"

    @property
    def finished(self) -> bool:
        """True if all trials are proposed and each is done, pruned, diverged, or failed for lack of a valid cell.

        A trial whose cell failed in training is not finished.
        """
        return not self.num_remaining and all(
            trial.standing in ("done", "pruned", "diverged") or (trial.standing == "failed" and trial.cell is None)
            for trial in self.trials
        )


def progress_of(
    space: TrialSpace, store: Store | None, *, retry_failed: bool = True, retrain: bool = False
) -> StudyProgress:
    """Return the progress of a study from the database.

    A trial is "done" with its objective values if its cell is, whichever sweep trained it. It is "diverged" if the cell
    is, unless `retrain`. Pruned trials stay pruned; failed ones stay failed unless `retry_failed`. Any other trial is
    "asked" (proposed and not finished). Trials without a valid cell stay as stored.

    Args:
        space: The study.
        store: Database; None or a study that was never launched gives no trials.
        retry_failed: True if failed trials are to be trained again.
        retrain: True if diverged trials are to be trained again too.

    Raises:
        SweepError: If a trial's settings now give another cell than when it was proposed.
        GridError: If they give no valid cell any more.
    """
    try:
        trials_so_far = study_store.trials_of(store, space.grid.name) if store is not None else []
    except SweepUnknown:
        trials_so_far = []
    if store is None or not trials_so_far:
        return StudyProgress(space)
    cells: dict[str, Cell] = {}
    trials = []
    for trial in trials_so_far:
        cell = _cell(space, trial)
        if cell is not None:
            cells.setdefault(cell.id, cell)
        trials.append(trial if cell is None else replace(trial, cell=cell.id))
    states = store.states(set(cells))
    standings: dict[str, CellStanding] = {}
    for key, cell in cells.items():
        standings[key] = standing(states[key], requested(cell.config.eval)) if key in states else "new"

    def updated(trial: Trial) -> Trial:
        """Return the trial with the standing of its cell, whichever sweep trained the cell."""
        if trial.cell is None:
            return trial
        word, state = standings[trial.cell], states.get(trial.cell)
        if word == "done":
            return with_objectives(space.search, store, trial)
        if word == "diverged" and not retrain:
            return replace(trial, standing="diverged", values=None, reason=state.cause if state else None)
        if trial.standing == "pruned" or (trial.standing == "failed" and word == "failed" and not retry_failed):
            return trial
        return replace(trial, standing="asked", values=None, reason=None)

    return StudyProgress(space, tuple(map(updated, trials)), cells, standings)


def _cell(space: TrialSpace, trial: Trial) -> Cell | None:
    """Return the trial's cell, or None if its settings give no valid one and none is stored for it.

    Raises:
        SweepError: If the cell has another id than the stored one.
        GridError: If one is stored and the settings give none any more.
    """
    try:
        cell = space.cell(trial.params)
    except GridError:
        if trial.cell is None:
            return None
        raise
    if trial.cell is not None and trial.cell != cell.id:
        document = space.grid.document
        raise SweepError(
            f"{document.path}: trial {trial.number} of study {space.grid.name} was made with other settings (its "
            f"cell was {trial.cell}, and would be {cell.id} now); a study may change {SEARCH}.ranges and options "
            f"of {SEARCH}, but no settings that all trials share; rename the changed grid"
        )
    return cell


def with_objectives(search: Search, store: Store, trial: Trial) -> Trial:
    """Return the trial of a finished cell as done, with the cell's objective values in the order of the search.

    It is returned as failed, with the reason, for the first objective that was not measured or has a reason instead of
    a number.

    Args:
        search: The study, whose objectives read probe.metric or probe.metric@LENGTH.
        store: Database.
        trial: The trial; its `cell` must be set.
    """
    assert trial.cell is not None
    measurements = {(row.probe, row.metric, row.length): row for row in store.measurements(trial.cell)}
    values = []
    for name in search.objectives:
        measure, _, length = name.partition("@")
        probe, _, metric = measure.rpartition(".")
        measurement = measurements.get((probe, metric, int(length or 0)))
        if measurement is None or measurement.value is None:
            reason = measurement.reason if measurement is not None else "was not measured"
            return replace(trial, standing="failed", values=None, reason=f"{name}: {reason}")
        values.append(measurement.value)
    return replace(trial, standing="done", values=tuple(values), reason=None)
