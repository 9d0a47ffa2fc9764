"""The figure `interactions`: means by two axes."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ...results.store.store import Store
from ..columns import qualities
from ..data import Lengths, ReportError, gather
from ..layout import DUST
from ..numbers import rounded
from ..stats.effects import factors, numbers_of
from . import style
from .base import Collected, collected, level

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .look import Look

MOST_FACTORS = 6


def collect(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Means of every two axes' combinations, of validation loss and of needle accuracy at the longest length.

    One row a combination: measure, unit (nats/token or %), row_axis, column_axis, row, column (levels), mean, cells.
    At most the first six axes that vary.
    """
    data = gather(store, sweep, revision=revision, lengths=lengths)
    axes = factors(data)[:MOST_FACTORS]
    if len(axes) < 2:
        raise ReportError(f"fewer than two axes of sweep {data.sweep} vary; an interaction needs two")
    rows, origins = [], []
    fewer: dict[tuple[str, ...], str] = {}
    for column in qualities(data):
        numbers = numbers_of(data, column)
        scale, unit = (100, "%") if column.percent else (1, column.unit)
        origins += [(str(c), int(a)) for c, a in zip(numbers["cell"], numbers["attempt"], strict=True)]
        for a, b in combinations(axes, 2):
            for (first, second), group in numbers.groupby([a, b], sort=False):
                about: dict[str, Any] = {"measure": column.heading, "unit": unit, "row_axis": a, "column_axis": b}
                about |= {"row": str(first), "column": str(second)}
                rows.append(about | {"mean": scale * float(group["value"].mean()), "cells": len(group)})
                listed = sum(level(cell, a) == str(first) and level(cell, b) == str(second) for cell in data.cells)
                if len(group) < listed:
                    fewer[column.heading, a, b, str(first), str(second)] = f"{len(group)} of {listed}"
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has a validation loss or a needle accuracy; finish it")
    levels = {axis: data.levels(axis) for axis in axes}
    words = "Means over all cells of a combination. White: no cell has the number."
    notes = [words]
    if fewer:
        counts = ", ".join(dict.fromkeys(fewer.values()))
        notes.append(f"Starred: a mean over fewer cells than the sweep lists at that combination ({counts}).")
    about = {"levels": levels, "fewer": fewer}
    return collected(
        store, data, "interactions", "Means by two axes", pd.DataFrame(rows), origins, notes=notes, **about
    )


def draw(made: Collected, look: Look) -> Figure:
    """A block a measure, with a colour scale of its own; in it a heat map for every two axes, with the means written in."""
    frame, levels = made.frame, made.about["levels"]
    measures = list(dict.fromkeys(frame["measure"]))
    pairs = list(dict.fromkeys(zip(frame["row_axis"], frame["column_axis"], strict=True)))
    # the axis with more levels stands upright, where its names have room
    pairs = [(a, b) if len(levels[a]) >= len(levels[b]) else (b, a) for a, b in pairs]
    columns = min(4, len(pairs))  # five would leave the means too small to read
    down = style.rows_of(len(pairs), columns)
    tall = max(len(levels[axis]) for axis, _ in pairs)
    width = style.WIDTH if columns > 2 else 2.1 * columns + 2.2
    # the words beside a colour scale need room even where there is one row of maps
    figure = style.page(max(1.25, (0.11 * max(tall, 3) + 0.58) * down) * len(measures) + 0.2, width)
    for block, measure in zip(figure.subfigures(len(measures), 1, squeeze=False).flat, measures, strict=True):
        here = frame[frame["measure"] == measure]
        low, high = float(here["mean"].min()), float(here["mean"].max())
        grid = block.subplots(down, columns, squeeze=False)
        drawn: Any = None
        for axes in list(grid.flat)[len(pairs) :]:
            axes.set_axis_off()
        for axes, (a, b) in zip(grid.flat, pairs, strict=False):
            part = here[(here["row_axis"] == a) & (here["column_axis"] == b)]
            turned = here[(here["row_axis"] == b) & (here["column_axis"] == a)]
            table = pd.concat([part, turned.rename(columns={"row": "column", "column": "row"})])
            table = table.pivot(index="row", columns="column", values="mean").reindex(
                index=levels[a], columns=levels[b]
            )
            starred = {
                (r, c)
                for r, row in enumerate(levels[a])
                for c, column in enumerate(levels[b])
                if {(measure, a, b, row, column), (measure, b, a, column, row)} & made.about["fewer"].keys()
            }
            drawn = _heat(axes, table, low, high, 1 if here["unit"].iloc[0] == "%" else 3, starred)
            axes.set_ylabel(a)
            axes.set_xlabel(b)
        unit = here["unit"].iloc[0]
        block.colorbar(drawn, ax=list(grid.flat), shrink=0.85, aspect=14 * down, pad=0.01, label=f"{measure}, {unit}")
    return style.finished(figure, made.title, made.notes, {})


def _heat(
    axes: Axes, table: pd.DataFrame, low: float, high: float, decimals: int, starred: Collection[tuple[int, int]]
) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    norm = Normalize(low, high if high > low else low + 1)
    values = np.ma.masked_invalid(table.to_numpy(dtype=float))
    drawn = axes.pcolormesh(values, cmap=style.MAP, norm=norm, edgecolors="white", linewidth=0.8)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(table.shape[1]) + 0.5, list(table.columns), rotation=90 if _crowded(table) else 0)
    axes.set_yticks(np.arange(table.shape[0]) + 0.5, list(table.index))
    size = 6.2 if table.shape[1] < 3 else 5.4 if table.shape[1] < 4 else 4.0
    for (r, c), value in np.ndenumerate(values):
        if value is not np.ma.masked:
            ink = "white" if colormaps[style.MAP](norm(value))[:3] @ np.array([0.3, 0.59, 0.11]) < 0.5 else "black"
            axes.text(
                c + 0.5,
                r + 0.5,
                rounded(round(float(value), DUST), decimals) + ("*" if (r, c) in starred else ""),
                ha="center",
                va="center",
                color=ink,
                fontsize=size,
            )
    return drawn


def _crowded(table: pd.DataFrame) -> bool:
    """Whether the names of the columns would run into each other side by side."""
    return sum(len(str(name)) for name in table.columns) + 2 * table.shape[1] > 13
