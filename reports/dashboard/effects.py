"""Effects block of a page as JSON: the table of all effects, with the pairs behind each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ...results.store.records import MeasurementKey
from ..number_format import Column
from ..render.style import axis_label
from ..stats.effects.effects import Effect
from ..sweep_data import WEIGHTED_SUFFIX, SweepData
from ..tables.effects import MIXED, build_effects_table
from .main_results import json_fields, stratum_text
from .overview import axis_heading, level_below_axis

FIRST = ("Pairs", "Mean", "Low", "High", "p corr")  # numbers of an effect that come before the others


def effects_block(data: SweepData, effect_list: Sequence[Effect]) -> dict[str, Any]:
    """Return the JSON of the table of effects, one row per effect in the given order.

    Returns:
        measures: heading, unit, percent, better, probe, metric, length and definition of each number, and for a mean over lengths
        values (a number or None per cell). rows: `measure` (index), `axis`, `words` (`_effect_labels`) and printed `numbers`, `spot`
        (mean, low and high in printed units, None where unknown), `sure`, `mixed`, `family`, `missing` (text), and
        `pairs` (index). pairs: lists of cell indices, the levels first, then their references; rows share them. words
        and numbers: headings, without that of the measure. notes: sentences, without the first one, on the sweep.
    """
    table = build_effects_table(data, effect_list)
    cell_index = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    headings = table.columns[table.text_columns :]
    rank = {heading: index for index, heading in enumerate(FIRST)}
    order = sorted(range(len(headings)), key=lambda index: rank.get(headings[index], len(FIRST)))
    measures: dict[MeasurementKey, int] = {}
    pairs: dict[tuple[int, ...], int] = {}
    rows = []
    for effect, row in zip(effect_list, table.rows, strict=True):
        column = effect.measure
        cells = tuple(map(cell_index.__getitem__, map(itemgetter(0), effect.origins)))
        scale = 100 if column.percent else 1
        spot = [None if math.isnan(v) else round(scale * v, 9) for v in (effect.mean, effect.low, effect.high)]
        facts = {"measure": measures.setdefault(column.key, len(measures)), "axis": effect.axis}
        numbers = row[table.text_columns :]
        facts |= {"words": _effect_labels(effect), "numbers": [numbers[i] for i in order], "spot": spot}
        facts |= {"sure": effect.is_significant, "mixed": effect.is_heterogeneous}
        family = f"{column.heading}: {axis_label(effect.axis)}"
        facts |= {"family": effect.family if effect.confirmatory else family}
        facts |= {"missing": ", ".join(f"{word} {count}" for word, count in effect.missing.items())}
        rows.append(facts | {"pairs": pairs.setdefault(cells, len(pairs))})
    columns = {effect.measure.key: effect.measure for effect in effect_list}
    keys = {
        key: {
            "probe": key[0],
            "metric": key[1],
            "length": key[2],
            "definition": "" if key[1].endswith(WEIGHTED_SUFFIX) else data.metric(*key[:2]).definition,
        }
        for key in measures
    }
    return {
        "measures": [json_fields(columns[key]) | keys[key] | _length_means(data, columns[key]) for key in measures],
        "words": ["Factor", *table.columns[2 : table.text_columns]],
        "numbers": [headings[index] for index in order],
        "rows": rows,
        "pairs": [list(cells) for cells in pairs],
        "notes": table.notes[1:],
    }


def _effect_labels(effect: Effect) -> list[str]:
    """Return factor, "level against reference" and stratum in plain words; " ~" ends a stratum whose parts differ."""
    factor = axis_heading(effect.axis) + (" (declared)" if effect.confirmatory else "")
    levels = " against ".join(level_below_axis(level, effect.axis) for level in (effect.level, effect.reference))
    return [factor, levels, (stratum_text(effect.where) or "all") + (MIXED if effect.is_heterogeneous else "")]


def _length_means(data: SweepData, column: Column) -> dict[str, Any]:
    """Return {"values": one number or None per cell} for a mean over lengths, which no attempt recorded.

    The result is {} for any other number.
    """
    if not column.metric.endswith(WEIGHTED_SUFFIX):
        return {}
    values = (data.measured_value(cell, column) for cell in data.cells)
    return {"values": [value.value if value is not None else None for value in values]}
