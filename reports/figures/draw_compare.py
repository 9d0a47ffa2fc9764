"""Frame -> matplotlib figure, for the figures that hold levels or configurations against each other."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..numbers import rounded
from ..tables.layout import DUST
from . import style
from .base import Collected

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOM = 0.035  # of an axis, that stays free beside the outermost points
MOST_NAMED = 12  # points of a front that are named in the legend


def effects(made: Collected) -> Figure:
    """A panel a measure, a row a level; points with intervals."""
    from matplotlib.lines import Line2D

    frame = made.frame
    names = list(dict.fromkeys(frame["measure"]))
    keys = list(dict.fromkeys(zip(frame["axis"], frame["level"], frame["reference"], strict=True)))
    figure = style.page((0.2 * len(keys) + 0.75) * style.rows_of(len(names), 4))
    for axes, name in zip(style.panels(figure, names, columns=4, sharey=True), names, strict=True):
        here = frame[frame["measure"] == name]
        for _, one in here.iterrows():
            y = keys.index((one["axis"], one["level"], one["reference"]))
            known = not pd.isna(one["low"])
            sure = known and (one["low"] > 0 or one["high"] < 0)
            ink = style.INKS[0] if known else style.GREY
            if known:
                axes.hlines(y, one["low"], one["high"], color=ink, linewidth=1.4)
            axes.plot(
                one["mean"],
                y,
                marker="o",
                color=ink,
                markerfacecolor=ink if sure else "white",
                linestyle="none",
                zorder=3,
            )
        axes.axvline(0, color="#000000", linewidth=0.7, zorder=1)
        sign = {1: "more is better", -1: "less is better", 0: ""}[made.about["better"][name]]
        axes.set_xlabel("\n".join(filter(None, (here["unit"].iloc[0], sign))))
        axes.locator_params(axis="x", nbins=3)
        axes.margins(x=0.08)
        axes.set_yticks(range(len(keys)), [f"{axis}: {level} - {reference}" for axis, level, reference in keys])
        axes.set_ylim(len(keys) - 0.5, -0.5)
    handles = {
        "interval leaves out zero": Line2D([], [], color=style.INKS[0], marker="o"),
        "interval holds zero": Line2D([], [], color=style.INKS[0], marker="o", markerfacecolor="white"),
    }
    if frame["low"].isna().any():
        handles["one pair, no interval"] = Line2D(
            [], [], color=style.GREY, marker="o", markerfacecolor="white", linestyle="none"
        )
    return style.finished(figure, made.title, made.notes, handles)


def interactions(made: Collected) -> Figure:
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


def quality_speed(made: Collected) -> Figure:
    """A panel a quality; colour and marker are the mixer, filled with memory; the front stepped, ringed and numbered."""
    from matplotlib.lines import Line2D

    frame = made.frame
    names = list(dict.fromkeys(frame["quality"]))
    types = list(dict.fromkeys(frame["attn_type"]))
    memories = sorted(dict.fromkeys(frame["memory"]), key=lambda word: word != "off")
    front = list(dict.fromkeys(frame[frame["front"]].sort_values("speed", ascending=False)["name"]))
    listed = front[:MOST_NAMED]
    figure = style.page(2.9, style.width_of(len(names), 3.6))
    for axes, quality in zip(style.panels(figure, [""] * len(names), columns=2), names, strict=True):
        here = frame[frame["quality"] == quality]
        for _, one in here.iterrows():
            how = style.look(
                types.index(one["attn_type"]), 1 if one["memory"] == memories[0] and len(memories) > 1 else 0
            )
            axes.plot(one["speed"], one["value"], **(how | {"linestyle": "none"}))
        for _, one in here.iterrows():
            if told := made.about["fewer"].get((quality, one["name"])):
                axes.annotate(
                    told,
                    (one["speed"], one["value"]),
                    xytext=(0, -9),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6,
                )
        kept = here[here["front"]].sort_values("speed")
        axes.step(kept["speed"], kept["value"], where="pre", color=style.GREY, linewidth=0.9, zorder=1)
        axes.plot(
            kept["speed"],
            kept["value"],
            linestyle="none",
            marker="o",
            markersize=8,
            markerfacecolor="none",
            markeredgecolor="#000000",
        )
        axes.margins(ROOM + 0.06, ROOM + 0.06)
        share = quality.startswith("Ndl")
        if share and here["value"].max() - here["value"].min() < 5:
            axes.set_ylim(here["value"].min() - 5, here["value"].max() + 5)
        axes.set_ylabel(f"{quality}, {'% (more is better)' if share else 'nats per token (less is better)'}")
        axes.set_xlabel(
            f"{here['speed_name'].iloc[0]}{', %' if here['speed_name'].iloc[0] == 'MFU' else ''} (more is better)"
        )
        axes.locator_params(axis="x", nbins=5)
        numbered = [
            (str(listed.index(one["name"]) + 1), one["speed"], one["value"])
            for _, one in kept.iterrows()
            if one["name"] in listed
        ]
        style.spread_labels(figure, axes, numbered, list(zip(here["speed"], here["value"], strict=True)))
    handles: dict[str, Any] = {}
    for place, kind in enumerate(types):
        for second, memory in enumerate(memories):
            if ((frame["attn_type"] == kind) & (frame["memory"] == memory)).any():
                how = style.look(place, 1 if second == 0 and len(memories) > 1 else 0) | {"linestyle": "none"}
                handles[f"{kind}, memory {memory}" if len(memories) > 1 else kind] = Line2D([], [], **how)
    for place, name in enumerate(listed, start=1):
        # a configuration may be named as a mixer is
        handles[f"front: {name}"] = Line2D([], [], linestyle="none", marker=f"${place}$", color="#000000", markersize=6)
    return style.finished(figure, made.title, made.notes, handles, columns=3)
