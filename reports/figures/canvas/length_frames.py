"""Frames of numbers over context lengths, the means of their lines, and notes on both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from ....results import metrics
from ....results.console.text import counted
from ...number_format import format_length
from ...sweep_data import SweepData
from . import drawing
from .base import GROUP, Axes, axes_of_lines, line_groups

if TYPE_CHECKING:
    import pandas as pd  # at run time where it is used: it takes half a second and 60 MiB


HIDDEN_RANGE, MAX_COINCIDING = 0.01, 4
"""Share of a panel's range within which a line hides another, and pairs of such lines that the caption lists."""


def configuration_of(data: SweepData) -> dict[str, str]:
    """Return the configuration of each cell as text, by cell id: the levels of every axis, which seeds share."""
    return {cell.cell_id: ", ".join(key) for key, cells in data.configurations().items() for cell in cells}


def in_grid_order(frame: pd.DataFrame, data: SweepData, *then: str) -> pd.DataFrame:
    """Return the rows sorted by their cell's position in the grid, then by the columns `then`; the sort is stable.

    Args:
        frame: Rows with the column cell (ids of cells of the sweep).
        data: The sweep.
        then: Further columns to sort by.
    """
    cell_index = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    ranked = frame.assign(_place=frame["cell"].map(cell_index)).sort_values(
        ["_place", *then], kind="stable", ignore_index=True
    )
    return ranked.drop(columns="_place")


def t_half_width(n: Any, sd: Any) -> Any:
    """Return half the width of the 95 % Student's t interval of means over n values.

    `sd` is their sample standard deviation. It has n - 1 degrees of freedom, and is NaN where `sd` is, as for a single
    value. Both are arrays, series or numbers.
    """
    # one value has no spread: a single degree of freedom only keeps its quantile from being undefined
    return stdtrit(np.maximum(n - 1, 1), 0.975) * sd / n**0.5


def length_rows(data: SweepData, trained: dict[str, int], probe: str, metric: str) -> list[dict[str, Any]]:
    """Return the rows of `length_frame` as dicts with its columns; n, low and high are None where unknown."""
    lengths = data.lengths(probe, metric, include_unrequested=True)
    groups = line_groups(data)
    configurations = configuration_of(data)
    rows = []
    for cell in data.cells:
        base = trained.get(cell.cell_id, min((length for length in lengths if length), default=1))
        for length in lengths:
            value = data.values.get((cell.cell_id, probe, metric, length))
            if not length or value is None or value.value is None:
                continue
            fields: dict[str, Any] = {"cell": cell.cell_id, "attempt": value.attempt_id, **groups[cell.cell_id]}
            fields |= {"configuration": configurations[cell.cell_id]}
            fields |= {"probe": probe, "metric": metric, "length": length, "trained": base, "ratio": length / base}
            rows.append(fields | {"value": value.value, "n": value.n, "low": value.low, "high": value.high})
    return rows


def length_frame(data: SweepData, trained: dict[str, int], probe: str, metric: str) -> pd.DataFrame:
    """Return a number over context lengths, one row per cell and length that has it, in the grid's order of cells.

    Columns: cell, attempt, configuration (the levels of every axis, which seeds share), panel, first, second, line,
    probe, metric, length (tokens), trained (tokens of a training row, the shortest length where the config does not
    say), ratio of the two, value (shares as fractions), n (answers or tokens), low, high (of an accuracy: the 95 %
    interval of its trials; else NaN). Without any number the frame is empty, with these columns.

    Args:
        data: The sweep.
        trained: Tokens of a training row by cell id.
        probe: Probe of the number.
        metric: Metric of the number.
    """
    import pandas as pd

    columns = ["cell", "attempt", "configuration", *GROUP, "probe", "metric", "length", "trained", "ratio", "value"]
    frame = pd.DataFrame(length_rows(data, trained, probe, metric), columns=[*columns, "n", "low", "high"])
    return frame.astype({"value": float, "n": float, "low": float, "high": float})


BARS = {
    "configurations": "95 % t intervals across configurations (seeds averaged)",
    "seeds": "95 % t intervals across seeds of a single configuration",
    "trials": "95 % Wilson intervals across trials of a single cell",
}
"""Meaning of a line's interval, as a note says it, by the values of the column `interval`."""
LINE = [*GROUP, "probe", "metric"]
MEAN_COLUMNS = ["value", "cells", "configurations", "of", "low", "high", "interval"]


def line_means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `mean_rows` of the rows of a `length_frame` as a frame; an empty one has the columns, too."""
    import pandas as pd

    means = pd.DataFrame(mean_rows(frame.to_dict("records")), columns=[*LINE, "length", *MEAN_COLUMNS])
    return means.astype({"value": float, "low": float, "high": float})


def mean_rows(rows: Iterable[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """Return the mean of each line, one dict per line, number and length, in order of first appearance.

    Keys: panel, first, second, line, probe, metric, length, value (mean over configurations, seeds averaged first),
    cells (with the number at this length), configurations, of (cells that the line has at any length), low and high
    (95 % interval), and interval ("configurations", "seeds" or "trials": what it is over; "" without one).

    The unit is the configuration: the interval is Student's t over configurations, which describes how far the mean
    would change with other configurations like these. Neither digits nor seeds count as independent. A line of one
    configuration has the interval over its seeds, a line of one cell that of the cell's trials. NaN where there is
    none. The interval of a share is clipped to 0 and 1.

    Args:
        rows: Dicts of `length_rows`, or rows of `length_frame`.
    """
    points: dict[tuple[Any, ...], dict[str, list[Mapping[Any, Any]]]] = {}
    cells: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        line = tuple(row[name] for name in LINE)
        points.setdefault((*line, row["length"]), {}).setdefault(row["configuration"], []).append(row)
        cells.setdefault(line, set()).add(row["cell"])
    return [
        dict(zip((*LINE, "length"), key, strict=True))
        | _mean_of_configurations(list(by_configuration.values()), metrics.metric(*key[-3:-1]).percent)
        | {"of": len(cells[key[:-1]])}
        for key, by_configuration in points.items()
    ]


def _mean_of_configurations(configurations: Sequence[Sequence[Mapping[Any, Any]]], is_share: bool) -> dict[str, Any]:
    """Return value, cells, configurations, low, high and interval of `mean_rows` for one point of a line.

    Args:
        configurations: Rows of each configuration, one per seed.
        is_share: Clip the interval to 0 and 1.
    """
    values = [[row["value"] for row in seeds] for seeds in configurations]
    means = [statistics.fmean(seeds) for seeds in values]
    kind, spread = ("configurations", means) if len(means) > 1 else ("seeds", values[0])
    mean, low, high = statistics.fmean(means), configurations[0][0]["low"], configurations[0][0]["high"]
    if len(spread) > 1:
        half = float(t_half_width(len(spread), float(np.std(spread, ddof=1))))
        low, high = (min(max(end, 0.0), 1.0) if is_share else end for end in (mean - half, mean + half))
    elif low is None or math.isnan(low):
        kind, low, high = "", math.nan, math.nan
    else:
        kind = "trials"
    counts = {"cells": sum(map(len, values)), "configurations": len(values)}
    return {"value": mean} | counts | {"low": low, "high": high, "interval": kind}


MIN_UNITS_OF_BAND = 3
"""Configurations or seeds from which on an interval is drawn: over two it is 13 standard errors wide."""


def has_band(means: pd.DataFrame) -> pd.Series:
    """Return for each row of `line_means` whether its interval is drawn: of trials, or over three or more units."""
    units = means["configurations"].where(means["interval"] == "configurations", means["cells"])
    return means["low"].notna() & ((means["interval"] == "trials") | (units >= MIN_UNITS_OF_BAND))


MAX_BARRED_POINTS, MIN_CROWD = 8, 3
"""Points of a line up to which its intervals may be bars, and lines with intervals from which on a panel has them."""


def is_barred(means: pd.DataFrame) -> bool:
    """Return True if the intervals of a figure are drawn as bars, since bands would cover each other.

    So it is if a panel has three or more lines with intervals, and no line has more than eight points.

    Args:
        means: Rows of `line_means` of all panels.
    """
    lines = means[has_band(means)].groupby(LINE).size().groupby(["panel", "probe", "metric"]).size()
    points = means.groupby(LINE).size()
    return bool(len(lines) and lines.max() >= MIN_CROWD and points.max() <= MAX_BARRED_POINTS)


def is_banded_line(means: pd.DataFrame) -> pd.Series:
    """Return for each row of `line_means` whether any point of its line has a band, which replaces its thin lines."""
    return has_band(means).groupby([means[name] for name in LINE]).transform("any").astype(bool)


def bar_note(means: pd.DataFrame, mark: str = "Bands", trials: str = BARS["trials"]) -> str:
    """Return the sentence on the bands of lines, with a space at its end; "" without any.

    Args:
        means: Rows with the column interval, as `line_means` gives them.
        mark: Name of the marks: "Bands" or "Bars".
        trials: Meaning of the interval of a line of one cell.
    """
    texts = [text for kind, text in (BARS | {"trials": trials}).items() if (means["interval"] == kind).any()]
    return f"{mark}: {'; '.join(texts)}. " if texts else ""


def band_note(means: pd.DataFrame, trials: str = BARS["trials"]) -> str:
    """Return the sentences on the bands or bars that `has_band` admits and on those that it does not; "" without any.

    Args:
        means: Rows of `line_means`.
        trials: Meaning of the interval of a line of one cell.
    """
    shown = has_band(means)
    few = bool((means["low"].notna() & ~shown).any())
    mark = "Bars" if is_barred(means) else "Bands"
    notes = [bar_note(means[shown], mark, trials)]
    notes += [f"No {mark.lower()[:-1]} over fewer than three configurations or seeds. "] if few else []
    if mark == "Bars" and notes[0]:
        notes += ["Lines are offset sideways; bars may be shorter than marks. "]
    return "".join(notes)


def fewer_cells_note(means: pd.DataFrame) -> list[str]:
    """Return the note naming the lengths at which a mean has fewer `cells` than its line's largest number, column `of`.

    As a list of one note; empty if all means have as many.
    """
    fewer = means[means["cells"] < means["of"]]
    if fewer.empty:
        return []
    parts = []
    for length, at in fewer.groupby("length"):
        counts = sorted({(int(row["cells"]), int(row["of"])) for row in at.to_dict("records")})
        fractions = [f"{cells} of {of}" for cells, of in counts[:3]] + ["..."] * (len(counts) > 3)
        parts.append(f"{format_length(int(str(length)))} ({', '.join(fractions)})")
    return [f"Some means are over fewer cells at {', '.join(parts)}."]


def coinciding_lines(rows: pd.DataFrame) -> list[tuple[str, str, list[float], int]]:
    """Return the pairs of lines of a panel of which one hides the other.

    Two lines count if at half of the levels that both have, or more, they differ by at most `HIDDEN_RANGE` of the range
    of the panel's means.

    Args:
        rows: Means of the lines of one panel, with line, length and value.

    Returns:
        (line, later line, levels at which they coincide, number of levels that both have) of each pair.
    """
    table = rows.pivot_table(index="length", columns="line", values="value", sort=False)
    near = HIDDEN_RANGE * (rows["value"].max() - rows["value"].min())
    pairs = []
    for below, above in combinations(table.columns, 2):
        distances = (table[below] - table[above]).abs().dropna()
        hidden = [float(level) for level in distances.index[distances <= near]]
        if hidden and len(hidden) >= len(distances) / 2:
            pairs.append((str(below), str(above), hidden, len(distances)))
    return pairs


def coinciding_note(means: pd.DataFrame, axes: Sequence[str], of: str = "levels") -> list[str]:
    """Return the note on pairs of lines of which one hides the other (`coinciding_lines`), as a list; empty without any.

    Args:
        means: Means of the lines, with panel, first, second, line, length and value.
        axes: Axes of first and second.
        of: Name of what the lines run over, in the plural.
    """
    texts: dict[str, list[str]] = {}
    for panel, rows in means.groupby("panel", sort=False):
        levels = rows.drop_duplicates("line").set_index("line")[["first", "second"]]
        for below, above, hidden, total in coinciding_lines(rows):
            names = [
                ", ".join(drawing.level_label(level, axis) for axis, level in zip(axes, levels.loc[line], strict=False))
                for line in (below, above)
            ]
            share = f"all {total} {of}" if len(hidden) == total else f"{len(hidden)} of {total} {of}"
            texts.setdefault(f"({names[0]}) and ({names[1]}) at {share}", []).append(str(panel))
    listed = [f"{text} ({'; '.join(panels)})" for text, panels in texts.items()]
    most = f" and {len(listed) - MAX_COINCIDING} more" if len(listed) > MAX_COINCIDING else ""
    return [f"Lines that coincide: {'; '.join(listed[:MAX_COINCIDING])}{most}."] if listed else []


def averaging_note(data: SweepData, axes: Sequence[str] | None = None, *, means: pd.DataFrame) -> str:
    """Return the sentence on the axes that thick lines average over, with a space at its end; "" without any.

    It has the number of cells of a line. Axes that do not vary are left out; seeds count as one if they vary. Thin
    lines are mentioned if a line of several cells has no band.

    Args:
        data: The sweep.
        axes: Axes that distinguish lines; None: attn_type and `axes_of_lines`.
        means: Rows of `line_means`.
    """
    over = averaged_axes(data, ("attn_type", *axes_of_lines(data)) if axes is None else axes)
    if not over:
        return ""
    thin = "; thin lines: single cells" if (means["of"].gt(1) & ~is_banded_line(means)).any() else ""
    return f"{'Thick lines' if thin else 'Lines'}: means over {over} (n = {count_range(means['of'])} per line){thin}. "


def averaged_axes(data: SweepData, line_axes: Collection[str]) -> str:
    """Return the labels of the axes that vary and do not distinguish lines, and of seeds if they vary, by commas.

    Args:
        data: The sweep.
        line_axes: Axes that distinguish lines or panels.
    """
    axes = ("attn_type", "distractor", "reg_mode", "memory", "window", *data.extra_axes())
    names = [axis for axis in axes if len(data.levels(axis)) > 1 and axis not in line_axes]
    names += ["seed"] if len({cell.seed for cell in data.cells}) > 1 else []
    return ", ".join(drawing.axis_label(name) for name in names)


def count_range(counts: Iterable[int]) -> str:
    """Return the range of at least one number of cells as text, such as "10 cells" or "2 to 5 cells"."""
    ends = sorted({int(count) for count in counts})
    return counted(ends[0], "cell") if len(ends) == 1 else f"{ends[0]} to {ends[-1]} cells"


def single_value(values: Sequence[int]) -> int | None:
    """Return the value that all of these have; None if they differ or there are none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def count_fewer(axes: Axes, means: pd.DataFrame, colour: str, scale: float = 1) -> None:
    """Write "n=<cells>" next to every mean that is over fewer cells than its line has elsewhere.

    Args:
        axes: The axes.
        means: Rows with length, value, cells and of (as in `line_means`) of one line.
        colour: Colour of the text.
        scale: Factor from values to units of the y axis.
    """
    for _, mean in means[means["cells"] < means["of"]].iterrows():
        at = mean["length"], scale * mean["value"]
        style: dict[str, Any] = {"ha": "center", "color": colour, "zorder": 4, "bbox": drawing.BACKING}
        drawing.note(axes, f"n={int(mean['cells'])}", at, (0, 5), **style)


def length_label(trained: int | None) -> str:
    """Return the label of an axis of context lengths, whose ticks show multiples of the training length if known."""
    return "context length (× training length; tokens)" if trained else "context length (tokens)"
