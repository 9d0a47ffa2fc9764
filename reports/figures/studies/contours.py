"""Figure `contours`: value over two settings at a time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pandas as pd

from ....results.console.text import counted
from ....results.store.store import Store
from ...stats.study_data import Study, at_common_rung, require_done_trials, rung_note, study_of
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from ..canvas.scales import Scale, hide_overlapping_labels
from . import settings

MIN_TRIALS = 4
"""Least number of finished trials: three make a single triangle."""
MAX_SETTINGS = 4
"""Largest number of settings that are drawn against each other."""
BANDS, MAX_BAR_TICKS = 10, 7
"""Most bands of colour, and most ticks of the colour bar."""
HATCH = "//////"  # of positions far from every trial
SPREAD = 0.5
FOLDS = 5  # parts of the trials that are left out in turn
MAX_PANELS = 4
"""Largest number of pairs that are drawn."""
MIN_WIDTH_OF_THREE = 4.2  # inches of width that three panels with a common y axis need side by side
TITLE_SHARE = 0.7  # of the width of a column of panels, which a title may take
MIN_SKILL = 0.2  # share of the variance of left-out trials that an interpolation must explain to be drawn
MIN_GAIN = 0.05  # by how much that share must exceed the one that either setting alone explains
STEPS = 80  # colours of a strip along its level, and of a map along each axis
REACH = 0.17  # share of an axis from the nearest trial up to which colours are interpolated
SMOOTHING = 0.05  # standard deviation of the smoothing of a map, as a share of an axis
CAPPED_SHARE = 0.9  # share of the trials, the best first, that the colours tell apart
FLAT = 1e-6  # squared singular value below which points lie on a line


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the value of the first objective over pairs of settings, one row per drawn pair and finished trial.

    A trial is one proposed configuration of a study; it is finished if it has a finite value of every objective. Where
    a pruner left too few finished trials, all are compared at their last common validation (`at_common_rung`). The
    first four settings that differ between finished trials are paired, in the grid's order; the earlier setting of a
    pair is y, the later one x. Of these pairs the (at most four) are drawn whose interpolation explains a fifth of the
    variance of left-out trials, and a twentieth more than either setting alone, the best first; if no interpolation
    explains a fifth, the first four. A trial that lacks a setting of a pair
    has no row there.

    Columns: number, cell, attempt, x and y (dotted paths of the settings), x_name, y_name (short names), x_place and
    y_place (position along their axes, 0 to 1), value (shares in %), skill (share of the variance of left-out trials
    that the interpolation explains), x_alone and y_alone (share that interpolation over that setting alone explains), best
    (True for the best trial by final values, or for all of the Pareto front).

    Raises:
        ReportError: The sweep is no study, fewer than four trials are finished, fewer than two settings vary, or no pair
            of them adds to what one of its settings alone explains.
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
    scales = {path: settings.scale_of(study, path) for path in chosen}
    pairs = [_with_skill(pd.DataFrame(_rows(study, x, y)), scales[x], scales[y]) for y, x in combinations(chosen, 2)]
    pairs = [pair for pair in pairs if len(pair)]
    predictive = [pair for pair in pairs if pair["skill"].iloc[0] >= MIN_SKILL]
    joint = sorted((pair for pair in predictive if _gain(pair) >= MIN_GAIN), key=lambda pair: -pair["skill"].iloc[0])
    if predictive and not joint:
        raise ReportError(
            f"the figure contours has nothing to show: no pair of settings of sweep {study.name} explains more of the "
            "objective than one of the two alone; use --figure slices"
        )
    drawn = (joint or pairs)[:MAX_PANELS]
    frame = pd.concat(drawn, ignore_index=True).astype({"x_place": float, "y_place": float, "value": float})
    first = study.objectives[0]
    spread = any(_level_positions(scales[x]) or _level_positions(scales[y]) for x, y in frame[["x", "y"]].to_numpy())
    notes = [
        f"Each mark is a {study.trial_noun} (n = {len(study.done)}){', spread across its level' if spread else ''}, in the "
        f"colour of its {first.words}; it differs from its neighbours in the other settings too."
    ]
    values = frame.drop_duplicates("number")["value"]
    if values.nunique() > 1:
        notes.append(f"Arrow: worse values, up to {_worst(values, first.sign):.3g}.")
    if joint:
        notes.append(
            f"Surface: linear interpolation, smoothed over {SMOOTHING:.0%} of an axis, up to {REACH:.0%} of an axis from a "
            "trial; it need not be darkest at the best one. Titles: share of the variance of left-out trials (five folds) "
            f"that it explains. {_selection_note(pairs, predictive, drawn)}"
        )
    else:
        notes.append(
            f"Marks stand alone: no pair's interpolation explains {MIN_SKILL:.0%} of the variance of left-out trials."
        )
    if omitted:
        notes.append(f"The first {MAX_SETTINGS} settings of the grid that differ; left out: {', '.join(omitted)}.")
    return collected(
        store, study.data, "contours", "Objective values by pairs of settings", frame, study.origins(study.done), notes=[*notes, *rung_note(study)],
        scales=scales, label=first.label, direction=first.direction,
        ring=settings.ring_label(study),
    )  # fmt: skip


def _worst(values: pd.Series, sign: int) -> float:
    """Return the worst of the values: the lowest if `sign` is 1 (more is better), the highest if it is -1."""
    return float(values.min() if sign > 0 else values.max())


def _bands(values: pd.Series, sign: int) -> Any:
    """Return a normalization with about BANDS bands between round numbers, which the surface and marks share.

    They reach from the best value to that of CAPPED_SHARE of the trials; equal values have a single colour.

    Args:
        values: Value of each trial; at least one.
        sign: 1 if more is better, else -1.
    """
    from matplotlib.colors import BoundaryNorm
    from matplotlib.ticker import MaxNLocator

    low, high = float(values.min()), float(values.max())
    low, high = (
        (float(values.quantile(1 - CAPPED_SHARE)), high) if sign > 0 else (low, float(values.quantile(CAPPED_SHARE)))
    )
    if low >= high:
        return drawing.linear(low, high, clip=True)
    edges = MaxNLocator(nbins=BANDS, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return BoundaryNorm(
        [edge for edge in edges if low - np.diff(edges)[0] < edge < high + np.diff(edges)[0]], 256, clip=True
    )


def _gain(pair: pd.DataFrame) -> float:
    """Return by how much the share that a pair's interpolation explains exceeds that of the better setting alone."""
    first = pair.iloc[0]
    return float(first["skill"] - max(0.0, first["x_alone"], first["y_alone"]))


def _selection_note(
    pairs: Sequence[pd.DataFrame], predictive: Sequence[pd.DataFrame], drawn: Sequence[pd.DataFrame]
) -> str:
    """Return the sentence on the pairs that are drawn, the best first, and why the others are not.

    Args:
        pairs: Rows of each pair.
        predictive: Those whose interpolation explains enough.
        drawn: Those of them that are drawn.
    """
    alone = sum(_gain(pair) < MIN_GAIN for pair in predictive)
    reasons = [
        f"{alone} no better than a setting alone (by {MIN_GAIN:.0%})",
        f"{len(pairs) - len(predictive)} that explain less than {MIN_SKILL:.0%}",
        f"{len(predictive) - alone - len(drawn)} worse",
    ]
    omitted = " and ".join(reason for reason in reasons if not reason.startswith("0 "))
    return f"Drawn: {counted(len(drawn), 'pair')} of {len(pairs)}{f'; not drawn: {omitted}' if omitted else ''}."


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

    Darker is better, whichever direction the objective has. The best trials are ringed, and all panels share one
    colour bar. `look` is not used.
    """
    frame, scales = figure_data.frame, figure_data.draw_options["scales"]
    pairs = list(dict.fromkeys(zip(frame["x"], frame["y"], strict=True)))
    figure = drawing.page(drawing.PANEL_HEIGHT, drawing.width_of(len(pairs)))
    width, height = figure.get_size_inches()
    is_shared = len({y for _, y in pairs}) == 1
    most = 1 if len(pairs) == 2 and width < drawing.NARROW_WIDTH else 2
    columns = 3 if len(pairs) == 3 and width > (MIN_WIDTH_OF_THREE if is_shared else drawing.NARROW_WIDTH) else most
    figure.set_size_inches(width, height * drawing.rows_of(len(pairs), columns))
    grid = drawing.panels(figure, [""] * len(pairs), columns=columns)
    letters = max(12, int(TITLE_SHARE * width / columns * 72 / (0.6 * drawing.size("xtick.labelsize"))))
    objective = settings.objective_with_direction(figure_data.draw_options["direction"])
    trials = frame.drop_duplicates("number")
    norm, chart = _bands(trials["value"], objective.sign), settings.colours(objective.sign)
    for axes, (x, y) in zip(grid, pairs, strict=True):
        panel_rows = frame[(frame["x"] == x) & (frame["y"] == y)]
        _draw_panel(axes, panel_rows, scales[x], scales[y], norm, chart)
        axes.set_title(_pair_title(panel_rows, letters), fontsize=drawing.size("xtick.labelsize"))
        if is_shared and grid.index(axes) % columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
    label = figure_data.draw_options["label"]
    if len(pairs) <= min(columns, 2):
        # the bar beside a single row is short
        label = label.replace(", ", ",\n")
    edges = getattr(norm, "boundaries", None)
    settings.colour_bar(
        figure, grid, norm, chart, label, extend="min" if objective.sign > 0 else "max",
        ticks=None if edges is None else edges[:: -(-len(edges) // MAX_BAR_TICKS)],
    )  # fmt: skip
    best = trials[trials["best"]]["value"]
    value = f": {best.iloc[0]:.4g}" if len(best) == 1 else ""
    handles = {f"{figure_data.draw_options['ring']}{value}": settings.ring_key()}
    if (frame["skill"] >= MIN_SKILL).any() and norm.vmin < norm.vmax:
        handles["no trial near"] = drawing.patch(facecolor="white", edgecolor=drawing.FAINT, hatch=HATCH)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles)


def _pair_title(panel_rows: pd.DataFrame, letters: int) -> str:
    """Return the title of a panel: the names of both settings, and the share that the interpolation explains if drawn.

    Args:
        panel_rows: Rows of the pair.
        letters: Characters that fit in a line.
    """
    pair = panel_rows.iloc[0]
    first, second = (settings.setting_label(str(pair[side])) for side in ("y_name", "x_name"))
    lines = textwrap.wrap(f"{first} × {second}", letters, break_long_words=False)
    if pair["skill"] >= MIN_SKILL:
        alone = 100 * max(0.0, pair["y_alone"], pair["x_alone"])
        share = f"surface\u00a0explains\u00a0{100 * pair['skill']:.0f}\u00a0%, either\u00a0alone\u00a0≤\u00a0{alone:.0f}\u00a0%"
        lines += textwrap.wrap(share, letters, break_long_words=False)
    return "\n".join(lines)


def _in_lines(label: str) -> str:
    """Return the label of an upright axis in lines of at most 20 characters, broken at spaces, joined by newlines."""
    return "\n".join(textwrap.wrap(label, 20, break_long_words=False))


def _level_positions(scale: Scale) -> list[float]:
    """Return the positions of the levels of an axis, 0 to 1, also of few evenly spaced numbers; [] for other numbers."""
    ticks = range(len(scale.levels)) if scale.levels else () if scale.log else scale.at
    return [scale.share(float(tick)) for tick in ticks]


def _draw_panel(axes: Axes, panel_rows: pd.DataFrame, x: Scale, y: Scale, norm: Any, chart: Any) -> None:
    """Draw the trials of a pair of settings, the best ones ringed, and set limits, ticks and axis labels.

    At a level each marker is shifted aside by an amount that depends on the trial's number.

    Args:
        axes: The panel.
        panel_rows: Rows of the pair, with number, value, best, skill, and x_/y_ name and place (0 to 1).
        x: Scale of the setting on the x axis.
        y: Scale of the setting on the y axis.
        norm: Matplotlib normalization of the values.
        chart: Matplotlib colour map.
    """
    if panel_rows["skill"].iloc[0] >= MIN_SKILL and norm.vmin < norm.vmax:
        _draw_interpolation(axes, panel_rows, x, y, norm, chart)
    across, up = (
        panel_rows[f"{side}_place"]
        + [
            SPREAD / max(1, len(_level_positions(scale)) - 1) * settings.level_share(int(number))
            if _level_positions(scale)
            else 0.0
            for number in panel_rows["number"]
        ]
        for side, scale in (("x", x), ("y", y))
    )
    fine = settings.marker_scale(len(panel_rows))
    # a white ring separates a mark from its own colour around it
    axes.scatter(across, up, s=(fine * drawing.line_width(5.2)) ** 2, c="white", linewidths=0, zorder=2.9)
    style: dict[str, Any] = {"edgecolors": drawing.INK, "linewidths": fine * drawing.line_width(0.5), "zorder": 3}
    style |= {"s": (fine * drawing.line_width(3.8)) ** 2, "cmap": chart, "norm": norm}
    axes.scatter(across, up, c=panel_rows["value"], **style)
    best: Any = (across[panel_rows["best"]], up[panel_rows["best"]])
    halo = settings.RING | {"markeredgecolor": "white", "markeredgewidth": drawing.line_width(2.6), "zorder": 3.9}
    for ring in (halo, settings.RING | {"zorder": 4}):
        axes.plot(*best, markersize=drawing.line_width(settings.RING_SIZE), **ring)
    axes.grid(visible=False)
    for which, scale in (("x", x), ("y", y)):
        at_levels = _level_positions(scale)
        room = 0.5 / max(1, len(at_levels) - 1) if at_levels else 0.06
        getattr(axes, f"set_{which}lim")(-room, 1 + room)
        drawing.put_ticks(
            getattr(axes, f"{which}axis"), {scale.share(tick): label for tick, label in scale.ticks().items()}
        )
    axes.set_xlabel(settings.setting_label(str(panel_rows["x_name"].iloc[0])))
    axes.set_ylabel(_in_lines(settings.setting_label(str(panel_rows["y_name"].iloc[0]))))
    drawing.after_layout(axes.figure, lambda: hide_overlapping_labels(axes))  # type: ignore[arg-type]


def _draw_interpolation(axes: Axes, panel_rows: pd.DataFrame, x: Scale, y: Scale, norm: Any, chart: Any) -> None:
    """Draw the interpolated values: smooth filled contours between two settings of numbers, else a strip per level.

    Strips end at the outermost trials of their level. Positions farther than `REACH` from every trial are blank.

    Args:
        axes: The panel.
        panel_rows: Rows of the pair.
        x: Scale of the setting on the x axis.
        y: Scale of the setting on the y axis.
        norm: Matplotlib normalization of the values.
        chart: Matplotlib colour map.
    """
    from matplotlib.path import Path
    from scipy.interpolate import NearestNDInterpolator
    from scipy.ndimage import gaussian_filter
    from scipy.spatial import ConvexHull
    from scipy.spatial.distance import cdist

    coordinates, values = _averaged(panel_rows)
    _hatch(axes, x, y)
    look: dict[str, Any] = {"cmap": chart, "norm": norm, "zorder": 1}
    if not (_level_positions(x) or _level_positions(y)):
        steps = np.linspace(0, 1, STEPS + 1)
        grid = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
        table = interpolated_values(coordinates, values, grid, x, y)
        if np.isfinite(table).any():
            # continued beyond the trials, so that the hull cuts smoothly what the steps of the grid would tear
            nearest = NearestNDInterpolator(coordinates, values)(grid)
            table = np.where(np.isfinite(table), table, nearest).reshape(STEPS + 1, -1)
            table = gaussian_filter(table, SMOOTHING * STEPS, mode="nearest")
            hull = coordinates[ConvexHull(coordinates).vertices]
            away = cdist(grid, coordinates).min(axis=1).reshape(table.shape)
            field = axes.contourf(steps, steps, table.clip(norm.vmin, norm.vmax), levels=norm.boundaries, **look)
            gaps = axes.contourf(steps, steps, away, levels=[REACH, 2.0], colors=["white"], hatches=[HATCH], zorder=1.1)
            gaps.set(edgecolor=drawing.FAINT, linewidth=0)
            for drawn in (field, gaps):
                drawn.set_clip_path(Path(hull, closed=False), axes.transData)
        return
    edges = [_strip_edges(scale, coordinates[:, side]) for side, scale in enumerate((x, y))]
    middles = [[(low + high) / 2 for low, high in parts] for parts in edges]
    grid = np.stack(np.meshgrid(*middles, indexing="ij"), axis=-1)
    table = interpolated_values(coordinates, values, grid.reshape(-1, 2), x, y).reshape(grid.shape[:2])
    for side, scale in enumerate((x, y)):
        if not _level_positions(scale):
            table = _smoothed(table, side)
    for column, x_edges in enumerate(edges[0]):
        for row, y_edges in enumerate(edges[1]):
            point = grid[column, row].reshape(1, 2)
            own = coordinates[[x_edges[0] <= at <= x_edges[1] or not _level_positions(x) for at in coordinates[:, 0]]]
            own = own[[y_edges[0] <= at <= y_edges[1] or not _level_positions(y) for at in own[:, 1]]]
            if np.isfinite(table[column, row]) and cdist(point, own).min() <= REACH:
                value = table[column, row].reshape(1, 1)
                axes.pcolormesh(x_edges, y_edges, value, **look, linewidth=0, antialiased=False)


def _smoothed(table: np.ndarray, side: int) -> np.ndarray:
    """Return values smoothed along one axis of an array over `SMOOTHING` of its length; NaN stays NaN and has no weight."""
    from scipy.ndimage import gaussian_filter1d

    finite = np.isfinite(table)
    smoothing: dict[str, Any] = {"sigma": SMOOTHING * STEPS, "axis": side, "mode": "constant"}
    weights = gaussian_filter1d(finite.astype(float), **smoothing)
    sums = gaussian_filter1d(np.where(finite, table, 0.0), **smoothing)
    return np.where(finite, sums / np.maximum(weights, 1e-12), np.nan)


def _hatch(axes: Axes, x: Scale, y: Scale) -> None:
    """Hatch the searched range of both settings, below the colours: that of each level where a setting has levels."""
    from matplotlib.patches import Rectangle

    ends = np.array([0.0, 1.0])
    (columns, rows) = (_strip_edges(scale, ends) if _level_positions(scale) else [(0.0, 1.0)] for scale in (x, y))
    look: dict[str, Any] = {
        "facecolor": "white",
        "edgecolor": drawing.FAINT,
        "hatch": HATCH,
        "linewidth": 0,
        "zorder": 0.5,
    }
    for start, stop in columns:
        for low, high in rows:
            axes.add_patch(Rectangle((start, low), stop - start, high - low, **look))


def _strip_edges(scale: Scale, positions: np.ndarray) -> list[tuple[float, float]]:
    """Return the (low, high) ends of the parts of an axis that have one colour each: levels, or fine steps of numbers.

    Args:
        scale: Scale of the axis.
        positions: Positions of the trials on it, 0 to 1.
    """
    if at_levels := _level_positions(scale):
        half = 0.42 / max(1, len(at_levels) - 1)
        return [(position - half, position + half) for position in at_levels]
    return list(pairwise(np.linspace(positions.min(), positions.max(), STEPS + 1).tolist()))


def _averaged(panel_rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct positions [n, 2] of trials and the mean value at each."""
    points = panel_rows.groupby(["x_place", "y_place"], as_index=False)["value"].mean()
    return points[["x_place", "y_place"]].to_numpy(dtype=float), points["value"].to_numpy(dtype=float)


def interpolated_values(coordinates: np.ndarray, values: np.ndarray, at: np.ndarray, x: Scale, y: Scale) -> np.ndarray:
    """Return linearly interpolated values at positions [m, 2]; NaN outside of the trials.

    Between two settings of numbers triangles of neighbours count; with levels, the trials of the same level along the
    other setting; with two settings of levels, those of the same two levels.

    Args:
        coordinates: Positions of trials [n, 2], distinct.
        values: Their values [n].
        at: Positions [m, 2].
        x: Scale of the first coordinate.
        y: Scale of the second coordinate.
    """
    from scipy.interpolate import LinearNDInterpolator
    from scipy.spatial import QhullError

    level_sides = [side for side, scale in enumerate((x, y)) if _level_positions(scale)]
    if not level_sides:
        if len(coordinates) < 3 or np.linalg.svd(coordinates - coordinates.mean(0), compute_uv=False)[-1] ** 2 < FLAT:
            return np.full(len(at), np.nan)
        try:
            return np.asarray(LinearNDInterpolator(coordinates, values)(at), dtype=float)
        except QhullError:
            # the positions lie on a line
            return np.full(len(at), np.nan)
    results = np.full(len(at), np.nan)
    free = next((side for side in (0, 1) if side not in level_sides), None)
    for index, point in enumerate(at):
        mine = np.isclose(coordinates[:, level_sides], point[level_sides]).all(axis=1)
        if not mine.any():
            continue
        if free is None:
            results[index] = values[mine].mean()
            continue
        order = np.argsort(coordinates[mine, free])
        along, own = coordinates[mine, free][order], values[mine][order]
        results[index] = np.interp(point[free], along, own, np.nan, np.nan)
    return results


def _with_skill(rows: pd.DataFrame, x: Scale, y: Scale) -> pd.DataFrame:
    """Return the rows of a pair with the columns skill, x_alone and y_alone (`_skill` of both settings and of each).

    Left-out positions outside the others do not count; without any inside a share is 0.

    Args:
        rows: Rows of the pair, with x_place, y_place and value.
        x: Scale of the setting on the x axis.
        y: Scale of the setting on the y axis.
    """
    if rows.empty:
        return rows
    coordinates, values = _averaged(rows)
    pair = _skill(coordinates, values, lambda trials, own, at: interpolated_values(trials, own, at, x, y))
    return rows.assign(
        skill=pair,
        x_alone=_skill(coordinates[:, :1], values, _interpolated_alone),
        y_alone=_skill(coordinates[:, 1:], values, _interpolated_alone),
    )


Predictor = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Function (positions [n, d], values [n], positions [m, d]) that returns the predicted values [m]."""


def _skill(coordinates: np.ndarray, values: np.ndarray, predict: Predictor) -> float:
    """Return the share of the variance of left-out values that a prediction explains in five folds, by index; else 0."""
    predicted = np.full(len(values), np.nan)
    for fold in range(FOLDS):
        held_out = np.arange(len(values)) % FOLDS == fold
        if held_out.any() and not held_out.all():
            predicted[held_out] = predict(coordinates[~held_out], values[~held_out], coordinates[held_out])
    inside = np.isfinite(predicted)
    spread = ((values[inside] - values.mean()) ** 2).sum()
    errors = ((predicted - values)[inside] ** 2).sum()
    return float(1 - errors / spread) if spread > 0 else 0.0


def _interpolated_alone(coordinates: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return values [m] interpolated linearly over one setting: the mean of trials at its level, NaN outside of trials."""
    positions, which = np.unique(coordinates[:, 0], return_inverse=True)
    means = np.bincount(which, weights=values) / np.bincount(which)
    return np.interp(at[:, 0], positions, means, np.nan, np.nan)
