"""Some cells of a sweep alone: what `report --only` keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ..results.store.records import AXES, CellState
from ..results.text import choice
from .errors import ReportError

Words = tuple[str, ...]
"""As `--only` is given: axis=level,level each; a cell is kept that all of them let through."""

_asked: ContextVar[tuple[str, Words] | None] = ContextVar("asked", default=None)


@contextmanager
def only(sweep: str, words: Words) -> Iterator[None]:
    """Inside, whatever is gathered of that sweep has these cells alone; without words all of them."""
    token = _asked.set((sweep, words) if words else None)
    try:
        yield
    finally:
        _asked.reset(token)


def asked(sweep: str) -> Words:
    """The words that stand for that sweep now."""
    found = _asked.get()
    return found[1] if found is not None and found[0] == sweep else ()


def kept(cells: Sequence[CellState], words: Words) -> list[CellState]:
    """The cells that every filter lets through. Raises ReportError for one that means none of them."""
    rules = [_rule(cells, word) for word in words]
    found = [cell for cell in cells if all(_level(cell, axis) in levels for axis, levels in rules)]
    if not found:
        raise ReportError(f"no cell of the sweep is {told(words)}; leave one --only out")
    return found


def told(words: Words) -> str:
    """The filters in words: recipe intended; attn_type polar, nope and memory on."""
    parts = (word.partition("=") for word in words)
    return " and ".join(f"{axis.strip()} {levels.replace(',', ', ')}" for axis, _, levels in parts)


def _rule(cells: Sequence[CellState], word: str) -> tuple[str, frozenset[str]]:
    axis, equals, text = word.partition("=")
    axis, levels = axis.strip(), frozenset(level.strip() for level in text.split(","))
    known = list(dict.fromkeys([*AXES, *(name for cell in cells for name in cell.axes), "seed"]))
    if not equals:
        raise ReportError(f"--only {word[:60]!r} must read axis=level,level, such as attn_type=polar,nope")
    if axis not in known:
        raise ReportError(f"--only {word[:60]!r}: the sweep has no axis {axis[:40]!r}; {choice(axis, known)}")
    there = list(dict.fromkeys(found for cell in cells if (found := _level(cell, axis)) is not None))
    for level in sorted(levels):
        if level not in there:
            raise ReportError(f"--only {word[:60]!r}: no cell has {axis} {level[:40]!r}; {choice(level, there)}")
    return axis, levels


def _level(cell: CellState, axis: str) -> str | None:
    if axis == "seed":
        return str(cell.seed)
    return cell.levels[axis] if axis in AXES else cell.axes.get(axis)
