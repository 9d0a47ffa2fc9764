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
from ..canvas.distance_scale import DistanceScale
from ..canvas.labels import label_ends
from ..canvas.scales import Scale, scale_for_values
from .settings import (
    axis_position,
    distance_from_best,
    distance_note,
    distance_ticks,
    marker_scale,
    objective_with_direction,
    scale_of,
    setting_label,
    settings_text,
    trial_row,
    value_range,
)

Axis = Scale | DistanceScale
MIN_TRIALS = 2
TENTH, FEWEST, MOST = 0.1, 3, 5  # share of the trials that are named, and their least and largest number
WIDTH, BEST_WIDTH, THIN_WIDTH = 1.4, 2.6, 0.8  # points in the style `paper`, of lines that are named, best, and others
LIGHTEST = 0.86  # part of the colour map that is used, since its light end is hard to see on white
LEVEL_MARK = 5.0  # points in the style `paper`, diameter of the mark of a level
MOST_NAMED = 8  # trials that are named
END_SPACE = 0.6  # space of the names of trials, in distances between axes
EACH = 0.62
"""Least width of an axis in inches at the font size of the style `paper`; with more axes the page does not grow."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the settings and values of finished trials, one row per trial and axis.

    Axes are all searched settings first and the objectives last, in the grid's order. Columns: number, cell, attempt,
    axis (dotted path of the setting, or name of the objective), name (label), text (setting or value of the trial
    there; empty where an earlier trial lacks the setting), share (position on the axis, 0 to 1; NaN where it lacks the
    setting), height (that of its line there), value (of the first objective, shares in %), best (True for the best trial by final values, or for all of the Pareto front). Where a pruner left
    too few finished trials, all are compared at their last common validation (`at_common_rung`).

    Raises:
        ReportError: The sweep is no study, or fewer than two trials are finished.
    """
    study = require_done_trials(at_common_rung(study_of(store, data)), MIN_TRIALS, "the figure parallel")
    scales: dict[str, Axis] = {path: scale_of(study, path) for path in study.search.ranges}
    scales |= {objective.name: _value_scale(study, objective) for objective in study.objectives}
    frame = pd.DataFrame([row for trial in study.done for row in _rows(study, trial, scales)])
    frame = frame.astype({"share": float, "height": float, "value": float})
    first = study.objectives[0]
    thick = "best trial" if len(study.objectives) == 1 else "Pareto front"
    best = [trial for trial in study.done if trial.number in study.best]
    named = "number and value" if len(study.objectives) == 1 else "number"
    notes = [
        f"One line per {study.trial_noun} (n = {len(study.done)}) through its settings to its {first.words}"
        f"{_unit(first)}; darker: {first.better}; thick: {thick}. Named by {named}: the best "
        f"{_sharp_count(len(study.done))}{' and the front' * (len(study.objectives) > 1)}."
    ]
    if isinstance(scales[first.name], DistanceScale):
        notes.append(distance_note(first.sign))
    if any(map(_level_count, scales.values())):
        notes.append("All lines of a level meet in its mark.")
    if len(best) == 1:
        notes.append(f"Settings of the best trial: {settings_text(study, best[0])}.")
    if len(study.objectives) > 1:
        further = [f"{objective.words}{_unit(objective)} ({objective.better})" for objective in study.objectives[1:]]
        notes.append(f"Other objectives: {', '.join(further)}.")
    if _has_outliers(study, scales):
        notes.append("Values beyond the axis of an objective are drawn at its end.")
    return collected(
        store, study.data, "parallel", "Settings and objective values of trials", frame, study.origins(study.done),
        notes=[*notes, *rung_note(study)], scales=scales, direction=first.direction, thick=thick,
        units={objective.name: objective.unit for objective in study.objectives},
    )  # fmt: skip


def _unit(objective: Objective) -> str:
    """Return " in " and the unit of an objective; empty without one."""
    return f" in {objective.unit}" if objective.unit else ""


def _has_outliers(study: Study, scales: dict[str, Axis]) -> bool:
    """Return whether a finished trial has a value of an objective outside its axis."""
    return any(
        not isinstance(scales[objective.name], DistanceScale)
        and not 0 <= scales[objective.name].share(objective.display_value(trial.values[objective.index])) <= 1
        for trial in study.done
        for objective in study.objectives
        if trial.values is not None
    )


def _value_scale(study: Study, objective: Objective) -> Axis:
    """Return the axis of an objective in displayed units.

    That of the first one is logarithmic in the distance from the best value where values are crowded at it. Those of others are
    linear over the range of their values without outliers, and cover the better half of the values in any case.
    """
    values = [
        objective.display_value(trial.values[objective.index]) for trial in study.done if trial.values is not None
    ]
    if objective.index == 0:
        scale = distance_from_best(values, objective.sign)
        if scale is not None:
            return scale
    low, high = value_range(values, objective)
    value_scale = scale_for_values([low, high])
    return Scale(value_scale.low, value_scale.high)


def _rows(study: Study, trial: Trial, scales: dict[str, Axis]) -> list[dict[str, Any]]:
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
        fields = {"axis": path, "name": study.names[path], "text": text, "share": share}
        rows.append(trial_fields | fields | {"height": _height(scale, share)})
    for objective in study.objectives:
        trial_value = objective.display_value(trial.values[objective.index])
        # a far worse value is drawn at the edge; the frame has its number
        share = min(1.0, max(0.0, scales[objective.name].share(trial_value)))
        fields = {"axis": objective.name, "name": objective.words, "text": f"{trial_value:.4g}", "share": share}
        rows.append(trial_fields | fields | {"height": share})
    return [row | {"value": value, "best": trial.number in study.best} for row in rows]


def _level_count(scale: Axis) -> int:
    """Return the number of levels of an axis, also of a range of few evenly spaced numbers; 0 for other numbers."""
    if isinstance(scale, DistanceScale):
        return 0
    return len(scale.levels) or (0 if scale.log else len(scale.at))


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw parallel axes with a straight line per trial, the better the darker and the further in front.

    Trials that none beats are thick, and the best tenth is named at its end. `look` is not used.
    """
    from matplotlib.collections import PathCollection

    frame, scales = figure_data.frame, figure_data.draw_options["scales"]
    names = frame.drop_duplicates("axis")[["axis", "name"]].to_dict("records")
    figure = drawing.page(2.9, max(5.2, min(drawing.PAGE_WIDTH, EACH * 1.6 * len(names))))
    axes = figure.subplots()
    sign = objective_with_direction(figure_data.draw_options["direction"]).sign
    order = {str(axis_row["axis"]): index for index, axis_row in enumerate(names)}
    units = figure_data.draw_options["units"]
    first = next(axis for axis in order if axis in units)
    placed = frame.assign(x=frame["axis"].map(order)).sort_values("x", kind="stable")
    ranked = frame[frame["axis"] == first].sort_values("value", ascending=sign > 0, kind="stable")
    is_named = ranked["best"].to_numpy() | (np.arange(len(ranked))[::-1] < _sharp_count(len(ranked)))
    thin = THIN_WIDTH * marker_scale(len(ranked))
    for rank, (row, named) in enumerate(zip(ranked.to_dict("records"), is_named, strict=True)):
        points = placed[placed["number"] == row["number"]]
        way = _way(points["x"].to_numpy(), points["height"].to_numpy(dtype=float))
        width = BEST_WIDTH if row["best"] else WIDTH if named else thin
        line: dict[str, Any] = {"edgecolors": _ink(row["share"], sign), "linewidths": drawing.line_width(width)}
        axes.add_collection(PathCollection([way], facecolors="none", zorder=3 + rank / len(ranked), **line))
    labels = [(str(row["name"]), str(units.get(row["axis"], "")).replace(" per ", "/")) for row in names]
    _draw_frame(axes, labels, [scales[axis] for axis in order])
    finished = drawing.finished(figure, figure_data.title, figure_data.notes, {})
    ends = placed[placed["x"] == len(order) - 1].set_index("number")["height"]
    named_rows = ranked[is_named].to_dict("records")[::-1][:MOST_NAMED]
    texts = [
        (f"#{row['number']}" + (f": {row['text']}" if len(units) == 1 else ""), float(ends[row["number"]]), drawing.INK)
        for row in named_rows
    ]
    drawing.after_layout(finished, lambda: label_ends(axes, texts, len(order) - 1.0))
    return finished


def _ink(share: float, sign: int) -> Any:
    """Return the colour of a line, dark for the best, by its position on the axis of the first objective."""
    from matplotlib import colormaps

    worse = share if sign < 0 else 1 - share
    return colormaps[drawing.HEAT_MAP](LIGHTEST * worse)


def _height(scale: Axis, share: float) -> float:
    """Return the height of a share of an axis, 0 to 1: levels stand in the middle of equal parts of their axis."""
    count = _level_count(scale)
    return (share * (count - 1) + 0.5) / count if count > 1 else share


def _sharp_count(trials: int) -> int:
    """Return how many of the best trials are named: a tenth of all, but three to five."""
    return min(MOST, max(FEWEST, math.ceil(TENTH * trials)))


def _way(positions: np.ndarray, heights: np.ndarray) -> Any:
    """Return a trial's line as a path of matplotlib, straight from axis to axis.

    There is none at a setting that the trial lacks.

    Args:
        positions: Index of each axis that the trial has.
        heights: Height there; NaN where the trial lacks the setting.
    """
    from matplotlib.path import Path

    corners: list[tuple[float, float]] = []
    for (start, low), (end, high) in pairwise(zip(positions, heights, strict=True)):
        if np.isfinite([low, high]).all():
            corners += [(start, low), (end, high)]
    return Path(np.array(corners).reshape(-1, 2), [Path.MOVETO, Path.LINETO] * (len(corners) // 2) or None)


def _draw_frame(axes: Axes, names: Sequence[tuple[str, str]], scales: Sequence[Axis]) -> None:
    """Draw the upright axes with their names above, and about four tick labels each at their left.

    Args:
        axes: The only axes of the figure; axis number i stands at x = i, from y = 0 to 1.
        names: (name, unit or empty) of each axis.
        scales: Scale of each axis, in the same order.
    """
    last = len(names) - 1
    axes.set_xlim(-0.35, last + END_SPACE)
    axes.set_ylim(-0.03, 1.03)
    drawing.bare(axes)
    axes.set_yticks([])
    axes.tick_params(axis="x", labeltop=True, labelbottom=False)
    figure: Any = axes.figure
    letters = int(0.8 * 72 * figure.get_figwidth() / len(names) / (0.6 * drawing.size("xtick.labelsize")))
    units = [unit or ("log scale" if not isinstance(scale, DistanceScale) and scale.log else "")
             for (_, unit), scale in zip(names, scales, strict=True)]  # fmt: skip
    heads = [
        folded(setting_label(name), letters) + (f"\n{folded(f'({unit})', letters)}" if unit else "")
        for (name, _), unit in zip(names, units, strict=True)
    ]
    axes.set_xticks(range(len(names)), heads)
    thin: dict[str, Any] = {"color": drawing.INK, "linewidth": drawing.line_width(0.7), "zorder": 5, "label": "_guide"}
    for index, scale in enumerate(scales):
        axes.plot([index, index], [0, 1], **thin)
        is_of_levels = _level_count(scale) > 0
        style: dict[str, Any] = {"va": "bottom" if is_of_levels and index else "center", "zorder": 6}
        style |= {"ha": "center" if is_of_levels and index else "right", "bbox": drawing.BACKING | {"alpha": 0.85}}
        shift = (0, 4.0) if is_of_levels and index else (-5, 0)
        for tick, text in (distance_ticks(scale) if isinstance(scale, DistanceScale) else scale.ticks(4)).items():
            height = _height(scale, scale.share(tick))
            if is_of_levels:
                mark: dict[str, Any] = {"markersize": LEVEL_MARK, "zorder": 5.5, "label": "_guide"}
                drawing.points(axes, index, height, color=drawing.INK, markeredgewidth=0, **mark)
            else:
                axes.plot([index - 0.02, index], [height, height], **thin)
            drawing.note(axes, text, (index, height), shift, **style)


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
