"""Figure `downstream`: scores of downstream tasks, a panel per task and a row per configuration or model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ....results.console.text import counted
from ....results.store.records import CellState
from ....results.store.store import Store
from ...render import style
from ...sweep_data import ReportError, SweepData
from ...tables.open_weight import external_model_notes
from ...tables.task_tables import (
    DownstreamTask,
    configurations_with_probe,
    downstream_entry,
    downstream_models,
    downstream_tasks,
)
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected, frame_origins
from ..canvas.length_frames import MIN_UNITS_OF_BAND, t_half_width
from ..canvas.line_drawing import reference_line
from .panels import row_labels

PROBE = "downstream"
ROW_HEIGHT = 0.17  # inches, height of a row in the style `paper`
FAR_CHANCE = 0.5  # share of the range of a task's scores from which on a chance level is named, not drawn
RUNS_BELOW = 0.32  # rows by which the ticks of single runs stand below their mean
RUN: dict[str, Any] = {"marker": 2, "markersize": 3.0, "markeredgewidth": 0.8}
MODEL = "open-weight model"
"""Mixer in the frame for a model that was not trained here."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the main scores of all tasks.

    One row per cell and task: cell, attempt, row (configuration, or name of a model), mixer ("open-weight model" for a
    model), memory (its level), task (heading), probe, metric, unit, chance (NaN if unknown), value, questions (their
    number, NaN if unknown), mean (over seeds), seeds, low and high
    (95 % interval of the row: over the questions for one seed, over seeds for three or more; NaN for none). Shares are
    fractions.

    Raises:
        ReportError: No cell has been measured.
    """
    models = downstream_models(store, data)
    tasks = downstream_tasks([data, *(model.data for model in models)])
    groups = configurations_with_probe(data, PROBE).groups
    labels = row_labels(data, {cell.cell_id for cells in groups for cell in cells})
    rows: list[dict[str, Any]] = []
    for task in tasks:
        for cells in groups:
            rows += _rows(data, cells, task, labels[cells[0].cell_id], cells[0])
        for model in models:
            rows += _rows(model.data, [model.cell], task, str(model.model.get("name")), None)
    if not rows:
        raise ReportError(f"no cell of sweep {data.sweep} has scores of downstream tasks; evaluate with --tasks")
    frame = pd.DataFrame(rows)
    notes = [
        f"Share of questions answered correctly, in tasks of lm-evaluation-harness: {'; '.join(task.facts for task in tasks)}. {_bar_note(frame)}",
        *external_model_notes(models, ()),
    ]
    return collected(store, data, "downstream", "Downstream tasks", frame, frame_origins(frame), notes=notes)


def _rows(
    data: SweepData, cells: Sequence[CellState], task: DownstreamTask, label: str, drawn: CellState | None
) -> Iterator[dict[str, Any]]:
    """Yield the row of each measured cell of a configuration, as `collect` documents them.

    Args:
        data: Sweep of the cells.
        cells: Seeds of one configuration.
        task: The task.
        label: Name of the configuration or model.
        drawn: Cell whose mixer and memory the row shows; None for a model.
    """
    entry, column = downstream_entry(data, cells, task), task.column
    low, high = entry.low, entry.high
    if entry.seeds >= MIN_UNITS_OF_BAND and entry.sd is not None and entry.value is not None:
        half = float(t_half_width(entry.seeds, entry.sd))
        low, high = entry.value - half, entry.value + half
    for cell in cells:
        value = data.values.get((cell.cell_id, *column.key))
        if value is not None and value.value is not None:
            yield {
                "cell": cell.cell_id, "attempt": value.attempt_id, "row": label,
                "mixer": drawn.levels["attn_type"] if drawn else MODEL, "memory": drawn.levels["memory"] if drawn else "on",
                "task": column.heading, "probe": PROBE, "metric": column.metric, "unit": column.unit,
                "chance": math.nan if task.chance is None else task.chance, "value": value.value, "questions": value.n or math.nan, "mean": entry.value,
                "seeds": entry.seeds, "low": math.nan if low is None else low, "high": math.nan if high is None else high,
            }  # fmt: skip


def _bar_note(frame: pd.DataFrame) -> str:
    """Return the sentences on points, bars and the chance level, as far as the rows have them."""
    single = frame["seeds"] == 1
    barred = frame["low"].notna()
    bars = [
        *(["Wilson intervals over the questions (one run)"] if (single & barred).any() else []),
        *(["t intervals of the mean over seeds"] if (~single & barred).any() else []),
    ]
    parts = [
        f"{counted(frame['row'].nunique(), 'row')}"
        + (f"; points: means over {_seed_range(frame)} seeds." if not single.all() else "."),
        *([f"Bars: 95 % {' or '.join(bars)}."] if bars else []),
        *_question_error_note(frame[~single]),
    ]
    return " ".join(parts)


def _question_error_note(frame: pd.DataFrame) -> list[str]:
    """Return the sentence on the standard error that the sample of questions alone makes, as a list; may be empty.

    It is the binomial one of the mean share of each task.

    Args:
        frame: Rows of means over seeds.
    """
    shares = frame[(frame["unit"] == "fraction") & frame["questions"].notna()]
    texts = []
    for task, rows in shares.groupby("task", sort=False):
        share, questions = float(rows["value"].mean()), float(rows["questions"].min())
        texts.append(f"{task} {100 * math.sqrt(share * (1 - share) / questions):.1f}")
    return [f"Not in them: the standard error by the sample of questions ({', '.join(texts)} points)."] if texts else []


def _seed_range(frame: pd.DataFrame) -> str:
    """Return the number of seeds behind means over several, such as "3" or "2 to 3"."""
    counts = frame["seeds"][frame["seeds"] > 1]
    return str(counts.min()) if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per task with a row per configuration or model, its interval, and the chance level.

    Shares are in %. The labels of rows with a highlighted cell of `look` are bold.
    """
    frame = figure_data.frame
    labels = list(dict.fromkeys(frame["row"]))
    tasks = list(dict.fromkeys(frame["metric"]))
    titles = [str(frame.loc[frame["metric"] == metric, "task"].iloc[0]) for metric in tasks]
    height = (ROW_HEIGHT * len(labels) + 0.75) * drawing.rows_of(len(tasks))
    figure = drawing.page(height, drawing.width_of(len(tasks)))
    inks = style.mixer_inks(frame["mixer"])
    bold = set(frame.loc[frame["cell"].isin(list(look.highlight)), "row"])
    group = drawing.panels(figure, titles, sharey=True)
    for axes, metric in zip(group, tasks, strict=True):
        _draw_panel(axes, frame[frame["metric"] == metric], labels, inks)
    units = {axes.get_xlabel() for axes in group}
    if len(units) == 1 and len(group) > 1:
        for axes in group:
            axes.set_xlabel("")
        figure.supxlabel(units.pop(), fontsize=drawing.size("axes.labelsize"))
    for axes in group:
        # panels that share their rows have labels at the left alone
        for label, text in zip(axes.get_yticklabels(), labels, strict=False):
            label.set_fontweight("bold" if text in bold else "normal")
    return drawing.finished(figure, figure_data.title, figure_data.notes, _legend(frame))


def _legend(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the legend handles of the marks that occur: mean, interval, single run and chance level."""
    grey = {"color": drawing.GREY, "linestyle": "none"}
    has_seeds = bool((frame["seeds"] > 1).any())
    noun, memories = "mean over seeds" if has_seeds else "score", frame["memory"].nunique() > 1
    handles = {noun: drawing.key(marker="o", **grey)}
    handles |= {"no memory": drawing.key(**style.memory_look(drawing.GREY, "off") | grey)} if memories else {}
    bar = drawing.key(color=drawing.GREY, linewidth=drawing.line_width(1.3))
    handles |= {"95 % interval": bar} if frame["low"].notna().any() else {}
    handles |= {"single run": drawing.key(**RUN | grey)} if has_seeds else {}
    return handles


def _draw_panel(axes: Axes, rows: pd.DataFrame, labels: Sequence[str], inks: Any) -> None:
    """Draw the rows of one task: mean, interval, single runs and chance level.

    Args:
        axes: The panel.
        rows: Rows of the task.
        labels: Names of all rows, from top to bottom.
        inks: Colour by mixer.
    """
    percent = str(rows["unit"].iloc[0]) == "fraction"
    scale = 100 if percent else 1
    for label, runs in rows.groupby("row", sort=False):
        y, first = labels.index(str(label)), runs.iloc[0]
        ink = inks[first["mixer"]]
        if len(runs) > 1:
            drawing.points(axes, scale * runs["value"], [y + RUNS_BELOW] * len(runs), **RUN | {"color": ink})
        if not math.isnan(first["low"]):
            axes.hlines(y, scale * first["low"], scale * first["high"], color=ink, linewidth=drawing.line_width(1.3))
        look = style.memory_look(ink, str(first["memory"])) | {"linestyle": "none", "zorder": 3}
        axes.plot(scale * first["mean"], y, **look, markersize=drawing.line_width(4.6))
    ends = scale * rows[["value", "low", "high"]].to_numpy(dtype=float)
    low, high, chance = float(np.nanmin(ends)), float(np.nanmax(ends)), scale * float(rows["chance"].iloc[0])
    if low - FAR_CHANCE * (high - low) <= chance <= high + FAR_CHANCE * (high - low):
        axes.axvline(chance, zorder=0.9, **reference_line())
    elif not math.isnan(chance):
        text = f"← chance {chance:g}" if chance < low else f"chance {chance:g} →"
        side = {"ha": "left" if chance < low else "right", "va": "bottom", "xycoords": "axes fraction"}
        drawing.note(axes, text, (0.0 if chance < low else 1.0, 0.0), (1, 1), color=drawing.GREY, **side)
    axes.set_ylim(len(labels) - 0.1, -0.6)
    drawing.put_ticks(axes.yaxis, {float(y): label for y, label in enumerate(labels)})
    drawing.rows_alone(axes)
    axes.margins(x=0.06)
    if percent:  # intervals of few seeds may reach beyond all values that there are
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, -4), min(high, 104))
    axes.locator_params(axis="x", nbins=drawing.ticks_that_fit(axes), min_n_ticks=3)
    axes.set_xlabel("right answers, %" if percent else "score")
