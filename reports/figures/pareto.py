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
EXPLAINED = 0.4  # least share of the variance of speeds with which a factor is drawn as markers
MOST_NAMED = 12  # points of a front that the list below a panel has
TRAIN_TIME = "Train s"
"""Heading of the training time, which the figure draws in hours."""
SPEED_NOUNS = {TRAIN_TIME: "training time", "MFU": "utilization"}
_SPEED_TITLES = {"train_seconds": "training time", "mfu_paper": "hardware utilization"}
_SPEED_SCALES = {"train_seconds": 1 / 3600, "mfu_paper": 100.0}


def collect(store: Store, data: SweepData) -> FigureData:
    """Return quality against speed, one row per quality and configuration that has both.

    Qualities are validation loss and needle accuracy at the longest length. Columns: quality (heading), metric,
    speed_name, speed, value (means over seeds), speed_sd and sd (standard deviations of these means, from the spread
    between runs of the stratum: cells that share mixer and memory; NaN where unknown), front (True if no other
    configuration is as good in both and better in one, and for needle accuracy only above the constant-digit baseline;
    False for all where the speed is no cost), seeds (runs behind the means), front_number (1, 2, ... on the front by
    ascending speed, else 0), p_front (probability of that, NaN where unknown), slug (of its first cell), the five axes (attn_type, reg_mode, distractor, memory, window), `name` (mixer and levels that are not
    off), `rest` (these levels except mixer and memory; "baseline" for none of them, if several axes besides the mixer
    vary).

    Speed is tokens/s, else the hours of training, of which fewer are better, else MFU (in %). MFU is no cost, nor is any
    speed of attempts that shared a GPU. Values are nats per token, or %.

    Raises:
        ReportError: No cell has both a speed and a quality.
    """
    speed = speed_column(data, "tokens/s")
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    fewer: dict[tuple[str, str], str] = {}
    reasons: set[str] = set()
    for quality in quality_columns(data):
        least = recall_threshold(data, quality)
        points_of_quality, origins_of_quality, lacking = _points(data, speed, quality, least)
        scale = 100 if quality.percent else 1
        reason = _no_cost_reason(store, speed, origins_of_quality)
        candidates = [
            index for index, point in enumerate(points_of_quality) if not reason and point["value"] > scale * least
        ]
        points = [(points_of_quality[index]["speed"], points_of_quality[index]["value"]) for index in candidates]
        directions = (speed.direction or 1, quality.direction)
        on_front = dict(zip(candidates, pareto(points, directions), strict=True))
        fronts = [on_front.get(index, False) for index in range(len(points_of_quality))]
        order = sorted((point["speed"], index) for index, point in enumerate(points_of_quality) if fronts[index])
        numbers = {index: number for number, (_, index) in enumerate(order, 1)}
        rows += [
            point | {"front": is_on_front, "front_number": numbers.get(index, 0)}
            for index, (point, is_on_front) in enumerate(zip(points_of_quality, fronts, strict=True))
        ]
        origins += origins_of_quality
        fewer |= lacking
        reasons |= {reason} - {""}
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has both a speed and a quality; finish it")
    frame = pd.DataFrame(rows)
    shown = {quality.heading: quality for quality in quality_columns(data) if quality.probe == "needle"}
    needle = {heading: shown[heading].length for heading in dict.fromkeys(frame["quality"]) if heading in shown}
    names = {cell.cell_id: cells[0].slug for cells in data.configurations().values() for cell in cells}
    shown_levels = {names[cell]: label for cell, label in _configuration_labels(data).items()}
    nouns = {quality.heading: plain_name(quality) for quality in quality_columns(data)}
    notes = _notes(frame, fewer, sorted(reasons))
    if needle:
        notes.append(needle_caption(data, needle.values()))
    constant = {
        heading: level
        for heading, length in needle.items()
        if (level := constant_answer_score(data, length)) is not None
    }
    notes += _recall_notes(frame, constant)
    title = f"Quality against {_SPEED_TITLES.get(speed.metric, 'speed')}"
    return collected(
        store, data, "pareto", title, frame, origins, notes=notes, constant=constant, names=names, labels=shown_levels, nouns=nouns,
    )  # fmt: skip


def _no_cost_reason(store: Store, speed: Column, origins: Sequence[tuple[str, int | None]]) -> str:
    """Return why a speed is no cost by which configurations can be ranked, as a sentence; "" if it is one.

    Args:
        store: The database, which knows the attempts that shared a GPU.
        speed: The speed.
        origins: (cell id, attempt id) pairs behind the points.
    """
    if speed.metric == "mfu_paper":
        return "No Pareto front: utilization is no cost, since networks differ in operations per token."
    attempts = sorted({attempt for _, attempt in origins if attempt is not None})
    neighbours = [provenance.co_tenants or 0 for provenance in store.provenances(attempts).values()]
    if any(neighbours):
        return f"No Pareto front: the runs shared their GPU with up to {max(neighbours)} others, so that speeds depend on those."
    return ""


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
        scales = [_SPEED_SCALES.get(speed.metric, 1.0), 100.0 if quality.percent else 1.0]
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


def _notes(frame: pd.DataFrame, fewer: Mapping[tuple[str, str], str], reasons: Sequence[str]) -> list[str]:
    """Return the notes on points, the front, bars and means over fewer seeds.

    Args:
        frame: Rows of the figure, with quality, front, p_front, speed_sd and sd.
        fewer: Text "n=k" of the means over fewer seeds than their configuration has.
        reasons: Sentences that say why there is no front; empty if there is one.
    """
    low, high = int(frame["seeds"].min()), int(frame["seeds"].max())
    runs = f"{low} run" if high == 1 else f"mean over {low} runs" if low == high else f"mean over {low} to {high} runs"
    counts = list(dict.fromkeys(map(int, frame.groupby("quality", sort=False).size())))
    each = f"{counts[0]} per panel" if len(counts) == 1 else " and ".join(map(str, counts))
    notes = [f"One point per configuration ({each}, {runs} each).", *reasons]
    if frame["front"].any():
        notes.append("Ringed, numbered and listed below: the Pareto front; shaded: dominated by it.")
        notes += ["Its points, the best of many single runs, look better than they are."] if high == 1 else []
    notes += _variance_note(frame)
    measured = SPEED_NOUNS.get(frame["speed_name"].iloc[0], "speed")
    if _shows_probabilities(frame):
        notes.append("In brackets: probability to be on the front if all were drawn anew with the spread between runs.")
    barred = [noun for noun, name in ((measured, "speed_sd"), ("quality", "sd")) if (frame[name] > 0).any()]
    if barred:
        exact = "" if measured in barred else f"; of {measured} none is known"
        notes.append(
            f"Bars{' (front only)' * bool(frame['front'].any())}: one standard error of {' and '.join(barred)}, from the "
            f"spread between runs of that mixer and memory{exact}."
        )
    else:
        notes.append("No bars: the spread between runs is unknown.")
    if fewer:
        notes.append(f"{counted(len(fewer), 'mean')} are over fewer seeds than the configuration has.")
    return notes


def _shows_probabilities(frame: pd.DataFrame) -> bool:
    """Return True if probabilities of the front are printed: the errors of both speed and quality are known."""
    return bool(frame["front"].any() and frame["p_front"].notna().any() and (frame["speed_sd"] > 0).any())


def _variance_shares(frame: pd.DataFrame) -> dict[str, float]:
    """Return the share of the variance of speeds between the levels of each axis that varies, besides mixer and memory.

    Args:
        frame: Rows of the figure, with the axes and speed.
    """
    points = frame.drop_duplicates("slug")
    mean = points["speed"].mean()
    total = float(((points["speed"] - mean) ** 2).sum())
    axes = [axis for axis in AXES if axis not in LOOKS and points[axis].nunique() > 1]
    between = {axis: points.groupby(axis, sort=False)["speed"].transform("mean") - mean for axis in axes}
    return {axis: float((between[axis] ** 2).sum()) / total if total else 0.0 for axis in axes}


def marker_axis(frame: pd.DataFrame) -> str:
    """Return the axis whose levels are markers: that with most of the variance of speeds if it is much, else window.

    Args:
        frame: Rows of the figure, with the axes and speed.
    """
    shares = _variance_shares(frame)
    axis = max(shares, key=shares.__getitem__, default="window")
    is_shown = shares.get(axis, 0.0) >= EXPLAINED and frame[axis].nunique() <= len(style.MARKERS)
    return axis if is_shown else "window"


def _variance_note(frame: pd.DataFrame) -> list[str]:
    """Return the note on the axis that explains most of the speeds and those without a mark, as a list; may be empty.

    Args:
        frame: Rows of the figure, with the axes and speed.
    """
    shares, axis = _variance_shares(frame), marker_axis(frame)
    if shares.get(axis, 0.0) < EXPLAINED:
        return []
    measured = SPEED_NOUNS.get(frame["speed_name"].iloc[0], "speed")
    unmarked = " and ".join(style.axis_label(name) for name in shares if name != axis)
    return [
        f"{100 * shares[axis]:.0f} % of the variance of {measured} is that of the {style.axis_label(axis)}"
        f"{f'; {unmarked} not marked' if unmarked else ''}."
    ]


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
        notes.append(f"No recall: {len(low)} at or below the baseline, on no front.")
    return notes


def _level_text(axis: str, level: str) -> str:
    """Return a level as a configuration's name has it; empty for a level that is off."""
    if level in ("off", "baseline", "-"):
        return ""
    return axis if level == "on" else level


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per quality: a point per configuration, ink by mixer, filled with memory, marker by `marker_axis`.

    The front is stepped, ringed, numbered and listed below its panel. Highlighted cells of `look` have a diamond around
    their configuration and a label. The constant-digit baseline is a line.
    """
    frame = figure_data.frame
    names = list(dict.fromkeys(frame["quality"]))
    looks = (*LOOKS, marker_axis(frame))
    styles, has_front = _point_styles(frame, looks), bool(frame["front"].any())
    x_sign = -1 if frame["speed_name"].iloc[0] == TRAIN_TIME else 1
    lists = {
        name: _front_list(
            frame[frame["quality"] == name], figure_data.draw_options["labels"], chances=_shows_probabilities(frame)
        )
        for name in names
        if has_front
    }
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
    if across > 1 and max(lines, default=0) <= SHORT_LIST:
        figure.set_figheight(figure.get_figheight() - LESS_HEIGHT * look.scale)
    if lines:
        listed = sum(lines) + len(lines) if across == 1 else max(lines) + 1
        figure.set_figheight(figure.get_figheight() + LINE_SPACING * drawing.size("small") / 72 * listed)
    for axes, quality in zip(drawing.panels(figure, [""] * len(names), columns=across), names, strict=True):
        panel_rows = frame[frame["quality"] == quality]
        level = figure_data.draw_options["constant"].get(quality)
        baseline = -math.inf if level is None else 100 * level
        _draw_points(axes, panel_rows, looks, styles, baseline, has_front=has_front)
        front = panel_rows[panel_rows["front"]].sort_values("speed")
        if len(front):
            axes.step(front["speed"], front["value"], where="pre" if x_sign > 0 else "post", **_front_line())
        _draw_rings(axes, front, "o", RING, style.INK, 0.9, 2.8)
        if level is not None:
            mark_baseline([axes], 100 * level)
        _set_axes(axes, panel_rows, quality, figure_data.draw_options["nouns"][quality], 100 * (level or 0.0))
        reached = list(zip(front["speed"], front["value"], strict=True))
        labels.shade_dominated(axes, reached, x_sign, 1 if quality.startswith("Ndl") else -1)
        # below the axis label, wherever the layout puts it
        below = ("axes fraction", axes.xaxis.label)
        if has_front:
            drawing.note(axes, texts[quality], (0, 0), (0, -3), xycoords=below, va="top", linespacing=LINE_SPACING)
        _label_points(axes, panel_rows, figure_data, look, x_sign)
    handles = _legend_handles(frame, looks, figure_data.draw_options["constant"])
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=4)


def _label_points(
    axes: Axes, panel_rows: pd.DataFrame, figure_data: FigureData, look: FigureOptions, x_sign: int
) -> None:
    """Mark the highlighted cells of a panel, and label them and the front.

    Args:
        axes: The panel.
        panel_rows: Rows of its quality.
        figure_data: The figure.
        look: Figure options.
        x_sign: 1 if more speed is better, else -1.
    """
    front = panel_rows[panel_rows["front"]].sort_values("speed")
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
        x_sign,
    )


def _legend_handles(frame: pd.DataFrame, looks: Sequence[str], constant: Mapping[str, float]) -> dict[str, Any]:
    """Return the legend handles by label: points, the front, bars, and the constant-digit baseline, as they occur.

    Args:
        frame: Rows of the figure.
        looks: The axes that points show: mixer, memory and `marker_axis`.
        constant: Score of the best constant answer as a fraction, by quality.
    """
    has_front = bool(frame["front"].any())
    handles = legend_of_points(frame, looks)
    if has_front:
        handles |= {"Pareto front": drawing.key(**_front_line())} | labels.dominated_key()
    barred = frame[frame["front"]] if has_front else frame
    if (barred[["speed_sd", "sd"]] > 0).any(axis=None):
        handles["± standard error"] = _bar_key()
    for level in list(constant.values())[:1]:
        if (frame["quality"].isin(constant) & (frame["value"] <= 100 * level)).any():
            handles["no recall"] = drawing.key(color=style.GREY, linestyle="none", **_low_mark(style.GREY))
        handles[f"constant digit ({format_number(level, 1, percent=True)} %)"] = drawing.key(**BASELINE)
    return handles


def _front_list(panel_rows: pd.DataFrame, labels_by_slug: Mapping[str, str], *, chances: bool) -> list[str]:
    """Return "number levels: quality at speed (p)" of each configuration of a front below a head, at most twelve and how many follow.

    Args:
        panel_rows: Rows of one quality, with front, front_number, slug, speed, value and p_front.
        labels_by_slug: Levels of each configuration as text.
        chances: Whether the probabilities of being on the front are printed.
    """
    front = panel_rows[panel_rows["front"]].sort_values("front_number")
    entries = [
        f"{row['front_number']} {round_long_numbers(labels_by_slug[row['slug']])}"
        + f": {_quality_text(row)} at {_speed_text(row)}"
        + ("" if not chances or math.isnan(row["p_front"]) else f" ({format_probability(row['p_front'])})")
        for row in front.to_dict("records")
    ]
    head = ["Pareto front:" if entries else "no configuration exceeds the constant digit"]
    return head + entries[:MOST_NAMED] + [f"and {len(entries) - MOST_NAMED} more"] * (len(entries) > MOST_NAMED)


def _quality_text(row: Mapping[Any, Any]) -> str:
    """Return the quality of a configuration as text: a loss with three decimals, a share in percent."""
    return f"{row['value']:.0f}\u00a0%" if str(row["quality"]).startswith("Ndl") else f"{row['value']:.3f}"


def _speed_text(row: Mapping[Any, Any]) -> str:
    """Return the speed of a configuration as text: hours, or tokens per second with a K or M."""
    if row["speed_name"] == TRAIN_TIME:
        return f"{row['speed']:.1f}\u00a0h"
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
"""Marker style by the levels of mixer, memory and `marker_axis`."""
LOOKS = ("attn_type", "memory")
"""Axes that a point shows besides `marker_axis`; the list below a panel names the other levels of the front."""


def _marker(frame: pd.DataFrame, axis: str, level: str) -> str:
    """Return the marker of a level of `marker_axis`: that of windows if it is on or off, else by its rank in the frame."""
    levels = list(dict.fromkeys(frame[axis]))
    return style.MARKERS[style.WINDOW_MARKERS[level] if level in style.WINDOW_MARKERS else levels.index(level)]


def _point_styles(frame: pd.DataFrame, looks: Sequence[str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the marker style of each combination of levels that occurs; no point is hollow if no memory varies.

    Args:
        frame: Rows of the figure.
        looks: The axes that points show: mixer, memory and `marker_axis`.
    """
    inks, varies = style.mixer_inks(frame["attn_type"]), frame["memory"].nunique() > 1
    return {
        (mixer, memory, level): style.memory_look(inks[mixer], memory if varies else "on")
        | {"marker": _marker(frame, looks[2], level), "linestyle": "none"}
        | {"markeredgewidth": drawing.line_width(0.8)}
        for mixer, memory, level in dict.fromkeys(frame[list(looks)].itertuples(index=False, name=None))
    }


def legend_of_points(frame: pd.DataFrame, looks: Sequence[str]) -> dict[str, Any]:
    """Return the legend handles by label: mixers by ink, memories by fill, levels of the last axis by marker, if they vary.

    A mixer is a patch; a memory has its fill in all markers, and a marker has all fills, so that no two entries look
    alike.

    Args:
        frame: Rows of the figure.
        looks: The axes that points show: mixer, memory and `marker_axis`.
    """
    inks = style.mixer_inks(frame["attn_type"])
    handles: dict[str, Any] = {
        drawing.level_label(mixer): drawing.patch(facecolor=ink, edgecolor="none") for mixer, ink in inks.items()
    }
    memories, marked = (sorted(set(frame[axis]), key=drawing.off_first) for axis in looks[1:])
    markers = [_marker(frame, looks[2], level) for level in marked]
    fills = memories if len(memories) > 1 else ["on"]
    for memory in memories if len(memories) > 1 else ():
        handles[drawing.level_label(memory, "memory")] = tuple(_mark_key(memory, marker) for marker in markers)
    for level, marker in zip(marked, markers, strict=True) if len(marked) > 1 else ():
        handles[drawing.level_label(level, looks[2])] = tuple(_mark_key(memory, marker) for memory in fills)
    return handles


def _mark_key(memory: str, marker: str) -> Any:
    """Return the legend handle of a grey marker with the fill of a memory."""
    return drawing.key(**style.memory_look(style.GREY, memory) | {"linestyle": "none", "marker": marker})


def _draw_points(
    axes: Axes, panel_rows: pd.DataFrame, looks: Sequence[str], styles: PointStyles, baseline: float, *, has_front: bool
) -> None:
    """Draw every point, and error bars of one standard error, without caps, which would reshape marks.

    Points of the front have bars; without any front all points above the baseline have pale ones.

    Args:
        axes: The panel.
        panel_rows: Rows of its quality.
        looks: The axes that points show: mixer, memory and `marker_axis`.
        styles: Marker style by the levels of these axes.
        baseline: Value up to which points are pale and small, since they show no recall.
        has_front: Whether any panel has a front.
    """
    keys = list(panel_rows[list(looks)].itertuples(index=False, name=None))
    for key, look in styles.items():
        mine = panel_rows[[own == key for own in keys]]
        for (on_front, is_low), part in mine.groupby(["front", mine["value"] <= baseline], sort=False):
            state: dict[str, Any] = {"alpha": 1.0, "zorder": 2.6, "markersize": drawing.line_width(MARK)}
            if not on_front:
                state = {"alpha": 0.5, "zorder": 2.5, "markersize": drawing.line_width(BEHIND)}
            if is_low and not on_front:
                state |= _low_mark(look["color"])
            axes.plot(part["speed"], part["value"], **(look | state))
        barred = mine[mine["front"] if has_front else mine["value"] > baseline]
        bars: dict[str, Any] = {"ecolor": look["color"], "elinewidth": drawing.line_width(0.8 if has_front else 0.5)}
        bars |= {"zorder": 2.4, "alpha": 1.0 if has_front else 0.3}
        for axis, ends in _bar_lengths(barred).items() if len(barred) else ():
            axes.errorbar(barred["speed"], barred["value"], **{axis: ends}, fmt="none", **bars)


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
        values = list(panel_rows["value"])
        least, most = robust_range(values, list(panel_rows[panel_rows["front"]]["value"]) or [min(values)])
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
    labels_by_speed = {"MFU": "model FLOP/s utilization (%)\nno measure of speed"}
    labels_by_speed |= {"tokens/s": "training speed\n(tokens/s; more is better)"}
    labels_by_speed |= {TRAIN_TIME: "training time\n(hours; less is better)"}
    axes.set_xlabel(labels_by_speed.get(speed, speed))
    axes.locator_params(axis="x", nbins=5)
    short_numbers(axes.xaxis)


def _label_after_layout(
    axes: Axes, label_list: Sequence[tuple[float, float, str]], panel_rows: pd.DataFrame, x_sign: int
) -> None:
    """Register the labelling of ringed points for the end of the layout, off all points, bars and the front's line.

    Args:
        axes: The panel.
        label_list: (x, y, text) of each label, in data.
        panel_rows: Rows of the panel.
        x_sign: 1 if more speed is better, else -1.
    """
    points = list(zip(panel_rows["speed"], panel_rows["value"], strict=True))
    front = panel_rows[panel_rows["front"]].sort_values("speed")
    steps = list(zip(front["speed"], front["value"], strict=True))
    lines = [[start, (start[0], end[1]) if x_sign > 0 else (end[0], start[1]), end] for start, end in pairwise(steps)]
    for (x, y), across, up in zip(steps, front["speed_sd"].fillna(0), front["sd"].fillna(0), strict=True):
        lines += [[(x - across, y), (x + across, y)], [(x, y - up), (x, y + up)]]
    radii = {"ring": drawing.line_width(RING) / 2, "mark": drawing.line_width(MARK) / 2}
    drawing.after_layout(
        axes.figure,  # type: ignore[arg-type]
        lambda: labels.label_rings(axes, label_list, points, lines=lines, **radii),
    )
