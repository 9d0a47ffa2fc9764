"""Drawing of lines over context lengths: cells thin, means thick with their intervals, highlighted cells labelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...number_format import format_length
from . import drawing
from .base import Axes, FigureData, FigureOptions
from .length_frames import count_fewer

MAX_MARK_SHIFT = 0.2  # octaves, largest shift between the markers of two lines
MEAN_ZORDER = 3  # zorder from which on lines are means or highlighted cells
NEAR_RANGE_SHARE = 0.06  # share of the robust range by which values outside it are still shown
MARKS_PER_LINE = 6  # approximate number of markers on a line of many points
MAX_LISTED = 3  # values of outliers that are listed one by one
OVER_LINES: dict[str, Any] = {"zorder": 6, "bbox": drawing.BACKING, "linespacing": 1.0}
TOTAL_MARK_SPREAD = 0.66  # octaves that the markers of all lines together span at one length


def line_styles(frame: pd.DataFrame, axes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each line, by its text in the column `line`, ordered by levels with "off" first.

    A style has matplotlib's keys (color, linestyle, marker, markerfacecolor, markeredgecolor), its legend label
    (`label`) and the horizontal shift of its markers in octaves (`aside`). No two lines share colour, marker and dashes
    while there are enough, and none hides the markers of another.

    Args:
        frame: Rows with the columns line, first and second.
        axes: The axes of first and second; with fewer than two the label leaves the other level out.
    """
    lines = frame.drop_duplicates("line")
    # sorted, so that "off" has the same style in every figure
    firsts, seconds = (sorted(dict.fromkeys(lines[name]), key=drawing.off_first) for name in ("first", "second"))
    level_indices = {
        str(row["line"]): (firsts.index(row["first"]), seconds.index(row["second"])) for _, row in lines.iterrows()
    }
    styles = {}
    step = min(MAX_MARK_SHIFT, TOTAL_MARK_SPREAD / max(1, len(level_indices)))
    for rank, (name, (first, second)) in enumerate(sorted(level_indices.items(), key=lambda entry: entry[1])):
        levels = zip((firsts[first], seconds[second]), (firsts, seconds), axes, strict=False)
        label = ", ".join(_legend_label(level, axis, among) for level, among, axis in levels)
        aside = (rank - (len(level_indices) - 1) / 2) * step
        styles[name] = drawing.line_style(first, second, len(seconds)) | {
            "label": label or "all cells",
            "aside": aside,
        }
    return styles


def _legend_label(level: str, axis: str, among: Sequence[str]) -> str:
    """Return the label of a level; a memory is named ("KDA") if the axis has levels other than on and off.

    Args:
        level: The level.
        axis: Its axis.
        among: All levels of the axis.
    """
    several = axis == "memory" and not set(among) <= {"on", "off"}
    return drawing.memory_label(level) if several else drawing.level_label(level, axis)


def draw_lines_with_means(
    axes: Axes,
    cells: pd.DataFrame,
    means: pd.DataFrame,
    styles: Mapping[str, dict[str, Any]],
    scale: float,
    *,
    highlighted: Mapping[str, str] | None = None,
    banded: bool = False,
) -> dict[str, Any]:
    """Draw cells thin and the means of their lines thick, with intervals.

    The caller sets the limits of the axes and marks what leaves them. A line of a single cell has no thin line; a line
    without rows in `means` is not drawn. Bars and means are shifted aside by the style, bands are not.

    Args:
        axes: The axes.
        cells: Rows with cell, line, length and value, as `length_frame` gives them.
        means: Rows with line, length, value, cells, of, low and high, as `line_means` gives them.
        styles: Style by line, from `line_styles`.
        scale: Factor from values to units of the y axis.
        highlighted: Label by id of a highlighted cell; these get lines of their own with labels at their ends.
        banded: Whether intervals are bands, for lines of many points, rather than bars.

    Returns:
        Legend handles by label, of the mean lines alone.
    """
    highlighted = highlighted or {}
    handles: dict[str, Any] = {}
    for name, line_style in styles.items():
        style = {key: value for key, value in line_style.items() if key not in ("label", "aside")}
        line = means[means["line"] == name].sort_values("length")
        if line.empty:
            continue
        if (line["cells"] > 1).any():
            _draw_cells(axes, cells[cells["line"] == name], style, scale, faint=bool(highlighted))
        if banded:
            style["markevery"] = max(1, len(line) // MARKS_PER_LINE)
        aside = line["length"] * (1.0 if banded else 2.0 ** line_style["aside"])
        (handles[line_style["label"]],) = axes.plot(aside, scale * line["value"], zorder=MEAN_ZORDER, **style)
        count_fewer(axes, line, style["color"], scale)
        if line["low"].notna().any():
            if banded:
                low, high = (scale * line[side].astype(float) for side in ("low", "high"))
                axes.fill_between(
                    aside, low, high, color=style["color"], alpha=min(0.2, 0.4 / len(styles)), linewidth=0, zorder=2
                )
                continue
            below, above = line["value"] - line["low"], line["high"] - line["value"]
            axes.errorbar(
                aside, scale * line["value"], yerr=[scale * below.clip(0), scale * above.clip(0)], fmt="none",
                ecolor=style["color"], elinewidth=drawing.line_width(0.9), capsize=drawing.line_width(1.6), capthick=drawing.line_width(0.9),
                zorder=2,
            )  # fmt: skip
    _draw_highlighted(axes, cells[cells["cell"].isin(list(highlighted))], styles, scale, highlighted)
    return handles


def _draw_cells(axes: Axes, cells: pd.DataFrame, style: Mapping[str, Any], scale: float, *, faint: bool) -> None:
    """Draw the lines of single cells, thin, in one collection.

    Args:
        axes: The axes.
        cells: Rows of one line's cells.
        style: Style of the line, of which the colour counts.
        scale: Factor from values to units of the y axis.
        faint: Whether they are fainter, because highlighted cells are drawn too.
    """
    from matplotlib.collections import LineCollection

    # one collection per line is a hundred times faster than a plot per cell
    each = [
        cell_rows.sort_values("length")[["length", "value"]].to_numpy(dtype=float) * (1, scale)
        for _, cell_rows in cells.groupby("cell", sort=False)
    ]
    thin = {"linewidths": drawing.line_width(0.5), "alpha": 0.22 if faint else 0.3, "zorder": 1}
    axes.add_collection(LineCollection(each, colors=style["color"], **thin))


def _draw_highlighted(
    axes: Axes, cells: pd.DataFrame, styles: Mapping[str, dict[str, Any]], scale: float, highlighted: Mapping[str, str]
) -> None:
    """Draw the lines of highlighted cells with a dark edge, and label their ends once the layout is final.

    Args:
        axes: The axes.
        cells: Rows of the highlighted cells.
        styles: Style by line.
        scale: Factor from values to units of the y axis.
        highlighted: Label by cell id.
    """
    labels = []
    for cell, points in cells.groupby("cell", sort=False):
        curve = points.sort_values("length")
        colour = styles[str(curve["line"].iloc[0])]["color"]
        axes.plot(
            curve["length"], scale * curve["value"], color="#000000", linewidth=drawing.line_width(1.5), zorder=3.4
        )
        axes.plot(curve["length"], scale * curve["value"], color=colour, linewidth=drawing.line_width(0.9), zorder=3.5)
        end = curve.iloc[-1]
        axes.plot(end["length"], scale * end["value"], marker=".", color="#000000", zorder=3.6)
        labels.append((float(end["length"]), scale * float(end["value"]), highlighted[str(cell)]))
    if labels:
        label_line_ends(axes, labels)


def legend(handles: Mapping[str, Any], styles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the legend handles of the drawn lines by label, in the order of `styles`.

    Args:
        handles: Handles by label, of all panels.
        styles: Style by line, from `line_styles`.
    """
    return {style["label"]: handles[style["label"]] for style in styles.values() if style["label"] in handles}


def named_cells(figure_data: FigureData, look: FigureOptions) -> dict[str, str]:
    """Return the labels of the highlighted cells of `look` by cell id; "this cell" for one without a label."""
    return {cell: figure_data.draw_options["names"].get(cell, "") or "this cell" for cell in look.highlight}


def label_line_ends(axes: Axes, labels: Sequence[tuple[float, float, str]]) -> None:
    """Have each (x, y, text) written near the end of its line, once the layout is final."""
    drawing.after_layout(axes.figure, lambda: _write_line_ends(axes, labels))  # type: ignore[arg-type]


def _write_line_ends(axes: Axes, labels: Iterable[tuple[float, float, str]]) -> None:
    """Write each (x, y, text) near the end of its line, right-aligned, where it hides the least; lowest y first."""
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for x, y, text in sorted(labels, key=lambda label: label[1]):
        note = drawing.note(axes, text, (x, y), (2, 2.5), ha="right", va="bottom", **OVER_LINES)
        height = note.get_window_extent(renderer).height * 72 / axes.figure.dpi
        ways = [sign * (2.5 + 1.5 * step) - (height if sign < 0 else 0) for step in range(24) for sign in (1, -1)]
        costs = {}
        for way in ways:
            note.set_position((2, way))
            costs[way] = _covering_cost(axes, note, renderer) + abs(way) / 10
        note.set_position((2, min(costs, key=costs.__getitem__)))


def mark_training_length(axes: Axes, trained: int | None, *, with_label: bool) -> None:
    """Draw a vertical line at the training length in tokens, with a label at its top if `with_label`.

    None draws nothing.
    """
    if trained is None:
        return
    axes.axvline(trained, color=drawing.GREY, linewidth=drawing.line_width(0.8), linestyle=(0, (1, 1)), zorder=0.9)
    if with_label:
        style: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "va": "top", "color": drawing.GREY, "zorder": 5}
        drawing.note(axes, f"trained at {format_length(trained)}", (trained, 1), (2, -1), **style)


def mark_baseline(group: Sequence[Axes], level: float, text: str) -> None:
    """Draw a dotted horizontal line in each of these axes, and one label where it hides the fewest points.

    The label is written once the layout is final. It is left out where it would hide a mean or another label
    everywhere, so the notes must explain the line too.

    Args:
        group: The axes, all of one figure; at least one.
        level: Height of the line in data.
        text: The label.
    """
    for axes in group:
        axes.axhline(level, color="#000000", linestyle=(0, (1, 1.2)), linewidth=drawing.line_width(0.9), zorder=2.5)
    drawing.after_layout(group[0].figure, lambda: _write_baseline_label(group, level, text))  # type: ignore[arg-type]


def _write_baseline_label(group: Sequence[Axes], level: float, text: str) -> None:
    """Write the label of a baseline into the axes and at the position where it hides the least.

    The layout must be final. Tried are both ends of the line, above and below it, in all axes. The label is removed
    again if it would hide a mean or another label, or leave the axes.

    Args:
        group: The axes that show the baseline.
        level: Height of the baseline in data.
        text: The label.
    """
    renderer = group[0].figure.canvas.get_renderer()  # type: ignore[attr-defined]
    best: tuple[float, Any] | None = None
    for axes in group:
        for x_share, side in ((0.98, "right"), (0.02, "left")):
            for way, upright in ((1.5, "bottom"), (-1.5, "top")):
                among = ("axes fraction", "data")
                note = drawing.note(
                    axes, text, (x_share, level), (0, way), xycoords=among, ha=side, va=upright, **OVER_LINES
                )
                cost = _covering_cost(axes, note, renderer)
                if best is None or cost < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = (cost, note)
                else:
                    note.remove()
    if best is not None and _covering_cost(best[1].axes, best[1], renderer, MEAN_ZORDER) > 0:
        best[1].remove()


def _covering_cost(axes: Axes, note: Any, renderer: Any, above: float = 0) -> float:
    """Return the cost of what a note covers, in display space.

    It is 1 per point of a line under the note (5 for means and highlighted cells), 1000 per other text that it
    overlaps, and 10000 if it leaves the axes at the top or bottom. Lines of up to two points do not count.

    Args:
        axes: The axes.
        note: The annotation.
        renderer: Renderer of the figure.
        above: Least zorder of the lines that count.
    """
    box = note.get_window_extent(renderer).expanded(1.05, 1.15)
    covered_lines = [line for line in axes.lines if np.size(line.get_xdata()) > 2 and line.get_zorder() >= above]
    cost = 0.0
    for line in covered_lines:
        points = line.get_path().interpolated(8).transformed(line.get_transform()).vertices
        cost += (5 if line.get_zorder() >= MEAN_ZORDER else 1) * box.count_contains(points)
    inside = axes.get_window_extent(renderer)
    outside = not (inside.y0 <= box.y0 and box.y1 <= inside.y1)
    overlapping = [text for text in axes.texts if text is not note and text.get_window_extent(renderer).overlaps(box)]
    return cost + 1000 * len(overlapping) + 10000 * outside


def robust_range(values: Sequence[float], means: Sequence[float]) -> tuple[float, float]:
    """Return a (low, high) range for an axis that a few outliers do not flatten, with a margin of 4 % at both ends.

    Without the margin it reaches from the lowest to the highest value within 1.5 times the interquartile range of the
    quartiles (or just outside), and covers the means. Where values lie above it, it has more space at the top for the
    label of `mark_out_of_range`.

    Args:
        values: Values of all points; at least one finite one. Not finite ones are ignored.
        means: Values that must be inside; at least one finite one. Not finite ones are ignored.
    """
    finite = np.sort(np.asarray(values, dtype=float)[np.isfinite(np.asarray(values, dtype=float))])
    finite_means = np.asarray(means, dtype=float)[np.isfinite(np.asarray(means, dtype=float))]
    first, third = np.quantile(finite, 0.25), np.quantile(finite, 0.75)
    fences = first - 1.5 * (third - first), third + 1.5 * (third - first)
    near = NEAR_RANGE_SHARE * (fences[1] - fences[0])
    low = min(finite[finite >= fences[0] - near][0], finite_means.min())
    high = max(finite[finite <= fences[1] + near][-1], finite_means.max())
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    # the label of omitted values needs space at the top
    more = 0.12 * (high - low) if finite[-1] > high + room else 0.0
    return float(low - room), float(high + room + more)


def mark_out_of_range(axes: Axes, cells: pd.DataFrame, decimals: int) -> None:
    """Write an arrow at the upper right for cells whose line leaves the axes at the top, with their largest values.

    More than three distinct values are written as "lowest to highest". Without such a cell nothing is drawn.

    Args:
        axes: The axes, with their limits.
        cells: Rows with the columns cell and value, in units of the axis.
        decimals: Decimals of the values.
    """
    high = axes.get_ylim()[1]
    tops = cells.groupby("cell", sort=False)["value"].max()
    beyond = [f"{value:.{decimals}f}" for value in sorted(tops[tops > high])]
    if beyond:
        values_text = ", ".join(dict.fromkeys(beyond))
        if len(set(beyond)) > MAX_LISTED:
            values_text = f"{beyond[0]} to {beyond[-1]}"
        style: dict[str, Any] = {
            "xycoords": "axes fraction",
            "ha": "right",
            "va": "top",
            "zorder": 6,
            "bbox": drawing.BACKING,
        }
        drawing.note(axes, f"↑ {values_text}", (0.99, 0.99), **style)
