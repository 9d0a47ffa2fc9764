"""What a launch predicted that its cells would take, as its revision's options keep it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .revision_options import read_option

OPTION = "price"
"""Under this key in a revision's options. What was predicted is no part of what was asked for."""
BOUNDS = ("low", "likely", "high")


@dataclass(frozen=True)
class Forecast:
    """Hours of a whole cell, trained and measured from the start, by the sources that knew them, the best first.

    `of` gives the group of each cell by its position in the revision. A group has by source (measured, calibrated, FLOPs)
    the low, the likely and the high number of GPU-hours, or core-hours for cells without a GPU.
    """

    place: str
    of: tuple[int, ...]
    groups: tuple[Mapping[str, tuple[float, float, float]], ...]

    def cell(self, position: int) -> Mapping[str, tuple[float, float, float]]:
        """What was predicted for the cell at that position; nothing for one that is not there."""
        group = self.of[position] if 0 <= position < len(self.of) else -1
        return self.groups[group] if 0 <= group < len(self.groups) else {}


def extended(before: Forecast, cells: int, further: Forecast) -> Forecast:
    """The forecast of a revision of so many cells, with that of cells that were added after them."""
    of = (*before.of[:cells], *[-1] * (cells - len(before.of)))
    groups = len(before.groups)
    return Forecast(before.place, (*of, *(groups + one for one in further.of)), (*before.groups, *further.groups))


def without_forecast(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for alone."""
    return {name: value for name, value in options.items() if name != OPTION}


def as_option(forecast: Forecast) -> dict[str, Any]:
    """As JSON."""
    return {"place": forecast.place, "of": list(forecast.of), "groups": [dict(group) for group in forecast.groups]}


def forecast_of(options: object) -> Forecast | None:
    """The forecast that a launch stored, None where it stored none, or what is no forecast."""
    return read_option(options, OPTION, _forecast)


def _forecast(given: Mapping[str, Any]) -> Forecast | None:
    of, groups = given.get("of"), given.get("groups")
    if not isinstance(of, list) or not isinstance(groups, list) or not all(type(one) is int for one in of):
        return None
    read = [{str(name): bounds for name, some in group.items() if (bounds := _bounds(some)) is not None}
            if isinstance(group, Mapping) else {} for group in groups]  # fmt: skip
    return Forecast(str(given.get("place", "")), tuple(of), tuple(read))


def _bounds(given: object) -> tuple[float, float, float] | None:
    if not isinstance(given, list | tuple) or len(given) != len(BOUNDS):
        return None
    if not all(type(one) in (int, float) and math.isfinite(one) and one >= 0 for one in given):
        return None
    low, likely, high = map(float, given)
    return low, likely, high
