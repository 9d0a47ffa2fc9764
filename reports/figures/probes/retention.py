"""Figure `retention`: half-life of gated state, in mixers and memories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...number_format import format_length
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected, frame_origins, training_lengths
from ..canvas.length_frames import in_grid_order
from .heat_maps import (
    add_colour_bar,
    cells_to_draw,
    draw_heat_map,
    first_cell_of_each,
    label_maps,
    map_grid,
    map_title,
    selection_notes,
    title_parts,
    write_values,
)
from .item_frames import item_values_frame

PROBE = "gates"
PARTS = {"mixer": "retention", "memory": "memory"}
SHORTEST, LONGEST = 0.1, 2.0**20
"""Half-lives in tokens between which colours differ."""
ENDLESS: dict[str, Any] = {"facecolor": "white", "edgecolor": drawing.FAINT, "hatch": "////", "linewidth": 0}
"""Look of gates that hardly decay, which is no part of the scale."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the retention of every gate: the share of previous state that a token keeps, as a mean over tokens.

    One row per gate: cell, attempt, part (mixer or memory), layer, head, channel (0 for one gate per head), retention
    (a fraction), half_life (tokens until half is left; NaN if nothing decays).

    Raises:
        ReportError: No cell has measured gates.
    """
    frame = _frame(store, data)
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has measured gates; evaluate with --probe {PROBE}")
    measured = list(dict.fromkeys(frame["cell"]))
    notes = [
        "A square per gate (head and layer). Half-life: tokens until half of what a token wrote to the state is left, from the "
        f"mean log of each gate over {_token_text(data, measured)}, on which rare resets weigh most.{_extrapolated_text(store, data, frame)}"
    ]
    if (frame["channel"] > 0).any():
        notes.append("Gates per channel: a row is a head of a layer, its channels sorted by half-life.")
    if any(cell.levels["attn_type"] == "tra" for cell in data.cells if cell.cell_id in measured):
        notes.append("TRA: counted in surviving keys, not in tokens.")
    if (frame["half_life"].fillna(LONGEST) >= LONGEST).any():
        notes.append(f"Hatched: {format_length(int(LONGEST))} tokens or more, or no decay at all.")
    return collected(
        store, data, "retention", "Half-life of gated state", frame, frame_origins(frame),
        notes=[*notes, *selection_notes(data, measured)], first=first_cell_of_each(data, measured), titles=title_parts(data, measured),
    )  # fmt: skip


def _token_text(data: SweepData, cells: Sequence[str]) -> str:
    """Return the tokens over which gates are averaged as text, such as "8,192 tokens"."""
    counts = [
        value.n for cell in cells for name in PARTS.values() if (value := data.values.get((cell, PROBE, name, 0)))
    ]
    sizes = sorted({int(count) for count in counts if count})
    return (
        f"{' to '.join(f'{count:,}' for count in dict.fromkeys((sizes[0], sizes[-1])))} tokens" if sizes else "tokens"
    )


def _extrapolated_text(store: Store, data: SweepData, frame: pd.DataFrame) -> str:
    """Return the sentence on half-lives beyond the texts that gates are read on, after a space; "" without any."""
    trained = set(training_lengths(store, data).values())
    if not trained or not (frame["half_life"].fillna(LONGEST) > min(trained)).any():
        return ""
    return f" Beyond a text's {format_length(min(trained))} tokens, the length of training, it is extrapolated."


def _frame(store: Store, data: SweepData) -> pd.DataFrame:
    """Return one row per gate, in the grid's order of cells; empty if none is stored.

    Columns: cell, attempt, part (mixer or memory), layer, head, channel, retention and half_life. half_life is log(0.5)
    / log(retention): 0 for a retention of 0, NaN for 1 or more.
    """
    parts = []
    for part, metric in PARTS.items():
        values = item_values_frame(store, data, (PROBE, metric, 0))
        each = [_channels(data, cell) if part == "mixer" else 1 for cell in values["cell"]]
        size = np.array(each, dtype=int)
        gate_index = values["position"].to_numpy(dtype=int)
        retained_share = values["value"].to_numpy(dtype=float)
        with np.errstate(divide="ignore"):
            life = np.where(retained_share < 1, math.log(0.5) / np.log(np.clip(retained_share, 0, 1)), np.nan)
        columns = {"part": part, "layer": values["item"], "head": gate_index // size, "channel": gate_index % size}
        parts.append(values[["cell", "attempt"]].assign(**columns, retention=retained_share, half_life=life))
    return in_grid_order(pd.concat(parts, ignore_index=True), data)


def _channels(data: SweepData, cell: str) -> int:
    channels = data.values.get((cell, PROBE, "channels", 0))
    return int(channels.value) if channels is not None and channels.value else 1


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a map for the mixer and one for the memory of each cell, as far as they have gates.

    Colours are half-lives in tokens on a logarithmic scale from 0.1; those of 2^20 or more, and of gates that never
    decay, are hatched. Highlighted cells of `look` are drawn instead of the first of each configuration.
    """
    from matplotlib.colors import LogNorm

    cells = set(cells_to_draw(figure_data, look))
    maps = [
        (f"{part} gates\n{map_title(figure_data, look, cell)}", rows)
        for (cell, part), rows in figure_data.frame.groupby(["cell", "part"], sort=False)
        if cell in cells
    ]
    lives = pd.concat([rows for _, rows in maps])["half_life"].fillna(LONGEST).clip(SHORTEST, LONGEST)
    # gates that hardly decay would take most of the scale
    shown = lives[lives < LONGEST] if (lives < LONGEST).any() else lives
    low, high = math.floor(math.log2(shown.min())), math.ceil(math.log2(shown.max()))
    high = max(high, low + 3)
    norm = LogNorm(2.0**low, 2.0**high)
    figure, group = map_grid([map_name for map_name, _ in maps], 1.5, 0.55)
    for axes, (_, rows) in zip(group, maps, strict=True):
        image = _draw_map(axes, rows, norm)
    per_channel = any(rows["channel"].max() > 0 for _, rows in maps)
    label_maps(group, "channels, sorted by half-life, or head" if per_channel else "head", "layer")
    step = -(-(high - low) // 7)
    ticks = [2.0**power for power in range(high, low - 1, -step)][::-1]
    tick_labels = {tick: format_length(int(tick)) if tick >= 1 else f"{tick:.2g}" for tick in ticks}
    add_colour_bar(figure, image, "half-life, tokens", tick_labels)
    endless = {f"≥ {format_length(int(LONGEST))} tokens": drawing.patch(**ENDLESS)}
    return drawing.finished(figure, figure_data.title, figure_data.notes, endless if (lives >= LONGEST).any() else {})


def _draw_map(axes: Axes, rows: pd.DataFrame, norm: Any) -> Any:
    """Draw the half-lives of a cell's gates and return the image.

    Rows are layers and columns heads. For gates per channel a row is a head, its channels sorted by half-life.
    Half-lives are clipped to 0.1 and 2^20 tokens; NaN counts as 2^20.

    Args:
        axes: The axes.
        rows: Rows of one cell and part.
        norm: Normalization of half-lives in tokens.
    """
    life = rows["half_life"].fillna(LONGEST).clip(SHORTEST, LONGEST)
    rows = rows.assign(life=life)
    layers = sorted(set(rows["layer"]))
    if rows["channel"].max() > 0:
        each = rows.sort_values("life").groupby(["layer", "head"])["life"].apply(lambda lives: list(lives))
        lines = [each[key] for key in sorted(each.index)]
        table = np.array(lines, dtype=float)
        heads = len(lines) // len(layers)
        middles = [heads * index + (heads - 1) / 2 for index in range(len(layers))]
    else:
        table = rows.pivot_table(index="layer", columns="head", values="life").to_numpy(dtype=float)
        heads, middles = 1, [float(index) for index in range(len(layers))]
    image = draw_heat_map(axes, np.where(table < LONGEST, table, np.nan), norm, bad="none")
    axes.patch.set(**ENDLESS)
    if rows["channel"].max() == 0:
        texts = [[_life_text(number) for number in row] for row in table.tolist()]
        drawing.after_layout(
            axes.figure,  # type: ignore[arg-type]
            lambda: write_values(axes, table, texts, norm, fitting=True, bright=table >= LONGEST),
        )
        axes.set_xticks(drawing.thin_evenly(range(table.shape[1]), 8))
    for layer_index in range(1, len(layers) if heads > 1 else 0):
        axes.axhline(heads * layer_index - 0.5, color="#ffffff", linewidth=drawing.line_width(1.2))
    shown = drawing.thin_evenly(range(len(layers)), 8)
    axes.set_yticks([middles[index] for index in shown], [str(layers[index]) for index in shown])
    return image


def _life_text(life: float) -> str:
    """Return a half-life in tokens as text: two digits, and K for 1024 tokens."""
    if life >= LONGEST:
        return f"≥ {format_length(int(LONGEST))}"
    return (
        f"{life / 1024:.2g}K"
        if 1000 <= life < 100 * 1024
        else f"{life / 1024:.0f}K"
        if life >= 1000
        else f"{life:.0f}"
        if life >= 10
        else f"{life:.2g}"
    )
