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

    def thinned(self, max_points: int) -> LossSeries:
        """Every k-th point counted from the last, at most `max_points`."""
        stride = max(1, -(-len(self.tokens) // max_points))
        selection = slice((len(self.tokens) - 1) % stride, None, stride)
        # copies: a view would keep the whole curve in memory
        return LossSeries(self.tokens[selection].copy(), self.wall_s[selection].copy(), self.loss[selection].copy())

    def to_bytes(self) -> bytes:
        """Differences of `tokens`, then `wall_s`, then `loss`, little-endian, each with its bytes grouped by place."""
        columns = (np.diff(self.tokens, prepend=0.0).astype("<f8"), self.wall_s, self.loss)
        return b"".join(_bytes_by_significance(column) for column in columns)


@dataclass(frozen=True)
class CellCurves:
    """The training curve of an attempt, thinned; `points` counts what the database has, `all` what either series has of it."""

    attempt: int
    points: int
    all: tuple[int, int]
    train: LossSeries
    val: LossSeries

    def to_bytes(self) -> bytes:
        """The training series, then the validation series."""
        return self.train.to_bytes() + self.val.to_bytes()


def load_curves(store: Store, data: SweepData, attempts: Sequence[Attempt]) -> dict[str, CellCurves]:
    """By cell: the curve of its newest finished training, else of its newest training, for cells that have one.

    Each is thinned as soon as it is read, so that all of them together take no more room than the page.
    """
    newest = {attempt.cell_id: attempt.id for attempt in attempts if attempt.kind == "train"}
    cell_by_attempt = {cell.trained_attempt_id or newest.get(cell.cell_id): cell.cell_id for cell in data.cells}
    cell_by_attempt.pop(None, None)
    max_points = max(MIN_POINTS, CURVE_POINTS // max(1, len(cell_by_attempt)))
    with store.snapshot() as snapshot:
        read = snapshot.curve_arrays([attempt for attempt in cell_by_attempt if attempt is not None], COLUMNS)
        return {cell_by_attempt[attempt]: _thinned_curves(attempt, rows, max_points) for attempt, rows in read}


def _thinned_curves(attempt: int, rows: np.ndarray, max_points: int) -> CellCurves:
    """`rows`: COLUMNS; NaN for what the database has as NULL."""
    validated = np.isfinite(rows[:, 3])
    # a point with neither loss is a step whose loss was not finite: the line breaks there
    trained = np.isfinite(rows[:, 2]) | ~validated
    train, val = _loss_series(rows[trained][:, (0, 1, 2)]), _loss_series(rows[validated][:, (0, 1, 3)])
    counts = (len(train.tokens), len(val.tokens))
    return CellCurves(attempt, len(rows), counts, train.thinned(max_points), val.thinned(max_points))


def _loss_series(rows: np.ndarray) -> LossSeries:
    return LossSeries(rows[:, 0].copy(), rows[:, 1].astype("<f4"), rows[:, 2].astype("<f4"))


def _bytes_by_significance(column: np.ndarray) -> bytes:
    """All first bytes, then all second ones, and so on: neighbours resemble each other, so this compresses far better."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.dtype.itemsize).T.tobytes()


def curve_facts(curve: CellCurves) -> dict[str, Any]:
    """`kept`: the points of the training and of the validation series that the block holds; `points`: of the database."""
    counts = [len(series.tokens) for series in (curve.train, curve.val)]
    return {"attempt": curve.attempt, "points": curve.points, "kept": counts, "all": list(curve.all)}


def losses_block(data: SweepData, curves: Mapping[str, CellCurves]) -> dict[str, Any]:
    """The validation losses of all cells over training, thinned: `lines` [cell by its place, grid, losses in nats per token in
    five digits, null where not finite]; a grid is the tokens at which they were read, which most cells share."""
    grids: dict[tuple[float, ...], int] = {}
    lines = []
    for cell_index, cell in enumerate(data.cells):
        curve = curves.get(cell.cell_id)
        if curve is None or not len(curve.val.tokens):
            continue
        val = curve.val.thinned(OVERVIEW_POINTS)
        grid = grids.setdefault(tuple(val.tokens.tolist()), len(grids))
        losses = [float(f"{loss:.5g}") if math.isfinite(loss) else None for loss in val.loss.tolist()]
        lines.append([cell_index, grid, losses])
    return {"grids": [list(map(int, grid)) for grid in grids], "lines": lines}
