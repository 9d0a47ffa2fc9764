"""The figure `history`: the trials of a study one after the other, and the best so far."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ....results.store.store import Store
from ....results.studies.optuna_study import Trial
from ...stats.study_data import Objective, Study, require_done_trials, study_of
from ...sweep_data import SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.line_drawing import MOST_TOLD
from ..canvas.scales import short_numbers
from .settings import objective_of, room, trial_row, upright, value_range

LOOKS: dict[str, dict[str, Any]] = {
    "done": {"marker": "o", "color": "#0072B2"},
    "pruned": {"marker": "x", "color": "#E69F00"},
    "diverged": {"marker": "X", "color": "#D55E00"},
    "failed": {"marker": "v", "color": "#000000", "markerfacecolor": "white"},
}
TOLD = {"pruned": "pruned, at its last value", "diverged": "diverged", "failed": "failed"}
LINE: dict[str, Any] = {"color": "#000000", "drawstyle": "steps-post"}


def collect(store: Store, data: SweepData) -> FigureData:
    """One row a trial and objective: number, cell, attempt, standing, objective, label (its words), direction, value (of a pruned
    trial the last one of its curve, of the first objective; NaN where there is none; shares in %), so_far (the best of the trials done
    up to this one; NaN before the first)."""
    study = require_done_trials(study_of(store, data), 1, "the figure history")
    rows = [row for objective in study.objectives for row in _rows(study, objective)]
    frame = pd.DataFrame(rows).astype({"value": float, "so_far": float})
    notes = [f"Line: the best so far. {study.counted()}.", f"{study.searched()}."]
    return collected(
        store, study.data, "history", "Trials of the study", frame, study.origins(study.trials), notes=notes
    )


def _rows(study: Study, objective: Objective) -> list[dict[str, Any]]:
    found, so_far = [], math.nan
    finished = {one.number for one in study.done}
    for trial in study.trials:
        if trial.standing == "asked":
            continue
        value = _value(trial, objective, trial.number in finished)
        if trial.number in finished:
            better = max if objective.sign > 0 else min
            so_far = value if math.isnan(so_far) else better(so_far, value)
        row = trial_row(study, trial) | {
            "standing": trial.standing,
            "objective": objective.name,
            "label": objective.label,
        }
        found.append(row | {"direction": objective.direction, "value": value, "so_far": so_far})
    return found


def _value(trial: Trial, objective: Objective, finished: bool) -> float:
    if finished and trial.values is not None:
        return objective.shown(trial.values[objective.place])
    if trial.standing == "pruned" and trial.curve and objective.place == 0:
        return objective.shown(trial.curve[-1][1])
    return math.nan


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """A panel an objective: a mark a trial, the best so far as steps."""
    frame = made.frame
    names = list(dict.fromkeys(frame["objective"]))
    figure = drawing.page(2.4, 5.2 if len(names) == 1 else drawing.WIDTH)
    handles: dict[str, Any] = {}
    for axes, name in zip(drawing.panel_column(figure, len(names)), names, strict=True):
        handles |= _panel(axes, frame[frame["objective"] == name])
    return drawing.finished(figure, made.title, made.notes, handles, columns=5)


def _panel(axes: Axes, here: pd.DataFrame) -> dict[str, Any]:
    from matplotlib.ticker import MaxNLocator

    known = here[here["value"].notna()]
    objective = objective_of(str(here["direction"].iloc[0]))
    low, high = room(*value_range([*known["value"], *here["so_far"].dropna()], objective))
    axes.set_ylim(low, high)
    handles: dict[str, Any] = {}
    for standing, how in LOOKS.items():
        part = known[known["standing"] == standing]
        inside = part[(part["value"] >= low) & (part["value"] <= high)]
        if len(part):
            look: dict[str, Any] = {"zorder": 3, "markeredgewidth": 1.0, **how}
            handles[TOLD.get(standing, "done")] = drawing.points(axes, inside["number"], inside["value"], **look)
        _beyond(axes, part.drop(inside.index), how["color"])
    for standing in ("diverged", "failed"):
        lost = here[here["value"].isna() & (here["standing"] == standing)]
        if len(lost):
            # at the side that is worse, since no value is known of them
            worse = [0.0 if objective.sign > 0 else 1.0] * len(lost)
            look = {"zorder": 3, "clip_on": False, "transform": axes.get_xaxis_transform(), **LOOKS[standing]}
            handles[TOLD[standing]] = drawing.points(axes, lost["number"], worse, **look)
    line = here[here["so_far"].notna()]
    (handles["best so far"],) = axes.plot(line["number"], line["so_far"], zorder=2.5, **LINE)
    last = int(here["number"].max())
    axes.set_xlim(-0.5 - last / 40, last + 0.5 + last / 40)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=3))
    axes.set_xlabel("trial")
    axes.set_ylabel(upright(str(here["label"].iloc[0])))
    short_numbers(axes.yaxis)
    return handles


def _beyond(axes: Axes, part: pd.DataFrame, ink: str) -> None:
    """Arrows at the edges that these trials lie beyond, with the values of a few."""
    low, high = axes.get_ylim()
    for up, some in ((True, part[part["value"] > high]), (False, part[part["value"] < low])):
        if some.empty:
            continue
        edge, marker, shift = (0.985, "^", (0, -9)) if up else (0.015, "v", (0, 9))
        look: dict[str, Any] = {"color": ink, "zorder": 3, "transform": axes.get_xaxis_transform()}
        drawing.points(axes, some["number"], [edge] * len(some), marker, **look)
        middle = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "center", "color": ink}
        for number, value in some[["number", "value"]].to_numpy() if len(some) <= MOST_TOLD else []:
            drawing.note(axes, f"{value:.3g}", (number, int(up)), shift, **middle)
