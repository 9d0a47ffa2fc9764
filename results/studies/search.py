"""The section `search:` of a grid: searched settings, objectives, sampler and pruner (docs/how-to/search-settings.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ..revision_options import read_option

OPTION_KEY = "search"
"""Key in a revision's options."""
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
    """True for a logarithmic scale."""
    step: float | None = None
    """Only low, low + step, ... are allowed; None for all numbers, or all integers if both ends are integers."""

    @property
    def last_step(self) -> int | None:
        """Index of the highest allowed number of a range with steps or of integers; None for a continuous range."""
        step = self.step or (1 if self.is_integer else None)
        # (0.3 - 0) / 0.1 is 2.9999999999999996
        return None if step is None else math.floor((self.high - self.low) / step + 1e-9)

    @property
    def is_integer(self) -> bool:
        """True if both ends are integers, so that all values are."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, share: float) -> float:
        """Return the number at a fraction of the range, from 0 to 1, rounded to the steps or integers of the range.

        That is low + (high - low) share, or on a logarithmic scale low (high / low)^share. The result never exceeds
        `high`. It is a float or an int.
        """
        value = self.low * (self.high / self.low) ** share if self.log else self.low + (self.high - self.low) * share
        if self.last_step is not None:
            step = self.step or 1
            value = self.low + step * min(round((value - self.low) / step), self.last_step)
        return min(value, self.high)


@dataclass(frozen=True)
class LevelChoice:
    """A choice of unordered levels."""

    levels: tuple[SettingValue, ...]


Range = Interval | LevelChoice


@dataclass(frozen=True)
class Search:
    """The definition of a study."""

    ranges: Mapping[str, Range]
    """Ranges by dotted path of the setting, or by axis."""
    objectives: Mapping[str, Direction]
    """Directions by measure, such as val_loss or needle.digits@65536."""
    sampler: Sampler = "tpe"
    trials: int = 20
    pruner: Pruner | None = None
    seed: int = 0
    options: Mapping[str, Any] | None = None
    """Options of the sampler: `startup` (number of random trials at the start), `population` (size of a generation)."""


def search_as_json(search: Search) -> dict[str, Any]:
    """Return the search as JSON values.

    Keys: ranges ([path, range] pairs, a range being `levels`, or low, high, log and step), objectives ([measure,
    direction] pairs), sampler, trials, pruner, seed, options. Ranges and objectives are lists, since some databases
    lose the order of a mapping.
    """
    ranges = [
        [path, {"levels": list(range_.levels)} if isinstance(range_, LevelChoice) else asdict(range_)]
        for path, range_ in search.ranges.items()
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


def search_from_options(options: object) -> Search | None:
    """Return the search in the options of a stored revision; None for no search or an invalid one."""
    return read_option(options, OPTION_KEY, _parse_search)


def _parse_search(fields: Mapping[str, Any]) -> Search | None:
    """Return the search that `search_as_json` wrote; None for an invalid one.

    Invalid are a search without ranges or objectives, samplers other than tpe, random, cmaes and nsga2, pruners other
    than None, asha, hyperband and median, and directions other than minimize and maximize. May raise KeyError,
    TypeError or ValueError for a wrong structure.
    """
    ranges = {str(path): _parse_range(entry) for path, entry in fields["ranges"]}
    objectives = {str(name): direction for name, direction in fields["objectives"]}
    is_valid = fields["sampler"] in get_args(Sampler) and fields["pruner"] in (None, *get_args(Pruner))
    is_valid = is_valid and all(direction in get_args(Direction) for direction in objectives.values())
    if (
        not ranges
        or not objectives
        or not is_valid
        or type(fields["trials"]) is not int
        or type(fields["seed"]) is not int
    ):
        return None
    return Search(
        ranges,
        objectives,
        fields["sampler"],
        fields["trials"],
        fields["pruner"],
        fields["seed"],
        dict(fields["options"]),
    )


def _parse_range(fields: Mapping[str, Any]) -> Range:
    """Return the range of a setting: a LevelChoice if it has `levels`, else an Interval.

    Raises:
        KeyError: a field is missing.
        ValueError: a number is not finite, or `low` exceeds `high`.
    """
    if "levels" in fields:
        return LevelChoice(tuple(fields["levels"]))
    low, high, step = fields["low"], fields["high"], fields["step"]
    numbers = (low, high) if step is None else (low, high, step)
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers) or low > high:
        raise ValueError(f"{fields!r} is not a range")
    return Interval(low, high, bool(fields["log"]), step)
