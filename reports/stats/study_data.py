"""A study as reports see it: what was searched and for what, its trials, and what each took."""

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
from ...results.studies.optuna_study import Trial, best
from ...results.studies.search import LevelChoice, Search
from ...results.studies.study_store import search_of, trials_of
from ..number_format import format_length
from ..result_columns import METRIC_LABELS
from ..sweep_data import ReportError, SweepData

ENOUGH = 10
"""Trials that are done, of which figures show the ends however many were pruned."""
WORDS = {"asked": "not finished"}
"""How a trial's standing is told, where not by itself."""
METHODS = {
    "tpe": "TPE",
    "random": "random",
    "cmaes": "CMA-ES",
    "nsga2": "NSGA-II",
    "asha": "ASHA",
    "hyperband": "Hyperband",
    "median": "median",
}
"""Samplers and pruners as people write them."""
SIGNS = {"minimize": -1, "maximize": 1}
BETTER = {"minimize": "less is better", "maximize": "more is better"}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One number that a study is for. `unit` is that of what is shown: shares in percent."""

    place: int
    """Among the study's objectives."""
    name: str
    """As the grid writes it."""
    direction: str
    unit: str = ""
    percent: bool = False

    words: str = ""
    """What it is, without its unit."""
    probe: str = ""
    metric: str = ""
    length: int = 0

    @property
    def label(self) -> str:
        """What stands beside an axis of it."""
        return f"{self.words}{f', {self.unit}' if self.unit else ''} ({self.better})"

    @property
    def better(self) -> str:
        """Which side is better."""
        return BETTER[self.direction]

    @property
    def sign(self) -> int:
        """-1 where less is better, 1 where more is."""
        return SIGNS[self.direction]

    def shown(self, value: float) -> float:
        """The value as it is shown."""
        return 100 * value if self.percent else value


@dataclass(frozen=True, kw_only=True)
class CellCost:
    """What the attempts of a cell took, finished or not: seconds, and hours of GPUs, or of cores where it has none."""

    seconds: float
    hours: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """The study of a sweep: its newest search, and every trial there was."""

    data: SweepData
    search: Search
    trials: tuple[Trial, ...]
    rung: int = 0
    """The validation whose values the trials have in place of those of their end; 0 for their end."""
    known_best: frozenset[int] | None = None

    @property
    def name(self) -> str:
        """The sweep's."""
        return self.data.sweep

    @cached_property
    def objectives(self) -> tuple[Objective, ...]:
        """What it is for, in the grid's order."""
        found = (_objective(place, *one) for place, one in enumerate(self.search.objectives.items()))
        return tuple(
            replace(one, words=f"{one.words} at validation {self.rung}") if self.rung else one for one in found
        )

    @cached_property
    def done(self) -> tuple[Trial, ...]:
        """The trials that were measured at every objective."""
        return tuple(
            one
            for one in self.trials
            if one.standing == "done" and one.values is not None and all(map(math.isfinite, one.values))
        )

    @property
    def kind(self) -> str:
        """What `done` holds, one of them, in words."""
        return "trial" if self.rung else "trial that is done"

    @cached_property
    def best(self) -> frozenset[int]:
        """Numbers of the trials that none beats in the end: the best one, or the Pareto front."""
        if self.known_best is not None:
            return self.known_best
        return frozenset(best(self.search, self.trials))

    @cached_property
    def names(self) -> Mapping[str, str]:
        """By setting, how it is named here: without what stands before its last dot, where that leaves them apart."""
        short = {path: path.rpartition(".")[2] for path in self.search.ranges}
        many = [one for one in short.values() if list(short.values()).count(one) > 1]
        return {path: path if one in many else one for path, one in short.items()}

    @cached_property
    def cells(self) -> Mapping[str, Any]:
        """By id, where a cell of a trial stands."""
        return {cell.cell_id: cell for cell in self.data.cells}

    def attempt(self, trial: Trial) -> int | None:
        """The attempt whose numbers a trial has."""
        cell = self.cells.get(trial.cell or "")
        return None if cell is None else cell.trained_attempt_id or cell.attempt_id

    def origins(self, trials: Iterable[Trial]) -> list[tuple[str, int | None]]:
        """The (cell, attempt) pairs of these trials."""
        return [(one.cell, self.attempt(one)) for one in trials if one.cell is not None]

    def levels(self, path: str) -> list[Any]:
        """The levels of a setting that has no range: those searched now, then those that earlier trials had besides."""
        if path not in self._levels:
            found = self.search.ranges[path]
            declared = list(found.levels) if isinstance(found, LevelChoice) else []
            for one in {
                repr(trial.params[path]): trial.params[path] for trial in self.trials if path in trial.params
            }.values():
                if not any(is_same_level(one, level) for level in declared):
                    declared.append(one)
            self._levels[path] = declared
        return self._levels[path]

    @cached_property
    def _levels(self) -> dict[str, list[Any]]:
        return {}

    def moving(self) -> list[str]:
        """The settings that differ between trials that are done."""
        return [
            path
            for path in self.search.ranges
            if len({repr(one.params[path]) for one in self.done if path in one.params}) > 1
        ]

    def counted(self) -> str:
        """How many trials there are by standing, in words."""
        counts: dict[str, int] = dict.fromkeys(("done", "pruned", "diverged", "failed", "asked"), 0)
        for one in self.trials:
            counts[one.standing] += 1
        parts = [f"{count} {WORDS.get(standing, standing)}" for standing, count in counts.items() if count]
        many = f"{len(self.trials)} of {counted(max(self.search.trials, len(self.trials)), 'trial')}"
        return f"{many}: {', '.join(parts)}" if parts else f"no trial yet of {self.search.trials}"

    def searched(self) -> str:
        """What was searched by what and for what, as one sentence without its full stop."""
        ranges = "; ".join(f"{path} {range_text(self.search, path)}" for path in self.search.ranges)
        aims = " and ".join(f"{one.name} ({one.better})" for one in self.objectives)
        pruner = f", pruner {METHODS[self.search.pruner]}" if self.search.pruner else ""
        return f"Sampler {METHODS[self.search.sampler]}{pruner}, seed {self.search.seed}; for {aims}; over {ranges}"


def study_of(store: Store, data: SweepData) -> Study:
    """Return the study of a sweep. Raises ReportError for a sweep that is none, StoreError."""
    search = search_of(store, data.sweep)
    if search is None:
        raise ReportError(
            f"sweep {data.sweep} is no study; give its grid a search: (docs/studies.md), or name one that has it"
        )
    return Study(data=data, search=search, trials=tuple(trials_of(store, data.sweep)))


def at_common_rung(study: Study) -> Study:
    """The study, or where a pruner left few trials that are done, all of them at the last validation that each has a value of."""
    pruned = [one for one in study.trials if one.standing == "pruned" and one.curve]
    if len(study.objectives) > 1 or len(study.done) >= min(ENOUGH, max(1, len(pruned))):
        return study
    reached = [one for one in (*study.done, *pruned) if one.curve]
    rung = min(one.curve[-1][0] for one in reached)
    values = {one.number: dict(one.curve)[rung] for one in reached if rung in dict(one.curve)}
    trials = tuple(
        replace(one, standing="done", values=(values[one.number],))
        if one.number in values
        else replace(one, standing="failed" if one.standing == "done" else one.standing, values=None)
        for one in study.trials
    )
    return replace(study, trials=trials, rung=rung, known_best=study.best)


def rung_note(study: Study) -> list[str]:
    """What to know of values that are not those of the end."""
    if not study.rung:
        return []
    return [
        f"Most trials were pruned, so that all are held against each other at validation {study.rung}, the last that each has a value of; "
        "what they would have come to may have another order."
    ]


def require_done_trials(study: Study, least: int, what: str) -> Study:
    """The study, if it has so many trials that are done. Raises ReportError."""
    if len(study.done) < least:
        have = "none is" if not study.done else "1 is" if len(study.done) == 1 else f"{len(study.done)} are"
        needed = "one trial that is" if least == 1 else f"{counted(least, 'trial')} that are"
        raise ReportError(
            f"{what} takes {needed} done, and of sweep {study.name} {have}; launch it until there are more"
        )
    return study


def range_text(search: Search, path: str) -> str:
    """What a setting may be: (0.003 to 0.1, logarithmic), (4, 8)."""
    found = search.ranges[path]
    if isinstance(found, LevelChoice):
        return f"({', '.join(map(level_text, found.levels))})"
    step = f", steps of {found.step:g}" if found.step is not None else ""
    return f"({found.low:g} to {found.high:g}{', logarithmic' if found.log else ''}{step})"


def level_text(value: Any) -> str:
    """A level of a setting as people write it: on, 8, 0.0123, polar."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def is_same_level(one: Any, other: Any) -> bool:
    """Whether two levels are one: true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def cell_costs(study: Study, attempts: Sequence[Attempt], share: Mapping[str, float]) -> dict[str, CellCost]:
    """By cell; `share` is the GPUs, or cores, of an attempt of it."""
    seconds: dict[str, float] = {}
    for one in attempts:
        seconds[one.cell_id] = seconds.get(one.cell_id, 0.0) + one.elapsed_s
    return {cell: CellCost(seconds=each, hours=each * share.get(cell, 1.0) / 3600) for cell, each in seconds.items()}


def _objective(place: int, name: str, direction: str) -> Objective:
    measure, _, length = name.partition("@")
    probe, _, metric = measure.rpartition(".")
    key, about = next(
        ((key, about) for key, about in metrics.METRICS.items() if key[1] == metric and probe in ("", key[0])),
        ((probe, metric), None),
    )
    unit = "" if about is None or about.unit == "1" else "%" if about.percent else about.unit
    words = (
        METRIC_LABELS.get(metric)
        or METRIC_LABELS.get(".".join(key))
        or {"tokens_per_s": "speed"}.get(metric)
        or measure
    )
    tokens = int(length) if length.isdigit() else 0
    return Objective(
        place=place, name=name, direction=direction, unit=unit.replace("nats/token", "nats per token"),
        percent=about is not None and about.percent, words=f"{words}, {format_length(tokens)}" if tokens else words,
        probe=key[0], metric=metric, length=tokens,
    )  # fmt: skip
