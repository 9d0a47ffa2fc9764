"""Figure `parallel`: every trial as a line through its settings to its value."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ....results.studies.optuna_study import Trial
from ...stats.study_data import Objective, Study, at_common_rung, level_text, require_done_trials, rung_note, study_of
from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.scales import Scale, scale_for_values
from .settings import (
    axis_position,
    colours,
    level_offset,
    marker_scale,
    objective_with_direction,
    scale_of,
    setting_label,
    trial_row,
    value_range,
)

MIN_TRIALS = 2
SPREAD = 0.6  # share of a level's space over which lines through it are spread
MAX_BAND = 0.6  # largest width of an axis, as a share of the distance of two
EACH = 0.62
"""Least width of an axis in inches at the font size of the style `paper`; with more axes the page does not grow."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the settings and values of finished trials, one row per trial and axis.

    Axes are all searched settings first and the objectives last, in the grid's order. Columns: number, cell, attempt,
    axis (dotted path of the setting, or name of the objective), name (label), text (setting or value of the trial
    there; empty where an earlier trial lacks the setting), share (position on the axis, 0 to 1; NaN where it lacks the
    setting), height (that of its line there, which is spread over the bar of a level), value (of the first objective,
    shares in %), best (True for the best trial by final values, or for all of the Pareto front). Where a pruner left
    too few finished trials, all are compared at their last common validation (`at_common_rung`).

    Raises:
        ReportError: The sweep is no study, or fewer than two trials are finished.
    """
    study = require_done_trials(at_common_rung(study_of(store, data)), MIN_TRIALS, "the figure parallel")
    scales = {path: scale_of(study, path) for path in study.search.ranges}
    scales |= {objective.name: _value_scale(study, objective) for objective in study.objectives}
    frame = pd.DataFrame([row for trial in study.done for row in _rows(study, trial, scales)])
    frame = frame.astype({"share": float, "height": float, "value": float})
    first = study.objectives[0]
    thick = "best trial" if len(study.objectives) == 1 else "Pareto front"
    unit = _unit(first)
    notes = [
        f"One line per {study.trial_noun}, coloured by {first.words}{unit} ({first.better}, and brighter); thick: {thick}."
    ]
    if len(study.objectives) > 1:
        further = [f"{objective.words}{_unit(objective)} ({objective.better})" for objective in study.objectives[1:]]
        notes.append(f"Other objectives: {', '.join(further)}.")
    if any(scale.levels for scale in scales.values()):
        notes.append("The lines of a level are spread over its bar.")
    if _has_outliers(study, scales):
        notes.append("Values beyond the axis of an objective are drawn at its end.")
    return collected(
        store, study.data, "parallel", "Settings and objective values of trials", frame, study.origins(study.done),
        notes=[*notes, *rung_note(study)], scales=scales, direction=first.direction,
    )  # fmt: skip


def _unit(objective: Objective) -> str:
    """Return " in " and the unit of an objective; empty without one."""
    return f" in {objective.unit}" if objective.unit else ""


def _has_outliers(study: Study, scales: dict[str, Scale]) -> bool:
    """Return whether a finished trial has a value of an objective outside its axis."""
    return any(
        not 0 <= scales[objective.name].share(objective.display_value(trial.values[objective.index])) <= 1
        for trial in study.done
        for objective in study.objectives
        if trial.values is not None
    )


def _value_scale(study: Study, objective: Objective) -> Scale:
    """Return the axis of an objective in displayed units, over the range of its values without outliers.

    It is linear even for positive values of a wide range, and covers the better half of the values in any case.
    """
    values = [
        objective.display_value(trial.values[objective.index]) for trial in study.done if trial.values is not None
    ]
    low, high = value_range(values, objective)
    value_scale = scale_for_values([low, high])
    return Scale(value_scale.low, value_scale.high)


def _rows(study: Study, trial: Trial, scales: dict[str, Scale]) -> list[dict[str, Any]]:
    """Return the rows of one trial: one dict per axis with the columns of `collect`, settings first.

    On the axis of an objective a value outside its range has the share 0 or 1, while the text has the number itself.

    Args:
        study: The study.
        trial: A finished trial.
        scales: Scale by axis: dotted path of a setting, or name of an objective.
    """
    assert trial.values is not None
    trial_fields = trial_row(study, trial)
    value = study.objectives[0].display_value(trial.values[0])
    rows = []
    for path in study.search.ranges:
        position, scale = axis_position(study, path, trial.params), scales[path]
        text = level_text(trial.params[path]) if path in trial.params else ""
        share = math.nan if math.isnan(position) else scale.share(position)
        shift = level_offset(scale, trial.number, SPREAD / max(1, len(scale.levels)))
        fields = {"axis": path, "name": study.names[path], "text": text, "share": share}
        rows.append(trial_fields | fields | {"height": _height(scale, share) + shift})
    for objective in study.objectives:
        trial_value = objective.display_value(trial.values[objective.index])
        # a far worse value is drawn at the edge; the frame has its number
        share = min(1.0, max(0.0, scales[objective.name].share(trial_value)))
        fields = {"axis": objective.name, "name": objective.words, "text": f"{trial_value:.4g}", "share": share}
        rows.append(trial_fields | fields | {"height": share})
    return [row | {"value": value, "best": trial.number in study.best} for row in rows]


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw parallel axes with a line per trial: the better a trial, the brighter and the further in front.

    The colour is that of the first objective. Trials that none beats are thick, with a dark edge. `look` is not used.
    """
    from matplotlib.collections import LineCollection

    frame, scales = figure_data.frame, figure_data.draw_options["scales"]
    names = frame.drop_duplicates("axis")[["axis", "name"]].to_dict("records")
    figure = drawing.page(2.6, max(5.2, min(drawing.PAGE_WIDTH, EACH * 1.6 * len(names))))
    axes = figure.subplots()
    objective = objective_with_direction(figure_data.draw_options["direction"])
    norm = drawing.linear(*value_range(list(frame.drop_duplicates("number")["value"]), objective), clip=True)
    chart = colours(objective.sign)
    order = {str(axis_row["axis"]): index for index, axis_row in enumerate(names)}
    ranked = frame.drop_duplicates("number").sort_values("value", ascending=objective.sign > 0, kind="stable")
    shown = [scales[axis] for axis in order]
    bands = _band_widths(figure, shown)
    placed = frame.assign(x=frame["axis"].map(order))
    ways = {
        number: _segments(points["x"].to_numpy(), points["height"].to_numpy(dtype=float), bands)
        for number, points in placed.groupby("number")
    }
    for best, width, alpha in ((False, 0.9 * marker_scale(len(ranked)), 0.75), (True, 2.2, 1.0)):
        trials = ranked[ranked["best"] == best]
        numbered = trials[["number", "value"]].itertuples(index=False)
        pairs = [(segment, chart(norm(value))) for number, value in numbered for segment in ways[int(number)]]
        lines, line_colours = [segment for segment, _ in pairs], [colour for _, colour in pairs]
        if best:
            # a dark edge separates bright lines from the paper and from each other
            lines = [line for line in lines for _ in range(2)]
            line_colours = [colour for ink_of_trial in line_colours for colour in (drawing.INK, ink_of_trial)]
        widths = [drawing.line_width(width + 1.0 * (best and index % 2 == 0)) for index in range(len(lines))]
        axes.add_collection(
            LineCollection(
                lines, colors=line_colours, linewidths=widths, alpha=alpha, zorder=3 + best, joinstyle="round"
            )
        )
    _draw_frame(axes, [str(axis_row["name"]) for axis_row in names], shown, bands)
    return drawing.finished(figure, figure_data.title, figure_data.notes, {})


def _height(scale: Scale, share: float) -> float:
    """Return the height of a share of an axis, 0 to 1: levels stand in the middle of equal parts of their axis."""
    count = len(scale.levels)
    return (share * (count - 1) + 0.5) / count if count > 1 else share


def _band_widths(figure: Figure, scales: Sequence[Scale]) -> list[float]:
    """Return the width of each axis, in distances of two axes, for its tick labels; the outer axes have 0.

    An inner axis is a band with its labels inside, where no lines run; the labels of the outer axes stand outside.
    """
    across = figure.get_figwidth() * 0.9 / len(scales)
    each = 0.62 * drawing.size("small") / 72
    longest = [max((len(text) for text in scale.ticks(4).values()), default=0) for scale in scales]
    widths = [min(MAX_BAND, (each * length + 0.09) / across) for length in longest]
    return [0.0 if index in (0, len(scales) - 1) else width for index, width in enumerate(widths)]


def _segments(positions: np.ndarray, heights: np.ndarray, bands: Sequence[float]) -> list[np.ndarray]:
    """Return the pieces [2, 2] of a trial's line from the right edge of each axis to the left edge of the next.

    Args:
        positions: Index of each axis that the trial has.
        heights: Height there; NaN where the trial lacks the setting.
        bands: Width of each axis.
    """
    return [
        np.array([[start + bands[start] / 2, low], [end - bands[end] / 2, high]])
        for (start, low), (end, high) in pairwise(zip(positions, heights, strict=True))
        if np.isfinite([low, high]).all()
    ]


def _draw_frame(axes: Axes, names: list[str], scales: Sequence[Scale], bands: Sequence[float]) -> None:
    """Draw the upright axes with their names above and about four tick labels each.

    The first axis has its labels at the left, the last one at the right, and the others between their two edges. A
    level has a bar as high as its lines are spread.

    Args:
        axes: The only axes of the figure; axis number i stands at x = i, from y = 0 to 1.
        names: Label of each axis.
        scales: Scale of each axis, in the same order.
        bands: Width of each axis.
    """
    last = len(names) - 1
    axes.set_xlim(-0.35, last + 0.35)
    axes.set_ylim(-0.03, 1.03)
    drawing.bare(axes)
    axes.set_yticks([])
    axes.tick_params(axis="x", labeltop=True, labelbottom=False)
    figure: Any = axes.figure
    letters = int(0.8 * 72 * figure.get_figwidth() / len(names) / (0.6 * drawing.size("xtick.labelsize")))
    axes.set_xticks(range(len(names)), [folded(setting_label(name), letters) for name in names])
    thin: dict[str, Any] = {"color": drawing.INK, "linewidth": drawing.line_width(0.7), "zorder": 5, "label": "_guide"}
    for index, (scale, band) in enumerate(zip(scales, bands, strict=True)):
        sides = [(index, 1 if index == last else -1)] if not band else [(index - band / 2, 1), (index + band / 2, -1)]
        for x, _ in sides:
            axes.plot([x, x], [0, 1], **thin)
        align = "center" if band else "left" if index == last else "right"
        shift = 0 if band else 5 if index == last else -5
        for tick, tick_text in scale.ticks(4).items():
            height = _height(scale, scale.share(tick))
            half = SPREAD / 2 / len(scale.levels) if scale.levels else 0.0
            for x, inwards in sides:
                if half:
                    axes.plot([x, x], [height - half, height + half], **(thin | {"linewidth": drawing.line_width(2.5)}))
                else:
                    axes.plot([x, x + 0.03 * inwards], [height, height], **thin)
            style: dict[str, Any] = {"ha": align, "va": "center", "zorder": 6}
            most = max(
                3, int((band - 0.02) * 0.9 * figure.get_figwidth() / len(names) / 0.6 / drawing.size("small") * 72)
            )
            drawing.note(
                axes, drawing.shortened(tick_text, most) if band else tick_text, (index, height), (shift, 0), **style
            )


def folded(name: str, most: int) -> str:
    """Return the name in lines of about `most` characters, joined by newlines.

    Lines break after an underscore, a dot or a space. A part without one is not broken, but shortened to `most` + 4.
    """
    lines = [""]
    for part in re.findall(r"[^_. ]*[_. ]?", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return "\n".join(drawing.shortened(line.strip(), most + 4) for line in lines if line.strip())
