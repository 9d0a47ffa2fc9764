"""Figure `needle`: needle accuracy over context length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ...results.store.store import Store
from ..number_format import NEEDLE, format_number
from ..stats.effects.needle_baseline import constant_answer_score
from ..sweep_data import ReportError, SweepData
from .canvas import drawing
from .canvas.base import (
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
    fewer_cells_note,
    is_barred,
    length_frame,
    length_label,
    line_means,
    single_value,
)
from .canvas.line_drawing import (
    BASELINE,
    HIGHLIGHTED,
    draw_lines_with_means,
    legend,
    line_styles,
    mark_baseline,
    mark_training_length,
    training_key,
)

Y_LIMITS = (-3.0, 103.0)
"""Ends of the y axis in percent."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the needle accuracy (share of right digits, a fraction) over context lengths.

    One row per cell and length: cell, attempt, configuration (levels of every axis, which seeds share), panel (mixer),
    first, second and line (levels of up to two axes that vary), probe, metric, length (tokens), trained (tokens of a
    training row), ratio of the two, value, n, low and high (95% interval of the trials).

    Notes name the constant-digit baseline (the score of the best constant answer on the trials).

    Raises:
        ReportError: No cell has needle accuracies.
    """
    frame = length_frame(data, training_lengths(store, data), *NEEDLE)
    if frame.empty:
        raise ReportError(
            f"no cell of sweep {data.sweep} has needle accuracies; finish it, or evaluate with --probe needle"
        )
    means = line_means(frame)
    axes = axes_of_lines(data)
    ceilings = {length: constant_answer_score(data, length) for length in sorted(set(frame["length"]))}
    measured_ceilings = {length: value for length, value in ceilings.items() if value is not None}
    notes = [
        f"Share of planted digits that a network repeats at the end of a text{_trials_text(frame, data)}. "
        f"{averaging_note(data, means=means)}{band_note(means)}{_ceiling_note(measured_ceilings)}",
    ]
    return collected(
        store, data, "needle", "Needle accuracy over context length", frame, frame_origins(frame),
        notes=[*notes, *fewer_cells_note(means)], trained=single_value(list(frame["trained"])), axes=axes, ceilings=measured_ceilings,
        names=cell_labels(data, without=("attn_type", *axes)),
    )  # fmt: skip


def _trials_text(frame: pd.DataFrame, data: SweepData) -> str:
    """Return ", 16 trials of 5 digits per cell and length" by the recorded counts; "" without any."""
    digits = data.metric(*NEEDLE).trials
    answers = frame["n"].dropna()
    if answers.empty or not digits:
        return ""
    ends = sorted({max(1, round(count / digits)) for count in answers})
    count = str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
    return f", {count} trials of {digits} digits per cell and length"


def _ceiling_note(ceilings: Mapping[int, float]) -> str:
    """Return the note on the constant-digit baseline, in % with its range over lengths; or that it is not recorded.

    Args:
        ceilings: Baseline as a fraction, by length.
    """
    if not ceilings:
        return "The constant-digit baseline is not recorded."
    percentages = sorted({format_number(value, 1, percent=True) for value in ceilings.values()}, key=float)
    ends = f"{percentages[0]} %" if len(percentages) == 1 else f"{percentages[0]} to {percentages[-1]} %"
    return f"Dashed and dotted: constant-digit baseline on these trials, {ends}."


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per mixer with a line per group of cells, in %, and the constant-digit baseline.

    The highlighted cells have labelled lines. Where the baseline differs between lengths, the highest is drawn.
    """
    frame, trained, ceilings = (
        figure_data.frame,
        figure_data.draw_options["trained"],
        figure_data.draw_options["ceilings"],
    )
    names = list(dict.fromkeys(frame["panel"]))
    figure = drawing.page(drawing.PANEL_HEIGHT * drawing.rows_of(len(names)) + 0.2, drawing.width_of(len(names)))
    means, styles = line_means(frame), line_styles(frame, figure_data.draw_options["axes"])
    highlighted, barred = _highlighted_labels(figure_data, look), is_barred(means)
    group = drawing.panels(figure, [drawing.level_label(name) for name in names], sharex=True, sharey=True)
    for axes, name in zip(group, names, strict=True):
        panel_rows, mean = (rows[rows["panel"] == name] for rows in (frame, means))
        draw_lines_with_means(axes, panel_rows, mean, styles, 100, highlighted=highlighted, barred=barred)
        drawing.length_axis(axes, list(frame["length"]), trained, room=0.5)
        mark_training_length(axes, trained)
        axes.set_yticks(range(0, 101, 20 if look.scale >= 0.8 else 25))
        axes.set_ylim(*Y_LIMITS)
    levels = {format_number(value, 1, percent=True): 100 * value for value in ceilings.values()}
    keys: list[tuple[str, Any]] = training_key(trained)
    if levels:
        highest = max(levels, key=float)
        mark_baseline(group, levels[highest])
        keys.append((f"constant digit ({highest} %)", BASELINE))
    if highlighted:
        keys.append(("highlighted cell", HIGHLIGHTED | {"color": drawing.GREY}))
    drawing.outer_labels(figure, length_label(trained), "digits recalled (%)")
    return drawing.finished(figure, figure_data.title, figure_data.notes, legend(styles, *keys, means=means))


def _highlighted_labels(figure_data: FigureData, look: FigureOptions) -> dict[str, str]:
    """Return the labels of the highlighted cells by cell id: name and accuracy, in %, at the cell's own longest length.

    Cells without any accuracy are left out.
    """
    names = figure_data.draw_options["names"]
    ends = figure_data.frame.sort_values("length").drop_duplicates("cell", keep="last").set_index("cell")["value"]
    return {
        cell: f"{names[cell] or 'this cell'}: {format_number(ends[cell], 1, percent=True)} %"
        for cell in look.highlight
        if cell in ends.index
    }
