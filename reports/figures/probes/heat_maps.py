"""Heat maps of single cells, side by side: selection of the cells, titles, maps and their colour bar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, cell_labels

TITLE_LINES, LINE_HEIGHT, LABELS = 2, 0.25, 0.1
"""Lines of a title that the height of a map has space for, and inches that each further one and the labels take."""
MAX_CELLS = 12
"""Largest number of cells that are drawn unless some are highlighted."""


def title_parts(data: SweepData, cells: Iterable[str]) -> dict[str, list[str]]:
    """Return, by cell id, the list of a cell's labels: mixer, other levels that vary, and seed if seeds vary."""
    names = cell_labels(data, without=("attn_type",))
    mixers = {cell.cell_id: drawing.level_label(cell.levels["attn_type"]) for cell in data.cells}
    return {cell: [mixers[cell], *filter(None, names[cell].split(", "))] for cell in cells}


def map_title(figure_data: FigureData, look: FigureOptions, cell: str) -> str:
    """Return the title of a cell's map: mixer and other levels; the seed is left out unless the cell is highlighted.

    Args:
        figure_data: The figure, whose draw option `titles` has the `title_parts`.
        look: Figure options.
        cell: Id of the cell.
    """
    mixer, *levels = figure_data.draw_options["titles"][cell]
    shown_levels = [word for word in levels if cell in look.highlight or not word.startswith("seed ")]
    return ", ".join([mixer, *shown_levels])


def first_cell_of_each(data: SweepData, measured: Iterable[str]) -> list[str]:
    """Return the id of the first measured cell of each configuration, in the grid's order; others have none."""
    measured_cells = set(measured)
    of_each = (
        [cell.cell_id for cell in cells if cell.cell_id in measured_cells] for cells in data.configurations().values()
    )
    return [cells[0] for cells in of_each if cells]


def selection_notes(data: SweepData, measured: Iterable[str]) -> list[str]:
    """Return up to two notes on which of the measured cells are drawn; [] if all are."""
    cells = dict.fromkeys(measured)
    first = first_cell_of_each(data, cells)
    notes = []
    if len(cells) > len(first):
        notes.append("First seed of each configuration, since heads of different seeds do not correspond.")
    if len(first) > MAX_CELLS:
        notes.append(f"The first {MAX_CELLS} of {len(first)} configurations.")
    return notes


def cells_to_draw(figure_data: FigureData, look: FigureOptions) -> list[str]:
    """Return the ids of the cells to draw: the highlighted ones, else the first of each configuration.

    Highlighted cells without rows in the frame do not count. Of the others there are at most 12.
    """
    cells = list(dict.fromkeys(figure_data.frame["cell"]))
    highlighted = [cell for cell in cells if cell in look.highlight]
    return highlighted or list(figure_data.draw_options["first"])[:MAX_CELLS]


def map_grid(titles: Sequence[str], each: float, more: float, *, square: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure and the list of its axes, one pair per title.

    A row has three, or two on a narrow page and for four titles; square maps stand side by side up to four.

    Args:
        titles: Titles of the maps.
        each: Height of a map in inches in the style `paper`.
        more: Additional height in inches below the maps.
        square: Whether maps are as high as they are wide, so that wide pages hold more of them in a row.
    """
    width = drawing.page(1.0, drawing.width_of(len(titles))).get_size_inches()[0]
    columns = 2 if width < drawing.NARROW_WIDTH or (len(titles) == 4 and not square) else 4 if square else 3
    if square:
        lines = max(title.count("\n") for title in titles) + 1
        # beside the labels of its rows a map is narrower than its column
        each = min(each, width / min(columns, len(titles)) / drawing.current_options().scale - LABELS)
        each += LINE_HEIGHT * max(0, lines - TITLE_LINES)
    figure = drawing.page(each * drawing.rows_of(len(titles), columns) + more, drawing.width_of(len(titles)))
    return figure, drawing.panels(figure, titles, columns=columns)


def label_maps(group: Sequence[Axes], horizontal: str, vertical: str) -> None:
    """Label the maps of the first column at the left, and the lowest map of every column below."""
    cells = {axes.get_subplotspec(): axes for axes in group}
    lowest = {spec.colspan.start: axes for spec, axes in cells.items()}  # type: ignore[union-attr]
    for axes in lowest.values():
        axes.set_xlabel(horizontal)
    for spec, axes in cells.items():
        if spec.colspan.start == 0:  # type: ignore[union-attr]
            axes.set_ylabel(vertical)


def draw_heat_map(axes: Axes, table: np.ndarray, norm: Any, **more: Any) -> Any:
    """Draw a table as a heat map, row 0 on top, with small labels and without ticks, and return the image.

    Args:
        axes: The axes.
        table: Array [rows, columns]; NaN for missing numbers.
        norm: Matplotlib normalization of the numbers.
        more: Further arguments of `drawing.heat`.
    """
    image = drawing.heat(axes, table, norm, **more)
    axes.tick_params(labelsize=drawing.size("small"))
    axes.set(xticks=[], yticks=[])
    return image


def add_colour_bar(
    figure: Figure, image: Any, label: str, ticks: Mapping[float, str], mark: float | None = None, *, pad: float = 0.02
) -> None:
    """Add the colour bar below all maps, with a dotted line at `mark`.

    Args:
        figure: The figure.
        image: Image of any map; all must share its normalization.
        label: Label of the bar.
        ticks: Tick labels by value.
        mark: Value to mark; None: none.
        pad: Space above the bar, as a share of the height of the maps.
    """
    layout: dict[str, Any] = {"location": "bottom", "aspect": 40, "shrink": 0.7, "pad": pad, "ticks": list(ticks)}
    group = [axes for axes in figure.axes if axes.axison]
    bar = drawing.colour_bar(figure, group, image, label, **layout)
    bar.ax.set_xticks(list(ticks), list(ticks.values()))
    bar.ax.minorticks_off()
    if mark is not None:
        bar.ax.axvline(mark, color="#ffffff", linewidth=drawing.line_width(2.0))
        bar.ax.axvline(mark, color="#000000", linewidth=drawing.line_width(1.0), linestyle=(0, (1, 1.2)))


def write_values(
    axes: Axes, table: np.ndarray, texts: Sequence[Sequence[str]], norm: Any, *, fitting: bool = False,
    bright: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Write a text into each square of a map that has a number, white on dark squares and black on bright ones.

    Args:
        axes: Axes with the map.
        table: Numbers [rows, columns]; squares with NaN stay empty.
        texts: Text of each square, [rows][columns].
        norm: Normalization of the numbers; below 0.47 a square counts as dark.
        fitting: Write nothing if a text would be larger than its square; the layout must be final.
        bright: Squares that are bright whatever their number [rows, columns]; None: none.
    """
    written = []
    for row, column in np.ndindex(*table.shape):
        if np.isfinite(table[row, column]):
            dark = float(norm(table[row, column])) < 0.47 and not (bright is not None and bright[row, column])
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": drawing.size("small")}
            written.append(axes.text(column, row, texts[row][column], color="#ffffff" if dark else "#000000", **style))
    panel = axes.get_window_extent()
    boxes = [text.get_window_extent() for text in written] if fitting else []
    if any(
        box.width > 0.95 * panel.width / table.shape[1] or box.height > panel.height / table.shape[0] for box in boxes
    ):
        for text in written:
            text.remove()
