"""Predicted cost of a launch's cells, as stored in the options of its revision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .revision_options import read_option

OPTION_KEY = "price"
"""Key in a revision's options. The forecast does not count when two launches are compared."""
BOUNDS = ("low", "likely", "high")


@dataclass(frozen=True)
class Forecast:
    """Predicted hours of a complete cell (training and measurements), by source, the most reliable source first.

    `hardware` names the device that the hours are for. `group_of_position` gives the group (index into `groups`) of
    each cell by its position in the revision; -1 for a cell without a forecast. Each group maps a source (measured,
    calibrated, FLOPs) to the low, likely and high number of GPU-hours, or of core-hours for cells without a GPU.
    """

    hardware: str
    group_of_position: tuple[int, ...]
    groups: tuple[Mapping[str, tuple[float, float, float]], ...]

    def cell(self, position: int) -> Mapping[str, tuple[float, float, float]]:
        """Return the predicted hours (low, likely, high) by source for the cell at that position (from 0).

        Empty for an unknown position or a cell without a forecast.
        """
        group = self.group_of_position[position] if 0 <= position < len(self.group_of_position) else -1
        return self.groups[group] if 0 <= group < len(self.groups) else {}


def extend_forecast(before: Forecast, cells: int, added: Forecast) -> Forecast:
    """Return the forecast of a revision, extended by that of the cells that were appended.

    Positions of the revision that `before` does not cover get no forecast. The hardware is that of `before`.

    Args:
        before: forecast of the revision so far.
        cells: number of cells of the revision before the new ones.
        added: forecast of the new cells, by their position from 0.
    """
    of = (*before.group_of_position[:cells], *[-1] * (cells - len(before.group_of_position)))
    groups = len(before.groups)
    return Forecast(
        before.hardware, (*of, *(groups + group for group in added.group_of_position)), (*before.groups, *added.groups)
    )


def without_forecast(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a revision without the forecast."""
    return {name: value for name, value in options.items() if name != OPTION_KEY}


def forecast_as_json(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast as JSON values.

    Keys: place (hardware), of (group by position), groups (source -> low, likely, high).
    """
    return {
        "place": forecast.hardware,
        "of": list(forecast.group_of_position),
        "groups": [dict(group) for group in forecast.groups],
    }


def forecast_from_options(options: object) -> Forecast | None:
    """Return the forecast in the options of a stored revision; None for no forecast or an invalid one."""
    return read_option(options, OPTION_KEY, _parse_forecast)


def _parse_forecast(fields: Mapping[str, Any]) -> Forecast | None:
    """Return the forecast that JSON values hold; None for an invalid one.

    Sources of a group without three valid numbers are left out; a group that is no mapping becomes empty. Indices of
    groups are not checked.
    """
    of, groups = fields.get("of"), fields.get("groups")
    if (
        not isinstance(of, list)
        or not isinstance(groups, list)
        or not all(type(group_index) is int for group_index in of)
    ):
        return None
    read = [{str(name): bounds for name, values in group.items() if (bounds := _parse_bounds(values)) is not None}
            if isinstance(group, Mapping) else {} for group in groups]  # fmt: skip
    return Forecast(str(fields.get("place", "")), tuple(of), tuple(read))


def _parse_bounds(values: object) -> tuple[float, float, float] | None:
    """Return (low, likely, high) from a list of three finite numbers of 0 or more; None for anything else."""
    if not isinstance(values, list | tuple) or len(values) != len(BOUNDS):
        return None
    if not all(type(value) in (int, float) and math.isfinite(value) and value >= 0 for value in values):
        return None
    low, likely, high = map(float, values)
    return low, likely, high
