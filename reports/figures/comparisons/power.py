"""The figure `power`: how small a difference so many pairs show, by mixer and memory."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ....results.store.store import Store
from ...stats.noise.run_noise import detectable
from ...stats.power_analysis import PowerAnalysis, power_analyses
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.labels import at_ends
from .forest import measure_words
from .strata import Stratum, in_order, looks, planned_measures, strata_of, words_of

FEWEST, MOST = 3, 256
"""Pairs over which the curves go: two pairs have a t that shows nothing."""
PAIRS = (3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_NAMED = 10
"""Strata of a number up to which each has its name at the end of its line; of more, those of most and of least noise have."""
WHOLE = 100.0  # points: no share differs by more


def collect(store: Store, data: SweepData) -> FigureData:
    """The smallest difference that a mean over so many pairs shows with 80% power, within every stratum of known spread.

    One row a number, stratum and count of pairs: measure (heading), words, unit, attn_type, memory, stratum (in words), place (of the
    stratum), kind (of the replicates), sd (of a run), df, pairs, detectable, design (the most pairs that the grid has there). Shares in points.
    """
    found = power_analyses(data, planned_measures(data))
    moving = [plan for plan in found if plan.spread.used > 0]
    if not moving:
        why = (
            f"no number of sweep {data.sweep} varies between runs that ought to agree"
            if found
            else f"no configuration of sweep {data.sweep} has two runs with a validation loss or needle accuracies"
        )
        raise ReportError(f"{why}, so how large a difference it can see is not known; launch it with seeds: 3")
    order = in_order(data, {plan.stratum for plan in moving})
    ranked = sorted(moving, key=lambda plan: order.index(plan.stratum))
    columns = list(dict.fromkeys(plan.measure.heading for plan in moving))
    rows = [
        row | {"place": order.index(plan.stratum)}
        for name in columns
        for plan in ranked
        if plan.measure.heading == name
        for row in _rows(data, plan)
    ]
    kinds = " and ".join(dict.fromkeys(plan.spread.kind for plan in moving))
    notes = [
        "The smallest true difference that a mean over so many matched pairs shows with 80% power at a two-sided 5% (Student's t), "
        f"from the spread between {kinds} of the same mixer and memory, and of an accuracy at least that of its trials."
    ]
    if max(sum(plan.measure.heading == name for plan in moving) for name in columns) > MOST_NAMED:
        notes.append(
            f"Named: the {MOST_NAMED // 2} of most and the {MOST_NAMED // 2} of least noise; all of them: --table power."
        )
    if len(moving) < len(found):
        still = [f"{p.measure.heading} ({words_of(data, p.stratum)})" for p in found if p.spread.used <= 0]
        notes.append(f"Left out, since replicates never differ: {', '.join(still)}.")
    origins = [origin for plan in moving for origin in plan.origins]
    return collected(store, data, "power", "Differences that pairs can show", pd.DataFrame(rows), origins, notes=notes)


def _rows(data: Any, plan: PowerAnalysis) -> list[dict[str, Any]]:
    scale, unit = (100, "points") if plan.measure.percent else (1, plan.measure.unit)
    about: dict[str, Any] = {"measure": plan.measure.heading, "words": measure_words(plan.measure), "unit": unit}
    about |= {"attn_type": plan.stratum[0], "memory": plan.stratum[1], "stratum": words_of(data, plan.stratum)}
    about |= {"kind": plan.spread.kind, "sd": scale * plan.spread.used, "df": plan.spread.df}
    counts = sorted({*PAIRS, *([plan.pairs] if FEWEST <= plan.pairs <= MOST else [])})
    return [
        about | {"pairs": pairs, "detectable": scale * detectable(plan.spread, pairs), "design": plan.pairs}
        for pairs in counts
    ]


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """A panel a number, a line a stratum, named at its end; rings where the design stands."""
    frame = made.frame
    titles = list(dict.fromkeys(frame["measure"]))
    figure = drawing.page(2.5, drawing.WIDTH if len(titles) > 1 else 4.6)
    found = looks(strata_of(frame))
    grid = drawing.panel_column(figure, len(titles))
    named = {title: _named(frame[frame["measure"] == title]) for title in titles}
    for axes, title in zip(grid, titles, strict=True):
        _panel(axes, frame[frame["measure"] == title], found, set(named[title]["stratum"]))
    ring = drawing.key(linestyle="none", marker="o", color=drawing.GREY, markerfacecolor="white")
    rings = {"the pairs that this grid has": ring} if (frame["pairs"] == frame["design"]).any() else {}
    finished = drawing.finished(figure, made.title, made.notes, rings)
    for axes, title in zip(grid, titles, strict=True):
        names = [
            (row["stratum"], row["detectable"], found[row["attn_type"], row["memory"]]["color"])
            for _, row in named[title].iterrows()
        ]
        at_ends(axes, names)
    return finished


def _named(here: pd.DataFrame) -> pd.DataFrame:
    """The ends of the lines that are named."""
    ends = here[here["pairs"] == MOST]
    if len(ends) <= MOST_NAMED:
        return ends
    ranked = ends.sort_values("detectable", kind="stable")
    return pd.concat([ranked.head(MOST_NAMED // 2), ranked.tail(MOST_NAMED // 2)])


def _panel(axes: Axes, here: pd.DataFrame, found: dict[Stratum, dict[str, Any]], named: set[str]) -> None:
    """The lines of a number, the named ones over the others, which are thin and grey."""
    unit = str(here["unit"].iloc[0])
    for _, line in here.groupby("stratum", sort=False):
        if line["stratum"].iloc[0] not in named:
            axes.plot(
                line["pairs"], line["detectable"], color=drawing.FAINT, linewidth=drawing.line_width(0.6), zorder=2
            )
            continue
        how = found[line["attn_type"].iloc[0], line["memory"].iloc[0]]
        axes.plot(line["pairs"], line["detectable"], color=how["color"], linestyle=how["linestyle"], zorder=3)
        ring = line[line["pairs"] == line["design"]]
        drawing.points(axes, ring["pairs"], ring["detectable"], color=how["color"], markerfacecolor="white", zorder=4)
    _told(axes, here, unit)
    axes.set_title(str(here["words"].iloc[0]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(FEWEST, MOST)
    ticks = [4, 8, 16, 32, 64, 128, MOST]
    shown = ticks[:: 2 if len(ticks) * drawing.size("xtick.labelsize") > 60 else 1]
    drawing.put_ticks(axes.xaxis, {tick: str(tick) for tick in shown})
    low, high = float(here["detectable"].min()) / 1.2, float(here["detectable"].max()) * 1.2
    if unit == "points":
        high = min(high, WHOLE)
    low = min(low, high / 10)
    axes.set_ylim(low, high)
    drawing.log_ticks(axes.yaxis, None)
    axes.set_xlabel("matched pairs")
    axes.set_ylabel(f"smallest difference seen, {unit}")


def _told(axes: Axes, here: pd.DataFrame, unit: str) -> None:
    """Writes beside the highest ring what those pairs show."""
    rings = here[here["pairs"] == here["design"]].sort_values("detectable")
    if rings.empty:
        return
    pairs, amount = rings[["pairs", "detectable"]].iloc[-1]
    look: dict[str, Any] = {"va": "bottom", "linespacing": 1.1, "bbox": drawing.BACKING, "zorder": 5}
    drawing.note(axes, f"{amount:.2g} {unit}\nwith {pairs:g} pairs", (pairs, amount), (5, 4), **look)
