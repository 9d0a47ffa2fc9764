"""The figure `timeline`: which machine ran what when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...results.paper import OWNER as PRINTED_BY
from ...results.store.store import Store
from ..sweep_data import ReportError, SweepData
from .canvas import drawing
from .canvas.base import Axes, Figure, FigureData, FigureOptions, collected, frame_origins

ENDS = {
    "done": "#56B4E9",
    "running": "#ffffff",
    "interrupted": "#b8b8b8",
    "failed": "#D55E00",
    "diverged": "#000000",
}
"""By state: how an attempt's bar is filled."""
BAD_ENDS = ("failed", "diverged")
KEY_MOST = 40
"""Cells that the key below names; of more, those that did not get done."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Which machine ran what when: one row an attempt, oldest first.

    Columns: cell, slug, name (of the slug what not all cells share), number (of the cell, by its first start), attempt, kind,
    host, gpu (its name, or the device), lane (0, 1, ... where several run at once on such a machine), start and end (seconds
    since the first start), state, failure, step.
    """
    slugs = {cell.cell_id: cell.slug for cell in data.cells}
    attempts = [one for one in store.attempts_of(slugs) if one.owner != PRINTED_BY]
    if not attempts:
        raise ReportError(f"no attempt of sweep {data.sweep} ran here")
    known = store.provenances([one.id for one in attempts])
    first = min(one.started_at for one in attempts)
    hosts = {one.host: known[one.id].gpu_name or known[one.id].device for one in attempts if one.id in known}
    names = distinct(list(dict.fromkeys(slugs[one.cell_id] for one in attempts)))
    numbers: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    busy: dict[tuple[str, str], list[float]] = {}
    for one in sorted(attempts, key=lambda attempt: (attempt.started_at, attempt.id)):
        told = known.get(one.id)
        # one that died before it said where it runs stands with its host's others
        gpu = (told.gpu_name or told.device) if told else hosts.get(one.host, "")
        start = (one.started_at - first).total_seconds()
        # a running attempt is drawn up to the last sign of life
        end = max(start, ((one.finished_at or one.heartbeat_at) - first).total_seconds())
        lanes = busy.setdefault((one.host, gpu), [])
        lane = next((place for place, free in enumerate(lanes) if free <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        slug = slugs[one.cell_id]
        number = numbers.setdefault(one.cell_id, len(numbers) + 1)
        about = {"cell": one.cell_id, "slug": slug, "name": names[slug], "number": number, "attempt": one.id}
        about |= {"kind": one.kind, "host": one.host, "gpu": gpu, "lane": lane, "start": start, "end": end}
        rows.append(about | {"state": one.state, "failure": one.failure, "step": one.step})
    frame = pd.DataFrame(rows)
    notes = [f"First start {first:%Y-%m-%d %H:%M} UTC. A cross marks an attempt that failed or diverged."]
    if len(numbers) > KEY_MOST:
        notes.append(f"Cells are numbered by their first start; --json names all {len(numbers)}.")
    return collected(store, data, "timeline", "Attempts over time", frame, frame_origins(frame), notes=notes)


def distinct(slugs: Sequence[str]) -> dict[str, str]:
    """By slug, what not all of them share: polar-baseline-d0-m1 and nope-baseline-d0-m1 are polar and nope."""
    parts = [slug.split("-") for slug in slugs]
    if len({len(part) for part in parts}) != 1 or len(parts) == 1:
        return {slug: slug for slug in slugs}
    kept = [place for place, words in enumerate(zip(*parts, strict=True)) if len(set(words)) > 1]
    return {slug: "-".join(part[place] for place in kept) for slug, part in zip(slugs, parts, strict=True)}


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """A lane for each attempt that runs at once on a machine, a bar an attempt, with its cell's name or number in it."""
    frame = made.frame
    unit, size = drawing.time_unit(float(frame["end"].max()))
    machines = frame.groupby(["host", "gpu"], sort=False)["lane"].max() + 1
    first_lane = dict(zip(machines.index, machines.cumsum() - machines, strict=True))
    total = int(machines.sum())
    wide = float(frame["end"].max()) / size or 1.0
    lanes = [first_lane[key] for key in zip(frame["host"], frame["gpu"], strict=True)]
    bars = frame.assign(
        y=[first + lane for first, lane in zip(lanes, frame["lane"], strict=True)],
        left=frame["start"] / size,
        width=((frame["end"] - frame["start"]) / size).clip(lower=wide / 400),
    )
    figure = drawing.page(min(8.0, 0.24 * max(total, 3 * len(machines))) + 0.55)
    (axes,) = drawing.panels(figure, [""])
    _bars(axes, bars)
    room = max(12, int(0.26 * figure.get_figwidth() * 72 / (0.6 * drawing.size("ytick.labelsize"))))
    words = [
        "\n".join(drawing.shortened(part.removeprefix("NVIDIA "), room) for part in (host, gpu) if part)
        for host, gpu in machines.index
    ]
    axes.set_yticks([first_lane[key] + (count - 1) / 2 for key, count in machines.items()], words)
    for start in list(first_lane.values())[1:]:
        axes.axhline(start - 0.5, color=drawing.GREY, linewidth=drawing.line_width(0.6))
    axes.set_ylim(total - 0.4, -0.75)
    axes.set_xlim(-0.01 * wide, 1.03 * wide)
    axes.locator_params(axis="x", nbins=5, min_n_ticks=3)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{unit} since the first start")
    _explained(figure, axes, _key(bars, _names(figure, axes, bars)))
    return drawing.finished(figure, made.title, made.notes, _states(bars))


def _explained(figure: Figure, axes: Axes, words: Sequence[str]) -> None:
    """Writes the key below the words of the axes, for which the figure grows."""
    if not words:
        return
    width, height = figure.get_size_inches()
    points = drawing.size("small")
    lines, most = [""], int((width - 0.1) * 72 / (points * 0.62))
    for one in words:
        longer = f"{lines[-1]}   {one}" if lines[-1] else one
        lines[-1:] = [longer] if len(longer) <= most else [lines[-1], one]
    figure.draw_without_rendering()
    seen = axes.get_tightbbox()
    left, lowest = (seen.x0 - axes.bbox.x0, seen.y0 - axes.bbox.y0) if seen else (0.0, 0.0)
    figure.set_size_inches(width, height + (len(lines) * points * 1.25 + 3) / 72)
    shift = left * 72 / figure.dpi, lowest * 72 / figure.dpi - 3
    look: dict[str, Any] = {"xycoords": "axes fraction", "va": "top", "linespacing": 1.2, "annotation_clip": False}
    drawing.note(axes, "\n".join(lines), (0, 0), shift, **look)


def _bars(axes: Axes, bars: pd.DataFrame) -> None:
    """The bars of each state at once, and a cross above the end of every bad one, where it hides no name."""
    for state, part in bars.groupby("state", sort=False):
        axes.barh(part["y"], part["width"], left=part["left"], height=0.8, **_fill(str(state)))
    bad = bars[bars["state"].isin(BAD_ENDS)]
    if len(bad):
        look: dict[str, Any] = {"color": ENDS["failed"], "markeredgecolor": "#ffffff", "zorder": 7, "clip_on": False}
        (cross,) = axes.plot(bad["left"] + bad["width"], bad["y"] - 0.5, linestyle="none", marker="X", **look)
        cross.set_markersize(0.8 * drawing.size("ytick.labelsize"))


def _names(figure: Figure, axes: Axes, bars: pd.DataFrame) -> set[int]:
    """Writes a cell's name into its bar where it fits, else its number, upright if need be; returns the numbers to explain."""
    points = drawing.size("small")
    figure.draw_without_rendering()
    corners = axes.transData.transform(np.column_stack([bars["left"], bars["y"] - 0.4]))
    others = axes.transData.transform(np.column_stack([bars["left"] + bars["width"], bars["y"] + 0.4]))
    dots = np.abs(others - corners) - 0.25 * points * figure.dpi / 72
    least = 0.45 * points * figure.dpi / 72
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    told = set()
    for (_, one), (across, down) in zip(bars.iterrows(), dots, strict=True):
        name, number = str(one["name"]), str(one["number"])
        for text, turn in ((name, 0), (number, 0), (number, 90)):
            long = least * len(text)
            if long > (down if turn else across) or 1.2 * least > across:
                continue
            note = axes.text(
                one["left"] + one["width"] / 2, one["y"], text, ha="center", va="center", fontsize=points, zorder=6,
                rotation=turn, color="#ffffff" if one["state"] == "diverged" else "#000000",
                bbox=drawing.BACKING if _fill(one["state"])["hatch"] else None,
            )  # fmt: skip
            box = note.get_window_extent(renderer)
            if box.width <= across and box.height <= down * 1.1:
                break
            note.remove()
        else:
            text = number
        if text != name:
            told.add(int(number))
    return told


def _key(bars: pd.DataFrame, told: set[int]) -> list[str]:
    """The numbered cells by name; of many, those alone that failed or diverged, which are named in any case."""
    bad = bars["state"].isin(BAD_ENDS)
    if len(told) > KEY_MOST:
        told = set()
    listed = bars[bad | bars["number"].isin(told)].sort_values("number")
    words = []
    for number, cell in listed.groupby("number", sort=False):
        why = "; ".join(dict.fromkeys(one for one in cell["failure"] if isinstance(one, str)))
        words.append(f"{number} {cell['name'].iloc[0]}" + (f" ({why})" if why else ""))
    return words


def _states(bars: pd.DataFrame) -> dict[str, Any]:
    """By its words: how each state is drawn, with how many attempts ended so."""
    counts = bars["state"].value_counts()
    found = {f"{state} ({counts[state]})": drawing.patch(**_fill(state)) for state in ENDS if state in counts}
    if counts.index.isin(BAD_ENDS).any():
        found["failed or diverged here"] = drawing.key(linestyle="none", marker="X", color=ENDS["failed"])
    return found


def _fill(state: str) -> dict[str, Any]:
    """Return how the bar of an attempt that ended so is filled."""
    hatch = drawing.HATCHES[list(ENDS).index(state)] if state != "diverged" else ""
    return {"facecolor": ENDS[state], "edgecolor": "#000000", "linewidth": drawing.line_width(0.5), "hatch": hatch}
