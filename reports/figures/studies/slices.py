"""Figure `slices`: value of every trial over each searched setting."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...stats.study_data import Objective, Study, at_common_rung, level_text, require_done_trials, rung_note, study_of
from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.distance_scale import DistanceScale
from ..canvas.scales import Scale, short_numbers
from . import settings

MIN_TRIALS = 2
MAX_COLUMNS = 4
"""Largest number of panels side by side."""
TRIAL_COLOURS = ("later", "#dcdcdc", "#7d7d7d", drawing.INK)
"""Name of the colour map of trials, and its colours from the first trial to the last."""
SPREAD = 0.7  # share of a level's space over which its trials are spread
SHADES = 4  # parts of the study, each with a shade of its own
LEVEL_FILL = "#f1f1f1"  # shade of the width of a level
STEP = 0.17  # distance of neighbours in a level, as a share of its space
ROWS = 20.0  # values nearer than this part of the y axis stand side by side


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the values of finished trials over each setting, one row per objective, setting and trial.

    Columns: number, cell, attempt, objective, label, direction, value (shares in %), setting (dotted path), name (of
    the setting, short), level (as text), place (position on the axis: the number of a setting with a range, else the
    index of the level), best (True for the best trial by final values, or for all of the Pareto front). A trial that
    lacks a setting has no row for it. Where a pruner left too few finished trials, all are compared at their last
    common validation (`at_common_rung`).

    Raises:
        ReportError: The sweep is no study, or fewer than two trials are finished.
    """
    study = require_done_trials(at_common_rung(study_of(store, data)), MIN_TRIALS, "the figure slices")
    rows = [
        row for objective in study.objectives for path in study.search.ranges for row in _rows(study, objective, path)
    ]
    frame = pd.DataFrame(rows).astype({"value": float, "place": float})
    notes = [
        f"Each mark is a {study.trial_noun} (n = {len(study.done)}), coloured by its number in the study, later quarters darker; ringed: {settings.ring_label(study)}. "
        "Marks of a panel differ in the other settings too, whose effect may hide or imitate its own."
    ]
    first = study.objectives[0]
    if _distances(frame[frame["objective"] == first.name]) is not None:
        notes.append(settings.distance_note(first.sign))
    scales = {path: settings.scale_of(study, path) for path in study.search.ranges}
    if any(_is_of_levels(scale) for scale in scales.values()):
        notes.append("Shaded: the width of a level; its trials of about the same value are drawn side by side.")
    return collected(
        store, study.data, "slices", "Objective values by setting", frame, study.origins(study.done), notes=[*notes, *rung_note(study)],
        scales=scales, last=study.trials[-1].number,
        ring=settings.ring_label(study),
    )  # fmt: skip


def _rows(study: Study, objective: Objective, path: str) -> list[dict[str, Any]]:
    """Return the rows of one objective and setting, a dict per finished trial, by trial number.

    Keys: number, cell, attempt, objective, label, direction, value, setting, name, level (as text), place (position on
    the axis) and best. Trials without the setting are left out.
    """
    rows = []
    for trial in study.done:
        position = settings.axis_position(study, path, trial.params)
        if trial.values is None or math.isnan(position):
            continue
        row = settings.trial_row(study, trial) | {"objective": objective.name, "label": objective.label}
        row |= {"direction": objective.direction, "value": objective.display_value(trial.values[objective.index])}
        row |= {"setting": path, "name": study.names[path], "level": level_text(trial.params[path]), "place": position}
        rows.append(row | {"best": trial.number in study.best})
    return rows


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per setting and objective with a marker per trial: the later the trial, the darker.

    Trials that none beats are ringed. Panels of an objective share their y axis, and all share a colour bar of trial
    numbers. `look` gives the scale of the figure's height.
    """
    from matplotlib.colors import BoundaryNorm

    frame = figure_data.frame
    objectives, paths = (list(dict.fromkeys(frame[name])) for name in ("objective", "setting"))
    figure = drawing.page(1.0, drawing.width_of(max(2, len(paths))))
    narrow = figure.get_figwidth() < drawing.NARROW_WIDTH
    if len(objectives) > 1 and (narrow or len(paths) > MAX_COLUMNS):
        # one row per setting, so that panels of the same objective are below each other
        pairs = [(objective, path) for path in paths for objective in objectives]
        columns = min(len(objectives), 2 if narrow else 3)
    else:
        pairs = [(objective, path) for objective in objectives for path in paths]
        columns = len(paths) if len(objectives) > 1 else _panel_columns(len(paths), narrow)
    figure.set_figheight((drawing.PANEL_HEIGHT + 0.1) * drawing.rows_of(len(pairs), columns) * look.scale)
    grid = drawing.panels(figure, [""] * len(pairs), columns=columns)
    norm = BoundaryNorm(np.linspace(0, max(SHADES, figure_data.draw_options["last"] + 1), SHADES + 1).round(), 256)
    limits = {name: _y_limits(frame[frame["objective"] == name]) for name in objectives}
    # the first objective alone, which the note describes
    distances = {objectives[0]: _distances(frame[frame["objective"] == objectives[0]])}
    for index, (axes, (objective, path)) in enumerate(zip(grid, pairs, strict=True)):
        panel_rows = frame[(frame["objective"] == objective) & (frame["setting"] == path)]
        _draw_panel(
            axes,
            panel_rows,
            figure_data.draw_options["scales"][path],
            norm,
            distances.get(objective) or limits[objective],
        )
        if index % columns and pairs[index - 1][0] == objective:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel(settings.wrap_vertical_label(str(panel_rows["label"].iloc[0])))
    settings.colour_bar(figure, grid, norm, drawing.colours(*TRIAL_COLOURS), "trial")
    return drawing.finished(
        figure, figure_data.title, figure_data.notes, {figure_data.draw_options["ring"]: settings.ring_key()}
    )


def _panel_columns(panels: int, narrow: bool) -> int:
    """Return the number of panels per row for one objective: all side by side up to four, at most two if `narrow`.

    More panels stand in rows of four or three, whichever leaves fewer empty positions.
    """
    if narrow:
        return min(2, panels)
    return (
        min(panels, MAX_COLUMNS)
        if panels <= MAX_COLUMNS
        else min((MAX_COLUMNS, MAX_COLUMNS - 1), key=lambda columns: -panels % columns)
    )


def _y_limits(objective_rows: pd.DataFrame) -> tuple[float, float]:
    """Return the (low, high) limits that all panels of an objective share.

    They cut outliers off, keep the better half of the trials, and have a margin of 8 %.

    Args:
        objective_rows: Rows of one objective, with number, direction and value; each trial counts once.
    """
    objective = settings.objective_with_direction(str(objective_rows["direction"].iloc[0]))
    return settings.padded_range(
        *settings.value_range(list(objective_rows.drop_duplicates("number")["value"]), objective)
    )


def _distances(objective_rows: pd.DataFrame) -> DistanceScale | None:
    """Return the logarithmic axis of the values of an objective where they are crowded at the best; else None."""
    sign = settings.objective_with_direction(str(objective_rows["direction"].iloc[0])).sign
    return settings.distance_from_best(list(objective_rows.drop_duplicates("number")["value"]), sign)


def _is_of_levels(scale: Scale) -> bool:
    """Return whether many trials share a position on this axis: one of levels, or of few numbers."""
    return bool(scale.levels or scale.at)


def _level_space(scale: Scale) -> float:
    """Return the distance of neighbouring levels on their axis; 1 for a single one."""
    return 1.0 if scale.levels or len(scale.at) < 2 else min(b - a for a, b in pairwise(scale.at))


def _offsets(panel_rows: pd.DataFrame, scale: Scale, limits: tuple[float, float] | DistanceScale) -> pd.Series:
    """Return the offset of each trial from its level, in the unit of the axis; 0 on an axis of many numbers.

    Trials of a level with about the same value stand side by side around it.

    Args:
        panel_rows: Rows of the panel, with place and value.
        scale: Scale of the setting.
        limits: (low, high) of the y axis, or its scale.
    """
    if not _is_of_levels(scale) or scale.log:
        return pd.Series(0.0, panel_rows.index)
    space = _level_space(scale)
    if isinstance(limits, DistanceScale):
        heights = ROWS * panel_rows["value"].map(limits.share)
    else:
        low, high = limits
        heights = (panel_rows["value"].clip(low, high) - low) / (high - low) * ROWS
    offsets = pd.Series(0.0, panel_rows.index)
    sides = sorted((0.5 * STEP * part for part in range(-int(SPREAD / STEP), int(SPREAD / STEP) + 1)), key=abs)
    for _, level in panel_rows.groupby("place"):
        placed: list[tuple[float, float]] = []
        for index in heights[level.index].sort_values(kind="stable").index:
            height = float(heights[index])
            near = [side for side, level_height in placed if height - level_height < 1]
            air = [min([STEP, *(abs(side - neighbour) for neighbour in near)]) for side in sides]
            # of the offsets with most air, the innermost
            aside = sides[air.index(max(air))]
            placed.append((aside, height))
            offsets[index] = space * aside
    return offsets


def _draw_panel(
    axes: Axes, panel_rows: pd.DataFrame, scale: Scale, norm: Any, limits: tuple[float, float] | DistanceScale
) -> None:
    """Draw the trials of an objective over a setting, and set limits, ticks and the x label.

    Values outside the limits are drawn at the edge, with an arrow. The best trials are ringed.

    Args:
        axes: The panel.
        panel_rows: Rows of the panel, with number, name, place, value and best.
        scale: Scale of the setting.
        norm: Matplotlib normalization of the trials' numbers, which gives the colours.
        limits: (low, high) of the y axis, or its scale.
    """
    positions = panel_rows["place"] + _offsets(panel_rows, scale, limits)
    chart = drawing.colours(*TRIAL_COLOURS)
    if isinstance(limits, DistanceScale):
        limits.apply_to_axis(axes, "y", settings.distance_ticks(limits))
        low, high = -math.inf, math.inf
    else:
        low, high = limits
        axes.set_ylim(low, high)
    inside = panel_rows["value"].clip(low, high)
    size = (settings.marker_scale(len(panel_rows)) * drawing.line_width(4.6)) ** 2
    style: dict[str, Any] = {
        "s": size,
        "zorder": 3,
        "linewidths": drawing.line_width(0.4),
        "edgecolors": drawing.INK,
        "clip_on": False,
    }
    axes.scatter(positions, inside, c=panel_rows["number"], cmap=chart, norm=norm, **style)
    beyond = (panel_rows["value"] < low) | (panel_rows["value"] > high)
    for x, value, number in zip(
        positions[beyond], panel_rows["value"][beyond], panel_rows["number"][beyond], strict=True
    ):
        edge, marker = (high, "^") if value > high else (low, "v")
        drawing.points(axes, x, edge, marker, color=chart(norm(number)), clip_on=False, zorder=4, markersize=3.6)
    axes.plot(
        positions[panel_rows["best"]],
        inside[panel_rows["best"]],
        markersize=drawing.line_width(settings.RING_SIZE),
        zorder=4,
        clip_on=False,
        **settings.RING,
    )
    scale.apply_to_axis(axes, "x", 4)
    if scale.at and not scale.log:
        room = 0.5 * (scale.at[1] - scale.at[0]) if len(scale.at) > 1 else 0.5
        axes.set_xlim(scale.low - room, scale.high + room)
    if not isinstance(limits, DistanceScale):
        short_numbers(axes.yaxis)
    if _is_of_levels(scale) and not scale.log:
        axes.grid(axis="x", visible=False)
        at_levels = [float(index) for index in range(len(scale.levels))] or list(scale.at)
        space = _level_space(scale)
        for position in at_levels:
            axes.axvspan(position - 0.46 * space, position + 0.46 * space, color=LEVEL_FILL, linewidth=0, zorder=0.4)
    axes.set_xlabel(settings.setting_label(str(panel_rows["name"].iloc[0])))
