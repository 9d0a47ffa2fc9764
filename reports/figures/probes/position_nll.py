"""The figure `position-nll`: loss by place in the document."""

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
    bar_note,
    configuration_of,
    in_grid_order,
    line_means,
    only,
    t_half_width,
)
from ..canvas.line_drawing import mark_out_of_range, mark_training_length, robust_range
from .item_frames import longest, places
from .panels import draw_panels, leaving, side_by_side

PROBE, METRIC = "position_nll", "nats"
TOGETHER = 8
"""Points of an octave: runs of tokens are drawn one by one where there are fewer, as means of their tokens where there are more."""
BAND = "95% t intervals over the documents of a line of one cell, which are the same for all lines"


def collect(store: Store, data: SweepData) -> FigureData:
    """Loss (nats per token) by place in the document, of each cell at the longest context length that it is measured at.

    One row a cell and place: cell, attempt, configuration, panel, first, second, line, probe, metric, length (the middle of
    the place, in tokens from the start), start, stop, trained, value, n (documents), low and high (95% t interval over them).
    """
    trained = training_lengths(store, data)
    frame = _frame(store, data, trained)
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has losses by position; evaluate with --probe {PROBE}")
    frame, axes = side_by_side(data, frame)
    means = whole_lines(frame)
    notes = [
        f"{averaging_note(data)}{bar_note(means, 'Band', BAND)}Full attention, one reading of each document; beyond {TOGETHER} points an octave a point is the "
        "mean over the runs of tokens about it."
    ]
    notes += leaving(frame, limits(frame, means)[1])
    return collected(
        store, data, "position-nll", "Loss by place in the document", frame, frame_origins(frame), notes=notes,
        trained=only(list(frame["trained"])), axes=axes, names=cell_labels(data, without=("attn_type", *axes)),
    )  # fmt: skip


def _frame(store: Store, data: SweepData, trained: dict[str, int]) -> pd.DataFrame:
    """The rows of `collect` without what they are drawn as."""
    ends = longest(data, PROBE, METRIC)
    parts = []
    for length in sorted(set(ends.values())):
        found = places(store, data, (PROBE, METRIC, length))
        found = found[found["cell"].map(ends) == length]
        sizes = {cell: data.values.get((cell, PROBE, "bin", length)) for cell in set(found["cell"])}
        known = {cell: int(one.value) for cell, one in sizes.items() if one is not None and one.value}
        found = found[found["cell"].isin(list(known))]
        size = found["cell"].map(known)
        start = found["position"] * size
        stop = np.minimum(start + size, length)
        point = np.floor(TOGETHER * np.log2(found["position"] + 1)).astype(int)
        parts.append(found.assign(start=start, stop=stop, point=point, end=length))
    if not parts:
        return pd.DataFrame()
    frame = _over_documents(pd.concat(parts, ignore_index=True))
    middle, rows = (frame["start"] + frame["stop"]) / 2, [trained.get(cell, 0) for cell in frame["cell"]]
    frame = frame.assign(configuration=frame["cell"].map(configuration_of(data)), probe=PROBE, metric=METRIC)
    return in_grid_order(frame.assign(length=middle, trained=rows), data, "start")


def _over_documents(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a cell and point: the mean over its tokens in each document, and over documents with their interval."""
    tokens = frame["stop"] - frame["start"]
    weighted = frame.assign(tokens=tokens, sum=tokens * frame["value"])
    each = weighted.groupby(["cell", "attempt", "point", "item"], sort=False).agg(
        start=("start", "min"), stop=("stop", "max"), tokens=("tokens", "sum"), sum=("sum", "sum")
    )
    each = each.assign(value=each["sum"] / each["tokens"]).reset_index()
    found = each.groupby(["cell", "attempt", "point"], sort=False).agg(
        start=("start", "min"), stop=("stop", "max"), value=("value", "mean"), sd=("value", "std"), n=("item", "size")
    )
    found = found.reset_index()
    half = t_half_width(found["n"], found["sd"])
    return found.assign(low=found["value"] - half, high=found["value"] + half).drop(columns=["point", "sd"])


def whole_lines(frame: pd.DataFrame) -> pd.DataFrame:
    """The means of `line_means` where all cells of their line have a number: a line ends where the first of them does."""
    means = line_means(frame)
    return means[means["cells"] == means["of"]]


def limits(frame: pd.DataFrame, means: pd.DataFrame) -> tuple[float, float]:
    """The vertical range: outliers among the cells do not flatten the rest."""
    return robust_range(list(frame["value"]), list(means["value"]))


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """All lines in one panel, or a panel a mixer; the training length marked."""
    frame, trained = made.frame, made.about["trained"] or None
    means = whole_lines(frame)

    def dress(axes: Axes, here: pd.DataFrame, last: bool) -> None:
        drawing.length_axis(axes, _ticks(frame), trained, room=0.1)
        axes.set_xlim(float(frame["length"].min()) / 2**0.25, float(frame["stop"].max()) * 2**0.25)
        axes.set_ylim(*limits(frame, means))
        mark_training_length(axes, trained, word=last)
        mark_out_of_range(axes, here, 1)

    words = "place in the document, tokens" + (", × training length" if trained else "")
    return draw_panels(made, look, frame, means, dress, (words, "loss, nats per token"), banded=True)


def _ticks(frame: pd.DataFrame) -> list[int]:
    """Halvings of the longest document down to the first place."""
    end, first = int(frame["stop"].max()), float(frame["length"].min())
    return [end // 2**power for power in range(int(math.log2(end / max(1.0, first))) + 1)]
