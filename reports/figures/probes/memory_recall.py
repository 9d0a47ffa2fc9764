"""Figure `memory-recall`: recall over the number of stored pairs, by the memory alone and in its network."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ....results.store.store import Store
from ...sweep_data import ReportError, SweepData, cell_level
from ..canvas import drawing
from ..canvas.base import GROUP, Axes, Figure, FigureData, FigureOptions, cell_labels, collected, frame_origins
from ..canvas.length_frames import averaging_note, band_note, configuration_of, line_means, t_half_width
from ..canvas.line_drawing import REFERENCE, reference_line
from .item_frames import item_detail_rows
from .panels import draw_panels

PROBE = "memory_recall"
PANELS = {"share": "the memory alone", "context_share": "in context"}
"""Title of a metric's panel."""
BAND = "95% t intervals across the heads of all layers (in context: across rows) of a single cell"
COLUMNS = ["cell", "attempt", "metric", "pairs", "chance", "value", "sd", "n"]
NUMBERS = ["probe", "metric", "pairs", "chance", "value", "n", "low", "high"]
SHOWN = ["cell", "attempt", "configuration", *GROUP, *NUMBERS]


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the shares of keys that are answered with their own value, by number of stored pairs.

    One row per cell, metric and number of pairs: cell, attempt, configuration, panel (title of the metric), first,
    second (levels of the two axes that distinguish lines), line, probe, metric, pairs, chance (chance level), value, n
    (heads of all layers, or rows), low and high (95 % t interval over these, clipped to 0 and 1; NaN for one). Shares
    are fractions.

    Raises:
        ReportError: No cell has been measured.
    """
    frame = _frame(store, data)
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has recall measurements; evaluate with --probe {PROBE}")
    # the figure compares memories, so they distinguish lines first
    ranked = ("memory", "attn_type", "window", *data.extra_axes(), "distractor", "reg_mode")
    axes = tuple(axis for axis in ranked if len(data.levels(axis)) > 1)[:2]
    frame = _with_line_groups(data, frame, axes)
    means = line_means(_with_pairs_as_length(frame))
    notes = [
        f"{averaging_note(data, axes, means=means)}{band_note(means, BAND)}Alone: random keys and values, "
        "written with the memory's average write strengths and decays on validation text; correct if the value nearest "
        "to the readout (by cosine) is the key's own. In context: pairs of tokens, then every key again; correct if the value is the most "
        f"probable token. Chance level: one of the stored values at random. {_count_note(frame)}",
        *_missing_note(frame),
    ]
    return collected(
        store, data, "memory-recall", "Recall by number of key-value pairs", frame, frame_origins(frame), notes=notes,
        axes=axes, names=cell_labels(data, without=axes),
    )  # fmt: skip


def _count_note(frame: pd.DataFrame) -> str:
    """Return the sentence on what a cell's number is the mean of in each panel, such as "8 heads (the memory alone)"."""
    nouns = {PANELS["share"]: "heads of all layers", PANELS["context_share"]: "rows"}
    parts = []
    for panel, counts in frame.groupby("panel", sort=False)["n"]:
        ends = [str(count) for count in sorted({int(counts.min()), int(counts.max())})]
        parts.append(f"{' to '.join(ends)} {nouns[str(panel)]} ({panel})")
    return f"A run's point is over {' and '.join(parts)}, each with every stored pair."


def _missing_note(frame: pd.DataFrame) -> list[str]:
    """Return the note on numbers of pairs that one of the panels lacks, as a list; empty without any.

    Args:
        frame: Rows with panel and pairs.
    """
    every = set(frame["pairs"])
    parts = []
    for panel, measured in frame.groupby("panel", sort=False)["pairs"]:
        missing = ", ".join(map(str, sorted(every - set(measured))))
        parts += [f"{missing} pairs ({panel})"] if missing else []
    return [f"Not measured: {'; '.join(parts)}."] if parts else []


def _frame(store: Store, data: SweepData) -> pd.DataFrame:
    """Return one row per cell, metric and number of pairs, averaged over the items; empty if nothing is stored.

    Columns: cell, attempt, metric (share or context_share), pairs, chance, value, sd (sample standard deviation over
    items, NaN for one) and n (number of items). A metric whose items lack the details `pairs` and `chance` is left out.
    """
    parts = []
    for metric in PANELS:
        items = pd.DataFrame(item_detail_rows(store, data, (PROBE, metric, 0)))
        if items.empty or not {"pairs", "chance"} <= set(items):
            continue
        each = items.groupby(["cell", "attempt", "pairs"], sort=False)
        summary = each.agg(
            chance=("chance", "first"), value=("value", "mean"), sd=("value", "std"), n=("value", "size")
        )
        parts.append(summary.reset_index().assign(metric=metric))
    return pd.concat(parts, ignore_index=True)[COLUMNS] if parts else pd.DataFrame(columns=COLUMNS)


def _with_line_groups(data: SweepData, frame: pd.DataFrame, axes: tuple[str, ...]) -> pd.DataFrame:
    """Return the rows with the columns that `collect` documents: those of their line, and the 95 % t interval of each.

    Args:
        data: The sweep.
        frame: Rows with cell, attempt, metric, pairs, chance, value, sd and n.
        axes: At most two axes that distinguish lines; missing ones give empty levels.
    """
    levels = {cell.cell_id: [*(cell_level(cell, axis) for axis in axes), "", ""][:2] for cell in data.cells}
    half = t_half_width(frame["n"], frame["sd"])
    first, second = ([levels[cell][index] for cell in frame["cell"]] for index in (0, 1))
    grouped = frame.assign(
        configuration=frame["cell"].map(configuration_of(data)), panel=frame["metric"].map(PANELS), probe=PROBE,
        first=first, second=second, low=(frame["value"] - half).clip(0, 1), high=(frame["value"] + half).clip(0, 1),
        line=[", ".join(filter(None, both)) or "all cells" for both in zip(first, second, strict=True)],
    )  # fmt: skip
    return grouped[SHOWN].astype({"pairs": int, "chance": float, "value": float, "n": int})


def _with_pairs_as_length(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the number of pairs as `length`, so that helpers for lines over lengths can draw them."""
    return frame.assign(length=frame["pairs"])


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw the memory alone and in context side by side: a line per memory over pairs, and the chance level.

    Shares are in %. Highlighted cells of `look` are labelled.
    """
    frame = _with_pairs_as_length(figure_data.frame)

    def dress(axes: Axes, panel_rows: pd.DataFrame, last: bool) -> None:
        """Set the scales and limits of a panel and draw its chance level; `last` has no effect."""
        chance = 100 * panel_rows.groupby("length")["chance"].mean()
        axes.plot(chance.index, chance, **reference_line(), zorder=0.9)
        drawing.length_axis(axes, list(frame["length"]))
        axes.set_ylim(-3, 103)
        for pairs in sorted(set(frame["length"]) - set(panel_rows["length"])):
            upright: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center", "color": drawing.GREY}
            drawing.note(axes, "not measured", (pairs, 50), **upright)

    labels = "key-value pairs", "keys answered correctly, %"
    keys = [("chance level, a random value", REFERENCE)]
    return draw_panels(figure_data, look, frame, line_means(frame), dress, labels, scale=100, keys=keys)
