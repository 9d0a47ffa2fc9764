"""Data of a study for reports: its search, objectives, trials and costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...results import metrics
from ...results.console.text import counted
from ...results.store.records import Attempt
from ...results.store.store import Store
from ...results.studies.optuna_study import Trial, best_trial_numbers
from ...results.studies.search import LevelChoice, Search
from ...results.studies.study_store import search_of, trials_of
from ..number_format import format_length
from ..sweep_data import ReportError, SweepData

MIN_FINAL_TRIALS = 10
"""Number of finished trials from which figures show final values, however many trials were pruned."""
STANDING_LABELS = {"asked": "not finished"}
"""Text for the standing of a trial where it is not the standing itself."""
METHOD_NAMES = {
    "tpe": "TPE",
    "random": "random",
    "cmaes": "CMA-ES",
    "nsga2": "NSGA-II",
    "asha": "ASHA",
    "hyperband": "Hyperband",
    "median": "median",
}
"""Display names of samplers and pruners."""
DIRECTION_SIGNS = {"minimize": -1, "maximize": 1}
BETTER_TEXT = {"minimize": "less is better", "maximize": "more is better"}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Objective of a study.

    `unit` is that of displayed values: shares are displayed in percent and stored as fractions.
    """

    index: int
    """Index among the study's objectives."""
    name: str
    """Name as the grid writes it."""
    direction: str
    """"minimize" or "maximize"."""
    unit: str = ""
    percent: bool = False
    """True if displayed values are percentages of stored fractions."""

    words: str = ""
    """Display name without the unit."""
    probe: str = ""
    metric: str = ""
    """Name of the metric, without the probe."""
    length: int = 0
    """Context length in tokens; 0 for none, or if the text after "@" is not a number."""

    @property
    def label(self) -> str:
        """Axis label: text, unit and better side."""
        return f"{self.words}{f', {self.unit}' if self.unit else ''} ({self.better})"

    @property
    def better(self) -> str:
        """Text on the better side: "less is better" or "more is better"."""
        return BETTER_TEXT[self.direction]

    @property
    def sign(self) -> int:
        """-1 where less is better, 1 where more is better."""
        return DIRECTION_SIGNS[self.direction]

    def display_value(self, value: float) -> float:
        """Return a stored value in the displayed unit: times 100 for a share, else unchanged."""
        return 100 * value if self.percent else value


@dataclass(frozen=True, kw_only=True)
class CellCost:
    """Cost of all attempts of a cell, finished or not: elapsed seconds, and GPU hours (core hours without a GPU).

    Seconds of concurrent or repeated attempts are summed.
    """

    seconds: float
    hours: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """The study of a sweep: its newest search and every trial."""

    data: SweepData
    """Snapshot of the sweep."""
    search: Search
    """Newest search of the study."""
    trials: tuple[Trial, ...]
    """Trials in the order of their numbers; a trial is one proposed set of settings and its result."""
    rung: int = 0
    """Rung (validation number, from 1) whose values the trials hold instead of their final ones; 0 for final values."""
    fixed_best: frozenset[int] | None = None
    """Numbers of the best trials by final values, if the trials hold values of a rung instead; else None."""

    @property
    def name(self) -> str:
        """Name of the sweep."""
        return self.data.sweep

    @cached_property
    def objectives(self) -> tuple[Objective, ...]:
        """Objectives in the grid's order; at a rung their display names end with "at validation N"."""
        declared = (_objective_from_name(index, *item) for index, item in enumerate(self.search.objectives.items()))
        return tuple(
            replace(objective, words=f"{objective.words} at validation {self.rung}") if self.rung else objective
            for objective in declared
        )

    @cached_property
    def done(self) -> tuple[Trial, ...]:
        """Trials with standing `done` and a finite value of every objective.

        At a rung these include pruned trials that reached it.
        """
        return tuple(
            trial
            for trial in self.trials
            if trial.standing == "done" and trial.values is not None and all(map(math.isfinite, trial.values))
        )

    @property
    def trial_noun(self) -> str:
        """Noun for one trial of `done`, for messages."""
        return "trial" if self.rung else "finished trial"

    @cached_property
    def best(self) -> frozenset[int]:
        """Numbers of the best trials by final values: the best one, or the Pareto front of several objectives.

        Empty without a trial of standing `done`.
        """
        if self.fixed_best is not None:
            return self.fixed_best
        return frozenset(best_trial_numbers(self.search, self.trials))

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Short display name of every setting, by dotted path: the part after the last dot where that is unique."""
        short = {path: path.rpartition(".")[2] for path in self.search.ranges}
        repeated = [name for name in short.values() if list(short.values()).count(name) > 1]
        return {path: path if name in repeated else name for path, name in short.items()}

    @cached_property
    def cells(self) -> Mapping[str, Any]:
        """Cells of the sweep by id."""
        return {cell.cell_id: cell for cell in self.data.cells}

    def attempt(self, trial: Trial) -> int | None:
        """Return the id of the attempt behind a trial's numbers: the trained one, else the newest one of its cell.

        None if the trial has no cell in this sweep, or the cell has no attempt yet.
        """
        cell = self.cells.get(trial.cell or "")
        return None if cell is None else cell.trained_attempt_id or cell.attempt_id

    def origins(self, trials: Iterable[Trial]) -> list[tuple[str, int | None]]:
        """Return the (cell id, attempt id or None) pairs of trials that have a cell, in their order."""
        return [(trial.cell, self.attempt(trial)) for trial in trials if trial.cell is not None]

    def levels(self, path: str) -> list[Any]:
        """Return the levels of a setting: declared ones in the grid's order, then further ones of trials.

        Further levels are in the order of the first trial that has them, by trial number; they are not sorted. For a
        setting with a range the list holds just the distinct values of the trials, in that order too. True and 1 are
        different levels. The same list object is returned by every call (cached).

        Raises:
            KeyError: The search has no such setting.
        """
        if path not in self._levels:
            choice = self.search.ranges[path]
            declared = list(choice.levels) if isinstance(choice, LevelChoice) else []
            for level_value in {
                repr(trial.params[path]): trial.params[path] for trial in self.trials if path in trial.params
            }.values():
                if not any(is_same_level(level_value, level) for level in declared):
                    declared.append(level_value)
            self._levels[path] = declared
        return self._levels[path]

    @cached_property
    def _levels(self) -> dict[str, list[Any]]:
        return {}

    def varying_settings(self) -> list[str]:
        """Return the dotted paths of the settings that differ between finished trials.

        These have two or more values among the trials of `done`; they are in the order of the search.
        """
        return [
            path
            for path in self.search.ranges
            if len({repr(trial.params[path]) for trial in self.done if path in trial.params}) > 1
        ]

    def trial_counts_text(self) -> str:
        """Return the number of trials by standing, as text: "12 of 20 trials: 9 done, 3 pruned".

        The total is the planned number of trials, or the present one if that is larger. Standings without trials are
        left out. Without any trial: "0 of 20 trials".
        """
        counts: dict[str, int] = dict.fromkeys(("done", "pruned", "diverged", "failed", "asked"), 0)
        for trial in self.trials:
            counts[trial.standing] += 1
        parts = [f"{count} {STANDING_LABELS.get(standing, standing)}" for standing, count in counts.items() if count]
        total_text = f"{len(self.trials)} of {counted(max(self.search.trials, len(self.trials)), 'trial')}"
        return f"{total_text}: {', '.join(parts)}" if parts else f"0 of {counted(self.search.trials, 'trial')}"

    def search_text(self) -> str:
        """Return a sentence, without its full stop, on the newest search.

        Such as "Sampler TPE, pruner ASHA, seed 0; for val.loss (less is better); over train.lr (0.003 to 0.1,
        logarithmic)".
        """
        ranges = "; ".join(f"{path} {range_text(self.search, path)}" for path in self.search.ranges)
        aims = " and ".join(f"{objective.name} ({objective.better})" for objective in self.objectives)
        pruner = f", pruner {METHOD_NAMES[self.search.pruner]}" if self.search.pruner else ""
        return f"Sampler {METHOD_NAMES[self.search.sampler]}{pruner}, seed {self.search.seed}; objective: {aims}; search space: {ranges}"


def study_of(store: Store, data: SweepData) -> Study:
    """Return the study of a sweep: its newest search and all of its trials, with final values.

    Raises:
        ReportError: The sweep is no study (its grid has no search).
        StoreError: The database cannot be read.
    """
    search = search_of(store, data.sweep)
    if search is None:
        raise ReportError(
            f"sweep {data.sweep} is not a study; add search: to its grid (docs/how-to/search-settings.md), or name a sweep that has it"
        )
    return Study(data=data, search=search, trials=tuple(trials_of(store, data.sweep)))


def at_common_rung(study: Study) -> Study:
    """Return the study with all trials compared at a common rung if a pruner left too few finished ones.

    A rung is a numbered validation of a training. The common rung is the last one that every finished trial with a
    curve and every pruned one reached. The study is returned unchanged if it has several objectives, if at least ten
    trials are finished, if at least as many are finished (but at least one) as were pruned with a curve, or if no trial
    that is finished or pruned has a curve.

    Returns:
        A copy with `rung` set and `fixed_best` from final values. Trials with a value at the rung are `done` with that
        value. Others have no values, and finished ones among them become `failed`.
    """
    pruned = [trial for trial in study.trials if trial.standing == "pruned" and trial.curve]
    if len(study.objectives) > 1 or len(study.done) >= min(MIN_FINAL_TRIALS, max(1, len(pruned))):
        return study
    reached = [trial for trial in (*study.done, *pruned) if trial.curve]
    if not reached:
        return study
    rung = min(trial.curve[-1][0] for trial in reached)
    values = {trial.number: dict(trial.curve)[rung] for trial in reached if rung in dict(trial.curve)}
    trials = tuple(
        replace(trial, standing="done", values=(values[trial.number],))
        if trial.number in values
        else replace(trial, standing="failed" if trial.standing == "done" else trial.standing, values=None)
        for trial in study.trials
    )
    return replace(study, trials=trials, rung=rung, fixed_best=study.best)


def rung_note(study: Study) -> list[str]:
    """Return a list with one note that values are those of a rung (a numbered validation); empty for final values."""
    if not study.rung:
        return []
    return [
        f"Most trials were pruned, so all are compared at validation {study.rung}, the last that each of them reached; "
        "their final values might rank differently."
    ]


def require_done_trials(study: Study, min_trials: int, analysis: str) -> Study:
    """Return the study unchanged if at least `min_trials` trials are done; `analysis` is named in the message only.

    Raises:
        ReportError: Fewer are.
    """
    if len(study.done) < min_trials:
        raise ReportError(
            f"{analysis} needs at least {counted(min_trials, 'finished trial')}; sweep {study.name} has {len(study.done)}; "
            "launch it again to add trials"
        )
    return study


def range_text(search: Search, path: str) -> str:
    """Return the range or the levels of a setting, such as (0.003 to 0.1, logarithmic, steps of 2) or (4, 8).

    Numbers of a range have six significant digits, levels are as `level_text` gives them (True: on).

    Raises:
        KeyError: The search has no such setting.
    """
    choice = search.ranges[path]
    if isinstance(choice, LevelChoice):
        return f"({', '.join(map(level_text, choice.levels))})"
    step = f", steps of {choice.step:g}" if choice.step is not None else ""
    return f"({choice.low:g} to {choice.high:g}{', logarithmic' if choice.log else ''}{step})"


def level_text(value: Any) -> str:
    """Return a level of a setting as text.

    A boolean is "on" or "off", None is "none", and a float has four significant digits.
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def is_same_level(a: Any, b: Any) -> bool:
    """Return True if two levels are equal and both or neither are boolean: True is not 1, but 1 is 1.0."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def cell_costs(study: Study, attempts: Sequence[Attempt], gpus_or_cores: Mapping[str, float]) -> dict[str, CellCost]:
    """Return the cost of each cell with an attempt, by cell id.

    Elapsed seconds are summed over all attempts of a cell, finished or not; `study` is not used. Hours are these
    seconds times the number of GPUs (or cores) of the cell, over 3600.

    Args:
        study: The study; not read.
        attempts: Attempts of any cells.
        gpus_or_cores: Number of GPUs, or of cores without a GPU, of each attempt of a cell, by cell id (not attempt
            id); 1 for a cell that is missing.
    """
    seconds: dict[str, float] = {}
    for attempt in attempts:
        seconds[attempt.cell_id] = seconds.get(attempt.cell_id, 0.0) + attempt.elapsed_s
    return {
        cell: CellCost(seconds=each, hours=each * gpus_or_cores.get(cell, 1.0) / 3600) for cell, each in seconds.items()
    }


def _objective_from_name(index: int, name: str, direction: str) -> Objective:
    """Return the objective of a name such as `val.loss@2048`, with the unit and label of its metric.

    The probe may be left out; the first registered metric of that name is then taken. An unregistered metric has no
    unit and its name as label.

    Args:
        index: Index among the study's objectives.
        name: `metric`, `probe.metric`, either with `@LENGTH` in tokens.
        direction: "minimize" or "maximize".
    """
    measure, _, length = name.partition("@")
    probe, _, metric = measure.rpartition(".")
    key, metric_info = next(
        (
            (key, metric_info)
            for key, metric_info in metrics.METRICS.items()
            if key[1] == metric and probe in ("", key[0])
        ),
        ((probe, metric), None),
    )
    unit = "" if metric_info is None or metric_info.unit == "1" else "%" if metric_info.percent else metric_info.unit
    text = measure if metric_info is None else metric_info.noun or measure
    tokens = int(length) if length.isdigit() else 0
    return Objective(
        index=index, name=name, direction=direction, unit=unit.replace("nats/token", "nats per token"),
        percent=metric_info is not None and metric_info.percent, words=f"{text}, {format_length(tokens)}" if tokens else text,
        probe=key[0], metric=metric, length=tokens,
    )  # fmt: skip
