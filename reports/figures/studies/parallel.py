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
from ...render.style import DASHES, FREE_INKS
from ...stats.study_data import Objective, Study, at_common_rung, level_text, require_done_trials, rung_note, study_of
from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.scales import Scale, scale_for_values
from .settings import (
    axis_position,
    marker_scale,
    objective_with_direction,
    scale_of,
    setting_label,
    settings_text,
    trial_row,
    value_range,
)

MIN_TRIALS = 2
SPREAD = 0.7  # share of a level's space over which lines through it are spread
TENTH, FEWEST, MOST = 0.1, 3, 5  # share of the trials whose lines are not faded, and their least and largest number
REST = "other trials"
MOST_KEYED = 8  # trials that the key names
PALE = "#c9c9c9"
"""Ink of the lines of the others."""
WIDTH, BEST_WIDTH = 1.1, 2.0  # points in the style `paper`, width of the lines in colour, and of the best of them
LETTER, MOST_GAP = 0.62, 0.6
"""Width of a letter in sizes of the font, and largest space of the labels of an axis in distances between axes."""
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
    frame = _with_spread_levels(frame.astype({"share": float, "height": float, "value": float}), scales)
    first = study.objectives[0]
    thick = "best trial" if len(study.objectives) == 1 else "Pareto front"
    unit = _unit(first)
    notes = [
        f"One line per {study.trial_noun} (n = {len(study.done)}) through its settings to its {first.words}{unit} "
        f"({first.better}). In colour: the best {_sharp_count(len(study.done))}, each named by its number and value; thick: "
        f"{thick}; grey: all others. Between the two sides of an axis, which hold its labels, a line goes on at its height."
    ]
    best = [trial for trial in study.done if trial.number in study.best]
    if len(best) == 1:
        notes.append(f"Settings of the best trial: {settings_text(study, best[0])}.")
    if len(study.objectives) > 1:
        further = [f"{objective.words}{_unit(objective)} ({objective.better})" for objective in study.objectives[1:]]
        notes.append(f"Other objectives: {', '.join(further)}.")
    if any(map(_level_count, scales.values())):
        notes.append(
            f"A level is a black bar, over which its lines are spread in the order of {first.words}: their height within it "
            "is no setting."
        )
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
        fields = {"axis": path, "name": study.names[path], "text": text, "share": share}
        rows.append(trial_fields | fields | {"height": _height(scale, share)})
    for objective in study.objectives:
        trial_value = objective.display_value(trial.values[objective.index])
        # a far worse value is drawn at the edge; the frame has its number
        share = min(1.0, max(0.0, scales[objective.name].share(trial_value)))
        fields = {"axis": objective.name, "name": objective.words, "text": f"{trial_value:.4g}", "share": share}
        rows.append(trial_fields | fields | {"height": share})
    return [row | {"value": value, "best": trial.number in study.best} for row in rows]


def _level_count(scale: Scale) -> int:
    """Return the number of levels of an axis, also of a range of few evenly spaced numbers; 0 for other numbers."""
    return len(scale.levels) or (0 if scale.log else len(scale.at))


def _with_spread_levels(frame: pd.DataFrame, scales: dict[str, Scale]) -> pd.DataFrame:
    """Return the rows with the lines of each level spread evenly over its bar, in the order of their values.

    Args:
        frame: Rows with axis, share, height and value.
        scales: Scale by axis.
    """
    counts = frame["axis"].map({axis: _level_count(scale) for axis, scale in scales.items()})
    groups = frame.groupby(["axis", "share"])["value"]
    rank = (groups.rank(method="first") - 0.5) / groups.transform("size") - 0.5
    spread = (SPREAD * rank / counts.where(counts > 0)).fillna(0)
    return frame.assign(height=frame["height"] + spread)


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw parallel axes with a straight line per trial: the best tenth each in its ink and in front, all others grey.

    Trials that none beats are thick. `look` is not used.
    """
    from matplotlib.collections import PathCollection

    frame, scales = figure_data.frame, figure_data.draw_options["scales"]
    names = frame.drop_duplicates("axis")[["axis", "name"]].to_dict("records")
    figure = drawing.page(2.6, max(5.2, min(drawing.PAGE_WIDTH, EACH * 1.6 * len(names))))
    axes = figure.subplots()
    sign = objective_with_direction(figure_data.draw_options["direction"]).sign
    order = {str(axis_row["axis"]): index for index, axis_row in enumerate(names)}
    shown = [scales[axis] for axis in order]
    gaps = _gaps(figure.get_figwidth(), shown)
    placed = frame.assign(x=frame["axis"].map(order))
    ways = {
        int(str(number)): _way(points["x"].to_numpy(), points["height"].to_numpy(dtype=float), gaps)
        for number, points in placed.groupby("number")
    }
    ranked = frame.drop_duplicates("number").sort_values("value", ascending=sign > 0, kind="stable")[::-1]
    is_sharp = ranked["best"] | (np.arange(len(ranked)) < _sharp_count(len(ranked)))
    pale = [ways[number] for number in ranked[~is_sharp]["number"]]
    thin = drawing.line_width(0.8 * marker_scale(len(ranked)))
    axes.add_collection(PathCollection(pale, facecolors="none", edgecolors=PALE, linewidths=thin, zorder=3))
    handles: dict[str, Any] = {}
    first = next(axis for axis in order if axis in figure_data.draw_options["units"])
    values = frame[frame["axis"] == first].set_index("number")["text"]
    for index, row in enumerate(ranked[is_sharp].to_dict("records")):
        width = drawing.line_width(BEST_WIDTH if row["best"] else WIDTH)
        # from the seventh trial of a long front on, dashes tell those of an ink apart
        ink, dashes = FREE_INKS[index % len(FREE_INKS)], DASHES[index // len(FREE_INKS) % len(DASHES)]
        line: dict[str, Any] = {"edgecolors": ink, "linestyles": [dashes], "linewidths": width}
        axes.add_collection(PathCollection([ways[row["number"]]], facecolors="none", zorder=4 - 0.01 * index, **line))
        if index < MOST_KEYED:
            handles[f"#{row['number']}: {values[row['number']]}"] = drawing.key(
                color=ink, linestyle=dashes, linewidth=width
            )
    if pale:
        handles[REST] = drawing.key(color=PALE, linewidth=thin)
    units = figure_data.draw_options["units"]
    labels = [(str(row["name"]), str(units.get(row["axis"], "")).replace(" per ", "/")) for row in names]
    _draw_frame(axes, labels, shown, gaps)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=5)


def _gaps(width: float, scales: Sequence[Scale]) -> list[float]:
    """Return the space of each axis for its labels, in distances between axes: none at the first and the last.

    Args:
        width: Width of the figure in inches.
        scales: Scale of each axis.
    """
    distance = 72 * 0.95 * width / (len(scales) - 0.3)
    letters = [max(map(len, scale.ticks(4).values()), default=1) for scale in scales]
    gaps = [min(MOST_GAP, (LETTER * drawing.size("small") * count + 9) / distance) for count in letters]
    return [0.0, *gaps[1:-1], 0.0]


def _height(scale: Scale, share: float) -> float:
    """Return the height of a share of an axis, 0 to 1: levels stand in the middle of equal parts of their axis."""
    count = _level_count(scale)
    return (share * (count - 1) + 0.5) / count if count > 1 else share


def _sharp_count(trials: int) -> int:
    """Return how many of the best trials are not faded: a tenth of all, but three to five."""
    return min(MOST, max(FEWEST, math.ceil(TENTH * trials)))


def _way(positions: np.ndarray, heights: np.ndarray, gaps: Sequence[float]) -> Any:
    """Return a trial's line as a path of matplotlib, straight from the right side of an axis to the left side of the next.

    There is none at a setting that the trial lacks.

    Args:
        positions: Index of each axis that the trial has.
        heights: Height there; NaN where the trial lacks the setting.
        gaps: Distance between the sides of each axis, by its index.
    """
    from matplotlib.path import Path

    corners: list[tuple[float, float]] = []
    for (start, low), (end, high) in pairwise(zip(positions, heights, strict=True)):
        if np.isfinite([low, high]).all():
            corners += [(start, low), (end - gaps[int(end)], high)]
    return Path(np.array(corners).reshape(-1, 2), [Path.MOVETO, Path.LINETO] * (len(corners) // 2) or None)


def _draw_frame(axes: Axes, names: Sequence[tuple[str, str]], scales: Sequence[Scale], gaps: Sequence[float]) -> None:
    """Draw the upright axes with their names above and about four tick labels each, between the two sides of an axis.

    The first axis has its labels at the left, the last one at the right. A level has a bar as high as its lines are
    spread.

    Args:
        axes: The only axes of the figure; the right side of axis number i stands at x = i, from y = 0 to 1.
        names: (name, unit or empty) of each axis.
        scales: Scale of each axis, in the same order.
        gaps: Distance between the sides of each axis, in the same order.
    """
    last = len(names) - 1
    axes.set_xlim(-0.35, last + 0.35)
    axes.set_ylim(-0.03, 1.03)
    drawing.bare(axes)
    axes.set_yticks([])
    axes.tick_params(axis="x", labeltop=True, labelbottom=False)
    figure: Any = axes.figure
    letters = int(0.8 * 72 * figure.get_figwidth() / len(names) / (0.6 * drawing.size("xtick.labelsize")))
    heads = [
        folded(setting_label(name), letters) + (f"\n{folded(f'({unit})', letters)}" if unit else "")
        for name, unit in names
    ]
    axes.set_xticks([index - gap / 2 for index, gap in enumerate(gaps)], heads)
    thin: dict[str, Any] = {"color": drawing.INK, "linewidth": drawing.line_width(0.7), "zorder": 5, "label": "_guide"}
    for index, (scale, gap) in enumerate(zip(scales, gaps, strict=True)):
        sides = {index - gap: 1, index: -1} if gap else {index: 1 if index == last else -1}
        for side, inwards in sides.items():
            axes.plot([side, side], [0, 1], **thin)
            _draw_ticks(axes, scale, side, inwards, thin)
        for tick, tick_text in scale.ticks(4).items():
            height = _height(scale, scale.share(tick))
            style: dict[str, Any] = {"va": "center", "zorder": 6}
            style |= {"ha": "center"} if gap else {"ha": "left" if index == last else "right"}
            shift = 0 if gap else 5 if index == last else -5
            drawing.note(axes, tick_text, (index - gap / 2, height), (shift, 0), **style)


def _draw_ticks(axes: Axes, scale: Scale, side: float, inwards: int, thin: dict[str, Any]) -> None:
    """Draw the bars of levels, or the ticks of numbers, at one side of an axis.

    Args:
        axes: The only axes of the figure.
        scale: Scale of the axis.
        side: x of the side.
        inwards: 1 if the labels stand at its right, else -1.
        thin: Style of a thin line.
    """
    for tick in scale.ticks(4):
        height = _height(scale, scale.share(tick))
        if count := _level_count(scale):
            bar = thin | {"linewidth": drawing.line_width(2.5), "solid_capstyle": "butt"}
            axes.plot([side, side], [height - SPREAD / 2 / count, height + SPREAD / 2 / count], **bar)
        else:
            axes.plot([side, side + 0.02 * inwards], [height, height], **thin)


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
