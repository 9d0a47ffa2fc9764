"""Figure `history`: trials of a study in their order, and the best so far."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ....results.store.store import Store
from ....results.studies.optuna_study import Trial
from ...render.style import STATE_INKS
from ...stats.study_data import METHOD_NAMES, Objective, Study, require_done_trials, study_of
from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.line_drawing import MAX_LISTED
from ..canvas.scales import short_numbers
from .settings import (
    objective_with_direction,
    padded_range,
    search_space_text,
    trial_row,
    value_range,
    wrap_vertical_label,
)

STANDING_STYLES: dict[str, dict[str, Any]] = {
    "done": {"marker": "o", "color": STATE_INKS["done"]},
    "pruned": {"marker": "x", "color": drawing.GREY},
    "diverged": {"marker": "D", "color": STATE_INKS["diverged"]},
    "failed": {"marker": "v", "color": STATE_INKS["failed"]},
}
STANDING_LABELS = {"pruned": "pruned, last value", "diverged": "diverged", "failed": "failed"}
STRIP, GAP = 0.1, 0.06  # height of the strip of trials without a value, and gap to the axis, as shares of the range
LINE: dict[str, Any] = {"color": drawing.INK, "drawstyle": "steps-post"}


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the values of all trials, one row per objective and trial, by trial number within an objective.

    Trials that are proposed but not finished are left out. Columns: number, cell, attempt, standing (done, pruned,
    diverged or failed), objective, label, direction, value (shares in %), so_far. `value` of a pruned trial is the last
    one of its curve, for the first objective alone; other trials without a final value have NaN. `so_far` is the best
    value of the finished trials up to this one; NaN before the first.

    Raises:
        ReportError: The sweep is no study, or no trial is finished.
    """
    study = require_done_trials(study_of(store, data), 1, "the figure history")
    rows = [row for objective in study.objectives for row in _rows(study, objective)]
    frame = pd.DataFrame(rows).astype({"value": float, "so_far": float})
    notes = [
        f"A mark per trial, in the order of proposal; line: the best finished value so far. {study.trial_counts_text()}.",
        *_mark_notes(study, frame),
        _search_note(study),
    ]
    return collected(
        store, study.data, "history", "Optimization history", frame, study.origins(study.trials), notes=notes
    )


def _search_note(study: Study) -> str:
    """Return the sentence on the newest search, with settings named as on axes."""
    search = study.search
    aims = " and ".join(f"{objective.words} ({objective.better})" for objective in study.objectives)
    pruner = f", pruner {METHOD_NAMES[search.pruner]}" if search.pruner else ""
    return (
        f"Sampler {METHOD_NAMES[search.sampler]}{pruner}, seed {search.seed}; objective: {aims}; search space: "
        f"{search_space_text(study)}."
    )


def _mark_notes(study: Study, frame: pd.DataFrame) -> list[str]:
    """Return the notes on marks without a value at an edge, and on trials that have no mark; [] for neither."""
    notes = []
    if ((frame["standing"] == "pruned") & frame["value"].notna()).any():
        notes.append("Pruned: last value, after fewer tokens than that of a finished trial.")
    lost = frame[frame["value"].isna()]
    at_edge = [standing for standing in ("diverged", "failed") if (lost["standing"] == standing).any()]
    if at_edge:
        notes.append(f"Strip beyond the axis: trials that {' or '.join(at_edge)}, without a value.")
    waiting = [trial.number for trial in study.trials if trial.standing == "asked"]
    hidden = sorted(
        {*waiting, *lost[lost["standing"] == "pruned"]["number"]} if len(study.objectives) == 1 else waiting
    )
    if hidden:
        few = ", ".join(map(str, hidden)) if len(hidden) <= MAX_LISTED else str(len(hidden))
        why = "not finished" if hidden == waiting else "without a value"
        notes.append(
            f"Not drawn: {'trial ' + few if len(hidden) == 1 else few + ' trials' if len(hidden) > MAX_LISTED else 'trials ' + few}, {why}."
        )
    return notes


def _rows(study: Study, objective: Objective) -> list[dict[str, Any]]:
    """Return the rows of one objective, a dict per trial by number, without trials that are only proposed.

    Keys: number, cell, attempt, standing, objective, label, direction, value (in the displayed unit, NaN without one)
    and so_far (the best value of finished trials up to this one, NaN before the first).
    """
    rows, so_far = [], math.nan
    finished = {trial.number for trial in study.done}
    for trial in study.trials:
        if trial.standing == "asked":
            continue
        value = _trial_value(trial, objective, trial.number in finished)
        if trial.number in finished:
            better = max if objective.sign > 0 else min
            so_far = value if math.isnan(so_far) else better(so_far, value)
        row = trial_row(study, trial) | {
            "standing": trial.standing,
            "objective": objective.name,
            "label": objective.label,
        }
        rows.append(row | {"direction": objective.direction, "value": value, "so_far": so_far})
    return rows


def _trial_value(trial: Trial, objective: Objective, finished: bool) -> float:
    """Return the value of a trial for an objective in the displayed unit; NaN where there is none.

    Args:
        trial: The trial.
        objective: The objective.
        finished: The trial has a finite value of every objective. Otherwise only a pruned trial has a value: the last
            one of its curve, for the objective with index 0.
    """
    if finished and trial.values is not None:
        return objective.display_value(trial.values[objective.index])
    if trial.standing == "pruned" and trial.curve and objective.index == 0:
        return objective.display_value(trial.curve[-1][1])
    return math.nan


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per objective: a marker per trial over its number, and the best value so far as steps.

    `look` is not used.
    """
    frame = figure_data.frame
    names = list(dict.fromkeys(frame["objective"]))
    figure = drawing.page(2.4, 5.2 if len(names) == 1 else drawing.PAGE_WIDTH)
    standings = frame.drop_duplicates("number")["standing"]
    counts = {str(standing): int(count) for standing, count in standings.value_counts().items()}
    handles: dict[str, Any] = {}
    for axes, name in zip(drawing.panel_column(figure, len(names)), names, strict=True):
        handles |= _draw_panel(axes, frame[frame["objective"] == name], counts)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=5)


def _draw_panel(axes: Axes, panel_rows: pd.DataFrame, counts: dict[str, int]) -> dict[str, Any]:
    """Draw the trials of an objective over their numbers, and set limits, ticks and axis labels.

    Limits cut outliers off: these are arrows at the edge. Diverged and failed trials without a value stand at the worse
    edge; pruned ones without a value are not drawn.

    Args:
        axes: The panel.
        panel_rows: Rows of one objective, with number, standing, direction, label, value and so_far.
        counts: Number of trials by standing, for the legend.

    Returns:
        Legend handles by label: one per standing that is drawn, with its number of trials, and "best so far".
    """
    from matplotlib.ticker import MaxNLocator

    with_value = panel_rows[panel_rows["value"].notna()]
    objective = objective_with_direction(str(panel_rows["direction"].iloc[0]))
    low, high = padded_range(*value_range([*with_value["value"], *panel_rows["so_far"].dropna()], objective))
    strip = _draw_strip(axes, panel_rows, low, high, objective.sign)
    handles: dict[str, Any] = {}
    for standing, standing_style in STANDING_STYLES.items():
        part = with_value[with_value["standing"] == standing]
        inside = part[(part["value"] >= low) & (part["value"] <= high)]
        beyond = part.drop(inside.index)
        if len(part):
            arrow = "; arrow: beyond the axis" if len(beyond) else ""
            style: dict[str, Any] = {"zorder": 3, "markeredgewidth": 1.0, **standing_style}
            handles[f"{STANDING_LABELS.get(standing, 'done')} ({counts[standing]}{arrow})"] = drawing.points(
                axes, inside["number"], inside["value"], **style
            )
        _mark_out_of_range(axes, beyond, standing_style["color"], low, high)
    for standing in ("diverged", "failed"):
        lost = panel_rows[panel_rows["value"].isna() & (panel_rows["standing"] == standing)]
        if len(lost):
            style = {"zorder": 3, "label": "_guide", **STANDING_STYLES[standing]}
            label = f"{STANDING_LABELS[standing]} ({counts[standing]})"
            handles[label] = drawing.points(axes, lost["number"], [strip] * len(lost), **style)
    line = panel_rows[panel_rows["so_far"].notna()]
    (handles["best so far"],) = axes.plot(line["number"], line["so_far"], zorder=2.5, **LINE)
    last = int(panel_rows["number"].max())
    axes.set_xlim(-0.5 - last / 40, last + 0.5 + last / 40)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=3, steps=[1, 2, 5, 10]))
    axes.set_xlabel("trial")
    axes.set_ylabel(wrap_vertical_label(str(panel_rows["label"].iloc[0])))
    short_numbers(axes.yaxis)
    _label_strip(axes, strip, low, high)
    return handles


def _draw_strip(axes: Axes, panel_rows: pd.DataFrame, low: float, high: float, sign: int) -> float:
    """Set the y limits, with a shaded strip beyond the worse edge if trials have no value, and return its middle.

    Args:
        axes: The panel.
        panel_rows: Rows of the objective, with value and standing.
        low: Lower end of the values.
        high: Upper end of the values.
        sign: 1 if more is better, else -1.
    """
    lost = panel_rows["value"].isna() & panel_rows["standing"].isin(["diverged", "failed"])
    depth = STRIP * (high - low)
    if not lost.any():
        axes.set_ylim(low, high)
        return high if sign < 0 else low
    gap = GAP * (high - low)
    edge, end = (high + gap, high + gap + depth) if sign < 0 else (low - gap, low - gap - depth)
    # the axis ends before the strip
    axes.spines["left"].set_bounds(low, high)
    axes.set_ylim(min(low, end), max(high, end))
    axes.axhspan(*sorted((edge, end)), color=drawing.GRID, linewidth=0, zorder=1)
    return (edge + end) / 2


def _label_strip(axes: Axes, strip: float, low: float, high: float) -> None:
    """Keep the y ticks from `low` to `high` alone, and label the strip as one of them if it lies outside."""
    if low <= strip <= high:
        return
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    labels = axes.yaxis.get_major_formatter().format_ticks(ticks)
    axes.set_yticks([*ticks, strip], [*labels, "no value"])


def _mark_out_of_range(axes: Axes, part: pd.DataFrame, colour: str, low: float, high: float) -> None:
    """Draw an arrow at the upper or lower edge for each trial outside the axes.

    The values are written next to the arrows of an edge that has at most three.

    Args:
        axes: The panel.
        part: Rows of the trials outside, all of one standing; may be empty.
        colour: Colour of the arrows.
        low: Lower end of the values.
        high: Upper end of the values.
    """
    inwards = 0.015 * (high - low)
    for up, beyond in ((True, part[part["value"] > high]), (False, part[part["value"] < low])):
        if beyond.empty:
            continue
        edge, marker, shift = (high - inwards, "^", (0, -9)) if up else (low + inwards, "v", (0, 9))
        style: dict[str, Any] = {"color": colour, "zorder": 3, "label": "_guide"}
        drawing.points(axes, beyond["number"], [edge] * len(beyond), marker, **style)
        middle = {"ha": "center", "va": "center", "color": colour}
        for number, value in beyond[["number", "value"]].to_numpy() if len(beyond) <= MAX_LISTED else []:
            drawing.note(axes, f"{value:.3g}", (number, edge), shift, **middle)
