"""Figure `length`.

Clean and junk loss over context length, and the loss of the same last tokens if the grid requests it.
"""

from __future__ import annotations

import pandas as pd

from ...results.store.store import Store
from ..sweep_data import ReportError, SweepData
from .canvas import drawing
from .canvas.base import (
    Axes,
    Figure,
    FigureData,
    FigureOptions,
    axes_of_lines,
    cell_labels,
    collected,
    frame_origins,
    training_lengths,
)
from .canvas.length_frames import (
    averaging_note,
    band_note,
    coinciding_lines,
    coinciding_note,
    fewer_cells_note,
    is_barred,
    length_frame,
    length_label,
    line_means,
    single_value,
)
from .canvas.line_drawing import (
    draw_lines_with_means,
    label_line_ends,
    legend,
    line_styles,
    lines_of_cells,
    mark_out_of_range,
    mark_training_length,
    named_cells,
    range_of_lines,
    training_key,
)

PROBES = ("clean", "junk", "same_tail")
PROBE_LABELS = {"same_tail": "same last tokens"}


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the losses (nats per token) over context lengths.

    One row per probe (clean, junk, same_tail; metric nats), cell and length: cell, attempt, configuration (levels of
    every axis, which seeds share), panel (mixer), first, second and line (levels of up to two axes that vary), probe,
    metric, length (tokens), trained (tokens of a training row), ratio of the two, value, n, low and high (95% interval
    of the trials, NaN for a loss). `same_tail` is there only if the sweep shows that probe.

    Raises:
        ReportError: No cell has such losses.
    """
    trained = training_lengths(store, data)
    parts = [length_frame(data, trained, probe, "nats") for probe in PROBES[:2]]
    parts += [length_frame(data, trained, probe, "nats") for probe in PROBES[2:] if data.is_shown(probe)]
    measured = [part for part in parts if not part.empty]
    if not measured:
        raise ReportError(
            f"no cell of sweep {data.sweep} has losses over lengths; finish it, or evaluate with --probe clean --probe junk"
        )
    frame = pd.concat(measured, ignore_index=True)
    means = line_means(frame)
    note_text = (
        f"{averaging_note(data, means=means)}{band_note(means)}Clean: the first tokens of the same documents, more at a longer "
        f"length{_count_text(store, data, 'documents', 'documents')}. Junk: the "
        f"validation stream across document boundaries{_count_text(store, data, 'junk_rows', 'rows')}."
    )
    if frame["probe"].nunique() > 1:
        note_text += " Their scales differ."
    if (frame["probe"] == PROBES[2]).any():
        note_text += " Same last tokens: the value of additional context, since the scored tokens stay the same."
    panels = [
        f"{drawing.level_label(mixer)}, {PROBE_LABELS.get(probe, probe)}"
        for mixer, probe in zip(means["panel"], means["probe"], strict=True)
    ]
    coinciding = coinciding_note(means.assign(panel=panels), axes_of_lines(data), "lengths")
    notes = [note_text, *coinciding, *fewer_cells_note(means)]
    beyond = {
        str(probe): int((lines_of_cells(part, means).groupby("cell")["value"].max() > y_limits(part, means)[1]).sum())
        for probe, part in frame.groupby("probe", sort=False)
    }
    if any(beyond.values()):
        counts = ", ".join(f"{count} of {PROBE_LABELS.get(probe, probe)}" for probe, count in beyond.items() if count)
        notes.append(f"Lines that leave the axes ({counts}): arrows give their highest values.")
    axes = axes_of_lines(data)
    return collected(
        store, data, "length", "Loss over context length", frame, frame_origins(frame), notes=notes,
        trained=single_value(list(frame["trained"])), axes=axes, names=cell_labels(data, without=("attn_type", *axes)),
    )  # fmt: skip


def _count_text(store: Store, data: SweepData, setting: str, noun: str) -> str:
    """Return ", n = 16 documents" by a setting of the evaluation that all cells share; "" if it is not recorded.

    Args:
        store: The database.
        data: The sweep.
        setting: Name of the setting within `eval`.
        noun: Name of what it counts, in the plural.
    """
    configs = store.configs({cell.cell_id for cell in data.cells}).values()
    counts = {(config.get("eval") or {}).get(setting) for config in configs}
    return f", n = {counts.pop()} {noun}" if len(counts) == 1 and None not in counts else ""


def y_limits(part: pd.DataFrame, means: pd.DataFrame) -> tuple[float, float]:
    """Return the (low, high) limits of the panels of one probe; outliers among its cells do not flatten the rest.

    Args:
        part: Rows of one probe.
        means: Means of all lines, of which those of the probe count.
    """
    probe_means = means[means["probe"] == part["probe"].iloc[0]]
    return range_of_lines(part, probe_means)


LEAST_ROW = 0.65
"""Least height of a row, as a share of the usual one, where each mixer has a row."""


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a row of panels per probe: a panel per mixer, a line per group of cells.

    On a narrow page, or with more than three mixers, each mixer has a row and each probe a column. Highlighted cells of
    `look` are labelled.
    """
    frame, trained = figure_data.frame, figure_data.draw_options["trained"]
    names, probes = list(dict.fromkeys(frame["panel"])), list(dict.fromkeys(frame["probe"]))
    figure = drawing.page(drawing.PANEL_HEIGHT * len(probes) + 0.35, drawing.width_of(len(names)))
    probe_labels = [PROBE_LABELS.get(probe, probe) for probe in probes]
    titles = [f"{drawing.level_label(name)}, {probe}" for probe in probe_labels for name in names]
    columns = drawing.columns_of(figure, len(names))
    if columns < len(names):
        # a row would mix panels of both probes: each mixer gets a row, each probe a column
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, max(height, height * LEAST_ROW * len(names) / len(probes)))
        titles = [f"{drawing.level_label(name)}, {probe}" for name in names for probe in probe_labels]
    order = [(name, probe) for probe in probes for name in names]
    if columns < len(names):
        order = [(name, probe) for name in names for probe in probes]
    group = drawing.panels(figure, titles, columns=columns if columns == len(names) else len(probes), sharex=True)
    means, styles = line_means(frame), line_styles(frame, figure_data.draw_options["axes"])
    highlighted = named_cells(figure_data, look)
    for axes, (name, probe) in zip(group, order, strict=True):
        part = frame[frame["probe"] == probe]
        panel_rows, mean = (rows[(rows["panel"] == name) & (rows["probe"] == probe)] for rows in (frame, means))
        draw_lines_with_means(axes, panel_rows, mean, styles, 1, highlighted=highlighted, barred=is_barred(means))
        drawing.length_axis(axes, list(frame["length"]), trained, room=0.5)
        axes.set_ylim(*y_limits(part, means))
        mark_training_length(axes, trained)
        mark_out_of_range(axes, lines_of_cells(panel_rows, mean), 1)
        _label_coinciding(axes, mean)
    drawing.outer_labels(figure, length_label(trained), "loss (nats per token)")
    return drawing.finished(
        figure, figure_data.title, figure_data.notes, legend(styles, *training_key(trained), means=means)
    )


def _label_coinciding(axes: Axes, means: pd.DataFrame) -> None:
    """Write "2 lines" near the end of a line that hides another one at all lengths (`coinciding_lines`).

    Args:
        axes: The panel.
        means: Rows of `line_means` of the panel.
    """
    ends = []
    for _, above, hidden, total in coinciding_lines(means) if len(means) else ():
        if len(hidden) == total:
            line = means[means["line"] == above].sort_values("length")
            ends.append((float(line["length"].iloc[-1]), float(line["value"].iloc[-1]), "2 lines"))
    label_line_ends(axes, ends)
