"""The figure `needle`: needle accuracy over context length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    """Needle accuracy (digits, fraction) over context lengths; the frame is that of `over_lengths`."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    frame = over_lengths(data, training_lengths(store, data), "needle", "digit_accuracy")
    if frame.empty:
        raise ReportError(
            f"no cell of sweep {data.sweep} has needle accuracies; finish it, or evaluate with --probe needle"
        )
    means = lines_of(frame)
    notes = [f"{averaged_over(data)}{bars(means)}Dotted: a guess, 10%.", *uneven(means)]
    trained = only(list(frame["trained"]))
    return collected(
        store,
        data,
        "needle",
        "Needle accuracy over context length",
        frame,
        origins_in(frame),
        notes=notes,
        trained=trained,
    )


def draw(made: Collected, look: Look) -> Figure:
    """A panel a mixer, a line a group of cells."""
    frame, trained = made.frame, made.about["trained"]
    names = list(dict.fromkeys(frame["panel"]))
    figure = style.page(style.PANEL * style.rows_of(len(names)) + 0.35, style.width_of(len(names)))
    means, found = lines_of(frame), looks(frame)
    handles: dict[str, Any] = {}
    for axes, name in zip(style.panels(figure, names, sharex=True, sharey=True), names, strict=True):
        handles |= draw_lines(axes, frame[frame["panel"] == name], means[means["panel"] == name], found, 100)
        axes.axhline(10, color=style.GREY, linestyle=":", linewidth=0.9, zorder=1)
        axes.set_ylim(-4, 104)
        style.length_axis(axes, list(frame["length"]), trained)
    style.outer_labels(figure, length_label(trained), "digits recalled, %")
    return style.finished(figure, made.title, made.notes, {name: handles[name] for name in found if name in handles})
