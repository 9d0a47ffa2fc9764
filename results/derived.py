"""Columns of a cell that follow from its config: compared with what a row says, so that no row can carry a false label.

How they follow is known to the package `sweep` alone, which passes a Derive to those who compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SECTIONS = ("model", "train", "data")
"""Of a config, those that a cell's id is taken of; settings in others may change while the cell stays the same."""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Labels that follow from the config of a cell."""

    columns: Mapping[str, Any]
    """Columns of the table `cell`, by name."""
    synonyms: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Other words of a grid for the level that a cell has, by axis."""
    slug_start: str = ""
    slug_end: str = ""
    """How its slug begins and ends; levels of further axes stand between."""


Derive = Callable[[Mapping[str, Any]], Derived]


def column_contradictions(row: Mapping[str, Any], derived: Derived) -> Iterator[str]:
    """Yield a sentence for each column of a row of `cell` that is not as the cell's config gives it."""
    for column, computed in derived.columns.items():
        if row[column] != computed:
            yield f"{column} of cell {row['id']} is {_shown(row[column])}, its config gives {_shown(computed)}"
    slug = str(row["slug"])
    if not (slug.startswith(derived.slug_start) and slug.endswith(derived.slug_end)):
        wanted = f"{derived.slug_start}...{derived.slug_end}"
        yield f"slug of cell {row['id']} is {_shown(slug)}, its config gives {_shown(wanted)}"


def axis_contradictions(
    cell: str, axes: Mapping[str, Any], config: Mapping[str, Any], derived: Derived
) -> Iterator[str]:
    """Yield a sentence for each axis of a row of `revision_cell` that is not as the cell's config gives it.

    An axis of the grid's own, whose levels have names, follows from the grid alone and is not compared.
    """
    for axis, level in axes.items():
        if axis in derived.columns:
            if level in derived.synonyms.get(axis, ()):
                continue
            computed = str(derived.columns[axis])
        elif axis.partition(".")[0] in SECTIONS and "." in axis:
            setting = _setting(config, axis)
            if not _differs(level, setting, words=not axis.startswith("data.")):
                continue
            computed = setting if isinstance(setting, str) else json.dumps(setting)
        else:
            continue
        if level != computed:
            yield f"axes[{_shown(axis)}] of cell {cell} is {_shown(level)}, its config gives {_shown(computed)}"


def _setting(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None where there is none."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _differs(level: Any, setting: Any, *, words: bool) -> bool:
    """Return True where a level, as text, surely means another value than the setting.

    A word such as `auto`, which a grid resolves to a number, may mean any number.
    """
    if isinstance(setting, str):
        return words and level != setting
    if not isinstance(setting, int | float):
        return False
    try:
        meant = json.loads(level)
    except (TypeError, ValueError, RecursionError):
        return False
    alike = isinstance(meant, bool) == isinstance(setting, bool) and isinstance(meant, int | float)
    return alike and meant != setting


def _shown(value: Any) -> str:
    """Return a value for a message: short, in letters that no terminal obeys."""
    return ascii(value)[:80]
