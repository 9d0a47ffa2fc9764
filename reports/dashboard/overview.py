"""First screen of the page: the finding in one sentence, and names and looks in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...results.store.records import AXES
from ...results.store.store import Store
from ..figures.canvas.base import line_groups
from ..number_format import Column, format_length
from ..render import style
from ..render.style import axis_label, level_label
from ..result_columns import AXIS_HEADINGS, plain_name
from ..stats.effects.effects import varying_axes
from ..sweep_data import SweepData, load_sweep_data
from .main_results import answer_block, main_columns

LONG_NUMBER = re.compile(r"\d+\.\d{6,}(e-?\d+)?")
MAX_STRATA = 6  # strata that the line below the finding lists


def overview_block(data: SweepData, answer: Mapping[str, Any], figures: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON of the first screen that the other parts of the answer do not have.

    Args:
        data: The sweep.
        answer: JSON of the main results, with best and forest.
        figures: Titles of the figures of the gallery, by name.

    Returns:
        finding (`finding_json`); axes: name, words, levels (raw) and labels of every axis that varies; headings: words
        and levels (labels by raw level) by heading of a column of levels; groups ([panel title, line]) and group (index
        of each cell's group); hues (light and dark ink by mixer); figures (name and title of each).
    """
    axes = varying_axes(data)
    groups = line_groups(data)
    keys = [(level_label(groups[c.cell_id]["panel"]), groups[c.cell_id]["line"]) for c in data.cells]
    distinct = list(dict.fromkeys(keys))
    index = {key: number for number, key in enumerate(distinct)}
    return {
        "finding": finding_json(data, main_columns(data), answer),
        "axes": [_axis_json(data, axis) for axis in axes],
        "headings": heading_texts(data),
        "groups": [list(key) for key in distinct],
        "group": [index[key] for key in keys],
        "hues": {level_label(mixer): {"light": ink, "dark": style.ink_on_dark(ink)} for mixer, ink in style.mixer_inks(data.levels("attn_type")).items()},
        "figures": [{"name": name, "title": title} for name, title in figures.items()],
    }  # fmt: skip


def heading_texts(data: SweepData) -> dict[str, dict[str, Any]]:
    """Return words (text) and levels (labels by raw level) by heading of a column of levels."""
    extra = data.extra_axes()
    return {
        heading: {
            "words": axis_heading(axis),
            "levels": {level: level_below_axis(level, axis) for level in data.levels(axis)},
        }
        for heading, axis in zip([*AXIS_HEADINGS, *extra], [*AXES, *extra], strict=True)
    }


def axis_heading(axis: str) -> str:
    """Return the name of an axis as a heading, such as "Distractor loss"."""
    return _capitalized(axis_label(axis))


def _capitalized(text: str) -> str:
    return text if "." in text else f"{text[:1].upper()}{text[1:]}"


def level_below_axis(level: str, axis: str) -> str:
    """Return a level as it reads below the name of its axis: "PoLAR", "Zipfian", "none", "KDA", "on"."""
    if axis == "reg_mode" and level == "baseline":
        return "none"
    return level if level in ("on", "off") else style.LEVEL_NAMES.get((axis, level), level)


def _axis_json(data: SweepData, axis: str) -> dict[str, Any]:
    levels = list(data.levels(axis))
    labels = [level_label(level, axis) for level in levels]
    return {"name": axis, "words": axis_label(axis), "levels": levels, "labels": labels}


def css_variables() -> str:
    """Return the style sheet that gives the page the colours of the figures, for light and dark."""

    def both(ink: str) -> str:
        return f"light-dark({ink}, {style.ink_on_dark(ink)})"

    colours = {f"c{index}": ink for index, ink in enumerate(style.SERIES_INKS[:8])}
    colours |= {"good": style.GOOD, "poor": style.BAD}
    colours |= {f"state-{state}": ink for state, ink in style.STATE_INKS.items()}
    return f":root {{ {' '.join(f'--{name}: {both(ink)};' for name, ink in colours.items())} }}\n"


# --- the finding ----------------------------------------------------------------------------------------------------


def finding(store: Store, sweep: str) -> str | None:
    """Return the finding of a sweep and its best configuration as sentences; None if nothing was measured.

    They are those of the first page of the dashboard.

    Args:
        store: The database.
        sweep: Name of the sweep.

    Raises:
        SweepUnknown: No such sweep.
    """
    data = load_sweep_data(store, sweep)
    columns = main_columns(data)
    answer = answer_block(store, data)
    sentences = finding_json(data, columns, answer)
    return (
        " ".join([sentences["text"], *sentences["more"]])
        if any(row["rows"] for row in answer["best"]["measures"])
        else None
    )


def finding_json(data: SweepData, columns: Sequence[Column], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the finding: `text` (one sentence) and `more` (further sentences).

    The sentence has the largest significant effect over the whole sweep, with its interval, on the first main measure
    that has one; else the reason why there is none.

    Args:
        data: The sweep.
        columns: The main measures, in the order of the measures of `answer`.
        answer: JSON of the main results, with best and forest.
    """
    rows = [row for row in answer["forest"]["rows"] if not row["where"] and row["mean"] is not None]
    significant = [row for row in rows if row["sure"]]
    best = _best_text(answer["best"], columns)
    if not significant:
        if data.done == 0:
            return {"text": f"No cell is done yet: 0 of {len(data.cells)}.", "more": best}
        reason = answer["forest"]["why"] or "No effect over the whole sweep is significant after correction."
        # without pairs, as in a study, the best is the finding
        lines = [*best, reason] if answer["forest"]["why"] else [reason, *best]
        return {"text": lines[0], "more": lines[1:]}
    first = min(row["measure"] for row in significant)
    top = max((row for row in significant if row["measure"] == first), key=lambda row: abs(row["mean"]))
    sign = -1 if top["mean"] * columns[first].direction < 0 else 1  # the better level first
    text = _effect_sentence(top, columns[first], sign)
    if data.done < len(data.cells):
        text = f"So far, with {data.done} of {len(data.cells)} cells: {text[:1].lower()}{text[1:]}"
    same = ("measure", "axis", "level", "reference")
    strata = [
        row
        for row in answer["forest"]["rows"]
        if row["where"] and "," not in row["where"] and all(row[key] == top[key] for key in same)
    ]
    decimals = 1 if columns[first].percent else 3
    listed = _minus(
        ", ".join(
            f"{row['where']} {sign * row['mean']:+.{decimals}f}"
            for row in strata[:MAX_STRATA]
            if row["mean"] is not None
        )
    )
    within = (
        [f"It differs between groups of cells: {listed} {_unit(columns[first])}."] if top["mixed"] and listed else []
    )
    return {"text": text, "more": [*within, *best]}


def _effect_sentence(row: Mapping[str, Any], column: Column, sign: int) -> str:
    """Return "Needle accuracy at 64K tokens is 23.4 points higher with memory than without memory (...)...".

    Args:
        row: The effect.
        column: Its measure.
        sign: -1 to compare the reference with the level, 1 for the level with the reference.
    """
    decimals = 1 if column.percent else 3
    mean = sign * row["mean"]
    first, second = (row["level"], row["reference"])[::sign]
    spread = f"{row['pairs']} pairs"
    if row["low"] is not None:
        towards = 1 if mean > 0 else -1
        low, high = sorted(towards * sign * end for end in (row["low"], row["high"]))
        spread = _minus(f"95% interval {low:.{decimals}f} to {high:.{decimals}f}, {spread}")
    return (
        f"{_capitalized(measure_phrase(column))} is {abs(mean):.{decimals}f} {_unit(column)} "
        f"{'higher' if mean > 0 else 'lower'} {_with(first)} than {_with(second)} ({spread}): "
        "the largest significant effect."
    )


def measure_phrase(column: Column) -> str:
    """Return a measure as a sentence names it, such as "needle accuracy at 64K tokens"."""
    name = plain_name(column)
    is_named = name != column.heading
    return f"{name} at {format_length(column.length)} tokens" if column.length and is_named else name


def _unit(column: Column) -> str:
    if column.percent:
        return "points"
    return "" if column.unit == "1" else column.unit.replace("nats/token", "nats per token")


def _with(label: str) -> str:
    """Return "with memory", "without memory" or "with PoLAR" for the label of a level."""
    if label.startswith("with "):
        return label
    return f"without {label.removeprefix('no ')}" if label.startswith("no ") else f"with {label}"


def _minus(text: str) -> str:
    return text.replace("-", "\u2212")


def _best_text(best: Mapping[str, Any], columns: Sequence[Column]) -> list[str]:
    """Return at most one sentence, on the best configuration by the first main measure that has one."""
    for measure, column in zip(best["measures"], columns, strict=True):
        if measure["rows"]:
            row = measure["rows"][0]
            unit = " %" if column.percent else f" {_unit(column)}".rstrip()
            chance = f"; probability of being the best {row['chance']:.0%}" if row["chance"] is not None else ""
            interval = f" (95% interval {row['interval']}{chance})" if row["interval"] else ""
            # settings that a search draws have more digits than a sentence bears
            names = LONG_NUMBER.sub(lambda match: f"{float(match[0]):.4g}", ", ".join(row["words"]))
            return [f"Best by {measure_phrase(column)}: {names}, {row['text']}{unit}{interval}."]
    return []
