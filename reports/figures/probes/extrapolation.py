"""Figure `extrapolation`: perplexity of one text in windows of every length."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import (
    Axes,
    Figure,
    FigureData,
    FigureOptions,
    cell_labels,
    collected,
    frame_origins,
    training_lengths,
)
from ..canvas.length_frames import (
    averaging_note,
    band_note,
    fewer_cells_note,
    length_frame,
    length_label,
    line_means,
    single_value,
)
from ..canvas.line_drawing import mark_out_of_range, mark_training_length, robust_range
from .panels import assign_panels, draw_panels, out_of_range_note

PROBE, METRIC = "extrapolation", "perplexity"
LOG_AXIS_RATIO = 3.0
"""Ratio of the highest to the lowest perplexity from which on the axis is logarithmic."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the perplexity over context lengths, in windows side by side.

    One row per cell and length: cell, attempt, configuration (levels of every axis, which seeds share), panel (mixer),
    first, second and line (levels of up to two axes that vary), probe, metric, length (tokens), trained (tokens of a
    training row), ratio of the two, value, n, low and high (95% interval of the trials, else NaN). Few lines share one
    panel with an empty name, and the mixer is then `first` (`assign_panels`).

    Raises:
        ReportError: No cell has perplexities.
    """
    frame = length_frame(data, training_lengths(store, data), PROBE, METRIC)
    if frame.empty:
        raise ReportError(
            f"no cell of sweep {data.sweep} has perplexities by window length; evaluate with --probe {PROBE}"
        )
    frame, axes = assign_panels(data, frame)
    means = line_means(frame)
    notes = [
        f"{averaging_note(data, means=means)}{band_note(means)}The same targets at every length, in adjacent windows that "
        "each start from a zero state.",
        *fewer_cells_note(means),
    ]
    notes += out_of_range_note(frame, y_limits(frame, means)[1])
    return collected(
        store, data, "extrapolation", "Perplexity by window length", frame, frame_origins(frame), notes=notes,
        trained=single_value(list(frame["trained"])), axes=axes, names=cell_labels(data, without=("attn_type", *axes)),
    )  # fmt: skip


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
    """Draw all lines in one panel, or a panel per mixer. The training length is marked.

    Cells are thin lines, means thick ones; highlighted cells of `look` are labelled. Values above the limits are
    arrows.
    """
    frame, trained = figure_data.frame, figure_data.draw_options["trained"]
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
