"""The figure `effects`: what every level does, with intervals."""

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

MOST_LEVELS = 3
"""Of an axis whose levels are all held against each other; of a longer one the rows against its reference are drawn."""
STRATUM_MARKERS = ("^", "v", "D", "s", "P", "X", "<", ">")


def collect(store: Store, data: SweepData) -> FigureData:
    """The effect of every level of every axis on the main numbers, by matched pairs of configurations.

    One row an effect: axis, level, reference, pairs, and what `forest.effect_fields` says. `where` is empty over the whole sweep; rows
    within a stratum stand behind it. Confirmatory rows are the contrasts that the grid declares. Axes of more than three levels
    have the rows against their reference alone.
    """
    chosen = forest.default_columns(data)
    if not chosen:
        raise ReportError(
            f"no two cells of sweep {data.sweep} have a number to compare; finish it, or evaluate its cells"
        )
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    for one in effects(data, chosen):
        levels = data.levels(one.axis)
        if not one.pairs or not (
            one.confirmatory or len(levels) <= MOST_LEVELS or one.reference == reference_level(levels)
        ):
            continue
        about: dict[str, Any] = {"axis": one.axis, "level": one.level, "reference": one.reference, "pairs": one.pairs}
        rows.append(about | forest.effect_fields(one))
        origins += one.origins
    if not any(row["where"] == "" or row["confirmatory"] for row in rows):
        raise ReportError(
            f"sweep {data.sweep} has no two measured cells that differ in one axis alone; measure more cells"
        )
    headings = {column.heading for column in chosen}
    elsewhere = sum(one.measure.heading not in headings for one in contrasts(data))
    notes = [
        "Mean difference over matched pairs of configurations with its 95% interval. Filled: differs from zero after the correction for "
        "all tests of its number and axis (p < 0.05). Better is right; the axis of a loss runs backwards. Pale: an average over "
        "strata that differ, which small marks show one by one. Other numbers: --length, and --table effects.",
    ]
    if any(column.probe == "needle" for column in chosen):
        notes.append(needle_caption(data))
    if any(row["confirmatory"] for row in rows):
        notes.append("*: a contrast that the grid declares, corrected with the other declared ones.")
    notes += forest.lacking(rows, "pairs")
    if elsewhere:
        notes.append(f"{elsewhere} declared contrasts are about other numbers: --table effects.")
    return collected(store, data, "effects", "What each level does", pd.DataFrame(rows), origins, notes=notes)


def draw(made: FigureData, look: FigureOptions) -> Figure:
    """A panel a number, a row a level, the declared contrasts on top; axes apart."""
    frame = made.frame
    whole = frame[(frame["where"] == "") | frame["confirmatory"]]
    titles = list(dict.fromkeys(frame["measure"]))
    places = _places(whole)
    bottom = max(places.values()) + 0.7
    figure = drawing.page(forest.ROW * bottom + 1.0, 7.2 if len(titles) > 3 else 5.2)
    grid = drawing.panel_column(figure, len(titles), narrow=3, wide=4, sharey=True)
    parts = frame[(frame["where"] != "") & ~frame["confirmatory"]]
    markers = _markers(parts, whole)
    for axes, title in zip(grid, titles, strict=True):
        here = whole[whole["measure"] == title]
        forest.head_panel(axes, str(here["words"].iloc[0]), wrapped=True)
        forest.draw_rows(axes, here, [places[_key(row)] for _, row in here.iterrows()])
        mixed = {_key(row) for _, row in here[here["mixed"]].iterrows()}
        inner = parts[(parts["measure"] == title) & parts["where"].isin(list(markers))]
        inner = inner[np.array([_key(row) in mixed for _, row in inner.iterrows()], dtype=bool)]
        forest.draw_strata(axes, inner, [places[_key(row)] + 0.42 for _, row in inner.iterrows()], markers)
        forest.frame_axes(axes, pd.concat([here, inner]) if len(inner) else here)
    _labels(grid[0], places, bottom)
    return drawing.finished(figure, made.title, made.notes, forest.keys(whole) | _strata_keys(markers), columns=3)


Key = tuple[bool, str, str, str, str]


def _key(row: Any) -> Key:
    """The row of the picture that a row of the frame belongs to."""
    declared = bool(row["confirmatory"])
    return declared, row["axis"], row["level"], row["reference"], row["where"] if declared else ""


def _places(whole: pd.DataFrame) -> dict[Key, float]:
    """Heights of the rows: declared ones first, a gap between axes."""
    found: dict[Key, float] = {}
    y, last = 0.0, None
    ordered = sorted(dict.fromkeys(_key(row) for _, row in whole.iterrows()), key=lambda key: not key[0])
    for key in ordered:
        family = "declared" if key[0] else key[1]
        y += 0.0 if last is None else 1.0 if family == last else 1.45
        found[key], last = y, family
    return found


def _markers(parts: pd.DataFrame, whole: pd.DataFrame) -> dict[str, str]:
    """By `where` of the strata whose rows averages are mixed: their marks."""
    mixed = {(row["measure"], _key(row)) for _, row in whole[whole["mixed"]].iterrows()}
    wheres = [
        row["where"] for _, row in parts.iterrows() if (row["measure"], _key(row)) in mixed and "," not in row["where"]
    ]
    return dict(zip(dict.fromkeys(wheres), STRATUM_MARKERS, strict=False))


def _labels(axes: Any, places: dict[Key, float], bottom: float) -> None:
    """The rows' names left of the first panel."""
    words = []
    for declared, axis, level, reference, where in places:
        text = forest.against(axis, level, reference)
        inside = ", ".join(
            drawing.shown_values(part.partition("=")[2], part.partition("=")[0]) for part in where.split(", ") if part
        )
        words.append((f"{text} ({inside})" if inside else text) + (" *" if declared else ""))
    axes.set_yticks(list(places.values()), words)
    axes.set_ylim(bottom, -0.7)


def _strata_keys(markers: dict[str, str]) -> dict[str, Any]:
    look: dict[str, Any] = {
        "linestyle": "none",
        "color": drawing.GREY,
        "markersize": drawing.line_width(3.0),
        "markerfacecolor": "white",
    }
    return {
        drawing.shown_values(where.partition("=")[2], where.partition("=")[0]): drawing.key(marker=marker, **look)
        for where, marker in markers.items()
    }
