"""Figure `attention-map`: attention weights of each query of a short text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ....results.store.store import Store
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Figure, FigureData, FigureOptions, collected, frame_origins
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
)
from .item_frames import item_detail_rows

PROBE, METRIC = "attention_map", "keys"
MAX_MAPS = 12
"""Largest number of maps of one cell that are drawn."""
MAX_LETTERS = 40
"""Most tokens of a map whose axes show the tokens themselves."""
MAX_TERMS, TERM = 16, 7
"""Most tokens of several letters whose axes show them, and most letters of each."""
MIN_NEGATIVE_WEIGHT = 0.01
"""Weight below zero from which on a map has colours for negative weights."""


def collect(store: Store, data: SweepData) -> FigureData:
    """Return the weights of every stored attention map.

    One row per weight: cell, attempt, layer, head, query, key (both positions from 0), weight, keys, the number of keys
    that share the attention of that query, and token, the query's text (empty in older maps).

    Raises:
        ReportError: No cell has maps.
    """
    frame = _frame(store, data)
    if frame.empty:
        raise ReportError(f"no cell of sweep {data.sweep} has attention maps; evaluate with --probe {PROBE}")
    measured = list(dict.fromkeys(frame["cell"]))
    first = first_cell_of_each(data, measured)
    sizes = sorted({int(size) + 1 for size in frame.groupby("cell")["query"].max()})
    tokens = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    signed = frame["weight"].min() < -MIN_NEGATIVE_WEIGHT
    root = "(Σ|w|)²" if signed else "(Σw)²"
    notes = [
        f"A text of {tokens} tokens; a row has the weights w of a query. White: later keys, masked. In titles: effective "
        f"number of keys, {root}/Σw², that of equal weights as concentrated, at most the keys that a query sees; mean "
        "over the later half of the queries."
    ]
    if not signed:
        notes.append("The first query, with a weight of 1, sets no colour.")
    mixers = {cell.levels["attn_type"] for cell in data.cells if cell.cell_id in measured}
    if normed := sorted(mixers & {"polar", "diff"}):
        shown = " and ".join(drawing.level_label(mixer) for mixer in normed)
        notes.append(f"{shown}: rows are normalized to a sum of 1, without the magnitude or norm that follows.")
    maps = frame.drop_duplicates(["cell", "layer", "head"]).groupby("cell").size()
    if len(first) > 1 and maps.max() > 1:
        counts = str(maps.min()) if maps.min() == maps.max() else f"{maps.min()} to {maps.max()}"
        notes.append(
            f"One of the {counts} maps of a cell: of the last layer with maps, the head with the fewest effective keys; "
            "in brackets: all heads of that layer."
        )
    return collected(
        store, data, "attention-map", "Attention maps", frame, frame_origins(frame),
        notes=[*notes, *selection_notes(data, measured)], first=first, titles=title_parts(data, measured),
    )  # fmt: skip


def _effective_keys(rows: pd.DataFrame) -> float:
    """Return the mean effective number of keys of one or several maps over the later half of the queries."""
    late = rows[rows["query"] >= (rows["query"].max() + 1) / 2]
    return float(late.drop_duplicates(["layer", "head", "query"])["keys"].mean())


def _frame(store: Store, data: SweepData) -> pd.DataFrame:
    """Return the weights of all stored maps, one row per weight; empty if none is stored.

    Columns: cell, attempt, layer, head, query, keys (effective number of keys of the query, (Σ|w|)²/Σw²), key, weight, token. Items without a list of weights are left out.
    """
    maps = [row for row in item_detail_rows(store, data, (PROBE, METRIC, 0)) if isinstance(row.get("weights"), list)]
    sizes = [len(row["weights"]) for row in maps]
    each = pd.DataFrame(maps, columns=["cell", "attempt", "layer", "head", "position", "value", "token"])
    tokens = each.pop("token").astype(object).fillna("").repeat(sizes).reset_index(drop=True)
    frame = each.loc[np.repeat(np.arange(len(each)), sizes)].reset_index(drop=True)
    key = [position for size in sizes for position in range(size)]
    weight = [weight for row in maps for weight in row["weights"]]
    return frame.rename(columns={"position": "query", "value": "keys"}).assign(key=key, weight=weight, token=tokens)


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw one map per cell, or up to 12 maps of a single cell or of each highlighted one, by layer and head.

    The map of a cell is that of the head with the fewest effective keys of its last layer with maps. Axes show up to 40 tokens of a letter each, or 16
    short words, otherwise positions. Colours are signed, with equal ends, if any weight is below -0.01; otherwise they follow the
    square root of the weight, up to the largest of a query after the first.
    """
    from matplotlib.colors import PowerNorm

    cells = cells_to_draw(figure_data, look)
    maps: list[tuple[str, np.ndarray]] = []
    letters: list[list[str]] = []
    for cell in cells:
        cell_rows = figure_data.frame[figure_data.frame["cell"] == cell]
        of_cell = list(cell_rows.groupby(["layer", "head"], sort=True))
        cell_title = map_title(figure_data, look, cell)
        is_selection = len(cells) > 1 and not look.highlight
        for (layer, head), rows in [_most_selective(of_cell)] if is_selection else of_cell[:MAX_MAPS]:
            name = f"layer {layer}, head {head}\n{_effective_keys(rows):.1f} keys"
            if is_selection and cell_rows[cell_rows["layer"] == layer]["head"].nunique() > 1:
                name += f" ({_effective_keys(cell_rows[cell_rows['layer'] == layer]):.1f})"
            maps.append((name if len(cells) == 1 else f"{cell_title}\n{name}", _weight_table(rows)))
            letters.append(rows.drop_duplicates("query").sort_values("query")["token"].tolist())
    figure, group = map_grid([name for name, _ in maps], 2.9, 0.95, square=True)
    least, most = (reach([float(reach(table)) for _, table in maps]) for reach in (np.nanmin, np.nanmax))
    signed = least < -MIN_NEGATIVE_WEIGHT
    far = max(-least, most)
    # the first query sees a single key, whose weight of 1 would take most of the scale
    later = max((float(np.nanmax(table[1:])) for _, table in maps if len(table) > 1), default=most)
    norm: Any = drawing.linear(-far, far) if signed else PowerNorm(0.5, 0, max(later, 1e-3), clip=True)
    for axes, (_, table), tokens in zip(group, maps, letters, strict=True):
        image = draw_heat_map(
            axes, table, norm, colours=drawing.diverging() if signed else drawing.HEAT_MAP, bad="#ffffff"
        )
        ticks = list(range(0, len(table), -(-len(table) // 8)))
        axes.set(xticks=ticks, yticks=ticks, box_aspect=1)
        if _are_letters(tokens) or _are_terms(tokens):
            size = drawing.size("small") * min(1, 24 / len(tokens))
            axes.set_xticks(range(len(tokens)), tokens, fontsize=size, rotation=90 * (not _are_letters(tokens)))
            axes.set_yticks(range(len(tokens)), tokens, fontsize=size)
    lettered = all(_are_letters(tokens) or _are_terms(tokens) for tokens in letters)
    label_maps(group, "key" if lettered else "key position", "query" if lettered else "query position")
    top = norm.vmax
    shown = [norm.vmin, 0.0, top] if signed else [0.0, 0.1 * top, 0.4 * top, top]
    add_colour_bar(
        figure,
        image,
        "attention weight" if signed else "attention weight (square-root scale)",
        {tick: f"{'≥ ' * (tick == top and later < most and not signed)}{tick:.2g}" for tick in shown},
    )
    cell_title = (
        f"{figure_data.title}: {map_title(figure_data, look, cells[0])}" if len(cells) == 1 else figure_data.title
    )
    return drawing.finished(figure, cell_title, figure_data.notes, {})


def _are_letters(tokens: list[str]) -> bool:
    """Return True if these are few enough tokens of a letter or digit each, so that they fit as labels of an axis."""
    return len(tokens) <= MAX_LETTERS and all(len(token) == 1 and token.isalnum() for token in tokens)


def _are_terms(tokens: list[str]) -> bool:
    """Return True if these are few enough short words, with or without a space, so that they fit as labels of an axis."""
    terms = [token.strip() for token in tokens]
    return len(terms) <= MAX_TERMS and all(term.isalnum() and term.isascii() and len(term) <= TERM for term in terms)


def _most_selective(maps: list[tuple[Any, pd.DataFrame]]) -> tuple[Any, pd.DataFrame]:
    """Return the ((layer, head), rows) of the last layer whose queries have the fewest effective keys on average.

    Of equal ones it is the first head.

    Args:
        maps: Pairs of (layer, head) and rows with query and keys, at least one.
    """
    last = max(layer for (layer, _), _ in maps)
    of_last = [item for item in maps if item[0][0] == last]
    return min(of_last, key=lambda item: _effective_keys(item[1]))


def _weight_table(rows: pd.DataFrame) -> np.ndarray:
    """Return the weights of a map as a square float array [queries, keys], NaN where a query sees no key.

    Args:
        rows: Rows of one map, with query and key positions from 0.
    """
    size = int(max(rows["query"].max(), rows["key"].max())) + 1
    table = np.full((size, size), np.nan)
    table[rows["query"].to_numpy(dtype=int), rows["key"].to_numpy(dtype=int)] = rows["weight"]
    return table
