"""Result of a tuning before a factorial grid, as stored in its revision and shown in its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..console.text import counted
from ..revision_options import read_option

OPTION_KEY = "tuned"
"""Key in a revision's options."""


@dataclass(frozen=True, kw_only=True)
class TunedLevel:
    """A level of the tuned axis: its study, the trial whose settings its cells use, and the cost of all its trials.

    `sweep`, `trial` and `cell` name the study, the number of the best trial and its cell's id. `value` is that trial's
    objective, `settings` maps dotted paths to values, `hours` is the cost in the unit of the TuningResult.
    """

    level: str
    sweep: str
    trial: int
    cell: str
    value: float
    settings: Mapping[str, Any]
    hours: float


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """Tuning with the same number of trials for every level of the axis `per`.

    `trials` is the number per level; `objective` is the measure that was optimized.
    """

    per: str
    trials: int
    sampler: str
    objective: str
    unit: str
    """Unit of the hours: GPU-hours or core-hours."""
    levels: tuple[TunedLevel, ...]

    @property
    def note(self) -> str:
        """A sentence for tables about trials, chosen settings and cost.

        It names trials per level, sampler, objective and total cost, then the settings, trial and cost of each level.
        """
        level_texts = [
            f"{level.level} {', '.join(f'{path} {value}' for path, value in level.settings.items())} "
            f"(trial {level.trial} of {level.sweep}, {level.value:.4g}, {level.hours:.3g} {self.unit})"
            for level in self.levels
        ]
        hours = sum(level.hours for level in self.levels)
        return (
            f"Tuned beforehand: {counted(self.trials, 'trial')} per level of {self.per} ({self.sampler}, for "
            f"{self.objective}), {hours:.3g} {self.unit} in total; the settings were chosen for the tuned seed "
            f"only: {'; '.join(level_texts)}."
        )


def tuning_as_json(tuned: TuningResult) -> dict[str, Any]:
    """Return the result as JSON values.

    Keys: per, trials, sampler, objective, unit, levels (a dict per level: level, sweep, trial, cell, value, settings,
    hours). Settings are lists of [path, value], since some databases lose the order of a mapping.
    """
    levels = [asdict(level) | {"settings": [list(pair) for pair in level.settings.items()]} for level in tuned.levels]
    return asdict(tuned) | {"levels": levels}


def tuning_from_options(options: object) -> TuningResult | None:
    """Return the tuning in the options of a stored revision; None for no tuning or an invalid one."""
    return read_option(options, OPTION_KEY, _parse_tuning)


def _parse_tuning(fields: Mapping[str, Any]) -> TuningResult:
    """Return the result that `tuning_as_json` wrote.

    Raises:
        KeyError: a field is missing.
        TypeError: a field has a wrong type.
        ValueError: a number is not finite, or a field cannot be converted.
    """
    levels = tuple(
        TunedLevel(
            level=str(level["level"]), sweep=str(level["sweep"]), trial=int(level["trial"]), cell=str(level["cell"]),
            value=_finite_number(level["value"]), settings={str(path): value for path, value in level["settings"]},
            hours=_finite_number(level["hours"]),
        )
        for level in fields["levels"]
    )  # fmt: skip
    return TuningResult(
        per=str(fields["per"]), trials=int(fields["trials"]), sampler=str(fields["sampler"]),
        objective=str(fields["objective"]), unit=str(fields["unit"]), levels=levels,
    )  # fmt: skip


def _finite_number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
