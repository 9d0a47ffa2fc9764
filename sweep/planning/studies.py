"""From a trial's settings to its cell, and from a study's trials so far to what a launch does about them."""

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
from ...results.store.records import Standing, standing
from ...results.store.store import Store
from ...results.studies import study_store, study_text
from ...results.studies.optuna_study import Trial, best
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
"""Of a proposed number: more tell nothing, and make long names."""


@dataclass(frozen=True)
class TrialSpace:
    """The cells that a study may propose. `ends` are those at the ends of its ranges, corpora pinned; they share one text."""

    grid: Grid
    ends: Sequence[Cell]
    known: PreparedCorpus | None = None
    """Of the text, when it was prepared under a name."""

    @property
    def search(self) -> Search:
        """What is searched."""
        assert self.grid.search is not None
        return self.grid.search

    @cached_property
    def _expansion(self) -> Expansion:
        fingerprint = self.ends[0].config.data.fingerprint or ""
        return self.grid.expansion(lambda data: fingerprint, lambda name: self.known)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_expansion"}

    def cell(self, params: Mapping[str, Any]) -> Cell:
        """The cell of these settings. Raises GridError where there is none."""
        return self._expansion.cells(params, None)[0]

    def drawn(self, count: int) -> list[Cell]:
        """So many cells of settings at random, always the same, to stand for trials that nobody has proposed yet."""
        chance = random.Random(count)
        return [self._drawn(chance) for _ in range(count)]

    def _drawn(self, chance: random.Random) -> Cell:
        params = {
            path: chance.choice(one.levels) if isinstance(one, LevelChoice) else one.at(chance.random())
            for path, one in self.search.ranges.items()
        }
        try:
            return self.cell(self.tidy(params))
        except GridError:
            return self.ends[0]

    def tidy(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with numbers of few digits, inside their ranges."""
        return {path: _tidy(self.search.ranges[path], value) for path, value in params.items()}


def space_of(grid: Grid, ends: Sequence[Cell], root: Path) -> TrialSpace | None:
    """The space of a grid whose text lies under `root`; None for a grid without a study."""
    if grid.search is None:
        return None
    name = ends[0].config.data.corpus
    return TrialSpace(grid, ends, corpora.prepared(name, root) if name not in CORPORA else None)


def _tidy(one: Range, value: Any) -> Any:
    if isinstance(one, LevelChoice) or not isinstance(value, float) or one.step is not None or not value:
        return value
    short = round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
    return short if one.low <= short <= one.high else value


@dataclass(frozen=True)
class StudyProgress:
    """Where a study stands: its trials as the database and its cells now say, and their cells."""

    space: TrialSpace
    trials: tuple[Trial, ...] = ()
    cells: Mapping[str, Cell] = field(default_factory=dict)
    """By id, in the order in which they were proposed."""
    standings: Mapping[str, Standing] = field(default_factory=dict)
    """By cell."""

    @property
    def left(self) -> int:
        """Trials that are still to be proposed."""
        return study_text.left(self.space.search, self.trials)

    @property
    def open(self) -> set[str]:
        """Cells of trials that are to be finished."""
        return {trial.cell for trial in self.trials if trial.standing == "asked" and trial.cell is not None}

    @property
    def counts(self) -> Counter[str]:
        """Trials by where they stand."""
        return study_text.count_standings(self.trials)

    def describe(self) -> str:
        """What is searched, and how many trials stand where, in a line."""
        return study_text.describe(self.space.search, self.trials)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return study_text.as_json(self.space.search, self.trials)

    def best(self) -> list[str]:
        """The trials that none beats, a line each."""
        numbers = best(self.space.search, self.trials)
        return [f"best: {self._line(self.trials[number])}" for number in numbers]

    def _line(self, trial: Trial) -> str:
        values = zip(self.space.search.objectives, trial.values or (), strict=True)
        params = ", ".join(f"{path} {value}" for path, value in trial.params.items())
        return f"trial {trial.number}, cell {trial.cell}: {', '.join(f'{name} {value:.5g}' for name, value in values)}; {params}"

    @property
    def finished(self) -> bool:
        """Whether every trial was made and none has failed, but for those whose settings make no cell."""
        return not self.left and all(
            trial.standing in ("done", "pruned", "diverged") or (trial.standing == "failed" and trial.cell is None)
            for trial in self.trials
        )


def progress_of(space: TrialSpace, store: Store | None, *, again: bool = True, retrain: bool = False) -> StudyProgress:
    """The study so far. `again`: trials that failed are to be made once more; `retrain`: those that diverged, too.

    Raises SweepError when the grid now makes other cells of its trials than it did when they were proposed.
    """
    try:
        found = study_store.trials_of(store, space.grid.name) if store is not None else []
    except SweepUnknown:
        found = []
    if store is None or not found:
        return StudyProgress(space)
    cells: dict[str, Cell] = {}
    trials = []
    for trial in found:
        cell = _cell(space, trial)
        if cell is not None:
            cells.setdefault(cell.id, cell)
        trials.append(trial if cell is None else replace(trial, cell=cell.id))
    states = store.states(set(cells))
    standings: dict[str, Standing] = {}
    for key, cell in cells.items():
        standings[key] = standing(states[key], requested(cell.config.eval)) if key in states else "new"

    def settled(trial: Trial) -> Trial:
        """Return the trial as its cell stands, whichever sweep has trained that."""
        if trial.cell is None:
            return trial
        word, state = standings[trial.cell], states.get(trial.cell)
        if word == "done":
            return design_remarks(space.search, store, trial)
        if word == "diverged" and not retrain:
            return replace(trial, standing="diverged", values=None, reason=state.cause if state else None)
        if trial.standing == "pruned" or (trial.standing == "failed" and word == "failed" and not again):
            return trial
        return replace(trial, standing="asked", values=None, reason=None)

    return StudyProgress(space, tuple(map(settled, trials)), cells, standings)


def _cell(space: TrialSpace, trial: Trial) -> Cell | None:
    try:
        cell = space.cell(trial.params)
    except GridError:
        if trial.cell is None:
            return None
        raise
    if trial.cell is not None and trial.cell != cell.id:
        document = space.grid.document
        raise SweepError(
            f"{document.path}: trial {trial.number} of study {space.grid.name} was made under other settings (its cell was {trial.cell}, "
            f"and would be {cell.id} now); what all trials share cannot change, only {SEARCH}.ranges and how {SEARCH} goes on: give the changed "
            "grid another name"
        )
    return cell


def design_remarks(search: Search, store: Store, trial: Trial) -> Trial:
    """The trial with the objectives of its cell, which is done; failed where the cell has a reason in place of a number."""
    assert trial.cell is not None
    have = {(one.probe, one.metric, one.length): one for one in store.measurements(trial.cell)}
    values = []
    for name in search.objectives:
        measure, _, length = name.partition("@")
        probe, _, metric = measure.rpartition(".")
        one = have.get((probe, metric, int(length or 0)))
        if one is None or one.value is None:
            why = one.reason if one is not None else "was not measured"
            return replace(trial, standing="failed", values=None, reason=f"{name}: {why}")
        values.append(one.value)
    return replace(trial, standing="done", values=tuple(values), reason=None)
