"""A grid's studies: `search`, whose trials are its cells, and `tune`, one study for each level of an axis before a factorial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

from ...results.names import why_not
from ...results.studies.search import Choice, Search
from . import named_levels
from .axes import level_text
from .cell import Cell
from .contrasts import requested_by
from .expansion import Expansion
from .grid_file import TuneKeys
from .measures import check_measured, measure
from .named_levels import NamedLevels
from .yaml_document import Document

KEY = "search"
RANGES = f"{KEY}.ranges"
TUNE = "tune"


@dataclass(frozen=True)
class Tune:
    """The studies that go before a factorial."""

    per: str
    """The axis each of whose levels has a study of its own."""
    levels: Mapping[str, Any]
    """By their words, as the file writes them."""
    search: Search
    """The same for each of them."""
    at: Mapping[str, Any] = field(default_factory=dict)
    """By axis: the level at which it stands meanwhile; one that is not named stands where the grid's base has it."""
    line: int = 1

    def sweep(self, grid: str, word: str) -> str:
        """Return the name of a level's study."""
        return f"{grid}-tune-{word}"


def read_tune(
    document: Document, given: TuneKeys, levels: Mapping[str, Sequence[Any]], name: str, *named: NamedLevels
) -> Tune:
    """Return the studies of a grid named `name`, with these levels by axis. Raises GridError for what cannot be tuned."""
    if "stop" in document.data:
        raise document.error((TUNE,), "stop adds seeds to cells that are known beforehand, and these are not; launch with tune first, and put what it found into set")  # fmt: skip
    per = given.per
    if not isinstance(per, str) or per not in levels:
        raise document.error((TUNE, "per"), "must be an axis of this grid", levels, str(per))
    for path in given.ranges:
        for axis in levels:
            if named_levels.paths(path, {}, {}) & named_levels.paths(axis, *named):
                problem = f"is varied by the axis {axis}; what is tuned cannot be an axis of the factorial"
                raise document.error((TUNE, "ranges", path), problem)
    for axis, level in given.at.items():
        where = (TUNE, "at", axis)
        if axis == per or axis not in levels:
            others = [one for one in levels if one != per]
            raise document.error(where, "must be another axis of this grid", others, axis)
        known = [level_text(axis, one) for one in levels[axis]]
        if level_text(axis, level) not in known:
            raise document.error(where, f"no level {level!r} in this grid", known, str(level))
    words = {level_text(per, level): level for level in levels[per]}
    found = Tune(per, words, given.search(), given.at, document.line(TUNE))
    for word in words:
        if why := why_not(study := found.sweep(name, word)):
            raise document.error((TUNE, "per"), f"the study of {per} {word} would be named {study}, which {why}")
    return found


def ends(document: Document, search: Search, expansion: Expansion, key: str = KEY) -> list[Cell]:
    """Return the cells at the ends of all ranges, one setting at a time, the others at their first level or low end.

    Raises GridError for a range that holds what no cell can have, and for an objective that no cell is measured by.
    """
    every = {
        path: one.levels if isinstance(one, Choice) else (one.low, one.high) for path, one in search.ranges.items()
    }
    first = {path: levels[0] for path, levels in every.items()}
    found: dict[str, Cell] = {}
    for params in [first, *({**first, path: level} for path, levels in every.items() for level in levels[1:])]:
        found |= {cell.id: cell for cell in expansion.cells(params, None)}
    asked = requested_by(found.values())
    for text in search.objectives:
        one = measure(text)
        try:
            check_measured(one.probe, one.metric.name, one.length, asked)
        except PydanticCustomError as error:
            raise document.located(error, key, "objective") from error
    for config in (cell.config for cell in found.values()):
        if search.pruner is not None and config.eval.validate_every >= config.train.steps:
            raise document.error(
                (KEY, "pruner"),
                f"there is no validation before the end: {config.train.steps} steps, eval.validate_every {config.eval.validate_every}; "
                "lower that",
            )
    return list(found.values())
