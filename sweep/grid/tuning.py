"""A grid's `tune:`, studies that go before its factorial: one for each level of an axis, all of the same size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...results.names import why_not
from ...results.studies.search import Search
from . import named_levels
from .axes import level_text
from .named_levels import NamedLevels
from .search_section import REASON, Asked
from .yaml_document import Document

KEY = "tune"
RANGES = f"{KEY}.ranges"
KEYS = ("per", "trials", "objective", "ranges", "sampler", "seed", "startup", "population", "at", "pruner")


@dataclass(frozen=True)
class Tune:
    """What is tuned before a factorial."""

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
        """The name of a level's study."""
        return f"{grid}-tune-{word}"


def read(
    document: Document, given: Mapping[str, Any], levels: Mapping[str, Sequence[Any]], name: str, *named: NamedLevels
) -> Tune:
    """What a grid named `name`, with these levels by axis, wants tuned. Raises GridError for what cannot be."""
    asked = Asked(document, given, KEY, KEYS)
    asked.check_keys()
    if given.get("pruner") is not None:
        raise asked.error(
            f"every level gets the same compute, and a pruner would give each another; {REASON}", "pruner"
        )
    if "stop" in document.data:
        raise asked.error("stop adds seeds to cells that are known beforehand, and these are not; launch with tune first, and put what it found into set")  # fmt: skip
    per = given.get("per")
    if not isinstance(per, str) or per not in levels:
        raise asked.error("must be an axis of this grid", "per", allowed=[*levels], word=str(per))
    search = asked.search()
    if len(search.objectives) > 1:
        raise asked.error("the best of several objectives is not one setting; give one objective", "objective")
    for path in search.ranges:
        _check_apart(asked, path, levels, *named)
    words = {level_text(per, level): level for level in levels[per]}
    at = _at(asked, per, levels)
    found = Tune(per, words, search, at, document.line(KEY))
    for word in words:
        if why := why_not(found.sweep(name, word)):
            raise asked.error(f"the study of {per} {word} would be named {found.sweep(name, word)}, which {why}", "per")
    return found


def _check_apart(asked: Asked, path: str, levels: Collection[str], *named: NamedLevels) -> None:
    """That no axis sets what is tuned."""
    sets = named_levels.paths(path, {}, {})
    for axis in levels:
        if sets & named_levels.paths(axis, *named):
            raise asked.error(f"is varied by the axis {axis}; what is tuned cannot be an axis of the factorial", "ranges", path)  # fmt: skip


def _at(asked: Asked, per: str, levels: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    given = asked.given.get("at", {})
    if not isinstance(given, Mapping):
        raise asked.error(f"must map axes to a level, got {given!r}", "at")
    for axis, level in given.items():
        if axis == per or axis not in levels:
            raise asked.error("must be another axis of this grid", "at", str(axis), allowed=[one for one in levels if one != per], word=str(axis))  # fmt: skip
        known = [level_text(axis, one) for one in levels[axis]]
        if level_text(axis, level) not in known:
            raise asked.error(f"no level {level!r} in this grid", "at", str(axis), allowed=known, word=str(level))
    return {str(axis): level for axis, level in given.items()}
