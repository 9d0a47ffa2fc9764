"""Figure `loss`: validation loss over tokens, or over the time of training, with the training loss behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...results.builtin_sweeps import store_with_builtin
from ...results.console.text import choices_hint, counted
from ...results.store.records import AXES, CellState
from ...results.store.store import Store
from ..number_format import format_number
from ..render import style
from ..report_spec import CURVE_X_COLUMNS
from ..sweep_data import ReportError, SweepData, cell_level, load_sweep_data
from .canvas import drawing
from .canvas.base import Axes, Figure, FigureData, FigureOptions, axes_of_lines, cell_labels, collected, frame_origins
from .canvas.labels import label_ends
from .canvas.length_frames import (
    BARS,
    MIN_UNITS_OF_BAND,
    averaged_axes,
    coinciding_note,
    configuration_of,
    count_range,
    t_half_width,
)
from .canvas.line_drawing import DASHED_ZORDER, HALO_ZORDER, label_line_ends, named_cells
from .canvas.scales import hide_overlapping_labels

CURVE = ("step", "tokens", "wall_s", "train_loss", "val_loss")
TRAIN, VAL = CURVE.index("train_loss"), CURVE.index("val_loss")
END = (("val", "val_loss"), ("throughput", "train_seconds"))
"""Numbers that say where a training ended whose curve is not recorded: its last loss and its seconds."""
MOST_POINTS = 80_000
"""Points of all curves of a figure together; with more, each curve is thinned and the figure says so."""
FEWEST_POINTS = 40  # points that each curve keeps, regardless of the number of cells
SMOOTHED = 40  # the training loss is smoothed over a 40th of a curve's points
GRID = 120  # points of a group's mean if its curves were not measured at the same tokens
SHOWN_SHARE = 0.8  # share of the training, from its end, whose losses the y axis covers
VISIBLE_SHARE = 0.03  # share of the range of losses by which a cell differs visibly from a mean line
VISIBLE_BAND = 0.02  # share of the range of losses from which on a band is wider than its line
MIN_SMOOTHED_POINTS = 2 * SMOOTHED  # points of a training curve from which on it is drawn behind the validation loss
END_DECIMALS = 3  # decimals of final losses
MAX_REFERENCE_LINES = 8  # configurations of an added sweep up to which each has a line of its own
MARK_ROOM = 6.0  # points in the style `paper` that the mark of a final loss takes
MARK = ("marker", "markerfacecolor", "markeredgecolor")  # properties of the mark beside a final loss
UNITS = (("tokens (billions)", 1e9), ("tokens (millions)", 1e6), ("tokens (thousands)", 1e3), ("tokens", 1.0))
TIMES = (("training time (hours)", 3600.0), ("training time (minutes)", 60.0), ("training time (seconds)", 1.0))


@dataclass(frozen=True)
class _CurveSet:
    """Curves of a sweep as one frame.

    `longest` is the largest number of points of a curve before thinning, `widest` the largest smoothing span in points,
    and `most` the maximum of points per curve that is drawn. Without any curve `frame` is empty, without columns.
    """

    frame: pd.DataFrame
    longest: int
    widest: int
    most: int


def collect(
    store: Store,
    data: SweepData,
    *,
    by: str | None = None,
    log: bool = False,
    against: str | None = None,
    compare: str | None = None,
) -> FigureData:
    """Return the validation and training loss (nats per token) of every cell's newest training.

    One row per point of a curve: cell, attempt, configuration, first, second (levels of the up to two axes that
    distinguish lines; with one axis only `second` is "", without axes both), diverged (state of the cell; means leave
    it out), step, tokens, wall_s, train_loss, val_loss (NaN between validations), smoothed (exponential mean of
    train_loss whose span is a 40th of its points). If a sweep may have more than 80,000 points, every k-th point of a
    curve and of its validations is kept, smoothed over all points, so that neither time nor memory grows with its
    length.

    Args:
        store: The database.
        data: The sweep.
        by: Axis that distinguishes lines; None: the first two that vary of the mixer and further axes.
        log: Whether both axes are logarithmic.
        against: "time" draws over wall_s, the seconds of training of all attempts of a cell together; None: over
            tokens. A cell without a curve whose last loss and seconds are known is then one point, and points without a
            time are left out.
        compare: Name of a sweep whose curves are added, of the database or built in; their `first` is its name,
            `second` their configuration.

    Raises:
        ReportError: No curve is stored, an axis is unknown or does not vary, or no time is recorded.
        SweepUnknown: There is no sweep `compare`.
    """
    x = CURVE_X_COLUMNS[against or "tokens"]
    axes = _line_axes(data, by)
    curves = _curves(store, data, axes, ends=x == "wall_s")
    if curves.frame.empty:
        raise ReportError(f"no training curve of sweep {data.sweep} is stored; launch it, or wait for its first steps")
    frame = own = _points_with_x(curves.frame, x, data.sweep)
    notes: list[str] = []
    if compare is not None:
        reference_frame, notes = _reference_curves(compare, store, x, axes)
        frame = pd.concat([own, reference_frame], ignore_index=True)
    notes += _coinciding_note(own, axes) if x == "tokens" else []
    notes = [*_notes(frame, curves, averaged_axes(data, axes) if x == "tokens" else "", log), *notes]
    if x == "wall_s":
        notes.append(
            "Time: training time of all attempts of a cell together, without interruptions. Cells end at different "
            "times, so there are no mean lines: large marks are means of the cells' last losses and times."
        )
        lost = curves.frame["cell"].nunique() - own["cell"].nunique()
        notes += [f"Left out, since no time is recorded: {counted(lost, 'cell')}."] if lost else []
    options = {"by": by, "log": log, "against": against if x != "tokens" else None, "compare": compare}
    return collected(
        store, data, "loss", "Loss over training", frame, frame_origins(own), notes=notes,
        options={name: value for name, value in options.items() if value}, axes=axes, names=cell_labels(data, without=axes),
        log=log, x=x, beside=compare,
    )  # fmt: skip


def _curves(store: Store, data: SweepData, axes: Sequence[str], *, ends: bool) -> _CurveSet:
    """Return the curves of the newest training of every cell, thinned and smoothed.

    It is the attempt that trained the cell, else its present one if that trains.

    Args:
        store: The database.
        data: The sweep.
        axes: Up to two axes whose levels become the columns first and second ("" for an axis that is not there).
        ends: Whether a training without a recorded curve is one point at its end (step and tokens 0), if its last loss
            and its seconds are known.
    """
    newest: dict[int, CellState] = {}
    for cell in data.cells:
        attempt = cell.trained_attempt_id or (cell.attempt_id if cell.kind == "train" else None)
        if attempt is not None:
            newest[attempt] = cell
    max_points = max(FEWEST_POINTS, MOST_POINTS // max(1, len(newest)))
    parts: dict[int, np.ndarray] = {}
    longest, widest = 0, 0
    with store.snapshot() as snapshot:
        for attempt, rows in snapshot.curve_arrays(newest, CURVE):
            points = rows[~np.isnan(rows[:, TRAIN]) | ~np.isnan(rows[:, VAL])]
            if not len(points):
                continue
            steps = int((~np.isnan(points[:, TRAIN])).sum())
            width = max(1, steps // SMOOTHED)
            longest, widest = max(longest, len(points)), max(widest, width if steps else 0)
            drawn_rows = _drawn_points(points, max_points)
            parts[attempt] = np.column_stack(
                [points[drawn_rows], exponential_mean(points[:, TRAIN], width)[drawn_rows]]
            )
    for attempt, cell in newest.items() if ends else ():
        values = (data.values.get((cell.cell_id, *key, 0)) for key in END)
        loss, seconds = (None if value is None else value.value for value in values)
        if attempt not in parts and loss is not None and seconds is not None:
            parts[attempt] = np.array([[0, 0, seconds, np.nan, loss, np.nan]])
    return _CurveSet(_frame(data, newest, parts, axes), longest, widest, max_points)


def _points_with_x(frame: pd.DataFrame, x: str, sweep: str) -> pd.DataFrame:
    """Return the points whose value on the x axis is known.

    Args:
        frame: Points of curves, with the column `x`; the index of the result is new.
        x: Column of the x axis.
        sweep: Name of the sweep, for the message alone.

    Raises:
        ReportError: There is none.
    """
    timed = frame[frame[x].notna()].reset_index(drop=True)
    if timed.empty:
        raise ReportError(f"sweep {sweep} has no recorded training time; remove --against")
    return timed


def _reference_curves(sweep: str, store: Store, x: str, axes: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """Return the curves of another sweep, and the note on cells that are left out, as a list (empty if none is).

    `first` is the sweep's name in all rows, `second` the levels that vary ("all cells" without any); with more than
    eight configurations, the levels of `axes` alone.

    Args:
        sweep: Name of the other sweep, of the database or built in.
        store: The database.
        x: Column of the x axis.
        axes: Axes that distinguish the lines of the sweep itself.

    Raises:
        SweepUnknown, ReportError: The sweep or its curves are missing.
    """
    reference_store = store_with_builtin(store, sweep)
    data = load_sweep_data(reference_store, sweep)
    curves = _curves(reference_store, data, (), ends=x == "wall_s")
    if curves.frame.empty:
        timed = "" if x == "wall_s" else " (try --against time, which may show where a training ended)"
        raise ReportError(f"--compare {sweep}: this sweep has no stored training curve{timed}; remove --compare")
    frame = _points_with_x(curves.frame, x, sweep)
    vary = [axis for axis in (*AXES, *data.extra_axes()) if len(data.levels(axis)) > 1]
    if len(data.configurations()) > MAX_REFERENCE_LINES:
        vary = [axis for axis in vary if axis in axes]
    level_labels = {
        cell.cell_id: ", ".join(drawing.level_label(cell_level(cell, axis), axis) for axis in vary)
        for cell in data.cells
    }
    frame["first"], frame["second"] = sweep, [level_labels[cell] or "all cells" for cell in frame["cell"]]
    lost, timed = len(data.cells) - frame["cell"].nunique(), " or time" if x == "wall_s" else ""
    return frame, [f"No curve{timed} is stored for {counted(lost, 'cell')} of sweep {sweep}."] if lost else []


def _line_axes(data: SweepData, by: str | None) -> tuple[str, ...]:
    """Return the axes that distinguish lines: (`by`,), or at most two that vary, the mixer first; () if none varies.

    Args:
        data: The sweep.
        by: Axis of --by; None: not given.

    Raises:
        ReportError: `by` is not an axis that varies.
    """
    vary = [axis for axis in (*AXES, *data.extra_axes()) if len(data.levels(axis)) > 1]
    if by is not None and by not in vary:
        still = by in AXES or any(by in cell.axes for cell in data.cells)
        why = (
            f"all cells of sweep {data.sweep} have the same level of it"
            if still
            else f"sweep {data.sweep} has no such axis"
        )
        raise ReportError(f"--by {by if still else by[:60]}: {why}; {choices_hint(by, vary)}")
    if by is not None:
        return (by,)
    return tuple(axis for axis in ("attn_type", *axes_of_lines(data)) if axis in vary)[:2]


def _drawn_points(points: np.ndarray, max_points: int) -> np.ndarray:
    """Return the sorted indices of the points to draw: all, or about `max_points` of more.

    Training points and validations are thinned separately, each to at most half of `max_points`.

    Args:
        points: Array [points, columns of CURVE].
        max_points: Maximum number of points.
    """
    if len(points) <= max_points:
        return np.arange(len(points))
    validated = np.flatnonzero(~np.isnan(points[:, VAL]))
    trained = np.flatnonzero(~np.isnan(points[:, TRAIN]))
    chosen = [which[thinned_indices(len(which), max_points // 2)] for which in (validated, trained) if len(which)]
    return np.unique(np.concatenate(chosen))


def thinned_indices(points: int, max_points: int) -> np.ndarray:
    """Return at most `max_points` ascending indices of `points` points.

    They are the first one, and every k-th counted back from the last; all if there are no more.

    Args:
        points: Number of points.
        max_points: Maximum number of indices, at least 2.
    """
    if points <= max_points:
        return np.arange(points)
    stride = -(-(points - 1) // (max_points - 1))
    return np.concatenate([[0], np.arange((points - 1) % stride or stride, points, stride)])


def exponential_mean(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Return the exponential moving average of span `width`, as an array of the same length.

    It uses previous values and the present one, with weights that sum to 1 and fall by the factor 1 - 2 / (width + 1)
    per value that is not NaN. It is NaN where the value is NaN; a width of 1 changes nothing.
    """
    series = pd.Series(values, dtype=float)
    return series.ewm(span=width, ignore_na=True).mean().where(series.notna()).to_numpy()


def _frame(
    data: SweepData, newest: Mapping[int, CellState], parts: Mapping[int, np.ndarray], axes: Sequence[str]
) -> pd.DataFrame:
    """Return the points of all attempts as one frame; empty, without columns, if there are none.

    Columns, in order: cell (id), attempt (id), configuration, first, second, diverged (bool), step, tokens, wall_s,
    train_loss, val_loss, smoothed. Rows are attempt by attempt in the order of `parts`.

    Args:
        data: The sweep.
        newest: Cell by attempt id.
        parts: Array [points, columns] by attempt id; the columns are CURVE, then the smoothed training loss.
        axes: Axes whose levels become the columns first and second: with one axis only `second` is "", without axes
            both are.
    """
    if not parts:
        return pd.DataFrame()
    configuration, rows = configuration_of(data), []
    for attempt in parts:
        cell = newest[attempt]
        levels = [*(cell_level(cell, axis) for axis in axes), "", ""]
        whose = cell.cell_id, attempt, configuration[cell.cell_id], *levels[:2], cell.state == "diverged"
        rows.append(whose)
    owners = pd.DataFrame(rows, columns=["cell", "attempt", "configuration", "first", "second", "diverged"])
    frame = owners.loc[np.repeat(np.arange(len(rows)), [len(part) for part in parts.values()])].reset_index(drop=True)
    numbers = pd.DataFrame(np.concatenate(list(parts.values())), columns=[*CURVE, "smoothed"])
    numbers = numbers[[*CURVE[:TRAIN], "train_loss", "val_loss", "smoothed"]]
    return frame.join(numbers.astype({"step": np.int64, "tokens": np.int64}))


def _notes(frame: pd.DataFrame, curves: _CurveSet, over: str, log: bool) -> list[str]:
    """Return the notes on lines, bands, smoothing, diverged cells and thinning.

    Args:
        frame: Points of curves, with cell, configuration, first, second, diverged, train_loss and val_loss.
        curves: The curves of the sweep.
        over: Labels of the axes that means are over; "" without any.
        log: Whether the axes are logarithmic.
    """
    width, longest, most = curves.widest, curves.longest, curves.most
    validated, trained = frame["val_loss"].notna().any(), frame["train_loss"].notna().any()
    notes = []
    if validated:
        sound = frame[frame["val_loss"].notna() & ~frame["diverged"]]
        cells = sound.groupby(["first", "second"])["cell"].nunique()
        means = f"means over {over} (n = {count_range(cells)} per line)" if over and len(cells) else "means"
        thin = "Thin lines: single cells. " if cells_stand_out(frame, "val_loss") else ""
        notes.append(
            f"{thin}{'Thick lines' if thin else 'Lines'}: {means}; marks tell lines apart; numbers: mean final loss."
        )
        units = sound.groupby(["first", "second"])[["configuration", "cell"]].nunique().max(axis=1)
        if over and len(units) and units.max() >= MIN_UNITS_OF_BAND:
            across = "configurations" if sound["configuration"].nunique() > len(units) else "seeds"
            interval = f"half of the {BARS[across].replace('intervals', 'interval', 1)} of a final loss"
            # single cells show the spread themselves, and bands would hide them
            bands = "" if thin else "Bands would be narrower than the lines. "
            if not thin and _has_visible_bands(sound):
                bands = f"Bands: {BARS[across]}. "
            notes.append(f"{bands}±: {interval}.")
        notes.append("A mean ends where the first of its cells ends." if _ends_differ(frame) else "")
        notes.append(_last_validation_note(mean_curves(sound, "val_loss")))
    else:
        notes.append("No validation loss is stored.")
    if trained and smoothed_enough(frame):
        span = f"exponential mean of span {counted(width, 'point')}" if width > 1 else "not smoothed"
        notes.append(f"{'Dotted' if validated else 'Lines'}: training loss, {span}.")
    elif trained and validated:
        points = int(frame[frame["train_loss"].notna()].groupby("cell").size().max())
        notes.append(f"Training loss (n = {points} points per curve) is not drawn.")
    elif trained:
        points = int(frame[frame["train_loss"].notna()].groupby("cell").size().max())
        notes.append(f"Lines: training loss (n = {points} points per curve), not smoothed.")
    diverged = frame[frame["diverged"]]["cell"].nunique()
    if diverged:
        notes.append(f"{diverged} diverged and are excluded from means.")
    if longest > most:
        notes.append(f"Drawn: at most {most} of up to {longest:,} points per curve.")
    if log:
        notes.append("Logarithmic axes omit what was measured before the first token.")
    elif frame["step"].gt(0).any():
        notes.append("The y axis is cut to the values of the last 80 % of the training.")
    return [note for note in notes if note]


def _last_validation_note(means: pd.DataFrame) -> str:
    """Return the sentence on the numbers of tokens of final losses; "" without any.

    If these differ it says by how much a mean falls in the tokens between them, by its last two points.

    Args:
        means: Rows of `mean_curves` over tokens.
    """
    if means.empty:
        return ""
    ends = means.groupby(["first", "second"], sort=False)["tokens"].max()
    first, last = float(ends.min()), float(ends.max())
    slopes = [
        -np.diff(curve["value"].to_numpy()[-2:])[0] / np.diff(curve["tokens"].to_numpy()[-2:])[0]
        for _, curve in means.groupby(["first", "second"], sort=False)
        if len(curve) > 1
    ]
    name, unit = next((candidate for candidate in UNITS if last >= candidate[1]), UNITS[-1])
    noun = f"{name[name.find('(') + 1 : -2]} tokens" if "(" in name else name
    if first == last or not slopes:
        return f"Final losses: after {last / unit:.4g} {noun}."
    return (
        f"Final losses are after {first / unit:.4g} to {last / unit:.4g} {noun}, between which a mean falls by at most "
        f"{max(0.0, *slopes) * (last - first):.1g} nats per token."
    )


def _has_visible_bands(sound: pd.DataFrame) -> bool:
    """Return True if a band is wider than about its line in what the y axis covers.

    Args:
        sound: Points of curves with a validation loss, without diverged cells.
    """
    means = mean_curves(sound, "val_loss")
    late = means[means["tokens"] >= (1 - SHOWN_SHARE) * means["tokens"].max()]
    span = late["value"].max() - late["value"].min()
    return bool((2 * late["half"] > VISIBLE_BAND * span).any())


def _coinciding_note(frame: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """Return the note on mean lines of which one hides the other in what the y axis covers, as a list; empty without any.

    Args:
        frame: Points of curves.
        axes: Axes of first and second.
    """
    means = mean_curves(frame[~frame["diverged"]], "val_loss")
    means = means[means["tokens"] >= (1 - SHOWN_SHARE) * means["tokens"].max()] if len(means) else means
    panels = means["first"].map(lambda level: drawing.level_label(level, axes[0]) if axes else level)
    lines = means["first"] + ", " + means["second"]
    return coinciding_note(means.assign(panel=panels, line=lines, length=means["tokens"]), axes, "points")


def cells_stand_out(frame: pd.DataFrame, column: str) -> bool:
    """Return True if the line of a single cell can be seen next to the mean of its group (first, second).

    A cell diverged, or its loss differs from the mean of its group at the same step, in the last 80 % of the training,
    by more than 3 % of the range of all losses there.

    Args:
        frame: Points of curves.
        column: Column of the losses.
    """
    late = frame[frame[column].notna() & (frame["tokens"] >= (1 - SHOWN_SHARE) * frame["tokens"].max())]
    spread = float(late[column].max() - late[column].min())
    off = late[column] - late.groupby(["first", "second", "step"])[column].transform("mean")
    return bool(frame["diverged"].any() or (off.abs() > VISIBLE_SHARE * spread).any() or _ends_differ(frame))


def _ends_differ(frame: pd.DataFrame) -> bool:
    """Return True if the curves of a group (first, second) end at different numbers of tokens."""
    sound = frame[frame["val_loss"].notna() & ~frame["diverged"]]
    last = sound.groupby(["first", "second", "cell"])["tokens"].max().groupby(["first", "second"])
    return bool((last.min() < 0.98 * last.max()).any())


def mean_curves(frame: pd.DataFrame, column: str, x: str = "tokens") -> pd.DataFrame:
    """Return the mean curve of each group (first, second): a frame with one row per group and point of x.

    Columns: first, second, x (under its own name), value (mean over configurations, seeds averaged first), sd (sample
    standard deviation between configurations, or seeds where there is a single configuration; NaN for one cell), half
    (half of the 95 % t interval over these; NaN for fewer than three), cells (with a value there). Curves that were not measured at the same points are interpolated linearly, on at most 120
    points. Only points that all cells of the group cover have a mean.

    Args:
        frame: Points of curves, with cell, configuration, first, second, `x` and `column`; without diverged cells.
        column: Column to average.
        x: Column of the x axis.
    """
    rows = []
    measured = frame[frame[column].notna()]
    for (first, second), group in measured.groupby(["first", "second"], sort=False):
        curves = {
            (curve["configuration"].iloc[0], cell): curve[[x, column]].to_numpy(dtype=float).T
            for cell, curve in group.groupby("cell", sort=False)
        }
        grid = np.unique(np.concatenate([x_values for x_values, _ in curves.values()]))
        if any(len(x_values) != len(grid) for x_values, _ in curves.values()) and len(grid) > GRID:
            grid = np.linspace(grid[0], grid[-1], GRID)
        table = pd.DataFrame(
            {key: np.interp(grid, curve[0], curve[1], np.nan, np.nan) for key, curve in curves.items()}, index=grid
        )
        table = table.dropna()  # otherwise the mean would jump wherever a cell ends
        each = table.T.groupby([configuration for configuration, _ in curves]).mean().T
        spread = each.std(axis=1) if each.shape[1] > 1 else table.std(axis=1)
        units = each.shape[1] if each.shape[1] > 1 else table.shape[1]
        half = t_half_width(units, spread.to_numpy()) if units >= MIN_UNITS_OF_BAND else math.nan
        columns = {"first": first, "second": second, x: table.index, "value": each.mean(axis=1).to_numpy()}
        columns |= {"sd": spread.to_numpy(), "half": half, "cells": table.notna().sum(axis=1).to_numpy()}
        rows.append(pd.DataFrame(columns))
    empty = pd.DataFrame(columns=["first", "second", x, "value", "sd", "half", "cells"])
    return pd.concat(rows, ignore_index=True) if rows else empty


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per mixer with its mean lines, and its cells where they can be told from these; else one panel of all.

    Mean lines end in their final loss. Over time there are no means: a marker stands at the mean of the cells' last
    losses and times. Without any validation loss the training loss is drawn. Highlighted cells of `look` are black, and
    labelled.
    """
    frame, x = figure_data.frame, figure_data.draw_options["x"]
    column = "val_loss" if frame["val_loss"].notna().any() else "smoothed"
    sound = frame[~frame["diverged"]]
    means, behind = (mean_curves(sound, name, x) for name in (column, "smoothed"))
    if x != "tokens":
        means = behind = means.iloc[:0]
    if column == "smoothed" or not smoothed_enough(frame):
        behind = means.iloc[:0]
    ends = final_points(sound, column, x)
    units = UNITS if x == "tokens" else TIMES
    unit, scale = next((candidate for candidate in units if frame[x].max() >= candidate[1]), units[-1])
    axes_of_groups, reference = figure_data.draw_options["axes"], figure_data.draw_options["beside"]
    styles = group_styles(frame, axes_of_groups, reference)
    firsts = list(dict.fromkeys(frame["first"]))
    by_mixer = len(firsts) > 1 and (axes_of_groups[:1] == ("attn_type",) or reference is not None)
    first_axis = (*axes_of_groups, "")[0]
    titles = [first if first == reference else drawing.level_label(first, first_axis) for first in firsts]
    titles = titles if by_mixer else [""]
    figure = drawing.page(
        (drawing.PANEL_HEIGHT * drawing.rows_of(len(titles)) if by_mixer else 2.4) + 0.2,
        drawing.width_of(len(titles)) if by_mixer else 4.8,
    )
    log = figure_data.draw_options["log"]
    is_narrow = by_mixer and figure.get_figwidth() < drawing.NARROW_WIDTH
    limits = _y_limits(frame, [column, *(["smoothed"] if len(behind) else [])], x, log=log)
    has_cells = means.empty or cells_stand_out(frame, column)
    for axes, first in zip(drawing.panels(figure, titles, sharex=True, sharey=True), firsts, strict=False):
        groups = [key for key in styles if key[0] == first or not by_mixer]
        panel_rows = frame[frame["first"] == first] if by_mixer else frame
        panel_ends = {key: end for key, end in ends.items() if key in groups}
        if has_cells:
            _draw_cells(axes, panel_rows, x, column, styles, scale, look.highlight)
        _draw_training_loss(axes, behind[behind["first"] == first] if by_mixer else behind, x, styles, scale)
        _draw_means(axes, means, x, {key: styles[key] for key in groups}, scale, banded=not has_cells)
        if x != "tokens":
            _draw_ends(axes, panel_ends, styles, scale)
        _set_scales(axes, log=log)
        if limits is not None:
            # the list of final losses is as high as a seventh of a narrow panel
            axes.set_ylim(limits[0], limits[1] + is_narrow * (limits[1] - limits[0]) / 7)
            if x == "tokens" and not log and not is_narrow:
                axes.set_xlim(left=_first_shown(frame, column, x, limits[1]) / scale)
        _draw_highlighted(axes, panel_rows, x, column, scale, named_cells(figure_data, look))
        complete = means if x == "tokens" else pd.DataFrame(list(panel_ends), columns=["first", "second"])
        shown = set(map(tuple, complete[["first", "second"]].to_numpy()))
        labelled = [key for key in panel_ends if key in shown and _ends_together(sound, key, x, column)]
        texts = [(_end_label(panel_ends[key][1], means, key), panel_ends[key][1], styles[key][1]) for key in labelled]
        if by_mixer and x == "tokens":
            _list_final_losses(axes, sorted(texts, key=lambda entry: -entry[1]), is_narrow=is_narrow)
        else:
            label_ends(axes, [(text, y, look["color"]) for text, y, look in texts])
    drawing.outer_labels(figure, unit, f"{'validation' if column == 'val_loss' else 'training'} loss (nats per token)")
    handles = _legend_handles(frame, ends, styles, axes_of_groups if by_mixer and reference is None else None)
    if len(behind):
        dotted: dict[str, Any] = {"color": drawing.GREY, "linestyle": (0, (1, 1.5))}
        handles["training loss"] = drawing.key(**dotted, linewidth=drawing.line_width(0.8))
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=4 if by_mixer else 3)


def _end_label(loss: float, means: pd.DataFrame, key: tuple[str, str]) -> str:
    """Return a mean final loss as text, with half of its interval: "3.154 ± 0.004".

    The latter is left out without an interval.

    Args:
        loss: The loss.
        means: Rows of `mean_curves`.
        key: The group (first, second).
    """
    own = means[(means["first"] == key[0]) & (means["second"] == key[1])] if len(means) else means
    text, half = (
        format_number(loss, END_DECIMALS),
        float(own["half"].to_numpy(dtype=float)[-1]) if len(own) else math.nan,
    )
    return f"{text} ± {max(10.0**-END_DECIMALS, half):.{END_DECIMALS}f}" if math.isfinite(half) else text


def _list_final_losses(axes: Axes, entries: Sequence[tuple[str, float, Mapping[str, Any]]], *, is_narrow: bool) -> None:
    """List final losses in the upper right corner, where falling curves leave space, each with the mark of its line.

    Args:
        axes: The panel.
        entries: (text, loss, line style) of each line, from top to bottom.
        is_narrow: Whether an interval stands below its loss.
    """
    from matplotlib.transforms import ScaledTranslation

    figure: Any = axes.figure
    line, room = 1.3 * drawing.size("small"), drawing.line_width(MARK_ROOM)
    style_of_text: dict[str, Any] = {"xycoords": "axes fraction", "ha": "right", "va": "center", "zorder": 6}
    rows: list[tuple[str, str, Mapping[str, Any] | None]] = [("final loss", style.GREY, None)] * bool(entries)
    for entry, _, mark_look in entries:
        first, *rest = entry.replace(" ± ", "\n±" if is_narrow else " ± ").split("\n")
        rows += [(first, mark_look["color"], mark_look), *((part, mark_look["color"], None) for part in rest)]
    for row, (text, ink, look) in enumerate(rows):
        down = -(row + 0.5) * line
        shift = (-1 if row == 0 else -room - 2, down)
        drawing.note(axes, text, (1, 1), shift, color=ink, bbox=drawing.BACKING, **style_of_text)
        if look is not None:
            corner = axes.transAxes + ScaledTranslation(-room / 144, down / 72, figure.dpi_scale_trans)
            mark = {name: look[name] for name in MARK}
            axes.plot([1], [1], transform=corner, clip_on=False, linestyle="none", zorder=6, **mark)


def _set_scales(axes: Axes, *, log: bool) -> None:
    """Set the scales of a panel and as many x ticks as fit.

    Args:
        axes: The panel.
        log: Whether both axes are logarithmic.
    """
    room = drawing.ticks_that_fit(axes, 4)
    if log:
        axes.set(xscale="log", yscale="log")
        drawing.log_ticks(axes.xaxis, room, (1, 3) if room > 3 else (1,))
        drawing.log_ticks(axes.yaxis, 8, (1, 2, 3, 4, 5, 6, 8))
    else:
        axes.locator_params(axis="x", nbins=room)
    # the numbers at the ends of lines make panels narrower than planned
    drawing.after_layout(axes.figure, lambda: hide_overlapping_labels(axes))  # type: ignore[arg-type]


def smoothed_enough(frame: pd.DataFrame) -> bool:
    """Return True if a curve has at least 80 points of training loss, so that the smoothing spans two of them."""
    counts = frame[frame["train_loss"].notna()].groupby("cell").size()
    return bool(len(counts) and counts.max() >= MIN_SMOOTHED_POINTS)


def final_points(frame: pd.DataFrame, column: str, x: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the mean of the last (x, loss) of the cells of each group (first, second), seeds averaged first.

    Args:
        frame: Points of curves, with cell, configuration, first, second, `x` and `column`; without diverged cells.
        column: Column of the losses.
        x: Column of the x axis.
    """
    last = frame[frame[column].notna()].drop_duplicates("cell", keep="last")
    each = last.groupby(["first", "second", "configuration"], sort=False)[[x, column]].mean()
    rows = each.groupby(["first", "second"], sort=False).mean().reset_index()
    return {(str(r["first"]), str(r["second"])): (float(r[x]), float(r[column])) for r in rows.to_dict("records")}


def _ends_together(frame: pd.DataFrame, key: tuple[str, str], x: str, column: str) -> bool:
    """Return True if the curves of a group end within 2 % of the same number of tokens; over time always True.

    Args:
        frame: Points of curves.
        key: The group (first, second).
        x: Column of the x axis.
        column: Column of the losses.
    """
    group = frame[(frame["first"] == key[0]) & (frame["second"] == key[1]) & frame[column].notna()]
    last = group.groupby("cell")[x].max()
    return x != "tokens" or bool(last.min() >= 0.98 * last.max())


def _y_limits(frame: pd.DataFrame, columns: Sequence[str], x: str, *, log: bool) -> tuple[float, float] | None:
    """Return the (low, high) limits of the losses after the first fifth of the training; None to leave them alone.

    A logarithmic axis, and one on which a single point per curve stands, shows every loss; diverged cells, whose losses
    would flatten the rest, end the axis a tenth above the others.

    Args:
        frame: Points of curves, with cell, diverged, `x` and `columns`.
        columns: Columns of the losses, the one of the main lines first.
        x: Column of the x axis.
        log: Whether the axes are logarithmic.
    """
    if (top := _y_top(frame, columns[0])) is not None:
        return 0, top
    ends = frame.groupby("cell")[x].transform("max")
    late = frame[frame[x] >= (1 - SHOWN_SHARE) * ends][list(columns)].to_numpy(dtype=float).ravel()
    late = late[np.isfinite(late)]
    if log or not len(late):
        return None
    low, high = float(late.min()), float(late.max())
    room = 0.05 * (high - low) or 0.05 * abs(high)
    return low - room, high + room


def _first_shown(frame: pd.DataFrame, column: str, x: str, top: float) -> float:
    """Return the left end of the x axis: a bit before the first point whose loss is at most `top`, and at least 0.

    Args:
        frame: Points of curves, with `x` and `column`.
        column: Column of the losses.
        x: Column of the x axis.
        top: Upper end of the y axis.
    """
    last = float(frame[x].max())
    return max(0.0, float(frame.loc[frame[column] <= top, x].min()) - 0.06 * last)


def _y_top(frame: pd.DataFrame, column: str) -> float | None:
    """Return the upper end of the y axis where diverged cells would flatten it; None where no cell diverged.

    It is a tenth above the other losses, or above the first losses if all cells diverged.

    Args:
        frame: Points of curves, with cell, diverged and `column`.
        column: Column of the losses.
    """
    measured = frame[frame[column].notna()]
    if not measured["diverged"].any():
        return None
    sound = measured[~measured["diverged"]]
    values = sound[column] if len(sound) else measured.drop_duplicates("cell")[column]
    return 1.1 * float(values.max())


GroupStyles = Mapping[tuple[str, str], tuple[str, dict[str, Any]]]
"""Label and line style by group (first, second)."""


def group_styles(frame: pd.DataFrame, axes: Sequence[str], reference_sweep: str | None = None) -> GroupStyles:
    """Return (label, line style) of each group (first, second): ink by the first axis, dashes and marks by the second.

    Mixers have their inks, memories their dashes and fills, windows their markers; other axes take them in order.

    Args:
        frame: Rows with first and second; at least one.
        axes: The axes of first and second; fewer give a label of fewer levels, "all cells" without any.
        reference_sweep: Name of an added sweep, whose groups are labelled by their values; None: none was added.
    """
    groups = list(frame[["first", "second"]].drop_duplicates().itertuples(index=False, name=None))
    firsts, seconds = (list(dict.fromkeys(levels)) for levels in zip(*groups, strict=True))
    seconds = sorted(seconds, key=lambda level: -drawing.off_first(level))
    first_axis, second_axis = (*axes, "", "")[:2]
    inks = dict(zip(firsts, style.SERIES_INKS * (1 + len(firsts) // len(style.SERIES_INKS)), strict=False))
    if first_axis == "attn_type":
        inks = style.mixer_inks(firsts)
    elif first_axis == "reg_mode":
        inks = {level: style.regularizer_ink(style.SERIES_INKS[0], level) for level in firsts}
    styles = {}
    for first, second in groups:
        labels = [drawing.level_label(level, axis) for level, axis in zip((first, second), axes, strict=False)]
        labels = [first, second] if first == reference_sweep else labels
        levels = {first_axis: first, second_axis: second}
        dash = style.MEMORY_DASHES.get(levels.get("memory", ""), 0 if "memory" in levels else seconds.index(second))
        if first == reference_sweep:
            dash = [level for sweep, level in groups if sweep == first].index(second)
        marker = style.WINDOW_MARKERS.get(levels.get("window", ""), 0)
        marker = firsts.index(first) if first_axis not in ("attn_type", "window", "") else marker
        ink, hollow = inks[first], dash == style.MEMORY_DASHES["off"]
        styles[first, second] = ", ".join(labels) or "all cells", {
            "color": ink, "linestyle": style.DASHES[dash % len(style.DASHES)], "marker": style.MARKERS[marker % len(style.MARKERS)],
            "markerfacecolor": style.BACKGROUND if hollow else ink, "markeredgecolor": ink,
        }  # fmt: skip
    return styles


def _legend_handles(
    frame: pd.DataFrame,
    ends: Mapping[tuple[str, str], tuple[float, float]],
    styles: GroupStyles,
    axes: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the legend handles by label: of the second axis alone where panels show the first, else of all groups.

    All groups are ordered by final loss, those of which all cells diverged last.

    Args:
        frame: Points of curves, with first and second.
        ends: Final (x, loss) by group; those without one count as diverged.
        styles: Label and style by group.
        axes: Axes of first and second if panels show the first; None: one panel shows all.
    """
    handles: dict[str, Any] = {}
    if axes is not None:
        for second in sorted(dict.fromkeys(frame["second"]), key=drawing.off_first):
            look = next(group_style for key, (_, group_style) in styles.items() if key[1] == second)
            dark = {"color": style.GREY, "markeredgecolor": style.GREY}
            dark |= {"markerfacecolor": style.GREY} if look["markerfacecolor"] != style.BACKGROUND else {}
            label = drawing.level_label(second, axes[1]) if len(axes) > 1 else "mean"
            handles[label] = drawing.key(**look | dark)
        return handles
    for key in sorted(ends, key=lambda key: ends[key][1]):
        handles[styles[key][0]] = drawing.key(**styles[key][1])
    for label, group_style in (entry for key, entry in styles.items() if key not in ends):
        handles[f"{label}: diverged"] = drawing.key(color=group_style["color"], linewidth=drawing.line_width(0.4))
    return handles


def _draw_ends(
    axes: Axes, ends: Mapping[tuple[str, str], tuple[float, float]], styles: GroupStyles, scale: float
) -> None:
    """Draw a large marker at the final (x, loss) of each group.

    Args:
        axes: The panel.
        ends: Final (x, loss) by group.
        styles: Label and style by group.
        scale: Divisor from values of x to units of the axis.
    """
    for key, (at, y) in ends.items():
        look = {name: value for name, value in styles[key][1].items() if name not in ("linestyle", "marker")}
        drawing.points(
            axes, at / scale, y, styles[key][1]["marker"], markersize=6, markeredgewidth=1.2, zorder=3.2, **look
        )


def _draw_means(axes: Axes, means: pd.DataFrame, x: str, styles: GroupStyles, scale: float, *, banded: bool) -> None:
    """Draw the mean curve of each group with a white halo, dashed ones on top, and the band of its 95 % intervals.

    The band of a dashed line has no fill but a dashed edge, so that bands that coincide are told apart.

    Args:
        axes: The panel.
        means: Rows of `mean_curves`, with first, second, `x` and value.
        x: Column of the x axis.
        styles: Label and style by group.
        scale: Divisor from values of `x` to units of the axis.
        banded: Whether bands are drawn.
    """
    for rank, key in enumerate(styles):
        line = means[(means["first"] == key[0]) & (means["second"] == key[1])]
        stride = max(1, len(line) // 6)
        # every line has a mark at its end, where final losses are compared
        marked = [*range(rank % stride, len(line) - 1 - stride // 2, stride), *([len(line) - 1] if len(line) else [])]
        look: dict[str, Any] = {"markevery": marked, "linewidth": drawing.line_width(1.2)} | styles[key][1]
        halo: dict[str, Any] = {"color": style.BACKGROUND, "linewidth": drawing.line_width(2.6)}
        axes.plot(line[x] / scale, line["value"], zorder=HALO_ZORDER, **halo)
        is_dashed = look["linestyle"] != "-"
        if banded and line["half"].notna().any():
            ends = line["value"] - line["half"], line["value"] + line["half"]
            shade: dict[str, Any] = {"facecolor": look["color"], "alpha": 0.3, "linewidth": 0, "zorder": 2}
            if is_dashed:
                edge = {"edgecolor": look["color"], "linestyle": look["linestyle"]}
                shade = edge | {"facecolor": "none", "linewidth": drawing.line_width(0.4), "zorder": 2.1}
            axes.fill_between(line[x] / scale, *ends, **shade)
        axes.plot(line[x] / scale, line["value"], zorder=3.01 + 0.02 * rank + DASHED_ZORDER * is_dashed, **look)


def _draw_cells(
    axes: Axes, frame: pd.DataFrame, x: str, column: str, styles: GroupStyles, scale: float, named: Sequence[str]
) -> None:
    """Draw every cell's own curve, thin; those of a group in one collection, which is a hundred times faster.

    Args:
        axes: The panel.
        frame: Points of curves, with cell, first, second, `x` and `column`.
        x: Column of the x axis.
        column: Column of the losses.
        styles: Label and style by group.
        scale: Divisor from values of `x` to units of the axis.
        named: Highlighted cells; if there are any, all curves are fainter.
    """
    from matplotlib.collections import LineCollection

    measured = frame[frame[column].notna()]
    for (first, second), group in measured.groupby(["first", "second"], sort=False):
        curves = [
            curve[[x, column]].to_numpy(dtype=float) / (scale, 1) for _, curve in group.groupby("cell", sort=False)
        ]
        look = styles[str(first), str(second)][1]
        alpha = (0.5 if named else 1.0) * min(0.5, max(0.08, 8 / len(curves)))
        thin = {"linewidths": drawing.line_width(0.5), "alpha": alpha, "zorder": 1.5, "linestyles": look["linestyle"]}
        axes.add_collection(LineCollection(curves, colors=look["color"], **thin), autolim=True)
    axes.autoscale_view()


def _draw_training_loss(axes: Axes, behind: pd.DataFrame, x: str, styles: GroupStyles, scale: float) -> None:
    """Draw the smoothed training loss of every group, dotted and faint.

    Args:
        axes: The panel.
        behind: Rows of `mean_curves` of the smoothed training loss, with first, second, `x` and value.
        x: Column of the x axis.
        styles: Label and style by group.
        scale: Divisor from values of `x` to units of the axis.
    """
    for (first, second), line in behind.groupby(["first", "second"], sort=False):
        style = {"color": styles[str(first), str(second)][1]["color"], "linestyle": (0, (1, 1.5)), "alpha": 0.7}
        axes.plot(line[x] / scale, line["value"], **style, linewidth=drawing.line_width(0.8), zorder=1)


def _draw_highlighted(
    axes: Axes, frame: pd.DataFrame, x: str, column: str, scale: float, named: dict[str, str]
) -> None:
    """Draw the highlighted curves in black, with labels at their ends.

    Args:
        axes: The panel.
        frame: Points of curves, with cell, `x` and `column`.
        x: Column of the x axis.
        column: Column of the losses.
        scale: Divisor from values of `x` to units of the axis.
        named: Label by highlighted cell.
    """
    labels = []
    for cell, label in named.items():
        curve = frame[(frame["cell"] == cell) & frame[column].notna()]
        if len(curve):
            axes.plot(curve[x] / scale, curve[column], color="#000000", linewidth=drawing.line_width(1.1), zorder=3.5)
            labels.append((float(curve[x].iloc[-1]) / scale, float(curve[column].iloc[-1]), label))
    if labels:
        label_line_ends(axes, labels)
