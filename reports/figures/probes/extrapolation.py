"""The figure `extrapolation`: perplexity of one text in windows of every length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...data import Lengths, ReportError, gather
from .. import style
from ..base import Collected, collected, names_of, origins_in, training_lengths
from ..curves import draw_lines, looks, mark_beyond, mark_trained, robust_range
from ..lines import averaged_over, bars, length_label, lines_of, only, over_lengths, uneven
from .panels import side_by_side

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..look import Look

PROBE, METRIC = "extrapolation", "perplexity"
WIDE = 3.0
"""Ratio of the highest and the lowest perplexity from which on the axis is logarithmic."""


def collect(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Perplexity over context lengths; the frame is that of `over_lengths`."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    frame = over_lengths(data, training_lengths(store, data), PROBE, METRIC)
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has perplexities of windows; evaluate with --probe {PROBE}")
    frame, axes = side_by_side(data, frame)
    means = lines_of(frame)
    notes = [
        f"{averaged_over(data)}{bars(means)}The same targets at every length, in windows side by side, each read from zero state.",
        *uneven(means),
    ]
    leaving = int((frame.groupby("cell")["value"].max() > limits(frame, means)[1]).sum())
    if leaving:
        notes.append(f"Lines that leave the axes ({leaving}): an arrow says what they reach.")
    return collected(
        store, data, "extrapolation", "Perplexity over the length of a window", frame, origins_in(frame), notes=notes,
        trained=only(list(frame["trained"])), axes=axes, names=names_of(data, without=("attn_type", *axes)),
    )  # fmt: skip


def wide(frame: pd.DataFrame) -> bool:
    """Whether the perplexities need a logarithmic axis."""
    return bool(frame["value"].max() > WIDE * frame["value"].min())


def limits(frame: pd.DataFrame, means: pd.DataFrame) -> tuple[float, float]:
    """The vertical range: outliers among the cells do not flatten the rest."""
    values, kept = list(frame["value"]), list(means["value"])
    if not wide(frame):
        return robust_range(values, kept)
    low, high = robust_range(list(np.log(values)), list(np.log(kept)))
    return float(np.exp(low)), float(np.exp(high))


def draw(made: Collected, look: Look) -> Figure:
    """All lines in one panel, or a panel a mixer; the training length marked."""
    frame, trained = made.frame, made.about["trained"]
    names = list(dict.fromkeys(frame["panel"]))
    one = len(names) == 1
    figure = style.page(
        (2.6 if one else style.PANEL * style.rows_of(len(names))) + 0.35, 4.8 if one else style.width_of(len(names))
    )
    group = style.panels(figure, [style.shown(name) if name else "" for name in names], sharex=True, sharey=True)
    means, found = lines_of(frame), looks(frame, made.about["axes"])
    named = {cell: made.about["names"].get(cell, "") or "this cell" for cell in look.highlight}
    handles: dict[str, Any] = {}
    for place, (axes, name) in enumerate(zip(group, names, strict=True)):
        here, mean = (some[some["panel"] == name] for some in (frame, means))
        handles |= draw_lines(axes, here, mean, found, 1, named=named)
        style.length_axis(axes, list(frame["length"]), trained, room=0.5)
        low, high = limits(frame, means)
        if wide(frame):
            _logarithmic(axes, high / low)
        axes.set_ylim(low, high)
        mark_trained(axes, trained, word=place == len(group) - 1)
        mark_beyond(axes, here, 1)
    style.outer_labels(figure, length_label(trained), "perplexity")
    words = [one["label"] for one in found.values()]
    return style.finished(figure, made.title, made.notes, {word: handles[word] for word in words if word in handles})


def _logarithmic(axes: Axes, ratio: float) -> None:
    """Logs, with more ticks where the ends are less than a factor of thirty apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if ratio > 30 else (1, 2, 3, 5, 7), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
