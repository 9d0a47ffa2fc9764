"""Frames of numbers over context lengths, the means of their lines, and notes on both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from scipy.special import stdtrit

from ....results import metrics
from ...number_format import format_length
from ...sweep_data import SweepData
from . import drawing
from .base import GROUP, Axes, axes_of_lines, line_groups


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


def t_half_width(n: pd.Series, sd: pd.Series) -> pd.Series:
    """Return half the width of the 95 % Student's t interval of means over n values.

    `sd` is their sample standard deviation. It has n - 1 degrees of freedom, and is NaN where `sd` is, as for a single
    value.
    """
    # one value has no spread: a single degree of freedom only keeps its quantile from being undefined
    return stdtrit((n - 1).clip(lower=1), 0.975) * sd / n**0.5


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
    columns = ["cell", "attempt", "configuration", *GROUP, "probe", "metric", "length", "trained", "ratio", "value"]
    frame = pd.DataFrame(rows, columns=[*columns, "n", "low", "high"])
    return frame.astype({"value": float, "n": float, "low": float, "high": float})


BARS = {
    "configurations": "95 % t intervals across configurations (seeds averaged)",
    "seeds": "95 % t intervals across seeds of a single configuration",
    "trials": "95 % Wilson intervals across trials of a single cell",
}
"""Meaning of a line's interval, as a note says it, by the values of the column `interval`."""
LINE = [*GROUP, "probe", "metric"]


def line_means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of each line of a `length_frame`, one row per line, number and length.

    Columns: panel, first, second, line, probe, metric, length, value (mean over configurations, seeds averaged first),
    cells (with the number at this length), configurations, of (cells that the line has at any length), low and high
    (95 % interval), and interval ("configurations", "seeds" or "trials": what it is over; "" without one).

    The unit is the configuration: the interval is Student's t over configurations, which describes how far the mean
    would change with other configurations like these. Neither digits nor seeds count as independent. A line of one
    configuration has the interval over its seeds, a line of one cell that of the cell's trials. NaN where there is
    none. The interval of a share is clipped to 0 and 1.

    Args:
        frame: Rows of `length_frame` (panel, first, second, line, probe, metric, length, cell, configuration, value,
            low, high); empty gives an empty frame with the columns above.
    """
    keys = [*LINE, "length"]
    columns = [*keys, "value", "cells", "configurations", "of", "low", "high", "interval"]
    if frame.empty:
        return pd.DataFrame(columns=columns)
    grouped = frame.groupby([*keys, "configuration"], sort=False)
    inner = grouped.agg(value=("value", "mean"), sd=("value", "std"), cells=("cell", "size"), low=("low", "first"), high=("high", "first"))  # fmt: skip
    outer = inner.reset_index().groupby(keys, sort=False)
    means = outer.agg(
        value=("value", "mean"), between=("value", "std"), within=("sd", "first"), cells=("cells", "sum"),
        configurations=("value", "size"), low=("low", "first"), high=("high", "first"),
    ).reset_index()  # fmt: skip
    has_configurations, has_seeds = means["configurations"] > 1, (means["configurations"] == 1) & (means["cells"] > 1)
    n = means["configurations"].where(has_configurations, means["cells"])
    sd = means["between"].where(has_configurations, means["within"])
    half = t_half_width(n, sd)
    spread = has_configurations | has_seeds
    shares = [metrics.metric(probe, name).percent for probe, name in zip(means["probe"], means["metric"], strict=True)]
    for side, sign in (("low", -1), ("high", 1)):
        ends = means["value"] + sign * half
        means[side] = means[side].where(~spread, ends.where(~pd.Series(shares), ends.clip(0, 1)))
    means["interval"] = [
        "configurations" if a else "seeds" if b else "trials" if c else ""
        for a, b, c in zip(has_configurations, has_seeds, means["low"].notna(), strict=True)
    ]
    cell_counts = frame.groupby(LINE)["cell"].nunique().reset_index(name="of")
    return means.merge(cell_counts, on=LINE, how="left")[columns]


MIN_UNITS_OF_BAND = 3
"""Configurations or seeds from which on an interval is drawn: over two it is 13 standard errors wide."""


def has_band(means: pd.DataFrame) -> pd.Series:
    """Return for each row of `line_means` whether its interval is drawn: of trials, or over three or more units."""
    units = means["configurations"].where(means["interval"] == "configurations", means["cells"])
    return means["low"].notna() & ((means["interval"] == "trials") | (units >= MIN_UNITS_OF_BAND))


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
    """Return the sentences on the bands that `has_band` admits and on those that it does not; "" without any interval.

    Args:
        means: Rows of `line_means`.
        trials: Meaning of the interval of a line of one cell.
    """
    shown = has_band(means)
    few = bool((means["low"].notna() & ~shown).any())
    return bar_note(means[shown], trials=trials) + ("No band over fewer than three configurations or seeds. " if few else "")  # fmt: skip


def fewer_cells_note(means: pd.DataFrame) -> list[str]:
    """Return the note on means over fewer cells than their line has elsewhere, as a list; empty if all have as many."""
    fewer = means[means["cells"] < means["of"]]
    if fewer.empty:
        return []
    parts = []
    for length, at in fewer.groupby("length"):
        counts = sorted({f"{int(row['cells'])} of {int(row['of'])}" for row in at.to_dict("records")})
        parts.append(f"{format_length(int(str(length)))} ({', '.join(counts[:3])}{', ...' if len(counts) > 3 else ''})")
    return [f"Some means are over fewer cells at {', '.join(parts)}."]


def averaging_note(data: SweepData, axes: Sequence[str] | None = None) -> str:
    """Return the sentence on the axes that thick lines average over, with a space at its end; "" without any.

    Axes that do not vary are left out; seeds count as one if they vary.

    Args:
        data: The sweep.
        axes: Axes that distinguish lines; None: attn_type and `axes_of_lines`.
    """
    line_axes = ("attn_type", *axes_of_lines(data)) if axes is None else axes
    every = ("attn_type",) if axes is not None else ()
    every = (*every, "distractor", "reg_mode", "memory", "window")
    averaged_axes = [axis for axis in every if len(data.levels(axis)) > 1]
    names = [axis for axis in (*averaged_axes, *data.extra_axes()) if axis not in line_axes]
    names += ["seed"] if len({cell.seed for cell in data.cells}) > 1 else []
    names = [drawing.axis_label(name) for name in names]
    return f"Thick lines: means over {', '.join(names)}; thin lines: single cells. " if names else ""


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
