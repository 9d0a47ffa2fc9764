"""Drawing of lines over context lengths: cells thin, means thick with their intervals, highlighted cells labelled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from ...number_format import format_length
from ...render import style
from . import drawing
from .base import Axes, FigureData, FigureOptions
from .length_frames import LINE, coinciding_lines, has_band, is_banded_line, is_barred

BAR_STEP = 2.0  # points in the style `paper` by which neighbouring lines with bars stand apart
INTERVAL = "95 % interval"
BAR_KEY = 9.0  # points in the style `paper`, height of a bar in the legend
INK_KEY = 4.5  # points in the style `paper`, width of a mixer's line in the legend
BROAD_MARK = 1.45  # factor of the marks of a line that another one hides
HIDDEN_DASHES = (0, (2.5, 2.5))  # dashes of such a line over the one that hides it
HALO_ZORDER = 2.9  # zorder of the halos of means
MEAN_ZORDER = 3  # zorder from which on lines are means or highlighted cells
DASHED_ZORDER = 0.2  # by which dashed means lie above others
NEAR_RANGE_SHARE = 0.06  # share of the robust range by which values outside it are still shown
MARKS_PER_LINE = 7  # approximate number of markers on a line of more than twice as many points
MAX_LISTED_LINES = 6  # lines up to which a legend lists them one by one if two axes distinguish them
MAX_LISTED = 3  # values of outliers that are listed one by one
OVER_LINES: dict[str, Any] = {"zorder": 6, "bbox": drawing.BACKING, "linespacing": 1.0}
REFERENCE: dict[str, Any] = {"color": drawing.GREY, "linestyle": (0, (1, 1.2)), "linewidth": 0.9}
"""Style of a line that no run drew, wherever it stands: the training length, a chance level, a law of growth."""
HIGHLIGHTED: dict[str, Any] = {"linewidth": 0.9, "marker": "*", "markersize": 5.5, "markeredgewidth": 0}
"""Style of a highlighted cell: thinner than a mean, with stars."""
BASELINE: dict[str, Any] = {"color": style.INK, "linestyle": (0, (3, 1.4, 1, 1.4)), "linewidth": 0.7}


@dataclass(frozen=True, kw_only=True)
class LineStyle:
    """Style of a line: its ink by panel, and indices in the tables of dashes, markers and widths.

    `levels` are (axis, level) pairs, the mixer first if lines of one panel differ in it. `is_hollow` is for lines
    without a memory.
    """

    inks: Mapping[str, str]
    levels: tuple[tuple[str, str], ...]
    dash: int = 0
    marker: int = 0
    width: int = 0
    is_hollow: bool = False

    @property
    def label(self) -> str:
        """Levels of the line as text, such as "PoLAR, with memory"; "all cells" without any."""
        return ", ".join(drawing.level_label(level, axis) for axis, level in self.levels) or "all cells"

    def line(self, panel: str) -> dict[str, Any]:
        """Return the keyword arguments of matplotlib for the line in a panel."""
        ink = self.inks[panel]
        fill = style.BACKGROUND if self.is_hollow else ink
        marks = {"marker": style.MARKERS[self.marker], "markerfacecolor": fill, "markeredgecolor": ink}
        width = drawing.line_width(style.FREE_WIDTHS[self.width % len(style.FREE_WIDTHS)])
        return {"color": ink, "linestyle": style.DASHES[self.dash], "linewidth": width} | marks


LineStyles = Mapping[str, LineStyle]
"""Style by the text of the column `line`."""


def line_styles(frame: pd.DataFrame, axes: Sequence[str], mixer: str | None = None) -> dict[str, LineStyle]:
    """Return the style of each line, ordered by levels with "off" first, as reports/render/style.py declares them.

    The ink is that of the line's mixer, in the lightness of its regularizer; dash and fill show the memory, the marker
    the window. Another axis has the markers that no window has, and widths; a second one has dashes.

    Args:
        frame: Rows with the columns panel, line, first and second.
        axes: The axes of first and second; fewer leave the other level out.
        mixer: Mixer of every panel; None: of each the one that it is named after, or that of the line if `axes` has it.
    """
    panels = list(dict.fromkeys(frame["panel"]))
    columns = dict(zip(axes, ("first", "second"), strict=False))
    lines = frame.drop_duplicates("line").sort_values(
        list(columns.values()), key=lambda levels: levels.map(drawing.off_first), kind="stable"
    )
    every_mixer = frame[columns["attn_type"]] if "attn_type" in columns else pd.Series([mixer] if mixer else panels)
    inks = style.mixer_inks(map(str, every_mixer))
    has_window = "window" in columns and set(frame[columns["window"]]) <= set(style.WINDOW_MARKERS)
    mixers = list(dict.fromkeys(frame[columns["attn_type"]])) if "attn_type" in columns else []
    fixed = {"attn_type", "memory", "reg_mode", *(["window"] if has_window else [])}
    free_axes = [axis for axis in columns if axis not in fixed]
    styles: dict[str, LineStyle] = {}
    for row in lines.to_dict("records"):
        levels = {axis: str(row[column]) for axis, column in columns.items()}
        own = levels.get("attn_type", mixer)
        shade = levels.get("reg_mode", "baseline")
        memory = levels.get("memory", "on")
        dash, marker, width = style.MEMORY_DASHES.get(memory, 0), 0, 0
        if mixers and not has_window and not free_axes:
            # mixers of one panel differ in more than ink
            marker = mixers.index(own) and style.free_marker(mixers.index(own) - 1)
        for axis, level in levels.items():
            index = list(dict.fromkeys(frame[columns[axis]])).index(level)
            if axis == "window" and has_window:
                marker = style.WINDOW_MARKERS[level]
            elif axis in free_axes[:1]:
                marker, width = style.free_marker(index), index
            elif axis in free_axes:
                dash = index % len(style.DASHES)
        own_inks = {panel: style.regularizer_ink(inks[str(own or panel)], shade) for panel in panels}
        if own is None and not set(panels) & set(style.MIXER_INKS):
            # panels that are not mixers, such as tasks: lines differ in ink, too
            own_inks = dict.fromkeys(panels, style.SERIES_INKS[len(styles) % len(style.SERIES_INKS)])
        styles[str(row["line"])] = LineStyle(
            inks=own_inks,
            levels=tuple(levels.items()), dash=dash, marker=marker, width=width, is_hollow=memory == "off",
        )  # fmt: skip
    return styles


def draw_lines_with_means(
    axes: Axes,
    cells: pd.DataFrame,
    means: pd.DataFrame,
    styles: LineStyles,
    scale: float,
    *,
    highlighted: Mapping[str, str] | None = None,
    barred: bool = False,
) -> None:
    """Draw the means of lines with their intervals, or their cells thin without any; a white halo where no band lies.

    All halos lie below all lines, so that no line erases its neighbour, and a line that another one of another ink
    hides shows as dashes over it. The caller sets the limits of the axes and
    marks what leaves them. A line of a single cell has no thin line; a line without rows in `means` is not drawn.
    Intervals over fewer than three configurations or seeds are not drawn. Bands of lines with hollow markers have a
    dashed edge.

    Args:
        axes: The axes.
        cells: Rows of one panel with panel, cell, line, length and value, as `length_frame` gives them.
        means: Rows with line, length, value, cells, of, low and high, as `line_means` gives them.
        styles: Style by line, from `line_styles`.
        scale: Factor from values to units of the y axis.
        highlighted: Label by id of a highlighted cell; these get lines of their own with labels at their ends.
        barred: Draw intervals as bars, each line a little beside the others, instead of bands.
    """
    from matplotlib.colors import to_rgba

    highlighted = highlighted or {}
    shifts = _sideways(axes, len(styles)) if barred else [axes.transData] * len(styles)
    # lines with bars stand apart sideways
    hidden = {} if barred else _hidden_levels(cells, means, styles)
    for rank, (name, line_style) in enumerate(styles.items()):
        line = means[means["line"] == name].sort_values("length")
        if line.empty:
            continue
        own = cells[cells["line"] == name]
        look = line_style.line(str(own["panel"].iloc[0]))
        banded = line[has_band(line)]
        if (line["cells"] > 1).any() and banded.empty:
            _draw_cells(axes, own, look, scale, faint=bool(highlighted))
        # dashes above unbroken lines, which are seen through their gaps
        above = MEAN_ZORDER + 0.01 * rank + DASHED_ZORDER * bool(line_style.dash)
        if len(line) > 2 * MARKS_PER_LINE:
            stride = len(line) // MARKS_PER_LINE
            # each line has its marks elsewhere, so that none hides those of another
            look["markevery"] = (rank * stride // len(styles), stride)
        look["transform"] = shifts[rank]
        # a halo would hide a narrow band
        if barred or banded.empty:
            halo: dict[str, Any] = {
                "color": style.BACKGROUND,
                "linewidth": drawing.line_width(3.0),
                "zorder": HALO_ZORDER,
            }
            axes.plot(line["length"], scale * line["value"], transform=shifts[rank], **halo)
        axes.plot(line["length"], scale * line["value"], zorder=above, **look)
        if name in hidden:
            _draw_hidden(axes, line, hidden[name], look, scale)
        if len(banded) and barred:
            _draw_bars(axes, banded, scale, look["color"], shifts[rank])
        elif len(banded):
            low, high = (scale * banded[side].astype(float) for side in ("low", "high"))
            hollow = look["markerfacecolor"] == style.BACKGROUND
            shade: dict[str, Any] = {"facecolor": to_rgba(look["color"], 0.05 if hollow else 0.2), "zorder": 2}
            shade |= {"edgecolor": look["color"], "linestyle": look["linestyle"]} if hollow else {"edgecolor": "none"}
            width = drawing.line_width(0.4) if hollow else 0
            axes.fill_between(banded["length"], low, high, **shade, linewidth=width)
    _draw_highlighted(axes, cells[cells["cell"].isin(list(highlighted))], styles, scale, highlighted)


def _draw_hidden(axes: Axes, line: pd.DataFrame, hidden: Collection[float], look: dict[str, Any], scale: float) -> None:
    """Draw the part of a line that another one hides as dashes over that one, with larger marks below it.

    Args:
        axes: The axes.
        line: Rows of the line, ascending, with length and value.
        hidden: Lengths at which it is hidden.
        look: Style of the line.
        scale: Factor from values to units of the y axis.
    """
    values = scale * line["value"].where(line["length"].isin(hidden))
    marks = look | {"linestyle": "none", "markersize": BROAD_MARK * drawing.marker_size()}
    axes.plot(line["length"], values, zorder=HALO_ZORDER + 0.05, **marks)
    axes.plot(line["length"], values, zorder=MEAN_ZORDER + 0.5, **look | {"linestyle": HIDDEN_DASHES, "marker": ""})


def _hidden_levels(cells: pd.DataFrame, means: pd.DataFrame, styles: LineStyles) -> dict[str, set[float]]:
    """Return the lengths at which a line of a panel lies below another one of another ink, unseen, by line.

    An unbroken line is seen through the gaps of dashes.
    """
    panel = str(cells["panel"].iloc[0]) if len(cells) else ""
    order = sorted(styles, key=lambda name: bool(styles[name].dash))
    hidden: dict[str, set[float]] = {}
    for first, second, levels, _ in coinciding_lines(means) if len(means) else ():
        below, above = sorted((first, second), key=order.index)
        is_seen = styles[above].dash and not styles[below].dash
        if styles[below].inks.get(panel) != styles[above].inks.get(panel) and not is_seen:
            hidden.setdefault(below, set()).update(levels)
    return hidden


def _sideways(axes: Axes, count: int) -> list[Any]:
    """Return a transform from data for each of so many lines, which moves it sideways by a part of a mark's width."""
    from matplotlib.transforms import ScaledTranslation

    step = drawing.line_width(BAR_STEP) / 72
    inches = axes.figure.dpi_scale_trans
    offsets = [step * (rank - (count - 1) / 2) for rank in range(count)]
    return [axes.transData + ScaledTranslation(offset, 0, inches) for offset in offsets]


def _draw_bars(axes: Axes, points: pd.DataFrame, scale: float, colour: str, transform: Any) -> None:
    """Draw the intervals of one line as upright bars below its marks.

    Args:
        axes: The axes.
        points: Rows with length, low and high.
        scale: Factor from values to units of the y axis.
        colour: Colour of the bars.
        transform: Transform of the line.
    """
    from matplotlib.collections import LineCollection

    numbers = points[["length", "low", "high"]].to_numpy(dtype=float).tolist()
    ends = [[(length, scale * low), (length, scale * high)] for length, low, high in numbers]
    bars: dict[str, Any] = {"linewidths": drawing.line_width(1.0), "alpha": 0.8, "zorder": 2, "transform": transform}
    axes.add_collection(LineCollection(ends, colors=colour, **bars))
    axes.update_datalim([point for bar in ends for point in bar])


def _draw_cells(axes: Axes, cells: pd.DataFrame, look: Mapping[str, Any], scale: float, *, faint: bool) -> None:
    """Draw the lines of single cells, thin, in one collection; the more there are, the fainter.

    Args:
        axes: The axes.
        cells: Rows of one line's cells.
        look: Style of the line, of which colour and dashes count.
        scale: Factor from values to units of the y axis.
        faint: Whether they are fainter, because highlighted cells are drawn too.
    """
    from matplotlib.collections import LineCollection

    # one collection per line is a hundred times faster than a plot per cell
    each = [
        cell_rows.sort_values("length")[["length", "value"]].to_numpy(dtype=float) * (1, scale)
        for _, cell_rows in cells.groupby("cell", sort=False)
    ]
    alpha = (0.7 if faint else 1.0) * min(0.6, max(0.06, 5 / len(each)))
    thin = {"linewidths": drawing.line_width(0.5), "alpha": alpha, "zorder": 1, "linestyles": look["linestyle"]}
    axes.add_collection(LineCollection(each, colors=look["color"], **thin))


def _draw_highlighted(
    axes: Axes, cells: pd.DataFrame, styles: LineStyles, scale: float, highlighted: Mapping[str, str]
) -> None:
    """Draw the lines of highlighted cells with stars in the ink of their line, and label their ends after the layout.

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
        colour = styles[str(curve["line"].iloc[0])].inks[str(curve["panel"].iloc[0])]
        halo: dict[str, Any] = {"color": style.BACKGROUND, "linewidth": drawing.line_width(2.4), "zorder": 3.4}
        axes.plot(curve["length"], scale * curve["value"], **halo)
        axes.plot(curve["length"], scale * curve["value"], color=colour, zorder=3.5, **_scaled(HIGHLIGHTED))
        end = curve.iloc[-1]
        labels.append((float(end["length"]), scale * float(end["value"]), highlighted[str(cell)]))
    if labels:
        label_line_ends(axes, labels)


def legend(
    styles: LineStyles, *more: tuple[str, Mapping[str, Any]], means: pd.DataFrame | None = None
) -> dict[str, Any]:
    """Return the legend handles of the levels of each axis that distinguishes lines, by label.

    Few lines that two axes distinguish have an entry each. Else a level shows what its axis controls: the ink of a mixer or regularizer, dash and fill, or the marker. Handles are
    grey where lines of several inks have the level.

    Args:
        styles: Style by line, from `line_styles`.
        more: Further (label, properties of a line) entries, whose widths are those of the style `paper`.
        means: Rows of `line_means`, for an entry of the intervals that are drawn; None: no entry.
    """
    handles: dict[str, Any] = {}
    axes = list(dict.fromkeys(axis for line in styles.values() for axis, _ in line.levels))
    if _is_listed_by_line(styles, axes):
        for line in styles.values():
            inks = set(line.inks.values())
            look = replace(line, inks={"": inks.pop() if len(inks) == 1 else style.GREY}).line("")
            handles[line.label] = drawing.key(**look)
        axes = []
    several = len(axes) > 1 or (len(axes) == 1 and axes[0] == "attn_type")
    for axis in axes:
        levels = {level for line in styles.values() for name, level in line.levels if name == axis}
        if len(levels) == 1 and axis != "attn_type" and len(axes) > 1:
            continue
        for line in styles.values():
            level = dict(line.levels)[axis]
            inks = {ink for mate in styles.values() if (axis, level) in mate.levels for ink in mate.inks.values()}
            sole = inks.pop() if len(inks) == 1 else style.GREY
            look = replace(line, inks={"": sole}).line("")
            used_dashes = {mate.dash for mate in styles.values() if (axis, level) in mate.levels}
            used_marks = {mate.marker for mate in styles.values() if (axis, level) in mate.levels}
            if several and len(used_dashes) > 1:
                look |= {"linestyle": "none"} if len(used_marks) == 1 and axis != "attn_type" else {"linestyle": "-"}
                look |= {"markerfacecolor": look["color"]}
            if several and axis == "attn_type" and max(len(used_dashes), len(used_marks)) > 1:
                # an ink alone, so that no mixer looks like a level of the other axis
                look |= {"linestyle": "-", "marker": "none", "linewidth": drawing.line_width(INK_KEY)}
            if several and len(used_marks) > 1:
                look |= {"linewidth": drawing.line_width(style.FREE_WIDTHS[0])} if axis != "attn_type" else {}
                # a circle carries the fill where another axis has the marker
                look |= {"marker": "none"} if axis == "attn_type" else {"marker": style.MARKERS[0]}
            handles.setdefault(_legend_label(level, axis, levels), drawing.key(**look))
    handles |= {label: drawing.key(**_scaled(properties)) for label, properties in more}
    if means is not None and has_band(means).any():
        handles[INTERVAL] = interval_key(is_bar=is_barred(means))
    return handles


def _is_listed_by_line(styles: LineStyles, axes: Sequence[str]) -> bool:
    """Return True if a legend has an entry per line, so that no mark of one axis looks like that of another.

    So it is if two axes distinguish at most MAX_LISTED_LINES lines.
    """
    levels = [len({dict(line.levels)[axis] for line in styles.values()}) for axis in axes]
    return len(axes) > 1 and min(levels) > 1 and len(styles) <= MAX_LISTED_LINES


def interval_key(*, is_bar: bool) -> Any:
    """Return the legend handle of INTERVAL: an upright bar, or a shaded patch."""
    bar: dict[str, Any] = {"color": style.GREY, "linestyle": "none", "marker": "|", "markersize": BAR_KEY}
    return drawing.key(**_scaled(bar)) if is_bar else drawing.patch(facecolor=style.FAINT, edgecolor="none", alpha=0.6)


def _scaled(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties of a line whose width in the style `paper` became that of the present style."""
    widths = {name: drawing.line_width(properties[name]) for name in ("linewidth", "markersize") if name in properties}
    return {**properties, **widths}


def _legend_label(level: str, axis: str, among: Collection[str]) -> str:
    """Return the label of a level; a memory is named ("KDA") if the axis has levels other than on and off.

    Args:
        level: The level.
        axis: Its axis.
        among: All levels of the axis.
    """
    several = axis == "memory" and not set(among) <= {"on", "off"}
    return drawing.memory_label(level) if several else drawing.level_label(level, axis)


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


def reference_line() -> dict[str, Any]:
    """Return the keyword arguments of matplotlib for a line of REFERENCE in the present style."""
    return _scaled(REFERENCE)


def mark_training_length(axes: Axes, trained: int | None) -> None:
    """Draw a dotted vertical line at the training length in tokens, which `training_key` explains; None draws none."""
    if trained is not None:
        axes.axvline(trained, **reference_line(), zorder=0.9)


def training_key(trained: int | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the legend entry of the training length as a list; empty for None."""
    return [] if trained is None else [(f"training length ({format_length(trained)})", REFERENCE)]


def mark_baseline(group: Sequence[Axes], level: float) -> None:
    """Draw a dashed and dotted horizontal line in each of these axes, which a legend entry of BASELINE explains.

    Args:
        group: The axes.
        level: Height of the line in data.
    """
    for axes in group:
        axes.axhline(level, **_scaled(BASELINE), zorder=2.5)


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


def lines_of_cells(cells: pd.DataFrame, means: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of cells that have a line of their own: those whose mean line has no band.

    Args:
        cells: Rows with the columns of GROUP, probe, metric, cell, length and value.
        means: Their `line_means`.
    """
    banded = means[is_banded_line(means)][LINE].drop_duplicates().assign(banded=True)
    return cells[cells.merge(banded, on=LINE, how="left")["banded"].isna().to_numpy()]


def range_of_lines(cells: pd.DataFrame, means: pd.DataFrame) -> tuple[float, float]:
    """Return the `robust_range` of the means with their bands, as far as these lie among the cells, and of thin lines.

    Args:
        cells: Rows of `lines_of_cells` and others, with value.
        means: Their `line_means`.
    """
    own, banded = lines_of_cells(cells, means), means[has_band(means)]
    bands = banded[["low", "high"]].to_numpy(dtype=float).clip(cells["value"].min(), cells["value"].max()).ravel()
    inside = [*means["value"], *bands]
    return robust_range([*own["value"], *inside], inside)


def mark_out_of_range(axes: Axes, cells: pd.DataFrame, decimals: int) -> None:
    """Write an arrow at the upper right for cells whose line leaves the axes at the top, with their largest values.

    Of more than three cells their number and "lowest to highest" are written. Without such a cell nothing is drawn.

    Args:
        axes: The axes, with their limits.
        cells: Rows with the columns cell and value, in units of the axis.
        decimals: Decimals of the values.
    """
    high = axes.get_ylim()[1]
    tops = cells.groupby("cell", sort=False)["value"].max()
    beyond = [f"{value:.{decimals}f}" for value in sorted(tops[tops > high])]
    if beyond:
        values_text = ", ".join(beyond)
        if len(beyond) > MAX_LISTED:
            values_text = f"{len(beyond)} lines: {beyond[0]} to {beyond[-1]}"
        style: dict[str, Any] = {
            "xycoords": "axes fraction",
            "ha": "right",
            "va": "top",
            "zorder": 6,
            "bbox": drawing.BACKING,
        }
        drawing.note(axes, f"↑ {values_text}", (0.99, 0.99), **style)
