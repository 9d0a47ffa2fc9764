"""Heat maps of single cells, side by side: which cells, and how a map and its scale are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Collected, Figure, Look, names_of

MOST = 12
"""Cells that are drawn where none is asked for by name."""
MISSING = "#e8e2da"


def titles_of(data: SweepData, cells: Iterable[str]) -> dict[str, list[str]]:
    """By cell: its mixer, then its other levels where they vary, in words."""
    names = names_of(data, without=("attn_type",))
    mixers = {cell.cell_id: drawing.shown(cell.levels["attn_type"]) for cell in data.cells}
    return {cell: [mixers[cell], *filter(None, names[cell].split(", "))] for cell in cells}


def title(made: Collected, look: Look, cell: str, *, memory: bool = False) -> str:
    """What stands above a cell's map; without its seed where a seed was not asked for. `memory`: the map is of its memory."""
    mixer, *words = made.about["titles"][cell]
    kept = [word for word in words if cell in look.highlight or not word.startswith("seed ")]
    if memory:
        return ", ".join([f"memory beside {mixer}", *(word for word in kept if word != drawing.shown("on", "memory"))])
    return ", ".join([mixer, *kept])


def first_of_each(data: SweepData, measured: Iterable[str]) -> list[str]:
    """Of each configuration the first measured cell, in the grid's order."""
    known = set(measured)
    of_each = ([cell.cell_id for cell in cells if cell.cell_id in known] for cells in data.configurations().values())
    return [cells[0] for cells in of_each if cells]


def told(data: SweepData, measured: Iterable[str]) -> list[str]:
    """The notes on which cells are drawn."""
    cells = dict.fromkeys(measured)
    first = first_of_each(data, cells)
    found = []
    if len(cells) > len(first):
        found.append("Of each configuration the first seed.")
    if len(first) > MOST:
        found.append(f"The first {MOST} of {len(first)}; --highlight CELL shows others.")
    return found


def chosen(made: Collected, look: Look) -> list[str]:
    """The cells to draw: those that are to stand out, else the first of each configuration."""
    known = list(dict.fromkeys(made.frame["cell"]))
    asked = [cell for cell in known if cell in look.highlight]
    return asked or list(made.about["first"])[:MOST]


def sheet(titles: Sequence[str], each: float, more: float) -> tuple[Figure, list[Axes]]:
    """A figure with axes for these titles, `each` inches high in the style `paper`, with `more` inches below."""
    narrow = drawing.page(1.0, drawing.width_of(len(titles))).get_size_inches()[0] < drawing.NARROW
    columns = 2 if narrow or len(titles) == 4 else 3
    figure = drawing.page(each * drawing.rows_of(len(titles), columns) + more, drawing.width_of(len(titles)))
    return figure, drawing.panels(figure, titles, columns=columns)


def heat(axes: Axes, table: np.ndarray, norm: Any, *, colours: Any = drawing.MAP, bad: str = MISSING) -> Any:
    """Draws the table, row 0 on top; NaN has the colour `bad`. The axes keep neither grid nor ticks."""
    import matplotlib

    image = axes.imshow(
        np.ma.masked_invalid(table), cmap=matplotlib.colormaps.get_cmap(colours).with_extremes(bad=bad), norm=norm,
        aspect="auto", interpolation="nearest",
    )  # fmt: skip
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=drawing.size("small"))
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    return image


def scale(
    figure: Figure,
    group: Sequence[Axes],
    image: Any,
    label: str,
    ticks: Sequence[float],
    words: Sequence[str],
    mark: float | None = None,
) -> None:
    """The bar of colours below all maps, with a dotted line at `mark`."""
    bar = figure.colorbar(image, ax=list(group), location="bottom", aspect=40, shrink=0.7, pad=0.02, ticks=list(ticks))
    bar.ax.set_xticks(list(ticks), list(words))
    bar.ax.minorticks_off()
    bar.ax.grid(visible=False)
    bar.outline.set_visible(False)
    bar.set_label(label)
    if mark is not None:
        bar.ax.axvline(mark, color="#ffffff", linewidth=drawing.stroke(2.0))
        bar.ax.axvline(mark, color="#000000", linewidth=drawing.stroke(1.0), linestyle=(0, (1, 1.2)))

    drawing.place_bar(figure, bar)


def written(axes: Axes, table: np.ndarray, words: Sequence[Sequence[str]], norm: Any) -> None:
    """Writes the words into the squares of a map, light on dark and dark on light."""
    for row, column in np.ndindex(*table.shape):
        if np.isfinite(table[row, column]):
            dark = float(norm(table[row, column])) < 0.55
            axes.text(
                column, row, words[row][column], ha="center", va="center", fontsize=drawing.size("small"),
                color="#ffffff" if dark else "#000000",
            )  # fmt: skip
