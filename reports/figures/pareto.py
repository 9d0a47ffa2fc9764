"""The figure `pareto`: quality against speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from ...results.store.records import AXES
from ...results.store.store import Store
from ..columns import qualities, speed_of
from ..data import Lengths, ReportError, gather
from ..layout import entry
from ..numbers import rounded
from ..stats.ceiling import ceiling, needle_words
from ..stats.effects import pareto
from . import style
from .base import Collected, collected

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .look import Look

ROOM = 0.035  # of an axis, that stays free beside the outermost points
CONSTANT: dict[str, Any] = {"color": "#000000", "linestyle": (0, (1, 1.2)), "linewidth": 0.9, "zorder": 1.5}
MOST_NAMED = 12  # points of a front that are named in the legend


def collect(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Quality against speed, one row a configuration and quality that has both: quality (heading), speed_name, speed, value,
    front (whether no other is as good in both and better in one), slug (of its first cell), the five AXES, `name`.

    Speed is tokens/s, or MFU (in %) where the sweep has no tokens/s. Values as `interactions`: nats per token, or %.
    """
    data = gather(store, sweep, revision=revision, lengths=lengths)
    speed = speed_of(data, "tokens/s")
    extra = data.extra_axes()
    told = [axis for axis in AXES if axis != "attn_type" and len(data.levels(axis)) > 1]
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    fewer: dict[tuple[str, str], str] = {}
    for quality in qualities(data):
        found = []
        for key, cells in data.configurations().items():
            fast, good = entry(data, cells, speed), entry(data, cells, quality)
            if fast.value is None or good.value is None:
                continue
            levels = dict(zip((*AXES, *extra), key, strict=True))
            words = [levels["attn_type"], *(_word(axis, levels[axis]) for axis in (*told, *extra))]
            about: dict[str, Any] = {"quality": quality.heading, "metric": quality.metric, "speed_name": speed.heading}
            about |= {"speed": fast.value * (100 if speed.percent else 1)}
            about |= {"value": good.value * (100 if quality.percent else 1), "slug": cells[0].slug}
            found.append(about | {axis: levels[axis] for axis in AXES} | {"name": " ".join(filter(None, words))})
            origins += [*fast.origins, *good.origins]
            if min(fast.seeds, good.seeds) < len(cells):
                fewer[quality.heading, found[-1]["name"]] = f"n={min(fast.seeds, good.seeds)}"
        points = [(one["speed"], one["value"]) for one in found]
        fronts = pareto(points, (1, quality.direction))
        rows += [one | {"front": kept} for one, kept in zip(found, fronts, strict=True)]
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has both a speed and a quality; finish it")
    frame = pd.DataFrame(rows)
    words_ = "One point a configuration. Ringed and numbered: on the front, where no other is as good in both and better in one."
    notes = [words_, *(["n=k: a mean over k seeds, fewer than the configuration has."] if fewer else [])]
    shown = {quality.heading: quality for quality in qualities(data) if quality.probe == "needle"}
    needle = {one: shown[one].length for one in dict.fromkeys(frame["quality"]) if one in shown}
    if needle:
        notes.append(needle_words(data, needle.values()))
    constant = {one: level for one, length in needle.items() if (level := ceiling(data, length)) is not None}
    return collected(
        store, data, "pareto", "Quality against speed", frame, origins, notes=notes, fewer=fewer,
        constant=constant,
    )  # fmt: skip


def _word(axis: str, level: str) -> str:
    """How a configuration's name tells a level: nothing for what is off."""
    if level in ("off", "baseline", "-"):
        return ""
    return axis if level == "on" else level


def draw(made: Collected, look: Look) -> Figure:
    """A panel a quality; colour and marker are the mixer, filled with memory; the front stepped, ringed and numbered."""
    from matplotlib.lines import Line2D

    frame = made.frame
    names = list(dict.fromkeys(frame["quality"]))
    types = list(dict.fromkeys(frame["attn_type"]))
    memories = sorted(dict.fromkeys(frame["memory"]), key=lambda word: word != "off")
    front = list(dict.fromkeys(frame[frame["front"]].sort_values("speed", ascending=False)["name"]))
    listed = front[:MOST_NAMED]
    figure = style.page(2.9, style.width_of(len(names), 3.6))
    for axes, quality in zip(style.panels(figure, [""] * len(names), columns=2), names, strict=True):
        here = frame[frame["quality"] == quality]
        for _, one in here.iterrows():
            how = style.look(
                types.index(one["attn_type"]), 1 if one["memory"] == memories[0] and len(memories) > 1 else 0
            )
            axes.plot(one["speed"], one["value"], **(how | {"linestyle": "none"}))
        for _, one in here.iterrows():
            if told := made.about["fewer"].get((quality, one["name"])):
                axes.annotate(
                    told,
                    (one["speed"], one["value"]),
                    xytext=(0, -9),
                    textcoords="offset points",
                    ha="center",
                    fontsize=style.size("small"),
                )
        kept = here[here["front"]].sort_values("speed")
        _front(axes, kept)
        _scale(axes, here, quality)
        if (level := made.about["constant"].get(quality)) is not None:
            axes.axhline(100 * level, **CONSTANT)
        numbered = [
            (str(listed.index(one["name"]) + 1), one["speed"], one["value"])
            for _, one in kept.iterrows()
            if one["name"] in listed
        ]
        style.spread_labels(figure, axes, numbered, list(zip(here["speed"], here["value"], strict=True)))
    handles: dict[str, Any] = {}
    for place, kind in enumerate(types):
        for second, memory in enumerate(memories):
            if ((frame["attn_type"] == kind) & (frame["memory"] == memory)).any():
                how = style.look(place, 1 if second == 0 and len(memories) > 1 else 0) | {"linestyle": "none"}
                handles[f"{kind}, memory {memory}" if len(memories) > 1 else kind] = Line2D([], [], **how)
    for level in made.about["constant"].values():
        handles[f"constant answer {rounded(level, 1, percent=True)}%"] = Line2D([], [], **CONSTANT)
    for place, name in enumerate(listed, start=1):
        # a configuration may be named as a mixer is
        handles[f"front: {name}"] = Line2D([], [], linestyle="none", marker=f"${place}$", color="#000000", markersize=6)
    return style.finished(figure, made.title, made.notes, handles, columns=3)


def _front(axes: Axes, kept: pd.DataFrame) -> None:
    """The steps of a front, and a ring around each of its points."""
    axes.step(kept["speed"], kept["value"], where="pre", color=style.GREY, linewidth=0.9, zorder=1)
    axes.plot(
        kept["speed"],
        kept["value"],
        linestyle="none",
        marker="o",
        markersize=8,
        markerfacecolor="none",
        markeredgecolor="#000000",
    )


def _scale(axes: Axes, here: pd.DataFrame, quality: str) -> None:
    """Ranges and names of both axes."""
    axes.margins(ROOM + 0.06, ROOM + 0.06)
    share = quality.startswith("Ndl")
    if share and here["value"].max() - here["value"].min() < 5:
        axes.set_ylim(here["value"].min() - 5, here["value"].max() + 5)
    axes.set_ylabel(f"{quality}, {'% (more is better)' if share else 'nats per token (less is better)'}")
    speed = here["speed_name"].iloc[0]
    axes.set_xlabel(f"{speed}{', %' if speed == 'MFU' else ''} (more is better)")
    axes.locator_params(axis="x", nbins=5)
