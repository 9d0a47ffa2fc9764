"""Figure `passkey`: recall of a value by its depth in a text and the text's length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...number_format import format_length, format_number
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected, frame_origins, training_lengths
from ..canvas.length_frames import configuration_of, in_grid_order, single_value
from ..canvas.line_drawing import REFERENCE
from .heat_maps import (
    MAX_CELLS,
    add_colour_bar,
    draw_heat_map,
    label_maps,
    map_grid,
    map_title,
    title_parts,
    write_values,
)
from .item_frames import item_detail_rows

PROBE, METRIC = "passkey", "digit_accuracy"
MAX_WRITTEN_LENGTHS = 5
"""Largest number of lengths for which every square of a map shows its number."""
Z = 1.96  # standard errors to either side in a 95 % interval
FRAME: dict[str, Any] = {"edgecolor": "white", "linestyle": (0, (1.5, 1))}
"""Frame of squares without recall, which are dark."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the share of recalled digits by depth and context length.

    One row per cell, length and depth: cell, attempt, configuration, length (tokens), depth (share of the text before
    the value, 0 to 1), trials, answers (digits), value (share of digits: the mean of the trials' shares), exact (share
    of trials with every digit right), se (standard error of value: standard deviation of the trials' shares over the
    root of their number, NaN for one trial), constant (score of the best constant digit, NaN where unknown). Shares are
    fractions.

    Raises:
        ReportError: No cell has been measured.
    """
    frame = _frame(store, data)
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has passkey trials; evaluate with --probe {PROBE}")
    trained = single_value(list(training_lengths(store, data).values()))
    constants = frame["constant"].dropna()
    seeds = frame.groupby(["configuration", "length", "depth"], sort=False)["cell"].nunique()
    notes = [
        f"Share of the digits of a passkey that are recalled (colour and number, in %); each square: mean over {_count_range_text(seeds)} "
        f"{'seed' if seeds.max() == 1 else 'seeds'} of a configuration, {_count_range_text(frame['trials'])} trials of "
        f"{_count_range_text((frame['answers'] / frame['trials']).round())} digits per seed.{_error_note(frame)} Depth: share of the text that precedes the digits."
    ]
    if len(constants):
        percentages = list(
            dict.fromkeys(format_number(share, 1, percent=True) for share in (constants.min(), constants.max()))
        )
        notes.append(
            f"Constant-digit baseline on these trials: {' to '.join(percentages)} % (dotted on the colour bar); "
            f"framed: at most 1.96 standard errors above it (not corrected for {len(seeds)} squares)."
        )
    configurations = list(dict.fromkeys(frame["configuration"]))
    if len(configurations) > MAX_CELLS:
        notes.append(f"The first {MAX_CELLS} of {len(configurations)} configurations.")
    return collected(
        store, data, "passkey", "Passkey recall by depth and context length", frame, frame_origins(frame), notes=notes,
        trained=trained, constant=float(constants.max()) if len(constants) else None, titles=title_parts(data, set(frame["cell"])),
    )  # fmt: skip


def _error_note(frame: pd.DataFrame) -> str:
    """Return the sentence on the standard errors of the squares, after a space; "" if no square has one.

    That of a mean over seeds is the root of the sum of their squared errors, divided by their number.
    """
    errors = _square_errors(frame.groupby(["configuration", "length", "depth"], sort=False)["se"]).dropna()
    if errors.empty:
        return ""
    median, most = (format_number(error, 0, percent=True) for error in (errors.median(), errors.max()))
    return f" Standard error of a square, from the spread of its trials, taken as independent across seeds: median {median}, at most {most} points."


def _square_errors(squares: Any) -> pd.Series:
    """Return the standard error of each square, NaN without one: of a mean over cells with independent errors.

    Args:
        squares: Standard errors of cells, grouped by square.
    """
    return squares.agg(lambda se: float((se**2).sum(skipna=False)) ** 0.5 / len(se))


def _count_range_text(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low} to {high}"


def _frame(store: Store, data: SweepData) -> pd.DataFrame:
    """Return one row per cell, length and depth.

    Columns: cell, attempt, configuration, length, depth, trials, answers, value, exact, se and constant. Without any it is
    empty and has no columns. Rows are in the grid's order of cells, then by length and depth.
    """
    parts = []
    for length in data.lengths(PROBE, METRIC, include_unrequested=True):
        items = pd.DataFrame(item_detail_rows(store, data, (PROBE, METRIC, length)))
        if items.empty or "depth" not in items:
            continue
        trial = items.groupby(["cell", "attempt", "depth", "item"], sort=False)["value"].agg(["mean", "min", "size"])
        each = trial.reset_index().groupby(["cell", "attempt", "depth"], sort=False).agg(
            trials=("item", "size"), answers=("size", "sum"), value=("mean", "mean"), exact=("min", lambda minima: (minima == 1).mean()), se=("mean", "sem")
        )  # fmt: skip
        constant = {cell: data.values.get((cell, PROBE, "constant_accuracy", length)) for cell in set(items["cell"])}
        each = each.reset_index().assign(length=length)
        each["constant"] = [value.value if (value := constant[cell]) is not None else None for cell in each["cell"]]
        parts.append(each)
    if not parts:
        return pd.DataFrame()
    frame = pd.concat(parts, ignore_index=True)
    frame = frame.assign(configuration=frame["cell"].map(configuration_of(data))).astype({"constant": float})
    columns = [
        "cell",
        "attempt",
        "configuration",
        "length",
        "depth",
        "trials",
        "answers",
        "value",
        "exact",
        "se",
        "constant",
    ]
    return in_grid_order(frame[columns], data, "length", "depth")


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a map per configuration (mean of its seeds), or per highlighted cell: depths over lengths.

    Depths grow downwards, lengths to the right. At most 12 maps are drawn, highlighted ones too. Percentages are
    written into the squares of small maps.
    """
    from matplotlib import colormaps

    frame = figure_data.frame
    highlighted_rows = frame[frame["cell"].isin(look.highlight)]
    shown, by = (highlighted_rows, "cell") if len(highlighted_rows) else (frame, "configuration")
    maps = [
        (map_title(figure_data, look, str(rows["cell"].iloc[0])), rows) for _, rows in shown.groupby(by, sort=False)
    ][:MAX_CELLS]
    lengths, depths = sorted(set(frame["length"])), sorted(set(frame["depth"]))
    figure, group = map_grid([map_name for map_name, _ in maps], 1.5, 0.75)
    norm, has_frames = drawing.linear(0, 1), False
    for axes, (_, rows) in zip(group, maps, strict=True):
        means = rows.pivot_table(index="depth", columns="length", values="value", aggfunc="mean")
        table = means.reindex(index=depths, columns=lengths).to_numpy(dtype=float)
        image = draw_heat_map(axes, table, norm)
        _label_axes(axes, lengths, depths, figure_data.draw_options["trained"])
        if len(lengths) <= MAX_WRITTEN_LENGTHS and len(depths) <= 2 * MAX_WRITTEN_LENGTHS:
            write_values(axes, table, [[f"{100 * share:.0f}" for share in row] for row in table], norm)
        errors = _square_errors(rows.groupby(["depth", "length"])["se"]).unstack()
        lower = table - Z * errors.reindex(index=depths, columns=lengths).fillna(0).to_numpy(dtype=float)
        has_frames |= _frame_low_squares(axes, lower, figure_data.draw_options["constant"])
    label_maps(group, "context length, tokens", "depth")
    ticks = {share: f"{100 * share:.0f}%" for share in (0, 0.25, 0.5, 0.75, 1)}
    add_colour_bar(figure, image, "digits recalled", ticks, figure_data.draw_options["constant"], pad=0.06)
    keys: dict[str, Any] = {}
    if has_frames:
        keys[
            f"dotted frame: not significantly above the constant digit ({format_number(figure_data.draw_options['constant'], 1, percent=True)} %)"
        ] = drawing.patch(facecolor=colormaps[drawing.HEAT_MAP](0.1), linewidth=drawing.line_width(0.8), **FRAME)
    if figure_data.draw_options["trained"]:
        keys[f"right of the line: longer than training ({format_length(figure_data.draw_options['trained'])})"] = (
            drawing.key(color=drawing.INK, linestyle=REFERENCE["linestyle"], linewidth=drawing.line_width(0.9))
        )
    return drawing.finished(figure, figure_data.title, figure_data.notes, keys)


def _frame_low_squares(axes: Axes, table: np.ndarray, constant: float | None) -> bool:
    """Draw a dotted frame into each square not above the constant-digit baseline, and return whether there is any.

    Args:
        axes: The map.
        table: Lower ends of the 95 % intervals of shares [depths, lengths]; NaN where not measured.
        constant: The baseline as a share; None: unknown, so that no square is framed.
    """
    from matplotlib.patches import Rectangle

    low = np.argwhere(table <= constant) if constant is not None else np.empty((0, 2))
    for row, column in low.tolist():
        axes.add_patch(
            Rectangle((column - 0.44, row - 0.4), 0.88, 0.8, fill=False, linewidth=drawing.line_width(0.8), **FRAME)
        )
    return bool(len(low))


def _label_axes(axes: Axes, lengths: list[int], depths: list[float], trained: int | None) -> None:
    """Label some of the columns and rows of a map, and draw a line after the last column within the training length.

    Args:
        axes: Axes with the map.
        lengths: Length of each column in tokens, ascending.
        depths: Depth of each row as a fraction, ascending.
        trained: Training length in tokens; None, or one that does not separate columns: no line.
    """
    shown = drawing.thin_evenly(range(len(lengths)), MAX_WRITTEN_LENGTHS)
    axes.set_xticks(shown, [format_length(lengths[index]) for index in shown])
    rows = drawing.thin_evenly(range(len(depths)), 6)
    axes.set_yticks(rows, [f"{100 * depths[index]:.3g}%" for index in rows])
    trained_columns = [index for index, length in enumerate(lengths) if trained and length <= trained]
    if trained_columns and len(trained_columns) < len(lengths):
        axes.axvline(max(trained_columns) + 0.5, color="#ffffff", linewidth=drawing.line_width(2.4))
        axes.axvline(
            max(trained_columns) + 0.5,
            color="#000000",
            linewidth=drawing.line_width(0.9),
            linestyle=REFERENCE["linestyle"],
        )
