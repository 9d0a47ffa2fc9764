"""Figure `evictable-keys`: share of cached keys that could be evicted, by length of the text, layer and threshold."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ....results.store.store import Store
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected, frame_origins
from ..probes.heat_maps import cells_to_draw, first_cell_of_each, map_title, title_parts
from ..probes.item_frames import item_detail_rows

PROBE = "gate_dynamics"
COLUMNS = ["cell", "attempt", "layer", "length", "threshold", "value"]
MAX_DRAWN = 3
"""Largest number of cells that are drawn, with a panel per threshold each."""
MAX_KEYED_LAYERS = 6
"""Largest number of layers in the legend; of more, evenly spaced ones are named."""
MEAN_COLOUR = "#222222"


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the share of keys of which less than a threshold is left in every channel of their head.

    One row per cell, layer, length and threshold: cell, attempt, layer, length (position of the query, in tokens),
    threshold and value, the share of the keys up to there, a fraction; mean over rows and heads with gates.

    Raises:
        ReportError: No cell has counted evictable keys.
    """
    details = item_detail_rows(store, data, (PROBE, "evictable", 0))
    rows = [row | {"layer": row["item"]} for row in details if {"length", "threshold"} <= set(row)]
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has counted evictable keys; evaluate with --probe {PROBE}")
    frame = pd.DataFrame(rows)[COLUMNS].astype({"length": int, "threshold": float, "value": float})
    measured = list(dict.fromkeys(frame["cell"]))
    first = first_cell_of_each(data, measured)
    notes = [
        "A key could be evicted if gates have left less than the threshold of it in every channel of its head: later "
        "queries have even less. Share of the keys before a query at this length; mean over heads with gates and rows "
        "of the training length. Gated mixers only; the first seed of each configuration."
    ]
    if len(first) > MAX_DRAWN:
        notes.append(f"The first {MAX_DRAWN} of {len(first)} configurations; --highlight CELL shows others.")
    return collected(
        store, data, "evictable-keys", "Evictable keys by length of the text", frame, frame_origins(frame), notes=notes,
        first=first, titles=title_parts(data, measured),
    )  # fmt: skip


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a row of panels per cell, one per threshold: a line per layer over lengths, and their mean in black.

    Highlighted cells of `look` are drawn instead of the first of each configuration, at most three.
    """
    cells = cells_to_draw(figure_data, look)[:MAX_DRAWN]
    frame = figure_data.frame[figure_data.frame["cell"].isin(cells)]
    thresholds, layers = sorted(set(frame["threshold"]), reverse=True), sorted(set(frame["layer"]))
    colours = _layer_colours(layers)
    titles = [
        f"{map_title(figure_data, look, cell)}\nless than {100 * at:g} % left" for cell in cells for at in thresholds
    ]
    figure = drawing.page(drawing.PANEL_HEIGHT * len(cells) + 0.35, drawing.width_of(len(thresholds)))
    group = drawing.panels(figure, titles, columns=len(thresholds))
    panels = [(cell, threshold) for cell in cells for threshold in thresholds]
    for axes, (cell, threshold) in zip(group, panels, strict=True):
        rows = frame[(frame["cell"] == cell) & (frame["threshold"] == threshold)]
        _draw_layers(axes, rows, colours)
        drawing.length_axis(axes, sorted(set(frame["length"])))
        axes.set_ylim(-3, 103)
    drawing.outer_labels(figure, "length of the text (tokens)", "keys that could be evicted, %")
    shown = [layers[index] for index in drawing.thin_evenly(range(len(layers)), MAX_KEYED_LAYERS)]
    keys = {
        f"layer {layer}": drawing.key(
            color=colours[layer], linewidth=drawing.line_width(1.2), marker="o", markersize=2.5
        )
        for layer in shown
    }
    keys["mean of layers"] = drawing.key(color=MEAN_COLOUR, linewidth=drawing.line_width(2.0))
    return drawing.finished(figure, figure_data.title, figure_data.notes, keys)


def _draw_layers(axes: Axes, rows: pd.DataFrame, colours: dict[int, str]) -> None:
    """Draw one cell's shares at one threshold, in %: a line per layer, and below them the mean over layers."""
    mean = 100 * rows.groupby("length")["value"].mean()
    axes.plot(mean.index, mean, color=MEAN_COLOUR, linewidth=drawing.line_width(2.0), zorder=1.5)
    for layer, line in rows.groupby("layer"):
        ordered = line.sort_values("length")
        axes.plot(
            ordered["length"], 100 * ordered["value"], color=colours[int(str(layer))], marker="o", markersize=2.5,
            linewidth=drawing.line_width(1.0),
        )  # fmt: skip


def _layer_colours(layers: Sequence[int]) -> dict[int, str]:
    """Return a colour per layer, from blue for the first to orange for the last."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    # the light end of the scale is hard to see on white
    return {layer: to_hex(colormaps["plasma"](0.8 * at / max(1, len(layers) - 1))) for at, layer in enumerate(layers)}
