"""Axes of the parallel coordinates: the factors of a table that vary, and its measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..number_format import Column
from ..result_columns import complete_columns
from ..sweep_data import SweepData
from ..table import Table
from .main_results import json_fields, main_columns
from .overview import heading_texts

MAX_LEVELS = 8  # levels of a column of numbers that is still shown level by level


def scale_headings(table: Table) -> list[str]:
    """Return the headings of level columns that are numbers of a scale, such as the learning rates of a study."""
    columns = {heading: {row[index] for row in table.rows} for index, heading in enumerate(_level_headings(table))}
    return [heading for heading, levels in columns.items() if len(levels) > MAX_LEVELS and all(map(_is_finite, levels))]


def parallel_axes(data: SweepData, table: Table) -> list[dict[str, Any]]:
    """Return the axes of a table: its factors that vary, then its scales and the main measures.

    Args:
        data: The sweep.
        table: Its table of complete columns.

    Returns:
        A dict per axis with heading and name; of a factor levels and labels, of a number unit, ends ([least, largest]
        in printed units) and better (1 or -1).
    """
    texts = heading_texts(data)
    scales = scale_headings(table)
    axes, numbers = [], []
    for index, heading in enumerate(_level_headings(table)):
        levels = list(dict.fromkeys(row[index] for row in table.rows))
        name, labels = texts.get(heading, {}).get("words", heading), texts.get(heading, {}).get("levels", {})
        if heading in scales:
            values = [float(level) for level in levels]
            ends = [min(values), max(values)]
            numbers.append({"heading": heading, "name": name, "unit": "", "ends": ends, "better": 1})
        elif heading != "Seeds" and len(levels) > 1:
            axes.append({"heading": heading, "name": name, "levels": levels, "labels": [labels.get(level, level) for level in levels]})  # fmt: skip
    columns = complete_columns(data)
    for column in main_columns(data):
        values = _printed_values(table, columns, column)
        fields = json_fields(column)
        name = f"{fields['heading']}, {fields['unit']}" if fields["unit"] else fields["heading"]
        if len(set(values)) > 1:
            ends = [min(values), max(values)]
            facts = {"heading": column.heading, "name": name, "unit": fields["unit"]}
            numbers.append(facts | {"ends": ends, "better": column.direction})
    return axes + numbers


def _level_headings(table: Table) -> list[str]:
    return list(table.columns[: table.text_columns])


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _printed_values(table: Table, columns: Sequence[Column], column: Column) -> list[float]:
    """Return the numbers of a column in printed units, without those that are missing."""
    index = [candidate.heading for candidate in columns].index(column.heading)
    values = [entries[index].value for entries in table.entries]
    return [100 * value if column.percent else value for value in values if value is not None]
