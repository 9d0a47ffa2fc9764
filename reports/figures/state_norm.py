"""Figure `state-norm`: norm of the memory's state over context length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from ...results.paper import is_published
from ...results.store.store import Store
from ..number_format import format_length
from ..stats.untrained_formulas import GAMMA_OFFSET, GATE_SPREAD, HEAD_SIZE, state_norms
from ..sweep_data import ReportError, SweepData
from .canvas import drawing
from .canvas.base import Axes, Figure, FigureData, FigureOptions, collected, frame_origins, training_lengths
from .canvas.labels import label_ends
from .canvas.length_frames import count_fewer, fewer_cells_note, length_frame, length_label, single_value
from .canvas.line_drawing import reference_line
from .canvas.scales import tick_label

NORMS = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")
NORM_LABELS = {
    "delta_norm": "delta-rule memory",
    "hebbian_norm": "Hebbian writes",
    "delta_norm_kept": "delta-rule memory, γ = 1",
    "hebbian_norm_kept": "Hebbian writes, γ = 1",
}
GUIDES = {"∝ N": 1.0, "∝ √N": 0.5}
"""Growth of a state that forgets nothing, as powers of the length: repeated writes, and independent writes."""
COINCIDING = 0.03  # share by which norms may differ from a guide that they follow
SHORTEST, LONGEST = 64, 65536  # tokens, range of the norms before training
STEPS_PER_OCTAVE = 4  # lengths of the norms before training
START = "before training"
NORM_STYLES: dict[str, dict[str, Any]] = {
    "delta": {"color": drawing.INK, "marker": drawing.MARKERS[2]},
    "hebbian": {"color": drawing.GREY, "marker": drawing.MARKERS[3]},
}
"""Look by writes; lines without decay are thin, since hue, dash and fill are those of mixers and their memory."""
THICK, THIN = 1.3, 0.7  # points in the style `paper`, widths of lines with and without decay
INITIAL_GATES = ", γ ≈ 0.98"
"""Retention of the gates before training, as the labels of lines with decay have it."""
MIN_ALTERNATING = 5  # points of a line from which on every second one has a mark
LEAST_RANGE = 4.0  # least ratio of the ends of the y axis, which gives three ticks in steps of two


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the norm of the memory's state over context lengths.

    One row per metric (delta_norm, hebbian_norm, delta_norm_kept, hebbian_norm_kept; kept: nothing decays), cell and
    length: cell, attempt, configuration (levels of every axis, which seeds share), panel (mixer), first, second and
    line (levels of up to two axes that vary), probe, metric, length (tokens), trained (tokens of a training row), ratio
    of the two, value, n, low and high (NaN). With several memories the panel is "mixer, memory". For a published sweep,
    whose weights are not available, it has the norms before training (`_initial_norms`).

    Raises:
        ReportError: No cell has such norms, and the sweep is not a published one with memory.
    """
    trained = training_lengths(store, data)
    parts = [length_frame(data, trained, "state_norm", metric) for metric in NORMS]
    measured = [part for part in parts if not part.empty]
    if measured:
        return _measured_figure(store, data, pd.concat(measured, ignore_index=True))
    remembering = [cell for cell in data.cells if cell.levels["memory"] == "on"]
    if not is_published(data.sweep) or not remembering:
        raise ReportError(
            f"no cell of sweep {data.sweep} has norms of its memory state; evaluate cells with memory: --probe "
            "state_norm"
        )
    note_text = (
        f"Size of the recurrent state of one head of size {HEAD_SIZE} after reading N tokens, by the formulas of the "
        f"delta-rule memory, for independent keys of norm 1, independent values of norm √{HEAD_SIZE}, and gates as initialized "
        f"in the published networks: sigmoids of logits {GAMMA_OFFSET:g} ± {GATE_SPREAD:.2f} (decay γ, about 0.98) and 0 ± "
        f"{GATE_SPREAD:.2f} (write strength β, about 0.5). The trained weights are not "
        "available. Delta rule: a write replaces what its key had stored. Hebbian: without erasing. γ = 1, thin: no "
        f"decay. Behind names: norm at {format_length(LONGEST)}. "
    )
    frame = _initial_norms(min(trained.values(), default=2048))
    origins = [(cell.cell_id, None) for cell in remembering]
    title = "Norm of the memory state before training"
    return collected(
        store,
        data,
        "state-norm",
        title,
        frame,
        origins,
        notes=[note_text + GUIDE_NOTE, *_coinciding_note(frame)],
        has_glossary=False,
        trained=None,
    )


GUIDE_NOTE = "Dotted: growth as N for a repeated write and as √N for independent writes, from the first value at γ = 1."


def _coinciding_note(frame: pd.DataFrame) -> list[str]:
    """Return the note on a guide that Hebbian writes without decay follow within 3 % in every panel, as a list."""
    free = norm_means(frame[frame["metric"] == NORMS[-1]]).sort_values("length", kind="stable")
    if free.empty or free["length"].nunique() < 2:
        return []
    for label, power in GUIDES.items():
        if all(_follows(rows, power) for _, rows in free.groupby("panel", sort=False)):
            return [f"{label.removeprefix('∝ ')} has no dotted line, since {NORM_LABELS[NORMS[-1]]} follow it."]
    return []


def _follows(means: pd.DataFrame, power: float) -> bool:
    """Return True if norms of one panel grow as this power of the length within 3 %, over two or more lengths.

    Args:
        means: Rows with length and value.
        power: The power.
    """
    ordered = means.sort_values("length", kind="stable")
    length, value = (ordered[name].to_numpy(dtype=float) for name in ("length", "value"))
    if len(value) < 2 or value[0] <= 0:
        return False
    guide = value[0] * (length / length[0]) ** power
    return bool((np.abs(value / guide - 1) < COINCIDING).all())


def _measured_figure(store: Store, data: SweepData, frame: pd.DataFrame) -> FigureData:
    """Return the figure of measured norms, with a panel per mixer, and per memory if there are several.

    In the latter case the column panel of `frame` is changed in place.
    """
    note_text = (
        "Mean Frobenius norm of the recurrent state over documents, layers, heads and cells. Hebbian: the memory's keys, values "
        "and gates, written without erasing. γ = 1, thin lines: no decay. "
    )
    memory = {cell.cell_id: cell.levels["memory"] for cell in data.cells}
    if len({memory[cell] for cell in frame["cell"]} - {"off"}) > 1:
        # states of different memories must not be averaged
        cells = zip(frame["panel"], frame["cell"], strict=True)
        frame["panel"] = [
            f"{drawing.level_label(mixer)}, {drawing.memory_label(memory[cell])}" for mixer, cell in cells
        ]
    notes = [note_text + GUIDE_NOTE, *_coinciding_note(frame), *fewer_cells_note(norm_means(frame))]
    return collected(
        store, data, "state-norm", "Norm of the memory state over context length", frame, frame_origins(frame), notes=notes,
        trained=single_value(list(frame["trained"])),
    )  # fmt: skip


def _initial_norms(trained: int) -> pd.DataFrame:
    """Return the norms before training by the formulas of the memory, one row per metric and length, without cells.

    Columns: cell and attempt (None), panel ("before training"), probe, metric, length (64 to 65536, four per octave),
    trained, ratio (length / trained) and value.

    Args:
        trained: Tokens of a training row.
    """
    first, last = SHORTEST.bit_length() - 1, LONGEST.bit_length() - 1
    lengths = [round(2 ** (first + step / STEPS_PER_OCTAVE)) for step in range(STEPS_PER_OCTAVE * (last - first) + 1)]
    rows: list[dict[str, Any]] = []
    for metric in NORMS:
        norms = state_norms(lengths, erases=metric.startswith("delta"), keeps=metric.endswith("_kept"))
        fields = {"cell": None, "attempt": None, "panel": START, "probe": "state_norm", "metric": metric}
        rows += [
            fields | {"length": length, "trained": trained, "ratio": length / trained, "value": value}
            for length, value in zip(lengths, norms.tolist(), strict=True)
        ]
    return pd.DataFrame(rows)


def norm_means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean norms: one row per panel, metric and length.

    Columns: panel, metric, length, value (mean over cells), cells (their number, also if they have no id), and of
    (distinct cells with any length).
    """
    cell_counts = frame.groupby(["panel", "metric"])["cell"].nunique().reset_index(name="of")
    grouped = frame.groupby(["panel", "metric", "length"], sort=False)
    means = grouped.agg(value=("value", "mean"), cells=("cell", "size")).reset_index()
    return means.merge(cell_counts, on=["panel", "metric"], how="left")


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per mixer on logarithmic scales, with guides of the growth as N and as √N.

    Lines are delta and Hebbian writes, with trained retention and without decay. `look` is not used.
    """
    frame, trained = figure_data.frame, figure_data.draw_options["trained"]
    means = norm_means(frame)
    names = list(dict.fromkeys(frame["panel"]))
    single = len(names) == 1
    figure = drawing.page(
        2.2 * drawing.rows_of(len(names)) + 0.35, drawing.width_of(len(names)) if len(names) > 1 else 4.6
    )
    titles = ["" if single else drawing.level_label(name) for name in names]
    handles: dict[str, Any] = {}
    grid = drawing.panels(figure, titles, sharex=True, sharey=True)
    for axes, name in zip(grid, names, strict=True):
        _draw_lines(axes, frame[frame["panel"] == name], means[means["panel"] == name], handles)
        drawing.length_axis(
            axes, [length for length in frame["length"] if names != [START] or length.bit_count() == 1], trained
        )
        _set_y_axis(axes, frame["value"])
    for axes, name in zip(grid, names, strict=True):
        _draw_guides(axes, means[means["panel"] == name])
    drawing.outer_labels(figure, length_label(trained), "Frobenius norm of the state")
    if single:
        last = means[means["length"] == means["length"].max()].set_index("metric")["value"]
        if set(last.index) == set(means["metric"]):
            gates = INITIAL_GATES if names == [START] else ""
            texts = {name: NORM_LABELS[name] + ("" if name.endswith("_kept") else gates) for name in last.index}
            label_ends(
                grid[0],
                [
                    (f"{texts[name]}: {value:,.{0 if value >= 100 else 1}f}", value, handles[name].get_color())
                    for name, value in last.items()
                ],
                size="small" if figure.get_figwidth() < drawing.NARROW_WIDTH else "legend.fontsize",
            )
            handles = {}
    ordered = {NORM_LABELS[metric]: handles[metric] for metric in NORMS if metric in handles}
    return drawing.finished(figure, figure_data.title, figure_data.notes, ordered)


def _draw_lines(axes: Axes, panel_rows: pd.DataFrame, means: pd.DataFrame, handles: dict[str, Any]) -> None:
    """Draw the mean of every metric over thin lines of single cells.

    Args:
        axes: The panel.
        panel_rows: Rows of the panel.
        means: Rows of `norm_means` of the panel.
        handles: Legend handles by metric, to which those of this panel are added.
    """
    for index, metric in enumerate(NORMS):
        part = panel_rows[panel_rows["metric"] == metric]
        style = NORM_STYLES[metric.partition("_")[0]]
        style = style | {"linewidth": drawing.line_width(THIN if metric.endswith("_kept") else THICK)}
        if part["cell"].nunique() > 1:
            faint: dict[str, Any] = {"color": style["color"], "linewidth": drawing.line_width(0.5), "alpha": 0.35}
            for _, cell in part.groupby("cell", sort=False):
                axes.plot(cell["length"], cell["value"], **faint)
        mean = means[means["metric"] == metric].sort_values("length")
        if len(mean):
            step = STEPS_PER_OCTAVE if mean["cells"].max() and panel_rows["cell"].isna().all() else 1
            # marks alternate, since lines with equal gates may nearly coincide
            every: dict[str, Any] = {"markevery": (index % 2 * step, 2 * step)} if len(mean) >= MIN_ALTERNATING else {}
            (handles[metric],) = axes.plot(mean["length"], mean["value"], zorder=3, **style, **every)
            count_fewer(axes, mean, style["color"])


def _set_y_axis(axes: Axes, values: pd.Series) -> None:
    """Make the y axis logarithmic to base 2, over all values with a margin and at least a factor of four.

    Without positive values nothing is done.
    """
    from matplotlib.ticker import FuncFormatter

    above = values[values > 0]
    if above.empty:
        # a logarithmic axis cannot show zeros
        return
    low, high = float(above.min()), float(above.max())
    wider = max(1.0, math.sqrt(LEAST_RANGE * high / low) / (high / low)) if high / low < LEAST_RANGE else 1.0
    axes.set_yscale("log", base=2)
    axes.set_ylim(low / wider / 1.7, high * wider * 1.3)
    drawing.log_ticks(axes.yaxis, 6, (1,), base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))


def _draw_guides(axes: Axes, means: pd.DataFrame) -> None:
    """Draw dotted grey labelled lines that grow as N and as its root, from the first mean without decay and erasing.

    Where that is missing they start at the first of all means. With a single length or a start at 0 nothing is drawn.
    The y limits stay.

    Args:
        axes: The panel, with its scales and limits.
        means: Rows of `norm_means` of the panel.
    """
    hebbian_without_decay = means[means["metric"] == NORMS[-1]]
    lengths = np.sort(means["length"].unique().astype(float))
    start = (hebbian_without_decay if len(hebbian_without_decay) else means).sort_values("length").iloc[0]
    if len(lengths) < 2 or start["value"] <= 0:
        return
    low, high = axes.get_ylim()
    for label, power in GUIDES.items():
        x = np.geomspace(start["length"], lengths[-1], 100)
        y = start["value"] * (x / start["length"]) ** power
        visible = y <= high
        if not _follows(hebbian_without_decay, power):
            look = reference_line() | {"color": drawing.INK}
            axes.plot(x[visible], y[visible], **look, zorder=3.5, label=f"_guide {label}")
        # the label of the steeper line is above its end, that of the other below its middle
        steep = power == max(GUIDES.values())
        index = int(np.flatnonzero(visible)[-1]) if steep else len(x) // 2
        offset = (-4, 2) if visible.all() else (6, -2)
        style: dict[str, Any] = {
            "ha": "right" if steep and visible.all() else "left",
            "va": "bottom" if steep and visible.all() else "top",
        }
        style |= {
            "bbox": drawing.BACKING | {"alpha": 1.0},
            "color": drawing.INK,
            "fontsize": drawing.size("legend.fontsize"),
        }
        drawing.note(axes, label, (x[index], y[index]), offset if steep else (4, -4), **style)
    axes.set_ylim(low, high)
