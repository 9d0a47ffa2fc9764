"""The figure `state-norm`: size of the memory's state over context length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from ...results.store.store import Store
from ..data import Lengths, ReportError, gather
from . import style
from .base import Collected, collected, origins_in, training_lengths
from .lines import count_fewer, length_label, only, over_lengths, uneven

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .look import Look

NORMS = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")
NORM_WORDS = {
    "delta_norm": "delta rule (the trained memory)",
    "hebbian_norm": "Hebbian writes",
    "delta_norm_kept": "delta rule, γ = 1",
    "hebbian_norm_kept": "Hebbian writes, γ = 1",
}


def collect(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Norm of the memory's state over context lengths; the frame is that of `over_lengths`, metrics of NORMS in turn."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    trained = training_lengths(store, data)
    parts = [over_lengths(data, trained, "state_norm", metric) for metric in NORMS]
    known = [part for part in parts if not part.empty]
    if not known:
        raise ReportError(
            f"no cell of sweep {data.sweep} has norms of its memory's state; evaluate cells with memory: --probe state_norm"
        )
    frame = pd.concat(known, ignore_index=True)
    words = (
        "Mean Frobenius norm over documents, layers, heads and cells. Delta: the trained memory. Hebbian: its keys, values and "
        "gates, written without erasing. γ = 1: nothing decays."
    )
    about = {"trained": only(list(frame["trained"]))}
    return collected(
        store,
        data,
        "state-norm",
        "State of the memory over context length",
        frame,
        origins_in(frame),
        notes=[words, *uneven(norm_means(frame))],
        **about,
    )


def norm_means(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a panel, metric and length of the state norms: value (mean over cells), cells, of (cells at any length)."""
    whole = frame.groupby(["panel", "metric"])["cell"].nunique().to_dict()
    means = frame.groupby(["panel", "metric", "length"], sort=False).agg(
        value=("value", "mean"), cells=("cell", "size")
    )
    means = means.reset_index()
    return means.assign(of=[int(whole[key]) for key in zip(means["panel"], means["metric"], strict=True)])


def draw(made: Collected, look: Look) -> Figure:
    """A panel a mixer; delta and Hebbian writes, with the trained retention and with none; both axes in logs."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    frame, trained = made.frame, made.about["trained"]
    means = norm_means(frame)
    names = list(dict.fromkeys(frame["panel"]))
    figure = style.page(2.4 * style.rows_of(len(names)) + 0.35, style.width_of(len(names)))
    handles: dict[str, Any] = {}
    for axes, name in zip(style.panels(figure, names, sharex=True, sharey=True), names, strict=True):
        here = frame[frame["panel"] == name]
        for place, metric in enumerate(NORMS):
            part = here[here["metric"] == metric]
            how = style.look(place % 2, place // 2)
            for _, cell in part.groupby("cell", sort=False):
                if part["cell"].nunique() > 1:
                    axes.plot(
                        cell["length"],
                        cell["value"],
                        color=how["color"],
                        linestyle=how["linestyle"],
                        linewidth=0.5,
                        alpha=0.35,
                    )
            mean = means[(means["panel"] == name) & (means["metric"] == metric)].sort_values("length")
            if len(mean):
                (handles[NORM_WORDS[metric]],) = axes.plot(mean["length"], mean["value"], **how)
                count_fewer(axes, mean, how["color"])
        style.length_axis(axes, list(frame["length"]), trained)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    style.outer_labels(figure, length_label(trained), "norm of the state")
    ordered = {word: handles[word] for word in NORM_WORDS.values() if word in handles}
    return style.finished(figure, made.title, made.notes, ordered)
