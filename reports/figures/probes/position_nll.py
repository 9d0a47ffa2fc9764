"""Figure `position-nll`: loss by position in the document."""

from __future__ import annotations

import math

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
    configuration_of,
    has_band,
    in_grid_order,
    line_means,
    single_value,
    t_half_width,
)
from ..canvas.line_drawing import mark_out_of_range, mark_training_length, robust_range
from .item_frames import item_values_frame, longest_lengths
from .panels import assign_panels, draw_panels, out_of_range_note

PROBE, METRIC = "position_nll", "nats"
POINTS_PER_OCTAVE = 8
"""Largest number of points per octave: further runs of tokens are averaged."""
BAND = "95% t intervals across the documents of a single cell (the same for all lines)"


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the loss (nats per token) by position in the document.

    Each cell is shown at its longest measured context length. One row per cell and point: cell, attempt, configuration,
    panel (mixer or memory), first, second, line, probe, metric, length (middle of the point, in tokens from the start), start, stop (its
    tokens), trained (training length; 0 where unknown), value, n (documents), low and high (95 % t interval over them).
    Beyond eight points an octave, neighbouring positions are averaged into one point.

    Raises:
        ReportError: No cell has losses by position.
    """
    trained = training_lengths(store, data)
    frame = position_frame(store, data, trained)
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has losses by position; evaluate with --probe {PROBE}")
    frame, axes = assign_panels(data, frame)
    if axes == ("attn_type", "memory"):
        # bands of four lines would overlap
        memories = [drawing.level_label(memory, "memory") for memory in frame["second"]]
        frame, axes = frame.assign(panel=memories, second="", line=frame["first"]), ("attn_type",)
    means = complete_line_means(frame)
    first = format_count_range(frame[frame["start"] == 0]["stop"])
    notes = [
        f"Loss of the tokens at a position, over documents (n = {format_count_range(frame['n'])}). {averaging_note(data, means=means)}{_band_note(means)}Full attention, a single pass over each "
        f"document. A point averages {first} tokens or an eighth of an octave, whichever is longer, and stands in their middle."
    ]
    notes += out_of_range_note(frame, y_limits(frame, means)[1])
    return collected(
        store, data, "position-nll", "Loss by position in the document", frame, frame_origins(frame), notes=notes,
        trained=single_value(list(frame["trained"])), axes=axes, names=cell_labels(data, without=("attn_type", *axes)),
    )  # fmt: skip


def _band_note(means: pd.DataFrame) -> str:
    """Return the sentences on the bands, and on what they leave out if they are not over documents; "" without any."""
    note = band_note(means, BAND)
    over_cells = bool((has_band(means) & (means["interval"] != "trials")).any())
    return (
        note
        + "They hold point by point, so that chance varies their width, and leave out the spread of documents. "
        * over_cells
    )


def format_count_range(counts: pd.Series) -> str:
    """Return the lowest and highest of integers as text, such as "16" or "8 to 16"."""
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low} to {high}"


def position_frame(store: Store, data: SweepData, trained: dict[str, int], probe: str = PROBE) -> pd.DataFrame:
    """Return the rows of `collect` without panel, first, second and line; empty if no cell has any.

    Cells whose bin size (tokens per stored position) is not stored are left out.

    Args:
        store: The database.
        data: The sweep.
        trained: Training length in tokens by cell id.
        probe: Name of the probe, that of a further text included.
    """
    ends = longest_lengths(data, probe, METRIC)
    parts = []
    for length in sorted(set(ends.values())):
        values = item_values_frame(store, data, (probe, METRIC, length))
        values = values[values["cell"].map(ends) == length]
        sizes = {cell: data.values.get((cell, probe, "bin", length)) for cell in set(values["cell"])}
        bin_sizes = {cell: int(size.value) for cell, size in sizes.items() if size is not None and size.value}
        values = values[values["cell"].isin(list(bin_sizes))]
        size = values["cell"].map(bin_sizes)
        start = values["position"] * size
        stop = np.minimum(start + size, length)
        point = np.floor(POINTS_PER_OCTAVE * np.log2(values["position"] + 1)).astype(int)
        parts.append(values.assign(start=start, stop=stop, point=point, end=length))
    if not parts:
        return pd.DataFrame()
    frame = _over_documents(pd.concat(parts, ignore_index=True))
    middle, rows = (frame["start"] + frame["stop"]) / 2, [trained.get(cell, 0) for cell in frame["cell"]]
    frame = frame.assign(configuration=frame["cell"].map(configuration_of(data)), probe=probe, metric=METRIC)
    return in_grid_order(frame.assign(length=middle, trained=rows), data, "start")


def _over_documents(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per cell and point: the mean over its tokens in each document, then over documents.

    Columns: cell, attempt, start, stop, value, n (documents), low and high (95 % t interval over documents, NaN for
    one).

    Args:
        frame: Rows of items (documents) with cell, attempt, item, point, start, stop and value; may hold several
            positions per point, which are weighted by their tokens.
    """
    tokens = frame["stop"] - frame["start"]
    weighted = frame.assign(tokens=tokens, sum=tokens * frame["value"])
    each = weighted.groupby(["cell", "attempt", "point", "item"], sort=False).agg(
        start=("start", "min"), stop=("stop", "max"), tokens=("tokens", "sum"), sum=("sum", "sum")
    )
    each = each.assign(value=each["sum"] / each["tokens"]).reset_index()
    points = each.groupby(["cell", "attempt", "point"], sort=False).agg(
        start=("start", "min"), stop=("stop", "max"), value=("value", "mean"), sd=("value", "std"), n=("item", "size")
    )
    points = points.reset_index()
    half = t_half_width(points["n"], points["sd"])
    return points.assign(low=points["value"] - half, high=points["value"] + half).drop(columns=["point", "sd"])


def complete_line_means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the `line_means` over all cells of their line: a line ends where the first of its cells does."""
    means = line_means(frame)
    return means[means["cells"] == means["of"]]


def y_limits(frame: pd.DataFrame, means: pd.DataFrame) -> tuple[float, float]:
    """Return the vertical range; outliers among the cells do not flatten the rest."""
    return robust_range(list(frame["value"]), list(means["value"]))


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw all lines in one panel, or a panel per mixer or memory. The training length is marked.

    Intervals are bands. Highlighted cells of `look` are labelled, and values above the limits are arrows.
    """
    frame, trained = figure_data.frame, figure_data.draw_options["trained"] or None
    means = complete_line_means(frame)

    def dress(axes: Axes, panel_rows: pd.DataFrame, last: bool) -> None:
        """Set the scales, limits and marks of a panel.

        Args:
            axes: The panel.
            panel_rows: Rows of its cells.
            last: Whether it is the last panel; no effect.
        """
        drawing.length_axis(axes, _ticks(frame), trained, room=0.1)
        axes.set_xlim(float(frame["length"].min()) / 2**0.25, float(frame["stop"].max()) * 2**0.25)
        axes.set_ylim(*y_limits(frame, means))
        mark_training_length(axes, trained)
        mark_out_of_range(axes, panel_rows, 1)

    x_label = "position in the document (" + ("× training length; tokens)" if trained else "tokens)")
    return draw_panels(figure_data, look, frame, means, dress, (x_label, "loss (nats per token)"), trained=trained)


def _ticks(frame: pd.DataFrame) -> list[int]:
    """Return the positions of ticks in tokens, descending.

    They are the longest document's end and its repeated halves, down to the first position.
    """
    end, first = int(frame["stop"].max()), float(frame["length"].min())
    return [end // 2**power for power in range(int(math.log2(end / max(1.0, first))) + 1)]
