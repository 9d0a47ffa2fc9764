"""Figure `pareto`: quality against speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ...results.store.records import AXES
from ...results.store.store import Store
from ..best_values import format_probability
from ..number_format import Column, format_number
from ..result_columns import quality_columns, speed_column
from ..stats.effects.effects import pareto
from ..stats.effects.needle_baseline import constant_answer_score, needle_caption
from ..stats.noise.best_probability import candidates_by_configuration, front_probabilities
from ..sweep_data import ReportError, SweepData
from ..table_builder import measured_entry
from .canvas import drawing, labels
from .canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from .canvas.line_drawing import mark_out_of_range, robust_range

ROOM = 0.09  # share of an axis that stays free next to the outermost points
LOWEST = -3.0  # percent, lower end of a y axis of shares, whose spine begins at 0
MIN_SIDE_BY_SIDE_WIDTH, STACKED_PANEL_HEIGHT = (
    5.0,
    2.2,
)  # inches of width that two panels need side by side; of height of each, one below the other
FEW = 0.05  # largest share of points that may lie outside the axes, so that they do not flatten the rest
FLAT = 5.0  # percent, least upper end of a y axis of shares: a smaller one would show noise only
CONSTANT: dict[str, Any] = {"color": "#000000", "linestyle": (0, (1, 1.2)), "linewidth": 0.9, "zorder": 1.5}
MOST_NAMED = 8  # points of a front that are labelled, the most probable ones


def collect(store: Store, data: SweepData) -> FigureData:
    """Return quality against speed, one row per quality and configuration that has both.

    Qualities are validation loss and needle accuracy at the longest length. Columns: quality (heading), metric,
    speed_name, speed, value (means over seeds), speed_sd and sd (standard deviations of these means, from the spread
    between runs of the stratum: cells that share mixer and memory; NaN where unknown), front (True if no other
    configuration is as good in both and better in one), p_front (probability of that, NaN where unknown), slug (of its
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
        points_of_quality, origins_of_quality, lacking = _points(data, speed, quality)
        points = [(point["speed"], point["value"]) for point in points_of_quality]
        fronts = pareto(points, (1, quality.direction))
        rows += [point | {"front": is_on_front} for point, is_on_front in zip(points_of_quality, fronts, strict=True)]
        origins += origins_of_quality
        fewer |= lacking
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has both a speed and a quality; finish it")
    frame = pd.DataFrame(rows)
    shown = {quality.heading: quality for quality in quality_columns(data) if quality.probe == "needle"}
    needle = {heading: shown[heading].length for heading in dict.fromkeys(frame["quality"]) if heading in shown}
    notes = _notes(frame, bool(fewer))
    if needle:
        notes.append(needle_caption(data, needle.values()))
    constant = {
        heading: level
        for heading, length in needle.items()
        if (level := constant_answer_score(data, length)) is not None
    }
    names = {cell.cell_id: cells[0].slug for cells in data.configurations().values() for cell in cells}
    return collected(
        store, data, "pareto", "Quality against speed", frame, origins, notes=notes, fewer=fewer, constant=constant, names=names,
    )  # fmt: skip


def _points(
    data: SweepData, speed: Column, quality: Column
) -> tuple[list[dict[str, Any]], list[tuple[str, int | None]], dict[tuple[str, str], str]]:
    """Return the data of one quality.

    Returns:
        The rows of `collect` except `front`; the (cell id, attempt id) pairs behind them; and by (quality, name) the
        text "n=k" of means over fewer seeds than the configuration has.
    """
    extra = data.extra_axes()
    varying_axes = [axis for axis in AXES if axis != "attn_type" and len(data.levels(axis)) > 1]
    chances = front_probabilities(data, speed, quality)
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
        rows.append(fields | {"rest": " ".join(rest) or ("baseline" if len(varying_axes) + len(extra) > 1 else "")})
        origins += [*fast.origins, *good.origins]
        if min(fast.seeds, good.seeds) < len(cells):
            fewer[quality.heading, rows[-1]["name"]] = f"n={min(fast.seeds, good.seeds)}"
    return rows, origins, fewer


def _notes(frame: pd.DataFrame, fewer: bool) -> list[str]:
    """Return the notes on points, probabilities, bars and means over fewer seeds.

    Args:
        frame: Rows of the figure, with p_front, speed_sd and sd.
        fewer: Whether any mean is over fewer seeds than its configuration has.
    """
    notes = [
        "One point per configuration. Ringed: on the Pareto front, where no other is as good in both and better in one."
    ]
    if frame["p_front"].notna().any():
        notes.append("Number next to a ring: probability of being on the front, given the spread between runs.")
    barred = [word for word, name in (("speed", "speed_sd"), ("quality", "sd")) if (frame[name] > 0).any()]
    if barred:
        notes.append(
            f"Bars: one standard error of the mean {' and '.join(barred)} to either side: the standard deviation of "
            "the runs of that mixer and memory, divided by the square root of the number of seeds."
        )
    else:
        notes.append("No bars: the spread between runs is unknown.")
    if fewer:
        notes.append("n=k: mean over k seeds, fewer than the configuration has.")
    return notes


def _level_text(axis: str, level: str) -> str:
    """Return a level as a configuration's name has it; empty for a level that is off."""
    if level in ("off", "baseline", "-"):
        return ""
    return axis if level == "on" else level


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per quality: a point per configuration, colour and marker by mixer, filled with memory.

    The front is stepped and ringed; up to eight of its points are labelled, the most probable ones. Points that are
    means over fewer seeds have a label too. Highlighted cells of `look` have a diamond around their configuration and a
    label. The constant-digit baseline is a dotted line.
    """
    frame = figure_data.frame
    names = list(dict.fromkeys(frame["quality"]))
    styles = _point_styles(frame)
    figure = drawing.page(2.9, drawing.width_of(len(names), 3.6))
    width = figure.get_size_inches()[0]
    across = 2 if width / look.scale >= MIN_SIDE_BY_SIDE_WIDTH else 1
    if across == 1:
        # stacked panels, since labels next to points need width
        figure.set_size_inches(width, STACKED_PANEL_HEIGHT * len(names) * look.scale)
    several = any(rest != "" for rest in frame["rest"])
    for axes, quality in zip(drawing.panels(figure, [""] * len(names), columns=across), names, strict=True):
        panel_rows = frame[frame["quality"] == quality]
        _draw_points(axes, panel_rows, styles)
        front = panel_rows[panel_rows["front"]].sort_values("speed")
        axes.step(front["speed"], front["value"], color=drawing.GREY, linewidth=drawing.line_width(0.9), zorder=1)
        _draw_rings(axes, front, "o", 8, "#000000", 1, 2.8)
        if (level := figure_data.draw_options["constant"].get(quality)) is not None:
            axes.axhline(100 * level, **CONSTANT)
        _set_axes(axes, panel_rows, quality, 72 * width / across)
        highlighted_slugs = {figure_data.draw_options["names"].get(cell) for cell in look.highlight}
        marked = panel_rows[panel_rows["slug"].isin(highlighted_slugs)]
        _draw_rings(axes, marked, "D", 9, drawing.BAD, 1.4, 2.9)
        top_of_front = front.sort_values("p_front", ascending=False, kind="stable").head(MOST_NAMED)
        lacking = panel_rows[[(quality, name) in figure_data.draw_options["fewer"] for name in panel_rows["name"]]]
        labelled = pd.concat([marked, top_of_front, lacking]).drop_duplicates("slug")
        labels_by_point: dict[tuple[float, float], list[str]] = {}
        for row in labelled.to_dict("records"):
            label = _point_label(row, several, figure_data.draw_options["fewer"].get((quality, row["name"])))
            labels_by_point.setdefault((float(row["speed"]), float(row["value"])), []).append(label)
        _label_after_layout(
            axes,
            [
                (*point, _joined_label(labels_at_point))
                for point, labels_at_point in labels_by_point.items()
                if any(labels_at_point)
            ],
            panel_rows,
        )
    handles: dict[str, Any] = {label: drawing.key(**style) for label, style in styles.values()}
    for level in list(figure_data.draw_options["constant"].values())[:1]:
        handles[f"constant digit {format_number(level, 1, percent=True)} %"] = drawing.key(**CONSTANT)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=3)


def _point_label(row: Mapping[Any, Any], several: bool, fewer: str | None) -> str:
    """Return the label of a point: levels that its style does not show, its P(front), and its number of seeds.

    Each may be missing, so the label may be empty.

    Args:
        row: Row of the figure as a dict, with p_front, front and rest.
        several: Whether the levels except mixer and memory vary and belong into the label.
        fewer: Text "n=k"; None if all seeds have the numbers.
    """
    chance = "" if math.isnan(row["p_front"]) or not row["front"] else format_probability(row["p_front"])
    rest = str(row["rest"]) if several else ""
    return " ".join(filter(None, (rest, chance, fewer)))


def _joined_label(labels: Sequence[str]) -> str:
    """Return the label of a point that several configurations share."""
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"


def _point_styles(frame: pd.DataFrame) -> dict[tuple[str, str], tuple[str, dict[str, Any]]]:
    """Return (label, marker style) of each (mixer, memory) that occurs.

    Markers are hollow for the first memory level ("off" if there is one) and filled for others; all are filled if there
    is one level.
    """
    types = list(dict.fromkeys(frame["attn_type"]))
    memories = sorted(dict.fromkeys(frame["memory"]), key=drawing.off_first)
    styles = {}
    for index, kind in enumerate(types):
        for memory in memories:
            if ((frame["attn_type"] == kind) & (frame["memory"] == memory)).any():
                several = len(memories) > 1
                label = drawing.level_label(kind) + (f", {drawing.level_label(memory, 'memory')}" if several else "")
                look = drawing.marker_style(index, int(several and memory == memories[0]))
                styles[kind, memory] = label, look | {"linestyle": "none"}
    return styles


def _draw_points(
    axes: Axes, panel_rows: pd.DataFrame, styles: Mapping[tuple[str, str], tuple[str, dict[str, Any]]]
) -> None:
    """Draw every point, with error bars of one standard deviation that are opaque on the front and faint off it.

    Args:
        axes: The panel.
        panel_rows: Rows of its quality.
        styles: Label and marker style by (mixer, memory).
    """
    for key, (_, style) in styles.items():
        mine = panel_rows[(panel_rows["attn_type"] == key[0]) & (panel_rows["memory"] == key[1])]
        axes.plot(mine["speed"], mine["value"], **style, zorder=2.5)
        for front, part in mine.groupby("front", sort=False):
            alpha, width = (0.9, 0.9) if front else (0.25, 0.6)
            faint: dict[str, Any] = {
                "ecolor": style["color"],
                "alpha": alpha,
                "elinewidth": drawing.line_width(width),
                "zorder": 2,
            }
            for axis, ends in _bar_lengths(part).items():
                axes.errorbar(part["speed"], part["value"], **{axis: ends}, fmt="none", **faint)


def _bar_lengths(part: pd.DataFrame) -> dict[str, Any]:
    """Return [lengths below, lengths above] of the error bars of each point, by "xerr" and "yerr".

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
            bars[axis] = [sd.clip(upper=most[0]), sd.clip(upper=most[1])]
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


def _set_axes(axes: Axes, panel_rows: pd.DataFrame, quality: str, width: float) -> None:
    """Set ranges and labels of both axes, with space for a label on the right.

    The y axis of needle accuracy begins at 0 %. That of a loss leaves out a few outliers at the top, which get an
    arrow, but never a point of the front.

    Args:
        axes: The panel.
        panel_rows: Rows of its quality.
        quality: Heading of the quality.
        width: Width of the panel in points.
    """
    low, high = float(panel_rows["speed"].min()), float(panel_rows["speed"].max())
    span = high - low or 0.2 * abs(high) or 1.0
    name = 0.58 * drawing.size("small") * max(map(len, panel_rows["rest"])) / width
    axes.set_xlim(max(low - ROOM * span, min(0.0, low)), high + min(0.6, ROOM + name) * span)
    share = quality.startswith("Ndl")
    if share:
        top = max(float((panel_rows["value"] + panel_rows["sd"].fillna(0)).max()), FLAT)
        axes.set_ylim(LOWEST * min(1.0, top / 50), min(104.0, 1.1 * top))
        axes.spines["left"].set_bounds(0, min(100.0, axes.get_ylim()[1]))
    else:
        least, most = robust_range(list(panel_rows["value"]), list(panel_rows[panel_rows["front"]]["value"]))
        if (panel_rows["value"] > most).mean() > FEW or (panel_rows["value"] < least).any():
            axes.margins(y=ROOM)
        else:
            axes.set_ylim(least, most)
            mark_out_of_range(axes, panel_rows.rename(columns={"slug": "cell"}), 2)
    gap = (
        " "
        if drawing.current_options().inches(drawing.PAGE_WIDTH, drawing.PAGE_WIDTH) / drawing.current_options().scale
        >= MIN_SIDE_BY_SIDE_WIDTH
        else "\n"
    )
    unit_and_direction = ("%", "(more is better)") if share else ("nats per token", "(less is better)")
    axes.set_ylabel(f"{quality}, {gap.join(unit_and_direction)}")
    speed = panel_rows["speed_name"].iloc[0]
    axes.set_xlabel(f"{speed}{', %' if speed == 'MFU' else ''} (more is better)")
    axes.locator_params(axis="x", nbins=5)


def _label_after_layout(axes: Axes, label_list: Sequence[tuple[float, float, str]], panel_rows: pd.DataFrame) -> None:
    """Register the labelling of points for the end of the layout; labels avoid points of the front more than others.

    Args:
        axes: The panel.
        label_list: (x, y, text) of each label, in data.
        panel_rows: Rows of the panel, whose points labels should not hide.
    """
    # labels avoid points of the front more than others
    every = [panel_rows, *([panel_rows[panel_rows["front"]]] * 3)]
    points = [point for part in every for point in zip(part["speed"], part["value"], strict=True)]
    drawing.after_layout(axes.figure, lambda: labels.label_points(axes, label_list, points))  # type: ignore[arg-type]
