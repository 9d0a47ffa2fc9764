"""What a grid's `search:` says: which settings are searched, by what, for what (docs/studies.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ..revision_options import read_option

OPTION = "search"
"""Under this key in a revision's options."""
Sampler = Literal["tpe", "random", "cmaes", "nsga2"]
Pruner = Literal["asha", "hyperband", "median"]
Direction = Literal["minimize", "maximize"]
SettingValue = bool | int | float | str | None


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Even in the logarithm."""
    step: float | None = None
    """Only low, low + step, ...; None: any number, or any whole one where `whole`."""

    @property
    def whole(self) -> bool:
        """Whether both ends are whole numbers, so that all between are."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, share: float) -> float:
        """The number at that share of the way, from 0 to 1, with the steps or whole numbers that the range asks for."""
        along = (self.high - self.low) * share
        found = self.low * (self.high / self.low) ** share if self.log else self.low + along
        step = self.step or (1 if self.whole else None)
        if step is not None:
            found = self.low + step * min(round((found - self.low) / step), int((self.high - self.low) / step))
        return min(found, self.high)


@dataclass(frozen=True)
class LevelChoice:
    """One of these levels, of which none lies between two others."""

    levels: tuple[SettingValue, ...]


Range = Interval | LevelChoice


@dataclass(frozen=True)
class Search:
    """One study."""

    ranges: Mapping[str, Range]
    """By dotted path of the setting, or axis."""
    objectives: Mapping[str, Direction]
    """By measure, such as val_loss or needle.digits@65536."""
    sampler: Sampler = "tpe"
    trials: int = 20
    pruner: Pruner | None = None
    seed: int = 0
    options: Mapping[str, Any] | None = None
    """Of the sampler: `startup` trials at random first, `population` of a generation."""


def as_options(search: Search) -> dict[str, Any]:
    """As JSON; ranges and objectives in lists, since the order of a mapping is lost in some databases."""
    ranges = [
        [path, {"levels": list(one.levels)} if isinstance(one, LevelChoice) else asdict(one)]
        for path, one in search.ranges.items()
    ]
    return {
        "ranges": ranges,
        "objectives": [list(pair) for pair in search.objectives.items()],
        "sampler": search.sampler,
        "trials": search.trials,
        "pruner": search.pruner,
        "seed": search.seed,
        "options": dict(search.options or {}),
    }


def search_from(options: object) -> Search | None:
    """The search that a launch stored with its revision; None where there is none, or what is no search."""
    return read_option(options, OPTION, _search)


def _search(found: Mapping[str, Any]) -> Search | None:
    ranges = {str(path): _range(given) for path, given in found["ranges"]}
    objectives = {str(name): direction for name, direction in found["objectives"]}
    known = found["sampler"] in get_args(Sampler) and found["pruner"] in (None, *get_args(Pruner))
    known = known and all(one in get_args(Direction) for one in objectives.values())
    if not ranges or not objectives or not known or type(found["trials"]) is not int or type(found["seed"]) is not int:
        return None
    return Search(
        ranges, objectives, found["sampler"], found["trials"], found["pruner"], found["seed"], dict(found["options"])
    )


def _range(given: Mapping[str, Any]) -> Range:
    if "levels" in given:
        return LevelChoice(tuple(given["levels"]))
    low, high, step = given["low"], given["high"], given["step"]
    numbers = (low, high) if step is None else (low, high, step)
    if not all(type(one) in (int, float) and math.isfinite(one) for one in numbers) or low > high:
        raise ValueError(f"{given!r} is no range")
    return Interval(low, high, bool(given["log"]), step)
