"""The training curves of a page, thinned as they are read and packed for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...results.store.records import Attempt
from ...results.store.store import Store
from ..sweep_data import SweepData

CURVE_POINTS = 240_000
"""Points of all training curves together; with more, each is thinned and the page says so."""
COLUMNS = ("tokens", "wall_s", "train_loss", "val_loss")
MIN_POINTS = 100  # points that a curve keeps however many cells there are
OVERVIEW_POINTS = 64  # points of a line in the picture of all validation losses


@dataclass(frozen=True)
class LossSeries:
    """One loss over training: `tokens` (float64), `wall_s` and `loss` (float32; NaN where it was not finite)."""

    tokens: np.ndarray
    wall_s: np.ndarray
    loss: np.ndarray

    def thinned(self, most: int) -> LossSeries:
        """Every k-th point counted from the last, at most `most`."""
        every = max(1, -(-len(self.tokens) // most))
        kept = slice((len(self.tokens) - 1) % every, None, every)
        # copies: a view would keep the whole curve in memory
        return LossSeries(self.tokens[kept].copy(), self.wall_s[kept].copy(), self.loss[kept].copy())

    def packed(self) -> bytes:
        """Differences of `tokens`, then `wall_s`, then `loss`, little-endian, each with its bytes grouped by place."""
        columns = (np.diff(self.tokens, prepend=0.0).astype("<f8"), self.wall_s, self.loss)
        return b"".join(_bytes_by_place(column) for column in columns)


@dataclass(frozen=True)
class CellCurves:
    """The training curve of an attempt, thinned; `points` counts what the database has, `all` what either series has of it."""

    attempt: int
    points: int
    all: tuple[int, int]
    train: LossSeries
    val: LossSeries

    def packed(self) -> bytes:
        """The training series, then the validation series."""
        return self.train.packed() + self.val.packed()


def load_curves(store: Store, data: SweepData, attempts: Sequence[Attempt]) -> dict[str, CellCurves]:
    """By cell: the curve of its newest finished training, else of its newest training, for cells that have one.

    Each is thinned as soon as it is read, so that all of them together take no more room than the page.
    """
    newest = {attempt.cell_id: attempt.id for attempt in attempts if attempt.kind == "train"}
    wanted = {cell.trained_attempt_id or newest.get(cell.cell_id): cell.cell_id for cell in data.cells}
    wanted.pop(None, None)
    most = max(MIN_POINTS, CURVE_POINTS // max(1, len(wanted)))
    with store.snapshot() as seen:
        read = seen.curve_arrays([attempt for attempt in wanted if attempt is not None], COLUMNS)
        return {wanted[attempt]: _curve(attempt, rows, most) for attempt, rows in read}


def _curve(attempt: int, rows: np.ndarray, most: int) -> CellCurves:
    """`rows`: COLUMNS; NaN for what the database has as NULL."""
    validated = np.isfinite(rows[:, 3])
    # a point with neither loss is a step whose loss was not finite: the line breaks there
    trained = np.isfinite(rows[:, 2]) | ~validated
    train, val = _series(rows[trained][:, (0, 1, 2)]), _series(rows[validated][:, (0, 1, 3)])
    counts = (len(train.tokens), len(val.tokens))
    return CellCurves(attempt, len(rows), counts, train.thinned(most), val.thinned(most))


def _series(rows: np.ndarray) -> LossSeries:
    return LossSeries(rows[:, 0].copy(), rows[:, 1].astype("<f4"), rows[:, 2].astype("<f4"))


def _bytes_by_place(column: np.ndarray) -> bytes:
    """All first bytes, then all second ones, and so on: neighbours resemble each other, so this compresses far better."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.dtype.itemsize).T.tobytes()


def curve_facts(curve: CellCurves) -> dict[str, Any]:
    """`kept`: the points of the training and of the validation series that the block holds; `points`: of the database."""
    kept = [len(series.tokens) for series in (curve.train, curve.val)]
    return {"attempt": curve.attempt, "points": curve.points, "kept": kept, "all": list(curve.all)}


def losses_block(data: SweepData, curves: Mapping[str, CellCurves]) -> dict[str, Any]:
    """The validation losses of all cells over training, thinned: `lines` [cell by its place, grid, losses in nats per token in
    five digits, null where not finite]; a grid is the tokens at which they were read, which most cells share."""
    grids: dict[tuple[float, ...], int] = {}
    lines = []
    for place, cell in enumerate(data.cells):
        curve = curves.get(cell.cell_id)
        if curve is None or not len(curve.val.tokens):
            continue
        val = curve.val.thinned(OVERVIEW_POINTS)
        grid = grids.setdefault(tuple(val.tokens.tolist()), len(grids))
        found = [float(f"{loss:.5g}") if math.isfinite(loss) else None for loss in val.loss.tolist()]
        lines.append([place, grid, found])
    return {"grids": [list(map(int, grid)) for grid in grids], "lines": lines}
