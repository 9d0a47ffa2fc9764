"""Figure `timeline`: attempts over time, by machine."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...results.console.text import counted
from ...results.paper import OWNER as PRINTED_BY
from ...results.store.store import Store
from ..render.style import BACKGROUND, STATE_INKS, mixer_inks, tint
from ..sweep_data import ReportError, SweepData, cell_level
from .canvas import drawing
from .canvas.base import Axes, Figure, FigureData, FigureOptions, cell_labels, collected, frame_origins
from .canvas.scales import round_long_numbers

STATES = ("done", "running", "interrupted", "failed", "diverged")
FILL_SHARE = 0.75  # share of white in the ink of a state that fills bars, so that text on them can be read
NAMES_SHARE = 0.45  # share of the figure's width that names of rows may take
LINES_OF_NAMES = 2.4  # least distance of rows, in sizes of text, at which names may have two lines
LOW_BAR = 0.45
"""Height of the bar of an evaluation beside trainings, in lanes."""
CROWD = 100
"""Number of attempts from which on bars have neither names nor edges."""
BAD_STATES = ("failed", "diverged")
TOKENS = "train.tokens"
MAX_NAME = 56  # characters of a cell's name that fit in a line of the key
MAX_KEY_ENTRIES = 40
"""Largest number of cells that the key below the axes names; with more, it names only those with a bad end."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the attempts of the sweep over time, one row per attempt, oldest first.

    Columns: cell, slug, name (levels that vary, or the parts of the slug that do), number (of the cell, from 1, by its first start),
    attempt, kind, host, gpu (its name, or the device; empty where unknown), lane (0, 1, ... where several run at once
    on a machine), start and end (seconds since the first start; a running attempt ends at its last heartbeat), state,
    failure, step. Attempts of printed numbers are left out.

    Raises:
        ReportError: No attempt of the sweep ran here.
    """
    slugs = {cell.cell_id: cell.slug for cell in data.cells}
    attempts = [attempt for attempt in store.attempts_of(slugs) if attempt.owner != PRINTED_BY]
    if not attempts:
        raise ReportError(f"sweep {data.sweep} has printed numbers only, so there are no attempts to draw")
    provenance_by_attempt = store.provenances([attempt.id for attempt in attempts])
    first = min(attempt.started_at for attempt in attempts)
    hosts = {
        attempt.host: provenance_by_attempt[attempt.id].gpu_name or provenance_by_attempt[attempt.id].device
        for attempt in attempts
        if attempt.id in provenance_by_attempt
    }
    names, unnamed_axes = _cell_names(data, {attempt.cell_id: slugs[attempt.cell_id] for attempt in attempts})
    numbers: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    busy: dict[tuple[str, str], list[float]] = {}
    for started in sorted(attempts, key=lambda attempt: (attempt.started_at, attempt.id)):
        provenance = provenance_by_attempt.get(started.id)
        # an attempt that died before it reported its GPU is shown with the others of its host
        gpu = (provenance.gpu_name or provenance.device) if provenance else hosts.get(started.host, "")
        start = (started.started_at - first).total_seconds()
        # a running attempt is drawn up to its last heartbeat
        end = max(start, ((started.finished_at or started.heartbeat_at) - first).total_seconds())
        lanes = busy.setdefault((started.host, gpu), [])
        lane = next((index for index, free in enumerate(lanes) if free <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        slug = slugs[started.cell_id]
        number = numbers.setdefault(started.cell_id, len(numbers) + 1)
        fields = {
            "cell": started.cell_id,
            "slug": slug,
            "name": names[started.cell_id],
            "number": number,
            "attempt": started.id,
        }
        fields |= {"kind": started.kind, "host": started.host, "gpu": gpu, "lane": lane, "start": start, "end": end}
        rows.append(fields | {"state": started.state, "failure": started.failure, "step": started.step})
    frame = pd.DataFrame(rows)
    tenants = [provenance.co_tenants for provenance in provenance_by_attempt.values() if provenance.co_tenants]
    notes = [f"First start {first:%Y-%m-%d %H:%M} UTC.", *_notes(frame, tenants)]
    if unnamed_axes:
        notes.append(f"Last in each name: {', '.join(map(drawing.axis_label, unnamed_axes))}.")
    levels = {cell.cell_id: (cell.levels["attn_type"], cell.levels["memory"]) for cell in data.cells}
    if len(numbers) > MAX_KEY_ENTRIES and len(rows) < CROWD:
        notes.append(f"Cells are numbered by their first start; there are {len(numbers)}.")
    return collected(
        store, data, "timeline", "Attempts over time", frame, frame_origins(frame), notes=notes,
        levels=levels,
    )  # fmt: skip


def _cell_names(data: SweepData, slugs: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the names of cells by cell id, and the axes of which a name has the level alone, without the axis.

    Names are the levels of axes that vary and are not off, and the seed if seeds vary. If two are the same, or one is
    longer than 56 characters, they are the varying parts of the slugs.

    Args:
        data: The sweep.
        slugs: Slugs of the cells by cell id.
    """
    extra = [axis for axis in data.extra_axes() if len(data.levels(axis)) > 1]
    labels, ends = cell_labels(data, without=extra), {cell.cell_id: cell for cell in data.cells}
    names = {}
    for cell in slugs:
        levels = [(axis, cell_level(ends[cell], axis)) for axis in extra]
        short = [
            round_long_numbers(drawing.level_label(level, axis).removeprefix(f"{drawing.axis_label(axis)} "))
            + (" tokens" if axis == TOKENS else "")
            for axis, level in levels
        ]
        names[cell] = ", ".join(filter(None, [labels[cell], *short]))
    if len({*names.values()}) == len(names) and all(0 < len(name) <= MAX_NAME for name in names.values()):
        return names, [axis for axis in extra if axis != TOKENS]
    parts = distinct_name_parts(list(slugs.values()))
    return {cell: parts[slug] for cell, slug in slugs.items()}, []


def _notes(frame: pd.DataFrame, tenants: Sequence[int]) -> list[str]:
    """Return the notes on the end of all attempts if they have the same, on crosses, and on shared GPUs.

    Args:
        frame: Rows of attempts.
        tenants: Number of other attempts on the GPU of each attempt that shared one, over its life; empty: none did.
    """
    states = frame["state"].value_counts()
    notes = [
        "A bar per attempt, from start to end: a training with its evaluation"
        + (
            ", or (low) an evaluation alone."
            if frame["kind"].nunique() > 1
            else f" ({counted(len(frame), 'attempt')})."
        )
    ]
    notes += [f"{'All' if len(frame) > 1 else 'It'} {states.index[0]}."] if len(states) == 1 else []
    if frame["state"].isin(BAD_STATES).any():
        notes.append("A cross marks an attempt that failed or diverged.")
    at_once = int(frame["lane"].max()) + 1
    if tenants:
        company = f", up to {at_once} of this sweep at one time" if at_once > 1 else " with those of other sweeps"
        notes.append(f"{counted(len(tenants), 'attempt')} shared a GPU{company}.")
        notes[-1] += " Lengths are therefore no costs."
    elif at_once > 1:
        notes.append(f"Up to {at_once} attempts ran at the same time on a machine.")
    return notes


def distinct_name_parts(slugs: Sequence[str]) -> dict[str, str]:
    """Return the parts of each slug that not all slugs share, joined by hyphens, by slug.

    For example polar-baseline-d0-m1 and nope-baseline-d0-m1 give polar and nope. A single slug, or slugs of different
    numbers of parts, are returned whole.
    """
    parts = [slug.split("-") for slug in slugs]
    if len({len(part) for part in parts}) != 1 or len(parts) == 1:
        return {slug: slug for slug in slugs}
    varying = [index for index, parts_at_index in enumerate(zip(*parts, strict=True)) if len(set(parts_at_index)) > 1]
    return {slug: "-".join(part[index] for index in varying) for slug, part in zip(slugs, parts, strict=True)}


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a lane per simultaneous attempt on a machine and a bar per attempt, with its cell's name or number.

    Colours are states; if all attempts have the same state, they are mixers, filled with memory. A key below the axes
    explains numbers and bad ends. `look` is not used.
    """
    from matplotlib.ticker import MaxNLocator

    frame = figure_data.frame
    unit, seconds_per_unit = drawing.time_unit(float(frame["end"].max()))
    machines = frame.groupby(["host", "gpu"], sort=False)["lane"].max() + 1
    first_lane = dict(zip(machines.index, machines.cumsum() - machines, strict=True))
    total = int(machines.sum())
    total_width = float(frame["end"].max()) / seconds_per_unit or 1.0
    lanes = [first_lane[key] for key in zip(frame["host"], frame["gpu"], strict=True)]
    named_lanes = _has_a_lane_each(frame)
    if named_lanes:
        # groups of the last axis, such as training tokens
        ends = frame["name"].str.split(", ").str[::-1].str.join(", ")
        frame = frame.assign(lane=ends.groupby([frame["host"], frame["gpu"]]).rank(method="first").astype(int) - 1)
    bars = frame.assign(
        y=[first + lane for first, lane in zip(lanes, frame["lane"], strict=True)],
        left=frame["start"] / seconds_per_unit,
        width=((frame["end"] - frame["start"]) / seconds_per_unit).clip(lower=total_width / 400),
    )
    figure = drawing.page(min(5.5, 0.24 * max(total, 3 * len(machines))) + 0.55)
    (axes,) = drawing.panels(figure, [""])
    fills, handles = _fills(bars, figure_data.draw_options["levels"])
    _draw_bars(axes, bars, fills)
    room = max(12, int(0.26 * figure.get_figwidth() * 72 / (0.6 * drawing.size("ytick.labelsize"))))
    lane_labels = [
        "\n".join(drawing.shortened(part.removeprefix("NVIDIA "), room) for part in (host, gpu) if part)
        for host, gpu in machines.index
    ]
    if len(machines) == 1 and machines.index[0][1]:
        lane_labels = [drawing.shortened(f"one {machines.index[0][1].removeprefix('NVIDIA ')}", room)]
    axes.set_yticks([first_lane[key] + (count - 1) / 2 for key, count in machines.items()], lane_labels)
    if named_lanes:
        named = bars.sort_values("y")
        most = int(NAMES_SHARE * figure.get_figwidth() * 72 / (0.56 * drawing.size("ytick.labelsize")))
        pitch = 72 * figure.get_figheight() / (total + 3) / drawing.size("ytick.labelsize")
        fold = _in_two_lines if pitch > LINES_OF_NAMES else drawing.shortened
        axes.set_yticks(named["y"].to_list(), [fold(str(name), most) for name in named["name"]], linespacing=1.0)
        drawing.rows_alone(axes)
        axes.set_title("; ".join(label.replace("\n", ", ") for label in lane_labels))
    for start in list(first_lane.values())[1:]:
        axes.axhline(start - 0.5, color=drawing.GREY, linewidth=drawing.line_width(0.6))
    axes.set_ylim(total - 0.4, -0.75)
    ticks = MaxNLocator(drawing.ticks_that_fit(axes, most=8), min_n_ticks=3).tick_values(0, total_width)
    end = min(tick for tick in ticks if tick >= total_width)
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= end])
    axes.set_xlim(-0.01 * total_width, max(end * 1.005, 1.03 * total_width))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{unit} since the first start")
    numbered = _write_names(figure, axes, bars) if len(bars) < CROWD and not named_lanes else set()
    _write_key(figure, axes, _key_entries(bars, numbered))
    if (
        len(bars) < CROWD
        and bars["cell"].nunique() <= MAX_KEY_ENTRIES
        and not set(handles) & {*STATES}
        and bars["state"].nunique() == 1
    ):
        # names beside, in or below all bars say what colours and fills do
        handles = {key: handle for key, handle in handles.items() if key not in _level_names(figure_data)}
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles)


def _level_names(figure_data: FigureData) -> set[str]:
    """Return the names of the mixers and memories of the drawn cells."""
    levels = figure_data.draw_options["levels"].values()
    return {
        name for mixer, memory in levels for name in (drawing.level_label(mixer), drawing.level_label(memory, "memory"))
    }


def _in_two_lines(name: str, most: int) -> str:
    """Return a name in at most two lines of at most so many characters, broken at its last comma or at spaces."""
    head, _, tail = name.rpartition(", ")
    if len(name) > most > max(len(head), len(tail)):
        return f"{head},\n{tail}"
    lines = textwrap.wrap(name, most, break_long_words=False)
    return "\n".join(drawing.shortened(line, most) for line in (lines[0], " ".join(lines[1:])) if line)


def _has_a_lane_each(frame: pd.DataFrame) -> bool:
    """Return True if every attempt ran beside all others of its machine, at most 40: rows can then have names.

    Args:
        frame: Rows of attempts, with host, gpu and lane.
    """
    lanes = frame.drop_duplicates(["host", "gpu", "lane"])
    return len(lanes) == len(frame) == frame["cell"].nunique() and len(frame) <= MAX_KEY_ENTRIES


def _write_key(figure: Figure, axes: Axes, entries: Sequence[str]) -> None:
    """Write the key of numbered cells below the axis labels; the figure grows by its height.

    Without entries nothing changes.

    Args:
        figure: The figure, which is laid out here.
        axes: Its only axes.
        entries: Texts of the key, written one after the other in lines.
    """
    if not entries:
        return
    width, height = figure.get_size_inches()
    points = drawing.size("small")
    lines, most = [""], int((width - 0.1) * 72 / (points * 0.62))
    for entry in entries:
        longer = f"{lines[-1]}   {entry}" if lines[-1] else entry
        lines[-1:] = [longer] if len(longer) <= most else [lines[-1], entry]
    figure.draw_without_rendering()
    extent = axes.get_tightbbox()
    x_offset, bottom_offset = (extent.x0 - axes.bbox.x0, extent.y0 - axes.bbox.y0) if extent else (0.0, 0.0)
    figure.set_size_inches(width, height + (len(lines) * points * 1.25 + 3) / 72)
    shift = x_offset * 72 / figure.dpi, bottom_offset * 72 / figure.dpi - 3
    style: dict[str, Any] = {"xycoords": "axes fraction", "va": "top", "linespacing": 1.2, "annotation_clip": False}
    drawing.note(axes, "\n".join(lines), (0, 0), shift, **style)


def _fills(bars: pd.DataFrame, levels: Mapping[str, tuple[str, str]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return matplotlib's fill of each bar and the legend handles by label.

    Args:
        bars: Rows of attempts.
        levels: Levels of mixer and memory by cell id.
    """
    own = [levels[cell] for cell in bars["cell"]]
    inks = mixer_inks(mixer for mixer, _ in own)
    memories = sorted({memory for _, memory in own}, key=drawing.off_first)
    if bars["state"].nunique() > 1 or bars["state"].iloc[0] != "done" or len(inks) == 1:
        return [_bar_style(str(state)) for state in bars["state"]], _state_handles(bars)

    def fill(ink: str, memory: str) -> dict[str, Any]:
        """Return the style of the bar of a cell: white inside without memory if memory varies."""
        hollow = len(memories) > 1 and memory == "off"
        face = BACKGROUND if hollow else tint(ink, FILL_SHARE)
        return {"facecolor": face, "edgecolor": ink, "linewidth": drawing.line_width(0.8), "hatch": ""}

    handles = {
        drawing.level_label(mixer): drawing.patch(facecolor=tint(ink, FILL_SHARE), edgecolor=ink)
        for mixer, ink in inks.items()
    }
    for memory in memories if len(memories) > 1 else ():
        # in the inks of all mixers side by side, since a grey alone would be that of RoPE
        handles[drawing.level_label(memory, "memory")] = tuple(
            drawing.patch(**fill(ink, memory)) for ink in inks.values()
        )
    return [fill(inks[mixer], memory) for mixer, memory in own], handles


def _draw_bars(axes: Axes, bars: pd.DataFrame, fills: Sequence[dict[str, Any]]) -> None:
    """Draw the bars, and a cross above the end of every failed or diverged one.

    Args:
        axes: The axes.
        bars: Rows of attempts with y (lane), left and width in units of the axis.
        fills: Style of each bar.
    """
    crowded, is_uniform = len(bars) >= CROWD, bars["kind"].nunique() == 1
    looks = [tuple((look | ({"linewidth": 0, "hatch": ""} if crowded else {})).items()) for look in fills]
    for look in dict.fromkeys(looks):
        part = bars[[own == look for own in looks]]
        heights = [0.8 if kind == "train" or is_uniform else LOW_BAR for kind in part["kind"]]
        axes.barh(part["y"], part["width"], left=part["left"], height=heights, **dict(look))
    bad = bars[bars["state"].isin(BAD_STATES)]
    if len(bad):
        style: dict[str, Any] = {
            "color": STATE_INKS["failed"],
            "markeredgecolor": "#ffffff",
            "zorder": 7,
            "clip_on": False,
        }
        (cross,) = axes.plot(bad["left"] + bad["width"], bad["y"] - 0.5, linestyle="none", marker="X", **style)
        cross.set_markersize(0.8 * drawing.size("ytick.labelsize"))


def _write_names(figure: Figure, axes: Axes, bars: pd.DataFrame) -> set[int]:
    """Write a cell's name into its bar, in one or two lines, if it fits; else its number, upright if need be.

    Returns:
        The numbers of all cells with a bar that does not show the name, which the key must explain.
    """
    points = drawing.size("small")
    figure.draw_without_rendering()
    corners = axes.transData.transform(np.column_stack([bars["left"], bars["y"] - 0.4]))
    opposite_corners = axes.transData.transform(np.column_stack([bars["left"] + bars["width"], bars["y"] + 0.4]))
    dots = np.abs(opposite_corners - corners) - 0.25 * points * figure.dpi / 72
    least = 0.45 * points * figure.dpi / 72
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    numbered = set()
    for (_, bar), (across, down) in zip(bars.iterrows(), dots, strict=True):
        name, number = str(bar["name"]), str(bar["number"])
        head, _, tail = name.rpartition(", ")
        options = [(name, 0), (f"{head},\n{tail}", 0)] if head else [(name, 0)]
        for text, turn in (*options, (number, 0), (number, 90)):
            long = least * max(map(len, text.split("\n")))
            if long > (down if turn else across) or 1.2 * least > across:
                continue
            note = axes.text(
                bar["left"] + bar["width"] / 2, bar["y"], text, ha="center", va="center", fontsize=points, zorder=6,
                rotation=turn, color=drawing.INK, linespacing=1.0,
                bbox=drawing.BACKING if _bar_style(bar["state"])["hatch"] else None,
            )  # fmt: skip
            box = note.get_window_extent(renderer)
            if box.width <= across and box.height <= down * (1.1 if "\n" not in text else 0.7):
                break
            note.remove()
        else:
            text = number
        if text == number != name:
            numbered.add(int(number))
    return numbered


def _key_entries(bars: pd.DataFrame, numbered: set[int]) -> list[str]:
    """Return the entries of the key, "number name (failures)", by number.

    Listed are numbered cells, and cells with a failed or diverged attempt.

    Args:
        bars: Rows of attempts.
        numbered: Numbers of the cells that a bar does not name; with more than 40 only bad ends are listed.
    """
    bad = bars["state"].isin(BAD_STATES)
    if len(numbered) > MAX_KEY_ENTRIES:
        numbered = set()
    listed = bars[bad | bars["number"].isin(numbered)].sort_values("number")
    entries = []
    for number, cell in listed.groupby("number", sort=False):
        why = "; ".join(dict.fromkeys(failure for failure in cell["failure"] if isinstance(failure, str)))
        entries.append(f"{number} {cell['name'].iloc[0]}" + (f" ({why})" if why else ""))
    return entries


def _state_handles(bars: pd.DataFrame) -> dict[str, Any]:
    """Return the legend handles of the states that occur, by "state (number of attempts)", and one for the cross.

    The latter is there if any attempt failed or diverged.
    """
    counts = bars["state"].value_counts()
    handles = {
        f"{state} ({counts[state]})": drawing.patch(**_bar_style(state) | ({"hatch": ""} if len(bars) >= CROWD else {}))
        for state in STATES
        if state in counts
    }
    if counts.index.isin(BAD_STATES).any():
        handles["failed or diverged"] = drawing.key(linestyle="none", marker="X", color=STATE_INKS["failed"])
    return handles


def _bar_style(state: str) -> dict[str, Any]:
    """Return matplotlib's fill of the bar of an attempt in this state: facecolor, edgecolor, linewidth and hatch."""
    hatch = drawing.HATCHES[STATES.index(state)] if state != "done" else ""
    return {
        "facecolor": "#ffffff" if state == "running" else tint(STATE_INKS[state], FILL_SHARE),
        "edgecolor": drawing.INK,
        "linewidth": drawing.line_width(0.5),
        "hatch": hatch,
    }
