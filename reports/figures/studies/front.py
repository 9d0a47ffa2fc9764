"""Figure `front`: trials of a study of several objectives, and their Pareto front."""

from __future__ import annotations

from itertools import combinations
from typing import Any, Literal

import pandas as pd

from ....results.store.store import Store
from ...render.style import SERIES_INKS
from ...stats.study_data import Study, require_done_trials, study_of
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing, labels
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.scales import short_numbers
from .settings import RING, objective_with_direction, padded_range, trial_row, value_range, wrap_vertical_label

MAX_NAMED = 12


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the values of pairs of objectives, one row per pair and finished trial, by trial number within a pair.

    A trial is finished if it has a finite final value of every objective. The earlier objective of a pair is x.
    Columns: number, cell, attempt, x and y (names of the objectives), x_label, y_label, x_sign, y_sign (1 where more is
    better, else -1), x_value, y_value (shares in %), front (True if no trial is at least as good in every objective of
    the study and better in one).

    Raises:
        ReportError: The sweep is no study, the study has one objective, or no trial is finished.
    """
    study = study_of(store, data)
    if len(study.objectives) < 2:
        raise ReportError(
            f"the figure front needs two objectives, and the study of sweep {study.name} has only "
            f"{study.objectives[0].name}; use --figure history"
        )
    require_done_trials(study, 1, "the figure front")
    frame = pd.DataFrame([row for pair in combinations(range(len(study.objectives)), 2) for row in _rows(study, *pair)])
    notes = ["Ringed and numbered: trials on the front, where no other is as good in all objectives and better in one."]
    if len(study.objectives) > 2:
        notes.append("The front is over all objectives, so its trials may lie inside in a panel of two.")
    origins = study.origins(study.done)
    return collected(store, study.data, "front", "Pareto front of the study", frame, origins, notes=notes)


def _rows(study: Study, first: int, second: int) -> list[dict[str, Any]]:
    """Return the rows of one pair of objectives: one dict per finished trial, with the columns of `collect`.

    Args:
        study: The study.
        first: Index of the objective on the x axis.
        second: Index of the objective on the y axis.
    """
    rows = []
    for trial in study.done:
        assert trial.values is not None
        row = trial_row(study, trial)
        for side, index in (("x", first), ("y", second)):
            objective = study.objectives[index]
            row |= {side: objective.name, f"{side}_label": objective.label, f"{side}_sign": objective.sign}
            row |= {f"{side}_value": objective.display_value(trial.values[index])}
        rows.append(row | {"front": trial.number in study.best})
    return rows


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per pair of objectives and a marker per trial, with the Pareto front in blue and ringed.

    Trials of the front have their numbers, at most 12 of them. With a single pair the front is also drawn as steps.
    `look` is not used.
    """
    frame = figure_data.frame
    pairs = list(dict.fromkeys(zip(frame["x"], frame["y"], strict=True)))
    figure = drawing.page(2.8, 5.2 if len(pairs) == 1 else drawing.PAGE_WIDTH)
    for axes, (x, y) in zip(drawing.panel_column(figure, len(pairs)), pairs, strict=True):
        _draw_panel(axes, frame[(frame["x"] == x) & (frame["y"] == y)], stepped=len(pairs) == 1)
    trial = drawing.key(linestyle="none", marker="o", color=drawing.GREY)
    handles = {"trial": trial, "Pareto front": drawing.key(**RING)}
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles)


def _draw_panel(axes: Axes, panel_rows: pd.DataFrame, *, stepped: bool) -> None:
    """Draw the trials of a pair of objectives, and set limits, ticks and axis labels.

    Limits cut outliers off but keep the whole front. Labels of the front's trials are written after the layout: every
    trial of a front of up to 12, every second, third, ... of a longer one.

    Args:
        axes: The panel.
        panel_rows: Rows of the pair, with number, front, and x_/y_ label, sign and value.
        stepped: Draw the front as steps, too, and leave the x label on one line.
    """
    for side in ("x", "y"):
        sign = int(panel_rows[f"{side}_sign"].iloc[0])
        objective = objective_with_direction("maximize" if sign > 0 else "minimize")
        front_values = panel_rows[panel_rows["front"]][f"{side}_value"]
        low, high = value_range(list(panel_rows[f"{side}_value"]), objective)
        getattr(axes, f"set_{side}lim")(*padded_range(min(low, front_values.min()), max(high, front_values.max()), 0.1))
        label = str(panel_rows[f"{side}_label"].iloc[0])
        getattr(axes, f"set_{side}label")(label if side == "x" and stepped else wrap_vertical_label(label))
        short_numbers(getattr(axes, f"{side}axis"))
    front = panel_rows[panel_rows["front"]].sort_values("x_value", kind="stable")
    drawing.points(axes, panel_rows["x_value"], panel_rows["y_value"], color=drawing.GREY, alpha=0.7, zorder=2)
    drawing.points(axes, front["x_value"], front["y_value"], color=SERIES_INKS[0], zorder=3)
    axes.plot(front["x_value"], front["y_value"], markersize=drawing.line_width(7), zorder=3.2, **RING)
    if stepped:
        # the front's reach: from each trial towards the worse side of x, no trial is better in y
        where: Literal["pre", "post"] = "post" if int(panel_rows["x_sign"].iloc[0]) < 0 else "pre"
        style: dict[str, Any] = {"color": SERIES_INKS[0], "linewidth": drawing.line_width(0.9), "zorder": 1.5}
        axes.step(front["x_value"], front["y_value"], where=where, **style)
    labelled = front.iloc[:: max(1, -(-len(front) // MAX_NAMED))]
    named = [(float(row["x_value"]), float(row["y_value"]), f"#{row['number']}") for row in labelled.to_dict("records")]
    points = list(zip(panel_rows["x_value"], panel_rows["y_value"], strict=True))
    drawing.after_layout(axes.figure, lambda: labels.label_points(axes, named, points))  # type: ignore[arg-type]
    axes.locator_params(nbins=5)
