"""Figure `power`: smallest detectable difference by number of pairs, mixer and memory."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from scipy.special import chdtri

from ....results.store.store import Store
from ...render.style import memory_look
from ...stats.effects.needle_baseline import lacks_recall
from ...stats.noise.run_noise import STRATUM_AXES, detectable
from ...stats.power_analysis import PowerAnalysis, power_analyses
from ...sweep_data import ReportError, SweepData, cell_level
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected, level_names
from ..canvas.labels import label_ends
from ..canvas.line_drawing import reference_line
from .forest import POINTS, measure_label, unit_range
from .strata import (
    AT_FLOOR,
    FLOOR_NOTE,
    Stratum,
    floor_key,
    noise_columns,
    ordered_strata,
    strata_of,
    stratum_label,
    stratum_styles,
)

MIN_PAIRS, MAX_PAIRS = 3, 256
"""Range of pairs of the curves: Student's t of two pairs detects nothing."""
PAIRS = (3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_NAMED_LINES = 10
"""Largest number of strata that are all labelled; with more, those of most and of least noise are."""
RANGE_BAR_AT, MAX_RANGE_BAR = (0.03, 0.07), 0.35  # foot of the bar in shares of a panel, and its largest height
BOUND_WIDTH = 0.6  # points in the style `paper`, width of a line that is a lower bound
MAX_POINTS = 50.0  # percentage points: Student's t supposes numbers without bounds, which no larger difference allows
LINE_WIDTH = 1.0  # points in the style `paper`, so that near lines stand apart


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the detectable difference (80 % power) by number of pairs, per number and stratum with a spread.

    A stratum is the cells that share mixer and memory; those without any spread, of runs or of an accuracy's trials, are left out. One row per number, stratum
    and count of pairs: measure (heading), words, unit, attn_type, memory, stratum (label), place (index of the
    stratum), kind (of the replicates), run_sd (between runs), sd (of a run, at least the floor of an accuracy's trials),
    df, pairs, detectable, design (the most pairs that the grid has there), floor (sampling error of an accuracy's
    trials), recalls (False at or below the constant-digit baseline). Strata whose runs all have the same accuracy at or
    below that baseline are left out. Shares are percentage points. Counts are 3, 4, 5, 6, 8,
    10, 12, 16, 24, ..., 192, 256, and that of the design if it lies between 3 and 256.

    Raises:
        ReportError: The spread between runs is unknown or zero.
    """
    analyses = power_analyses(data, noise_columns(data))
    still = [plan for plan in analyses if plan.spread.sd == 0 and not _recalls(data, plan)]
    moving = [plan for plan in analyses if plan.spread.effective_sd > 0 and plan not in still]
    if not moving:
        why = (
            f"no number of sweep {data.sweep} varies between replicates"
            if analyses
            else f"no configuration of sweep {data.sweep} has two runs with a validation loss or needle accuracies"
        )
        raise ReportError(f"{why}, so the detectable difference is unknown; launch it with seeds: 3")
    order = ordered_strata(data, {plan.stratum for plan in moving})
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
        "Smallest true difference that a mean over so many matched pairs detects with 80% power at a "
        f"two-sided 5% (Student's t), from the standard deviation between {kinds} of a mixer and memory "
        f"({unit_range([plan.spread.df for plan in moving])} degrees of freedom; within the bar, the 95 % range, lines "
        "are not known to differ)."
    ]
    if any(plan.spread.sd < plan.spread.floor for plan in moving):
        notes.append(FLOOR_NOTE)
    frame = pd.DataFrame(rows)
    if (frame["pairs"] == frame["design"]).any():
        notes.append("Dotted: the most pairs that this grid has within one mixer and memory.")
    if not frame["recalls"].all():
        notes.append(
            "No recall: mean at or below the constant-digit baseline; the floor, not precision, keeps these runs together."
        )
    if still:
        names = " and ".join(dict.fromkeys(stratum_label(data, plan.stratum) for plan in still))
        notes.append(f"Left out, since all runs have one accuracy without recall: {names}.")
    notes += _coinciding_note(frame)
    if max(sum(plan.measure.heading == name for plan in moving) for name in columns) > MAX_NAMED_LINES:
        notes.append(
            f"Labelled: the {MAX_NAMED_LINES // 2} strata with most and the {MAX_NAMED_LINES // 2} with least noise."
        )
    if len(moving) + len(still) < len(analyses):
        fixed = [
            f"{stratum_label(data, p.stratum)} ({measure_label(p.measure)})"
            for p in analyses
            if p.spread.effective_sd <= 0 and p not in still
        ]
        notes.append(f"Left out, since no spread was seen between their runs: {', '.join(fixed)}.")
    origins = [origin for plan in moving for origin in plan.origins]
    return collected(
        store, data, "power", "Detectable difference by sample size", frame, origins, notes=notes, shown=level_names(data, {cell for cell, _ in origins}, STRATUM_AXES),
    )  # fmt: skip


def _recalls(data: SweepData, plan: PowerAnalysis) -> bool:
    """Return False for a needle accuracy whose stratum is on average at or below the constant-digit baseline."""
    levels = dict(zip(STRATUM_AXES, plan.stratum, strict=True))
    cells = [cell for cell in data.cells if all(cell_level(cell, axis) == level for axis, level in levels.items())]
    return not lacks_recall(data, plan.measure, cells)


def _range_of_sd(df: int) -> tuple[float, float]:
    """Return the ends of the 95 % range of a standard deviation with `df` degrees of freedom, as factors of it."""
    return math.sqrt(df / chdtri(df, 0.025)), math.sqrt(df / chdtri(df, 0.975))


def _coinciding_note(frame: pd.DataFrame) -> list[str]:
    """Return the note on lines with equal differences, as a list; empty without any.

    Args:
        frame: Rows of the figure.
    """
    ends = frame[frame["pairs"] == MAX_PAIRS]
    groups = [
        f"{' and '.join(rows['stratum'])} ({measure})"
        for (measure, _), rows in ends.groupby(["words", "detectable"], sort=False)
        if len(rows) > 1
    ]
    return [f"Coinciding lines: {'; '.join(groups)}."] if groups else []


def _rows(data: Any, plan: PowerAnalysis) -> list[dict[str, Any]]:
    """Return the rows of one analysis: one dict per number of pairs, ascending.

    Keys: measure (heading), words, unit, attn_type, memory, stratum (label), kind, run_sd (between runs), sd (the
    larger of run_sd and floor), df, pairs, detectable, design (the most pairs that the grid has there), floor
    (sampling error of an accuracy's trials) and recalls. Shares are percentage points.
    """
    scale, unit = (100, "points") if plan.measure.percent else (1, plan.measure.unit)
    fields: dict[str, Any] = {"measure": plan.measure.heading, "words": measure_label(plan.measure), "unit": unit}
    fields |= {"attn_type": plan.stratum[0], "memory": plan.stratum[1], "stratum": stratum_label(data, plan.stratum)}
    fields |= {
        "kind": plan.spread.kind,
        "run_sd": scale * plan.spread.sd,
        "sd": scale * plan.spread.effective_sd,
        "df": plan.spread.df,
    }
    counts = sorted({*PAIRS, *([plan.pairs] if MIN_PAIRS <= plan.pairs <= MAX_PAIRS else [])})
    return [
        fields
        | {
            "pairs": pairs,
            "detectable": scale * detectable(plan.spread, pairs),
            "design": plan.pairs,
            "floor": scale * plan.spread.floor,
            "recalls": _recalls(data, plan),
        }
        for pairs in counts
    ]


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per number and a line per stratum, labelled at its end, and dotted lines at the pairs of the design.

    Both axes are logarithmic. Of more than ten strata only the five of least and the five of most noise are labelled;
    the other lines are thin and grey. `look` is not used.
    """
    frame = figure_data.frame
    titles = list(dict.fromkeys(frame["measure"]))
    figure = drawing.page(2.4, drawing.PAGE_WIDTH if len(titles) > 1 else 4.6)
    styles = stratum_styles(strata_of(frame))
    grid = drawing.panel_column(figure, len(titles))
    named = {title: _named_line_ends(frame[frame["measure"] == title]) for title in titles}
    for axes, title in zip(grid, titles, strict=True):
        _draw_panel(axes, frame[frame["measure"] == title], styles, set(named[title]["stratum"]))
    handles: dict[str, Any] = {}
    for memory in sorted(set(frame["memory"]), key=drawing.off_first) if frame["memory"].nunique() > 1 else ():
        handles[drawing.level_label(memory, "memory")] = drawing.key(
            **memory_look(drawing.INK, memory) | {"marker": ""}
        )
    if (frame["pairs"] == frame["design"]).any():
        handles["pairs in this grid"] = drawing.key(**reference_line())
    if not frame["recalls"].all():
        handles["no recall"] = drawing.key(color=drawing.GREY, linewidth=drawing.line_width(BOUND_WIDTH))
    if (frame["run_sd"] < frame["floor"]).any():
        handles |= floor_key()
    finished = drawing.finished(figure, figure_data.title, figure_data.notes, handles)
    for axes, title in zip(grid, titles, strict=True):
        names = [
            (
                row["stratum"] + AT_FLOOR * (row["run_sd"] < row["floor"]),
                row["detectable"],
                _ink(row, styles),
            )
            for _, row in named[title].iterrows()
        ]
        label_ends(axes, names, leaders=True)
    return finished


def _named_line_ends(panel_rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows at 256 pairs whose lines are labelled.

    These are all up to ten; of more, the five of least and then the five of most noise.

    Args:
        panel_rows: Rows of one number.
    """
    ends = panel_rows[panel_rows["pairs"] == MAX_PAIRS]
    if len(ends) <= MAX_NAMED_LINES:
        return ends
    ranked = ends.sort_values("detectable", kind="stable")
    return pd.concat([ranked.head(MAX_NAMED_LINES // 2), ranked.tail(MAX_NAMED_LINES // 2)])


def _draw_panel(axes: Axes, panel_rows: pd.DataFrame, styles: dict[Stratum, dict[str, Any]], named: set[str]) -> None:
    """Draw the lines of a number, labelled ones in colour over the others, which are thin and grey.

    It sets title, scales, limits, ticks and axis labels too. Dotted lines stand at the pairs of the design.

    Args:
        axes: The panel.
        panel_rows: Rows of the number.
        styles: Style by stratum, (mixer, memory).
        named: Labels of the strata that are labelled.
    """
    unit = str(panel_rows["unit"].iloc[0])
    for _, line in panel_rows.groupby("stratum", sort=False):
        if line["stratum"].iloc[0] not in named:
            axes.plot(
                line["pairs"], line["detectable"], color=drawing.FAINT, linewidth=drawing.line_width(0.6), zorder=2
            )
            continue
        style = styles[line["attn_type"].iloc[0], line["memory"].iloc[0]]
        is_thin = bool((line["run_sd"] < line["floor"]).iloc[0]) or not line["recalls"].iloc[0]
        look: dict[str, Any] = {"linewidth": drawing.line_width(BOUND_WIDTH if is_thin else LINE_WIDTH)}
        look |= {"color": _ink(line.iloc[0], styles), "linestyle": style["linestyle"]}
        axes.plot(line["pairs"], line["detectable"], zorder=3, **look)
    for pairs in sorted(set(panel_rows["pairs"]) & set(panel_rows["design"])):
        axes.axvline(pairs, **reference_line(), zorder=2.5)
    _write_design_point(axes, panel_rows, unit, styles)
    axes.set_title(str(panel_rows["words"].iloc[0]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(MIN_PAIRS, MAX_PAIRS)
    ticks = [4, 8, 16, 32, 64, 128, MAX_PAIRS]
    shown = ticks[:: 2 if len(ticks) * drawing.size("xtick.labelsize") > 60 else 1]
    drawing.put_ticks(axes.xaxis, {tick: str(tick) for tick in shown})
    low, high = float(panel_rows["detectable"].min()) / 1.2, float(panel_rows["detectable"].max()) * 1.2
    if unit == "points":
        high = min(high, MAX_POINTS)
    low = min(low, high / 10)
    axes.set_ylim(low, high)
    drawing.log_ticks(axes.yaxis, None)
    _draw_range_bar(axes, int(panel_rows["df"].min()))
    axes.set_xlabel("matched pairs")
    axes.set_ylabel(f"detectable difference,\n{unit.replace(*POINTS)}")


def _ink(row: Any, styles: dict[Stratum, dict[str, Any]]) -> str:
    """Return the ink of a line: that of its mixer, or grey without recall."""
    return str(styles[row["attn_type"], row["memory"]]["color"]) if row["recalls"] else drawing.GREY


def _draw_range_bar(axes: Axes, df: int) -> None:
    """Draw the 95 % range of every line as an upright bar in the lower left corner, below the lines.

    Args:
        axes: The panel, with its limits.
        df: Least degrees of freedom of the lines.
    """
    low, high = axes.get_ylim()
    least, most = _range_of_sd(df)
    length = math.log(most / least) / math.log(high / low)
    if length > MAX_RANGE_BAR:
        return
    foot = RANGE_BAR_AT[1]
    look: dict[str, Any] = {"color": drawing.INK, "linewidth": drawing.line_width(0.8), "transform": axes.transAxes}
    look |= {"label": "_guide"}
    axes.plot([RANGE_BAR_AT[0]] * 2, [foot, foot + length], marker="_", markersize=drawing.line_width(4), **look)
    side: dict[str, Any] = {"xycoords": "axes fraction", "va": "center", "bbox": drawing.BACKING}
    drawing.note(axes, "95 %\nrange", (RANGE_BAR_AT[0], foot + length / 2), (4, 0), linespacing=1.0, **side)


def _write_design_point(axes: Axes, panel_rows: pd.DataFrame, unit: str, styles: dict[Stratum, dict[str, Any]]) -> None:
    """Write in the upper right corner how small a difference the pairs of the design detect in the highest line with recall, in its colour."""
    rings = panel_rows[(panel_rows["pairs"] == panel_rows["design"]) & panel_rows["recalls"]].sort_values("detectable")
    if rings.empty:
        return
    colour = _ink(rings.iloc[-1], styles)
    pairs, amount = rings[["pairs", "detectable"]].iloc[-1]
    # the lines fall, which leaves the upper right corner free
    style: dict[str, Any] = {"color": colour, "va": "top", "ha": "right", "linespacing": 1.1, "zorder": 5}
    style |= {"bbox": drawing.BACKING, "xycoords": "axes fraction"}
    worst = f"worst{' with recall' * (not panel_rows['recalls'].all())}: " if len(rings) > 1 else ""
    text = f"{worst}{rings['stratum'].iloc[-1]},\n{amount:.2g} {unit.replace(*POINTS)}\nwith {pairs:g} pairs"
    drawing.note(axes, text, (0.98, 0.98), **style)
