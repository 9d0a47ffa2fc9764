"""Which configurations of two sweeps are the same one: by the five axes, and by whatever further axis either of them varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...results.store.records import AXES, CellState
from ..sweep_data import SweepData

NOT_THERE = ("none", "off", "-")
"""Levels of a part that a network does not have; a config that leaves the part out says the same."""


@dataclass(frozen=True)
class Match:
    """A configuration of both sweeps: its runs here and there, and its levels of the further axes."""

    mine: Sequence[CellState]
    theirs: Sequence[CellState]
    further: Mapping[str, str]


def matched(mine: SweepData, theirs: SweepData) -> list[Match]:
    """The configurations that both have, in the order of `theirs`. One that varies an axis of which the other's config says nothing
    has no partner; else the config says at which level the other stands."""
    axes = further_axes(mine, theirs)
    found = []
    ours: dict[tuple[str, ...], list[Sequence[CellState]]] = {}
    for key, cells in mine.configurations().items():
        ours.setdefault(key[: len(AXES)], []).append(cells)
    for key, cells in theirs.configurations().items():
        levels = {axis: _level(theirs, cells[0], axis) for axis in axes}
        for some in ours.get(key[: len(AXES)], []):
            if all(_level(mine, some[0], axis) == level for axis, level in levels.items()):
                found.append(Match(some, cells, {axis: level or NOT_THERE[0] for axis, level in levels.items()}))
    return found


def further_axes(mine: SweepData, theirs: SweepData) -> list[str]:
    """The axes beyond the five that vary in either sweep."""
    return list(dict.fromkeys([*theirs.extra_axes(), *mine.extra_axes()]))


def _level(data: SweepData, cell: CellState, axis: str) -> str | None:
    """The level of an axis at which a cell stands, by its config where the sweep does not vary it; None for none."""
    level: Any = cell.axes.get(axis)
    if level is None:
        level = data.setting(cell, axis)
    text = "none" if level is None else str(level).lower()
    return None if text in NOT_THERE else text
