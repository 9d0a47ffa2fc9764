"""Figure `count-map`: output of Polar attention over the number of equal keys."""

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
from ..render.style import SERIES_INKS
from ..stats.untrained_formulas import BETA, count_map
from ..sweep_data import ReportError, SweepData, cell_level
from .canvas import drawing
from .canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from .canvas.labels import label_ends
from .canvas.line_drawing import reference_line

MAX_COUNT = 1000
LAST_DOT = 10
"""Largest m whose points have a dot each; further ones lie close together."""
EXAMPLES = (0.5, 2.0)
"""Multiples of the initial slope whose curves stand in for learned ones."""
BAND = "#dfe9f2"
GUIDES = {"∝ m": 1.0, "∝ √m": 0.5}
"""Growth of a sum of m keys, as powers of m: keys that agree, and independent keys."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the count map of Polar attention, mag = tanh(beta ln(1 + m)), for m keys of equal weight.

    One row per curve and m, for about 70 whole numbers m from 0 to 1000: source (`init`, or the slug of a cell with a
    learned slope), cell, attempt, beta (mean over heads), lowest and highest (beta over heads), m, mag (0 to 1). The
    curve `init` comes first and has no cell. Learned slopes are those that the probe `count_map` stored; polar cells
    without one have no curve.

    Raises:
        ReportError: The sweep has no polar cell.
    """
    polar = [cell for cell in data.cells if cell.levels["attn_type"] == "polar"]
    if not polar:
        raise ReportError(f"sweep {data.sweep} has no PoLAR cell, which the count map requires")
    curves: list[dict[str, Any]] = [
        {"source": "init", "cell": None, "attempt": None, "beta": BETA, "lowest": math.nan, "highest": math.nan}
    ]
    for cell in polar:
        values = [
            data.values.get((cell.cell_id, "count_map", name, 0)) for name in ("beta", "beta_lowest", "beta_highest")
        ]
        numbers = [value.value if value is not None else None for value in values]
        if values[0] is not None and numbers[0] is not None:
            mean, lowest, highest = (math.nan if number is None else number for number in numbers)
            fields = {"source": cell.slug, "cell": cell.cell_id, "attempt": values[0].attempt_id}
            curves.append(fields | {"beta": mean, "lowest": lowest, "highest": highest})
    if len(curves) == 1:
        fields = {"cell": None, "attempt": None, "lowest": math.nan, "highest": math.nan}
        curves += [fields | {"source": f"{factor:g} × init", "beta": factor * BETA} for factor in EXAMPLES]
    m = np.unique(np.concatenate([np.arange(0, 10), np.geomspace(10, MAX_COUNT, 60).round()]))
    rows = [
        curve | {"m": float(count), "mag": mag}
        for curve in curves
        for count, mag in zip(m, count_map(m, curve["beta"]).tolist(), strict=True)
    ]
    frame = pd.DataFrame(rows)
    learned = int(frame["cell"].nunique())
    note_text = (
        f"mag = tanh(β ln(1 + m)), β = softplus(mag_beta); β is initialized to softplus(-1.5) = {BETA:.3f}. "
        f"m is a whole number of keys (dots up to {LAST_DOT}). Dotted: growth of a sum of m identical keys "
        "(m) and of m independent keys (√m), from the thick curve at m = 1. "
    )
    if learned:
        note_text += (
            f"Learned: mean over all heads of {counted(learned, 'cell')}; shaded: from the lowest to the "
            "highest β of any head."
        )
    elif is_published(data.sweep):
        note_text += (
            "Drawn from the formula, thin for half and twice that β: the weights of the published networks are not "
            "available."
        )
    else:
        note_text += (
            "Thin: half and twice that β. No learned β is stored: evaluate a PoLAR cell with --probe count_map."
        )
    stored = [curve for curve in curves if curve["cell"] is not None]
    origins: list[tuple[str, int | None]] = [(str(curve["cell"]), int(curve["attempt"])) for curve in stored]
    origins = origins or [(cell.cell_id, None) for cell in polar]
    names = _cell_labels(data, {str(curve["cell"]) for curve in stored})
    title = "Count map of PoLAR attention: output magnitude by number of equally weighted keys"
    return collected(
        store, data, "count-map", title, frame, origins, notes=[note_text], has_glossary=False, names=names,
    )  # fmt: skip


def _cell_labels(data: SweepData, cells: set[str]) -> dict[str, str]:
    """Return the levels in which these cells differ as text by cell id, with the seed if seeds differ.

    A cell that differs in nothing, such as a single one, has its slug.
    """
    shown = [cell for cell in data.cells if cell.cell_id in cells]
    axes = [axis for axis in (*AXES, *data.extra_axes()) if len({cell_level(cell, axis) for cell in shown}) > 1]
    seeds = len({cell.seed for cell in shown}) > 1
    labels = {}
    for cell in shown:
        level_labels = [drawing.level_label(cell_level(cell, axis), axis) for axis in axes]
        labels[cell.cell_id] = ", ".join([*level_labels, *([f"seed {cell.seed}"] if seeds else [])]) or cell.slug
    return labels


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw mag over ln(1 + m): one curve per slope, with guides for sums of m keys.

    A shaded band covers the slopes of all learned heads. More learned curves than colours are alike, with one legend
    entry. `look` is not used.
    """
    frame = figure_data.frame
    figure = drawing.page(2.5, 4.6)
    (axes,) = drawing.panels(figure, [""])
    init = frame[frame["source"] == "init"]
    counts = init["m"].to_numpy(dtype=float)
    x = np.log1p(counts)
    handles: dict[str, Any] = {}
    curves = [curve for name, curve in frame.groupby("source", sort=False) if name != "init"]
    learned = [curve for curve in curves if curve["cell"].notna().any()]
    examples = [curve for curve in curves if curve["cell"].isna().all()]
    for curve in examples:
        axes.plot(np.log1p(curve["m"]), curve["mag"], color="#000000", linewidth=drawing.line_width(0.7), zorder=3)
        _draw_dots(axes, curve, 2.4)
    if learned:
        ends = [(curve["lowest"].iloc[0], curve["highest"].iloc[0]) for curve in learned]
        slopes = [pair for pair in ends if not any(map(math.isnan, pair))]
        if slopes:
            low, high = min(low for low, _ in slopes), max(high for _, high in slopes)
            axes.fill_between(x, count_map(counts, low), count_map(counts, high), color=BAND, linewidth=0, zorder=1)
            handles[f"single heads: β = {low:.3f} to {high:.3f}"] = drawing.patch(facecolor=BAND)
    start = f"at initialization: β = {init['beta'].iloc[0]:.3f}"
    (line,) = axes.plot(x, init["mag"], color="#000000", zorder=4)
    _draw_dots(axes, init, 3.4)
    if learned:
        handles[start] = line
    draws_alike = len(learned) > len(SERIES_INKS)
    for index, curve in enumerate(learned):
        style = drawing.marker_style(index) | {"linestyle": "-", "markevery": 12 + index % 5}
        if draws_alike:
            style = {"color": SERIES_INKS[0], "linewidth": drawing.line_width(0.7), "alpha": 0.6}
        (line,) = axes.plot(np.log1p(curve["m"]), curve["mag"], zorder=3, **style)
        name = (
            f"learned, {counted(len(learned), 'cell')}"
            if draws_alike
            else _curve_label(curve, figure_data.draw_options["names"])
        )
        handles[name] = line
    shown = [0, 1, 3, 10, 30, 100, 300, MAX_COUNT]
    axes.set_xticks([math.log1p(m) for m in shown], [str(m) for m in shown])
    axes.set_xlim(0, math.log1p(MAX_COUNT))
    axes.set_ylim(0, 1)
    for label, power in GUIDES.items():
        _draw_guide(axes, label, power, float(count_map(1.0, init["beta"].iloc[0])))
    labelled = [*examples, *([] if learned else [init])]
    labels: list[tuple[str, float, Any]] = [
        (f"β = {curve['beta'].iloc[0]:.3f}{', initial' if curve is init else ''}", curve["mag"].iloc[-1], "#000000")
        for curve in labelled
    ]
    label_ends(axes, labels, size="small" if figure.get_figwidth() < drawing.NARROW_WIDTH else "legend.fontsize")
    axes.set_xlabel("number m of equally weighted keys, on a scale of ln(1 + m)")
    axes.set_ylabel("output magnitude")
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=2)


def _draw_dots(axes: Axes, curve: pd.DataFrame, size: float) -> None:
    """Draw a dot of that diameter, in points of the style `paper`, at each small m, between which a curve is a guide."""
    few = curve[curve["m"] <= LAST_DOT]
    look: dict[str, Any] = {"markersize": size, "markeredgewidth": 0, "zorder": 4, "clip_on": False}
    drawing.points(axes, np.log1p(few["m"]), few["mag"], color="#000000", **look)


def _curve_label(curve: pd.DataFrame, names: Mapping[str, str]) -> str:
    return f"{names[curve['cell'].iloc[0]]}: β = {curve['beta'].iloc[0]:.3f}"


def _draw_guide(axes: Axes, label: str, power: float, first: float) -> None:
    """Draw a dotted grey line of first * m**power from m = 1 to where it leaves the axes at mag = 1, labelled there.

    Args:
        axes: The axes, with ln(1 + m) as x.
        label: Label of the line.
        power: Power of m.
        first: Magnitude of the first key, mag at m = 1.
    """
    m = np.geomspace(1, MAX_COUNT, 200)
    heights = first * m**power
    inside = heights <= 1
    axes.plot(np.log1p(m[inside]), heights[inside], **reference_line(), zorder=2, label=f"_guide {label}")
    style: dict[str, Any] = {
        "ha": "center",
        "va": "bottom",
        "color": drawing.INK,
        "annotation_clip": False,
        "fontsize": drawing.size("legend.fontsize"),
    }
    drawing.note(axes, label, (math.log1p(m[inside][-1]), 1.0), (0, 2), **style)
