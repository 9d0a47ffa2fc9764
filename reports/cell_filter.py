"""Restriction of reports to some cells (`report --only`), and the error class of reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ..results.console.text import choices_hint
from ..results.errors import UserError
from ..results.names import normalized_level
from ..results.store.records import AXES, CellState

CellFilters = tuple[str, ...]
"""Filters as `--only` receives them, each `axis=level,level`; a cell must pass all of them."""

_active_filters: ContextVar[tuple[str, CellFilters] | None] = ContextVar("asked", default=None)


class ReportError(UserError):
    """A report that cannot be made as requested."""


class CellFilterError(ReportError):
    """An invalid filter, or one that matches no cell."""


@contextmanager
def filtered_cells(sweep: str, filters: Sequence[str]) -> Iterator[None]:
    """Restrict, within this context, every read of that sweep to the cells that pass the filters.

    Empty filters let all cells pass. Replaces the filters of an outer context, also those of another sweep. Filters are
    parsed only when cells are read.

    Args:
        sweep: Name of the sweep.
        filters: Filters as `--only` receives them, each `axis=level,level`; a cell must pass all of them.

    Raises:
        CellFilterError: The filters are not a list of texts.
    """
    if not isinstance(filters, list | tuple) or not all(isinstance(filter_text, str) for filter_text in filters):
        raise CellFilterError(f"cell filters are texts such as recipe=intended, not {str(filters)[:60]}")
    token = _active_filters.set((sweep, tuple(filters)) if filters else None)
    try:
        yield
    finally:
        _active_filters.reset(token)


def active_filters(sweep: str) -> CellFilters:
    """Return the filters in force for that sweep; empty for none, or if those in force are of another sweep."""
    active = _active_filters.get()
    return active[1] if active is not None and active[0] == sweep else ()


def filter_cells(cells: Sequence[CellState], filters: CellFilters) -> list[CellState]:
    """Return the cells that pass every filter (`axis=level,level`: one of the levels), in their order.

    Without filters all cells pass. Levels are compared by value (true equals on, 1.6e7 equals 16_000_000); "seed" is an
    axis too.

    Raises:
        CellFilterError: A filter is invalid, or no cell passes (also without any cell).
    """
    rules = [_parse_filter(cells, filter_text) for filter_text in filters]
    matching = [cell for cell in cells if all(_level_of_cell(cell, axis) in levels for axis, levels in rules)]
    if not matching:
        raise CellFilterError(f"no cell of the sweep matches {describe_filters(filters)}; remove an --only filter")
    return matching


def describe_filters(filters: CellFilters) -> str:
    """Return the filters as text: "recipe intended", "attn_type polar, nope and memory on"; empty without filters."""
    parts = (filter_text.partition("=") for filter_text in filters)
    return " and ".join(f"{axis.strip()} {levels.replace(',', ', ')}" for axis, _, levels in parts)


def _parse_filter(cells: Sequence[CellState], filter_text: str) -> tuple[str, frozenset[str]]:
    """Return (axis, allowed levels as the cells spell them) of a filter `axis=level,level`.

    The axis is one of AXES, an extra axis or "seed". Levels are compared by value: true equals on, 1.6e7 equals
    16_000_000. A text that is a level with a comma counts as one level.

    Args:
        cells: Cells whose axes and levels are permitted.
        filter_text: The filter.

    Raises:
        CellFilterError: The sweep has no such axis or level, or the filter is malformed.
    """
    axis, equals, text = (part.strip() for part in filter_text.partition("="))
    axes = list(dict.fromkeys([*AXES, *(name for cell in cells for name in cell.axes), "seed"]))
    if not equals:
        raise CellFilterError(f"--only {filter_text[:60]!r} must read axis=level,level, such as attn_type=polar,nope")
    if axis not in axes:
        raise CellFilterError(
            f"--only {filter_text[:60]!r}: the sweep has no axis {axis[:40]!r}; {choices_hint(axis, axes)}"
        )
    levels_present = list(dict.fromkeys(level for cell in cells if (level := _level_of_cell(cell, axis)) is not None))
    by_value: dict[str | float, set[str]] = {}
    for level in levels_present:
        by_value.setdefault(_comparable_level(level), set()).add(level)
    # a level may contain a comma
    levels = [text] if _comparable_level(text) in by_value else [level.strip() for level in text.split(",")]
    for level in levels:
        if _comparable_level(level) not in by_value:
            raise CellFilterError(
                f"--only {filter_text[:60]!r}: no cell has {axis} {level[:40]!r}; {choices_hint(level, levels_present)}"
            )
    return axis, frozenset(spelling for level in levels for spelling in by_value[_comparable_level(level)])


def _comparable_level(text: str) -> str | float:
    """Return a comparable form of a level: a float for a number, with "_" ignored, else the normalised text.

    So true equals on, and 1.6e7 equals 16_000_000, as in `launch --only`.
    """
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return normalized_level(text)


def _level_of_cell(cell: CellState, axis: str) -> str | None:
    """Return the level of a cell on an axis or its seed as text; None if it has no such axis."""
    if axis == "seed":
        return str(cell.seed)
    return cell.levels[axis] if axis in AXES else cell.axes.get(axis)
