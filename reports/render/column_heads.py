"""Heads of columns for renderers that can span: common headings of adjacent columns, short labels and units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from ..table import Table, TableEntry

SHARE, PURE = "fraction", "1"
"""Units of shares, which are printed in percent, and of numbers without a unit."""
MIN_SPAN_CHARS = 3
"""Length from which on a word that adjacent headings share is a common heading, unlike the p of p values."""
INTERVAL = ("Low", "High")
MEASURE = "Measure"
"""Heading of a first column that repeats in blocks of rows and can become a line above each of them."""


@dataclass(frozen=True)
class ColumnHead:
    """Head of a column: a heading that it shares with its neighbours ("" for none), its own label, and its unit."""

    span: str
    label: str
    unit: str = ""


def column_heads(table: Table) -> tuple[ColumnHead, ...]:
    """Return the heads of a table's columns, labels and numbers, in order.

    Adjacent number columns whose headings share their first word (up to a space or "@") or their last one get it as a
    common heading: "Clean@2K" and "Clean@64K" become 2K and 64K under Clean, "nope clean" and "rope clean" nope and
    rope under clean. Low and High become the limits of a 95% interval. A unit is that of all numbers of a column that
    have one, "" where rows differ; a label does not repeat it.
    """
    first = table.text_columns
    heads = [ColumnHead("", heading) for heading in table.columns[:first]]
    numbers = table.columns[first:]
    units = [unit_text(row[column] for row in table.entries) for column in range(len(numbers))]
    position = 0
    while position < len(numbers):
        runs = [_run(numbers[position:], split) for split in (_by_last_word, _by_first_word)]
        span, labels = max(runs, key=lambda run: len(run[1]))
        if numbers[position : position + 2] == INTERVAL:
            span, labels = "95% interval", ["low", "high"]
        for label, unit in zip(labels, units[position:], strict=False):
            shown = "" if unit and unit.lower() == label.lower() else unit
            heads.append(ColumnHead(span, label.removesuffix(f" {unit}") if unit else label, shown))
        position += len(labels)
    return tuple(heads)


def spans(heads: Iterable[ColumnHead]) -> list[tuple[str, str, int]]:
    """Return (common heading, unit, number of columns) of each run of columns; a column without one is a run alone.

    The unit is "" where the columns of a run differ in it.
    """
    runs: list[tuple[str, str, int]] = []
    for _, columns in groupby(enumerate(heads), lambda pair: pair[1].span or pair[0]):
        run = [head for _, head in columns]
        units = {head.unit for head in run}
        runs.append((run[0].span, units.pop() if len(units) == 1 else "", len(run)))
    return runs


def unit_text(entries: Iterable[TableEntry], signs: str = "+") -> str:
    """Return the unit that all entries with a number share; "" for none, for several, and for pure numbers.

    It is "%" for shares, and "points" for differences of them, which are percentage points.

    Args:
        entries: Entries.
        signs: First characters of a text that show a difference. A minus sign alone may also belong to a share, such as
            a negative relative drop.
    """
    valued = [entry for entry in entries if entry.value is not None and entry.unit not in (None, "", PURE)]
    units = {entry.unit for entry in valued}
    if len(units) != 1:
        return ""
    unit = str(units.pop())
    if unit == SHARE:
        return "points" if any(entry.text.startswith(tuple(signs)) for entry in valued) else "%"
    return unit


def row_blocks(table: Table) -> list[tuple[str, int]]:
    """Return the blocks of rows with the same measure, as (name with unit, number of rows), in the order of the rows.

    Empty unless the first of several label columns is headed Measure and each measure stands in adjacent rows.
    """
    if table.text_columns < 2 or table.columns[0] != MEASURE:
        return []
    measures = list(dict.fromkeys(row[0] for row in table.rows))
    sizes = [sum(row[0] == measure for row in table.rows) for measure in measures]
    in_order = [measure for measure, size in zip(measures, sizes, strict=True) for _ in range(size)]
    if in_order != [row[0] for row in table.rows]:
        return []
    blocks = []
    for measure, size in zip(measures, sizes, strict=True):
        rows = [row for row, texts in zip(table.entries, table.rows, strict=True) if texts[0] == measure]
        unit = unit_text((entry for row in rows for entry in row), "+-")
        blocks.append((f"{measure} ({unit})" if unit else measure, size))
    return blocks


def _run(headings: tuple[str, ...], split: Callable[[str], tuple[str, str]]) -> tuple[str, list[str]]:
    """Return the common word of the first headings and their remainders; "" and the first heading if it shares none.

    Args:
        headings: Headings from a position on.
        split: Splits a heading into a word and the remainder.
    """
    word = split(headings[0])[0]
    labels: list[str] = []
    for heading in headings:
        shared, label = split(heading)
        if shared != word or not label:
            break
        labels.append(label)
    return (word, labels) if len(word) >= MIN_SPAN_CHARS and len(labels) > 1 else ("", [headings[0]])


def _by_first_word(heading: str) -> tuple[str, str]:
    word, *label = re.split("[ @]", heading, maxsplit=1)
    return word, "".join(label)


def _by_last_word(heading: str) -> tuple[str, str]:
    label, _, word = heading.rpartition(" ")
    return word, label
