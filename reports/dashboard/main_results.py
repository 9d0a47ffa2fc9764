"""Main results for the first page: best configurations, effects of levels, needle accuracy over lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scipy import special

from ...results.console.text import counted
from ...results.store.records import CellState
from ...results.store.store import Store
from ..figures.canvas.base import training_lengths
from ..figures.canvas.drawing import axis_label, level_label
from ..figures.canvas.length_frames import BARS, length_rows, mean_rows, single_value
from ..number_format import NEEDLE, Column, format_number
from ..result_columns import FIXED_PROBES, complete_columns, extra_metrics
from ..stats.effects.effects import ALPHA, Effect, contrasts, effects, pooled_noise, reference_level, varying_axes
from ..stats.effects.needle_baseline import baseline_text, constant_answer_score, needle_caption
from ..stats.noise.best_probability import (
    Candidate,
    candidates_by_configuration,
    configuration_means,
    probabilities_of_candidates,
)
from ..sweep_data import SweepData, cell_level
from ..table_builder import ROUND_DECIMALS, difference_entry, measured_entry, p_value_entry
from .caveats import result_caveats
from .line_looks import line_fields

PLAIN = ("off", "baseline")
MAX_RANKED = 5  # configurations per measure that the first page lists


def answer_block(store: Store, data: SweepData, computed_effects: Sequence[Effect] | None = None) -> dict[str, Any]:
    """Return the JSON of the main results: best, declared, forest, needle and care (caveats).

    best: rankings of the best configurations per main measure (measures, why). declared: a list of texts per declared
    contrast. forest: effects on the main measures (measures, rows, why). needle: accuracy over lengths (panels, why and
    more). care: sentences.

    Args:
        store: The database.
        data: The sweep.
        computed_effects: Effects that are computed already, those of the main measures among them; None: compute them
            here.
    """
    columns = main_columns(data)
    forest = forest_json(data, columns, computed_effects)
    best = best_configurations(data, columns)
    answer = {"best": best, "declared": declared_rows(data), "forest": forest, "needle": needle_panels(store, data)}
    return answer | {"care": result_caveats(data, columns, best, forest)}


def main_columns(data: SweepData) -> list[Column]:
    """Return the main measures of which any cell has a value, in this order.

    They are needle accuracy at the longest length, validation loss, clean loss at the longest length, and extra probes
    with a better side, at their longest length.
    """
    # complete_columns sorts by length, so that the last column of a probe is at the longest
    columns = [
        column for column in complete_columns(data) if FIXED_PROBES.get(column.probe, column.metric) == column.metric
    ]
    by_probe = {column.probe: column for column in columns}
    wanted = [by_probe[probe] for probe in ("needle", "val", "clean") if probe in by_probe]
    further = {probe for probe, _ in extra_metrics(data)} - FIXED_PROBES.keys()
    wanted += [column for probe, column in by_probe.items() if probe in further and column.direction]
    return [column for column in wanted if any(data.column_numbers(data.cells, column))]


def json_fields(column: Column) -> dict[str, Any]:
    """Return the JSON of a measure: heading, unit, percent and better (1, -1 or 0)."""
    unit = "%" if column.percent else column.unit
    return {"heading": column.heading, "unit": unit, "percent": column.percent, "better": column.direction}


# --- the best -------------------------------------------------------------------------------------------------------


def best_configurations(data: SweepData, columns: Sequence[Column]) -> dict[str, Any]:
    """Return {"measures": rankings of the best configurations, "why": reason where there are none, else None}.

    A ranking has the keys heading, unit, percent, better, rows (at most five, best first), of (number of
    configurations) and how (a note). Rankings are in the order of `columns`.
    """
    groups = data.configurations()
    measures = [json_fields(column) | _measure_ranking(data, groups, column) for column in columns]
    why = None if measures else "No cell has a number yet."
    return {"measures": measures, "why": why}


def _measure_ranking(
    data: SweepData, groups: Mapping[tuple[str, ...], Sequence[CellState]], column: Column
) -> dict[str, Any]:
    """Return the ranking of a measure: rows (best first), of (number of configurations) and how (a note).

    There are at most five rows. A row has cells (ids), words (labels of its levels), text (printed mean), value, low
    and high (95 % interval from the spread between replicate runs, in the stored unit; None where unknown), interval
    (its text) and chance (probability of being the best, or None). If all of several configurations have the same
    number, rows is empty.

    Args:
        data: The sweep.
        groups: Cells by configuration.
        column: The measure, with a direction.
    """
    candidates = candidates_by_configuration(data, column)
    chances = probabilities_of_candidates(candidates, column.direction)
    # without any estimate of the noise there are no candidates
    means = {key: candidate.value for key, candidate in candidates.items()} or {
        key: mean for key, (mean, _) in configuration_means(data, column).items()
    }
    ranked = sorted(means, key=lambda key: -column.direction * means[key])[:MAX_RANKED]
    rows = []
    for key in ranked:
        cells = groups[key]
        low, high = value_interval(candidates[key]) if key in candidates else (None, None)
        row: dict[str, Any] = {"cells": [cell.cell_id for cell in cells], "words": _level_names(data, cells[0])}
        row |= {"text": measured_entry(data, cells, column).text, "value": means[key], "low": low, "high": high}
        rows.append(row | {"interval": _range_text(column, low, high), "chance": chances.get(key)})
    tied = sum(value == means[ranked[0]] for value in means.values())
    if 1 < len(means) == tied:
        same = format_number(round(means[ranked[0]], ROUND_DECIMALS), column.decimals, percent=column.percent)
        tie_note = f"All {counted(tied, 'configuration')} have the same number, {same}: none is the best."
        return {"rows": [], "of": tied, "how": tie_note}
    shared = f"{counted(tied, 'configuration')} share the first place. " if tied > 1 else ""
    noise = pooled_noise(data, column)
    how = {
        None: "No interval: the sweep has neither several seeds nor near-replicates.",
        "seeds": "Intervals and probabilities: from the spread between the seeds of the same mixer and memory.",
    }
    near = (
        "Intervals and probabilities: from the spread between near-replicates (only the regularizer "
        "differs) of the same mixer and memory."
    )
    constant = f" {needle_caption(data)}" if (column.probe, column.metric) == NEEDLE else ""
    return {"rows": rows, "of": len(means), "how": shared + how.get(noise.kind if noise else None, near) + constant}


def value_interval(rival: Candidate) -> tuple[float | None, float | None]:
    """Return the 95 % interval (low, high) of a configuration's mean, clipped to 0 and 1 for a share.

    It is value ± t sd / sqrt(seeds), with the normal quantile for infinitely many degrees of freedom. Both ends are
    None where the spread of its stratum is unknown or zero.
    """
    if not math.isfinite(rival.sd) or not rival.sd:
        return None, None
    share = 1 - ALPHA / 2
    t = float(special.stdtrit(rival.df, share) if math.isfinite(rival.df) else special.ndtri(share))
    half = t * rival.sd / math.sqrt(max(1, rival.seeds))
    low, high = rival.value - half, rival.value + half
    return (max(0.0, low), min(1.0, high)) if rival.share else (low, high)


def _level_names(data: SweepData, cell: CellState) -> list[str]:
    """Return the labels of the cell's levels on every axis that varies, without levels that are off or "baseline".

    Without any label it is ["plain"], or ["the only configuration"] if no axis varies.
    """
    levels = [(axis, cell_level(cell, axis)) for axis in varying_axes(data)]
    names = [level_label(level, axis) for axis, level in levels if level not in PLAIN]
    return names or ["plain" if levels else "the only configuration"]


def _range_text(column: Column, low: float | None, high: float | None) -> str:
    """Return "low to high" in printed units; an empty string where the interval is unknown."""
    if low is None or high is None:
        return ""
    return " to ".join(
        format_number(round(value, ROUND_DECIMALS), column.decimals, percent=column.percent) for value in (low, high)
    )


# --- what the levels do -----------------------------------------------------------------------------------------------


EFFECT_HEADINGS = ["Measure", "Factor", "Level", "Reference", "Within", "Pairs", "Mean", "95% low", "95% high"]
EFFECT_HEADINGS += ["Significant"]


def forest_json(
    data: SweepData, columns: Sequence[Column], computed_effects: Sequence[Effect] | None = None
) -> dict[str, Any]:
    """Return the effects on the main measures, over the whole sweep and within strata, as JSON.

    Shown are differences of mixers, of a level from its axis's reference, and declared contrasts.

    Args:
        data: The sweep.
        columns: The main measures; effects on others are left out.
        computed_effects: Effects that are computed already; None: compute them.

    Returns:
        measures (`json_fields` of each column, and scale: unit and better side), rows, lines (`_matrix_lines`), and why
        (the reason where there are no rows, else None). table: headings and texts of the rows. A row has measure (index), axis, level and reference (labels),
        factor and sides (the same as in a grid), where (stratum, empty for the whole sweep), pairs, shown
        (`_shown_texts`), and mean, low and high with their texts, sure, mixed, i2, declared and worst
        (`effect_numbers`).
    """
    all_effects = effects(data, columns) if computed_effects is None else computed_effects
    keys = {column.key: index for index, column in enumerate(columns)}
    rows = []
    for effect in all_effects:
        measure = keys.get(effect.measure.key)
        # the page of effects lists the differences between two levels that are neither mixers nor the reference
        is_shown = (
            effect.axis == "attn_type"
            or effect.reference == reference_level(data.levels(effect.axis))
            or effect.confirmatory
        )
        if measure is not None and is_shown:
            row: dict[str, Any] = {
                "measure": measure,
                "axis": axis_label(effect.axis),
                "factor": effect.axis,
                "sides": [effect.level, effect.reference],
                "level": level_label(effect.level, effect.axis),
            }
            row |= {
                "reference": level_label(effect.reference, effect.axis),
                "where": stratum_text(effect.where),
                "pairs": effect.pairs,
            }
            rows.append(row | effect_numbers(effect) | {"shown": _shown_texts(effect)})
    no_axis_reason = "No axis varies: the sweep has one configuration."
    no_pair_reason = "No matched pairs yet: no two measured cells differ in exactly one axis."
    why = None if rows else no_pair_reason if varying_axes(data) else no_axis_reason
    measures = [json_fields(column) | {"scale": _scale_text(column)} for column in columns]
    texts = [
        [
            *(columns[row["measure"]].heading, row["axis"], row["level"], row["reference"], row["where"] or "all"),
            *(row["pairs"], row["mean_text"], row["low_text"], row["high_text"], "yes" if row["sure"] else "no"),
        ]
        for row in rows
    ]
    lines = _matrix_lines(rows, len(columns))
    return {"measures": measures, "rows": rows, "lines": lines, "table": [EFFECT_HEADINGS, texts], "why": why}


def _scale_text(column: Column) -> str:
    """Return the unit of differences of a measure and its better side, such as "points, more is better"."""
    unit = "points" if column.percent else column.unit.replace("nats/token", "nats")
    return f"{unit}, {'less' if column.direction < 0 else 'more'} is better"


def _shown_texts(effect: Effect) -> list[str]:
    """Return the printed mean of an effect and its interval (the number of pairs without one), with minus signs."""
    mean, low, high = (
        difference_entry(effect.measure, "", value).text for value in (effect.mean, effect.low, effect.high)
    )
    spread = f"{effect.pairs} pairs" if math.isnan(effect.low) else f"{low} to {high}"
    return [text.replace("-", "\u2212") for text in (mean, spread)]


def _matrix_lines(rows: Sequence[Mapping[str, Any]], n_measures: int) -> list[dict[str, Any]]:
    """Return the lines of the matrix of effects over the whole sweep, one per pair of levels.

    Args:
        rows: Effects (`forest_json`).
        n_measures: Number of main measures.

    Returns:
        axis, factor, sides, level and reference of each line, as in the rows, and cells: per measure the index of its
        row, or None.
    """
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for index, row in enumerate(rows):
        if not row["where"]:
            facts = {name: row[name] for name in ("axis", "factor", "sides", "level", "reference")}
            line = lines.setdefault((row["factor"], *row["sides"]), facts | {"cells": [None] * n_measures})
            line["cells"][row["measure"]] = index
    return list(lines.values())


def declared_rows(data: SweepData) -> list[list[str]]:
    """Return the texts of the contrasts that the grid declares; [] without any.

    Returns:
        One list per contrast: measure, levels (with the stratum), difference with unit, interval "low to high",
        corrected p ("-" where unknown), pairs as "n of expected", and verdict.
    """
    rows = []
    for contrast in contrasts(data):
        stratum = stratum_text(contrast.where)
        description = f"{axis_label(contrast.axis)}: {level_label(contrast.level, contrast.axis)} against {level_label(contrast.reference, contrast.axis)}"
        mean, low, high = (
            difference_entry(contrast.measure, "", value).text for value in (contrast.mean, contrast.low, contrast.high)
        )
        unit = "points" if contrast.measure.percent else contrast.measure.unit
        p = "-" if math.isnan(contrast.p_corrected) else p_value_entry("p", contrast.p_corrected).text
        pairs = f"{contrast.pairs} of {contrast.expected}"
        description += f", {stratum}" if stratum else ""
        rows.append(
            [contrast.measure.heading, description, f"{mean} {unit}", f"{low} to {high}", p, pairs, contrast.verdict]
        )
    return rows


def stratum_text(where: str) -> str:
    """Return the stratum of an effect as text; empty for the whole sweep."""
    parts = (part.partition("=") for part in where.split(",") if part)
    return ", ".join(level_label(level.strip(), axis.strip()) for axis, _, level in parts)


def effect_numbers(effect: Effect) -> dict[str, Any]:
    """Return the JSON of an effect's numbers.

    Returns:
        mean, low, high in printed units (percentage points for shares; None where unknown) and their texts (mean_text,
        ...); sure (True if significant), mixed (True if it averages strata that differ), i2 (share or None), declared;
        worst (text of the mean in the worst case of diverged runs, or None).
    """
    scale = 100 if effect.measure.percent else 1
    numbers = {"mean": effect.mean, "low": effect.low, "high": effect.high}
    json_numbers = {name: None if math.isnan(value) else scale * value for name, value in numbers.items()}
    text = {f"{name}_text": difference_entry(effect.measure, "", value).text for name, value in numbers.items()}
    i2 = None if math.isnan(effect.i2) else round(effect.i2, 4)
    worst = None if math.isnan(effect.worst) else difference_entry(effect.measure, "", effect.worst).text
    return (
        json_numbers
        | text
        | {
            "sure": effect.is_significant,
            "mixed": effect.is_heterogeneous,
            "i2": i2,
            "declared": effect.confirmatory,
            "worst": worst,
        }
    )


# --- the needle over lengths ------------------------------------------------------------------------------------------


def needle_panels(store: Store, data: SweepData) -> dict[str, Any]:
    """Return the needle accuracy over lengths as JSON: a panel per mixer, a line per group of cells.

    Returns:
        panels: title and lines, each with the fields of `line_fields` and points ([length, mean, low, high, cells], shares in %). trained:
        training length in tokens, None if it is not the same for all. ceiling: [length, constant-digit baseline in %]
        pairs, ceiling_text its range. lengths: all context lengths. top: top of the axis in %. note and yardstick: sentences. why: None. Without any accuracy there are only panels ([]) and why (the
        reason).
    """
    rows = length_rows(data, training_lengths(store, data), *NEEDLE)
    if not rows:
        return {"panels": [], "why": "No cell has needle accuracies yet."}
    means = mean_rows(rows)
    lines: dict[str, dict[str, list[list[Any]]]] = {}
    for row in sorted(means, key=lambda row: row["length"]):
        lines.setdefault(row["panel"], {}).setdefault(row["line"], []).append(_needle_point(row))
    panels: dict[str, dict[str, Any]] = {
        row["panel"]: {"title": level_label(row["panel"]), "lines": []} for row in means
    }
    fields = line_fields(data)
    for panel, line in dict.fromkeys((row["panel"], row["line"]) for row in means):
        panels[panel]["lines"].append(fields[line] | {"points": lines[panel][line]})
    training_length = single_value([row["trained"] for row in rows])
    lengths = sorted({row["length"] for row in rows})
    ceilings = [
        [length, 100 * share] for length in lengths if (share := constant_answer_score(data, length)) is not None
    ]
    bar_notes = [note for note in dict.fromkeys(BARS.get(row["interval"], "") for row in means) if note]
    note = f"Points: means over the cells of a line. Bars: {'; '.join(bar_notes)}." if bar_notes else ""
    picture: dict[str, Any] = {
        "panels": list(panels.values()),
        "trained": training_length,
        "ceiling": ceilings,
        "note": note,
    }
    picture |= {"lengths": [int(length) for length in lengths], "top": _axis_top(panels.values())}
    ends = dict.fromkeys(f"{end(share for _, share in ceilings):.1f}" for end in (min, max)) if ceilings else {}
    picture["ceiling_text"] = f"{' to '.join(ends)} %" if ends else ""
    return picture | {"yardstick": baseline_text(data, lengths), "why": None}


def _axis_top(panels: Iterable[Mapping[str, Any]]) -> int:
    """Return the top of the axis of needle accuracy in %: 100, or 25 or 50 where every value and interval lies below."""
    points = [point for panel in panels for line in panel["lines"] for point in line["points"]]
    highest = max((value for _, mean, _, high, _ in points for value in (mean, high) if value is not None), default=100)
    return next((top for top in (25, 50) if highest <= 0.96 * top), 100)


def _needle_point(row: Mapping[Any, Any]) -> list[Any]:
    """Return [length, mean, low, high, cells] of a point, shares in %, None where unknown."""
    value, low, high = (None if math.isnan(row[name]) else round(100 * row[name], 6) for name in ("value", "low", "high"))  # fmt: skip
    return [int(row["length"]), value, low, high, int(row["cells"])]
