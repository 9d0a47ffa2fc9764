"""The figure `length`: clean and junk loss over context length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from ...results.store.store import Store
from ..data import Lengths, ReportError, gather
from . import style
from .base import Collected, collected, origins_in, training_lengths
from .lines import averaged_over, bars, draw_lines, length_label, lines_of, looks, only, over_lengths, uneven

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .look import Look


def collect(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Clean and junk loss (nats per token) over context lengths; the frame is that of `over_lengths`, probes in turn."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    trained = training_lengths(store, data)
    parts = [over_lengths(data, trained, probe, "nats") for probe in ("clean", "junk")]
    known = [part for part in parts if not part.empty]
    if not known:
        raise ReportError(
            f"no cell of sweep {data.sweep} has losses over lengths; finish it, or evaluate with --probe clean --probe junk"
        )
    frame = pd.concat(known, ignore_index=True)
    means = lines_of(frame)
    words = f"{averaged_over(data)}{bars(means)}Clean: whole documents. Junk: the validation stream across document borders."
    trained_at = only(list(frame["trained"]))
    notes = [words, *uneven(means)]
    return collected(
        store, data, "length", "Loss over context length", frame, origins_in(frame), notes=notes, trained=trained_at
    )


def draw(made: Collected, look: Look) -> Figure:
    """A row for clean and one for junk, a panel a mixer, a line a group of cells."""
    frame, trained = made.frame, made.about["trained"]
    names, probes = list(dict.fromkeys(frame["panel"])), list(dict.fromkeys(frame["probe"]))
    columns = min(3, len(names))
    blocks = [names[start : start + columns] for start in range(0, len(names), columns)]
    figure = style.page(style.PANEL * len(probes) * len(blocks) + 0.35, style.width_of(len(names)))
    grid = figure.subplots(len(probes) * len(blocks), columns, squeeze=False, sharex=True)
    means, found = lines_of(frame), looks(frame)
    handles: dict[str, Any] = {}
    shown: dict[str, list[Any]] = {}
    for b, block in enumerate(blocks):
        for p, probe in enumerate(probes):
            row = grid[b * len(probes) + p]
            for axes in row[len(block) :]:
                axes.set_axis_off()
            for axes, name in zip(row, block, strict=False):
                here, mean = (some[(some["panel"] == name) & (some["probe"] == probe)] for some in (frame, means))
                handles |= draw_lines(axes, here, mean, found, 1)
                axes.set_title(f"{name}, {probe}")
                style.length_axis(axes, list(frame["length"]), trained)
                shown.setdefault(probe, []).append(axes)
    for alike in shown.values():
        style.same_height(alike)
    style.outer_labels(figure, length_label(trained), "loss, nats per token")
    return style.finished(figure, made.title, made.notes, {name: handles[name] for name in found if name in handles})
