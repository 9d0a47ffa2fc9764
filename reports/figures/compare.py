"""Store and sweep -> tidy frame, for the figures that hold levels or configurations against each other."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pandas as pd

from ...results.store.records import AXES
from ...results.store.store import Store
from ..data import Lengths, ReportError, SweepData, gather
from ..numbers import Column, column_of
from ..stats.effects import effects as tested
from ..stats.effects import factors, measures, numbers_of, pareto
from ..tables import complete_columns
from ..tables.layout import entry
from .base import Collected, collected, level

MOST_FACTORS = 6


def _qualities(data: SweepData) -> list[Column]:
    """Validation loss, and needle accuracy at the longest length, where at least one cell has them."""
    columns = {column.heading: column for column in complete_columns(data)}
    chosen = [columns["Val"], [column for column in columns.values() if column.probe == "needle"][-1]]
    return [column for column in chosen if not numbers_of(data, column).empty]


def effects(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """The effect of every level of every axis on every number of the complete results, by matched pairs.

    One row an effect: measure (heading), unit (nats/token or points), axis, level, reference, pairs, mean, low, high (95%
    bootstrap of the mean, NaN for a single pair). Accuracies and MFU are in points.
    """
    data = gather(store, sweep, revision=revision, lengths=lengths)
    columns = measures(data)
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    for one in tested(data, columns, within=False):
        scale, unit = (100, "points") if one.measure.percent else (1, "nats/token")
        about: dict[str, Any] = {"measure": one.measure.heading, "unit": unit, "axis": one.axis, "level": one.level}
        about |= {"reference": one.reference, "pairs": one.pairs}
        rows.append(about | {"mean": scale * one.mean, "low": scale * one.low, "high": scale * one.high})
        origins += one.origins
    if not rows:
        raise ReportError(
            f"sweep {data.sweep} has no two measured cells that differ in one axis alone; measure more cells"
        )
    words = (
        "Mean difference over matched pairs, level minus reference; bars: 95% of 10,000 bootstrap means; filled where they "
        "leave out zero."
    )
    better_is = {column.heading: column.direction for column in columns}
    frame = pd.DataFrame(rows)
    return collected(store, data, "effects", "Main effects", frame, origins, notes=[words], better=better_is)


def interactions(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Means of every two axes' combinations, of validation loss and of needle accuracy at the longest length.

    One row a combination: measure, unit (nats/token or %), row_axis, column_axis, row, column (levels), mean, cells.
    At most the first six axes that vary.
    """
    data = gather(store, sweep, revision=revision, lengths=lengths)
    axes = factors(data)[:MOST_FACTORS]
    if len(axes) < 2:
        raise ReportError(f"fewer than two axes of sweep {data.sweep} vary; an interaction needs two")
    rows, origins = [], []
    fewer: dict[tuple[str, ...], str] = {}
    for column in _qualities(data):
        numbers = numbers_of(data, column)
        scale, unit = (100, "%") if column.percent else (1, "nats/token")
        origins += [(str(c), int(a)) for c, a in zip(numbers["cell"], numbers["attempt"], strict=True)]
        for a, b in combinations(axes, 2):
            for (first, second), group in numbers.groupby([a, b], sort=False):
                about: dict[str, Any] = {"measure": column.heading, "unit": unit, "row_axis": a, "column_axis": b}
                about |= {"row": str(first), "column": str(second)}
                rows.append(about | {"mean": scale * float(group["value"].mean()), "cells": len(group)})
                listed = sum(level(cell, a) == str(first) and level(cell, b) == str(second) for cell in data.cells)
                if len(group) < listed:
                    fewer[column.heading, a, b, str(first), str(second)] = f"{len(group)} of {listed}"
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has a validation loss or a needle accuracy; finish it")
    levels = {axis: data.levels(axis) for axis in axes}
    words = "Means over all cells of a combination. White: no cell has the number."
    notes = [words]
    if fewer:
        counts = ", ".join(dict.fromkeys(fewer.values()))
        notes.append(f"Starred: a mean over fewer cells than the sweep lists at that combination ({counts}).")
    about = {"levels": levels, "fewer": fewer}
    return collected(
        store, data, "interactions", "Means by two axes", pd.DataFrame(rows), origins, notes=notes, **about
    )


def quality_speed(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Quality against speed, one row a configuration and quality that has both: quality (heading), speed_name, speed, value,
    front (whether no other is as good in both and better in one), slug (of its first cell), the five AXES, `name`.

    Speed is tokens/s, or MFU (in %) where the sweep has no tokens/s. Values as `interactions`: nats per token, or %.
    """
    data = gather(store, sweep, revision=revision, lengths=lengths)
    speed = column_of("throughput", "tokens_per_s", "tokens/s")
    if not any(key[1:3] == (speed.probe, speed.metric) for key in data.values):
        speed = next(column for column in complete_columns(data) if column.metric == "mfu_paper")
    extra = data.extra_axes()
    told = [axis for axis in AXES if axis != "attn_type" and len(data.levels(axis)) > 1]
    rows: list[dict[str, Any]] = []
    origins: list[tuple[str, int | None]] = []
    fewer: dict[tuple[str, str], str] = {}
    for quality in _qualities(data):
        found = []
        for key, cells in data.configurations().items():
            fast, good = entry(data, cells, speed), entry(data, cells, quality)
            if fast.value is None or good.value is None:
                continue
            levels = dict(zip((*AXES, *extra), key, strict=True))
            words = [levels["attn_type"], *(_word(axis, levels[axis]) for axis in (*told, *extra))]
            about: dict[str, Any] = {"quality": quality.heading, "metric": quality.metric, "speed_name": speed.heading}
            about |= {"speed": fast.value * (100 if speed.percent else 1)}
            about |= {"value": good.value * (100 if quality.percent else 1), "slug": cells[0].slug}
            found.append(about | {axis: levels[axis] for axis in AXES} | {"name": " ".join(filter(None, words))})
            origins += [*fast.origins, *good.origins]
            if min(fast.seeds, good.seeds) < len(cells):
                fewer[quality.heading, found[-1]["name"]] = f"n={min(fast.seeds, good.seeds)}"
        points = [(one["speed"], one["value"]) for one in found]
        fronts = pareto(points, (1, quality.direction))
        rows += [one | {"front": kept} for one, kept in zip(found, fronts, strict=True)]
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has both a speed and a quality; finish it")
    frame = pd.DataFrame(rows)
    words_ = "One point a configuration. Ringed and numbered: on the front, where no other is as good in both and better in one."
    notes = [words_, *(["n=k: a mean over k seeds, fewer than the configuration has."] if fewer else [])]
    return collected(store, data, "pareto", "Quality against speed", frame, origins, notes=notes, fewer=fewer)


def _word(axis: str, level: str) -> str:
    """How a configuration's name tells a level: nothing for what is off."""
    if level in ("off", "baseline", "-"):
        return ""
    return axis if level == "on" else level
