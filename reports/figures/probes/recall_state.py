"""Figure `recall-state`: associative recall over the bytes of state that decoding carries, a line per mixer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ....results import metrics
from ....results.store.records import CellState
from ....results.store.store import Store
from ...number_format import format_number
from ...render.style import FREE_INKS, memory_label, memory_look, mixer_inks
from ...sweep_data import ReportError, SweepData, cell_level
from ..canvas import drawing
from ..canvas.base import GROUP, Axes, Figure, FigureData, FigureOptions, collected, frame_origins
from ..canvas.labels import label_ends, label_rings
from ..canvas.length_frames import bar_note, line_means
from ..canvas.line_drawing import INTERVAL, interval_key, named_cells, reference_line
from ..response import level_as_number

PROBE, METRIC, STATE = "mqar", "accuracy", "state_bytes"
OFF = ("off", "none", "-", "")
SHOWN = ["cell", "attempt", "configuration", *GROUP, "size", "probe", "metric", "length", "value", "n", "low", "high"]
UNITS: Mapping[int, str] = {1: "B", 1 << 10: "KB", 1 << 20: "MB", 1 << 30: "GB"}


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the accuracy of associative recall and the bytes of state of every cell that has both.

    One row per cell: cell, attempt, configuration, panel (empty), first (mixer), second (memory), line (name of mixer
    and memory, and other levels that are no numbers), size (levels that are numbers, such as the head size), probe,
    metric, length (bytes of state of one sequence), value (a fraction), n (rows), low and high (95 % Wilson interval of
    a cell). Levels that are numbers vary along a line.

    Raises:
        ReportError: No cell has both numbers.
    """
    frame = _frame(data)
    if frame.empty:
        raise ReportError(
            f"no cell of sweep {data.sweep} has both recall and its bytes of state; evaluate with --probe {PROBE}"
        )
    means = line_means(frame)
    chance = _chance_levels(data, frame)
    sizes = _size_axes(data, frame)
    notes = [
        "Share of queries of MQAR that are answered with the value of their key, over the bytes that decoding stores for one "
        f"row (keys and values, memories, tails of convolutions).{_rows_note(data, frame)}{_sizes_note(sizes)}"
        f"{_dots_note(frame, means)} {bar_note(means, 'Bars', _interval_text(frame))}".strip(),
        *_chance_note(chance),
        *_missing_note(data, frame),
    ]
    names = {str(row["cell"]): f"{row['line']} {row['size']}".strip() for row in frame.to_dict("records")}
    return collected(
        store, data, "recall-state", "Associative recall by size of the state", frame, frame_origins(frame),
        notes=notes, chance=chance, names=names, shown=[*frame["line"], "memory"],
        sizes={cell.cell_id: cell_level(cell, sizes[0]) for cell in data.cells} if len(sizes) == 1 else {},
        size_name=drawing.axis_label(sizes[0]) if sizes else "",
    )  # fmt: skip


def _size_axes(data: SweepData, frame: pd.DataFrame) -> list[str]:
    """Return the axes with numbers as levels that vary among the drawn cells, which change along a line."""
    drawn = [cell for cell in data.cells if cell.cell_id in set(frame["cell"])]
    levels = {axis: {cell_level(cell, axis) for cell in drawn} for axis in data.extra_axes()}
    return [
        axis for axis, own in levels.items() if len(own) > 1 and all(level_as_number(each) is not None for each in own)
    ]


def _rows_note(data: SweepData, frame: pd.DataFrame) -> str:
    """Return the sentences on the rows of the task, as far as they are known, and on what their length decides."""
    drawn = [cell for cell in data.cells if cell.cell_id in set(frame["cell"])]
    lengths = [length for cell in drawn if (length := data.setting(cell, "train.seq_len"))]
    questions = [data.values.get((cell.cell_id, PROBE, "questions", 0)) for cell in drawn]
    pairs = [round(value.value / value.n) for value in questions if value is not None and value.value and value.n]
    texts = [f"rows of {_range_text(lengths)} tokens"] if lengths else []
    texts += [f"{_range_text(pairs)} pairs, each asked for once"] if pairs else []
    listed = f" {'; '.join(texts).capitalize()}." if texts else ""
    # without attention to all tokens of a row the bytes do not depend on it
    grows = any(cell_level(cell, "memory") in OFF and cell_level(cell, "window") in OFF for cell in drawn)
    return listed + (" The bytes of full attention grow with a row, those of a memory do not." * grows)


def _range_text(numbers: Sequence[Any] | pd.Series) -> str:
    """Return the least and the largest of at least one number as text, such as "256" or "256 to 512"."""
    return " to ".join(f"{number:,}" for number in sorted({int(min(numbers)), int(max(numbers))}))


def _sizes_note(sizes: Sequence[str]) -> str:
    """Return the sentence on the axes that change the state along a line, after a space; "" without any."""
    if not sizes:
        return ""
    names = " and ".join(map(drawing.axis_label, sizes))
    suffix = " (beside points, behind names)" if len(sizes) == 1 else ""
    return f" Along a line changes {names}{suffix}, and with it the parameters: equal bytes are not equal networks."


def _interval_text(frame: pd.DataFrame) -> str:
    """Return the meaning of the interval of a cell, whose unit is a row, since the answers of a row are not independent."""
    rows = f"n = {_range_text(frame['n'])}" if frame["n"].notna().all() else "n"
    return f"95 % Wilson intervals over the rows of a cell ({rows}; the answers of a row count as one)"


def _chance_note(chance: Sequence[float]) -> list[str]:
    """Return the note on the chance level as a list; empty where none is known."""
    levels = " to ".join(
        f"{format_number(level, 1, percent=True)} %" for level in dict.fromkeys((*chance[:1], *chance[-1:]))
    )
    return [f"Chance level, one of the corpus's values at random: {levels}."] if chance else []


def _dots_note(frame: pd.DataFrame, means: pd.DataFrame) -> str:
    """Return the sentence on points, which are single runs or means over seeds, after a space."""
    if len(frame) == len(means):
        return " A point is a single run."
    return " A point is a mean over seeds, with a small dot per run."


def _frame(data: SweepData) -> pd.DataFrame:
    """Return one row per cell with both numbers, with the columns of SHOWN; empty without any."""
    rows = []
    drawn = _cells_with(data, METRIC, STATE)
    for cells in data.configurations().values():
        for cell in [each for each in cells if each in drawn]:
            share, state = (data.values[cell.cell_id, PROBE, metric, 0] for metric in (METRIC, STATE))
            row = {"cell": cell.cell_id, "attempt": share.attempt_id, "configuration": cells[0].slug, "panel": ""}
            row |= {"first": cell_level(cell, "attn_type"), "second": cell_level(cell, "memory")}
            row |= dict(zip(("line", "size"), _line_and_size(data, cell, drawn), strict=True))
            row |= {
                "probe": PROBE,
                "metric": METRIC,
                "length": int(state.value or 0),
                "value": share.value,
                "n": share.n,
            }
            rows.append(row | {"low": share.low, "high": share.high})
    return pd.DataFrame(rows, columns=SHOWN).astype({"value": float, "low": float, "high": float})


def _cells_with(data: SweepData, *needed: str) -> list[CellState]:
    """Return the cells that have a value of each of these metrics of the probe, in the order of the cells."""
    values = {
        metric: {key[0] for key, each in data.values.items() if key[1:3] == (PROBE, metric) and each.value is not None}
        for metric in needed
    }
    return [cell for cell in data.cells if all(cell.cell_id in values[metric] for metric in needed)]


def _line_and_size(data: SweepData, cell: CellState, drawn: Sequence[CellState]) -> tuple[str, str]:
    """Return the name of the line of a cell, and its levels that are numbers as text; the latter may be empty.

    A memory replaces the name of its mixer where all drawn cells with a memory share one mixer. Axes that do not vary
    among the drawn cells of a mixer and memory are left out.
    """
    mixer, memory = cell_level(cell, "attn_type"), cell_level(cell, "memory")
    with_memory = {cell_level(each, "attn_type") for each in drawn if cell_level(each, "memory") not in OFF}
    alike = [each for each in drawn if (cell_level(each, "attn_type"), cell_level(each, "memory")) == (mixer, memory)]
    names = [] if memory not in OFF and len(with_memory) == 1 else [drawing.level_label(mixer)]
    names += [] if memory in OFF else [memory_label(memory)]
    sizes: list[str] = []
    for axis in ("window", "distractor", "reg_mode", *data.extra_axes()):
        level, levels = cell_level(cell, axis), {cell_level(each, axis) for each in alike}
        if len(levels) < 2 or level in (*OFF, "baseline"):
            continue
        is_number = all(level_as_number(each) is not None for each in levels if each not in OFF)
        (sizes if is_number else names).append(drawing.level_label(level, axis))
    return ", ".join(names), ", ".join(sizes)


def _chance_levels(data: SweepData, frame: pd.DataFrame) -> list[float]:
    """Return the distinct chance levels of the cells, as fractions in ascending order."""
    stored = (data.values[cell, PROBE, METRIC, 0].description for cell in frame["cell"])
    levels = {metrics.metric(PROBE, METRIC, description).chance for description in stored}
    return sorted(level for level in levels if level is not None)


def _missing_note(data: SweepData, frame: pd.DataFrame) -> list[str]:
    """Return the note on lines that have an accuracy but no bytes of state, as a list; empty without such a line."""
    cells = _cells_with(data, METRIC)
    missing = sorted({_line_and_size(data, cell, cells)[0] for cell in cells} - set(frame["line"]))
    return [f"Not shown, since their state is not measured: {', '.join(missing)}."] if missing else []


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw accuracy in % over bytes of state (logarithmic): a line per mixer, labelled at its end, and single cells.

    Dashes and fill show the memory, as in every figure.

    The chance level is dotted. Highlighted cells of `look` are labelled.
    """
    frame = figure_data.frame
    means = line_means(frame)
    figure = drawing.page(3.2, 5.6)
    axes = figure.subplots()
    ends: dict[float, list[tuple[str, float, str]]] = {}
    lines = frame.drop_duplicates("line").to_dict("records")
    inks = _inks(lines)
    last_sizes = _last_sizes(frame, means, figure_data.draw_options["sizes"])
    for row in lines:
        name = str(row["line"])
        style = memory_look(inks[name], "off" if row["second"] in OFF else str(row["second"]))
        points = means[means["line"] == name].sort_values("length")
        line = {"linewidth": drawing.line_width(1.3), "markersize": drawing.line_width(4.2)} | style
        axes.plot(points["length"], 100 * points["value"], **line)
        _draw_intervals(axes, points, style["color"])
        cells = frame[frame["line"] == name]
        if len(cells) > len(points):
            dots = {"color": style["color"], "alpha": 0.45, "markersize": 2.2}
            drawing.points(axes, cells["length"], 100 * cells["value"], **dots)
        last = points.iloc[-1]
        ends.setdefault(float(last["length"]), []).append(
            (name + last_sizes.get(name, ""), 100 * float(last["value"]), style["color"])
        )
    for level in figure_data.draw_options["chance"]:
        axes.axhline(100 * level, **reference_line(), zorder=0.9)
    _set_axes(axes, frame)
    furthest = max(ends)
    for length, labels in ends.items():
        if length < furthest and len(labels) == 1:
            # at the left, since other lines may pass at the right
            ((text, height, ink),) = labels
            drawing.note(axes, text, (length, height), (-3, 3), ha="right", va="bottom", color=ink)
        else:
            label_ends(axes, labels, length)
    _label_sizes(axes, frame, means, figure_data.draw_options["sizes"])
    highlighted = named_cells(figure_data, look)
    for row in frame[frame["cell"].isin(highlighted)].to_dict("records"):
        drawing.note(axes, highlighted[row["cell"]], (row["length"], 100 * row["value"]), (4, 3))
    handles = _memory_keys(lines)
    handles |= {INTERVAL: interval_key(is_bar=True)} if means["low"].notna().any() else {}
    if figure_data.draw_options["sizes"]:
        number = min(figure_data.draw_options["sizes"].values(), key=len)
        digit: dict[str, Any] = {
            "marker": f"${number}$",
            "linestyle": "none",
            "color": drawing.INK,
            "markeredgewidth": 0,
        }
        handles[f"{figure_data.draw_options['size_name']} of a point"] = drawing.key(**digit)
    chance = figure_data.draw_options["chance"]
    handles |= {"chance level": drawing.key(**reference_line())} if chance else {}
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles)


def _inks(lines: Sequence[Mapping[Any, Any]]) -> dict[str, str]:
    """Return the ink of each line by its name: that of its mixer, or of FREE_INKS for one with a memory."""
    mixers = mixer_inks(str(row["first"]) for row in lines)
    with_memory = [str(row["line"]) for row in lines if row["second"] not in OFF]
    own = {name: FREE_INKS[index % len(FREE_INKS)] for index, name in enumerate(with_memory)}
    return {str(row["line"]): own.get(str(row["line"]), mixers[str(row["first"])]) for row in lines}


def _memory_keys(lines: Sequence[Mapping[Any, Any]]) -> dict[str, Any]:
    """Return the legend handles of lines with and without a memory, if there are both; names stand at the lines."""
    looks = {"no memory": "off", "with memory": "on"}
    used = {"off" if row["second"] in OFF else "on" for row in lines}
    marks = {"linestyle": "none", "linewidth": drawing.line_width(1.0)}
    return {
        label: drawing.key(**memory_look(drawing.GREY, memory) | marks)
        for label, memory in looks.items()
        if len(used) > 1
    }


def _last_sizes(frame: pd.DataFrame, means: pd.DataFrame, sizes: Mapping[str, str]) -> dict[str, str]:
    """Return " (size)" of the last point of each line by its name; empty where no size stands beside points."""
    texts = {}
    for name, rows in means.groupby("line"):
        last = frame[(frame["line"] == name) & (frame["length"] == rows["length"].max())].iloc[0]
        if size := sizes.get(str(last["cell"]), ""):
            texts[str(name)] = f" ({size})"
    return texts


def _label_sizes(axes: Axes, frame: pd.DataFrame, means: pd.DataFrame, sizes: Mapping[str, str]) -> None:
    """Write the size of each point beside its mark once the layout is final, off all marks, lines and intervals.

    The last point of a line has it at the line's name.

    Args:
        axes: The panel.
        frame: Rows of the cells, with cell, line and length.
        means: Means of the lines, with line, length (bytes) and value (a fraction).
        sizes: Level of the numeric axis by cell; empty for none.
    """
    levels = {(row["line"], row["length"]): sizes.get(str(row["cell"]), "") for row in frame.to_dict("records")}
    rows = means.sort_values(["line", "length"]).to_dict("records")
    points = [(float(row["length"]), 100 * float(row["value"])) for row in rows]
    texts = [(*point, levels[row["line"], row["length"]]) for point, row in zip(points, rows, strict=True)]
    lines = [
        [point for point, row in zip(points, rows, strict=True) if row["line"] == name]
        for name in means["line"].unique()
    ]
    lines += [[(at, 100 * row["low"]), (at, 100 * row["high"])] for (at, _), row in zip(points, rows, strict=True)
              if not math.isnan(row["low"])]  # fmt: skip
    radius = drawing.line_width(2.1)
    ends = means.groupby("line")["length"].max()
    shown = [text for text, row in zip(texts, rows, strict=True) if text[2] and row["length"] < ends[row["line"]]]
    drawing.after_layout(
        axes.figure,  # type: ignore[arg-type]
        lambda: label_rings(axes, shown, points, ring=radius, mark=radius, lines=lines),
    )


def _draw_intervals(axes: Axes, points: pd.DataFrame, colour: str) -> None:
    """Draw the interval of each point of a line that has one, in percent, as a thin vertical bar."""
    barred = points[points["low"].notna()]
    low, high = 100 * barred["low"], 100 * barred["high"]
    axes.vlines(barred["length"], low, high, color=colour, linewidth=drawing.line_width(0.7), alpha=0.6)


def _set_axes(axes: Axes, frame: pd.DataFrame) -> None:
    """Set the logarithmic axis of bytes, with ticks at powers of two, and the axis of shares from 0 to 100 %."""
    low, high = int(frame["length"].min()), int(frame["length"].max())
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.25, high * 1.25)
    powers = [1 << power for power in range(low.bit_length() - 1, high.bit_length() + 1)]
    ticks = drawing.thin_evenly([power for power in powers if low / 1.25 <= power <= high * 1.25] or [low], 7)
    drawing.put_ticks(axes.xaxis, {tick: _bytes_label(tick) for tick in ticks})
    axes.set_xlabel("state per row of the task (bytes, log scale)")
    axes.set_ylabel("associative recall (% of queries)")
    axes.set_ylim(-5, 106)


def _bytes_label(size: int) -> str:
    """Return a number of bytes in the largest unit (B, KB, MB, GB; powers of 1024) that it reaches, such as 64 KB."""
    unit = max(each for each in UNITS if each <= max(size, 1))
    return f"{size / unit:g} {UNITS[unit]}"
