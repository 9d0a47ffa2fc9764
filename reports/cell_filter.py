"""Restriction of reports to some cells (`report --only`), and the error class of reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ..results.console.text import choices_hint
from ..results.errors import UserError
from ..results.names import level_word
from ..results.store.records import AXES, CellState

CellFilters = tuple[str, ...]
"""Filters as `--only` receives them, each `axis=level,level`; a cell must pass all of them."""

_asked: ContextVar[tuple[str, CellFilters] | None] = ContextVar("asked", default=None)


class ReportError(UserError):
    """A report that cannot be made as requested."""


class CellFilterError(ReportError):
    """An invalid filter, or one that matches no cell."""


@contextmanager
def only(sweep: str, words: Sequence[str]) -> Iterator[None]:
    """Inside, whatever is gathered of that sweep has these cells alone; without words all of them. Raises SubsetError."""
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise CellFilterError(f"cells are chosen by words such as recipe=intended, not by {str(words)[:60]}")
    token = _asked.set((sweep, tuple(words)) if words else None)
    try:
        yield
    finally:
        _asked.reset(token)


def asked(sweep: str) -> CellFilters:
    """The words that stand for that sweep now."""
    found = _asked.get()
    return found[1] if found is not None and found[0] == sweep else ()


def kept(cells: Sequence[CellState], words: CellFilters) -> list[CellState]:
    """The cells that every filter lets through. Raises SubsetError for one that means none of them."""
    rules = [_rule(cells, word) for word in words]
    found = [cell for cell in cells if all(_level(cell, axis) in levels for axis, levels in rules)]
    if not found:
        raise CellFilterError(f"no cell of the sweep is {told(words)}; leave one --only out")
    return found


def told(words: CellFilters) -> str:
    """The filters in words: recipe intended; attn_type polar, nope and memory on."""
    parts = (word.partition("=") for word in words)
    return " and ".join(f"{axis.strip()} {levels.replace(',', ', ')}" for axis, _, levels in parts)


def _rule(cells: Sequence[CellState], word: str) -> tuple[str, frozenset[str]]:
    axis, equals, text = (part.strip() for part in word.partition("="))
    known = list(dict.fromkeys([*AXES, *(name for cell in cells for name in cell.axes), "seed"]))
    if not equals:
        raise CellFilterError(f"--only {word[:60]!r} must read axis=level,level, such as attn_type=polar,nope")
    if axis not in known:
        raise CellFilterError(f"--only {word[:60]!r}: the sweep has no axis {axis[:40]!r}; {choices_hint(axis, known)}")
    there = list(dict.fromkeys(found for cell in cells if (found := _level(cell, axis)) is not None))
    meant = {_value(level): level for level in there}
    # a level may have a comma in it
    levels = [text] if _value(text) in meant else [level.strip() for level in text.split(",")]
    for level in levels:
        if _value(level) not in meant:
            raise CellFilterError(
                f"--only {word[:60]!r}: no cell has {axis} {level[:40]!r}; {choices_hint(level, there)}"
            )
    return axis, frozenset(meant[_value(level)] for level in levels)


def _value(text: str) -> str | float:
    """The same for true and on, and for 1.6e7 and 16_000_000, as `launch --only` has it."""
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return level_word(text)


def _level(cell: CellState, axis: str) -> str | None:
    if axis == "seed":
        return str(cell.seed)
    return cell.levels[axis] if axis in AXES else cell.axes.get(axis)
