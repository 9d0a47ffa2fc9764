"""Lines of several mixers side by side, as long as they are few, and how their panels are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, axes_of_lines, line_groups
from ..canvas.line_drawing import draw_lines_with_means, legend, looks, named_cells

ONE_PANEL = 8
"""Lines that stand in one panel instead of a panel for each mixer."""
Dress = Callable[["Axes", pd.DataFrame, bool], None]
"""dress(axes, rows, last): gives the axes of a panel, in which these rows are drawn, their scales and marks."""


def side_by_side(data: SweepData, frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows with what their cells are drawn as (panel, first, second, line), and the axes of first and second: few lines in one
    panel, which has no name, else a panel for each mixer."""
    groups, axes = line_groups(data), axes_of_lines(data)
    drawn = {cell: groups[cell] for cell in dict.fromkeys(frame["cell"])}
    if len(axes) < 2 and len({(one["panel"], one["line"]) for one in drawn.values()}) <= ONE_PANEL:
        axes = ("attn_type", *axes)
        drawn = {
            cell: {"panel": "", "first": one["panel"], "second": one["first"], "line": f"{one['panel']}, {one['line']}"}
            for cell, one in drawn.items()
        }
    told = {name: [drawn[cell][name] for cell in frame["cell"]] for name in ("panel", "first", "second", "line")}
    return frame.assign(**told), axes


def leaving(frame: pd.DataFrame, high: float) -> list[str]:
    """The note on cells whose line goes beyond the axes, which end at `high`; none where none does."""
    count = int((frame.groupby("cell")["value"].max() > high).sum())
    return [f"Lines that leave the axes ({count}): an arrow says what they reach."] if count else []


def draw_panels(
    made: FigureData, look: FigureOptions, frame: pd.DataFrame, means: pd.DataFrame, dress: Dress, labels: tuple[str, str], *,
    scale: float = 1, banded: bool = False,
) -> Figure:  # fmt: skip
    """A panel for each name in `panel`, its cells thin and the means of its lines (`lines_of`) thick, cells that stand out named;
    `labels` are the words below and at the left."""
    names = list(dict.fromkeys(frame["panel"]))
    one = len(names) == 1
    figure = drawing.page(
        (2.6 if one else drawing.PANEL * drawing.rows_of(len(names))) + 0.35,
        4.8 if one else drawing.width_of(len(names)),
    )
    group = drawing.panels(
        figure, [drawing.shown_values(name) if name else "" for name in names], sharex=True, sharey=True
    )
    found = looks(frame, made.about["axes"])
    named = named_cells(made, look)
    handles: dict[str, Any] = {}
    for axes, name in zip(group, names, strict=True):
        here, mean = (some[some["panel"] == name] for some in (frame, means))
        handles |= draw_lines_with_means(axes, here, mean, found, scale, named=named, banded=banded)
        dress(axes, here, name == names[-1])
    drawing.outer_labels(figure, *labels)
    return drawing.finished(figure, made.title, made.notes, legend(handles, found))
