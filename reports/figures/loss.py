"""The figure `loss`: training loss over tokens and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ...results.store.store import Store
from ..data import ReportError, gather
from . import style
from .base import GROUP, Collected, collected, groups_of, line_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .look import Look

CURVE = ("step", "tokens", "wall_s", "train_loss")
MOST_POINTS = 80_000
"""Points of all training curves of a figure together; with more, each is thinned and the figure says so."""
FEWEST_POINTS = 40  # that a curve keeps however many cells there are: it is smoothed over a 40th anyway
SMOOTHED = 40  # points of a curve that a running mean leaves apart
MANY = 12  # curves in one picture, from which on they are thin
MARKED = 25  # curves of one look that carry markers


def collect(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Collected:
    """Training loss (nats per token) against tokens and training seconds.

    One row a point of the curve of each cell's newest training: cell, attempt, panel, first, second, line, step, tokens,
    wall_s, train_loss, smoothed (running mean over a 40th of the points). Of a sweep with more than MOST_POINTS points in
    all, every k-th point of a curve, smoothed over all of them, so that neither time nor memory grows with its length.
    """
    data = gather(store, sweep, revision=revision)
    newest = {}
    for cell in data.cells:
        attempt = cell.trained_attempt_id or (cell.attempt_id if cell.kind == "train" else None)
        if attempt is not None:
            newest[attempt] = cell
    most = max(FEWEST_POINTS, MOST_POINTS // max(1, len(newest)))
    parts: list[np.ndarray] = []
    shown: list[int] = []
    longest, widest = 0, 1
    with store.snapshot() as seen:
        for attempt, points in seen.curve_arrays(newest, CURVE, having=["train_loss"]):
            width = max(1, len(points) // SMOOTHED)
            longest, widest = max(longest, len(points)), max(widest, width)
            kept_here = kept(len(points), most)
            parts.append(np.column_stack([points[kept_here], smoothed(points[:, 3], width)[kept_here]]))
            shown.append(attempt)
    if not parts:
        raise ReportError(f"no training curve of sweep {data.sweep} is stored")
    frame = _curve_frame(parts, [newest[attempt].cell_id for attempt in shown], shown, groups_of(data))
    words = f"One line a cell. Smoothing: {f'running mean over {widest} points' if widest > 1 else 'none'}."
    notes = [words, *([f"Drawn: at most {most} of up to {longest:,} points a line."] if longest > most else [])]
    axes = line_axes(data)
    origins = zip(frame["cell"].drop_duplicates(), shown, strict=True)
    return collected(store, data, "loss", "Training loss", frame, origins, notes=notes, axis=axes[0] if axes else "")


def kept(points: int, most: int) -> np.ndarray:
    """Which of so many points are drawn, at most `most`: the first, and from the last on back every k-th."""
    if points <= most:
        return np.arange(points)
    every = -(-(points - 1) // (most - 1))
    return np.concatenate([[0], np.arange((points - 1) % every or every, points, every)])


def smoothed(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Running mean over `width` neighbours, centred, over fewer at the ends; a width of 1 changes nothing."""
    return pd.Series(values, dtype=float).rolling(width, center=True, min_periods=1).mean().to_numpy()


def _curve_frame(
    parts: Sequence[np.ndarray], cells: Sequence[str], attempts: Sequence[int], groups: dict[str, dict[str, str]]
) -> pd.DataFrame:
    """Points of CURVE and `smoothed`, a part an attempt, as one frame that says whose each is."""
    counts = [len(part) for part in parts]
    columns: dict[str, Any] = {
        "cell": np.repeat(np.array(cells, dtype=object), counts),
        "attempt": np.repeat(attempts, counts),
    }
    for name in GROUP:
        columns[name] = np.repeat(np.array([groups[cell][name] for cell in cells], dtype=object), counts)
    numbers = np.concatenate(parts)
    for place, name in enumerate((*CURVE, "smoothed")):
        columns[name] = numbers[:, place].astype(np.int64) if name in ("step", "tokens") else numbers[:, place]
    return pd.DataFrame(columns)


def draw(made: Collected, look: Look) -> Figure:
    """Two panels, against tokens and against training time; colour is the mixer, dashes the first further axis."""
    frame = made.frame
    figure = style.page(2.7)
    unit, size = style.time_unit(float(frame["wall_s"].max()))
    draw = _many_curves if frame["cell"].nunique() > MANY else _few_curves
    handles: dict[str, Any] = {}
    for axes, (column, scale) in zip(
        style.panels(figure, ["", ""], columns=2, sharey=True), (("tokens", 1e6), ("wall_s", size)), strict=True
    ):
        for (kind, first), handle in draw(axes, frame, column, scale).items():
            handles.setdefault(f"{kind}, {made.about['axis']} {first}" if first else kind, handle)
        axes.set_xlabel("tokens, millions" if column == "tokens" else f"training time, {unit}")
    figure.axes[0].set_ylabel("training loss, nats per token")
    return style.finished(figure, made.title, made.notes, handles)


def _curve_looks(frame: pd.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """By mixer and level of the first further axis: how its curves are drawn."""
    found = list(frame[["panel", "first"]].drop_duplicates().itertuples(index=False, name=None))
    types = list(dict.fromkeys(kind for kind, _ in found))
    firsts = sorted(dict.fromkeys(first for _, first in found), key=style.off_first)
    return {(kind, first): style.look(types.index(kind), firsts.index(first)) for kind, first in found}


def _few_curves(axes: Axes, frame: pd.DataFrame, column: str, scale: float) -> dict[tuple[str, str], Any]:
    """Every curve as a line of its own; a handle by mixer and first axis."""
    looks = _curve_looks(frame)
    types = list(dict.fromkeys(kind for kind, _ in looks))
    handles: dict[tuple[str, str], Any] = {}
    for _, cell in frame.groupby("cell", sort=False):
        kind, first = cell["panel"].iloc[0], cell["first"].iloc[0]
        every = (types.index(kind), max(1, len(cell) // 6))
        how = looks[kind, first] | {"markevery": every, "linewidth": 1.0}
        (line,) = axes.plot(cell[column] / scale, cell["smoothed"], **how)
        handles.setdefault((kind, first), line)
    return handles


def _many_curves(axes: Axes, frame: pd.DataFrame, column: str, scale: float) -> dict[tuple[str, str], Any]:
    """Curves that look alike drawn together, which takes a hundredth of the time; a handle by mixer and first axis."""
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    looks = _curve_looks(frame)
    types = list(dict.fromkeys(kind for kind, _ in looks))
    points = np.column_stack([frame[column].to_numpy() / scale, frame["smoothed"].to_numpy()])
    begins = np.flatnonzero(~frame["cell"].duplicated().to_numpy())
    curves: dict[tuple[str, str], list[Any]] = {}
    for begin, curve in zip(begins, np.split(points, begins[1:]), strict=True):
        curves.setdefault((frame["panel"].iloc[begin], frame["first"].iloc[begin]), []).append(curve)
    handles: dict[tuple[str, str], Any] = {}
    for (kind, first), how in looks.items():
        thin = {"linewidth": 0.6, "alpha": 0.6}
        alike = curves[kind, first]
        lines = LineCollection(alike, colors=how["color"], linestyles=[how["linestyle"]], linewidths=0.6, alpha=0.6)
        axes.add_collection(lines, autolim=True)
        marked = np.concatenate(
            [curve[types.index(kind) :: max(1, len(curve) // 6)] for curve in alike[:: _share(alike)]]
        )
        axes.plot(marked[:, 0], marked[:, 1], **(how | thin | {"linestyle": "none", "markersize": 2.5}))
        handles[kind, first] = Line2D([], [], **(how | thin | {"markersize": 2.5}))
    axes.autoscale_view()
    return handles


def _share(alike: Sequence[Any]) -> int:
    """Which of so many curves carry markers: each, or every k-th where the markers would hide the lines."""
    return max(1, len(alike) // MARKED)
