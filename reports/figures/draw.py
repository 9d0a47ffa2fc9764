"""Frame -> matplotlib figure, for the figures over context lengths, tokens and time. Called inside `style.settings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from . import style
from .base import Collected
from .collect import MOST_COUNT, NORMS, lines_of, norm_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 12  # curves in one picture, from which on they are thin
MARKED = 25  # curves of one look that carry markers
PANEL = 2.0  # inches of height that a row of panels gets
ENDS = {
    "done": "#56B4E9",
    "running": "#ffffff",
    "interrupted": "#b8b8b8",
    "failed": "#D55E00",
    "diverged": "#000000",
}
"""By state: how an attempt's bar is filled."""
NORM_WORDS = {
    "delta_norm": "delta rule (the trained memory)",
    "hebbian_norm": "Hebbian writes",
    "delta_norm_kept": "delta rule, γ = 1",
    "hebbian_norm_kept": "Hebbian writes, γ = 1",
}


def looks(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """By line, in the frame's order: how it is drawn."""
    firsts = list(dict.fromkeys(frame["first"]))
    seconds = list(dict.fromkeys(frame["second"]))
    lines = frame.drop_duplicates("line")
    # levels in an order of their own, so that "off" looks alike in every figure
    firsts, seconds = sorted(firsts, key=_off_first), sorted(seconds, key=_off_first)
    return {
        str(row["line"]): style.look(firsts.index(row["first"]), seconds.index(row["second"]))
        for _, row in sorted(
            lines.iterrows(), key=lambda pair: (firsts.index(pair[1]["first"]), seconds.index(pair[1]["second"]))
        )
    }


def _off_first(level: str) -> int:
    return 0 if level == "off" else 1


def _lines(
    axes: Axes, cells: pd.DataFrame, means: pd.DataFrame, found: dict[str, dict[str, Any]], scale: float
) -> dict[str, Any]:
    """Draws the cells thin and the means of their lines thick; returns a handle by line."""
    handles: dict[str, Any] = {}
    for name, how in found.items():
        line = means[means["line"] == name].sort_values("length")
        if line.empty:
            continue
        if (line["cells"] > 1).any():
            for _, cell in cells[cells["line"] == name].groupby("cell", sort=False):
                one = cell.sort_values("length")
                axes.plot(
                    one["length"],
                    scale * one["value"],
                    color=how["color"],
                    linestyle=how["linestyle"],
                    linewidth=0.5,
                    alpha=0.3,
                )
        (handles[name],) = axes.plot(line["length"], scale * line["value"], zorder=3, **how)
        _count_fewer(axes, line, how["color"], scale)
        if line["low"].notna().any():
            below, above = line["value"] - line["low"], line["high"] - line["value"]
            axes.errorbar(
                line["length"], scale * line["value"], yerr=[scale * below.clip(0), scale * above.clip(0)],
                fmt="none", ecolor=how["color"], elinewidth=0.8, capsize=1.8, capthick=0.8, zorder=2,
            )  # fmt: skip
    return handles


def _count_fewer(axes: Axes, means: pd.DataFrame, ink: str, scale: float = 1) -> None:
    """Writes n beside every mean that is over fewer cells than its line has elsewhere."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=1.5, foreground="white")]
    for _, one in means[means["cells"] < means["of"]].iterrows():
        axes.annotate(
            f"n={int(one['cells'])}", (one["length"], scale * one["value"]), xytext=(0, 5), textcoords="offset points",
            ha="center", fontsize=6, color=ink, zorder=4, path_effects=halo,
        )  # fmt: skip


def _length_label(trained: int | None) -> str:
    return "context length, tokens" + (" and multiples of the training length" if trained else "")


def needle(made: Collected) -> Figure:
    """A panel a mixer, a line a group of cells."""
    frame, trained = made.frame, made.about["trained"]
    names = list(dict.fromkeys(frame["panel"]))
    figure = style.page(PANEL * style.rows_of(len(names)) + 0.35, style.width_of(len(names)))
    means, found = lines_of(frame), looks(frame)
    handles: dict[str, Any] = {}
    for axes, name in zip(style.panels(figure, names, sharex=True, sharey=True), names, strict=True):
        handles |= _lines(axes, frame[frame["panel"] == name], means[means["panel"] == name], found, 100)
        axes.axhline(10, color=style.GREY, linestyle=":", linewidth=0.9, zorder=1)
        axes.set_ylim(-4, 104)
        style.length_axis(axes, list(frame["length"]), trained)
    style.outer_labels(figure, _length_label(trained), "digits recalled, %")
    return style.finished(figure, made.title, made.notes, {name: handles[name] for name in found if name in handles})


def losses(made: Collected) -> Figure:
    """A row for clean and one for junk, a panel a mixer, a line a group of cells."""
    frame, trained = made.frame, made.about["trained"]
    names, probes = list(dict.fromkeys(frame["panel"])), list(dict.fromkeys(frame["probe"]))
    columns = min(3, len(names))
    blocks = [names[start : start + columns] for start in range(0, len(names), columns)]
    figure = style.page(PANEL * len(probes) * len(blocks) + 0.35, style.width_of(len(names)))
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
                handles |= _lines(axes, here, mean, found, 1)
                axes.set_title(f"{name}, {probe}")
                style.length_axis(axes, list(frame["length"]), trained)
                shown.setdefault(probe, []).append(axes)
    for alike in shown.values():
        style.same_height(alike)
    style.outer_labels(figure, _length_label(trained), "loss, nats per token")
    return style.finished(figure, made.title, made.notes, {name: handles[name] for name in found if name in handles})


def count_map(made: Collected) -> Figure:
    """mag over ln(1 + m), one curve a slope."""
    from math import log1p

    import numpy as np
    from matplotlib.patches import Patch

    frame = made.frame
    figure = style.page(3.1, 5.4)
    (axes,) = style.panels(figure, [""])
    handles: dict[str, Any] = {}
    init = frame[frame["source"] == "init"]
    x = np.log1p(init["m"].to_numpy(dtype=float))
    learned = [curve for name, curve in frame.groupby("source", sort=False) if name != "init"]
    if learned:
        slopes = [(curve["lowest"].iloc[0], curve["highest"].iloc[0]) for curve in learned]
        low, high = min(low for low, _ in slopes), max(high for _, high in slopes)
        axes.fill_between(x, np.tanh(low * x), np.tanh(high * x), color="#dfe9f2", linewidth=0, zorder=1)
        handles[f"learned, single heads: β {low:.3f} to {high:.3f}"] = Patch(facecolor="#dfe9f2", edgecolor=style.GREY)
    (handles[f"at the start: β {init['beta'].iloc[0]:.3f}"],) = axes.plot(x, init["mag"], color="#000000", zorder=4)
    for place, curve in enumerate(learned):
        how = style.look(place) | {"linestyle": style.DASHES[1 + place % 3], "markevery": 12 + place % 5}
        if len(learned) > len(style.INKS):
            how = {"color": style.INKS[0], "linewidth": 0.7, "alpha": 0.6}
        (line,) = axes.plot(np.log1p(curve["m"]), curve["mag"], zorder=3, **how)
        several = len(learned) > len(style.INKS)
        handles[
            f"learned, {len(learned)} cells" if several else f"{curve['source'].iloc[0]}: β {curve['beta'].iloc[0]:.3f}"
        ] = line
    shown = [0, 1, 3, 10, 30, 100, 300, MOST_COUNT]
    axes.set_xticks([log1p(m) for m in shown], [str(m) for m in shown])
    axes.set_xlim(0, log1p(MOST_COUNT))
    axes.set_ylim(0, 1)
    axes.set_xlabel("m, keys that share the weight alike (drawn as ln(1 + m))")
    axes.set_ylabel("mag")
    return style.finished(figure, made.title, made.notes, handles, columns=2)


def state_norm(made: Collected) -> Figure:
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
                _count_fewer(axes, mean, how["color"])
        style.length_axis(axes, list(frame["length"]), trained)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    style.outer_labels(figure, _length_label(trained), "norm of the state")
    ordered = {word: handles[word] for word in NORM_WORDS.values() if word in handles}
    return style.finished(figure, made.title, made.notes, ordered)


def loss(made: Collected) -> Figure:
    """Two panels, against tokens and against training time; colour is the mixer, dashes the first further axis."""
    frame = made.frame
    figure = style.page(2.7)
    unit, size = _time_unit(float(frame["wall_s"].max()))
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
    firsts = sorted(dict.fromkeys(first for _, first in found), key=_off_first)
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
    import numpy as np
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


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return unit, size
    return "seconds", 1.0


def timeline(made: Collected) -> Figure:
    """A lane for each attempt that runs at once on a machine, a bar an attempt."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    frame = made.frame
    unit, size = _time_unit(float(frame["end"].max()))
    machines = frame.groupby(["host", "gpu"], sort=False)["lane"].max() + 1
    first_lane = dict(zip(machines.index, machines.cumsum() - machines, strict=True))
    total = int(machines.sum())
    figure = style.page(min(8.0, 0.32 * max(total, 2 * len(machines))) + 0.55)
    (axes,) = style.panels(figure, [""])
    wide = float(frame["end"].max()) / size or 1.0
    for _, one in frame.iterrows():
        y = first_lane[one["host"], one["gpu"]] + one["lane"]
        length = max((one["end"] - one["start"]) / size, wide / 400)
        axes.barh(
            y, length, left=one["start"] / size, height=0.74, facecolor=ENDS[one["state"]], edgecolor="#000000", linewidth=0.5,
            hatch=_hatch(one["state"]), alpha=1.0,
        )  # fmt: skip
        if one["state"] in ("failed", "diverged"):
            axes.plot(
                one["start"] / size + length,
                y,
                marker="X",
                color="#000000",
                markeredgecolor="#ffffff",
                markersize=7,
                zorder=5,
            )
    words = [" ".join(filter(None, (host, f"({gpu})" if gpu else ""))) for host, gpu in machines.index]
    centres = [first_lane[key] + (count - 1) / 2 for key, count in machines.items()]
    axes.set_yticks(centres, [style.shortened(word, 34) for word in words])
    for start in list(first_lane.values())[1:]:
        axes.axhline(start - 0.5, color=style.GREY, linewidth=0.6)
    axes.set_ylim(total - 0.4, -0.6)
    axes.set_xlim(-0.01 * wide, 1.03 * wide)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{unit} since the first start")
    handles: dict[str, Any] = {
        state: Patch(facecolor=ENDS[state], edgecolor="#000000", linewidth=0.5, hatch=_hatch(state))
        for state in ENDS
        if (frame["state"] == state).any()
    }
    counts = frame["state"].value_counts()
    named = {f"{state} ({counts[state]})": handle for state, handle in handles.items()}
    if frame["state"].isin(["failed", "diverged"]).any():
        named["failed or diverged here"] = Line2D([], [], linestyle="none", marker="X", color="#000000", markersize=7)
    return style.finished(figure, made.title, made.notes, named)


def _hatch(state: str) -> str:
    return style.HATCHES[list(ENDS).index(state)] if state != "diverged" else ""
