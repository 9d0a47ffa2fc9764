"""The figure `pareto`: quality against speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ...results.store.records import AXES
from ...results.store.store import Store
from ..best_values import format_probability
from ..number_format import Column, format_number
from ..result_columns import quality_columns, speed_column
from ..stats.effects.effects import pareto
from ..stats.effects.needle_baseline import ceiling, needle_caption
from ..stats.noise.best_probability import front_probabilities, rivals
from ..sweep_data import ReportError, SweepData
from ..table_builder import measured_entry
from .canvas import drawing, labels
from .canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from .canvas.line_drawing import mark_out_of_range, robust_range

ROOM = 0.09  # of an axis, that stays free beside the outermost points
LOWEST = -3.0  # percent at the foot of an axis of shares, whose line begins at 0
BESIDE, BELOW = 5.0, 2.2  # inches of width that two panels need side by side; of height of each, one below the other
FEW = 0.05  # of the points, that may leave an axis, so that they do not flatten the rest
FLAT = 5.0  # points of percent, below which a panel of shares would show noise alone
CONSTANT: dict[str, Any] = {"color": "#000000", "linestyle": (0, (1, 1.2)), "linewidth": 0.9, "zorder": 1.5}
MOST_NAMED = 8  # points of a front that are named, the most probable ones


def collect(store: Store, data: SweepData) -> FigureData:
    """Quality against speed, one row a configuration and quality that has both: quality (heading), speed_name, speed, value,
    speed_sd and sd (standard deviations of both by the spread between runs of the stratum; NaN where that is not known), front
    (whether no other is as good in both and better in one), p_front (how probable that is), slug (of its first cell), the five
    AXES, `name`, `rest` (its levels but for mixer and memory).

    Speed is tokens/s, or MFU (in %) where the sweep has no tokens/s. Values: nats per token, or %.
    """
    speed = speed_column(data, "tokens/s")
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    fewer: dict[tuple[str, str], str] = {}
    for quality in quality_columns(data):
        found, known, lacking = _points(data, speed, quality)
        points = [(one["speed"], one["value"]) for one in found]
        fronts = pareto(points, (1, quality.direction))
        rows += [one | {"front": kept} for one, kept in zip(found, fronts, strict=True)]
        origins += known
        fewer |= lacking
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has both a speed and a quality; finish it")
    frame = pd.DataFrame(rows)
    shown = {quality.heading: quality for quality in quality_columns(data) if quality.probe == "needle"}
    needle = {one: shown[one].length for one in dict.fromkeys(frame["quality"]) if one in shown}
    notes = _notes(frame, bool(fewer))
    if needle:
        notes.append(needle_caption(data, needle.values()))
    constant = {one: level for one, length in needle.items() if (level := ceiling(data, length)) is not None}
    names = {cell.cell_id: cells[0].slug for cells in data.configurations().values() for cell in cells}
    return collected(
        store, data, "pareto", "Quality against speed", frame, origins, notes=notes, fewer=fewer, constant=constant, names=names,
    )  # fmt: skip


def _points(
    data: SweepData, speed: Column, quality: Column
) -> tuple[list[dict[str, Any]], list[tuple[str, int | None]], dict[tuple[str, str], str]]:
    """The rows of one quality but for `front`, where their numbers come from, and which are means over fewer seeds."""
    extra = data.extra_axes()
    told = [axis for axis in AXES if axis != "attn_type" and len(data.levels(axis)) > 1]
    chances = front_probabilities(data, speed, quality)
    spreads = [rivals(data, column) for column in (speed, quality)]
    found: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    fewer = {}
    for key, cells in data.configurations().items():
        fast, good = measured_entry(data, cells, speed), measured_entry(data, cells, quality)
        if fast.value is None or good.value is None:
            continue
        levels = dict(zip((*AXES, *extra), key, strict=True))
        words = {axis: _word(axis, levels[axis]) for axis in (*told, *extra)}
        scales = [100 if column.percent else 1 for column in (speed, quality)]
        sds = [
            scale * known[key].sd / math.sqrt(known[key].seeds) if key in known else math.nan
            for known, scale in zip(spreads, scales, strict=True)
        ]
        about: dict[str, Any] = {"quality": quality.heading, "metric": quality.metric, "speed_name": speed.heading}
        about |= {"speed": fast.value * scales[0], "value": good.value * scales[1], "speed_sd": sds[0], "sd": sds[1]}
        about |= {"p_front": chances.get(key, math.nan), "slug": cells[0].slug}
        about |= {axis: levels[axis] for axis in AXES}
        about |= {"name": " ".join(filter(None, (levels["attn_type"], *words.values())))}
        rest = [word for axis, word in words.items() if axis != "memory" and word]
        found.append(about | {"rest": " ".join(rest) or ("baseline" if len(told) + len(extra) > 1 else "")})
        origins += [*fast.origins, *good.origins]
        if min(fast.seeds, good.seeds) < len(cells):
            fewer[quality.heading, found[-1]["name"]] = f"n={min(fast.seeds, good.seeds)}"
    return found, origins, fewer


def _notes(frame: pd.DataFrame, fewer: bool) -> list[str]:
    notes = ["One point a configuration. Ringed: on the front, where no other is as good in both and better in one."]
    if frame["p_front"].notna().any():
        notes.append("The number beside it: how probable that is by the spread between runs.")
    barred = [word for word, name in (("speed", "speed_sd"), ("quality", "sd")) if (frame[name] > 0).any()]
    if barred:
        notes.append(
            f"Bars: one standard deviation of {' and '.join(barred)} to either side, as runs of that mixer and memory spread."
        )
    else:
        notes.append("No bars: no runs of this sweep tell how far they spread.")
    if fewer:
        notes.append("n=k: a mean over k seeds, fewer than the configuration has.")
    return notes


def _word(axis: str, level: str) -> str:
    """How a configuration's name tells a level: nothing for what is off."""
    if level in ("off", "baseline", "-"):
        return ""
    return axis if level == "on" else level


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """A panel a quality; colour and mark are the mixer, filled with memory; the front stepped, ringed and named."""
    frame = made.frame
    names = list(dict.fromkeys(frame["quality"]))
    looks = _looks(frame)
    figure = drawing.page(2.9, drawing.width_of(len(names), 3.6))
    width = figure.get_size_inches()[0]
    across = 2 if width / look.scale >= BESIDE else 1
    if across == 1:
        # one below the other: names beside points need room
        figure.set_size_inches(width, BELOW * len(names) * look.scale)
    several = any(one != "" for one in frame["rest"])
    for axes, quality in zip(drawing.panels(figure, [""] * len(names), columns=across), names, strict=True):
        here = frame[frame["quality"] == quality]
        _draw_points(axes, here, looks)
        kept = here[here["front"]].sort_values("speed")
        axes.step(kept["speed"], kept["value"], color=drawing.GREY, linewidth=drawing.line_width(0.9), zorder=1)
        _ring(axes, kept, "o", 8, "#000000", 1, 2.8)
        if (level := made.about["constant"].get(quality)) is not None:
            axes.axhline(100 * level, **CONSTANT)
        _scale(axes, here, quality, 72 * width / across)
        chosen = {made.about["names"].get(cell) for cell in look.highlight}
        marked = here[here["slug"].isin(chosen)]
        _ring(axes, marked, "D", 9, drawing.BAD, 1.4, 2.9)
        named = kept.sort_values("p_front", ascending=False, kind="stable").head(MOST_NAMED)
        lacking = here[[(quality, name) in made.about["fewer"] for name in here["name"]]]
        told = pd.concat([marked, named, lacking]).drop_duplicates("slug")
        alike: dict[tuple[float, float], list[str]] = {}
        for one in told.to_dict("records"):
            words = _label(one, several, made.about["fewer"].get((quality, one["name"])))
            alike.setdefault((float(one["speed"]), float(one["value"])), []).append(words)
        _name_later(axes, [(*point, _together(some)) for point, some in alike.items() if any(some)], here)
    handles: dict[str, Any] = {words: drawing.key(**how) for words, how in looks.values()}
    for level in list(made.about["constant"].values())[:1]:
        handles[f"constant answer {format_number(level, 1, percent=True)}%"] = drawing.key(**CONSTANT)
    return drawing.finished(figure, made.title, made.notes, handles, columns=3)


def _label(one: Mapping[Any, Any], several: bool, fewer: str | None) -> str:
    """What stands beside a point: its levels that neither colour nor filling tell, its probability to be on the front."""
    chance = "" if math.isnan(one["p_front"]) or not one["front"] else format_probability(one["p_front"])
    words = str(one["rest"]) if several else ""
    return " ".join(filter(None, (words, chance, fewer)))


def _together(words: Sequence[str]) -> str:
    """What stands beside a point that several configurations share."""
    return words[0] if len(words) == 1 else f"{words[0]} and {len(words) - 1} more"


def _looks(frame: pd.DataFrame) -> dict[tuple[str, str], tuple[str, dict[str, Any]]]:
    """By mixer and memory: its words, and the mark of its points."""
    types = list(dict.fromkeys(frame["attn_type"]))
    memories = sorted(dict.fromkeys(frame["memory"]), key=drawing.off_first)
    found = {}
    for place, kind in enumerate(types):
        for memory in memories:
            if ((frame["attn_type"] == kind) & (frame["memory"] == memory)).any():
                several = len(memories) > 1
                words = drawing.shown_values(kind) + (f", {drawing.shown_values(memory, 'memory')}" if several else "")
                look = drawing.look(place, int(several and memory == memories[0]))
                found[kind, memory] = words, look | {"linestyle": "none"}
    return found


def _draw_points(axes: Axes, here: pd.DataFrame, looks: Mapping[tuple[str, str], tuple[str, dict[str, Any]]]) -> None:
    """Every point with its bars: those of the front firm, of the others faint."""
    for key, (_, how) in looks.items():
        mine = here[(here["attn_type"] == key[0]) & (here["memory"] == key[1])]
        axes.plot(mine["speed"], mine["value"], **how, zorder=2.5)
        for front, part in mine.groupby("front", sort=False):
            alpha, width = (0.9, 0.9) if front else (0.25, 0.6)
            faint: dict[str, Any] = {
                "ecolor": how["color"],
                "alpha": alpha,
                "elinewidth": drawing.line_width(width),
                "zorder": 2,
            }
            for axis, ends in _bars(part).items():
                axes.errorbar(part["speed"], part["value"], **{axis: ends}, fmt="none", **faint)


def _bars(part: pd.DataFrame) -> dict[str, Any]:
    """The lengths of the bars below and above each point, by their side where any is known; a share ends at 0 and 100."""
    share = part["quality"].iloc[0].startswith("Ndl")
    found = {}
    for axis, name, value in (("xerr", "speed_sd", part["speed"]), ("yerr", "sd", part["value"])):
        sd = part[name].fillna(0)
        if (sd > 0).any():
            most = (value, 100 - value) if share and axis == "yerr" else (sd, sd)
            found[axis] = [sd.clip(upper=most[0]), sd.clip(upper=most[1])]
    return found


def _ring(axes: Axes, here: pd.DataFrame, marker: str, size: float, ink: str, width: float, above: float) -> None:
    look: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": ink, "zorder": above}
    drawing.points(axes, here["speed"], here["value"], marker, markersize=size, markeredgewidth=width, **look)


def _scale(axes: Axes, here: pd.DataFrame, quality: str, width: float) -> None:
    """Ranges and names of both axes, neither of which shows what no number can be; on the right is room for a name. `width` is
    that of the panel in points."""
    low, high = float(here["speed"].min()), float(here["speed"].max())
    span = high - low or 0.2 * abs(high) or 1.0
    name = 0.58 * drawing.size("small") * max(map(len, here["rest"])) / width
    axes.set_xlim(max(low - ROOM * span, min(0.0, low)), high + min(0.6, ROOM + name) * span)
    share = quality.startswith("Ndl")
    if share:
        top = max(float((here["value"] + here["sd"].fillna(0)).max()), FLAT)
        axes.set_ylim(LOWEST * min(1.0, top / 50), min(104.0, 1.1 * top))
        axes.spines["left"].set_bounds(0, min(100.0, axes.get_ylim()[1]))
    else:
        least, most = robust_range(list(here["value"]), list(here[here["front"]]["value"]))
        if (here["value"] > most).mean() > FEW or (here["value"] < least).any():
            axes.margins(y=ROOM)
        else:
            axes.set_ylim(least, most)
            mark_out_of_range(axes, here.rename(columns={"slug": "cell"}), 2)
    gap = (
        " "
        if drawing.current_options().inches(drawing.WIDTH, drawing.WIDTH) / drawing.current_options().scale >= BESIDE
        else "\n"
    )
    words = ("%", "(more is better)") if share else ("nats per token", "(less is better)")
    axes.set_ylabel(f"{quality}, {gap.join(words)}")
    speed = here["speed_name"].iloc[0]
    axes.set_xlabel(f"{speed}{', %' if speed == 'MFU' else ''} (more is better)")
    axes.locator_params(axis="x", nbins=5)


def _name_later(axes: Axes, words: Sequence[tuple[float, float, str]], here: pd.DataFrame) -> None:
    # those of the front count more
    every = [here, *([here[here["front"]]] * 3)]
    points = [point for part in every for point in zip(part["speed"], part["value"], strict=True)]
    drawing.after_layout(axes.figure, lambda: labels.beside_points(axes, words, points))  # type: ignore[arg-type]
