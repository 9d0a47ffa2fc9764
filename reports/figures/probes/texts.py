"""Figure `texts`: loss by length and by position, and needle accuracy, on each of several long texts."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ....results.metrics import TEXT_SEPARATOR
from ....results.store.store import Store
from ...number_format import format_number
from ...stats.significance.trial_intervals import CONSTANT_ACCURACY
from ...sweep_data import ReportError, SweepData, cell_level
from ..canvas import drawing
from ..canvas.base import (
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
from ..canvas.length_frames import (
    averaging_note,
    band_note,
    coinciding_note,
    is_barred,
    length_frame,
    line_means,
    single_value,
)
from ..canvas.line_drawing import (
    BASELINE,
    draw_lines_with_means,
    legend,
    line_styles,
    lines_of_cells,
    mark_baseline,
    mark_out_of_range,
    mark_training_length,
    named_cells,
    range_of_lines,
    training_key,
)
from .position_nll import position_frame

MEASURES = {
    "clean": ("nats", "loss\n(nats per token)", "context length (tokens)"),
    "position_nll": ("nats", "loss\n(nats per token)", "position (tokens)"),
    "needle": ("digit_accuracy", "needle accuracy\n(% of digits)", "context length (tokens)"),
}
"""Probe -> (metric, labels of the y and x axis of its panels)."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the losses (nats per token) and needle accuracies (fractions) on further texts.

    One row per cell, text, probe and length: cell, attempt, configuration, panel (the text), first, second and line (the
    mixer and one axis that varies), probe (such as `clean:code`), metric, length (tokens; of losses by position the
    middle of the positions), trained (tokens of a training row), value, n, low and high.

    Raises:
        ReportError: No cell has been measured on further texts.
    """
    trained = training_lengths(store, data)
    parts, names = [], sorted({name for _, name, _, _ in data.values if TEXT_SEPARATOR in name})
    for probe, (metric, *_) in MEASURES.items():
        for name in names:
            if name.partition(TEXT_SEPARATOR)[0] != probe:
                continue
            is_by_position = probe == "position_nll"
            part = (
                position_frame(store, data, trained, name)
                if is_by_position
                else length_frame(data, trained, name, metric)
            )
            parts.append(part)
    measured = [part for part in parts if not part.empty]
    if not measured:
        raise ReportError(
            f"no cell of sweep {data.sweep} has numbers on further texts; name some in eval.texts and launch again"
        )
    axes = ("attn_type", *axes_of_lines(data)[:1])
    frame = pd.concat(measured, ignore_index=True)
    levels = {cell.cell_id: [cell_level(cell, axis) for axis in axes] for cell in data.cells}
    frame = frame.assign(
        panel=[name.partition(TEXT_SEPARATOR)[2] for name in frame["probe"]],
        first=[levels[cell][0] for cell in frame["cell"]],
        second=[[*levels[cell], ""][1] for cell in frame["cell"]],
        line=[", ".join(levels[cell]) for cell in frame["cell"]],
    )
    means = line_means(frame)
    constant = _constant_digit_scores(data)
    rows = {"clean": "mean over the first tokens of documents", "position_nll": "by position in the longest documents"}
    rows |= {"needle": "needle accuracy, by context length"}
    named = [
        rows[probe]
        for probe in MEASURES
        if any(name.startswith(probe + TEXT_SEPARATOR) for name in set(frame["probe"]))
    ]
    notes = [
        f"A column per text; rows from the top: {'; '.join(named)}. {averaging_note(data, axes, means=means)}"
        f"{band_note(means)}Full attention. Axes of loss begin at other values, but a row spans as many nats in all columns."
    ]
    titled = [
        f"{text}, {name.partition(TEXT_SEPARATOR)[0].replace('_nll', '')}"
        for text, name in zip(means["panel"], means["probe"], strict=True)
    ]
    notes += coinciding_note(means.assign(panel=titled), axes, "points")
    if constant:
        shares = " to ".join(sorted({format_number(share, 1, percent=True) for share in constant.values()}, key=float))
        notes.append(f"Dashed and dotted: constant-digit baseline on these trials, {shares} %.")
    return collected(
        store, data, "texts", "Loss and needle accuracy on further texts", frame, frame_origins(frame), notes=notes,
        trained=single_value(list(frame["trained"])), axes=axes, names=cell_labels(data, without=axes),
        constant=constant,
    )  # fmt: skip


def _constant_digit_scores(data: SweepData) -> dict[str, float]:
    """Return the share of the needle's digits that the best constant digit gets right, by text; the largest over lengths."""
    scores: dict[str, float] = {}
    for (_, name, metric, _), value in data.values.items():
        probe, _, text = name.partition(TEXT_SEPARATOR)
        if (probe, metric) == CONSTANT_ACCURACY and text and value.value is not None:
            scores[text] = max(scores.get(text, 0.0), value.value)
    return scores


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a row of panels per measure and a column per text, with a line per mixer; the training length is marked."""
    frame, trained = figure_data.frame, figure_data.draw_options["trained"]
    texts = list(dict.fromkeys(frame["panel"]))
    measures = [
        probe for probe in MEASURES if any(name.startswith(probe + TEXT_SEPARATOR) for name in set(frame["probe"]))
    ]
    order = [(probe, text) for probe in measures for text in texts]
    figure = drawing.page(drawing.PANEL_HEIGHT * len(measures) + 0.35, drawing.width_of(len(texts)))
    columns = drawing.columns_of(figure, len(texts))
    if columns < len(texts):
        # a row would mix panels of several measures: each text gets a row
        order = [(probe, text) for text in texts for probe in measures]
        columns = len(measures)
    constant = figure_data.draw_options["constant"]
    group = drawing.panels(figure, [text for _, text in order], columns=columns)
    means, styles = line_means(frame), line_styles(frame, figure_data.draw_options["axes"])
    highlighted = named_cells(figure_data, look)
    rows_of_measures = columns == len(texts) and len(texts) > 1
    spans: dict[str, list[Axes]] = {}
    for index, (axes, (probe, text)) in enumerate(zip(group, order, strict=True)):
        rows, mean = (part[part["probe"] == f"{probe}{TEXT_SEPARATOR}{text}"] for part in (frame, means))
        is_share = probe == "needle"
        scale = 100.0 if is_share else 1.0
        draw_lines_with_means(axes, rows, mean, styles, scale, highlighted=highlighted, barred=is_barred(means))
        _set_scales(axes, rows, mean, trained, is_share=is_share)
        spans.setdefault(probe, []).append(axes)
        if not is_share:
            mark_out_of_range(axes, lines_of_cells(rows, mean), 1)
        elif text in constant:
            mark_baseline([axes], 100 * constant[text])
        if not (rows_of_measures and index % columns):
            axes.set_ylabel(MEASURES[probe][1])
        if not rows_of_measures or index % columns == columns // 2:
            axes.set_xlabel(MEASURES[probe][2])
    for group_of_measure in spans.values():
        _equal_spans(group_of_measure)
    more = [
        *training_key(trained),
        *(
            [(f"constant digit ({format_number(max(constant.values()), 1, percent=True)} %)", BASELINE)]
            if constant and "needle" in measures
            else []
        ),
    ]
    return drawing.finished(figure, figure_data.title, figure_data.notes, legend(styles, *more, means=means))


def _equal_spans(group: Sequence[Axes]) -> None:
    """Give all panels of a measure y axes of the same length in data, so that their slopes can be compared."""
    limits = [axes.get_ylim() for axes in group]
    span = max(high - low for low, high in limits)
    for axes, (low, high) in zip(group, limits, strict=True):
        room = (span - (high - low)) / 2
        axes.set_ylim(low - room, high + room)


def _set_scales(axes: Axes, rows: pd.DataFrame, means: pd.DataFrame, trained: int | None, *, is_share: bool) -> None:
    """Set both scales of a panel and mark the training length.

    Args:
        axes: The panel.
        rows: Rows of its measure and text.
        means: Their means.
        trained: Training length in tokens; None: it is not marked.
        is_share: Whether values are shares, which are drawn in percent.
    """
    first = float(rows["length"].min())
    # losses by position stand in the middle of their positions, which end at `stop`
    end = int(rows["stop"].max()) if "stop" in rows and rows["stop"].notna().any() else int(rows["length"].max())
    drawing.length_axis(axes, [end // 2**power for power in range(32) if end // 2**power >= first] or [end])
    axes.set_xlim(first / 2**0.3, end * 2**0.3)
    if is_share:
        axes.set_ylim(-3, 103)
    else:
        axes.set_ylim(*range_of_lines(rows, means))
    mark_training_length(axes, trained)
