"""Figure `pareto`: quality against speed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ...results.console.text import counted
from ...results.store.records import AXES
from ...results.store.store import Store
from ..best_values import format_probability
from ..number_format import Column, format_number
from ..render import style
from ..result_columns import plain_name, quality_columns, speed_column
from ..stats.effects.effects import pareto
from ..stats.effects.needle_baseline import constant_answer_score, needle_caption, recall_threshold
from ..stats.noise.best_probability import candidates_by_configuration, front_probabilities
from ..sweep_data import ReportError, SweepData, cell_level
from ..table_builder import measured_entry
from .canvas import drawing, labels
from .canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from .canvas.line_drawing import BASELINE, mark_baseline, mark_out_of_range, robust_range
from .canvas.scales import round_long_numbers, short_numbers

ROOM = 0.09  # share of an axis that stays free next to the outermost points
LOWEST = -3.0  # percent, lower end of a y axis of shares, whose spine begins at 0
MIN_SIDE_BY_SIDE_WIDTH, STACKED_PANEL_HEIGHT = (
    5.0,
    2.2,
)  # inches of width that two panels need side by side; of height of each, one below the other
FEW = 0.05  # largest share of points that may lie outside the axes, so that they do not flatten the rest
FLAT = 5.0  # percent, least upper end of a y axis of shares: a smaller one would show noise only
FRONT_INK = style.tint(style.GREY, 0.55)  # pale, under points and error bars
LOW_MARK = 2.2  # points in the style `paper`, diameter of a mark up to the constant-digit baseline
RING, MARK, BEHIND = (
    8.0,
    4.8,
    3.2,
)  # points in the style `paper`, diameter of a ring, of a mark, and of one behind the front
SHORT_LIST, LESS_HEIGHT = 5, 0.5
"""Lines of the lists up to which panels side by side, with few labels, are lower; and by how many inches."""
LETTER = 0.54  # width of a character of the list relative to its size
LIST_INDENT = 0.6  # inches from the left of a panel's space to the list below it
LINE_SPACING = 1.25  # of the list below a panel
EXPLAINED = 0.4  # least share of the variance of speeds that a factor without a mark explains to be named
MOST_NAMED = 12  # points of a front that the list below a panel has


def collect(store: Store, data: SweepData) -> FigureData:
    """Return quality against speed, one row per quality and configuration that has both.

    Qualities are validation loss and needle accuracy at the longest length. Columns: quality (heading), metric,
    speed_name, speed, value (means over seeds), speed_sd and sd (standard deviations of these means, from the spread
    between runs of the stratum: cells that share mixer and memory; NaN where unknown), front (True if no other
    configuration is as good in both and better in one, and for needle accuracy only above the constant-digit baseline), seeds (runs behind the means), front_number (1, 2, ... on the front from slow to fast, else 0), p_front (probability of that, NaN where unknown), slug (of its
    first cell), the five axes (attn_type, reg_mode, distractor, memory, window), `name` (mixer and levels that are not
    off), `rest` (these levels except mixer and memory; "baseline" for none of them, if several axes besides the mixer
    vary).

    Speed is tokens/s, or MFU (in %) where the sweep has no tokens/s. Values are nats per token, or %.

    Raises:
        ReportError: No cell has both a speed and a quality.
    """
    speed = speed_column(data, "tokens/s")
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    fewer: dict[tuple[str, str], str] = {}
    for quality in quality_columns(data):
        least = recall_threshold(data, quality)
        points_of_quality, origins_of_quality, lacking = _points(data, speed, quality, least)
        scale = 100 if quality.percent else 1
        candidates = [index for index, point in enumerate(points_of_quality) if point["value"] > scale * least]
        points = [(points_of_quality[index]["speed"], points_of_quality[index]["value"]) for index in candidates]
        on_front = dict(zip(candidates, pareto(points, (1, quality.direction)), strict=True))
        fronts = [on_front.get(index, False) for index in range(len(points_of_quality))]
        # fastest last, as the step line meets them
        order = sorted((point["speed"], index) for index, point in enumerate(points_of_quality) if fronts[index])
        numbers = {index: number for number, (_, index) in enumerate(order, 1)}
        rows += [
            point | {"front": is_on_front, "front_number": numbers.get(index, 0)}
            for index, (point, is_on_front) in enumerate(zip(points_of_quality, fronts, strict=True))
        ]
        origins += origins_of_quality
        fewer |= lacking
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has both a speed and a quality; finish it")
    frame = pd.DataFrame(rows)
    shown = {quality.heading: quality for quality in quality_columns(data) if quality.probe == "needle"}
    needle = {heading: shown[heading].length for heading in dict.fromkeys(frame["quality"]) if heading in shown}
    names = {cell.cell_id: cells[0].slug for cells in data.configurations().values() for cell in cells}
    shown_levels = {names[cell]: label for cell, label in _configuration_labels(data).items()}
    nouns = {quality.heading: plain_name(quality) for quality in quality_columns(data)}
    notes = _notes(frame, fewer, nouns)
    if needle:
        notes.append(needle_caption(data, needle.values()))
    constant = {
        heading: level
        for heading, length in needle.items()
        if (level := constant_answer_score(data, length)) is not None
    }
    notes += _recall_notes(frame, constant)
    title = "Quality against speed"
    if speed.heading == "MFU":
        title = "Quality against hardware utilization"
    return collected(
        store, data, "pareto", title, frame, origins, notes=notes, constant=constant, names=names, labels=shown_levels, nouns=nouns,
    )  # fmt: skip


def _points(
    data: SweepData, speed: Column, quality: Column, least: float
) -> tuple[list[dict[str, Any]], list[tuple[str, int | None]], dict[tuple[str, str], str]]:
    """Return the data of one quality.

    Args:
        data: The sweep.
        speed: The speed.
        quality: The quality.
        least: Quality that a point of the front must exceed, as a fraction for shares.

    Returns:
        The rows of `collect` except `front`; the (cell id, attempt id) pairs behind them; and by (quality, name) the
        text "n=k" of means over fewer seeds than the configuration has.
    """
    extra = data.extra_axes()
    varying_axes = [axis for axis in AXES if axis != "attn_type" and len(data.levels(axis)) > 1]
    chances = front_probabilities(data, speed, quality, least)
    spreads = [candidates_by_configuration(data, column) for column in (speed, quality)]
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    fewer = {}
    for key, cells in data.configurations().items():
        fast, good = measured_entry(data, cells, speed), measured_entry(data, cells, quality)
        if fast.value is None or good.value is None:
            continue
        levels = dict(zip((*AXES, *extra), key, strict=True))
        level_texts = {axis: _level_text(axis, levels[axis]) for axis in (*varying_axes, *extra)}
        scales = [100 if column.percent else 1 for column in (speed, quality)]
        sds = [
            scale * spread[key].sd / math.sqrt(spread[key].seeds) if key in spread else math.nan
            for spread, scale in zip(spreads, scales, strict=True)
        ]
        fields: dict[str, Any] = {"quality": quality.heading, "metric": quality.metric, "speed_name": speed.heading}
        fields |= {"speed": fast.value * scales[0], "value": good.value * scales[1], "speed_sd": sds[0], "sd": sds[1]}
        fields |= {"p_front": chances.get(key, math.nan), "slug": cells[0].slug}
        fields |= {axis: levels[axis] for axis in AXES}
        fields |= {"name": " ".join(filter(None, (levels["attn_type"], *level_texts.values())))}
        rest = [word for axis, word in level_texts.items() if axis != "memory" and word]
        fields |= {"seeds": min(fast.seeds, good.seeds)}
        rows.append(fields | {"rest": " ".join(rest) or ("baseline" if len(varying_axes) + len(extra) > 1 else "")})
        origins += [*fast.origins, *good.origins]
        if min(fast.seeds, good.seeds) < len(cells):
            fewer[quality.heading, rows[-1]["name"]] = f"n={min(fast.seeds, good.seeds)}"
    return rows, origins, fewer


def _configuration_labels(data: SweepData) -> dict[str, str]:
    """Return the levels of the configuration of each cell as text, by cell id, with the mixer and without levels off."""
    axes = [axis for axis in (*AXES, *data.extra_axes()) if len(data.levels(axis)) > 1]
    labels_by_cell = {}
    for cell in data.cells:
        levels = [(axis, cell_level(cell, axis)) for axis in axes]
        texts = [
            drawing.level_label(level, axis) + " regularizer" * (axis == "reg_mode")
            for axis, level in levels
            if level not in ("off", "-", "baseline")
        ]
        labels_by_cell[cell.cell_id] = ", ".join(texts) or drawing.level_label(cell.levels["attn_type"])
    return labels_by_cell


def _notes(
    frame: pd.DataFrame,
    fewer: Mapping[tuple[str, str], str],
    nouns: Mapping[str, str],
) -> list[str]:
    """Return the notes on points, bars and means over fewer seeds.

    Args:
        frame: Rows of the figure, with quality, front, p_front, speed_sd and sd.
        fewer: Text "n=k" of the means over fewer seeds than their configuration has.
        nouns: Plain name by quality.
    """
    low, high = int(frame["seeds"].min()), int(frame["seeds"].max())
    runs = f"{low} run" if high == 1 else f"mean over {low} runs" if low == high else f"mean over {low} to {high} runs"
    counts = list(dict.fromkeys(map(int, frame.groupby("quality", sort=False).size())))
    each = f"{counts[0]} per panel" if len(counts) == 1 else " and ".join(map(str, counts))
    fronts = " and ".join(map(str, frame.groupby("quality", sort=False)["front"].sum()))
    notes = [
        f"One point per configuration ({each}, {runs} each). Ringed, numbered and listed below each panel: the Pareto front "
        f"({fronts} configurations). Shaded: dominated, since one of the front is as good in both and better in one."
    ]
    has_error = bool((frame["speed_sd"] > 0).any())
    measured = "speed" if frame["speed_name"].iloc[0] == "tokens/s" else "utilization"
    if frame["p_front"].notna().any():
        exact = "" if has_error else f"; {measured} has no estimate of its error and counts as exact"
        notes.append(
            f"P(on front): probability that a configuration is on the front if all are drawn anew with the spread between "
            f"runs{exact}."
        )
    barred = [word for word, name in ((measured, "speed_sd"), ("quality", "sd")) if (frame[name] > 0).any()]
    if barred:
        medians = [(str(quality), rows["sd"].median()) for quality, rows in frame.groupby("quality", sort=False)]
        texts = [f"{error:.2g} ({nouns[quality]})" for quality, error in medians if error > 0]
        notes.append(
            f"Bars, of the front only: one standard error of the mean {' and '.join(barred)}, from the spread between runs of "
            f"that mixer and memory; one that is not seen is shorter than its mark."
            + (f" Median of all points: {', '.join(texts)}." if texts else "")
        )
    else:
        notes.append("No bars: the spread between runs is unknown.")
    notes += _unseen_factor_note(frame, measured)
    if fewer:
        notes.append(f"{counted(len(fewer), 'mean')} are over fewer seeds than the configuration has.")
    return notes


def _unseen_factor_note(frame: pd.DataFrame, measured: str) -> list[str]:
    """Return the note on the factor that no mark shows and that explains most of the speeds, as a list; empty if none does.

    Args:
        frame: Rows of the figure, with the axes and speed.
        measured: Word for the speed.
    """
    points = frame.drop_duplicates("slug")
    total = float(((points["speed"] - points["speed"].mean()) ** 2).sum())
    explained_shares = []
    for axis in (axis for axis in AXES if axis not in LOOKS and points[axis].nunique() > 1):
        means = points.groupby(axis, sort=False)["speed"].transform("mean")
        explained = float(((means - points["speed"].mean()) ** 2).sum()) / total if total else 0.0
        explained_shares.append((explained, axis))
    if not explained_shares or max(explained_shares)[0] < EXPLAINED:
        return []
    share, axis = max(explained_shares)
    means = points.groupby(axis, sort=False)["speed"].mean()
    texts = [f"{drawing.level_label(str(level), axis)} {_rounded_speed(mean, points)}" for level, mean in means.items()]
    return [
        f"Groups of points side by side: {100 * share:.0f} % of the variance of {measured} is that of the {style.axis_label(axis)}, "
        f"which no mark shows (mean {', '.join(texts)})."
    ]


def _rounded_speed(mean: float, points: pd.DataFrame) -> str:
    """Return a mean speed as text, in the unit of the points."""
    return _speed_text({"speed_name": points["speed_name"].iloc[0], "speed": mean})


def _recall_notes(frame: pd.DataFrame, constant: Mapping[str, float]) -> list[str]:
    """Return the note on points of needle accuracy that the best constant answer reaches, as a list; empty without any.

    Args:
        frame: Rows of the figure, with quality and value.
        constant: Score of the best constant answer as a fraction, by quality.
    """
    notes = []
    for quality, level in constant.items():
        low = frame[(frame["quality"] == quality) & (frame["value"] <= 100 * level)]
        if low.empty:
            continue
        notes.append(f"No recall: {len(low)} configurations at or below the baseline, on no front.")
    return notes


def _level_text(axis: str, level: str) -> str:
    """Return a level as a configuration's name has it; empty for a level that is off."""
    if level in ("off", "baseline", "-"):
        return ""
    return axis if level == "on" else level


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per quality: a point per configuration, ink by mixer, filled with memory, a square with a window.

    The front is stepped, ringed, numbered and listed below its panel. Highlighted cells of `look` have a diamond around
    their configuration and a label. The constant-digit baseline is a line.
    """
    frame = figure_data.frame
    names = list(dict.fromkeys(frame["quality"]))
    styles = _point_styles(frame)
    lists = {name: _front_list(frame[frame["quality"] == name], figure_data.draw_options["labels"]) for name in names}
    figure = drawing.page(2.9, drawing.width_of(len(names), 3.6))
    width = figure.get_size_inches()[0]
    across = 2 if width / look.scale >= MIN_SIDE_BY_SIDE_WIDTH else 1
    if across == 1:
        # stacked panels, since labels next to points need width
        figure.set_size_inches(width, STACKED_PANEL_HEIGHT * len(names) * look.scale)
    letters = int(72 * (width / min(across, len(names)) - LIST_INDENT) / (LETTER * drawing.size("small")))
    texts = {
        name: "\n".join(line for entry in entries for line in textwrap.wrap(entry, letters, subsequent_indent="   "))
        for name, entries in lists.items()
    }
    lines = [text.count("\n") + 1 if text else 0 for text in texts.values()]
    if across > 1 and max(lines) <= SHORT_LIST:
        figure.set_figheight(figure.get_figheight() - LESS_HEIGHT * look.scale)
    figure.set_figheight(
        figure.get_figheight()
        + LINE_SPACING * drawing.size("small") / 72 * (sum(lines) + len(lines) if across == 1 else max(lines) + 1)
    )
    for axes, quality in zip(drawing.panels(figure, [""] * len(names), columns=across), names, strict=True):
        panel_rows = frame[frame["quality"] == quality]
        level = figure_data.draw_options["constant"].get(quality)
        _draw_points(axes, panel_rows, styles, -math.inf if level is None else 100 * level)
        front = panel_rows[panel_rows["front"]].sort_values("speed")
        axes.step(front["speed"], front["value"], **_front_line())
        _draw_rings(axes, front, "o", RING, style.INK, 0.9, 2.8)
        if level is not None:
            mark_baseline([axes], 100 * level)
        _set_axes(axes, panel_rows, quality, figure_data.draw_options["nouns"][quality], 100 * (level or 0.0))
        reached = list(zip(front["speed"], front["value"], strict=True))
        labels.shade_dominated(axes, reached, 1, 1 if quality.startswith("Ndl") else -1)
        # below the axis label, wherever the layout puts it
        below = ("axes fraction", axes.xaxis.label)
        drawing.note(axes, texts[quality], (0, 0), (0, -3), xycoords=below, va="top", linespacing=LINE_SPACING)
        highlighted_slugs = {figure_data.draw_options["names"].get(cell) for cell in look.highlight}
        marked = panel_rows[panel_rows["slug"].isin(highlighted_slugs)]
        _draw_rings(axes, marked, "D", 9, drawing.BAD, 1.4, 2.9)
        labels_by_point: dict[tuple[float, float], list[str]] = {}
        for row in front.to_dict("records"):
            labels_by_point.setdefault((float(row["speed"]), float(row["value"])), []).append(str(row["front_number"]))
        for row in marked.to_dict("records"):
            label = figure_data.draw_options["labels"][row["slug"]]
            labels_by_point.setdefault((float(row["speed"]), float(row["value"])), []).append(label)
        _label_after_layout(
            axes,
            [(*point, ", ".join(labels_at_point)) for point, labels_at_point in labels_by_point.items()],
            panel_rows,
        )
    handles = legend_of_points(frame) | {"Pareto front": drawing.key(**_front_line())} | labels.dominated_key()
    if (frame.loc[frame["front"], ["speed_sd", "sd"]] > 0).any(axis=None):
        handles["± standard error"] = _bar_key()
    for level in list(figure_data.draw_options["constant"].values())[:1]:
        if (frame["quality"].isin(figure_data.draw_options["constant"]) & (frame["value"] <= 100 * level)).any():
            handles["no recall"] = drawing.key(color=style.GREY, linestyle="none", **_low_mark(style.GREY))
        handles[f"constant digit ({format_number(level, 1, percent=True)} %)"] = drawing.key(**BASELINE)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=4)


def _front_list(panel_rows: pd.DataFrame, labels_by_slug: Mapping[str, str]) -> list[str]:
    """Return "number levels: quality at speed (p)" of each configuration of a front below a head, at most twelve and how many follow.

    Args:
        panel_rows: Rows of one quality, with front, front_number, slug, speed, value and p_front.
        labels_by_slug: Levels of each configuration as text.
    """
    front = panel_rows[panel_rows["front"]].sort_values("front_number")
    entries = [
        f"{row['front_number']} {round_long_numbers(labels_by_slug[row['slug']])}"
        + f": {_quality_text(row)} at {_speed_text(row)}"
        + ("" if math.isnan(row["p_front"]) else f" ({format_probability(row['p_front'])})")
        for row in front.to_dict("records")
    ]
    chances = " (P(on front))" if front["p_front"].notna().any() else ""
    head = [f"Pareto front, from left to right{chances}:" if entries else "no configuration exceeds the constant digit"]
    return head + entries[:MOST_NAMED] + [f"and {len(entries) - MOST_NAMED} more"] * (len(entries) > MOST_NAMED)


def _quality_text(row: Mapping[Any, Any]) -> str:
    """Return the quality of a configuration as text: a loss with three decimals, a share in percent."""
    return f"{row['value']:.0f}\u00a0%" if str(row["quality"]).startswith("Ndl") else f"{row['value']:.3f}"


def _speed_text(row: Mapping[Any, Any]) -> str:
    """Return the speed of a configuration as text: a utilization in percent, or tokens per second with a K or M."""
    if row["speed_name"] == "MFU":
        return f"{row['speed']:.1f}\u00a0%"
    size, letter = (1e6, "M") if row["speed"] >= 1e6 else (1e3, "K")
    return f"{row['speed'] / size:.3g}{letter}\u00a0tokens/s"


def _front_line() -> dict[str, Any]:
    """Return the style of the front: a pale, broad line, on which error bars are seen."""
    return {"color": FRONT_INK, "linewidth": drawing.line_width(2.6), "zorder": 1, "solid_capstyle": "butt"}


def _bar_key() -> Any:
    """Return the legend handle of an error bar: an upright stroke."""
    width = drawing.line_width(0.8)
    return drawing.key(
        color=style.INK, linestyle="none", marker="|", markersize=drawing.line_width(9), markeredgewidth=width
    )


PointStyles = Mapping[tuple[str, str, str], dict[str, Any]]
"""Marker style by (mixer, memory, window)."""
LOOKS = ("attn_type", "memory", "window")
"""Axes that a point shows; the list below a panel names the other levels of the front."""


def _point_styles(frame: pd.DataFrame) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the marker style of each (mixer, memory, window) that occurs; no point is hollow if no memory varies."""
    inks, varies = style.mixer_inks(frame["attn_type"]), frame["memory"].nunique() > 1
    return {
        (mixer, memory, window): style.memory_look(inks[mixer], memory if varies else "on")
        | {"marker": style.MARKERS[style.WINDOW_MARKERS.get(window, 0)], "linestyle": "none"}
        | {"markeredgewidth": drawing.line_width(0.8)}
        for mixer, memory, window in dict.fromkeys(frame[list(LOOKS)].itertuples(index=False, name=None))
    }


def legend_of_points(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the legend handles by label: mixers by ink, memories by fill, windows by marker, of the last two if they vary.

    A mixer is a patch; a memory has its fill in the markers of all windows, and a window its marker in all fills, so that
    no two entries look alike.
    """
    inks = style.mixer_inks(frame["attn_type"])
    handles: dict[str, Any] = {
        drawing.level_label(mixer): drawing.patch(facecolor=ink, edgecolor="none") for mixer, ink in inks.items()
    }
    levels = {axis: sorted(set(frame[axis]), key=drawing.off_first) for axis in LOOKS[1:]}
    memories = levels["memory"] if len(levels["memory"]) > 1 else ["on"]
    for axis in (axis for axis, own in levels.items() if len(own) > 1):
        for level in levels[axis]:
            looks = (
                [(level, window) for window in levels["window"]]
                if axis == "memory"
                else [(memory, level) for memory in memories]
            )
            handles[drawing.level_label(level, axis)] = tuple(_mark_key(memory, window) for memory, window in looks)
    return handles


def _mark_key(memory: str, window: str) -> Any:
    """Return the legend handle of a grey mark with the fill of a memory and the marker of a window."""
    look = style.memory_look(style.GREY, memory) | {"linestyle": "none"}
    return drawing.key(**look | {"marker": style.MARKERS[style.WINDOW_MARKERS.get(window, 0)]})


def _draw_points(axes: Axes, panel_rows: pd.DataFrame, styles: PointStyles, baseline: float) -> None:
    """Draw every point, those of the front with error bars of one standard error, without caps, which would reshape marks.

    Args:
        axes: The panel.
        panel_rows: Rows of its quality.
        styles: Marker style by (mixer, memory, window).
        baseline: Value up to which points are pale and small, since they show no recall.
    """
    keys = list(panel_rows[list(LOOKS)].itertuples(index=False, name=None))
    for key, look in styles.items():
        mine = panel_rows[[own == key for own in keys]]
        for (on_front, is_low), part in mine.groupby(["front", mine["value"] <= baseline], sort=False):
            state: dict[str, Any] = {"alpha": 1.0, "zorder": 2.6, "markersize": drawing.line_width(MARK)}
            if not on_front:
                state = {"alpha": 0.5, "zorder": 2.5, "markersize": drawing.line_width(BEHIND)}
            if is_low and not on_front:
                state |= _low_mark(look["color"])
            axes.plot(part["speed"], part["value"], **(look | state))
        front = mine[mine["front"]]
        bars: dict[str, Any] = {"ecolor": look["color"], "elinewidth": drawing.line_width(0.8), "zorder": 2.4}
        for axis, ends in _bar_lengths(front).items() if len(front) else ():
            axes.errorbar(front["speed"], front["value"], **{axis: ends}, fmt="none", **bars)


def _low_mark(ink: str) -> dict[str, Any]:
    """Return the style of a point without recall: a small dot in its mixer's ink, whatever its other levels."""
    return {"marker": "o", "markersize": drawing.line_width(LOW_MARK), "markerfacecolor": ink, "markeredgewidth": 0,
            "alpha": 0.45}  # fmt: skip


def _bar_lengths(part: pd.DataFrame) -> dict[str, Any]:
    """Return lengths [below and above, points] of the error bars, by "xerr" and "yerr".

    A direction without any positive standard deviation is left out. Bars of needle accuracy end at 0 and 100.

    Args:
        part: Rows of one quality.
    """
    share = part["quality"].iloc[0].startswith("Ndl")
    bars = {}
    for axis, name, value in (("xerr", "speed_sd", part["speed"]), ("yerr", "sd", part["value"])):
        sd = part[name].fillna(0)
        if (sd > 0).any():
            most = (value, 100 - value) if share and axis == "yerr" else (sd, sd)
            bars[axis] = np.array([sd.clip(upper=end) for end in most])
    return bars


def _draw_rings(
    axes: Axes, panel_rows: pd.DataFrame, marker: str, size: float, colour: str, width: float, above: float
) -> None:
    """Draw a hollow marker around every point.

    Args:
        axes: The panel.
        panel_rows: Rows of the points, with speed and value.
        marker: Marker of matplotlib.
        size: Its size in points in the style `paper`.
        colour: Colour of its edge.
        width: Width of its edge in points in the style `paper`.
        above: Its zorder.
    """
    style: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": colour, "zorder": above}
    drawing.points(
        axes, panel_rows["speed"], panel_rows["value"], marker, markersize=size, markeredgewidth=width, **style
    )


def _set_axes(axes: Axes, panel_rows: pd.DataFrame, quality: str, name: str, baseline: float) -> None:
    """Set ranges and labels of both axes.

    The y axis of needle accuracy begins at 0 %, and ends above the constant-digit baseline. That of a loss leaves out a few outliers at the top, which get an
    arrow, but never a point of the front.

    Args:
        axes: The panel.
        panel_rows: Rows of its quality.
        quality: Heading of the quality.
        name: Its plain name.
        baseline: Score of the constant-digit baseline in percent; 0 without one.
    """
    low, high = float(panel_rows["speed"].min()), float(panel_rows["speed"].max())
    span = high - low or 0.2 * abs(high) or 1.0
    axes.set_xlim(max(low - ROOM * span, min(0.0, low)), high + ROOM * span)
    share = quality.startswith("Ndl")
    if share:
        top = max(float((panel_rows["value"] + panel_rows["sd"].fillna(0)).max()), FLAT, 1.1 * baseline)
        axes.set_ylim(LOWEST * min(1.0, top / 50), min(104.0, 1.1 * top))
        axes.spines["left"].set_bounds(0, min(100.0, axes.get_ylim()[1]))
    else:
        least, most = robust_range(list(panel_rows["value"]), list(panel_rows[panel_rows["front"]]["value"]))
        if (panel_rows["value"] > most).mean() > FEW or (panel_rows["value"] < least).any():
            axes.margins(y=ROOM)
        else:
            axes.set_ylim(least, most)
            mark_out_of_range(axes, panel_rows.rename(columns={"slug": "cell"}), 2)
    unit = "%" if share else "nats per token"
    if share:
        name = f"{name} at {quality.partition('@')[2]}" if "@" in quality else name
    axes.set_ylabel(f"{name}\n({unit}; {'more' if share else 'less'} is better)")
    speed = str(panel_rows["speed_name"].iloc[0])
    labels_by_speed = {"MFU": "model FLOP/s utilization (%)\nmore is better, but no measure of speed"}
    labels_by_speed |= {"tokens/s": "training speed (tokens/s)\nmore is better"}
    axes.set_xlabel(labels_by_speed.get(speed, speed))
    axes.locator_params(axis="x", nbins=5)
    short_numbers(axes.xaxis)


def _label_after_layout(axes: Axes, label_list: Sequence[tuple[float, float, str]], panel_rows: pd.DataFrame) -> None:
    """Register the labelling of ringed points for the end of the layout, off all points, bars and the front's line.

    Args:
        axes: The panel.
        label_list: (x, y, text) of each label, in data.
        panel_rows: Rows of the panel.
    """
    points = list(zip(panel_rows["speed"], panel_rows["value"], strict=True))
    front = panel_rows[panel_rows["front"]].sort_values("speed")
    steps = list(zip(front["speed"], front["value"], strict=True))
    lines = [[start, (start[0], end[1]), end] for start, end in pairwise(steps)]
    for (x, y), across, up in zip(steps, front["speed_sd"].fillna(0), front["sd"].fillna(0), strict=True):
        lines += [[(x - across, y), (x + across, y)], [(x, y - up), (x, y + up)]]
    radii = {"ring": drawing.line_width(RING) / 2, "mark": drawing.line_width(MARK) / 2}
    drawing.after_layout(
        axes.figure,  # type: ignore[arg-type]
        lambda: labels.label_rings(axes, label_list, points, lines=lines, **radii),
    )
