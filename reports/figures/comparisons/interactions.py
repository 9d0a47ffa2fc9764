"""Figure `interactions`: effect of two levels together beyond the effect of each alone."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import product
from typing import Any

import pandas as pd

from ....results.store.store import Store
from ...result_columns import quality_columns
from ...stats.effects.effect_types import Interaction
from ...stats.effects.effects import interactions, varying_axes
from ...stats.effects.needle_baseline import lacks_recall, needle_caption
from ...sweep_data import ReportError, SweepData, cell_level
from ..canvas import drawing
from ..canvas.base import Figure, FigureData, FigureOptions, collected, level_names
from .forest import (
    AT_FLOOR_DOTS,
    COUNT_SPACE,
    POINTS,
    ROW,
    VERSUS,
    count_texts,
    difference_label,
    draw_rows,
    effect_fields,
    format_effect_axis,
    legend_handles,
    methods_note,
    missing_interval_note,
    set_panel_title,
    text_width,
    write_column,
)

MAX_ROWS = 6
LEAST_HEIGHT = 4  # rows for which a panel has space, so that its axis fits beside few
MAX_LABEL = 0.42  # share of the width of a panel that its labels may take
CHANGE, BETTER_SIDE = "change of A's gain by B", "A gains more with B"
AT_FLOOR_SPACE = 30.0  # points from a panel to the right end of the shares of combinations without recall


def collect(store: Store, data: SweepData) -> FigureData:
    """Return every interaction of two axes over the whole sweep, the largest absolute mean of a measure first.

    It is the amount by which a level's effect differs between a level of a second axis and that axis's reference, over
    matched fours of configurations. Measures are validation loss, and needle accuracy at the longest length, in this
    order.

    One row per interaction: axes, levels, references (two each, joined by " x "), fours (number of them), measure
    (heading), words (label), unit, better (1, -1 or 0), where (stratum), mean, low, high, p (corrected), sure (True if
    significant), i2, mixed, confirmatory, floor (no combination of levels recalls), unrecalled (number of the four
    combinations without recall); then words_row (label). Means and bounds of shares are percentage points.

    Raises:
        ReportError: Fewer than two axes vary, or there are no four matched cells.
    """
    if len(varying_axes(data)) < 2:
        raise ReportError(f"fewer than two axes of sweep {data.sweep} vary; an interaction needs two")
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    methods: list[str] = []
    for interaction in interactions(data, quality_columns(data)):
        if len(interaction.axes) != 2 or interaction.where:
            continue
        pairs = list(zip(interaction.axes, interaction.levels, interaction.references, strict=True))
        fields: dict[str, Any] = {"axes": " x ".join(interaction.axes), "levels": " x ".join(interaction.levels)}
        fields |= {
            "references": " x ".join(interaction.references),
            "fours": interaction.fours,
            "words_row": _interaction_label(pairs),
        }
        unrecalled = _combinations_without_recall(data, interaction)
        rows.append(fields | effect_fields(interaction) | {"floor": unrecalled == 4, "unrecalled": unrecalled})
        methods.append(interaction.method)
        origins += interaction.origins
    if not rows:
        raise ReportError(
            f"sweep {data.sweep} has no matched quadruple: no four measured cells differ in exactly two axes, "
            "in validation loss or the needle; measure more cells"
        )
    frame = pd.DataFrame(rows)
    frame = frame.assign(size=frame["mean"].abs()).sort_values("size", ascending=False, kind="stable")
    order = {name: index for index, name in enumerate(column.heading for column in quality_columns(data))}
    frame = frame.sort_values("measure", key=lambda names: names.map(order), kind="stable")
    frame = frame.drop(columns="size").reset_index(drop=True)
    drawn = _drawn_rows(frame)
    notes = [
        "A × B: by how much the gain of A changes with B. "
        f"{_examples(drawn)}Means over n matched quadruples of configurations with their 95% intervals, the largest first. "
        f"{methods_note(methods, 'all tests of its number and axes')}"
    ]
    notes += [*_mark_notes(data, frame, drawn), *missing_interval_note(rows, "quadruples")]
    shown_axes = {axis for axes in drawn["axes"] for axis in axes.split(" x ")}
    return collected(
        store,
        data,
        "interactions",
        "Interactions of two factors",
        frame,
        origins,
        notes=notes,
        shown=level_names(data, {cell for cell, _ in origins}, shown_axes),
    )


def _mark_notes(data: SweepData, frame: pd.DataFrame, drawn: pd.DataFrame) -> list[str]:
    """Return the notes on diamonds, rows with a floor, dependent differences and the selection of rows.

    Args:
        data: The sweep.
        frame: Rows of all interactions.
        drawn: Those that are drawn.
    """
    notes, most = [], int(frame["measure"].value_counts().max())
    if drawn["mixed"].any():
        notes.append(
            "Diamonds: averages over levels of a third factor that differ, so that they describe none of them."
        )
    if any(name.startswith("Ndl") for name in frame["measure"]):
        notes.append(needle_caption(data))
        if (drawn["unrecalled"] > 0).any():
            notes.append(
                "Dotted, floor k/4, never black: so many of the four combinations have no recall with any mixer, with or "
                "without memory; where accuracy cannot fall further, that by itself makes an interaction."
            )
    if any(len(data.levels(axis)) > 2 for axis in varying_axes(data)):
        notes.append("Of three levels each difference is a sum of the other two.")
    if most > MAX_ROWS:
        n_at_floor = int(frame["floor"].sum())
        without = f" ({n_at_floor} of needle accuracy have floor 4/4 and are left out)" if n_at_floor else ""
        notes.append(
            f"Shown: the {MAX_ROWS} largest of {most} per number{without}; as the largest, they are overstated."
        )
    return notes


def _drawn_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that are drawn: the largest of each number among those with recall; all if none has any."""
    shown = frame[~frame["floor"].astype(bool)]
    return (shown if len(shown) else frame).groupby("measure", sort=False).head(MAX_ROWS)


def _examples(drawn: pd.DataFrame) -> str:
    """Return the sentence that reads the first row of each number with a better side, with a space at its end; may be ""."""
    firsts = [row for row in drawn.drop_duplicates("measure").to_dict("records") if row["better"] and row["mean"]]
    texts = [_reading(row) for row in firsts[:1]]
    texts += [_amount_text(row) if row["words_row"] == firsts[0]["words_row"] else _reading(row) for row in firsts[1:]]
    return f"Example{'s' * (len(texts) > 1)}: {'; '.join(texts)}. " if texts else ""


def _amount_text(row: Mapping[Any, Any]) -> str:
    """Return the size of an interaction in words, such as "in validation loss by 0.15 nats/token less"."""
    more = "more" if row["mean"] * row["better"] > 0 else "less"
    return f"in {row['words']} by {abs(row['mean']):.2g} {row['unit'].replace(*POINTS)} {more}"


def _reading(row: Mapping[Any, Any]) -> str:
    """Return an interaction in words, such as "at strong rather than weak, RoPE over NoPE gains in validation loss by 0.01 nats/token less"."""
    first, second = zip(*(str(row[name]).split(" x ") for name in ("axes", "levels", "references")), strict=True)
    gain = difference_label(*first).replace(" − ", " over ")
    names = [drawing.level_label(level, second[0]) for level in second[1:]]
    return f"{'at ' * (not names[0].startswith('with '))}{names[0]} rather than {names[1]}, {gain} gains {_amount_text(row)}"


def _combinations_without_recall(data: SweepData, interaction: Interaction) -> int:
    """Return how many of the four combinations of levels lack recall (`lacks_recall`)."""
    count = 0
    for combination in product(*zip(interaction.levels, interaction.references, strict=True)):
        pairs = list(zip(interaction.axes, combination, strict=True))
        cells = [cell for cell in data.cells if all(cell_level(cell, axis) == level for axis, level in pairs)]
        count += lacks_recall(data, interaction.measure, cells)
    return count


def _interaction_label(pairs: list[tuple[str, str, str]]) -> str:
    labels = [difference_label(*pair) for pair in pairs]
    return " × ".join(f"({text})" if "−" in text else text for text in labels)


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per measure and a row per interaction, the largest on top, at most six; `look` is not used."""
    frame = figure_data.frame
    drawn = _drawn_rows(frame)
    at_floor = drawn["unrecalled"] > 0
    drawn = drawn.assign(sure=drawn["sure"] & ~at_floor)
    parts = {str(name): rows for name, rows in drawn.groupby("measure", sort=False)}
    tall = max(len(rows) for rows in parts.values())
    figure = drawing.page(1.0)
    width, ticks = figure.get_figwidth(), drawing.size("ytick.labelsize")
    columns = min(len(parts), 1 if width < drawing.NARROW_WIDTH else 2)
    characters = int(MAX_LABEL * width / columns * 72 / (0.56 * ticks))
    labels = {
        name: [_wrapped(text.replace(" − ", VERSUS), characters) for text in rows["words_row"]]
        for name, rows in parts.items()
    }
    lines = max(text.count("\n") + 1 for texts in labels.values() for text in texts)
    each = width / columns - max(text_width(texts, ticks) for texts in labels.values()) - 0.2
    row = ROW if lines == 1 else 0.95 * lines * ROW
    figure.set_figheight((row * max(tall, LEAST_HEIGHT) + 0.75) * drawing.current_options().scale)
    grid = drawing.panel_column(figure, len(parts), narrow=columns, wide=columns)
    for axes, (name, rows) in zip(grid, parts.items(), strict=True):
        set_panel_title(axes, str(rows["words"].iloc[0]), each)
        heights = list(range(len(rows)))
        draw_rows(axes, rows, heights)
        format_effect_axis(axes, rows, each, BETTER_SIDE, CHANGE)
        axes.set_yticks(heights, labels[name], linespacing=1.0)
        axes.set_ylim(tall - 0.4, -0.7)
        counts = count_texts({float(y): [int(fours)] for y, fours in zip(heights, rows["fours"], strict=True)})
        write_column(axes, counts, "n", COUNT_SPACE)
        shares = {float(y): f"{count}/4" for y, count in zip(heights, rows["unrecalled"], strict=True) if count}
        if shares:
            write_column(axes, shares, "floor", COUNT_SPACE + AT_FLOOR_SPACE * drawing.current_options().scale)
    handles = legend_handles(drawn)
    if at_floor.any():
        handles["some levels without recall"] = drawing.key(color=drawing.GREY, linestyle=AT_FLOOR_DOTS)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=2)


def _wrapped(label: str, characters: int) -> str:
    """Return the label of an interaction, broken before its sign if it has more than so many characters.

    Differences of long names are broken further, within a word where they must.
    """
    if len(label) <= characters:
        return label
    parts = label.replace(" × ", "\n× ", 1).split("\n")
    return "\n".join(line for part in parts for line in textwrap.wrap(part, max(characters, 8)))
