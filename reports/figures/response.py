"""Figure `response`: dependence of a number on an axis with numeric levels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pandas as pd

from ...results.console.text import choices_hint
from ...results.store.records import AXES
from ...results.store.store import Store
from ...results.studies.study_store import search_of
from ..number_format import NEEDLE, Column, format_number
from ..stats.effects.needle_baseline import constant_answer_score
from ..sweep_data import ReportError, SweepData, cell_level
from .canvas import drawing
from .canvas.base import Axes, Figure, FigureData, FigureOptions, cell_labels, collected, frame_origins
from .canvas.labels import label_ends
from .canvas.length_frames import band_note, coinciding_note, is_barred, line_means
from .canvas.line_drawing import (
    BASELINE,
    LineStyles,
    draw_lines_with_means,
    legend,
    line_styles,
    mark_baseline,
    named_cells,
    robust_range,
)
from .canvas.scales import scale_for_values, tick_label
from .comparisons.forest import default_columns, measure_label

LINES = ("attn_type", "memory")
"""Axes that distinguish lines; so do axes whose levels lie apart, and means are taken over the others."""
MAX_LINE_AXES = 2
"""Axes that ink and dashes can show; further ones with levels apart have panels."""
MOST_APART = 4
"""Largest number of levels of an axis that are drawn apart."""
MOST_PANELS = 9
"""Largest number of panels; axes that would need more are averaged over, and the caption says so."""
APART_SHARE, APART_RANGE = 0.5, 0.05
"""Levels lie apart if they explain this share of the variance about the means of a line, and their standard deviation
is at least this share of the range of all numbers.
"""
MIN_GEOMETRIC_LEVELS = 3
"""Levels from which on equal ratios make an axis logarithmic."""
SIDE_ROOM = 0.05
"""Share of the x axis by which it is longer at both ends where lines with bars stand apart sideways."""
MOST_LABELLED = 8
"""Largest number of lines that are labelled at their ends, in a figure of a single panel."""
BETTER_SIDES = {1: "more is better", -1: "less is better", 0: ""}
"""Text by the better side of a number."""
BEST_RING: dict[str, Any] = {
    "marker": "o", "markersize": 7.5, "markerfacecolor": "none", "markeredgewidth": 0.8,
}  # fmt: skip
"""Look of the ring around the best mean of a line."""
MIN_LEVELS = 2
"""Least number of different levels of a numeric axis."""


def axes_with_numeric_levels(data: SweepData) -> dict[str, dict[str, float]]:
    """Return, by axis, the number of each level, for the extra axes of which every level is a finite number.

    Axes with fewer than two different numbers are left out; so are the five fixed axes and the seed.
    """
    numbers_by_axis = {}
    for axis in data.extra_axes():
        levels = {level: level_as_number(level) for level in data.levels(axis)}
        numbers_by_level = {level: value for level, value in levels.items() if value is not None}
        if len(numbers_by_level) == len(levels) and len(set(numbers_by_level.values())) >= MIN_LEVELS:
            numbers_by_axis[axis] = numbers_by_level
    return numbers_by_axis


def level_as_number(level: str) -> float | None:
    """Return a level as a number, underscores ignored; None if it is not a finite number."""
    try:
        value = float(level.replace("_", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def collect(store: Store, data: SweepData, *, by: str | None = None) -> FigureData:
    """Return the numbers over a numeric axis, one row per number and cell.

    Numbers are validation loss, then clean loss, needle accuracy and metrics of extra probes at their longest length
    (`default_columns`). Columns: cell, attempt, configuration (levels of every axis, which seeds share), panel (heading
    of the number), words, unit, better (1, -1 or 0), percent, first and second (levels of mixer and memory, of these
    the axes that vary; "" for none) and line, probe, metric, axis, length (the level of the numeric axis, as a number),
    value (shares as fractions), low, high (of an accuracy: 95 % interval of its trials).

    Args:
        store: The database.
        data: The sweep.
        by: The axis; None: the numeric axis with the most different levels.

    Raises:
        ReportError: The sweep is a study, the axis is not numeric, or cells have numbers at fewer than two of its levels.
    """
    if search_of(store, data.sweep) is not None:
        raise ReportError(
            f"the trials of sweep {data.sweep} differ in all searched settings, so there are no means over "
            "trials; use --figure slices"
        )
    numeric = axes_with_numeric_levels(data)
    axis = _chosen_axis(data, numeric, by)
    lines = tuple(line_axis for line_axis in LINES if len(data.levels(line_axis)) > 1)
    columns = default_columns(data)
    frame = _frame(data, columns, axis, numeric[axis], lines, ())
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has a number to draw over {axis}; finish the sweep")
    if frame["length"].nunique() < MIN_LEVELS:
        raise ReportError(
            f"sweep {data.sweep} has numbers at a single level of {axis}, so there is no response to it; measure cells at "
            "other levels"
        )
    panel_axes: tuple[str, ...] = ()
    mixed: list[str] = []
    while (apart := _axis_apart(data, frame, (axis, *lines, *panel_axes, *mixed))) is not None:
        if len(lines) < MAX_LINE_AXES:
            lines = (*lines, apart)
        elif frame["panel"].nunique() * len(data.levels(apart)) <= MOST_PANELS:
            panel_axes = (*panel_axes, apart)
        else:
            mixed.append(apart)
            continue
        frame = _frame(data, columns, axis, numeric[axis], lines, panel_axes)
    means = _means(frame)
    constant = _baselines(data, columns, frame["panel"].unique())
    unused_axes = [candidate for candidate in numeric if candidate not in (axis, *lines, *panel_axes)]
    notes = [f"{_averaging_note(data, means, (axis, *lines, *panel_axes))}{band_note(means)}"]
    if mixed:
        notes.append(
            f"The levels of {', '.join(map(drawing.axis_label, mixed))} lie apart, so that means over them may lie where no run does."
        )
    if (means["cells"] < means["of"]).any():
        notes.append("Some means are over fewer cells than their line has at other levels.")
    coinciding = coinciding_note(
        means.assign(panel=means["panel"].map(dict(zip(frame["panel"], frame["words"], strict=True)))), lines
    )
    notes += [f"{note} There the lower line shows as dashes." for note in coinciding]
    notes += _edge_note(frame, means, lines)
    notes += _setting_notes(store, data, [line_axis for line_axis in (*lines, *panel_axes) if "." not in line_axis])
    if constant:
        levels = dict.fromkeys(format_number(level, 1, percent=True) for level in constant.values())
        notes.append(f"Dashed and dotted: constant-digit baseline on these trials, {' to '.join(levels)} %.")
    if unused_axes:
        notes.append(f"Other numeric axes: {', '.join(map(drawing.axis_label, unused_axes))}.")
    return collected(
        store, data, "response", f"Response to {drawing.axis_label(axis)}", frame, frame_origins(frame),
        notes=[note.strip() for note in notes if note], options={"by": by} if by else None, axis=axis, axes=lines,
        names=cell_labels(data, without=(axis, *lines, *panel_axes)),
        mixer=data.levels("attn_type")[0], constant=constant,
    )  # fmt: skip


def _edge_note(frame: pd.DataFrame, means: pd.DataFrame, lines: Sequence[str]) -> list[str]:
    """Return the note on lines whose best mean is at an end of the levels, as a list; empty without any.

    Args:
        frame: Rows of the figure, with panel and better.
        means: Means of the lines, with panel, first, second, line, length and value.
        lines: Axes of first and second.
    """
    texts: dict[str, None] = {}
    sides = dict(zip(frame["panel"], frame["better"], strict=True))
    for _, line in means.groupby(["panel", "line"], sort=False):
        better = int(sides[line["panel"].iloc[0]])
        ordered = line.sort_values("length").reset_index(drop=True)
        best = int((better * ordered["value"]).to_numpy().argmax())
        if better and len(ordered) > MIN_LEVELS and best in (0, len(ordered) - 1):
            levels = [str(ordered[name].iloc[0]) for name in ("first", "second")]
            names = [drawing.level_label(level, axis) for level, axis in zip(levels, lines, strict=False)]
            texts.setdefault(f"({', '.join(names) or 'all cells'})")
    return [f"Best at an end of the range, so that the optimum may lie beyond it: {', '.join(texts)}."] if texts else []


def _end_label(levels: Sequence[tuple[str, str]]) -> str:
    """Return the label at the end of a line: its levels, without the name of an axis before a second one."""
    first, *further = levels
    texts = [drawing.level_label(level, axis).removeprefix(f"{drawing.axis_label(axis)} ") for axis, level in further]
    return ", ".join([drawing.level_label(*first[::-1]), *texts])


def _baselines(data: SweepData, columns: Sequence[Column], panels: Iterable[str]) -> dict[str, float]:
    """Return the score of the constant-digit baseline of each panel of needle accuracy, as fractions, where it is known."""
    scores = {
        column.heading: score
        for column in columns
        if (column.probe, column.metric) == NEEDLE and (score := constant_answer_score(data, column.length)) is not None
    }
    return {panel: scores[heading] for panel in panels if (heading := panel.partition(", ")[0]) in scores}


def _setting_notes(store: Store, data: SweepData, axes: Sequence[str]) -> list[str]:
    """Return a note per axis of two levels that stands for several settings: the settings in which its levels differ.

    Settings of single mixers are not listed, but mentioned. Cells are compared that agree in all other axes.

    Args:
        store: The database, which has the configs of cells.
        data: The sweep.
        axes: Axes; those of fixed axes and with more than two levels have no note.
    """
    notes = []
    for axis in axes:
        levels = data.levels(axis) if axis in data.extra_axes() else ()
        if len(levels) != 2:
            continue
        configs = store.configs({cell.cell_id for cell in data.cells})
        pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        matched_axes = [candidate for candidate in (*AXES, *data.extra_axes()) if candidate != axis]
        for cell in data.cells:
            key = (cell.seed, *(cell_level(cell, matched) for matched in matched_axes))
            pairs.setdefault(key, {})[cell_level(cell, axis)] = _flat(configs.get(cell.cell_id, {}))
        differing: dict[str, tuple[Any, ...]] = {}
        for pair in pairs.values():
            if len(pair) == 2:
                first, second = pair[levels[0]], pair[levels[1]]
                differing |= {
                    path: (first.get(path), second.get(path))
                    for path in dict.fromkeys((*first, *second))
                    if first.get(path) != second.get(path)
                }
        common = {path: both for path, both in differing.items() if not path.startswith("model.mixers.")}
        texts = [
            f"{path.rpartition('.')[2].replace('_', ' ')} {_value_text(first)} against {_value_text(second)}"
            for path, (first, second) in common.items()
        ] + [f"{len(differing) - len(common)} settings of single mixers"] * (len(common) < len(differing))
        if texts:
            names = " against ".join(drawing.level_label(level, axis).removeprefix(axis).strip() for level in levels)
            notes.append(f"{drawing.axis_label(axis).capitalize()} {names}: {', '.join(texts)}.")
    return notes


def _value_text(value: Any) -> str:
    """Return a value of a setting as a note has it: "on", "off", "none" or the value."""
    return {True: "on", False: "off", None: "none"}[value] if value is None or type(value) is bool else str(value)


def _flat(config: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a nested config by dotted path."""
    if not isinstance(config, Mapping):
        return {path: config}
    return {
        name: value
        for key, part in config.items()
        for name, value in _flat(part, f"{path}.{key}" if path else str(key)).items()
    }


def _chosen_axis(data: SweepData, numeric: dict[str, dict[str, float]], by: str | None) -> str:
    """Return the axis to draw over: `by`, or the numeric axis with the most different levels, the first of several.

    Args:
        data: The sweep.
        numeric: Number by level, by numeric axis.
        by: Axis of --by; None: not given.

    Raises:
        ReportError: There is no numeric axis, or `by` is not one.
    """
    if by is not None and by not in numeric:
        hint = choices_hint(by, list(numeric)) if numeric else "no axis of this sweep is numeric"
        raise ReportError(f"--by {by[:60]}: sweep {data.sweep} has no such numeric axis; {hint}")
    if not numeric:
        raise ReportError(
            f"sweep {data.sweep} has no numeric axis; add one to its grid, such as train.muon_lr: [0.01, 0.02, 0.04]"
        )
    return by or max(numeric, key=lambda axis: len(set(numeric[axis].values())))


def _means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the `line_means`, whose `of` is the largest number of cells that the line has at any level."""
    means = line_means(frame)
    return means.assign(of=means.groupby(["panel", "line"])["cells"].transform("max"))


def _rows(
    data: SweepData, column: Column, axis: str, levels: dict[str, float], lines: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the rows of one number, a dict per cell that has it.

    Keys: cell, attempt, configuration, panel, words, unit, better, percent, probe, metric, first, second, line ("all
    cells" without `lines`), axis, length (the level as a number), value, low and high (fractions for shares).

    Args:
        data: The sweep.
        column: The number.
        axis: The numeric axis.
        levels: Number by level of that axis.
        lines: At most two axes that distinguish lines.
    """
    unit = "%" if column.percent else column.unit
    column_fields: dict[str, Any] = {"panel": column.heading, "words": measure_label(column), "unit": unit}
    column_fields |= {
        "better": column.direction,
        "percent": column.percent,
        "probe": column.probe,
        "metric": column.metric,
    }
    rows = []
    for key, cells in data.configurations().items():
        for cell in cells:
            value = data.measured_value(cell, column)
            if value is None or value.value is None:
                continue
            line_levels = [cell_level(cell, line_axis) for line_axis in lines]
            first, second = [*line_levels, "", ""][:2]
            row = {"cell": cell.cell_id, "attempt": value.attempt_id, "configuration": ", ".join(key)} | column_fields
            row |= {"first": first, "second": second, "line": ", ".join(line_levels) or "all cells", "axis": axis}
            row |= {"length": levels[cell_level(cell, axis)], "value": value.value}
            rows.append(row | {"low": value.low, "high": value.high})
    return rows


def _frame(
    data: SweepData,
    columns: Sequence[Column],
    axis: str,
    levels: dict[str, float],
    lines: Sequence[str],
    panel_axes: Sequence[str],
) -> pd.DataFrame:
    """Return the rows of all numbers as a frame, in the order of the panels; empty without any.

    Args:
        data: The sweep.
        columns: The numbers.
        axis: The numeric axis.
        levels: Number by level of that axis.
        lines: At most two axes that distinguish lines.
        panel_axes: Axes of which every level has panels of its own, whose levels the column panel names.
    """
    rows = [row for column in columns for row in _rows(data, column, axis, levels, lines)]
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    cells = {cell.cell_id: cell for cell in data.cells}
    for panel_axis in panel_axes:
        labels = [drawing.level_label(cell_level(cells[cell], panel_axis), panel_axis) for cell in frame["cell"]]
        frame = frame.assign(
            **{name: [f"{a}, {b}" for a, b in zip(frame[name], labels, strict=True)] for name in ("panel", "words")}
        )
    if panel_axes:
        frame = frame.sort_values(
            "panel", key=lambda panels: panels.map(list(dict.fromkeys(panels)).index), kind="stable", ignore_index=True
        )
    return frame.astype({"value": float, "low": float, "high": float})


def _axis_apart(data: SweepData, frame: pd.DataFrame, without: Sequence[str]) -> str | None:
    """Return the averaged axis whose levels lie apart the most (`APART_SHARE`, `APART_RANGE`); None if none does.

    About the mean of every point of a line, the deviations of the cells are averaged by panel, line and level of the
    axis. The share of their variance that these averages have is compared, in the panel where it is largest.

    Args:
        data: The sweep.
        frame: Rows of the numbers, with cell, panel, line, length and value.
        without: Axes that do not count.
    """
    ranked = ("attn_type", "distractor", "reg_mode", "memory", "window", *data.extra_axes())
    cells = {cell.cell_id: cell for cell in data.cells}
    deviations = frame["value"] - frame.groupby(["panel", "line", "length"])["value"].transform("mean")
    spread = frame.groupby("panel")["value"].agg(lambda values: values.max() - values.min())
    shares = {}
    for axis in ranked:
        if axis in without or not 1 < len(data.levels(axis)) <= MOST_APART:
            continue
        levels = [cell_level(cells[cell], axis) for cell in frame["cell"]]
        rows = frame[["panel", "line"]].assign(level=levels, own=deviations)
        rows["effect"] = rows.groupby(["panel", "line", "level"])["own"].transform("mean")
        squares = (
            rows.assign(own=rows["own"] ** 2, effect=rows["effect"] ** 2).groupby("panel")[["own", "effect"]].mean()
        )
        is_apart = squares["effect"] ** 0.5 >= APART_RANGE * spread
        share = (squares["effect"] / squares["own"])[is_apart & (squares["own"] > 0)].max()
        if share >= APART_SHARE:
            shares[axis] = share
    return max(shares, key=shares.__getitem__) if shares else None


def _averaging_note(data: SweepData, means: pd.DataFrame, shown_axes: Sequence[str]) -> str:
    """Return the sentence on the points: axes that they average over, and cells of each, with a space at its end.

    Args:
        data: The sweep.
        means: Means of the lines, with cells.
        shown_axes: Axes that the figure shows as position, line or panel.
    """
    low, high = int(means["cells"].min()), int(means["cells"].max())
    if high == 1:
        return "Points: single cells, one run each, so that the spread between runs is unknown. "
    ranked = ("attn_type", "distractor", "reg_mode", "memory", "window", *data.extra_axes())
    names = [
        drawing.axis_label(candidate)
        for candidate in ranked
        if candidate not in shown_axes and len(data.levels(candidate)) > 1
    ]
    names += ["seed"] if len({cell.seed for cell in data.cells}) > 1 else []
    counts = str(low) if low == high else f"{low} to {high}"
    over = f"means over {', '.join(names)}" if names else "means"
    return f"Lines: {over} ({counts} cells each); dots: single cells. "


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per number: a line per mixer (and memory) with its band, and single cells faint behind it.

    Highlighted cells of `look` get lines of their own, labelled at their ends.
    """
    frame = figure_data.frame
    titles = list(dict.fromkeys(frame["panel"]))
    measure_labels = frame.drop_duplicates("panel").set_index("panel")["words"]
    figure = drawing.page(drawing.PANEL_HEIGHT + 0.35, drawing.width_of(len(titles), 3.0) if len(titles) > 1 else 4.6)
    sides = frame.drop_duplicates("panel").set_index("panel")["better"].map(BETTER_SIDES)
    heads = [
        f"{measure_labels[title]}\n{sides[title] and f'({sides[title]})'}".strip() if len(titles) > 1 else ""
        for title in titles
    ]
    columns = 3 if figure.get_figwidth() > drawing.NARROW_WIDTH else 2
    grid = drawing.panels(figure, heads, columns=columns)
    means, styles = (
        _means(frame),
        line_styles(frame, figure_data.draw_options["axes"], figure_data.draw_options["mixer"]),
    )
    highlighted, constant = named_cells(figure_data, look), figure_data.draw_options["constant"]
    for axes, title in zip(grid, titles, strict=True):
        panel_rows, mean = (rows[rows["panel"] == title].reset_index(drop=True) for rows in (frame, means))
        _draw_panel(axes, panel_rows, mean, styles, highlighted, barred=is_barred(means), is_alone=len(titles) == 1)
    for axes, title in zip(grid, titles, strict=True):
        if title in constant:
            mark_baseline([axes], 100 * constant[title])
    more = [("constant digit", BASELINE)] if constant else []
    handles = legend(styles, *more, means=means)
    if len(titles) == 1 and 1 < means["line"].nunique() <= MOST_LABELLED:
        # labels at the ends of lines say what the entries of lines would
        named = {line_style.label for line_style in styles.values()}
        named |= {
            drawing.level_label(level, axis) for line_style in styles.values() for axis, level in line_style.levels
        }
        handles = {name: handle for name, handle in handles.items() if name not in named}
    if (frame["better"] != 0).any():
        handles["best of a line"] = drawing.key(color=drawing.GREY, linestyle="none", **BEST_RING)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles)


def is_geometric(levels: Sequence[float]) -> bool:
    """Return True if ascending positive levels, at least three, have more equal ratios than differences."""
    if len(levels) < MIN_GEOMETRIC_LEVELS or levels[0] <= 0:
        return False
    steps, ratios = ([b - a for a, b in pairwise(row)] for row in (levels, [math.log(level) for level in levels]))
    return max(ratios) / min(ratios) < max(steps) / min(steps)


def _ring_best(axes: Axes, mean: pd.DataFrame, styles: LineStyles, panel: str, better: int, factor: float) -> None:
    """Ring the best mean of each line, unless its number has no better side.

    Args:
        axes: The panel.
        mean: Means of its lines.
        styles: Style by line.
        panel: Name of the panel.
        better: 1 if more is better, -1 if less, 0 for neither.
        factor: Factor from values to units of the y axis.
    """
    for name, line in mean.groupby("line", sort=False) if better else ():
        best = line.iloc[int((better * line["value"]).to_numpy().argmax())]
        ring = BEST_RING | {"markeredgecolor": styles[str(name)].inks[panel], "zorder": 4}
        drawing.points(axes, best["length"], factor * best["value"], **ring)


def _draw_panel(
    axes: Axes,
    panel_rows: pd.DataFrame,
    mean: pd.DataFrame,
    styles: LineStyles,
    highlighted: dict[str, str],
    *,
    barred: bool,
    is_alone: bool,
) -> None:
    """Draw a panel, and set its scale, limits, ticks and axis labels.

    Cells that share line and level are dots. Highlighted cells have lines labelled at their ends.

    Args:
        axes: The panel.
        panel_rows: Rows of its number.
        mean: Means of its lines.
        styles: Style by line.
        highlighted: Label by id of a highlighted cell.
        barred: Draw intervals as bars instead of bands.
        is_alone: Whether it is the only panel, which then names its number on the y axis, and lines at their ends.
    """
    percent = bool(panel_rows["percent"].iloc[0])
    factor = 100.0 if percent else 1.0
    # seeds of a level have the same x, so that dots show what crossing lines would hide
    single = panel_rows.groupby(["line", "length"])["cell"].transform("size") > 1
    for name, line_style in styles.items():
        dots = panel_rows[(panel_rows["line"] == name) & single]
        style: dict[str, Any] = {
            "markersize": 2.4,
            "alpha": 0.4,
            "color": line_style.inks[str(panel_rows["panel"].iloc[0])],
            "markeredgewidth": 0,
            "zorder": 2.4,
        }
        drawing.points(axes, dots["length"], factor * dots["value"], **style)
    draw_lines_with_means(axes, panel_rows, mean, styles, factor, highlighted=highlighted, barred=barred)
    _ring_best(axes, mean, styles, str(panel_rows["panel"].iloc[0]), int(panel_rows["better"].iloc[0]), factor)
    if percent:
        axes.set_ylim(-3, 104)
    else:
        low, high = robust_range(list(panel_rows["value"]), list(mean["value"]))
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - room, high + room)
    levels = sorted(set(panel_rows["length"]))
    scale = scale_for_values(levels)
    scale = replace(scale, log=scale.log or is_geometric(levels))
    scale.apply_to_axis(axes, "x")
    if barred:
        # lines stand apart sideways
        low, high = axes.get_xlim()
        room = (high / low) ** SIDE_ROOM if scale.log else SIDE_ROOM * (high - low)
        axes.set_xlim(*((low / room, high * room) if scale.log else (low - room, high + room)))
    if len(levels) <= drawing.MAX_TICKS:
        drawing.put_ticks(axes.xaxis, {level: tick_label(level) for level in levels})
    axes.set_xlabel(f"{drawing.axis_label(str(panel_rows['axis'].iloc[0]))}{' (log scale)' if scale.log else ''}")
    unit = str(panel_rows["unit"].iloc[0])
    unit = "nats per token" if unit == "nats/token" else unit
    label, better = str(panel_rows["words"].iloc[0]), BETTER_SIDES[int(panel_rows["better"].iloc[0])]
    if is_alone:
        axes.set_ylabel("\n".join(filter(None, (f"{label} ({unit})", better))))
    else:
        axes.set_ylabel(unit)
    if is_alone and 1 < mean["line"].nunique() <= MOST_LABELLED:
        ends = mean.sort_values("length").groupby("line", sort=False).tail(1)
        names = {name: _end_label(line_style.levels) for name, line_style in styles.items()}
        inks = {name: line_style.inks[str(panel_rows["panel"].iloc[0])] for name, line_style in styles.items()}
        label_ends(
            axes,
            [(names[end["line"]], factor * end["value"], inks[end["line"]]) for end in ends.to_dict("records")],
            leaders=True,
        )
