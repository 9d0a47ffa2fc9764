"""Figure `gate-dynamics`: retention of gates over positions, over channels, and what is left token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected, frame_origins
from ..canvas.distance_scale import distance_scale
from ..canvas.length_frames import in_grid_order
from ..canvas.scales import Scale
from .heat_maps import cells_to_draw, first_cell_of_each, map_title, title_parts
from .item_frames import item_detail_rows, item_values_frame

PROBE = "gate_dynamics"
MAX_DRAWN = 3
"""Largest number of cells that are drawn, with three panels each."""
TITLE_LINE = 0.35
"""Inches that the titles of a row take more where each panel has the name of its cell."""
MAX_KEYED_LAYERS = 6
"""Largest number of layers in the legend; of more, evenly spaced ones are."""
THICK, MEAN, THIN = 1.8, 1.1, 0.6
"""Widths, in points of the style `paper`, of the most variable gate of a layer, a mean, and the least variable gate."""
REMAINDER = "share left"
KINDS = {
    "means of layers": ("position (tokens)", "mean retention"),
    "gates": ("mean retention", "standard deviation"),
    REMAINDER: ("token of one text", "share left of\nthe first token"),
}
"""Labels of the x and y axis by the title of a row of panels."""
MARK_AREA, FEW_GATES = 7.0, 64
"""Area in points² of the mark of a gate, and the number of gates up to which it is twice as large."""
LOWEST = 1e-4
"""Lowest cumulative product that is drawn."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the retention per token of the gates of mixers, in three parts.

    One row per number: cell, attempt, part, layer, series, x and value. Of part `position`, `value` is the mean
    retention of a layer around the position `x` (in tokens); of `channel`, `x` is the mean and `value` the standard
    deviation of one gate over tokens, `series` the gate's index; of `trace`, `value` is the retention of one gate at the
    token `x` of the first row. Retention is a fraction.

    Raises:
        ReportError: No cell has measured the dynamics of its gates.
    """
    frame = _frame(store, data)
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has measured gate dynamics; evaluate with --probe {PROBE}")
    measured = list(dict.fromkeys(frame["cell"]))
    first = first_cell_of_each(data, measured)
    notes = [
        "Retention: share of the earlier state that a gate of the mixer keeps at a token; axes are logarithmic in "
        f"1 − retention, with 1 at their end. A point of a line: mean over the gates of a layer and {_bin_text(data, first)}; of the middle "
        f"row: mean and standard deviation over tokens of a gate ({_sample_text(store, data, frame, first)}). Share left: "
        "product of the retention at the tokens after the first, for the gates that vary most and least in the first, "
        f"middle and last layer, the only ones stored; drawn down to {LOWEST:g}. First seed of each configuration, a single run: no "
        "interval is shown."
    ]
    if len(first) > MAX_DRAWN:
        notes.append(f"The first {MAX_DRAWN} of {len(first)} configurations.")
    return collected(
        store, data, "gate-dynamics", "Retention of gates by position, channel and token", frame, frame_origins(frame),
        notes=notes, first=first, titles=title_parts(data, measured),
    )  # fmt: skip


def _sample_text(store: Store, data: SweepData, frame: pd.DataFrame, first: Sequence[str]) -> str:
    """Return "16 gates, 8,192 tokens" of the drawn cells, "16 to 32" where they differ."""
    drawn = list(first)[:MAX_DRAWN]
    gates = [int(((frame["cell"] == cell) & (frame["part"] == "channel")).sum()) for cell in drawn]
    tokens = [data.values[cell, PROBE, "mean", 0].n or 0 for cell in drawn]
    counts = (" to ".join(f"{number:,}" for number in sorted({min(each), max(each)})) for each in (gates, tokens))
    return "{} gates, {} tokens".format(*counts)


def _bin_text(data: SweepData, first: Sequence[str]) -> str:
    """Return the positions that a point of a curve averages as text, such as "16 positions"."""
    values = [data.values.get((cell, PROBE, "bin", 0)) for cell in first[:MAX_DRAWN]]
    sizes = [int(value.value) for value in values if value is not None and value.value]
    ends = sorted({min(sizes), max(sizes)}) if len(sizes) == len(values) and sizes else []
    return f"{' to '.join(map(str, ends))} positions" if ends else "neighbouring positions"


def _frame(store: Store, data: SweepData) -> pd.DataFrame:
    """Return the rows of `collect`, in the grid's order of cells; empty if nothing is stored."""
    columns = ["cell", "attempt", "part", "layer", "series", "x", "value"]
    curve, mean, spread = (item_values_frame(store, data, (PROBE, name, 0)) for name in ("bin", "mean", "spread"))
    if mean.empty:
        return pd.DataFrame(columns=columns)
    sizes = {
        cell: value.value or 1.0 for cell in set(curve["cell"]) if (value := data.values.get((cell, PROBE, "bin", 0)))
    }
    middle = (curve["position"] + 0.5) * curve["cell"].map(sizes)
    parts = [curve.assign(part="position", layer=curve["item"], series=0, x=middle)]
    keys = ["cell", "attempt", "item", "position"]
    channels = mean.rename(columns={"value": "x"}).merge(spread, on=keys)
    parts.append(channels.assign(part="channel", layer=channels["item"], series=channels["position"]))
    traces = pd.DataFrame(item_detail_rows(store, data, (PROBE, "trace", 0)))
    if not traces.empty:
        channel_counts = {cell: _channels(data, cell) for cell in set(traces["cell"])}
        series = traces["head"] * traces["cell"].map(channel_counts) + traces["channel"]
        parts.append(traces.assign(part="trace", layer=traces["item"], series=series, x=traces["token"]))
    frame = pd.concat([part[columns] for part in parts], ignore_index=True).astype({"x": float, "value": float})
    return in_grid_order(frame, data)


def _channels(data: SweepData, cell: str) -> int:
    channels = data.values.get((cell, PROBE, "channels", 0))
    return int(channels.value) if channels is not None and channels.value else 1


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a column of three panels per cell: retention over positions, per gate, and its product over the tokens of a text.

    A layer has one colour in all panels. Highlighted cells of `look` are drawn instead of the first of each
    configuration, at most three. In a narrow figure the panels of three cells stand in two columns.
    """
    cells = cells_to_draw(figure_data, look)[:MAX_DRAWN]
    frame = figure_data.frame[figure_data.frame["cell"].isin(cells)]
    layers = sorted(set(frame["layer"]))
    inks = _layer_inks(layers)
    limits = dict(iter(frame.groupby("part")))
    names = [map_title(figure_data, look, cell) for cell in cells]
    figure = drawing.page(1.7 * len(KINDS) + 0.1, drawing.width_of(2, 3.2))
    is_stacked = len(cells) > 2 and figure.get_figwidth() < drawing.NARROW_WIDTH  # no space for three columns
    if is_stacked:
        rows = drawing.rows_of(len(cells) * len(KINDS), 2)
        figure.set_figheight(figure.get_figheight() * rows / len(KINDS) + TITLE_LINE * rows * look.scale)
        titles = [f"{name}\n{title}" for name in names for title in _row_titles(limits)]
        grid = drawing.panels(figure, titles, columns=2)
        by_cell = [grid[start : start + len(KINDS)] for start in range(0, len(grid), len(KINDS))]
    else:
        # the name of a column stands above it alone
        titles = [
            f"{name}\n{title}" if row == 0 else title for row, title in enumerate(_row_titles(limits)) for name in names
        ]
        grid = drawing.panels(figure, titles, columns=len(cells))
        by_cell = [grid[index :: len(cells)] for index in range(len(cells))]
    for index, cell in enumerate(cells):
        _draw_cell(by_cell[index], frame[frame["cell"] == cell], limits, inks)
        for axes, (x_label, y_label) in zip(by_cell[index], KINDS.values(), strict=True):
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label if index == 0 or is_stacked else "")
    shown = [layers[index] for index in drawing.thin_evenly(range(len(layers)), MAX_KEYED_LAYERS)]
    keys = {f"layer {layer}": drawing.key(color=inks[layer], linewidth=drawing.line_width(MEAN)) for layer in shown}
    if "trace" in limits:
        for label, width in (("share left: most variable gate", THICK), ("share left: least variable gate", THIN)):
            keys[label] = drawing.key(color=drawing.GREY, linewidth=drawing.line_width(width))
    return drawing.finished(figure, figure_data.title, figure_data.notes, keys)


def _row_titles(limits: dict[Any, pd.DataFrame]) -> list[str]:
    """Return the titles of the rows of panels, the last one with the layers whose gates are stored token by token."""
    traced = sorted(set(limits["trace"]["layer"])) if "trace" in limits else []
    named = "layers\u00a0" + ",\u00a0".join(map(str, traced))
    return [named if kind == REMAINDER and len(traced) > 1 else kind for kind in KINDS]


def _draw_cell(
    panels: Sequence[Axes], rows: pd.DataFrame, limits: dict[Any, pd.DataFrame], inks: dict[int, str]
) -> None:
    """Draw the three panels of a cell, and set their scales, which are those of all drawn cells.

    Args:
        panels: The axes, in the order of KINDS.
        rows: Rows of the cell.
        limits: Rows of all drawn cells by part.
        inks: Colour by layer.
    """
    position, channel, product = panels
    gates = limits["channel"]
    _draw_lines(position, rows[rows["part"] == "position"], inks)
    _scale_towards_end(position, "y", limits["position"]["value"], end=1.0)
    _draw_channels(channel, rows[rows["part"] == "channel"], inks)
    _scale_towards_end(channel, "x", gates["x"], end=1.0)
    _scale_towards_end(channel, "y", gates["value"], end=0.0)
    traced = rows[rows["part"] == "trace"].sort_values(["layer", "series", "x"], kind="stable")
    _draw_lines(product, _products(traced), inks, _least_variable(traced))
    product.set_yscale("log")
    product.set_ylim(LOWEST, 1.5)
    drawing.log_ticks(product.yaxis, 5, (1,))
    for axes in (position, product):
        # round numbers, three or more of them in a column too
        ends = [np.max(np.asarray(line.get_xdata(), dtype=float)) for line in axes.lines]
        if ends:
            Scale(0.0, float(max(ends))).apply_to_axis(axes, "x")


def _scale_towards_end(axes: Axes, which: str, numbers: pd.Series, *, end: float) -> None:
    """Make an axis of numbers from 0 to 1 logarithmic in the distance from 1 or 0; without any apart from it do nothing."""
    if (scale := distance_scale(numbers, end, -1 if end else 1)) is not None:
        scale.apply_to_axis(axes, which, scale.ticks(lambda number, _: f"{number:.10g}", f"{end:g}"))


def _products(traced: pd.DataFrame) -> pd.DataFrame:
    """Return the traced rows with the share that is left of the first token's state as their values, above 0.

    That is the product of the retention at the tokens after it: its own gate acts on the state before it, so all of it
    is left at the first token.

    Args:
        traced: Rows of traced gates with layer, series, x and value (retention), ordered by x within a gate.
    """
    of_gate = ["layer", "series"]
    is_first = traced.groupby(of_gate)["x"].transform("min") == traced["x"]
    later = traced.assign(value=traced["value"].mask(is_first, 1.0))
    return traced.assign(value=later.groupby(of_gate)["value"].cumprod().clip(lower=LOWEST**2))


def _layer_inks(layers: Iterable[int]) -> dict[int, str]:
    """Return a colour per layer, from dark violet for the first to green for the last."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    ordered = list(layers)
    scale = colormaps["viridis"]
    # the light end of the scale is hard to see on white
    return {layer: to_hex(scale(0.72 * index / max(1, len(ordered) - 1))) for index, layer in enumerate(ordered)}


def _draw_lines(
    axes: Axes, rows: pd.DataFrame, inks: dict[int, str], thin: Collection[tuple[int, int]] | None = None
) -> None:
    """Draw one line per layer and series: `value` over `x`; of gates those of `thin`, (layer, series), are thin."""
    for layer, series in sorted(set(zip(rows["layer"].astype(int), rows["series"].astype(int), strict=True))):
        line = rows[(rows["layer"] == layer) & (rows["series"] == series)]
        width = MEAN if thin is None else THIN if (layer, series) in thin else THICK
        axes.plot(line["x"], line["value"], color=inks[layer], linewidth=drawing.line_width(width))


def _spreads(traced: pd.DataFrame) -> pd.Series:
    """Return the standard deviation of the retention of each traced gate over the text, by (layer, series)."""
    return traced.groupby(["layer", "series"])["value"].std().fillna(0.0)


def _least_variable(traced: pd.DataFrame) -> set[tuple[int, int]]:
    """Return the (layer, series) of the gate of each layer whose retention varies least, where several are traced."""
    spreads = _spreads(traced).groupby("layer")
    return {key for key, size in zip(spreads.idxmin(), spreads.size(), strict=True) if size > 1}


def _draw_channels(axes: Axes, rows: pd.DataFrame, inks: dict[int, str]) -> None:
    """Draw the standard deviation of each gate over its mean."""
    colours = [inks[layer] for layer in rows["layer"]]
    axes.scatter(
        rows["x"],
        rows["value"],
        s=MARK_AREA if len(rows) > FEW_GATES else 2 * MARK_AREA,
        c=colours,
        alpha=0.8,
        linewidths=0,
        rasterized=len(rows) > 2000,
        # gates at the end of an axis are drawn whole
        clip_on=False,
        zorder=3,
    )
