"""What came out of a sweep, for the first page: the best configurations, what every level does, and the needle over lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from ...results.console.text import counted
from ...results.store.records import CellState
from ...results.store.store import Store
from ..figures.canvas.base import training_lengths
from ..figures.canvas.drawing import axis_label, shown_values
from ..figures.canvas.length_frames import BARS, length_frame, line_means, only
from ..number_format import NEEDLE, Column, format_number
from ..result_columns import FIXED_PROBES, complete_columns, extra_metrics
from ..stats.effects.effects import ALPHA, Effect, contrasts, effects, factors, reference_level, spread
from ..stats.effects.needle_baseline import ceiling, needle_caption, yardstick
from ..stats.noise.best_probability import Candidate, best_probabilities, configuration_means, rivals
from ..sweep_data import SweepData, cell_level
from ..table_builder import DUST, difference, measured_entry, p_value_entry
from .caveats import result_caveats

PLAIN = ("off", "baseline")
RANKED = 5  # configurations that the first page names of each measure


def answer_block(store: Store, data: SweepData, found: Sequence[Effect] | None = None) -> dict[str, Any]:
    """Best configurations, forest and needle picture; each with the reason where there is nothing to show.

    `found`: effects that are worked out already, those of the main measures among them; None: they are worked out here.
    """
    columns = main_columns(data)
    forest = forest_of(data, columns, found)
    best = best_configurations(data, columns)
    answer = {"best": best, "declared": declared_rows(data), "forest": forest, "needle": needle_panels(store, data)}
    return answer | {"care": result_caveats(data, columns, best, forest)}


def main_columns(data: SweepData) -> list[Column]:
    """The numbers that decide: needle and clean loss at the longest length, validation loss; those that any cell has."""
    # the last of a probe is at the longest length
    columns = [
        column for column in complete_columns(data) if FIXED_PROBES.get(column.probe, column.metric) == column.metric
    ]
    by_probe = {column.probe: column for column in columns}
    wanted = [by_probe[probe] for probe in ("needle", "val", "clean") if probe in by_probe]
    further = {probe for probe, _ in extra_metrics(data)} - FIXED_PROBES.keys()
    wanted += [column for probe, column in by_probe.items() if probe in further and column.direction]
    return [column for column in wanted if any(data.numbers(data.cells, column))]


def json_fields(column: Column) -> dict[str, Any]:
    """A measure, as the page prints it."""
    unit = "%" if column.percent else column.unit
    return {"heading": column.heading, "unit": unit, "percent": column.percent, "better": column.direction}


# --- the best -------------------------------------------------------------------------------------------------------


def best_configurations(data: SweepData, columns: Sequence[Column]) -> dict[str, Any]:
    """By measure the best configurations, each with a 95% interval by the spread between runs that ought to agree."""
    groups = data.configurations()
    measures = [json_fields(column) | _ranking(data, groups, column) for column in columns]
    why = None if measures else "No cell has a number yet."
    return {"measures": measures, "why": why}


def _ranking(data: SweepData, groups: Mapping[tuple[str, ...], Sequence[CellState]], column: Column) -> dict[str, Any]:
    found = configuration_means(data, column)
    against = rivals(data, column) or {}
    chances = best_probabilities(data, column)
    ranked = sorted(found, key=lambda key: -column.direction * found[key][0])[:RANKED]
    rows = []
    for key in ranked:
        cells = groups[key]
        low, high = interval(against[key]) if key in against else (None, None)
        row: dict[str, Any] = {"cells": [cell.cell_id for cell in cells], "words": _words(data, cells[0])}
        row |= {"text": measured_entry(data, cells, column).text, "value": found[key][0], "low": low, "high": high}
        rows.append(row | {"interval": _range_text(column, low, high), "chance": chances.get(key)})
    tied = sum(value == found[ranked[0]][0] for value, _ in found.values())
    if 1 < len(found) == tied:
        same = format_number(round(found[ranked[0]][0], DUST), column.decimals, percent=column.percent)
        told = f"All {counted(tied, 'configuration')} have the same number, {same}: none is the best."
        return {"rows": [], "of": tied, "how": told}
    shared = f"{counted(tied, 'configuration')} share the first place. " if tied > 1 else ""
    known = spread(data, column)
    how = {
        None: "Neither seeds nor near-replicates tell how far a number would come out again: no interval.",
        "seeds": "Intervals and probabilities: from the spread between the seeds of the same mixer and memory.",
    }
    near = "Intervals and probabilities: from the spread between near-replicates (regularizers alone differ) of the same mixer and memory."
    constant = f" {needle_caption(data)}" if (column.probe, column.metric) == NEEDLE else ""
    return {"rows": rows, "of": len(found), "how": shared + how.get(known.kind if known else None, near) + constant}


def interval(rival: Candidate) -> tuple[float | None, float | None]:
    """95% by the spread of its stratum: value ± t sd / sqrt(seeds), within 0 and 1 for a share; None where sd is not known."""
    if not math.isfinite(rival.sd) or not rival.sd:
        return None, None
    t = float(stats.t.ppf(1 - ALPHA / 2, rival.df)) if math.isfinite(rival.df) else float(stats.norm.ppf(1 - ALPHA / 2))
    half = t * rival.sd / math.sqrt(max(1, rival.seeds))
    low, high = rival.value - half, rival.value + half
    return (max(0.0, low), min(1.0, high)) if rival.share else (low, high)


def _words(data: SweepData, cell: CellState) -> list[str]:
    """The levels of every axis that varies, as figures name them; what is off or plain is not named."""
    levels = [(axis, cell_level(cell, axis)) for axis in factors(data)]
    names = [shown_values(level, axis) for axis, level in levels if level not in PLAIN]
    return names or ["plain" if levels else "the only configuration"]


def _range_text(column: Column, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return " to ".join(
        format_number(round(value, DUST), column.decimals, percent=column.percent) for value in (low, high)
    )


# --- what the levels do -----------------------------------------------------------------------------------------------


def forest_of(data: SweepData, columns: Sequence[Column], found: Sequence[Effect] | None = None) -> dict[str, Any]:
    """The effects on the main measures, over the whole sweep and within every mixer."""
    known = effects(data, columns) if found is None else found
    keys = {column.key: place for place, column in enumerate(columns)}
    rows = []
    for one in known:
        measure = keys.get(one.measure.key)
        # of levels that are neither plain nor mixers, the page of effects has the differences among each other
        told = one.axis == "attn_type" or one.reference == reference_level(data.levels(one.axis)) or one.confirmatory
        if measure is not None and told:
            row = {"measure": measure, "axis": axis_label(one.axis), "level": shown_values(one.level, one.axis)}
            row |= {"reference": shown_values(one.reference, one.axis), "where": _within(one.where), "pairs": one.pairs}
            rows.append(row | effect_numbers(one))
    alone = "No axis varies: the sweep has one configuration."
    apart = "No two cells with numbers agree on all axes but one: there is no pair to compare yet."
    why = None if rows else apart if factors(data) else alone
    return {"measures": [json_fields(column) for column in columns], "rows": rows, "why": why}


def declared_rows(data: SweepData) -> list[list[str]]:
    """The contrasts that the grid was launched to see: measure, difference, interval, corrected p, pairs, what it came to."""
    rows = []
    for one in contrasts(data):
        where = _within(one.where)
        what = f"{axis_label(one.axis)}: {shown_values(one.level, one.axis)} against {shown_values(one.reference, one.axis)}"
        mean, low, high = (difference(one.measure, "", value).text for value in (one.mean, one.low, one.high))
        unit = "points" if one.measure.percent else one.measure.unit
        p = "-" if math.isnan(one.p_corrected) else p_value_entry("p", one.p_corrected).text
        pairs = f"{one.pairs} of {one.expected}"
        what += f", {where}" if where else ""
        rows.append([one.measure.heading, what, f"{mean} {unit}", f"{low} to {high}", p, pairs, one.verdict])
    return rows


def _within(where: str) -> str:
    """The stratum of an effect in words; nothing for the whole sweep."""
    parts = (part.partition("=") for part in where.split(",") if part)
    return ", ".join(shown_values(level.strip(), axis.strip()) for axis, _, level in parts)


def effect_numbers(one: Effect) -> dict[str, Any]:
    """Mean and interval, as numbers in the unit that is printed and as text."""
    scale = 100 if one.measure.percent else 1
    numbers = {"mean": one.mean, "low": one.low, "high": one.high}
    told = {name: None if math.isnan(value) else scale * value for name, value in numbers.items()}
    text = {f"{name}_text": difference(one.measure, "", value).text for name, value in numbers.items()}
    i2 = None if math.isnan(one.i2) else round(one.i2, 4)
    worst = None if math.isnan(one.worst) else difference(one.measure, "", one.worst).text
    return told | text | {"sure": one.sure, "mixed": one.mixed, "i2": i2, "declared": one.confirmatory, "worst": worst}


# --- the needle over lengths ------------------------------------------------------------------------------------------


def needle_panels(store: Store, data: SweepData) -> dict[str, Any]:
    """Means over the cells of a line at every context length, in %, with their intervals; a panel a mixer."""
    frame = length_frame(data, training_lengths(store, data), *NEEDLE)
    if frame.empty:
        return {"panels": [], "why": "No cell has needle accuracies yet."}
    means = line_means(frame)
    panels: dict[str, dict[str, Any]] = {}
    for key, line in means.groupby(["panel", "line"], sort=False):
        panel, name = (str(part) for part in key)
        points = [_point(row) for row in line.sort_values("length").to_dict("records")]
        panels.setdefault(panel, {"title": shown_values(panel), "lines": []})["lines"].append(
            {"name": name, "points": points}
        )
    trained = only([int(length) for length in frame["trained"]])
    lengths = sorted({int(length) for length in frame["length"]})
    ceilings = [[length, 100 * share] for length in lengths if (share := ceiling(data, length)) is not None]
    told = [note for note in dict.fromkeys(BARS.get(str(kind), "") for kind in means["interval"]) if note]
    note = f"Points: means over the cells of a line. Bars: {'; '.join(told)}." if told else ""
    picture = {"panels": list(panels.values()), "trained": trained, "ceiling": ceilings, "note": note}
    return picture | {"yardstick": yardstick(data, lengths), "why": None}


def _point(row: Mapping[Any, Any]) -> list[Any]:
    """[length, mean, low, high, cells], shares in %."""
    value, low, high = (None if math.isnan(row[name]) else round(100 * row[name], 6) for name in ("value", "low", "high"))  # fmt: skip
    return [int(row["length"]), value, low, high, int(row["cells"])]
