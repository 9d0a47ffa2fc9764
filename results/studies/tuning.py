"""What was tuned before a factorial, as its revision keeps it and its tables tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..console.text import counted
from ..revision_options import read_option

OPTION = "tuned"
"""Under this key in a revision's options."""


@dataclass(frozen=True, kw_only=True)
class TunedLevel:
    """A level of the tuned axis: its study, the trial whose settings its cells have, and what all its trials took."""

    level: str
    sweep: str
    trial: int
    cell: str
    value: float
    settings: Mapping[str, Any]
    hours: float


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The same number of trials for every level of an axis."""

    per: str
    trials: int
    sampler: str
    objective: str
    unit: str
    """Of hours: GPU-hours or core-hours."""
    levels: tuple[TunedLevel, ...]

    @property
    def note(self) -> str:
        """One sentence for tables: what was tuned, what was found, what it cost."""
        told = [
            f"{one.level} {', '.join(f'{path} {value}' for path, value in one.settings.items())} "
            f"(trial {one.trial} of {one.sweep}, {one.value:.4g}, {one.hours:.3g} {self.unit})"
            for one in self.levels
        ]
        hours = sum(one.hours for one in self.levels)
        return (
            f"Tuned before it, {counted(self.trials, 'trial')} for every level of {self.per} ({self.sampler}, for {self.objective}), {hours:.3g} "
            f"{self.unit} in all, which speak of the seed that was tuned: {'; '.join(told)}."
        )


def as_option(tuned: TuningResult) -> dict[str, Any]:
    """As JSON; settings in lists, since the order of a mapping is lost in some databases."""
    levels = [asdict(one) | {"settings": [list(pair) for pair in one.settings.items()]} for one in tuned.levels]
    return asdict(tuned) | {"levels": levels}


def tuned_of(options: object) -> TuningResult | None:
    """What a launch stored with its revision; None where there is nothing of the kind."""
    return read_option(options, OPTION, _tuned)


def _tuned(found: Mapping[str, Any]) -> TuningResult:
    levels = tuple(
        TunedLevel(
            level=str(one["level"]), sweep=str(one["sweep"]), trial=int(one["trial"]), cell=str(one["cell"]),
            value=_number(one["value"]), settings={str(path): value for path, value in one["settings"]},
            hours=_number(one["hours"]),
        )
        for one in found["levels"]
    )  # fmt: skip
    return TuningResult(
        per=str(found["per"]), trials=int(found["trials"]), sampler=str(found["sampler"]),
        objective=str(found["objective"]), unit=str(found["unit"]), levels=levels,
    )  # fmt: skip


def _number(given: object) -> float:
    if not isinstance(given, int | float) or not math.isfinite(given):
        raise ValueError(f"{given!r} is no number")
    return float(given)
