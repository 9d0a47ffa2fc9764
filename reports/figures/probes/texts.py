"""Figure `texts`: loss by length and by position, and needle accuracy, on a long text, and at its end on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ....results.metrics import TEXT_SEPARATOR
from ....results.store.store import Store
from ...number_format import format_length, format_number
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
    has_band,
    is_barred,
    length_frame,
    line_means,
    single_value,
)
from ..canvas.line_drawing import (
    BASELINE,
    INTERVAL,
    LineStyles,
    draw_lines_with_means,
    interval_key,
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
HALF = 50.0
"""Percent up to which shares at the end of every text have an axis of half the length."""
GAINS = "loss − mean of lines\n(nats per token)"
"""Label of the x axis of losses at the end of every text."""
SPREAD = 0.7
"""Height over which the lines of a text are spread, in distances between two texts."""


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
    texts = list(dict.fromkeys(frame["panel"]))
    first = means[means["panel"] == texts[0]]
    parts_of_page = (
        f"Left: {texts[0]}; right: every text (named by its file) at its longest length or last position. "
        if len(texts) > 1
        else ""
    )
    notes = [
        f"{parts_of_page}{_difference_note(means, axes)}{averaging_note(data, axes, means=means)}{_interval_note(means)}"
        f"{_sample_note(frame)}Full attention."
    ]
    titled = [name.partition(TEXT_SEPARATOR)[0].replace("_nll", "") for name in first["probe"]]
    notes += coinciding_note(first.assign(panel=titled), axes, "points")
    if constant:
        shares = " to ".join(sorted({format_number(share, 1, percent=True) for share in constant.values()}, key=float))
        notes.append(f"Constant-digit baseline: {shares} %.")
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


def _measures(frame: pd.DataFrame) -> list[str]:
    """Return the measures of MEASURES that the rows have, in that order."""
    probes = {name.partition(TEXT_SEPARATOR)[0] for name in frame["probe"]}
    return [probe for probe in MEASURES if probe in probes]


def _is_by_position(means: pd.DataFrame) -> pd.Series:
    """Return for each row of `line_means` whether it is a loss by position."""
    return means["probe"].str.startswith("position_nll")


def _by_length(means: pd.DataFrame) -> pd.DataFrame:
    """Return the means by context length; those by position if there are no others."""
    by_length = means[~_is_by_position(means)]
    return means if by_length.empty else by_length


def _interval_note(means: pd.DataFrame) -> str:
    """Return the sentences on the intervals, which are bands for losses by position; with a space at their end."""
    note = band_note(_by_length(means))
    by_position = _is_by_position(means)
    is_mixed = note.startswith("Bars:") and bool((has_band(means) & by_position).any()) and not by_position.all()
    return note.replace("Bars:", "Bars, by position bands:", 1) if is_mixed else note


def _difference_note(means: pd.DataFrame, axes: Sequence[str]) -> str:
    """Return the sentences on losses at the right, with a space at their end; "" for a single text or without losses.

    They name a line that is alone on its side of the mean on every text, since it moves the mean by itself.
    """
    losses = [
        probe for probe in ("clean", "position_nll") if means["probe"].str.startswith(probe + TEXT_SEPARATOR).any()
    ]
    if means["panel"].nunique() < 2 or not losses:
        return ""
    alone: set[tuple[str, str]] = set()
    for probe in losses:
        for _, ends in _ends(means, probe).groupby("panel"):
            sides = ends["value"] > ends["value"].mean()
            singles = [side for side in (True, False) if (sides == side).sum() == 1 and len(ends) > 2]
            alone.add(
                (_line_label(ends[sides == singles[0]], axes), "up" if singles[0] else "down") if singles else ("", "")
            )
    pulled = ""
    if len(alone) == 1 and ("", "") not in alone:
        ((name, way),) = alone
        pulled = f", which {name} alone pulls {way}"
    return (
        f"Losses at the right: minus the mean of the lines (upright line at 0){pulled}; its error is not in the bars. "
    )


def _line_label(rows: pd.DataFrame, axes: Sequence[str]) -> str:
    """Return the levels of the first row's line in brackets, such as "(RoPE, no memory)"."""
    first = rows.iloc[0]
    levels = [drawing.level_label(first[column], axis) for axis, column in zip(axes, ("first", "second"), strict=False)]
    return f"({', '.join(levels)})"


def _sample_note(frame: pd.DataFrame) -> str:
    """Return the sentence on how many documents and digits a run's values come from, with a space at its end."""
    counts = []
    for probe, unit in (("clean", "documents by length"), ("position_nll", "by position"), ("needle", "digits")):  # fmt: skip
        rows = frame[frame["probe"].str.startswith(probe + TEXT_SEPARATOR)]
        numbers = rows["n"] // rows["length"] if probe == "clean" else rows["n"]
        if len(rows) and numbers.min() > 0:
            counts.append(f"{_range_text(numbers)} {unit}")
    return f"A run's value: {', '.join(counts)}. " if counts else ""


def _range_text(numbers: pd.Series) -> str:
    """Return the least and the largest of positive numbers as text, such as "6" or "6 to 8"."""
    return " to ".join(f"{number:,}" for number in sorted({int(numbers.min()), int(numbers.max())}))


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a row per measure: lines over lengths on the first text, and a mark per line at the end of every text."""
    frame, trained = figure_data.frame, figure_data.draw_options["trained"]
    texts, measures = list(dict.fromkeys(frame["panel"])), _measures(frame)
    means, styles = line_means(frame), line_styles(frame, figure_data.draw_options["axes"])
    constant = figure_data.draw_options["constant"]
    has_ends = len(texts) > 1
    figure = drawing.page(drawing.PANEL_HEIGHT * (len(measures) if has_ends else 1) + 0.35,
                          drawing.width_of(2 if has_ends else len(measures), 3.6 if has_ends else 2.6))  # fmt: skip
    columns = 2 if has_ends else drawing.columns_of(figure, len(measures))
    if not has_ends:
        figure.set_figheight(figure.get_figheight() * drawing.rows_of(len(measures), columns))
    titles = [title for probe in measures for title in (texts[0], _end_title(means, probe))[: 1 + has_ends]]
    group = drawing.panels(figure, titles, columns=columns)
    barred = is_barred(_by_length(means))
    highlighted = named_cells(figure_data, look)
    for probe, axes in zip(measures, group[:: 1 + has_ends], strict=True):
        rows, mean = (part[part["probe"] == f"{probe}{TEXT_SEPARATOR}{texts[0]}"] for part in (frame, means))
        is_share = probe == "needle"
        draw_lines_with_means(axes, rows, mean, styles, 100.0 if is_share else 1.0, highlighted=highlighted,
                              barred=barred and probe != "position_nll")  # fmt: skip
        _set_scales(axes, rows, mean, trained, is_share=is_share)
        if not is_share:
            mark_out_of_range(axes, lines_of_cells(rows, mean), 1)
        elif texts[0] in constant:
            mark_baseline([axes], 100 * constant[texts[0]])
        axes.set_ylabel(MEASURES[probe][1])
        axes.set_xlabel(MEASURES[probe][2])
    for probe, axes in zip(measures, group[1::2] if has_ends else (), strict=False):
        _draw_ends(axes, means, probe, texts, styles, constant)
    more = training_key(trained)
    if constant and "needle" in measures:
        more.append((f"constant digit ({format_number(max(constant.values()), 1, percent=True)} %)", BASELINE))
    return drawing.finished(figure, figure_data.title, figure_data.notes, _keys(styles, more, means))


def _keys(styles: LineStyles, more: Sequence[tuple[str, Any]], means: pd.DataFrame) -> dict[str, Any]:
    """Return the legend handles, with one of the intervals: bars, bands by position, or both side by side."""
    keys = legend(styles, *more, means=_by_length(means))
    bands = means[_is_by_position(means)]
    if not has_band(means).any():
        return keys
    bar, band = interval_key(is_bar=True), interval_key(is_bar=False)
    return keys | {INTERVAL: (bar, band) if has_band(bands).any() else bar}


def _baseline() -> dict[str, Any]:
    """Return the style of the constant-digit baseline at the present line width."""
    return {"color": BASELINE["color"], "linestyle": BASELINE["linestyle"],
            "linewidth": drawing.line_width(BASELINE["linewidth"]), "zorder": 2.5}  # fmt: skip


def _ends(means: pd.DataFrame, probe: str) -> pd.DataFrame:
    """Return the means of a measure at the longest length of each text."""
    rows = means[means["probe"].str.startswith(probe + TEXT_SEPARATOR)]
    return rows[rows["length"] == rows.groupby("panel")["length"].transform("max")]


def _end_title(means: pd.DataFrame, probe: str) -> str:
    """Return the title of the panel of all texts, with the length where they share one."""
    lengths = set(_ends(means, probe)["length"].astype(int))
    if probe == "position_nll":
        return "all texts, last position"
    return f"all texts at {format_length(lengths.pop())}" if len(lengths) == 1 else "all texts, longest length"


def _draw_ends(
    axes: Axes, means: pd.DataFrame, probe: str, texts: Sequence[str], styles: LineStyles, constant: Mapping[str, float]
) -> None:
    """Draw a mark with its interval per text (row) and line, one below the other within a row.

    Args:
        axes: The panel.
        means: Means of lines.
        probe: The measure; losses are differences from the mean of the lines on their text, shares are in percent.
        texts: The texts, the first on top.
        styles: Style by line.
        constant: Constant-digit baseline by text, which panels of shares show.
    """
    ends, is_share = _ends(means, probe), probe == "needle"
    centre = 0.0 if is_share else ends.groupby("panel")["value"].transform("mean")
    scale = 100.0 if is_share else 1.0
    shown = has_band(ends)
    ends = ends.assign(**{name: scale * (ends[name].astype(float) - centre) for name in ("value", "low", "high")})
    for rank, (name, line_style) in enumerate(styles.items()):
        shift = SPREAD * ((rank + 0.5) / len(styles) - 0.5)
        for row in ends[ends["line"] == name].to_dict("records"):
            height = texts.index(row["panel"]) + shift
            mark = line_style.line(row["panel"]) | {"linestyle": "none", "zorder": 3}
            axes.plot(row["value"], height, **mark)
        for row in ends[(ends["line"] == name) & shown].to_dict("records"):
            height, ink = texts.index(row["panel"]) + shift, line_style.line(row["panel"])["color"]
            axes.hlines(height, row["low"], row["high"], color=ink, linewidth=drawing.line_width(1.0), alpha=0.6)
    for index in range(1, len(texts)):
        axes.axhline(index - 0.5, color=drawing.FAINT, linewidth=drawing.line_width(0.5), zorder=0.9)
    for text in texts if is_share else ():
        if text in constant:
            middle = texts.index(text)
            axes.vlines(100 * constant[text], middle - 0.5, middle + 0.5, **_baseline())
    drawing.rows_alone(axes)
    drawing.put_ticks(axes.yaxis, dict(enumerate(texts)))
    axes.set_ylim(len(texts) - 0.5, -0.5)
    if is_share:
        highest = max(ends["value"].max(), ends.loc[shown, "high"].max(), 100 * max(constant.values(), default=0.0))
        axes.set_xlim(-3, HALF if highest <= HALF else 103)
    else:
        axes.axvline(0, color=drawing.INK, linewidth=drawing.line_width(0.7), zorder=0.95)
        axes.margins(x=0.06)
        if np.nanmax(np.abs(ends[["value", "low", "high"]].to_numpy(dtype=float))) < 1e-9:
            axes.set_xlim(-0.05, 0.05)  # a single line is its mean, up to rounding, which is no scale
        axes.locator_params(axis="x", nbins=drawing.ticks_that_fit(axes, 6))
    axes.set_xlabel(MEASURES[probe][1] if is_share else GAINS)


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
