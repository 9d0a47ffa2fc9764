"""Figure `seeds`: variation between replicate runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ....results.store.records import AXES
from ....results.store.store import Store
from ...number_format import Column
from ...stats.noise.run_noise import (
    EFFECTIVE_MODE,
    NEAR_REPLICATE_AXIS,
    STRATUM_AXES,
    NoiseEstimate,
    Replicate,
    replicates,
)
from ...sweep_data import ReportError, SweepData, cell_level
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, cell_labels, collected, frame_origins, level_names
from .forest import POINTS, measure_label, set_panel_title, text_width, three_ticks, unit_range
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

SD_WIDTH = 0.55  # inches right of a panel that a standard deviation and the letter of the next panel take
LEAST_WIDTH = 0.55
"""Least width of a panel in inches, below which fewer stand in a row."""
TALLEST = 8.0  # inches
EACH = 0.075
"""Height of a group's line in inches in the style `paper`."""
CROWD = 12
"""Number of groups of a stratum from which on their runs are drawn without lines between them."""
MAX_LINES = 5
"""Largest number of groups of a stratum that get a height of their own; more of them lie closer."""
NUDGE = 0.34
"""Distance of equal values, as a share of that of neighbouring lines."""
INSIDE = 0.78
"""Share of a stratum's height that its groups take."""
KINDS = {
    "seeds": "seeds of one configuration",
    "near-replicates": "near-replicates that differ only in the regularizer",
}


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the replicate runs of every stratum (cells that share mixer and memory).

    Replicates are the seeds of one configuration. In a stratum without two seeds of any configuration they are
    near-replicates: runs of one seed that differ in a regularizer of negligible weight alone.

    One row per run and number: measure (heading), words, unit, attn_type, memory, stratum (label), place (index of the
    stratum), group (of replicates), kind, cell, attempt, seed, name, value, difference (from the mean of the group), sd
    (between runs, pooled over the groups of the stratum), floor (standard deviation that the trials of an accuracy
    alone make; 0 for other numbers), df. Shares are percentage points.

    Raises:
        ReportError: No configuration has two runs.
    """
    names = cell_labels(data)
    rows: list[dict[str, Any]] = []
    columns = noise_columns(data)
    replicates_by_column = [replicates(data, column) for column in columns]
    order = ordered_strata(data, {stratum for by_stratum in replicates_by_column for stratum in by_stratum})
    for column, groups_by_stratum in zip(columns, replicates_by_column, strict=True):
        for position, stratum in enumerate(order):
            if stratum in groups_by_stratum:
                rows += [
                    row | {"place": position}
                    for row in _rows(data, column, stratum, *groups_by_stratum[stratum], names)
                ]
    if not rows:
        raise ReportError(
            f"no configuration of sweep {data.sweep} has two runs with a validation loss or needle accuracies, "
            "so the variation between replicates is unknown; launch it with seeds: 3"
        )
    frame = pd.DataFrame(rows)
    kinds = " and ".join(KINDS[kind] for kind in dict.fromkeys(frame["kind"]))
    if EFFECTIVE_MODE in data.levels(NEAR_REPLICATE_AXIS) and "near-replicates" in set(frame["kind"]):
        kinds += f" (without {EFFECTIVE_MODE}, whose weight is not negligible)"
    notes = [
        f"Each mark is a run, shown as its difference from the mean of its line; a line joins {kinds}. "
        f"n = {unit_range(list(frame.groupby(['measure', 'stratum']).size()))} runs per row. Shaded: one standard deviation "
        f"to either side, pooled over the lines of a row ({unit_range(list(frame['df']))} degrees of freedom). "
        "Hollow: no memory.",
    ]
    notes += _group_note(data, frame)
    if frame.duplicated(["measure", "stratum", "group", "difference"]).any():
        notes.append("Equal values of a line stand above one another.")
    if (frame["sd"] < frame["floor"]).any():
        notes.append(f"Hatched, {FLOOR_NOTE}")
    near = set(frame["kind"]) == {"near-replicates"}
    title = f"Variation between {'near-replicate' if near else 'replicate'} runs"
    return collected(
        store,
        data,
        "seeds",
        title,
        frame,
        frame_origins(frame),
        notes=notes,
        shown=level_names(data, set(frame["cell"]), STRATUM_AXES),
    )


def _group_note(data: SweepData, frame: pd.DataFrame) -> list[str]:
    """Return the note that names the lines of a row from top to bottom, as a list; empty if rows differ or none is named.

    Args:
        data: The sweep.
        frame: Rows of the figure, with measure, stratum, group and cell.
    """
    cells = {cell.cell_id: cell for cell in data.cells}
    axes = [
        axis
        for axis in (*AXES, *data.extra_axes())
        if axis not in (*STRATUM_AXES, NEAR_REPLICATE_AXIS) and len(data.levels(axis)) > 1
    ]
    named = {
        tuple(
            ", ".join(drawing.level_label(cell_level(cells[cell], axis), axis) for axis in axes)
            for cell in rows.drop_duplicates("group").sort_values("group")["cell"]
        )
        for _, rows in frame.groupby(["measure", "stratum"], sort=False)
    }
    lines = named.pop()
    if named or not axes or not 1 < len(lines) <= MAX_LINES:
        return []
    return [f"Lines of a row, from top to bottom: {'; '.join(lines)}."]


def _rows(
    data: SweepData,
    column: Column,
    stratum: Stratum,
    spread: NoiseEstimate,
    runs: list[Replicate],
    names: dict[str, str],
) -> list[dict[str, Any]]:
    """Return the rows of one number in a stratum, one dict per run.

    Keys: measure, words, unit, attn_type, memory, stratum, kind, sd, floor, df, group, cell, attempt, seed, name, value
    and difference (from the mean of the group). Shares are percentage points.

    Args:
        data: The sweep.
        column: The number.
        stratum: Levels of mixer and memory.
        spread: Spread between its replicates.
        runs: The replicates.
        names: Label by cell id.
    """
    scale, unit = (100, "points") if column.percent else (1, column.unit)
    fields: dict[str, Any] = {"measure": column.heading, "words": measure_label(column), "unit": unit}
    fields |= {
        "attn_type": stratum[0],
        "memory": stratum[1],
        "stratum": stratum_label(data, stratum),
        "kind": spread.kind,
    }
    fields |= {"sd": scale * spread.sd, "floor": scale * spread.floor, "df": spread.df}
    return [
        fields
        | {"group": run.group, "cell": run.cell.cell_id, "attempt": run.attempt, "seed": run.cell.seed}
        | {"name": names[run.cell.cell_id], "value": scale * run.value, "difference": scale * run.difference}
        for run in runs
    ]


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per number: a band per stratum with its standard deviation, in it a line per group of runs.

    x is the difference of a run from the mean of its group of replicates. `look` is not used.
    """
    frame = figure_data.frame
    titles = list(dict.fromkeys(frame["measure"]))
    order = strata_of(frame)
    styles = stratum_styles(order)
    lines = frame.groupby(["measure", "attn_type", "memory"])["group"].nunique().clip(upper=MAX_LINES).max()
    figure = drawing.page(min(TALLEST, len(order) * (0.09 + EACH * int(lines)) + 1.0))
    labels = text_width([str(name) for name in frame["stratum"].unique()], drawing.size("ytick.labelsize"))
    columns = min(len(titles), 2 if figure.get_figwidth() < drawing.NARROW_WIDTH else 3)
    while columns > 1 and (figure.get_figwidth() - labels) / columns - SD_WIDTH < LEAST_WIDTH:
        columns -= 1
    grid = drawing.panel_column(figure, len(titles), narrow=columns, wide=columns, sharey=True)
    for axes, title in zip(grid, titles, strict=True):
        width = (figure.get_figwidth() - labels) / columns - SD_WIDTH
        _draw_panel(axes, frame[frame["measure"] == title], order, styles, width)
        set_panel_title(axes, str(frame[frame["measure"] == title]["words"].iloc[0]), width)
    names = frame.drop_duplicates(["attn_type", "memory"]).set_index(["attn_type", "memory"])["stratum"]
    grid[0].set_yticks(range(len(order)), [names[stratum] for stratum in order])
    grid[0].set_ylim(len(order) - 0.45, -0.55)
    dots = drawing.key(color=drawing.GREY, marker="o", linewidth=drawing.line_width(0.7))
    handles = {
        "runs of one group": dots,
        "± 1 standard deviation": drawing.patch(facecolor=drawing.FAINT, edgecolor="none"),
    }
    handles |= floor_key() if (frame["sd"] < frame["floor"]).any() else {}
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles)


def _draw_panel(
    axes: Axes, panel_rows: pd.DataFrame, order: list[Stratum], styles: dict[Stratum, dict[str, Any]], width: float
) -> None:
    """Draw the strata of a number over the difference from the mean of replicates, with symmetric x limits.

    Each stratum has a shaded band of ± its standard deviation (at least the floor of an accuracy's trials) and a line
    with markers per group of replicates. It sets title, limits, x ticks and x label; strata without rows stay empty.

    Args:
        axes: The panel.
        panel_rows: Rows of the number.
        order: The strata, (mixer, memory), from top to bottom; the index is the height in data.
        styles: Style by stratum.
        width: Width of the panel in inches, for the label below it.
    """
    largest = (
        max(float(panel_rows["difference"].abs().max()), float(panel_rows[["sd", "floor"]].to_numpy().max())) or 1.0
    )
    ticks = three_ticks(-largest, largest)
    end = max(largest * 1.06, *map(abs, ticks))
    for position, stratum in enumerate(order):
        part = panel_rows[(panel_rows["attn_type"] == stratum[0]) & (panel_rows["memory"] == stratum[1])]
        if len(part):
            _draw_stratum(axes, part, position, styles[stratum])
    axes.set_xlim(-end, end)
    axes.set_xticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    axes.axvline(0, color="#000000", linewidth=drawing.line_width(0.7), zorder=1)
    drawing.rows_alone(axes)
    unit = str(panel_rows["unit"].iloc[0]).replace(*POINTS)
    kinds = " and ".join("replicates" if kind == "seeds" else str(kind) for kind in dict.fromkeys(panel_rows["kind"]))
    label = f"{unit} from the mean of {kinds}"
    axes.set_xlabel(label if text_width([label], drawing.size("axes.labelsize")) < width else f"{unit} from\nthe mean")


def _ranks_of_equal_values(values: pd.Series) -> np.ndarray:
    """Return the rank of each value among those equal to it, centred: 0 for one alone, ±0.5 for two."""
    by_value = values.groupby(values.round(9))
    return (by_value.cumcount() - (by_value.transform("size") - 1) / 2).to_numpy(dtype=float)


def _draw_stratum(axes: Axes, part: pd.DataFrame, position: int, stratum_style: dict[str, Any]) -> None:
    """Draw the runs of a stratum around its height, over a band of ± its standard deviation.

    A line joins the runs of a group of replicates; x is the difference of a run from the mean of its group. The
    standard deviation, at least the floor of an accuracy's trials, is written at the right.

    Args:
        axes: The panel.
        part: Rows of the stratum.
        position: Height of the stratum in data.
        stratum_style: Style of the stratum.
    """
    used = float(max(part["sd"].iloc[0], part["floor"].iloc[0]))
    is_bound = bool(part["sd"].iloc[0] < part["floor"].iloc[0])
    band: dict[str, Any] = {"color": stratum_style["color"], "alpha": 0.2, "linewidth": 0}
    if is_bound:
        band = {"facecolor": "none", "edgecolor": drawing.FAINT, "hatch": "//////", "linewidth": 0}
    axes.fill_between([-used, used], position - 0.45, position + 0.45, zorder=1, **band)
    groups = list(dict.fromkeys(part["group"]))
    heights = position + INSIDE * ((np.arange(len(groups)) + 0.5) / len(groups) - 0.5)
    crowded = len(groups) >= CROWD
    for group, y in zip(groups, heights.tolist(), strict=True):
        runs = part[part["group"] == group]["difference"]
        line = {"color": stratum_style["color"], "linewidth": drawing.line_width(0.7), "alpha": 0.6, "zorder": 2}
        if not crowded:
            axes.hlines(y, runs.min(), runs.max(), **line)
        drawn = {name: stratum_style[name] for name in ("marker", "color", "markerfacecolor")}
        size, edge = (1.6, 0.45) if crowded else (2.6, 0.7)
        nudged = y + NUDGE * INSIDE / len(groups) * _ranks_of_equal_values(runs)
        drawing.points(axes, runs, nudged, **drawn, zorder=3, markersize=size, markeredgewidth=edge)
    style: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "va": "center",
        "color": stratum_style["color"],
        "annotation_clip": False,
    }
    drawing.note(axes, f"±{used:#.2g}".rstrip(".") + AT_FLOOR * is_bound, (1, position), (4, 0), **style)
    if not part["difference"].abs().max():
        even: dict[str, Any] = {"va": "center"}
        drawing.note(
            axes,
            f"all {part['value'].iloc[0]:.3g}{' %' if part['unit'].iloc[0] == POINTS[0] else ''}"
            if part["value"].nunique() == 1
            else "no differences",
            (0, position),
            (6, 0),
            **even,
        )
