"""The figure `seeds`: how far runs that ought to agree lie apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...number_format import Column
from ...stats.noise.run_noise import Replicate, Spread, replicates
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, cell_labels, collected, frame_origins
from .forest import measure_words, three_ticks
from .strata import Stratum, in_order, looks, planned_measures, strata_of, words_of

TALLEST = 8.0  # inches
EACH = 0.085
"""Inches of height of a group's line in the style `paper`."""
MOST_LINES = 5
"""Groups of a stratum that get a height of their own each; more lie closer."""
INSIDE = 0.74
"""Of the height of a stratum, what its groups take."""
KINDS = {
    "seeds": "seeds of one configuration",
    "near-replicates": "near-replicates, which differ in their regularizer alone",
}


def collect(store: Store, data: SweepData) -> FigureData:
    """Runs that ought to agree, within every stratum: seeds of one configuration, or else near-replicates (stats/noise/run_noise.py).

    One row a run and number: measure (heading), words, unit, attn_type, memory, stratum (in words), place (of the stratum), group
    (runs of one number ought to agree), kind, cell, attempt, seed, name, value, difference (from the mean of the group), sd
    (between runs of the stratum), floor (that the trials of an accuracy alone make), df. Shares in points.
    """
    names = cell_labels(data)
    rows: list[dict[str, Any]] = []
    columns = planned_measures(data)
    found = [replicates(data, column) for column in columns]
    order = in_order(data, {stratum for one in found for stratum in one})
    for column, one in zip(columns, found, strict=True):
        for place, stratum in enumerate(order):
            if stratum in one:
                rows += [row | {"place": place} for row in _rows(data, column, stratum, *one[stratum], names)]
    if not rows:
        raise ReportError(
            f"no configuration of sweep {data.sweep} has two runs with a validation loss or needle accuracies, so how far runs that "
            "ought to agree lie apart is not known; launch it with seeds: 3"
        )
    frame = pd.DataFrame(rows)
    kinds = " and ".join(KINDS[kind] for kind in dict.fromkeys(frame["kind"]))
    notes = [
        f"A line joins {kinds}; a mark is a run, as its difference from their mean. Shaded: one standard deviation each way, pooled "
        "over the runs of a mixer with or without memory, the number at the right; of an accuracy at least what its trials make.",
    ]
    title = "How far runs that ought to agree lie apart"
    return collected(store, data, "seeds", title, frame, frame_origins(frame), notes=notes)


def _rows(
    data: SweepData, column: Column, stratum: Stratum, spread: Spread, runs: list[Replicate], names: dict[str, str]
) -> list[dict[str, Any]]:
    scale, unit = (100, "points") if column.percent else (1, column.unit)
    about: dict[str, Any] = {"measure": column.heading, "words": measure_words(column), "unit": unit}
    about |= {"attn_type": stratum[0], "memory": stratum[1], "stratum": words_of(data, stratum), "kind": spread.kind}
    about |= {"sd": scale * spread.sd, "floor": scale * spread.floor, "df": spread.df}
    return [
        about
        | {"group": run.group, "cell": run.cell.cell_id, "attempt": run.attempt, "seed": run.cell.seed}
        | {"name": names[run.cell.cell_id], "value": scale * run.value, "difference": scale * run.difference}
        for run in runs
    ]


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """A panel a number, a band a stratum with its standard deviation, in it a line a group of runs."""
    frame = made.frame
    titles = list(dict.fromkeys(frame["measure"]))
    order = strata_of(frame)
    found = looks(order)
    lines = frame.groupby(["measure", "attn_type", "memory"])["group"].nunique().clip(upper=MOST_LINES).max()
    figure = drawing.page(min(TALLEST, len(order) * (0.09 + EACH * int(lines)) + 1.0))
    grid = drawing.panel_column(figure, len(titles), narrow=2, wide=3, sharey=True)
    for axes, title in zip(grid, titles, strict=True):
        _panel(axes, frame[frame["measure"] == title], order, found)
    names = frame.drop_duplicates(["attn_type", "memory"]).set_index(["attn_type", "memory"])["stratum"]
    grid[0].set_yticks(range(len(order)), [names[one] for one in order])
    grid[0].set_ylim(len(order) - 0.45, -0.55)
    return drawing.finished(figure, made.title, made.notes, {})


def _panel(axes: Axes, here: pd.DataFrame, order: list[Stratum], found: dict[Stratum, dict[str, Any]]) -> None:
    largest = max(float(here["difference"].abs().max()), float(here[["sd", "floor"]].to_numpy().max())) or 1.0
    ticks = three_ticks(-largest, largest)
    end = max(largest * 1.06, *map(abs, ticks))
    for place, stratum in enumerate(order):
        part = here[(here["attn_type"] == stratum[0]) & (here["memory"] == stratum[1])]
        if len(part):
            _stratum(axes, part, place, found[stratum])
    axes.set_title(str(here["words"].iloc[0]))
    axes.set_xlim(-end, end)
    axes.set_xticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    axes.axvline(0, color="#000000", linewidth=drawing.line_width(0.7), zorder=1)
    drawing.rows_alone(axes)
    axes.set_xlabel(f"{here['unit'].iloc[0]} from the\nmean of replicates")


def _stratum(axes: Axes, part: pd.DataFrame, place: int, how: dict[str, Any]) -> None:
    """The runs of a stratum around its height, over its standard deviation, which is written at the right."""
    used = float(max(part["sd"].iloc[0], part["floor"].iloc[0]))
    axes.fill_between([-used, used], place - 0.45, place + 0.45, color=how["color"], alpha=0.16, linewidth=0, zorder=1)
    groups = list(dict.fromkeys(part["group"]))
    heights = place + INSIDE * ((np.arange(len(groups)) + 0.5) / len(groups) - 0.5)
    for group, y in zip(groups, heights.tolist(), strict=True):
        runs = part[part["group"] == group]["difference"]
        axes.hlines(
            y, runs.min(), runs.max(), color=how["color"], linewidth=drawing.line_width(0.7), alpha=0.6, zorder=2
        )
        drawn = {name: how[name] for name in ("marker", "color", "markerfacecolor")}
        drawing.points(axes, runs, np.full(len(runs), y), **drawn, zorder=3, markersize=2.6, markeredgewidth=0.7)
    look: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "va": "center",
        "color": how["color"],
        "annotation_clip": False,
    }
    drawing.note(axes, f"±{used:#.2g}".rstrip("."), (1, place), (4, 0), **look)
