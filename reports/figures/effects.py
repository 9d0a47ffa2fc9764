"""The figure `effects`: what every level does, with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from ...results.store.store import Store
from ..data import Lengths, ReportError, gather
from ..stats.effects import effects, main_measures
from . import style
from .base import Collected, collected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .look import Look


def collect(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """The effect of every level of every axis on every number of the complete results, by matched pairs.

    One row an effect: measure (heading), unit (that of the number, or points), axis, level, reference, pairs, mean, low, high (95%
    interval of the mean, NaN for a single pair). Accuracies and MFU are in points.
    """
    data = gather(store, sweep, revision=revision, lengths=lengths)
    columns = main_measures(data)
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    for one in effects(data, columns, within=False):
        scale, unit = (100, "points") if one.measure.percent else (1, one.measure.unit)
        about: dict[str, Any] = {"measure": one.measure.heading, "unit": unit, "axis": one.axis, "level": one.level}
        about |= {"reference": one.reference, "pairs": one.pairs}
        rows.append(about | {"mean": scale * one.mean, "low": scale * one.low, "high": scale * one.high})
        origins += one.origins
    if not rows:
        raise ReportError(
            f"sweep {data.sweep} has no two measured cells that differ in one axis alone; measure more cells"
        )
    words = (
        "Mean difference over matched pairs, level minus reference; bars: 95% intervals; filled where they leave out "
        "zero."
    )
    better_is = {column.heading: column.direction for column in columns}
    frame = pd.DataFrame(rows)
    return collected(store, data, "effects", "Main effects", frame, origins, notes=[words], better=better_is)


def draw(made: Collected, look: Look) -> Figure:
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
