"""Lines of several mixers side by side, as long as they are few, and how their panels are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, axes_of_lines, line_groups
from ..canvas.line_drawing import draw_lines_with_means, legend, line_styles, named_cells

MAX_LINES_IN_SINGLE_PANEL = 8
"""Lines that stand in one panel instead of a panel for each mixer."""
FormatPanel = Callable[["Axes", pd.DataFrame, bool], None]
"""dress(axes, rows, last): gives the axes of a panel, in which these rows are drawn, their scales and marks."""


def assign_panels(data: SweepData, frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows with what their cells are drawn as (panel, first, second, line), and the axes of first and second: few lines in one
    panel, which has no name, else a panel for each mixer."""
    groups, axes = line_groups(data), axes_of_lines(data)
    drawn = {cell: groups[cell] for cell in dict.fromkeys(frame["cell"])}
    if (
        len(axes) < 2
        and len({(group["panel"], group["line"]) for group in drawn.values()}) <= MAX_LINES_IN_SINGLE_PANEL
    ):
        axes = ("attn_type", *axes)
        drawn = {
            cell: {
                "panel": "",
                "first": group["panel"],
                "second": group["first"],
                "line": f"{group['panel']}, {group['line']}",
            }
            for cell, group in drawn.items()
        }
    columns = {name: [drawn[cell][name] for cell in frame["cell"]] for name in ("panel", "first", "second", "line")}
    return frame.assign(**columns), axes


def out_of_range_note(frame: pd.DataFrame, high: float) -> list[str]:
    """The note on cells whose line goes beyond the axes, which end at `high`; none where none does."""
    count = int((frame.groupby("cell")["value"].max() > high).sum())
    return [f"Lines that leave the axes ({count}): an arrow says what they reach."] if count else []


def draw_panels(
    figure_data: FigureData, look: FigureOptions, frame: pd.DataFrame, means: pd.DataFrame, format_panel: FormatPanel, labels: tuple[str, str], *,
    scale: float = 1, banded: bool = False,
) -> Figure:  # fmt: skip
    """A panel for each name in `panel`, its cells thin and the means of its lines (`lines_of`) thick, cells that stand out named;
    `labels` are the words below and at the left."""
    names = list(dict.fromkeys(frame["panel"]))
    is_single = len(names) == 1
    figure = drawing.page(
        (2.6 if is_single else drawing.PANEL_HEIGHT * drawing.rows_of(len(names))) + 0.35,
        4.8 if is_single else drawing.width_of(len(names)),
    )
    group = drawing.panels(
        figure, [drawing.level_label(name) if name else "" for name in names], sharex=True, sharey=True
    )
    styles = line_styles(frame, figure_data.draw_options["axes"])
    highlighted = named_cells(figure_data, look)
    handles: dict[str, Any] = {}
    for axes, name in zip(group, names, strict=True):
        panel_rows, mean = (rows[rows["panel"] == name] for rows in (frame, means))
        handles |= draw_lines_with_means(axes, panel_rows, mean, styles, scale, highlighted=highlighted, banded=banded)
        format_panel(axes, panel_rows, name == names[-1])
    drawing.outer_labels(figure, *labels)
    return drawing.finished(figure, figure_data.title, figure_data.notes, legend(handles, styles))
