"""Figure `effects`: effect of every level, with intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...stats.effects.effects import contrasts, effects, reference_level
from ...stats.effects.needle_baseline import needle_caption
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Figure, FigureData, FigureOptions, collected
from . import forest

MAX_COMPARED_LEVELS = 3
"""Largest number of levels of an axis whose pairs are all drawn; with more, only the rows against the reference
are.
"""
STRATUM_MARKERS = ("^", "v", "D", "s", "P", "X", "<", ">")


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the effect of every level of every axis on the main numbers, by matched pairs of configurations.

    Main numbers are validation loss, and clean loss, needle accuracy and metrics of extra probes at their longest
    length. Matched pairs agree in all other axes. One row per effect that has pairs: axis, level, reference, pairs,
    measure (heading), words (label), unit, better (1, -1 or 0), where (stratum), mean, low, high, p (corrected), sure
    (True if significant), i2, mixed, confirmatory; means and bounds of shares are percentage points. `where` is empty
    over the whole sweep; rows within a stratum follow. Confirmatory rows are the contrasts that the grid declares. Axes
    of more than three levels have only the rows against their reference, and declared contrasts.

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
        rows.append(fields | forest.effect_fields(effect))
        origins += effect.origins
    if not any(row["where"] == "" or row["confirmatory"] for row in rows):
        raise ReportError(
            f"sweep {data.sweep} has no matched pair: no two measured cells differ in exactly one axis; measure "
            "more cells"
        )
    headings = {column.heading for column in columns}
    elsewhere = sum(contrast.measure.heading not in headings for contrast in contrasts(data))
    notes = [
        "Mean difference over matched pairs of configurations with its 95% interval. Filled: significant "
        "after correction for all tests of its number and axis (p < 0.05). Better is right; loss axes are "
        "reversed. Pale: an average over strata that differ; small marks show each of them. Other numbers: "
        "--length, and --table effects.",
    ]
    if any(column.probe == "needle" for column in columns):
        notes.append(needle_caption(data))
    if any(row["confirmatory"] for row in rows):
        notes.append("*: a contrast declared in the grid, corrected together with the other declared ones.")
    notes += forest.missing_interval_note(rows, "pairs")
    if elsewhere:
        notes.append(f"{elsewhere} declared contrasts are about other numbers: --table effects.")
    return collected(store, data, "effects", "Effect of each factor", pd.DataFrame(rows), origins, notes=notes)


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per number and a row per level, declared contrasts on top, with gaps between axes.

    Rows show the whole sweep. Where the strata of an average differ, these are small marks below it (of a single axis,
    at most eight), and the average is pale. Declared contrasts have * behind their names. `look` is not used.
    """
    frame = figure_data.frame
    main_rows = frame[(frame["where"] == "") | frame["confirmatory"]]
    titles = list(dict.fromkeys(frame["measure"]))
    heights = _row_heights(main_rows)
    bottom = max(heights.values()) + 0.7
    figure = drawing.page(forest.ROW * bottom + 1.0, 7.2 if len(titles) > 3 else 5.2)
    grid = drawing.panel_column(figure, len(titles), narrow=3, wide=4, sharey=True)
    parts = frame[(frame["where"] != "") & ~frame["confirmatory"]]
    markers = _stratum_markers(parts, main_rows)
    for axes, title in zip(grid, titles, strict=True):
        panel_rows = main_rows[main_rows["measure"] == title]
        forest.set_panel_title(axes, str(panel_rows["words"].iloc[0]), wrapped=True)
        forest.draw_rows(axes, panel_rows, [heights[_key(row)] for _, row in panel_rows.iterrows()])
        mixed = {_key(row) for _, row in panel_rows[panel_rows["mixed"]].iterrows()}
        inner = parts[(parts["measure"] == title) & parts["where"].isin(list(markers))]
        inner = inner[np.array([_key(row) in mixed for _, row in inner.iterrows()], dtype=bool)]
        forest.draw_strata(axes, inner, [heights[_key(row)] + 0.42 for _, row in inner.iterrows()], markers)
        forest.format_effect_axis(axes, pd.concat([panel_rows, inner]) if len(inner) else panel_rows)
    _label_rows(grid[0], heights, bottom)
    return drawing.finished(
        figure,
        figure_data.title,
        figure_data.notes,
        forest.legend_handles(main_rows) | _stratum_handles(markers),
        columns=3,
    )


Key = tuple[bool, str, str, str, str]


def _key(row: Any) -> Key:
    """Return (declared, axis, level, reference, stratum) of a row of the frame, which names its row in the picture.

    The stratum is that of a declared contrast, as in `where`; empty for all others.
    """
    declared = bool(row["confirmatory"])
    return declared, row["axis"], row["level"], row["reference"], row["where"] if declared else ""


def _row_heights(main_rows: pd.DataFrame) -> dict[Key, float]:
    """Return the y position of each row of the picture by key, growing downwards: declared ones first.

    Rows are 1.0 apart, and 1.45 between axes.
    """
    heights: dict[Key, float] = {}
    y, last = 0.0, None
    ordered = sorted(dict.fromkeys(_key(row) for _, row in main_rows.iterrows()), key=lambda key: not key[0])
    for key in ordered:
        family = "declared" if key[0] else key[1]
        y += 0.0 if last is None else 1.0 if family == last else 1.45
        heights[key], last = y, family
    return heights


def _stratum_markers(parts: pd.DataFrame, main_rows: pd.DataFrame) -> dict[str, str]:
    """Return a marker by `where` for the strata of averages that are mixed (whose strata differ).

    Only strata of a single axis count, in the order of the rows. Those beyond the eighth have no marker.

    Args:
        parts: Rows of strata.
        main_rows: Rows over the complete sweep, and declared contrasts.
    """
    mixed = {(row["measure"], _key(row)) for _, row in main_rows[main_rows["mixed"]].iterrows()}
    wheres = [
        row["where"] for _, row in parts.iterrows() if (row["measure"], _key(row)) in mixed and "," not in row["where"]
    ]
    return dict(zip(dict.fromkeys(wheres), STRATUM_MARKERS, strict=False))


def _label_rows(axes: Any, heights: dict[Key, float], bottom: float) -> None:
    """Write the names of the rows at the left, with * for declared contrasts, and set the y limits.

    Args:
        axes: The first panel.
        heights: Height of each row by key.
        bottom: Lower y limit.
    """
    texts = []
    for declared, axis, level, reference, where in heights:
        text = forest.difference_label(axis, level, reference)
        inside = ", ".join(
            drawing.level_label(part.partition("=")[2], part.partition("=")[0]) for part in where.split(", ") if part
        )
        texts.append((f"{text} ({inside})" if inside else text) + (" *" if declared else ""))
    axes.set_yticks(list(heights.values()), texts)
    axes.set_ylim(bottom, -0.7)


def _stratum_handles(markers: dict[str, str]) -> dict[str, Any]:
    """Return the legend handles of the strata by label: one grey hollow marker per entry of `markers`."""
    style: dict[str, Any] = {
        "linestyle": "none",
        "color": drawing.GREY,
        "markersize": drawing.line_width(3.0),
        "markerfacecolor": "white",
    }
    return {
        drawing.level_label(where.partition("=")[2], where.partition("=")[0]): drawing.key(marker=marker, **style)
        for where, marker in markers.items()
    }
