"""Comparison of a cell's columns and levels with those that follow from its config.

It keeps rows from having false labels. Only the package `sweep` can derive labels from a config; it passes a Derive
function to the checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SECTIONS = ("model", "train", "data")
"""Sections of a config that determine the cell's id; other settings may change without changing the cell."""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Labels that follow from the config of a cell."""

    columns: Mapping[str, Any]
    """Columns of the table `cell`, by name."""
    synonyms: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Other spellings of the cell's level in a grid, by axis."""
    slug_start: str = ""
    slug_end: str = ""
    """Beginning and end of its slug; levels of further axes stand between them."""


Derive = Callable[[Mapping[str, Any]], Derived]
"""Function that returns the labels that follow from a config."""


def column_contradictions(row: Mapping[str, Any], derived: Derived) -> Iterator[str]:
    """Yield a sentence for each column of a row of `cell` that contradicts the cell's config, the slug last.

    Args:
        row: row of `cell` by column name; needs `id`, `slug` and every column in `derived`.
        derived: labels that follow from the config.
    """
    for column, computed in derived.columns.items():
        if row[column] != computed:
            yield f"{column} of cell {row['id']} is {_quoted(row[column])}, its config gives {_quoted(computed)}"
    slug = str(row["slug"])
    if not (slug.startswith(derived.slug_start) and slug.endswith(derived.slug_end)):
        expected = f"{derived.slug_start}...{derived.slug_end}"
        yield f"slug of cell {row['id']} is {_quoted(slug)}, its config gives {_quoted(expected)}"


def axis_contradictions(
    cell: str, axes: Mapping[str, Any], config: Mapping[str, Any], derived: Derived
) -> Iterator[str]:
    """Yield a sentence for each axis of a row of `revision_cell` that contradicts the cell's config.

    Compared are axes that are columns of `cell` (synonyms of the level count as equal) and dotted paths of settings in
    the sections model, train and data. Axes that the grid defines itself, with named levels, are not compared.

    Args:
        cell: cell id, for the sentence.
        axes: level as text by axis.
        config: config of the cell.
        derived: labels that follow from the config.
    """
    for axis, level in axes.items():
        if axis in derived.columns:
            if level in derived.synonyms.get(axis, ()):
                continue
            computed = str(derived.columns[axis])
        elif axis.partition(".")[0] in SECTIONS and "." in axis:
            setting = _setting(config, axis)
            if not _differs(level, setting, compare_text=not axis.startswith("data.")):
                continue
            computed = setting if isinstance(setting, str) else json.dumps(setting)
        else:
            continue
        if level != computed:
            yield f"axes[{_quoted(axis)}] of cell {cell} is {_quoted(level)}, its config gives {_quoted(computed)}"


def _setting(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a config; None if there is none (or if the value is None)."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _differs(level: Any, setting: Any, *, compare_text: bool) -> bool:
    """Return True if a level certainly means another value than the setting.

    False in every case of doubt: settings other than text and numbers, levels that are no JSON number, or a bool
    compared with a number.

    Args:
        level: level as text. A word such as `auto`, which a grid resolves to a number, may mean any number.
        setting: value in the config.
        compare_text: also compare settings that are text.
    """
    if isinstance(setting, str):
        return compare_text and level != setting
    if not isinstance(setting, int | float):
        return False
    try:
        value = json.loads(level)
    except (TypeError, ValueError, RecursionError):
        return False
    is_comparable = isinstance(value, bool) == isinstance(setting, bool) and isinstance(value, int | float)
    return is_comparable and value != setting


def _quoted(value: Any) -> str:
    """Return a value for a message: short and in ASCII."""
    return ascii(value)[:80]
