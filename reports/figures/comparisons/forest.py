"""Forest plots: differences with their intervals, row by row, for the figures of effects and interactions.

Better is right, whether more of the number is better or less: the axis of a loss shows its decrease. All marks are black or
grey, since the hues of figures are those of mixers. A dot is a difference that is significant after the correction for
its family, an upright tick one that is not, a hollow diamond an average over strata that differ.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ...number_format import CLEAN, NEEDLE, Column, format_length
from ...render.style import BACKGROUND
from ...result_columns import extra_metrics, plain_name
from ...stats.effects.effects import EffectEstimate, measures
from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes

if TYPE_CHECKING:
    import pandas as pd

LEAST_TICKS = 3
MOST_MEASURES = 3
SLACK = 0.12  # share of its range by which an axis may grow to end at a round number
ROW = 0.15  # inches, height of a row in the style `paper`
POINTS = ("points", "percentage points")
"""Unit of differences of shares in the data, and on an axis."""
COUNT_SPACE = 14.0  # points from a panel to the right end of the sample sizes at its right
BETTER = "better"
VERSUS = " vs "
"""Between both levels of a difference, in figures: they show gains, whose sign is not that of a difference of losses."""
SIGNIFICANT, NOT_SIGNIFICANT = "significant", "not significant"
MIXED, MIXED_NOT_SIGNIFICANT = "average of strata that differ", "the same, not significant"
FLOOR = "no recall"
"""Text in place of a difference in needle accuracy between levels that are all at the constant-digit baseline."""
AT_FLOOR_DOTS = (0, (1, 1))  # dashes of the bar of an interaction of which a combination of levels has no recall
MIXED_WIDTH = 0.6  # points in the style `paper`, width of the bar of an average over strata that differ
FLOOR_SPACE = 2.0  # points from a panel to this text


def default_columns(data: SweepData) -> list[Column]:
    """Return the numbers that figures of differences show by default.

    These are validation loss, then clean loss, needle accuracy and metrics of extra probes. Each of the latter is shown
    at the longest length of the launch, followed by the additionally requested ones. Only numbers that at least two
    cells have count. A sweep without any of these gives its first three numbers; without numbers the list is empty.
    """
    all_columns = measures(data)
    chosen = [column for column in all_columns if column.metric == "val_loss"]
    own = ((probe, metric.name) for probe, metric in extra_metrics(data))
    for probe, metric in (CLEAN, NEEDLE, *own):
        columns_of_metric = [column for column in all_columns if (column.probe, column.metric) == (probe, metric)]
        requested = [column for column in columns_of_metric if column.length not in data.also] or columns_of_metric
        chosen += [
            *requested[-1:],
            *(column for column in columns_of_metric if column.length in data.also and column not in requested[-1:]),
        ]
    return chosen or all_columns[:MOST_MEASURES]


def measure_label(column: Column) -> str:
    """Return the label of a number, such as "needle accuracy, 64K"; its heading if it has none."""
    label = plain_name(column)
    is_named = label != column.heading
    return f"{label}, {format_length(column.length)}" if column.length and is_named else label


def effect_fields(effect: EffectEstimate) -> dict[str, Any]:
    """Return the fields of a difference as columns of a frame.

    Returns:
        measure (heading), words (label), unit ("points" for a share), better (1: more is better, -1: less, 0: neither),
        where (stratum, empty for the whole sweep), mean, low and high (95 % interval, NaN where unknown), p
        (corrected), sure (True if significant), i2, mixed (True if it averages strata that differ), confirmatory. Means
        and bounds of shares are percentage points.
    """
    scale, unit = (100, "points") if effect.measure.percent else (1, effect.measure.unit)
    fields: dict[str, Any] = {"measure": effect.measure.heading, "words": measure_label(effect.measure), "unit": unit}
    fields |= {"better": effect.measure.direction, "where": effect.where}
    fields |= {
        "mean": scale * effect.mean,
        "low": scale * effect.low,
        "high": scale * effect.high,
        "p": effect.p_corrected,
    }
    fields |= {
        "sure": effect.is_significant,
        "i2": effect.i2,
        "mixed": effect.is_heterogeneous,
        "confirmatory": effect.confirmatory,
    }
    return fields


INTERVAL_NAMES = {
    "sign-flip": "inverted sign-flip test",
    "t": "Student's t",
    "crossed": "configurations crossed with seeds",
    "seeds": "Student's t over seeds",
    "least-squares": "least squares",
    "looks": "Student's t at the level of the stopping rule",
}
"""Short name of the procedure behind an interval, by `PairedTest.method`."""


def methods_note(methods: Iterable[str], family: str) -> str:
    """Return the sentences on the procedures behind intervals and on the correction of p values.

    Args:
        methods: `PairedTest.method` of the drawn differences.
        family: Tests that are corrected together.
    """
    names = [INTERVAL_NAMES[method] for method in dict.fromkeys(methods) if method in INTERVAL_NAMES]
    corrections = {"sign-flip": "step-down maxT"}
    used = list(dict.fromkeys(corrections.get(method, "Holm") for method in methods if method in INTERVAL_NAMES))
    intervals = (
        f"Intervals: {' or '.join(names)}, not corrected, so that a bar clear of zero may be grey. " if names else ""
    )
    corrected = f"p < 0.05 after correction for {family} ({' or '.join(used) or 'Holm'})"
    return f"{intervals}Black: {corrected}."


def floor_space(rows: pd.DataFrame) -> float:
    """Return the points that the text FLOOR takes at the right of a panel; 0 if all rows have recall."""
    return 72 * text_width([FLOOR], drawing.size("small")) if rows["floor"].any() else 0.0


def write_column(axes: Axes, texts: Mapping[float, str], head: str, points: float, side: int = 1) -> None:
    """Write a text per row beside a panel, in grey, right-aligned under a head.

    Args:
        axes: The panel, with its limits.
        texts: Text of each row by its height in data.
        head: Head of the column.
        points: Points from the side of the panel to the right end of the texts.
        side: 1 for the right side of the panel, 0 for the left.
    """
    style: dict[str, Any] = {"color": drawing.GREY, "va": "center", "ha": "right", "annotation_clip": False}
    for height, text in texts.items():
        drawing.note(axes, text, (side, height), (points, 0), xycoords=("axes fraction", "data"), **style)
    # at the right the head stands beside the title, which reserves its height; at the left, below the panel's letter
    look = style | {"va": "bottom" if side else "top", "xycoords": "axes fraction"}
    drawing.note(axes, head, (side, 1), (points, 2 * side), **look).set_in_layout(False)


def count_texts(counts: Mapping[float, Sequence[int]]) -> dict[float, str]:
    """Return the range of each row's sample sizes as text, by the height of the row."""
    return {height: unit_range(own).replace(" to ", "–") for height, own in counts.items()}


def unit_range(counts: Sequence[int]) -> str:
    """Return the range of at least one number of pairs or quadruples as text, such as "60" or "10 to 60"."""
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def missing_interval_note(rows: Sequence[Mapping[str, Any]], unit_name: str) -> list[str]:
    """Return the note on differences without an interval, as a list; empty if all have one.

    Args:
        rows: Dicts with the key low (NaN for a difference without an interval).
        unit_name: "pairs" or "fours", of which there are too few; for the message alone.
    """
    none = any(math.isnan(row["low"]) for row in rows)
    return [f"No bar: too few {unit_name} for an interval."] if none else []


def difference_label(axis: str, level: str, reference: str) -> str:
    """Return the label of a difference of levels, such as "NoPE − PoLAR".

    For on against off it is the axis alone, such as "memory"; for a regularizer against "baseline" "<level>
    regularizer". For two mixers, or two other regularizers, it is both levels; for other axes the axis with both
    levels, of which large integers are abbreviated.
    """
    if (level, reference) == ("on", "off"):
        return drawing.axis_label(axis)
    if (axis, reference) == ("reg_mode", "baseline"):
        return f"{drawing.level_label(level, axis)} regularizer"
    if axis in ("attn_type", "reg_mode"):
        return f"{drawing.level_label(level, axis)} − {drawing.level_label(reference, axis)}"
    return f"{drawing.axis_label(axis)} {drawing.short_integer(level)} − {drawing.short_integer(reference)}"


def gain_text(row: Mapping[str, Any]) -> str:
    """Return a mean difference as a gain or a loss of quality in words, such as "a gain of 0.08 nats/token".

    Args:
        row: A row with mean, unit and better, as `effect_fields` gives them.
    """
    sign = row["mean"] * row["better"]
    kind = "gain" if sign > 0 else "worsening" if sign < 0 else "difference"
    return f"a {kind} of {abs(row['mean']):.2g} {row['unit'].replace(*POINTS)}"


def draw_rows(axes: Axes, rows: pd.DataFrame, heights: Sequence[float], size: float = 1.0) -> None:
    """Draw a marker and an interval for every row at its height, black if it is significant, else grey.

    The marker is a hollow diamond for an average over strata that differ, whose bar is thin, a dot for another
    significant difference, and a tick for others. A row without an interval has the marker alone, one whose levels all lack recall a word in the margin.

    Args:
        axes: The panel.
        rows: Rows with mean, low, high, better, sure and mixed, as `effect_fields` gives them.
        heights: Height of each row in data.
        size: Factor for the size of markers and lines.
    """
    look: dict[str, Any]
    for (_, row), y in zip(rows.iterrows(), heights, strict=True):
        if row.get("floor", False):
            _write_floor(axes, y)
            continue
        colour = drawing.INK if row["sure"] else drawing.GREY
        if not np.isnan(row["low"]):
            look = {"linewidth": drawing.line_width((MIXED_WIDTH if row["mixed"] else 1.3) * size)}
            look |= {"linestyle": AT_FLOOR_DOTS} if row.get("unrecalled", 0) else {}
            axes.hlines(y, row["low"], row["high"], color=colour, **look)
        marker, scale = _marker(bool(row["mixed"]), bool(row["sure"]))
        fill = {"markerfacecolor": BACKGROUND, "markeredgewidth": drawing.line_width(0.8)} if row["mixed"] else {}
        drawing.points(axes, row["mean"], y, marker, color=colour, zorder=3, markersize=scale * size, **fill)


def _marker(is_mixed: bool, is_significant: bool) -> tuple[str, float]:
    """Return the marker of a difference and its size in points in the style `paper`."""
    return ("D", 3.4) if is_mixed else ("o", 3.6) if is_significant else ("|", 5.5)


def _write_floor(axes: Axes, height: float) -> None:
    """Write that a row has no recall in the margin at the right of its panel, where it cannot be taken for a value."""
    style: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    drawing.note(axes, FLOOR, (1, height), (FLOOR_SPACE, 0), color=drawing.GREY, **style)


def set_panel_title(axes: Axes, title: str, width: float) -> None:
    """Set the title of a panel, broken at its comma, or else at a space, if it is wider than `width` inches."""
    characters = max(6, int(width * 72 / (0.62 * drawing.size("axes.titlesize"))))
    if len(title) > characters:
        title = title.replace(", ", "\n", 1) if ", " in title else title
        title = "\n".join(part for line in title.split("\n") for part in textwrap.wrap(line, characters))
    axes.set_title(title)


def text_width(texts: Sequence[str], size: float) -> float:
    """Return the approximate width in inches of the longest line of these texts at a font size in points."""
    return max((len(line) for text in texts for line in text.split("\n")), default=0) * 0.56 * size / 72


def format_effect_axis(
    axes: Axes, rows: pd.DataFrame, width: float, side: str = BETTER, change: str | None = None
) -> None:
    """Set limits and ticks of the x axis, draw the zero line, and label the unit and the better side.

    The axis covers zero and all intervals, with at least three ticks. Where less is better it shows the decrease, so that
    a gain is positive and at the right in every panel. Labels that would overlap are removed after the layout.

    Args:
        axes: The panel.
        rows: Rows of one number with mean, low, high, better and unit, as `effect_fields` gives them; at least one.
        width: Width of the panel in inches, for line breaks in the label.
        side: Label of the better side, which is left out for a number without one.
        change: Name of what the axis shows; None: increase, decrease or difference.
    """
    ends = rows[["mean", "low", "high"]].to_numpy(dtype=float)
    low, high = min(0.0, float(np.nanmin(ends))), max(0.0, float(np.nanmax(ends)))
    room = 0.07 * (high - low) or 1.0
    low, high = low - room, high + room
    ticks = three_ticks(low, high)
    better = int(rows["better"].iloc[0])
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    axes.set_xlim(*((high, low) if better < 0 else (low, high)))
    axes.set_xticks(ticks, [f"{-tick if better < 0 and tick else tick:g}".replace("-", "−") for tick in ticks])
    drawing.after_layout(axes.figure, lambda: hide_every_second_label(axes))  # type: ignore[arg-type]
    axes.axvline(0, color="#000000", linewidth=drawing.line_width(0.7), zorder=1)
    drawing.rows_alone(axes)
    unit = str(rows["unit"].iloc[0]).replace(*POINTS)
    change = change or {1: "increase", -1: "decrease", 0: "difference"}[better]
    label = f"{change}, {unit}"
    if text_width([label], drawing.size("axes.labelsize")) > width:
        label = (
            f"{change},\n{unit}"
            if text_width([unit], drawing.size("axes.labelsize")) < width
            else label.replace(" ", "\n")
        )
    axes.set_xlabel(f"{label}\n{side} →" if better else label)


def hide_every_second_label(axes: Axes) -> None:
    """Remove every second number below an axis if they would overlap, never zero, which must be among the ticks."""
    ticks, labels = list(axes.get_xticks()), axes.get_xticklabels()
    ends = sorted((box.x0, box.x1) for box in (label.get_window_extent() for label in labels))
    if any(after[0] - before[1] < 0.3 * drawing.size("xtick.labelsize") for before, after in pairwise(ends)):
        zero = ticks.index(0.0)
        axes.set_xticks(ticks, [label.get_text() if (i - zero) % 2 == 0 else "" for i, label in enumerate(labels)])


def three_ticks(low: float, high: float) -> list[float]:
    """Return at least three equidistant round numbers in this range, extended by 12 % of its length at both ends.

    The step is the widest of 1, 2 or 5 times a power of ten that gives three. Zero is among them if it is inside.

    Args:
        low: Lower end.
        high: Upper end, above `low`.
    """
    span = high - low
    low, high = low - SLACK * span, high + SLACK * span
    exponent = math.floor(math.log10(span))
    for power in (exponent, exponent - 1, exponent - 2):
        for step in (5.0, 2.0, 1.0):
            each = step * 10.0**power
            first, last = math.ceil(low / each), math.floor(high / each)
            if last - first + 1 >= LEAST_TICKS:
                return [float(f"{index * each:.12g}") for index in range(first, last + 1)]
    raise AssertionError("a hundredth of the range fits into it three times")


def legend_handles(rows: pd.DataFrame) -> dict[str, Any]:
    """Return legend handles by label of the marks that occur: significant, not significant, and averages of strata.

    Args:
        rows: Rows with sure and mixed, as `effect_fields` gives them, and floor of effects.
    """
    handles = {}
    rows = rows[~rows["floor"]] if "floor" in rows else rows
    is_mixed, is_significant = rows["mixed"].astype(bool), rows["sure"].astype(bool)
    single, averages = is_significant[~is_mixed], is_significant[is_mixed]
    for label, is_shown, ink, marker in (
        (SIGNIFICANT, single.any(), drawing.INK, _marker(False, True)[0]),
        (NOT_SIGNIFICANT, not single.all(), drawing.GREY, _marker(False, False)[0]),
        (MIXED, averages.any(), drawing.INK, _marker(True, True)[0]),
        (
            MIXED_NOT_SIGNIFICANT if averages.any() else f"{MIXED}, not significant",
            not averages.all(),
            drawing.GREY,
            _marker(True, False)[0],
        ),
    ):
        if is_shown:
            look = (
                {"markerfacecolor": BACKGROUND, "linewidth": drawing.line_width(MIXED_WIDTH)} if marker == "D" else {}
            )
            handles[label] = drawing.key(color=ink, marker=marker, **look)
    return handles
