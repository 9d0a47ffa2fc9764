"""The figure `items`: who answers which trial of the needle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from ....results.console.text import counted
from ....results.store.store import Store
from ...number_format import NEEDLE, format_length, format_number
from ...stats.effects.needle_baseline import ceiling
from ...stats.items import answers, items_of
from ...stats.noise.run_noise import STRATUM_AXES
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, cell_labels, collected, frame_origins
from .strata import words_of

PROBE, METRIC = NEEDLE
NAMED = 32
"""Cells that are named one by one; of more, their mixer and memory alone."""
NUMBERED = 24
"""Trials that are numbered below the map."""
TALLEST = 8.0  # inches
GAP = 0.6  # rows between strata
NONE, ALL, MISSING = "#f1f1f1", drawing.GOOD, "#c9b8a8"


def collect(store: Store, data: SweepData) -> FigureData:
    """Which cell gets which trial right, at the longest context length with trials, and at those that are asked for besides.

    One row a cell, length and trial, as `stats.items.answers` has them, with attn_type, memory, stratum (in words), name (of the
    cell within its stratum), row and column: its place in the map, the mixer and memory with the most right on top, in
    it the best cell, and the trial that most get right at the left.
    """
    found = answers(store, data, PROBE, METRIC, _shown(store, data))
    frame = _placed(data, found)
    told = [format_length(length) for length in dict.fromkeys(frame["length"])]
    ceilings = {one for length in set(frame["length"]) if (one := ceiling(data, int(length))) is not None}
    notes = [
        f"Share of a trial's digits that a cell gets right at {', '.join(told)}; cells of a mixer with or without memory together, the "
        "best on top; trials that more cells answer at the left. At the right: the mean of a cell, or of such cells."
    ]
    having = frame["cell"].nunique()
    if having < len(data.cells):
        notes.append(f"{having} of {counted(len(data.cells), 'cell')} have trials.")
    if ceilings:
        notes.append(f"Always the same digit gets {format_number(max(ceilings), 1, percent=True)}%.")
    return collected(
        store, data, "items", "Who answers which trial of the needle", frame, frame_origins(frame), notes=notes
    )


def _shown(store: Store, data: SweepData) -> list[int]:
    """The longest asked length of which trials are stored, and the lengths asked for besides."""
    known = [length for length in data.lengths(PROBE, METRIC) if length]
    asked = [length for length in known if length not in data.also]
    longest = next((one for one in reversed(asked) if items_of(store, data, [(PROBE, METRIC, one)])), None)
    shown = sorted({*data.also} & {*known} | ({longest} if longest else set()))
    if not shown:
        raise ReportError(
            f"sweep {data.sweep} has no trials of the needle: they are stored by evaluations of one's own (--probe needle), and no "
            "printed number has them"
        )
    return shown


def _placed(data: SweepData, found: pd.DataFrame) -> pd.DataFrame:
    levels = {cell.cell_id: tuple(cell.levels[axis] for axis in STRATUM_AXES) for cell in data.cells}
    names = cell_labels(data, without=STRATUM_AXES)
    strata = [levels[cell] for cell in found["cell"]]
    frame = found.assign(
        attn_type=[one[0] for one in strata],
        memory=[one[1] for one in strata],
        stratum=[words_of(data, one) for one in strata],
        name=[names[cell] for cell in found["cell"]],
    )
    cells = frame.groupby("cell", sort=False).agg(value=("value", "mean"), stratum=("stratum", "first"))
    whole = frame.groupby("stratum", sort=False)["value"].mean()
    cells = cells.assign(of=[whole[one] for one in cells["stratum"]])
    ranked = cells.sort_values(["of", "stratum", "value"], ascending=[False, True, False], kind="stable")
    trials = frame.groupby("trial")["value"].mean().sort_values(ascending=False, kind="stable")
    rows, columns = ({one: place for place, one in enumerate(index)} for index in (ranked.index, trials.index))
    frame = frame.assign(row=frame["cell"].map(rows), column=frame["trial"].map(columns))
    return frame.sort_values(["length", "row", "column"], ignore_index=True)


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """A map a length: a row a cell, a column a trial, the darker the more of its digits are right; strata stand apart."""
    frame = made.frame
    cells = frame.drop_duplicates("cell").sort_values("row")
    places = _heights(cells)
    lengths = list(dict.fromkeys(frame["length"]))
    named = len(cells) <= NAMED
    each = 0.15 if named else max(0.02, 0.11 * NAMED / len(cells))
    figure = drawing.page(min(TALLEST, each * (max(places) + 1) + 0.75), drawing.WIDTH if len(lengths) > 1 else 4.8)
    missing = False
    grid = drawing.panel_column(figure, len(lengths), sharey=True)
    for axes, length in zip(grid, lengths, strict=True):
        here = frame[frame["length"] == length]
        missing |= _map(axes, here, cells, places)
        _means(axes, here, cells, places, named=named)
        axes.set_title(f"needle, {format_length(int(length))}")
    _names(grid[0], cells, places, named=named)
    inks = {"none": NONE, "half": drawing.colours("right", NONE, ALL)(0.5), "all digits right": ALL}
    inks |= {"no answer": MISSING} if missing else {}
    keys = {word: drawing.patch(facecolor=ink, linewidth=0.5) for word, ink in inks.items()}
    return drawing.finished(figure, made.title, made.notes, keys)


def _heights(cells: pd.DataFrame) -> list[float]:
    """The heights of the rows, with a gap between strata."""
    strata = list(cells["stratum"])
    new = [0, *(before != after for before, after in itertools.pairwise(strata))]
    return (np.arange(len(strata)) + GAP * np.cumsum(new)).tolist()


def _map(axes: Axes, here: pd.DataFrame, cells: pd.DataFrame, places: list[float]) -> bool:
    """Draws the rows of every stratum as one picture; whether any answer is missing."""
    across = int(here["column"].max()) + 1
    table = np.full((len(cells), across), np.nan)
    table[here["row"], here["column"]] = here["value"]
    strata = cells["stratum"].to_numpy()
    look: dict[str, Any] = {"colours": drawing.colours("right", NONE, ALL), "bad": MISSING, "zorder": 1}
    for stratum in dict.fromkeys(strata):
        (rows,) = np.nonzero(strata == stratum)
        ends = (-0.5, across - 0.5, places[rows[-1]] + 0.5, places[rows[0]] - 0.5)
        drawing.heat(axes, table[rows], drawing.linear(0, 1), extent=ends, **look)
    axes.set_xlim(-0.5, across - 0.5)
    axes.set_ylim(max(places) + 0.5, -0.5)
    for edge in np.arange(1, across) - 0.5:
        axes.axvline(edge, color="#ffffff", linewidth=drawing.line_width(0.5), zorder=2)
    trials = here.drop_duplicates("column").sort_values("column")
    numbers = [str(one) for one in trials["trial"]] if across <= NUMBERED else []
    axes.set_xticks(trials["column"].to_list() if numbers else [], numbers)
    axes.tick_params(axis="x", labelsize=drawing.size("small"))
    axes.set_xlabel("trial" if numbers else counted(across, "trial"))
    return bool(np.isnan(table).any())


def _means(axes: Axes, here: pd.DataFrame, cells: pd.DataFrame, places: list[float], *, named: bool) -> None:
    """Means right of the rows: of every cell, or of the cells of a mixer with or without memory."""
    height = dict(zip(cells["cell"], places, strict=True))
    groups = here.assign(y=here["cell"].map(height)).groupby("cell" if named else "stratum", sort=False)
    for _, row in groups.agg(y=("y", "mean"), value=("value", "mean")).iterrows():
        look: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
        drawing.note(axes, format_number(row["value"], 1, percent=True) + "%", (1, row["y"]), (4, 0), **look)


def _names(axes: Axes, cells: pd.DataFrame, places: list[float], *, named: bool) -> None:
    """Names left of the rows: of every cell, or of the mixers with or without memory."""
    if named:
        words = [", ".join(filter(None, names)) for names in zip(cells["stratum"], cells["name"], strict=True)]
        axes.set_yticks(places, words)
    else:
        middles = cells.assign(y=places).groupby("stratum", sort=False)["y"].mean()
        axes.set_yticks(middles.to_list(), list(middles.index))
