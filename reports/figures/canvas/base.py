"""Data of a figure: a tidy frame, its title and notes, and the origin of every number."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....renamed import old_names
from ....results.store.records import AXES
from ....results.store.store import Store
from ...render.style import glossary
from ...render.trace import attempts_by_cell, attempts_by_source, shown_beyond
from ...sweep_data import SweepData, cell_level
from ...table_builder import filter_suffix
from . import drawing
from .figure_options import FigureOptions as FigureOptions

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    # stand-ins for annotations: matplotlib is imported only when something is drawn
    Axes = Figure = Any

LINE_AXES = ("memory", "window")
"""Axes that distinguish lines first if they vary; extra axes follow, then LAST_AXES."""
LAST_AXES = ("distractor", "reg_mode")

GROUP = ["panel", "first", "second", "line"]
"""Columns that `line_groups` gives: panel, levels and line of a cell."""

Origins = Iterable[tuple[str, int | None]]


@dataclass(frozen=True, kw_only=True)
class FigureData:
    """A figure before it is drawn.

    `frame` is tidy, with the columns that `collect` of the figure documents. `trace` names the figure, sweep and
    revision, the attempts of every cell, the commit and GPU of every attempt, and the SHA-256 of the frame.
    `draw_options` has what the drawing needs in addition to the frame; it is in neither the trace nor the JSON.
    """

    name: str
    title: str
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    glossary: Mapping[str, str] = field(default_factory=dict)
    """Meaning of each technical name of the figure; a caption has it before the last note, which names the sweep."""
    trace: Mapping[str, Any]
    draw_options: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object with the keys figure (name), title, notes (`caption_notes`), trace and rows.

        `rows` are dicts of the frame's rows, with None for missing values.
        """
        rows = self.frame.astype(object).where(self.frame.notna(), None).to_dict("records")
        return {
            "figure": self.name,
            "title": self.title,
            "notes": self.caption_notes(),
            "trace": self.trace,
            "rows": rows,
        }

    def caption_notes(self, explained: Collection[str] = ()) -> list[str]:
        """Return the notes with the sentence that explains technical names before the last one.

        Args:
            explained: Names that the document has explained already, which the sentence leaves out.
        """
        meanings = [f"{name}: {meaning}" for name, meaning in self.glossary.items() if name not in explained]
        return [*self.notes[:-1], *([f"{'; '.join(meanings)}."] if meanings else []), *self.notes[-1:]]


def caption(figure_data: FigureData) -> str:
    """Return the caption of a figure: its title and notes as sentences."""
    return " ".join([f"{figure_data.title}.", *figure_data.caption_notes()])


def frame_sha256(frame: pd.DataFrame) -> str:
    """Return the SHA-256, in hexadecimal, of the frame as CSV with its header and without its index.

    Floats have ten significant digits, since machines may differ in the last bits of a mean.
    """
    return hashlib.sha256(frame.to_csv(index=False, float_format="%.10g").encode()).hexdigest()


def collected(
    store: Store,
    data: SweepData,
    name: str,
    title: str,
    frame: pd.DataFrame,
    origins: Origins,
    *,
    notes: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
    has_glossary: bool = True,
    shown: Iterable[str] | None = None,
    **draw_options: Any,
) -> FigureData:
    """Return the figure of a frame, with its trace; the last note gets the sweep, its revision and cell filters.

    Args:
        store: The database, which has the commit and GPU of each attempt.
        data: The sweep.
        name: Name of the figure, such as "loss".
        title: Title as a caption begins, without the sweep.
        frame: The tidy frame.
        origins: (cell id, attempt id or None) pairs that the numbers come from.
        notes: Notes below the figure.
        options: Options of `make_figure` that the trace records; empty ones are left out of the trace.
        has_glossary: The caption explains technical names: those of the title, the notes, and the levels of the cells.
        shown: Names in the picture, which the caption explains; None: `level_names` of the cells.
        draw_options: What the drawing needs in addition to the frame.
    """
    cells = attempts_by_cell(origins)
    attempts = sorted({attempt for cell_attempts in cells.values() for attempt in cell_attempts})
    trace = {"figure": name, "sweep": data.sweep, "revision": data.revision, "cells": cells}
    trace |= {
        "sources": attempts_by_source(attempts, store.sources(attempts)),
        "data": frame_sha256(frame),
    } | shown_beyond(data)
    trace |= {"options": dict(options)} if options else {}
    trace |= {"only": list(data.only)} if data.only else {}
    notes = tuple(notes)
    shown = level_names(data, cells) if shown is None else shown
    names = glossary(" ".join([title, *notes, *shown])) if has_glossary else {}
    source = f"Sweep {data.sweep}, revision {data.revision}{filter_suffix(data)}."
    return FigureData(
        name=name,
        title=title,
        frame=frame,
        notes=(*notes, source),
        glossary=names,
        trace=trace,
        draw_options=draw_options,
    )


def level_names(data: SweepData, cells: Collection[str], axes: Collection[str] | None = None) -> list[str]:
    """Return the names of the mixers of these cells, and of the other axes that vary among them with their levels.

    Args:
        data: The sweep.
        cells: Ids of the cells.
        axes: Axes that count; None for all.
    """
    drawn = [cell for cell in data.cells if cell.cell_id in cells]
    names: list[str] = []
    for axis in (*AXES, *data.extra_axes()):
        if axes is not None and axis not in axes:
            continue
        levels = dict.fromkeys(cell_level(cell, axis) for cell in drawn)
        if axis == "attn_type" or len(levels) > 1:
            names += [drawing.axis_label(axis), *(drawing.level_label(level, axis) for level in levels)]
    return names


def axes_of_lines(data: SweepData) -> tuple[str, ...]:
    """Return the axes, at most two besides attn_type, that distinguish the lines of a panel.

    Only axes that vary count, in the order memory, window, extra axes of the grid, distractor, reg_mode. Others are
    averaged over.
    """
    ranked = [*LINE_AXES, *data.extra_axes(), *LAST_AXES]
    return tuple(axis for axis in ranked if len(data.levels(axis)) > 1)[:2]


def line_groups(data: SweepData) -> dict[str, dict[str, str]]:
    """Return a dict with the keys panel, first, second and line for each cell of the sweep, by cell id.

    `panel` is the level of attn_type. `first` and `second` are the levels of the at most two axes of `axes_of_lines`
    ("" for a missing one). `line` is their text, such as "memory on, window off", or "all cells" without any.
    """
    axes = axes_of_lines(data)
    groups = {}
    for cell in data.cells:
        levels = [cell_level(cell, axis) for axis in axes]
        line = ", ".join(f"{axis} {level}" for axis, level in zip(axes, levels, strict=True))
        first, second = [*levels, "", ""][:2]
        panel = cell.levels["attn_type"]
        groups[cell.cell_id] = {"panel": panel, "first": first, "second": second, "line": line or "all cells"}
    return groups


def cell_labels(data: SweepData, without: Iterable[str] = ()) -> dict[str, str]:
    """Return the levels of each cell as text, by cell id, with its seed if seeds vary; may be empty.

    Axes that do not vary and levels that are off ("off" or "-") are left out.

    Args:
        data: The sweep.
        without: Axes that the position of a cell in the picture shows already.
    """
    seeds = len({cell.seed for cell in data.cells}) > 1
    axes = [axis for axis in (*AXES, *data.extra_axes()) if axis not in set(without) and len(data.levels(axis)) > 1]
    labels = {}
    for cell in data.cells:
        levels = [(axis, cell_level(cell, axis)) for axis in axes]
        level_labels = [drawing.level_label(level, axis) for axis, level in levels if level not in ("off", "-")]
        labels[cell.cell_id] = ", ".join([*level_labels, *([f"seed {cell.seed}"] if seeds else [])])
    return labels


def training_lengths(store: Store, data: SweepData) -> dict[str, int]:
    """Return the tokens of a training row by cell id; cells whose config does not say it are left out."""
    configs = store.configs({cell.cell_id for cell in data.cells})
    lengths = {cell: (config.get("train") or {}).get("seq_len") for cell, config in configs.items()}
    return {cell: int(length) for cell, length in lengths.items() if length}


def frame_origins(frame: pd.DataFrame) -> list[tuple[str, int | None]]:
    """Return the distinct (cell id, attempt id) pairs of a frame with the columns cell and attempt, in its order."""
    return [(str(c), int(a)) for c, a in frame[["cell", "attempt"]].drop_duplicates().itertuples(index=False)]


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
