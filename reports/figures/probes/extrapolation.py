"""Figure `extrapolation`: perplexity of one text in windows of every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ....results.console.text import counted
from ....results.store.store import Store
from ...number_format import Column, format_length
from ...sweep_data import ReportError, SweepData, cell_level
from ...table_builder import measured_entry
from ..canvas import drawing
from ..canvas.base import (
    Axes,
    Figure,
    FigureData,
    FigureOptions,
    cell_labels,
    collected,
    frame_origins,
    level_names,
    training_lengths,
)
from ..canvas.length_frames import (
    MIN_UNITS_OF_BAND,
    averaging_note,
    band_note,
    fewer_cells_note,
    length_frame,
    length_label,
    line_means,
    single_value,
    t_half_width,
)
from ..canvas.line_drawing import mark_out_of_range, mark_training_length, robust_range
from .panels import assign_panels, draw_panels, out_of_range_note, row_labels

PROBE, METRIC = "extrapolation", "perplexity"
CORPUS = "data.corpus"
LOG_AXIS_RATIO = 3.0
"""Ratio of the highest to the lowest perplexity from which on the axis is logarithmic."""
ROW_HEIGHT = 0.19
"""Height in inches, in the style `paper`, of a row of the plot of a single length."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the perplexity over context lengths, in windows side by side.

    One row per cell and length: cell, attempt, configuration (levels of every axis, which seeds share), panel (mixer),
    first, second and line (levels of up to two axes that vary), probe, metric, length (tokens), trained (tokens of a
    training row), ratio of the two, value, n, low and high (95% interval of the trials, else NaN). The configuration at
    that length has mean, seeds (runs behind the mean, printed ones too), seeds_low and seeds_high (95 % t interval of
    the mean over three or more seeds, else NaN). Few lines share one panel with an empty name, and the mixer is then
    `first` (`assign_panels`).

    Raises:
        ReportError: No cell has perplexities.
    """
    frame = length_frame(data, training_lengths(store, data), PROBE, METRIC)
    if frame.empty:
        raise ReportError(
            f"no cell of sweep {data.sweep} has perplexities by window length; evaluate with --probe {PROBE}"
        )
    frame, axes = assign_panels(data, _with_seed_means(data, frame))
    means = line_means(frame)
    lengths = sorted(set(frame["length"]))
    title = "Perplexity by window length"
    if len(lengths) == 1:
        is_trained = single_value(list(frame["trained"])) == lengths[0]
        phrase = "at the training length of" if is_trained else "in windows of"
        title, own = f"Perplexity {phrase} {format_length(lengths[0])} tokens", _single_length_notes(frame)
    else:
        line_axes = axes if "attn_type" in axes else ("attn_type", *axes)
        own = [
            f"{averaging_note(data, line_axes, means=means)}{band_note(means)}The same targets at every length, in adjacent "
            "windows that each start from a zero state.",
            *fewer_cells_note(means),
            *out_of_range_note(frame, y_limits(frame, means)[1]),
        ]
    own += _corpus_note(data, set(frame["cell"]))
    # a table of randomized positions is drawn under that name, not as its level
    level = drawing.level_label("label", "model.positions")
    shown = [name for name in level_names(data, set(frame["cell"])) if name != level]
    return collected(
        store, data, "extrapolation", title, frame, frame_origins(frame), notes=own, shown=shown,
        trained=single_value(list(frame["trained"])), axes=axes, names=cell_labels(data, without=("attn_type", *axes)),
        rows=row_labels(data, set(frame["cell"])),
    )  # fmt: skip


def _corpus_note(data: SweepData, cells: set[str]) -> list[str]:
    """Return the name of the corpus of all drawn cells as a sentence, in a list; empty if it is no axis or they differ."""
    levels = (
        {cell_level(cell, CORPUS) for cell in data.cells if cell.cell_id in cells}
        if CORPUS in data.extra_axes()
        else set()
    )
    return [f"Corpus: {drawing.level_label(levels.pop(), CORPUS).rpartition(' ')[2]}."] if len(levels) == 1 else []


def _with_seed_means(data: SweepData, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the columns mean, seeds, seeds_low and seeds_high of their configuration at their length."""
    by_row: dict[tuple[str, int], dict[str, float]] = {}
    for cells in data.configurations().values():
        for length in sorted(set(frame["length"])):
            entry = measured_entry(data, cells, Column("", PROBE, METRIC, 2, length=length))
            half = (
                t_half_width(entry.seeds, entry.sd)
                if entry.sd is not None and entry.seeds >= MIN_UNITS_OF_BAND
                else np.nan
            )
            mean = np.nan if entry.value is None else entry.value
            fields = {"mean": mean, "seeds": entry.seeds, "seeds_low": mean - half, "seeds_high": mean + half}
            by_row |= {(cell.cell_id, length): fields for cell in cells}
    added = [by_row[row] for row in zip(frame["cell"], frame["length"], strict=True)]
    return frame.assign(**{name: [fields[name] for fields in added] for name in added[0]})


def _range_text(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low} to {high}"


def _single_length_notes(frame: pd.DataFrame) -> list[str]:
    """Return the notes of the plot of one length: points, order, runs behind a mean and bars.

    Args:
        frame: Rows of one length, with configuration, seeds and seeds_low.
    """
    rows = frame.drop_duplicates("configuration")
    barred = rows["seeds_low"].notna()
    several = bool((frame.groupby("configuration")["cell"].size() > 1).any())
    notes = [f"{counted(len(rows), 'configuration')}, lowest perplexity on top. Points: means over seeds (runs per mean: {_range_text(rows['seeds'])})"
             f"{'; small dots: single runs' if several else ''}."]  # fmt: skip
    if barred.any():
        notes.append("Bars: 95 % t intervals of the mean over seeds.")
    if not barred.all():
        notes.append(f"No bar over fewer than {['', 'one', 'two', 'three'][MIN_UNITS_OF_BAND]} seeds.")
    return [*notes, "The same targets in all runs, in adjacent windows that each start from a zero state."]


def needs_log_axis(frame: pd.DataFrame) -> bool:
    """Return True if the largest perplexity is more than three times the smallest: the axis is then logarithmic."""
    return bool(frame["value"].max() > LOG_AXIS_RATIO * frame["value"].min())


def y_limits(frame: pd.DataFrame, means: pd.DataFrame) -> tuple[float, float]:
    """Return the (low, high) limits of perplexity; outliers among the cells do not flatten the rest.

    On a logarithmic axis (`needs_log_axis`) the range is computed of logarithms; the limits are perplexities again.
    """
    values, mean_values = list(frame["value"]), list(means["value"])
    if not needs_log_axis(frame):
        return robust_range(values, mean_values)
    low, high = robust_range(list(np.log(values)), list(np.log(mean_values)))
    return float(np.exp(low)), float(np.exp(high))


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw all lines in one panel, or a panel per mixer; of a single length a row per configuration.

    Cells are thin lines, means thick ones; highlighted cells of `look` are labelled. Values above the limits are
    arrows. The training length is marked.
    """
    frame, trained = figure_data.frame, figure_data.draw_options["trained"]
    if frame["length"].nunique() == 1:
        return _draw_single_length(figure_data, look)
    means = line_means(frame)
    low, high = y_limits(frame, means)

    def dress(axes: Axes, panel_rows: pd.DataFrame, last: bool) -> None:
        """Set the scales, limits and marks of a panel.

        Args:
            axes: The panel.
            panel_rows: Rows of its cells.
            last: Whether it is the last panel; no effect.
        """
        drawing.length_axis(axes, list(frame["length"]), trained, room=0.5)
        if needs_log_axis(frame):
            axes.set_yscale("log")
            # more ticks where the ends are less than a factor of thirty apart
            drawing.log_ticks(axes.yaxis, 8, (1, 2, 5) if high / low > 30 else (1, 2, 3, 5, 7))
        axes.set_ylim(low, high)
        mark_training_length(axes, trained)
        mark_out_of_range(axes, panel_rows, 1)

    return draw_panels(figure_data, look, frame, means, dress, (length_label(trained), "perplexity"), trained=trained)


def _draw_single_length(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a labelled row per configuration, lowest mean on top: the mean with its bar, and single runs as dots.

    The labels of configurations with a highlighted cell of `look` are bold.
    """
    frame, options = figure_data.frame, figure_data.draw_options
    rows = frame.drop_duplicates("configuration").sort_values("mean", kind="stable", ignore_index=True)
    figure = drawing.page(ROW_HEIGHT * len(rows) + 0.6, 5.2)
    (axes,) = drawing.panels(figure, [""])
    for y, row in enumerate(rows.to_dict("records")):
        runs = frame[frame["configuration"] == row["configuration"]]
        if len(runs) > 1:
            dots: dict[str, Any] = {"markersize": 2.4, "alpha": 0.5, "color": drawing.INK, "markeredgewidth": 0}
            drawing.points(axes, runs["value"], [y] * len(runs), **dots)
        if row["seeds_low"] == row["seeds_low"]:
            axes.hlines(y, row["seeds_low"], row["seeds_high"], color=drawing.INK, linewidth=drawing.line_width(1.3))
        drawing.points(axes, row["mean"], y, color=drawing.INK, markersize=4.6, zorder=3)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    drawing.put_ticks(axes.yaxis, {float(y): options["rows"][cell] for y, cell in enumerate(rows["cell"])})
    for label, cell in zip(axes.get_yticklabels(), rows["cell"], strict=True):
        mates = set(frame[frame["configuration"] == frame.loc[frame["cell"] == cell, "configuration"].iloc[0]]["cell"])
        label.set_fontweight("bold" if mates & set(look.highlight) else "normal")
    drawing.rows_alone(axes)
    if needs_log_axis(frame):
        axes.set_xscale("log")
        drawing.log_ticks(axes.xaxis, 6)
    else:
        axes.locator_params(axis="x", nbins=drawing.ticks_that_fit(axes))
    axes.margins(x=0.06)
    length, trained = int(frame["length"].iloc[0]), options["trained"]
    axes.set_xlabel(
        f"perplexity at {format_length(length)} tokens{' (training length)' if length == trained else ''}\n← better"
    )
    return drawing.finished(figure, figure_data.title, figure_data.notes, {})
