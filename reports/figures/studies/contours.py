"""Figure `contours`: value over two settings at a time."""

from __future__ import annotations

import math
import textwrap
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...stats.study_data import Study, at_common_rung, require_done_trials, rung_note, study_of
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.scales import Scale, hide_overlapping_labels, short_numbers
from . import settings

MIN_TRIALS = 4
"""Least number of finished trials: three make a single triangle."""
MAX_SETTINGS = 4
"""Largest number of settings that are drawn against each other."""
BANDS = 10
SPREAD = 0.5
FOLDS = 5  # parts of the trials that are left out in turn
FLAT = 1e-6  # squared singular value below which points lie on a line


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the value of the first objective over pairs of settings, one row per pair and finished trial.

    A trial is one proposed configuration of a study; it is finished if it has a finite value of every objective. Where
    a pruner left too few finished trials, all are compared at their last common validation (`at_common_rung`). The
    first four settings that differ between finished trials are paired, in the grid's order. The earlier setting of a
    pair is y, the later one x. A trial that lacks a setting of a pair has no row there.

    Columns: number, cell, attempt, x and y (dotted paths of the settings), x_name, y_name (short names), x_place and
    y_place (position along their axes, 0 to 1), value (shares in %), best (True for the best trial by final values, or
    for all of the Pareto front).

    Raises:
        ReportError: The sweep is no study, fewer than four trials are finished, or fewer than two settings vary.
    """
    study = require_done_trials(at_common_rung(study_of(store, data)), MIN_TRIALS, "the figure contours")
    moving = study.varying_settings()
    if len(moving) < 2:
        reason = f"only {moving[0]} differs" if moving else "no setting differs"
        raise ReportError(
            f"the figure contours needs two settings that vary, and {reason} between the trials of sweep "
            f"{study.name}; use --figure slices"
        )
    chosen, omitted = moving[:MAX_SETTINGS], moving[MAX_SETTINGS:]
    rows = [row for y, x in combinations(chosen, 2) for row in _rows(study, x, y)]
    frame = pd.DataFrame(rows).astype({"x_place": float, "y_place": float, "value": float})
    first = study.objectives[0]
    scales = {path: settings.scale_of(study, path) for path in chosen}
    notes = [f"Colour: {first.words}, brighter is better; each mark is a {study.trial_noun}."]
    if any(scale.levels for scale in scales.values()):
        notes.append("Marks of a level are spread over its width.")
    if sum(not scale.levels for scale in scales.values()) > 1:
        notes.append(
            "Between marks, colours are interpolated linearly (triangles of neighbours) where both settings are "
            "numbers and the interpolation predicts left-out trials better than their mean does."
        )
    if omitted:
        notes.append(f"The first {MAX_SETTINGS} settings of the grid that differ; left out: {', '.join(omitted)}.")
    return collected(
        store, study.data, "contours", "Objective values by pairs of settings", frame, study.origins(study.done), notes=[*notes, *rung_note(study)],
        scales=scales, label=first.label, direction=first.direction,
        ring=settings.ring_label(study),
    )  # fmt: skip


def _rows(study: Study, x: str, y: str) -> list[dict[str, Any]]:
    """Return the rows of one pair of settings, one per finished trial in the order of their numbers.

    Trials without one of the two settings (or without a finite number of a setting with a range) are left out.

    Args:
        study: The study.
        x: Dotted path of the setting on the x axis.
        y: Dotted path of the setting on the y axis.

    Returns:
        Dicts with the columns that `collect` documents.
    """
    scales, rows = {path: settings.scale_of(study, path) for path in (x, y)}, []
    for trial in study.done:
        positions = {path: settings.axis_position(study, path, trial.params) for path in (x, y)}
        if trial.values is None or any(map(math.isnan, positions.values())):
            continue
        row = settings.trial_row(study, trial)
        for side, path in (("x", x), ("y", y)):
            row |= {side: path, f"{side}_name": study.names[path], f"{side}_place": scales[path].share(positions[path])}
        rows.append(
            row | {"value": study.objectives[0].display_value(trial.values[0]), "best": trial.number in study.best}
        )
    return rows


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per pair of settings: a marker per trial, with colours for values interpolated between them.

    Brighter is better, whichever direction the objective has. The best trials are ringed, and all panels share one
    colour bar. `look` is not used.
    """
    frame, scales = figure_data.frame, figure_data.draw_options["scales"]
    pairs = list(dict.fromkeys(zip(frame["x"], frame["y"], strict=True)))
    down = len({y for _, y in pairs})
    figure = drawing.page(1.25 * down + 0.35 if down > 1 else drawing.PANEL_HEIGHT, drawing.width_of(down + 1))
    grid = _triangle(figure, pairs)
    objective = settings.objective_with_direction(figure_data.draw_options["direction"])
    norm = drawing.linear(*settings.value_range(list(frame.drop_duplicates("number")["value"]), objective), clip=True)
    chart = settings.colours(objective.sign)
    for axes, (x, y) in zip(grid, pairs, strict=True):
        panel_rows = frame[(frame["x"] == x) & (frame["y"] == y)]
        _draw_panel(axes, panel_rows, scales[x], scales[y], norm, chart)
    if down > 1:
        _add_colour_bar(figure, norm, chart, figure_data.draw_options["label"])
    else:
        settings.colour_bar(figure, grid, norm, chart, figure_data.draw_options["label"])
    return drawing.finished(
        figure, figure_data.title, figure_data.notes, {figure_data.draw_options["ring"]: drawing.key(**settings.RING)}
    )


def _triangle(figure: Figure, pairs: list[tuple[str, str]]) -> list[Axes]:
    """Return the panels of the pairs (x, y), in their order: a lower triangle whose rows share y and columns share x.

    Only the panels at the left and at the bottom keep their tick labels.
    """
    across = list(dict.fromkeys(x for x, _ in pairs))[::-1]
    up = list(dict.fromkeys(y for _, y in pairs))[::-1]
    spec = figure.add_gridspec(len(up), len(across))
    grid, letters = [], sorted((up.index(y), across.index(x)) for x, y in pairs)
    for x, y in pairs:
        row, column = up.index(y), across.index(x)
        axes = figure.add_subplot(spec[row, column])
        axes.tick_params(labelleft=not column, labelbottom=row == len(up) - 1)
        if len(pairs) > 1:
            drawing.add_panel_letter(axes, letters.index((row, column)))
        grid.append(axes)
    return grid


def _in_lines(label: str) -> str:
    """Return the label of an upright axis in lines of at most 14 characters, broken at spaces, joined by newlines."""
    return "\n".join(textwrap.wrap(label, 14, break_long_words=False))


def _add_colour_bar(figure: Figure, norm: Any, chart: Any, label: str) -> None:
    """Add a horizontal colour bar in the free corner of the triangle of panels."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import MaxNLocator

    spec = figure.axes[0].get_gridspec()
    assert spec is not None
    corner = figure.add_subplot(spec[0, 1:])
    corner.set_axis_off()
    bar: Any = figure.colorbar(
        ScalarMappable(norm, chart), cax=corner.inset_axes((0.15, 0.72, 0.8, 0.12)), orientation="horizontal"
    )
    bar.outline.set_visible(False)
    bar.ax.grid(visible=False)
    bar.set_label(settings.wrap_vertical_label(label))
    bar.locator = MaxNLocator(4)
    bar.update_ticks()
    short_numbers(bar.ax.xaxis)


def _draw_panel(axes: Axes, panel_rows: pd.DataFrame, x: Scale, y: Scale, norm: Any, chart: Any) -> None:
    """Draw the trials of a pair of settings, the best ones ringed, and set limits, ticks and axis labels.

    The area between trials is coloured only if both settings have numeric ranges. On an axis of levels each marker is
    shifted aside by an amount that depends on the trial's number.

    Args:
        axes: The panel.
        panel_rows: Rows of the pair, with number, value, best, and x_/y_ name and place (0 to 1).
        x: Scale of the setting on the x axis.
        y: Scale of the setting on the y axis.
        norm: Matplotlib normalization of the values.
        chart: Matplotlib colour map.
    """
    if not x.levels and not y.levels:
        _draw_interpolation(axes, panel_rows, norm, chart)
    across, up = (
        panel_rows[f"{side}_place"]
        + [
            settings.level_offset(scale, int(number), SPREAD / max(1, len(scale.levels) - 1))
            for number in panel_rows["number"]
        ]
        for side, scale in (("x", x), ("y", y))
    )
    fine = settings.marker_scale(len(panel_rows))
    style: dict[str, Any] = {
        "s": (fine * drawing.line_width(3.6)) ** 2,
        "edgecolors": drawing.INK,
        "linewidths": fine * drawing.line_width(0.5),
    }
    axes.scatter(across, up, c=panel_rows["value"], cmap=chart, norm=norm, zorder=3, **style)
    axes.plot(
        across[panel_rows["best"]], up[panel_rows["best"]], markersize=drawing.line_width(7), zorder=4, **settings.RING
    )
    axes.grid(visible=False)
    for which, scale in (("x", x), ("y", y)):
        room = 0.5 / max(1, len(scale.levels) - 1) if scale.levels else 0.1
        getattr(axes, f"set_{which}lim")(-room, 1 + room)
        drawing.put_ticks(
            getattr(axes, f"{which}axis"), {scale.share(tick): label for tick, label in scale.ticks().items()}
        )
    if axes.xaxis.get_tick_params()["labelbottom"]:
        axes.set_xlabel(settings.setting_label(str(panel_rows["x_name"].iloc[0])))
    if axes.yaxis.get_tick_params()["labelleft"]:
        axes.set_ylabel(_in_lines(settings.setting_label(str(panel_rows["y_name"].iloc[0]))))
    drawing.after_layout(axes.figure, lambda: hide_overlapping_labels(axes))  # type: ignore[arg-type]


def _draw_interpolation(axes: Axes, panel_rows: pd.DataFrame, norm: Any, chart: Any) -> None:
    """Draw filled contours between the trials by linear interpolation on a Delaunay triangulation.

    Trials at the same position are averaged. Nothing is drawn for fewer than three positions, for positions on a line,
    for values that are all equal, or where the interpolation is not predictive.
    """
    from matplotlib.tri import Triangulation

    # trials at the same position are averaged
    points = panel_rows.groupby(["x_place", "y_place"], as_index=False)["value"].mean()
    coordinates = points[["x_place", "y_place"]].to_numpy()
    if len(points) < 3 or np.linalg.svd(coordinates - coordinates.mean(0), compute_uv=False)[-1] ** 2 < FLAT:
        return
    if not _is_predictive(coordinates, points["value"].to_numpy(dtype=float)):
        return
    mesh = Triangulation(coordinates[:, 0], coordinates[:, 1])
    if norm.vmin < norm.vmax:
        style: dict[str, Any] = {
            "levels": np.linspace(norm.vmin, norm.vmax, BANDS + 1),
            "cmap": chart,
            "alpha": 0.75,
            "zorder": 1,
        }
        axes.tricontourf(mesh, points["value"].clip(norm.vmin, norm.vmax), norm=norm, **style)


def _is_predictive(coordinates: np.ndarray, values: np.ndarray) -> bool:
    """Return whether linear interpolation predicts left-out positions better than the mean of all values does.

    Five folds, by the index of a position. Left-out positions outside the hull of the others do not count; without any
    inside the answer is no.

    Args:
        coordinates: Positions [n, 2].
        values: Value at each of them.
    """
    from scipy.interpolate import LinearNDInterpolator
    from scipy.spatial import QhullError

    predicted = np.full(len(values), np.nan)
    for fold in range(FOLDS):
        held_out = np.arange(len(values)) % FOLDS == fold
        if not held_out.any():
            continue
        try:
            predicted[held_out] = LinearNDInterpolator(coordinates[~held_out], values[~held_out])(coordinates[held_out])
        except QhullError:
            # the remaining positions lie on a line
            continue
    inside = np.isfinite(predicted)
    errors = ((predicted - values)[inside] ** 2).sum()
    return bool(inside.any() and errors < ((values[inside] - values.mean()) ** 2).sum())
