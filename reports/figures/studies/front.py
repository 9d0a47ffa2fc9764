"""Figure `front`: trials of a study of several objectives, and their Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise, product
from typing import Any, Literal

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...stats.study_data import Study, level_text, require_done_trials, study_of
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.labels import dominated_key, mark_better_corner, shade_dominated
from ..canvas.scales import short_numbers
from .settings import (
    RING,
    objective_with_direction,
    padded_range,
    setting_label,
    settings_text,
    trial_row,
    value_range,
    wrap_vertical_label,
)

MAX_NAMED = 12
MAX_KINDS, MIN_SHARE = 5, 0.5  # levels of the setting that marks show, and the share of a variance that it explains
MARK, FRONT_RING, RING_EDGE = 3.4, 5.6, 0.6
"""Diameters of a mark and of a ring, and width of its edge, in points in the style `paper`."""
MAX_LISTED = 6  # trials of a front whose settings the notes list


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the values of pairs of objectives, one row per pair and finished trial, by trial number within a pair.

    A trial is finished if it has a finite final value of every objective. The earlier objective of a pair is x.
    Columns: number, cell, attempt, x and y (names of the objectives), x_label, y_label, x_sign, y_sign (1 where more is
    better, else -1), x_value, y_value (shares in %), kind (level of the setting that marks show, such as "layers 4"; empty
    where none explains half of the variance of an objective), front (True if no trial is at least as good in every objective of
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
    kinds = _kinds(study)
    frame = frame.assign(kind=[kinds.get(number, "") for number in frame["number"]])
    notes = [
        f"Each mark is a single trial (n = {len(study.done)}), without an interval. Ringed: the Pareto front, where no other "
        f"trial is as good in all objectives and better in one; the line bounds what it reaches.{_device_note(store, study)}"
    ]
    best = [trial for trial in study.done if trial.number in study.best]
    if len(best) <= MAX_LISTED:
        notes.append(f"Settings of the front: {'; '.join(settings_text(study, trial) for trial in best)}.")
    else:
        notes.append(f"Settings of its {len(best)} trials: --table study.")
    if len(study.objectives) > 2:
        notes.append("The front is over all objectives, so its trials may lie inside in a panel of two.")
    origins = study.origins(study.done)
    return collected(
        store, study.data, "front", "Pareto front of the study", frame, origins, notes=notes, shown=set(frame["kind"])
    )


def _device_note(store: Store, study: Study) -> str:
    """Return the sentence on the devices of measured speeds, after a space; "" without a speed among the objectives."""
    if not any(objective.probe == "throughput" for objective in study.objectives):
        return ""
    attempts = [attempt for trial in study.done if (attempt := study.attempt(trial)) is not None]
    provenances = store.provenances(attempts).values()
    devices = sorted({name for each in provenances if (name := each.gpu_name or each.device)})
    return f" Speed on {' and '.join(devices)}." if devices else " The device of the speeds is not recorded."


def _kinds(study: Study) -> dict[int, str]:
    """Return the level of the setting that explains most of an objective's variance by trial number, such as "layers 4".

    Only settings of few levels count, with two trials per level on average. Empty where none explains half.
    """
    shares: dict[str, float] = {}
    for path in study.search.ranges:
        levels = [str(level_text(trial.params[path])) if path in trial.params else "" for trial in study.done]
        if not 1 < len(set(levels)) <= min(MAX_KINDS, len(levels) // 2):
            continue
        for objective in study.objectives:
            values = pd.Series([trial.values[objective.index] for trial in study.done if trial.values is not None])
            between = values.groupby(levels).transform("mean").var(ddof=0)
            shares[path] = max(shares.get(path, 0.0), between / values.var(ddof=0) if values.nunique() > 1 else 0.0)
    path = max(shares, key=shares.__getitem__, default="")
    if not path or shares[path] < MIN_SHARE:
        return {}
    name = setting_label(study.names[path])
    texts = {trial.number: level_text(trial.params[path]) for trial in study.done if path in trial.params}
    is_mixer = path == "attn_type"
    return {number: drawing.level_label(text) if is_mixer else f"{name} {text}" for number, text in texts.items()}


def _shapes(frame: pd.DataFrame) -> dict[str, str]:
    """Return the marker of each kind, in the order of its numbers or else of its names; one for all without kinds."""
    kinds = sorted(set(frame["kind"]), key=lambda kind: (len(kind), kind))
    return dict(zip(kinds, drawing.MARKERS, strict=False))


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
    """Draw a panel per pair of objectives and a marker per trial, with the Pareto front in black and ringed.

    Trials of the front have their numbers, at most 12 of them. With a single pair the front is also drawn as steps.
    `look` is not used.
    """
    frame = figure_data.frame
    pairs = list(dict.fromkeys(zip(frame["x"], frame["y"], strict=True)))
    figure = drawing.page(2.8, 5.2 if len(pairs) == 1 else drawing.PAGE_WIDTH)
    shapes = _shapes(frame)
    for axes, (x, y) in zip(drawing.panel_column(figure, len(pairs)), pairs, strict=True):
        _draw_panel(axes, frame[(frame["x"] == x) & (frame["y"] == y)], shapes, stepped=len(pairs) == 1)
    handles: dict[str, Any] = {
        kind or "trial": drawing.key(linestyle="none", marker=marker, color=drawing.GREY)
        for kind, marker in shapes.items()
    }
    handles |= {"Pareto front": drawing.key(**_ring())} | (dominated_key() if len(pairs) == 1 else {})
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles)


def _ring() -> dict[str, Any]:
    """Return the style of the ring around a trial of the front, small enough to leave its neighbours free."""
    return RING | {"markersize": drawing.line_width(FRONT_RING), "markeredgewidth": drawing.line_width(RING_EDGE)}


def _draw_panel(axes: Axes, panel_rows: pd.DataFrame, shapes: Mapping[str, str], *, stepped: bool) -> None:
    """Draw the trials of a pair of objectives, and set limits, ticks and axis labels.

    Limits cut outliers off but keep the whole front. Labels of the front's trials are written after the layout: every
    trial of a front of up to 12, every second, third, ... of a longer one.

    Args:
        axes: The panel.
        panel_rows: Rows of the pair, with number, kind, front, and x_/y_ label, sign and value.
        shapes: Marker by kind.
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
    for kind, marker in shapes.items():
        for rows, look in ((panel_rows, {"color": drawing.GREY, "alpha": 0.6, "zorder": 2}),
                           (front, {"color": drawing.INK, "zorder": 3})):  # fmt: skip
            own = rows[rows["kind"] == kind]
            drawing.points(axes, own["x_value"], own["y_value"], marker, markersize=MARK, markeredgewidth=0, **look)
    axes.plot(front["x_value"], front["y_value"], zorder=3.2, **_ring())
    if stepped:
        # the front's reach: from each trial towards the worse side of x, no trial is better in y
        where: Literal["pre", "post"] = "post" if int(panel_rows["x_sign"].iloc[0]) < 0 else "pre"
        style: dict[str, Any] = {"color": drawing.INK, "linewidth": drawing.line_width(0.9), "zorder": 1.5}
        axes.step(front["x_value"], front["y_value"], where=where, **style)
        signs = (int(panel_rows[f"{side}_sign"].iloc[0]) for side in ("x", "y"))
        shade_dominated(axes, list(zip(front["x_value"], front["y_value"], strict=True)), *signs)
    mark_better_corner(axes, int(panel_rows["x_sign"].iloc[0]), int(panel_rows["y_sign"].iloc[0]))
    labelled = front.iloc[:: max(1, -(-len(front) // MAX_NAMED))]
    named = [(float(row["x_value"]), float(row["y_value"]), f"#{row['number']}") for row in labelled.to_dict("records")]
    points = list(zip(panel_rows["x_value"], panel_rows["y_value"], strict=True))
    path = _step_corners(front, int(panel_rows["x_sign"].iloc[0])) if stepped else []
    drawing.after_layout(axes.figure, lambda: _label_front(axes, named, points, path))  # type: ignore[arg-type]
    axes.locator_params(nbins=5)


def _step_corners(front: pd.DataFrame, x_sign: int) -> list[tuple[float, float]]:
    """Return the corners (x, y) of the steps through the trials of a front, which are in the order of x."""
    points = list(zip(front["x_value"], front["y_value"], strict=True))
    between = [(b[0], a[1]) if x_sign < 0 else (a[0], b[1]) for a, b in pairwise(points)]
    return [point for pair in zip(points, between, strict=False) for point in pair] + points[-1:]


def _label_front(
    axes: Axes,
    named: Sequence[tuple[float, float, str]],
    points: Sequence[tuple[float, float]],
    front: Sequence[tuple[float, float]],
) -> None:
    """Write labels around their points, off all marks, the line of the front and each other, with thin leaders.

    The layout must be final. Of positions on circles around a point the one with the fewest overlaps is taken, the
    nearest of several.

    Args:
        axes: The panel.
        named: (x, y, text) of each label, in data.
        points: (x, y) in data of all trials.
        front: (x, y) in data of the corners of the drawn front; empty: none.
    """
    from matplotlib.text import Text

    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    dot = axes.figure.dpi / 72
    marks = axes.transData.transform(list(points))
    frame = axes.get_window_extent(renderer)
    steps: Any = axes.transData.transform(front) if front else []
    ink = np.concatenate([marks, *(np.linspace(a, b, 60) for a, b in pairwise(steps))])
    boxes: list[Any] = []
    for x, y, text in named:
        origin = axes.transData.transform((x, y))
        rest = marks[np.hypot(*(marks - origin).T) > dot]
        leader = {
            "arrowstyle": "-",
            "linewidth": drawing.line_width(0.5),
            "shrinkA": 0,
            "shrinkB": 3,
            "color": drawing.GREY,
        }
        note = drawing.note(axes, text, (x, y), (0, 0), ha="center", va="center", zorder=6, arrowprops=leader)
        best = (float("inf"), 0.0, 0.0)
        for radius, angle in product((14, 20, 27, 35), range(0, 360, 15)):
            aside, up = radius * np.cos(np.radians(angle)), radius * np.sin(np.radians(angle))
            note.set_position((aside, up))
            note.update_positions(renderer)
            box = Text.get_window_extent(note, renderer).padded(3.5 * dot)
            outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
            way = np.linspace(origin, origin + dot * np.array([aside, up]), 12)
            crossed = (
                int((np.hypot(*(rest[:, None] - way).transpose(2, 0, 1)) < 4 * dot).any(1).sum()) if len(rest) else 0
            )
            met = sum(box.overlaps(label_box) for label_box in boxes)
            cost = 1000 * outside + 400 * met + 50 * box.count_contains(ink) + 50 * crossed + radius
            best = min(best, (cost, aside, up))
        note.set_position(best[1:])
        note.update_positions(renderer)
        boxes.append(Text.get_window_extent(note, renderer))
