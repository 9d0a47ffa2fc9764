"""Figure `response`: dependence of a number on an axis with numeric levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ...results.console.text import choices_hint
from ...results.store.store import Store
from ...results.studies.study_store import search_of
from ..number_format import Column
from ..sweep_data import ReportError, SweepData, cell_level
from .canvas import drawing
from .canvas.base import Axes, Figure, FigureData, FigureOptions, cell_labels, collected, frame_origins
from .canvas.length_frames import band_note, line_means
from .canvas.line_drawing import LineStyles, draw_lines_with_means, legend, line_styles, named_cells, robust_range
from .canvas.scales import scale_for_values, tick_label
from .comparisons.forest import default_columns, measure_label

LINES = ("attn_type", "memory")
"""Axes that distinguish lines; means are taken over the others."""
MIN_LEVELS = 2
"""Least number of different levels of a numeric axis."""


def axes_with_numeric_levels(data: SweepData) -> dict[str, dict[str, float]]:
    """Return, by axis, the number of each level, for the extra axes of which every level is a finite number.

    Axes with fewer than two different numbers are left out; so are the five fixed axes and the seed.
    """
    numbers_by_axis = {}
    for axis in data.extra_axes():
        levels = {level: level_as_number(level) for level in data.levels(axis)}
        numbers_by_level = {level: value for level, value in levels.items() if value is not None}
        if len(numbers_by_level) == len(levels) and len(set(numbers_by_level.values())) >= MIN_LEVELS:
            numbers_by_axis[axis] = numbers_by_level
    return numbers_by_axis


def level_as_number(level: str) -> float | None:
    """Return a level as a number, underscores ignored; None if it is not a finite number."""
    try:
        value = float(level.replace("_", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def collect(store: Store, data: SweepData, *, by: str | None = None) -> FigureData:
    """Return the numbers over a numeric axis, one row per number and cell.

    Numbers are validation loss, then clean loss, needle accuracy and metrics of extra probes at their longest length
    (`default_columns`). Columns: cell, attempt, configuration (levels of every axis, which seeds share), panel (heading
    of the number), words, unit, better (1, -1 or 0), percent, first and second (levels of mixer and memory, of these
    the axes that vary; "" for none) and line, probe, metric, axis, length (the level of the numeric axis, as a number),
    value (shares as fractions), low, high (of an accuracy: 95 % interval of its trials).

    Args:
        store: The database.
        data: The sweep.
        by: The axis; None: the numeric axis with the most different levels.

    Raises:
        ReportError: The sweep is a study, the axis is not numeric, or no cell has a number.
    """
    if search_of(store, data.sweep) is not None:
        raise ReportError(
            f"the trials of sweep {data.sweep} differ in all searched settings, so there are no means over "
            "trials; use --figure slices"
        )
    numeric = axes_with_numeric_levels(data)
    axis = _chosen_axis(data, numeric, by)
    lines = tuple(line_axis for line_axis in LINES if len(data.levels(line_axis)) > 1)
    rows = [row for column in default_columns(data) for row in _rows(data, column, axis, numeric[axis], lines)]
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has a number to draw over {axis}; finish the sweep")
    frame = pd.DataFrame(rows).astype({"value": float, "low": float, "high": float})
    means = _means(frame)
    unused_axes = [candidate for candidate in numeric if candidate != axis]
    notes = [f"{_averaging_note(data, axis, lines)}{band_note(means)}"]
    if (means["cells"] < means["of"]).any():
        notes.append("Some means are over fewer cells than their line has at other levels.")
    if unused_axes:
        notes.append(f"Other numeric axes: {', '.join(map(drawing.axis_label, unused_axes))}.")
    return collected(
        store, data, "response", f"Response to {drawing.axis_label(axis)}", frame, frame_origins(frame),
        notes=[note.strip() for note in notes if note], options={"by": by} if by else None, axis=axis, axes=lines,
        names=cell_labels(data, without=(axis, *lines)),
        mixer=data.levels("attn_type")[0],
    )  # fmt: skip


def _chosen_axis(data: SweepData, numeric: dict[str, dict[str, float]], by: str | None) -> str:
    """Return the axis to draw over: `by`, or the numeric axis with the most different levels, the first of several.

    Args:
        data: The sweep.
        numeric: Number by level, by numeric axis.
        by: Axis of --by; None: not given.

    Raises:
        ReportError: There is no numeric axis, or `by` is not one.
    """
    if by is not None and by not in numeric:
        hint = choices_hint(by, list(numeric)) if numeric else "no axis of this sweep is numeric"
        raise ReportError(f"--by {by[:60]}: sweep {data.sweep} has no such numeric axis; {hint}")
    if not numeric:
        raise ReportError(
            f"sweep {data.sweep} has no numeric axis; add one to its grid, such as train.muon_lr: [0.01, 0.02, 0.04]"
        )
    return by or max(numeric, key=lambda axis: len(set(numeric[axis].values())))


def _means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the `line_means`, whose `of` is the largest number of cells that the line has at any level."""
    means = line_means(frame)
    return means.assign(of=means.groupby(["panel", "line"])["cells"].transform("max"))


def _rows(
    data: SweepData, column: Column, axis: str, levels: dict[str, float], lines: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the rows of one number, a dict per cell that has it.

    Keys: cell, attempt, configuration, panel, words, unit, better, percent, probe, metric, first, second, line ("all
    cells" without `lines`), axis, length (the level as a number), value, low and high (fractions for shares).

    Args:
        data: The sweep.
        column: The number.
        axis: The numeric axis.
        levels: Number by level of that axis.
        lines: At most two axes that distinguish lines.
    """
    unit = "%" if column.percent else column.unit
    column_fields: dict[str, Any] = {"panel": column.heading, "words": measure_label(column), "unit": unit}
    column_fields |= {
        "better": column.direction,
        "percent": column.percent,
        "probe": column.probe,
        "metric": column.metric,
    }
    rows = []
    for key, cells in data.configurations().items():
        for cell in cells:
            value = data.measured_value(cell, column)
            if value is None or value.value is None:
                continue
            line_levels = [cell_level(cell, line_axis) for line_axis in lines]
            first, second = [*line_levels, "", ""][:2]
            row = {"cell": cell.cell_id, "attempt": value.attempt_id, "configuration": ", ".join(key)} | column_fields
            row |= {"first": first, "second": second, "line": ", ".join(line_levels) or "all cells", "axis": axis}
            row |= {"length": levels[cell_level(cell, axis)], "value": value.value}
            rows.append(row | {"low": value.low, "high": value.high})
    return rows


def _averaging_note(data: SweepData, axis: str, lines: Sequence[str]) -> str:
    """Return the sentence on the axes that lines average over, with a space at its end; "" if there are none.

    Args:
        data: The sweep.
        axis: The numeric axis of the figure.
        lines: Axes that distinguish lines.
    """
    shown_axes = (axis, *lines)
    ranked = ("attn_type", "distractor", "reg_mode", "memory", "window", *data.extra_axes())
    names = [
        drawing.axis_label(candidate)
        for candidate in ranked
        if candidate not in shown_axes and len(data.levels(candidate)) > 1
    ]
    names += ["seed"] if len({cell.seed for cell in data.cells}) > 1 else []
    return f"Lines: means over {', '.join(names)}; dots: single cells. " if names else ""


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per number: a line per mixer (and memory) with its band, and single cells faint behind it.

    Highlighted cells of `look` get lines of their own, labelled at their ends.
    """
    frame = figure_data.frame
    titles = list(dict.fromkeys(frame["panel"]))
    measure_labels = frame.drop_duplicates("panel").set_index("panel")["words"]
    figure = drawing.page(drawing.PANEL_HEIGHT + 0.35, drawing.width_of(len(titles), 3.0) if len(titles) > 1 else 4.6)
    columns = 3 if figure.get_figwidth() > drawing.NARROW_WIDTH else 2
    grid = drawing.panels(figure, [measure_labels[title] for title in titles], columns=columns)
    means, styles = (
        _means(frame),
        line_styles(frame, figure_data.draw_options["axes"], figure_data.draw_options["mixer"]),
    )
    highlighted = named_cells(figure_data, look)
    for axes, title in zip(grid, titles, strict=True):
        panel_rows, mean = (rows[rows["panel"] == title].reset_index(drop=True) for rows in (frame, means))
        _draw_panel(axes, panel_rows, mean, styles, highlighted)
    return drawing.finished(figure, figure_data.title, figure_data.notes, legend(styles))


def _draw_panel(
    axes: Axes,
    panel_rows: pd.DataFrame,
    mean: pd.DataFrame,
    styles: LineStyles,
    highlighted: dict[str, str],
) -> None:
    """Draw a panel, and set its scale, limits, ticks and axis labels.

    Cells that share line and level are dots. Highlighted cells have lines labelled at their ends.

    Args:
        axes: The panel.
        panel_rows: Rows of its number.
        mean: Means of its lines.
        styles: Style by line.
        highlighted: Label by id of a highlighted cell.
    """
    percent = bool(panel_rows["percent"].iloc[0])
    scale = 100.0 if percent else 1.0
    # seeds of a level have the same x, so that dots show what crossing lines would hide
    single = panel_rows.groupby(["line", "length"])["cell"].transform("size") > 1
    for name, line_style in styles.items():
        dots = panel_rows[(panel_rows["line"] == name) & single]
        style: dict[str, Any] = {
            "markersize": 2.4,
            "alpha": 0.4,
            "color": line_style.inks[str(panel_rows["panel"].iloc[0])],
            "markeredgewidth": 0,
            "zorder": 2.4,
        }
        drawing.points(axes, dots["length"], scale * dots["value"], **style)
    draw_lines_with_means(axes, panel_rows, mean, styles, scale, highlighted=highlighted)
    if percent:
        axes.set_ylim(-3, 104)
    else:
        low, high = robust_range(list(panel_rows["value"]), list(mean["value"]))
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - room, high + room)
    levels = sorted(set(panel_rows["length"]))
    scale_for_values(levels).apply_to_axis(axes, "x")
    if len(levels) <= drawing.MAX_TICKS:
        drawing.put_ticks(axes.xaxis, {level: tick_label(level) for level in levels})
    axes.set_xlabel(drawing.axis_label(str(panel_rows["axis"].iloc[0])))
    unit = str(panel_rows["unit"].iloc[0])
    axes.set_ylabel("nats per token" if unit == "nats/token" else unit)
