"""Figure `effects`: effect of every level, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pandas as pd

from ....results.store.store import Store
from ...number_format import Column, format_length
from ...stats.effects.effect_types import Effect
from ...stats.effects.effects import contrasts, effects, reference_level
from ...stats.effects.needle_baseline import lacks_recall, needle_caption
from ...sweep_data import ReportError, SweepData, cell_level
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected, training_lengths
from ..canvas.length_frames import single_value
from . import forest

MAX_COMPARED_LEVELS = 3
"""Largest number of levels of an axis whose pairs are all drawn; with more, only the rows against the reference
are.
"""
MIN_PAIRS = 2  # pairs that an interval takes
MIN_PANEL = 0.76  # inches, least width of a panel at the font size of the style `paper`
LETTER_WIDTH = 0.2  # inches, panel letter and its distance from the title
LABEL_SHARE, FOLDED_PITCH = (
    0.36,
    1.5,
)  # share of the width that a label may take unbroken; height of rows with broken ones
AVERAGE_SIZE = 0.8  # size of the marks of an average relative to those of the strata below it
HEAD_ROWS = 1.5  # rows above the first one, for the head of the sample sizes
INDENT = "\u00a0" * 4  # of the label of a stratum
COUNT_GAP = 8.0  # points beside the sample sizes, half of them on either side


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the effect of every level of every axis on the main numbers, by matched pairs of configurations.

    Main numbers are validation loss, and clean loss, needle accuracy and metrics of extra probes at their longest
    length. Matched pairs agree in all other axes. One row per effect that has pairs: axis, level, reference, pairs,
    measure (heading), words (label), unit, better (1, -1 or 0), where (stratum), mean, low, high, p (corrected), sure
    (True if significant), i2, mixed, confirmatory, floor (both levels without recall); means and bounds of shares are
    percentage points. `where` is empty over the whole sweep; rows within a stratum follow. Confirmatory rows are the
    contrasts that the grid declares. Axes of more than three levels have only the rows against their reference, and
    declared contrasts.

    Raises:
        ReportError: There are no numbers or no two cells to compare.
    """
    columns = forest.default_columns(data)
    if not columns:
        raise ReportError(
            f"no two cells of sweep {data.sweep} have a number to compare; finish the sweep, or evaluate its cells"
        )
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    methods: list[str] = []
    for effect in effects(data, columns):
        levels = data.levels(effect.axis)
        if not effect.pairs or not (
            effect.confirmatory or len(levels) <= MAX_COMPARED_LEVELS or effect.reference == reference_level(levels)
        ):
            continue
        fields: dict[str, Any] = {
            "axis": effect.axis,
            "level": effect.level,
            "reference": effect.reference,
            "pairs": effect.pairs,
        }
        rows.append(fields | forest.effect_fields(effect) | {"floor": _is_at_floor(data, effect)})
        methods.append(effect.method)
        origins += effect.origins
    if not any(row["where"] == "" or row["confirmatory"] for row in rows):
        raise ReportError(
            f"sweep {data.sweep} has no matched pair: no two measured cells differ in exactly one axis; measure "
            "more cells"
        )
    if all(row["pairs"] < MIN_PAIRS for row in rows):
        raise ReportError(
            f"no contrast of sweep {data.sweep} has two matched pairs, so none has an interval; --table effects lists the "
            "differences"
        )
    frame = pd.DataFrame(rows)
    keys = [_key(row) for _, row in frame.iterrows()]
    shown = _rows_of(frame, keys)
    drawn = [row for row, key in zip(rows, keys, strict=True) if key in {picture.key for picture in shown}]
    headings = {column.heading for column in columns}
    elsewhere = sum(contrast.measure.heading not in headings for contrast in contrasts(data))
    notes = [
        "Mean gain over n matched pairs of configurations that agree in all other factors, with its 95% interval. "
        "A vs B: gain of A over B; a name alone: over none. "
        f"{_example(drawn)}{forest.methods_note(methods, 'all tests of its number and axis')}",
    ]
    if any(column.probe == "clean" for column in columns):
        trained = single_value(list(training_lengths(store, data).values()))
        length = f" (trained at {format_length(trained)})" if trained else ""
        notes.append(f"Clean loss: on the first tokens of long documents{length}.")
    notes += _mark_notes(data, drawn, columns, has_strata=any(row.is_stratum for row in shown))
    if any(row["confirmatory"] for row in rows):
        notes.append("*: a contrast declared in the grid, corrected together with the other declared ones.")
    notes += forest.missing_interval_note(rows, "pairs")
    if elsewhere:
        notes.append(f"{elsewhere} declared contrasts are about other numbers, which are not shown.")
    return collected(store, data, "effects", "Effect of each factor", frame, origins, notes=notes)


def _example(drawn: Sequence[dict[str, Any]]) -> str:
    """Return the sentence that reads the first drawn row that has a gain, with a space at its end; "" without any."""
    row = next((row for row in drawn if row["mean"] and row["better"] and not row["floor"] and not row["where"]), None)
    if row is None:
        return ""
    label = forest.difference_label(row["axis"], row["level"], row["reference"]).replace(" − ", forest.VERSUS)
    return f"Example: {label} is {forest.gain_text(row)} in {row['words']}. "


def _mark_notes(
    data: SweepData, drawn: Sequence[dict[str, Any]], columns: Sequence[Column], *, has_strata: bool
) -> list[str]:
    """Return the notes on diamonds, rows of strata, the baseline of needle accuracy and rows without recall.

    Args:
        data: The sweep.
        drawn: Rows of the frame that are drawn, as dicts.
        columns: The numbers.
        has_strata: Whether strata have rows of their own.
    """
    notes = []
    if any(row["mixed"] for row in drawn):
        notes.append(
            "Hollow: averages over levels of another factor that differ, so that they describe none of them"
            f"{'; indented: these levels, in panels in which they differ' if has_strata else ''}."
        )
    if any(column.probe == "needle" for column in columns):
        notes.append(needle_caption(data))
    if any(row["floor"] for row in drawn):
        notes.append(
            "No recall: neither level is above the constant-digit baseline with any mixer, with or without memory."
        )
    return notes


def _is_at_floor(data: SweepData, effect: Effect) -> bool:
    """Return True if both levels lack recall (`lacks_recall`) in the effect's stratum."""
    stratum = [part.split("=", 1) for part in effect.where.split(", ") if part]
    within = [cell for cell in data.cells if all(cell_level(cell, axis) == level for axis, level in stratum)]
    return all(
        lacks_recall(data, effect.measure, [cell for cell in within if cell_level(cell, effect.axis) == side])
        for side in (effect.level, effect.reference)
    )


@dataclass(frozen=True)
class _Row:
    """A row of the picture: its height, its label, and the rows of the frame that it shows, or None for a heading."""

    y: float
    label: str
    key: Key | None
    is_stratum: bool = False


Key = tuple[bool, str, str, str, str]
"""Declared, axis, level, reference, and stratum (empty over the whole sweep) of an effect."""


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per number and a row per level, in groups by axis; declared contrasts come first, under headings.

    Where the strata of an average differ for any number, they follow it as indented rows, and the average is small.
    Panels stand side by side as far as the labels leave space for them. `look` is not used.
    """
    frame = figure_data.frame
    keys = [_key(row) for _, row in frame.iterrows()]
    measures = list(dict.fromkeys(frame["measure"][~frame["confirmatory"]])) or list(dict.fromkeys(frame["measure"]))
    measures += [name for name in dict.fromkeys(frame["measure"]) if name not in measures]
    figure = drawing.page(1.0, 7.2 if len(measures) > 2 else 5.2)
    most = int(LABEL_SHARE * figure.get_figwidth() * 72 / (0.56 * drawing.size("ytick.labelsize")))
    rows = [replace(row, label=_folded(row.label, most) if row.key else row.label) for row in _rows_of(frame, keys)]
    pitch = forest.ROW * (FOLDED_PITCH if any("\n" in row.label for row in rows) else 1.0)
    labels = (
        forest.text_width(
            [INDENT * row.is_stratum + row.label for row in rows if row.key], drawing.size("ytick.labelsize")
        )
        + 0.1
    )
    counts_width = forest.text_width([str(int(frame["pairs"].max()))], drawing.size("small")) + COUNT_GAP / 72
    margin = counts_width + forest.floor_space(frame) / 72
    width = figure.get_figwidth() - labels - margin
    # a panel is as wide as the longest word of its title and the letter beside it
    title_parts = [part for label in frame["words"].unique() for part in label.replace(",", " ").split()]
    title_width = forest.text_width(title_parts, drawing.size("axes.titlesize")) + LETTER_WIDTH
    fitting = max(1, int(width / max(MIN_PANEL * drawing.current_options().scale, title_width)))
    columns = next(
        n for n in range(1, len(measures) + 1) if n >= fitting or -(-len(measures) // n) == -(-len(measures) // fitting)
    )
    bottom = max(row.y for row in rows) + 0.7
    figure.set_figheight((pitch * (bottom + HEAD_ROWS - 0.7) + 1.25) * drawing.current_options().scale)
    grid = drawing.panel_column(figure, len(measures), narrow=columns, wide=columns, sharey=True)
    each = width / columns - 0.12
    with_strata = {row.key for row, below in pairwise(rows) if below.is_stratum and not row.is_stratum}
    for axes, measure in zip(grid, measures, strict=True):
        of_measure = {key: index for index, key in enumerate(keys) if frame["measure"].iloc[index] == measure}
        shown = [row for row in rows if row.key in of_measure]
        panel_rows = frame.iloc[[of_measure[row.key] for row in shown if row.key]]
        heights = [row.y for row in shown]
        forest.set_panel_title(axes, str(panel_rows["words"].iloc[0]), each)
        for is_average, size in ((False, 1.0), (True, AVERAGE_SIZE)):
            chosen = [index for index, row in enumerate(shown) if (row.key in with_strata) == is_average]
            forest.draw_rows(axes, panel_rows.iloc[chosen], [heights[index] for index in chosen], size)
        forest.format_effect_axis(
            axes, panel_rows[~panel_rows["floor"]] if not panel_rows["floor"].all() else panel_rows, each
        )
        axes.set_ylim(bottom, -HEAD_ROWS)
    pairs: dict[Key, list[int]] = {}
    for key, count in zip(keys, frame["pairs"], strict=True):
        pairs.setdefault(key, []).append(int(count))
    counts = forest.count_texts({row.y: pairs[row.key] for row in rows if row.key})
    for axes in grid[::columns]:
        _label_rows(axes, rows, 72 * counts_width)
        forest.write_column(axes, counts, "n", -COUNT_GAP / 2, 0)
    handles = forest.legend_handles(
        frame.iloc[[index for index, key in enumerate(keys) if key in {row.key for row in rows}]]
    )
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles, columns=2)


def _folded(label: str, most: int) -> str:
    """Return a label of a row, broken before its bracket if it has more than `most` characters."""
    return label.replace(" (", "\n(", 1) if len(label) > most else label


def _label_rows(axes: Axes, rows: Sequence[_Row], points: float) -> None:
    """Write the labels of the rows at the left of a panel, aligned left, strata indented; headings may enter the panel.

    Args:
        axes: A panel of the first column.
        rows: Rows of the picture.
        points: Points between the labels and the panel, for the sample sizes.
    """
    axes.tick_params(labelleft=True)
    labelled = [row for row in rows if row.key]
    texts = [INDENT * row.is_stratum + row.label for row in labelled]
    axes.set_yticks([row.y for row in labelled], texts, ha="left", linespacing=1.0)
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    widest = max(label.get_window_extent(renderer).width for label in axes.get_yticklabels())
    axes.tick_params(axis="y", pad=widest * 72 / axes.figure.dpi + points)

    def write_headings() -> None:
        """Write the headings, once the layout is final."""
        outermost = min(label.get_window_extent().x0 for label in axes.get_yticklabels())
        start = float(axes.transAxes.inverted().transform((outermost, 0))[0])
        style: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "weight": "bold", "zorder": 5}
        style |= {"fontsize": drawing.size("ytick.labelsize"), "bbox": drawing.BACKING | {"alpha": 1.0}}
        for row in rows:
            if row.key is None:
                drawing.note(axes, row.label, (start, row.y), **style, annotation_clip=False)

    drawing.after_layout(axes.figure, write_headings)  # type: ignore[arg-type]


def _key(row: Any) -> Key:
    """Return the key of a row of the frame, which names its row in the picture."""
    return bool(row["confirmatory"]), row["axis"], row["level"], row["reference"], row["where"]


def _rows_of(frame: pd.DataFrame, keys: Sequence[Key]) -> list[_Row]:
    """Return the rows of the picture from top to bottom; 1.0 apart, and 1.45 between axes.

    Declared contrasts come first, those of the same levels under a heading if there are several. Effects over the whole
    sweep follow, in the order of the frame, each with the strata of a single axis if it is mixed for any number and a
    stratum is significant.

    Args:
        frame: Rows of the figure.
        keys: Key of each of them.
    """
    mixed = {key for key, is_mixed in zip(keys, frame["mixed"], strict=True) if is_mixed}
    significant = {key for key, is_significant in zip(keys, frame["sure"], strict=True) if is_significant}
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key in dict.fromkeys(keys):
        declared, axis, level, reference, where = key
        if declared:
            groups.setdefault(("declared", axis, level, reference, *_shared_parts(where)), []).append(key)
        elif not where:
            groups.setdefault((axis,), []).append(key)
    rows: list[_Row] = []
    y = -1.45
    for name, members in sorted(groups.items(), key=lambda group: group[0][0] != "declared"):
        y += 0.45
        declared = name[0] == "declared"
        if declared and len(members) > 1:
            y += 1.0
            rows.append(_Row(y, _effect_label(members[0], name[4:]), None))
        for key in members:
            y += 1.0
            parts = key[4].split(", ") if key[4] else []
            label = _parts_label(parts[-1:]) if declared and len(members) > 1 else _effect_label(key, parts)
            rows.append(_Row(y, label + (" *" if declared else ""), key))
            strata = [
                stratum for stratum in dict.fromkeys(keys)
                if not stratum[0] and stratum[1:4] == key[1:4] and stratum[4] and "," not in stratum[4]
            ]  # fmt: skip
            for stratum in strata if key in mixed and significant & set(strata) else ():
                y += 0.85
                rows.append(_Row(y, _parts_label([stratum[4]]), stratum, is_stratum=True))
    return rows


def _shared_parts(where: str) -> list[str]:
    """Return all parts of the stratum of a declared contrast but the last, which the rows of a group differ in."""
    return where.split(", ")[:-1]


def _effect_label(key: Key, parts: Sequence[str]) -> str:
    """Return the label of an effect: its levels, and in brackets the levels of its stratum."""
    text = forest.difference_label(*key[1:4]).replace(" − ", forest.VERSUS)
    return f"{text} ({_parts_label(parts)})" if parts else text


def _parts_label(parts: Sequence[str]) -> str:
    """Return the levels of "axis=level" texts as figures name them, joined by commas."""
    return ", ".join(drawing.level_label(part.partition("=")[2], part.partition("=")[0]) for part in parts)
