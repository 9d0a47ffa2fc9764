"""Panels of lines by mixer: few lines share one panel, more get a panel per mixer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ...render.style import LONG_NAMES
from ...sweep_data import CellState, SweepData, cell_level
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, axes_of_lines, line_groups
from ..canvas.length_frames import is_barred
from ..canvas.line_drawing import LineStyles, draw_lines_with_means, legend, line_styles, named_cells, training_key

MAX_LINES_IN_SINGLE_PANEL = 8
"""Largest number of lines that share one panel."""
RANDOMIZED = LONG_NAMES["Label"]
"""Label of randomized positions, whose level name says little."""
FormatPanel = Callable[["Axes", pd.DataFrame, bool], None]
"""Function (axes, rows, last) that sets the scales and marks of the panel in which these rows are drawn."""


def assign_panels(data: SweepData, frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the rows with the columns panel, first, second and line, and the axes of `first` and `second`.

    At most eight lines that fewer than two axes (besides the mixer) distinguish share one panel with an empty name; the
    mixer is then `first` and the first of the axes. Otherwise each mixer has a panel.

    Args:
        data: The sweep.
        frame: Rows with the column cell.

    Returns:
        (rows, axes), of which there may be fewer than two.
    """
    # axes that vary among other cells only, such as the tasks of another probe, distinguish no line here
    drawn_cells = set(frame["cell"])
    drawn_data = replace(data, cells=tuple(cell for cell in data.cells if cell.cell_id in drawn_cells))
    groups, axes = line_groups(drawn_data), axes_of_lines(drawn_data)
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


def row_labels(data: SweepData, drawn: set[str]) -> dict[str, str]:
    """Return the label of each drawn cell's configuration by cell id: the mixer, and levels of axes that vary.

    NoPE with a table of positions is labelled by the table alone. Axes that do not vary among the drawn cells and levels that are off ("off", "none" or "-") are left out.

    Args:
        data: The sweep.
        drawn: Ids of the drawn cells.
    """
    cells = [cell for cell in data.cells if cell.cell_id in drawn]
    row_axes = [axis for axis in ("reg_mode", "distractor", "memory", "window", *data.extra_axes())
              if len({cell_level(cell, axis) for cell in cells}) > 1]  # fmt: skip
    labels = {}
    for cell in cells:
        levels = [(axis, cell_level(cell, axis)) for axis in row_axes]
        texts = [drawing.level_label(level, axis) for axis, level in levels if level not in ("off", "none", "-")]
        labels[cell.cell_id] = ", ".join([drawing.level_label(cell.levels["attn_type"]), *texts])
        if scheme := position_table(cell):
            texts = [text for text in texts if text != drawing.level_label(scheme, "model.positions")]
            name = drawing.level_label(scheme, "model.positions")
            labels[cell.cell_id] = ", ".join([RANDOMIZED if scheme == "label" else name, *texts])
    return labels


def position_table(cell: CellState) -> str:
    """Return the level of `model.positions` of a cell whose mixer has no positions itself, "" without a table."""
    positions = cell_level(cell, "model.positions")
    return positions if cell.levels["attn_type"] == "nope" and positions in ("ape", "label") else ""


def out_of_range_note(frame: pd.DataFrame, high: float) -> list[str]:
    """Return the note on cells whose line exceeds `high`, as a list; empty if no line does.

    Args:
        frame: Rows with the columns cell and value.
        high: Upper end of the axes, in the unit of `value`.
    """
    count = int((frame.groupby("cell")["value"].max() > high).sum())
    return [f"Lines that leave the axes ({count}): arrows give their highest values."] if count else []


def draw_panels(
    figure_data: FigureData, look: FigureOptions, frame: pd.DataFrame, means: pd.DataFrame, format_panel: FormatPanel, labels: tuple[str, str], *,
    scale: float = 1, trained: int | None = None, keys: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> Figure:  # fmt: skip
    """Draw a panel per value of `panel`: cells thin, means of lines thick, highlighted cells labelled.

    Panels share both axes. The returned figure is finished with title, notes and legend.

    Args:
        figure_data: The figure, whose draw options have `axes` and `names` (label by cell).
        look: Figure options.
        frame: Rows with panel, first, second, line, cell, length and value.
        means: Rows of `line_means`, with panel, line, length, value, cells, of, low and high.
        format_panel: Sets scales and marks of a panel, after its lines are drawn.
        labels: Labels below and at the left.
        scale: Factor from values to units of the y axis.
        trained: Training length in tokens, for the legend; None: no panel marks it.
        keys: Further (label, properties of a line) entries of the legend.
    """
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
    for axes, name in zip(group, names, strict=True):
        panel_rows, mean = (rows[rows["panel"] == name] for rows in (frame, means))
        draw_lines_with_means(axes, panel_rows, mean, styles, scale, highlighted=highlighted, barred=is_barred(means))
        format_panel(axes, panel_rows, name == names[-1])
    drawing.outer_labels(figure, *labels)
    handles = _with_sole_panels(legend(styles, *training_key(trained), *keys, means=means), styles, means, names)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles)


def _with_sole_panels(
    handles: Mapping[str, Any], styles: LineStyles, means: pd.DataFrame, panels: Sequence[str]
) -> dict[str, Any]:
    """Return the legend handles, with the letter of its panel behind the label of a line that only one panel has.

    Args:
        handles: Legend handles by label.
        styles: Style by line.
        means: Rows of `line_means`.
        panels: Names of the panels in the order of their letters.
    """
    suffixes: dict[str, str] = {}
    for name, line_style in styles.items():
        drawn = list(dict.fromkeys(means[means["line"] == name]["panel"]))
        if len(drawn) == 1 < len(panels) and drawing.current_options().preset.panel_letter_format:
            suffixes[line_style.label] = f" ({drawing.LETTERS[panels.index(drawn[0])]} only)"
    # where all lines have a panel of their own, the panels say so
    if len(suffixes) == len(styles):
        return dict(handles)
    return {label + suffixes.get(label, ""): handle for label, handle in handles.items()}
