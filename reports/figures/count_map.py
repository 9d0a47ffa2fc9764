"""The figure `count-map`: what m keys of one weight come to in Polar attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ...results.console.text import counted
from ...results.paper import is_published
from ...results.store.records import AXES
from ...results.store.store import Store
from ..stats.untrained_formulas import BETA, magnitude
from ..sweep_data import ReportError, SweepData, cell_level
from .canvas import drawing
from .canvas.base import Axes, Figure, FigureData, FigureOptions, collected

MOST_COUNT = 1000
BAND = "#dfe9f2"
GUIDES = {"∝ m": 1.0, "∝ √m": 0.5}
"""What sums of m keys would come to: of keys that agree, and of keys that have nothing to do with each other."""


def collect(store: Store, data: SweepData) -> FigureData:
    """The count map of Polar attention, mag = tanh(beta ln(1 + m)): what m keys that share the weight alike come to.

    One row a curve and m in 0 to 1000: source (`init`, or the cell of a learned slope), cell, attempt, beta, lowest and
    highest (over heads), m, mag. Learned slopes are those that the probe `count_map` stored.
    """
    polar = [cell for cell in data.cells if cell.levels["attn_type"] == "polar"]
    if not polar:
        raise ReportError(f"sweep {data.sweep} has no polar cell, and only those have a count map")
    curves: list[dict[str, Any]] = [
        {"source": "init", "cell": None, "attempt": None, "beta": BETA, "lowest": math.nan, "highest": math.nan}
    ]
    for cell in polar:
        found = [
            data.values.get((cell.cell_id, "count_map", name, 0)) for name in ("beta", "beta_lowest", "beta_highest")
        ]
        numbers = [value.value if value is not None else None for value in found]
        if found[0] is not None and numbers[0] is not None:
            mean, lowest, highest = (math.nan if number is None else number for number in numbers)
            about = {"source": cell.slug, "cell": cell.cell_id, "attempt": found[0].attempt_id}
            curves.append(about | {"beta": mean, "lowest": lowest, "highest": highest})
    m = np.unique(np.concatenate([np.arange(0, 10), np.geomspace(10, MOST_COUNT, 60).round()]))
    rows = [
        curve | {"m": float(one), "mag": mag}
        for curve in curves
        for one, mag in zip(m, magnitude(m, curve["beta"]).tolist(), strict=True)
    ]
    frame = pd.DataFrame(rows)
    learned = len(curves) - 1
    words = (
        f"mag = tanh(β ln(1 + m)), β = softplus(mag_beta); β starts at softplus(-1.5) = {BETA:.3f}. Grey: what a sum of keys "
        "would grow like that agree (m), or have nothing to do with each other (√m). "
    )
    if learned:
        words += f"Learned: mean over all heads of {counted(learned, 'cell')}; shaded: from the flattest to the steepest head of any."
    elif is_published(data.sweep):
        words += "Drawn from the formula: no weights of the published networks are at hand."
    else:
        words += "No learned β is stored: evaluate a polar cell with --probe count_map."
    origins: list[tuple[str, int | None]] = [(str(curve["cell"]), int(curve["attempt"])) for curve in curves[1:]]
    origins = origins or [(cell.cell_id, None) for cell in polar]
    names = _names(data, {str(curve["cell"]) for curve in curves[1:]})
    return collected(
        store, data, "count-map", "Count map of Polar attention", frame, origins, notes=[words], names=names
    )


def _names(data: SweepData, cells: set[str]) -> dict[str, str]:
    """By cell: the levels in which these cells differ, in words; of one alone its slug."""
    shown = [cell for cell in data.cells if cell.cell_id in cells]
    axes = [axis for axis in (*AXES, *data.extra_axes()) if len({cell_level(cell, axis) for cell in shown}) > 1]
    seeds = len({cell.seed for cell in shown}) > 1
    found = {}
    for cell in shown:
        words = [drawing.shown_values(cell_level(cell, axis), axis) for axis in axes]
        found[cell.cell_id] = ", ".join([*words, *([f"seed {cell.seed}"] if seeds else [])]) or cell.slug
    return found


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """mag over ln(1 + m), one curve a slope, named at its end; guides for sums of m keys."""
    frame = made.frame
    figure = drawing.page(2.5, 4.6)
    (axes,) = drawing.panels(figure, [""])
    init = frame[frame["source"] == "init"]
    counts = init["m"].to_numpy(dtype=float)
    x = np.log1p(counts)
    handles: dict[str, Any] = {}
    learned = [curve for name, curve in frame.groupby("source", sort=False) if name != "init"]
    if learned:
        ends = [(curve["lowest"].iloc[0], curve["highest"].iloc[0]) for curve in learned]
        slopes = [pair for pair in ends if not any(map(math.isnan, pair))]
        if slopes:
            low, high = min(low for low, _ in slopes), max(high for _, high in slopes)
            axes.fill_between(x, magnitude(counts, low), magnitude(counts, high), color=BAND, linewidth=0, zorder=1)
            handles[f"learned, single heads: β {low:.3f} to {high:.3f}"] = drawing.patch(facecolor=BAND)
    start = f"at the start: β {init['beta'].iloc[0]:.3f}"
    (line,) = axes.plot(x, init["mag"], color="#000000", zorder=4)
    if learned:
        handles[start] = line
    else:
        corner: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": drawing.size("legend.fontsize")}
        drawing.note(axes, start, (x[-1], init["mag"].iloc[-1]), (-3, -22), **corner)
    several = len(learned) > len(drawing.COLOURS)
    for place, curve in enumerate(learned):
        how = drawing.look(place) | {"linestyle": drawing.DASHES[1 + place % 3], "markevery": 12 + place % 5}
        if several:
            how = {"color": drawing.COLOURS[0], "linewidth": drawing.line_width(0.7), "alpha": 0.6}
        (line,) = axes.plot(np.log1p(curve["m"]), curve["mag"], zorder=3, **how)
        name = f"learned, {counted(len(learned), 'cell')}" if several else _named(curve, made.about["names"])
        handles[name] = line
    shown = [0, 1, 3, 10, 30, 100, 300, MOST_COUNT]
    axes.set_xticks([math.log1p(m) for m in shown], [str(m) for m in shown])
    axes.set_xlim(0, math.log1p(MOST_COUNT))
    axes.set_ylim(0, 1)
    for words, power in GUIDES.items():
        _guide(axes, words, power, float(magnitude(1.0, init["beta"].iloc[0])))
    axes.set_xlabel("keys that share the weight alike, m")
    axes.set_ylabel("what they come to, mag")
    return drawing.finished(figure, made.title, made.notes, handles, columns=2)


def _named(curve: pd.DataFrame, names: Mapping[str, str]) -> str:
    return f"{names[curve['cell'].iloc[0]]}: β {curve['beta'].iloc[0]:.3f}"


def _guide(axes: Axes, words: str, power: float, first: float) -> None:
    """A grey line of that power of m through the first key's magnitude, named where it leaves the picture."""
    m = np.geomspace(1, MOST_COUNT, 200)
    heights = first * m**power
    inside = heights <= 1
    axes.plot(np.log1p(m[inside]), heights[inside], color=drawing.FAINT, linestyle=drawing.DASHES[1], zorder=2)
    look: dict[str, Any] = {"ha": "center", "va": "bottom", "color": drawing.GREY, "annotation_clip": False}
    drawing.note(axes, words, (math.log1p(m[inside][-1]), 1.0), (0, 2), **look)
