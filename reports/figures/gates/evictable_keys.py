"""Figure `evictable-keys`: share of keys of which gates leave less than a threshold, by length of the text and layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from ....results.console.text import counted
from ....results.store.store import Store
from ...number_format import format_length
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected, frame_origins
from ..canvas.labels import label_ends
from ..probes.heat_maps import cells_to_draw, first_cell_of_each, map_title, title_parts
from ..probes.item_frames import item_detail_rows, item_values_frame

PROBE = "gate_dynamics"
COLUMNS = ["cell", "attempt", "layer", "length", "threshold", "value"]
MAX_DRAWN = 3
"""Largest number of cells that are drawn, with a panel each."""
MAX_NAMED_LAYERS = 6
"""Largest number of layers that are named; of more, evenly spaced ones are."""
OF_LAYERS = 1e-3
"""Threshold of the lines of single layers, that of the metric `evictable`."""
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)))
"""Dashes of the means by threshold, that of the layers first."""
MEAN_COLOUR = "#222222"
LAYER_WIDTH, MEAN_WIDTH = 1.6, 0.9
"""Widths in points of the style `paper`: layers differ so much that their mean is no typical one."""
ROUNDING = 1e-9
"""Rise of a share towards a stricter threshold that counts as rounding."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the share of keys of which less than a threshold is left in every channel of their head.

    One row per cell, layer, length and threshold: cell, attempt, layer, length (position of the query, in tokens),
    threshold and value, the share of the keys up to there, a fraction; mean over texts and heads with gates.

    Raises:
        ReportError: No cell has counted evictable keys, or a share rises as the threshold gets stricter.
    """
    details = item_detail_rows(store, data, (PROBE, "evictable", 0))
    rows = [row | {"layer": row["item"]} for row in details if {"length", "threshold"} <= set(row)]
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has counted evictable keys; evaluate with --probe {PROBE}")
    frame = pd.DataFrame(rows)[COLUMNS].astype({"length": int, "threshold": float, "value": float})
    _require_nested(frame)
    measured = list(dict.fromkeys(frame["cell"]))
    first = first_cell_of_each(data, measured)
    notes = [
        "Share of the keys before a query at this length of which the gates of the mixer have left less than a threshold in "
        "every channel of their head. That a network can do without them was not tested: a high score can outweigh its "
        f"gate. Coloured: layers, at less than {100 * _of_layers(frame):g} % left; black: means over layers, a threshold each. A point "
        f"is a mean over {_sample_text(store, data, frame, first)}, whose spread is not stored; first seed of each configuration."
    ]
    if len(first) > MAX_DRAWN:
        notes.append(f"The first {MAX_DRAWN} of {len(first)} configurations.")
    return collected(
        store, data, "evictable-keys", "Keys of which gates leave less than a threshold", frame, frame_origins(frame), notes=notes,
        first=first, titles=title_parts(data, measured),
    )  # fmt: skip


def _require_nested(frame: pd.DataFrame) -> None:
    """Raise unless shares fall, or stay, as the threshold gets stricter: keys below a stricter one are below the others.

    Raises:
        ReportError: A share rises.
    """
    shares = frame.pivot_table(index=["cell", "layer", "length"], columns="threshold", values="value").sort_index(
        axis=1
    )
    steps = shares.diff(axis=1)
    if (wrong := steps[(steps < -ROUNDING).any(axis=1)]).empty:
        return
    cell, layer, length = wrong.index[0]
    raise ReportError(
        f"cell {cell} has fewer evictable keys at a looser threshold (layer {layer}, length {length}), which is impossible; "
        f"evaluate it again with --probe {PROBE}"
    )


def _of_layers(frame: pd.DataFrame) -> float:
    """Return the threshold of the lines of single layers: that of the metric, or the loosest that was measured."""
    thresholds = set(frame["threshold"])
    return OF_LAYERS if OF_LAYERS in thresholds else max(thresholds)


def _sample_text(store: Store, data: SweepData, frame: pd.DataFrame, first: Sequence[str]) -> str:
    """Return the numbers of heads and texts behind a point of the drawn cells as words, as far as they are stored."""
    gates = item_values_frame(store, data, (PROBE, "mean", 0))
    heads, texts = set(), set()
    for cell in first[:MAX_DRAWN]:
        own = gates[gates["cell"] == cell]
        channels = data.values.get((cell, PROBE, "channels", 0))
        if len(own) and channels is not None and channels.value:
            heads.add(int(own["position"].max() + 1) // int(channels.value))
        value, longest = data.values[cell, PROBE, "evictable", 0], int(frame[frame["cell"] == cell]["length"].max())
        texts.add((value.n or 0) // longest)
    head_text = f"{heads.pop()} heads" if len(heads) == 1 else "heads"
    count = next(iter(texts)) if len(texts) == 1 else 0
    text_text = counted(count, "text") if count else "texts"
    row_length = format_length(int(frame["length"].max()))
    return f"the {head_text} of a layer and {text_text} of {row_length} tokens, the length of training"


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per cell over lengths: the mean of layers at every threshold, and a thin line per layer at one.

    Highlighted cells of `look` are drawn instead of the first of each configuration, at most three.
    """
    cells = cells_to_draw(figure_data, look)[:MAX_DRAWN]
    frame = figure_data.frame[figure_data.frame["cell"].isin(cells)]
    of_layers, layers = _of_layers(frame), sorted(set(frame["layer"]))
    further = [threshold for threshold in sorted(set(frame["threshold"]), reverse=True) if threshold != of_layers]
    dashes = dict(zip([of_layers, *further], DASHES, strict=False))
    colours = _layer_colours(layers)
    figure = drawing.page(drawing.PANEL_HEIGHT + 0.75, drawing.width_of(len(cells), 3.6))
    columns = drawing.columns_of(figure, len(cells))
    if columns < len(cells):
        figure.set_figheight(figure.get_figheight() * drawing.rows_of(len(cells), columns) * 0.8)
    group = drawing.panels(figure, [map_title(figure_data, look, cell) for cell in cells], columns=columns)
    for axes, cell in zip(group, cells, strict=True):
        rows = frame[frame["cell"] == cell]
        _draw_lines(axes, rows, colours, of_layers, dashes)
        drawing.length_axis(axes, sorted(set(frame["length"])))
        axes.set_ylim(-3, 103)
    drawing.outer_labels(figure, "length of the text (tokens)", "keys with less than a threshold left, %")
    shown = [layers[index] for index in drawing.thin_evenly(range(len(layers)), MAX_NAMED_LAYERS)]
    for axes, cell in zip(group, cells, strict=True):
        _label_layers(axes, frame[(frame["cell"] == cell) & (frame["threshold"] == of_layers)], shown)
    keys = {
        f"mean of layers, < {100 * threshold:g} % left": drawing.key(
            color=MEAN_COLOUR, linewidth=drawing.line_width(MEAN_WIDTH), linestyle=dashes[threshold]
        )
        for threshold in sorted(dashes, reverse=True)
    }
    middle = colours[layers[len(layers) // 2]]
    keys[f"a layer, < {100 * of_layers:g} % left"] = drawing.key(
        color=middle, linewidth=drawing.line_width(LAYER_WIDTH), **_mark(middle)
    )
    return drawing.finished(figure, figure_data.title, figure_data.notes, keys)


def _mark(colour: str) -> dict[str, Any]:
    """Return the style of the marks of measured lengths."""
    return {"marker": "o", "markersize": drawing.line_width(3.2), "markerfacecolor": colour, "markeredgewidth": 0}


def _label_layers(axes: Axes, rows: pd.DataFrame, layers: Sequence[int]) -> None:
    """Write the number of each of these layers at the right end of its line; the axes must have their limits."""
    last = rows[rows["length"] == rows["length"].max()].set_index("layer")["value"]
    label_ends(axes, [(f"layer {layer}", 100 * float(last[layer]), drawing.INK) for layer in layers if layer in last])


def _draw_lines(
    axes: Axes, rows: pd.DataFrame, colours: dict[int, str], of_layers: float, dashes: dict[float, Any]
) -> None:
    """Draw one cell's shares in %: a line per layer at the threshold `of_layers`, and the mean at each, in its dashes."""
    for layer, line in rows[rows["threshold"] == of_layers].groupby("layer"):
        ordered = line.sort_values("length")
        ink = colours[int(str(layer))]
        look: dict[str, Any] = {"color": ink, "linewidth": drawing.line_width(LAYER_WIDTH), "zorder": 3} | _mark(ink)
        axes.plot(ordered["length"], 100 * ordered["value"], **look)
    for threshold, dash in dashes.items():
        mean = 100 * rows[rows["threshold"] == threshold].groupby("length")["value"].mean()
        axes.plot(mean.index, mean, color=MEAN_COLOUR, linestyle=dash, linewidth=drawing.line_width(MEAN_WIDTH))


def _layer_colours(layers: Sequence[int]) -> dict[int, str]:
    """Return a colour per layer, from blue for the first to orange for the last."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    # the light end of the scale is hard to see on white
    return {layer: to_hex(colormaps["plasma"](0.8 * at / max(1, len(layers) - 1))) for at, layer in enumerate(layers)}
