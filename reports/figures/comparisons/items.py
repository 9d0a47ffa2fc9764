"""Figure `items`: needle trials answered correctly, by cell."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from ....results.console.text import counted
from ....results.store.store import Store
from ...number_format import NEEDLE, format_length, format_number
from ...stats.effects.needle_baseline import constant_answer_score
from ...stats.items import answers_frame, items_of
from ...stats.noise.run_noise import STRATUM_AXES
from ...stats.significance.paired_tests import ALPHA
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, cell_labels, collected, frame_origins
from .strata import stratum_label

PROBE, METRIC = NEEDLE
MAX_NAMED_CELLS = 32
"""Largest number of cells that are named one by one; with more, only their mixer and memory are named."""
MAX_NUMBERED_TRIALS = 24
"""Largest number of trials that are numbered below the map."""
TALLEST = 8.0  # inches
GAP = 0.6  # rows between strata
NONE, ALL, MISSING = "#f4f4f4", drawing.GOOD, "#c9b8a8"


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the share of correct digits per cell and needle trial.

    It is shown at the longest context length with trials, and at additionally requested lengths.

    One row per cell, length and trial that was answered. Columns: cell, attempt, configuration, seed, length, trial,
    value (share of its digits that are right, a fraction), exact (True if all are), attn_type, memory, stratum (label
    of mixer and memory), name (of the cell within its stratum), row and column: position in the map from 0. The stratum
    with the highest mean is on top, the best cell first in it, and the trial that most cells get right at the left;
    these means are over all shown lengths, with 0 for a trial that a cell did not answer.

    Raises:
        ReportError: No trials are stored.
    """
    answer_rows = answers_frame(store, data, PROBE, METRIC, _shown_lengths(store, data))
    frame = _with_map_positions(data, answer_rows)
    length_labels = [format_length(length) for length in dict.fromkeys(frame["length"])]
    ceilings = {
        share for length in set(frame["length"]) if (share := constant_answer_score(data, int(length))) is not None
    }
    notes = [
        f"Share of a trial's digits recalled correctly at {', '.join(length_labels)} tokens. Rows: cells, grouped "
        f"by mixer and memory, the best on top. Columns: trials{_digits_text(data)}, those that most cells answer at the left; this order "
        "by itself makes a gradient. "
        f"Lowest row: mean over all rows. Right: mean of a {'cell' if frame['cell'].nunique() <= MAX_NAMED_CELLS else 'group'} and its standard error, "
        "from the spread of its trials."
    ]
    if len(frame) < frame["cell"].nunique() * frame["trial"].nunique() * frame["length"].nunique():
        notes.append(
            "No answer: the cell has no stored digits of that trial, which is left out of its mean and counts as 0 in "
            "the order."
        )
    having = frame["cell"].nunique()
    if having < len(data.cells):
        notes.append(f"{having} of {counted(len(data.cells), 'cell')} have trials.")
    if ceilings:
        notes.append(
            f"Constant-digit baseline: {format_number(max(ceilings), 1, percent=True)} %; grey means are not "
            f"significantly above it (5 % over {counted(_comparisons(frame), 'comparison')}, Bonferroni)."
        )
    return collected(
        store, data, "items", "Needle accuracy by trial", frame, frame_origins(frame), notes=notes,
        constant=max(ceilings, default=None),
    )  # fmt: skip


def _comparisons(frame: pd.DataFrame) -> int:
    """Return how many means are compared with the constant digit: of cells, or of strata if there are many cells."""
    cells = frame["cell"].nunique()
    return (cells if cells <= MAX_NAMED_CELLS else frame["stratum"].nunique()) * frame["length"].nunique()


def _digits_text(data: SweepData) -> str:
    """Return " of 5 digits" as the metric describes its trials; "" if it does not."""
    digits = data.metric(PROBE, METRIC).trials
    return f" of {digits} digits" if digits else ""


def _shown_lengths(store: Store, data: SweepData) -> list[int]:
    """Return the longest requested length with stored trials, and measured additional lengths, ascending.

    Raises:
        ReportError: There are none.
    """
    measured = [length for length in data.lengths(PROBE, METRIC) if length]
    requested = [length for length in measured if length not in data.also]
    longest = next((length for length in reversed(requested) if items_of(store, data, [(PROBE, METRIC, length)])), None)
    shown = sorted({*data.also} & {*measured} | ({longest} if longest else set()))
    if not shown:
        raise ReportError(
            f"sweep {data.sweep} has no stored needle trials, and printed numbers have none; evaluate with "
            "--probe needle"
        )
    return shown


def _with_map_positions(data: SweepData, answer_rows: pd.DataFrame) -> pd.DataFrame:
    """Return the answers with attn_type, memory, stratum, name, row and column, sorted by length, row and column.

    Rows and columns are the same at every length. Strata are ranked by the mean of their cells, cells within them and
    trials by their sums, all highest first; an answer that is missing counts as 0.

    Args:
        data: The sweep.
        answer_rows: Rows of `answers_frame`: one per cell, length and trial, with the share of right digits as `value`.
    """
    levels = {cell.cell_id: tuple(cell.levels[axis] for axis in STRATUM_AXES) for cell in data.cells}
    names = cell_labels(data, without=STRATUM_AXES)
    strata = [levels[cell] for cell in answer_rows["cell"]]
    frame = answer_rows.assign(
        attn_type=[stratum[0] for stratum in strata],
        memory=[stratum[1] for stratum in strata],
        stratum=[stratum_label(data, stratum) for stratum in strata],
        name=[names[cell] for cell in answer_rows["cell"]],
    )
    # every cell has the same number of trials here: one without an answer counts as 0 and cannot lift a mean
    cells = frame.groupby("cell", sort=False).agg(value=("value", "sum"), stratum=("stratum", "first"))
    stratum_means = cells.groupby("stratum", sort=False)["value"].mean()
    cells = cells.assign(of=[stratum_means[stratum] for stratum in cells["stratum"]])
    ranked = cells.sort_values(["of", "stratum", "value"], ascending=[False, True, False], kind="stable")
    trials = frame.groupby("trial")["value"].sum().sort_values(ascending=False, kind="stable")
    rows, columns = (
        {label: position for position, label in enumerate(index)} for index in (ranked.index, trials.index)
    )
    frame = frame.assign(row=frame["cell"].map(rows), column=frame["trial"].map(columns))
    return frame.sort_values(["length", "row", "column"], ignore_index=True)


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a map per length: a row per cell and a column per trial, the darker the more of its digits are correct.

    Strata are separated by gaps, and means are written at the right. With more than 32 cells names and means are those
    of strata. `look` is not used.
    """
    frame = figure_data.frame
    cells = frame.drop_duplicates("cell").sort_values("row")
    heights = _heights(cells)
    lengths = list(dict.fromkeys(frame["length"]))
    named = len(cells) <= MAX_NAMED_CELLS
    each = 0.15 if named else max(0.02, 0.11 * MAX_NAMED_CELLS / len(cells))
    figure = drawing.page(
        min(TALLEST, each * (max(heights) + 2 + GAP) + 1.2), drawing.PAGE_WIDTH if len(lengths) > 1 else 4.8
    )
    missing, bar = False, None
    grid = drawing.panel_column(figure, len(lengths), sharey=True)
    for axes, length in zip(grid, lengths, strict=True):
        panel_rows = frame[frame["length"] == length]
        bar = _draw_map(axes, panel_rows, cells, heights)
        missing |= len(panel_rows) < len(cells) * panel_rows["trial"].nunique()
        z = float(ndtri(1 - ALPHA / 2 / _comparisons(frame)))
        _write_means(axes, panel_rows, cells, heights, named=named, constant=figure_data.draw_options["constant"], z=z)
        axes.set_title(f"needle accuracy, {format_length(int(length))} tokens")
    _label_rows(grid[0], cells, heights, named=named)
    _add_colour_bar(figure, grid, bar, frame)
    keys: dict[str, Any] = {"no answer": drawing.patch(facecolor=MISSING, linewidth=0.5)} if missing else {}
    constant = figure_data.draw_options["constant"]
    if constant is not None:
        baseline = f"the constant digit ({format_number(constant, 1, percent=True)} %)"
        letters: dict[str, Any] = {"linestyle": "none", "markersize": 2.6 * drawing.size("small"), "markeredgewidth": 0}
        letters |= {"marker": r"$\mathdefault{39\,\%}$"}
        keys[f"mean significantly above {baseline}"] = drawing.key(color=drawing.INK, **letters)
        keys["not significantly"] = drawing.key(color=drawing.GREY, **letters)
    return drawing.finished(figure, figure_data.title, figure_data.notes, keys)


def _steps(frame: pd.DataFrame) -> int | None:
    """Return the number of digits of a trial if all shares are multiples of its inverse, at most ten; else None."""
    shares = frame["value"].to_numpy(dtype=float)
    return next((steps for steps in range(2, 11) if np.allclose(shares * steps, np.round(shares * steps))), None)


def _add_colour_bar(figure: Figure, grid: list[Axes], image: Any, frame: pd.DataFrame) -> None:
    """Add a horizontal colour bar of the share of correct digits, in %, below the panels, a square per possible share.

    Args:
        figure: The figure.
        grid: The panels.
        image: A map of the figure.
        frame: Rows of the figure.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    steps = _steps(frame)
    if steps is not None:
        edges = (np.arange(steps + 2) - 0.5) / steps
        shades = ListedColormap(image.cmap(np.linspace(0, 1, steps + 1)))
        image = ScalarMappable(BoundaryNorm(edges, steps + 1), shades)
    layout = {"orientation": "horizontal", "aspect": 30, "shrink": 0.6, "pad": 0.03}
    bar = drawing.colour_bar(figure, grid, image, "digits correct, %", **layout)
    ticks = [step / (steps or 4) for step in range((steps or 4) + 1)]
    drawing.put_ticks(bar.ax.xaxis, {tick: f"{100 * tick:.0f}" for tick in ticks})


def _heights(cells: pd.DataFrame) -> list[float]:
    """Return the height of each row from 0 downwards: one apart, and GAP more between strata.

    Args:
        cells: One row per cell with the column stratum, in the order of the map.
    """
    strata = list(cells["stratum"])
    new = [0, *(before != after for before, after in itertools.pairwise(strata))]
    return (np.arange(len(strata)) + GAP * np.cumsum(new)).tolist()


def _draw_map(axes: Axes, panel_rows: pd.DataFrame, cells: pd.DataFrame, heights: list[float]) -> Any:
    """Draw the rows of every stratum as one image, with limits and the x axis, and return the last image.

    Args:
        axes: The panel.
        panel_rows: Rows of one length.
        cells: One row per cell, in the order of the map.
        heights: Height of each cell's row.
    """
    across = int(panel_rows["column"].max()) + 1
    table = np.full((len(cells), across), np.nan)
    table[panel_rows["row"], panel_rows["column"]] = panel_rows["value"]
    strata = cells["stratum"].to_numpy()
    style: dict[str, Any] = {"colours": drawing.colours("right", NONE, ALL), "bad": MISSING, "zorder": 1}
    for stratum in dict.fromkeys(strata):
        (rows,) = np.nonzero(strata == stratum)
        ends = (-0.5, across - 0.5, heights[rows[-1]] + 0.5, heights[rows[0]] - 0.5)
        image = drawing.heat(axes, table[rows], drawing.linear(0, 1), extent=ends, **style)
    axes.set_xlim(-0.5, across - 0.5)
    bottom = max(heights) + 0.5
    if len(cells) <= MAX_NAMED_CELLS:
        bottom += 1 + GAP
        ends = (-0.5, across - 0.5, bottom, bottom - 1)
        means = panel_rows.groupby("column")["value"].mean().reindex(range(across)).to_numpy()[None]
        drawing.heat(axes, means, drawing.linear(0, 1), extent=ends, **style)
    axes.set_ylim(bottom, -0.5)
    for edge in np.arange(1, across) - 0.5:
        axes.axvline(edge, color="#ffffff", linewidth=drawing.line_width(0.5), zorder=2)
    for edge in np.array(heights[1:]) - 0.5 if len(cells) <= MAX_NAMED_CELLS else []:
        axes.axhline(edge, color="#ffffff", linewidth=drawing.line_width(0.5), zorder=2)
    trials = panel_rows.drop_duplicates("column").sort_values("column")
    numbers = [str(trial) for trial in trials["trial"]] if across <= MAX_NUMBERED_TRIALS else []
    axes.set_xticks(trials["column"].to_list() if numbers else [], numbers)
    axes.tick_params(axis="x", labelsize=drawing.size("small"))
    axes.set_xlabel("trial, by accuracy" if numbers else f"{counted(across, 'trial')}, by accuracy")
    return image


def _write_means(
    axes: Axes, panel_rows: pd.DataFrame, cells: pd.DataFrame, heights: list[float], *, named: bool,
    constant: float | None, z: float,
) -> None:  # fmt: skip
    """Write means and standard errors in % at the right: of every cell if `named`, else of each stratum.

    A mean over fewer answers than its rows have trials is followed by that number.

    Args:
        axes: The panel.
        panel_rows: Rows of one length.
        cells: One row per cell, in the order of the map.
        heights: Height of each cell's row.
        named: Means of cells rather than of strata.
        constant: Constant-digit baseline as a fraction; means not significantly above it are grey.
        z: Standard errors by which a significant mean exceeds it.
    """
    height = dict(zip(cells["cell"], heights, strict=True))
    key = "cell" if named else "stratum"
    groups = panel_rows.assign(y=panel_rows["cell"].map(height)).groupby(key, sort=False)
    trials = panel_rows["trial"].nunique()
    # cells of a group share their trials, so that trials alone are independent
    errors: Any = panel_rows.groupby([key, "trial"])["value"].mean().groupby(level=0).sem()
    means = groups.agg(y=("y", "mean"), value=("value", "mean"), answers=("value", "size"), cells=("cell", "nunique"))
    for name, row in means.iterrows():
        style: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
        text = f"{format_number(row['value'], 0, percent=True)} ± {format_number(errors[name], 0, percent=True)} %"
        if not np.isfinite(errors[name]):
            text = f"{format_number(row['value'], 0, percent=True)} %"
        if row["answers"] < row["cells"] * trials:
            text += f" of {counted(int(row['answers']), 'trial' if named else 'answer')}"
        error = errors[name] if np.isfinite(errors[name]) else 0.0
        if constant is not None and row["value"] - z * error <= constant:
            style["color"] = drawing.GREY
        drawing.note(axes, text, (1, row["y"]), (4, 0), **style)


def _label_rows(axes: Axes, cells: pd.DataFrame, heights: list[float], *, named: bool) -> None:
    """Write names at the left of the rows: stratum and name of every cell if `named`, else of each stratum."""
    if named:
        labels = [", ".join(filter(None, names)) for names in zip(cells["stratum"], cells["name"], strict=True)]
        axes.set_yticks([*heights, max(heights) + 1 + GAP], [*labels, "mean of all"])
    else:
        middles = cells.assign(y=heights).groupby("stratum", sort=False)["y"].mean()
        axes.set_yticks(middles.to_list(), list(middles.index))
