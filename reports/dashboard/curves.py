"""Training curves of a page: thinned as they are read, and packed as bytes."""

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
"""Points of all training curves together; with more, each curve is thinned and the page says so."""
COLUMNS = ("tokens", "wall_s", "train_loss", "val_loss")
MIN_POINTS = 100  # points that each curve keeps, regardless of the number of cells
OVERVIEW_POINTS = 64  # points per line in the overview of all validation losses


@dataclass(frozen=True)
class LossSeries:
    """A loss over training: `tokens` (float64), `wall_s` and `loss` (float32; NaN where it was not finite)."""

    tokens: np.ndarray
    wall_s: np.ndarray
    loss: np.ndarray

    def strided(self, max_points: int) -> LossSeries:
        """Return a copy with every k-th point, counted back from the last, so that at most `max_points` remain.

        Curves with equal tokens have equal tokens afterwards, too.
        """
        stride = max(1, -(-len(self.tokens) // max_points))
        return self._selected(np.arange((len(self.tokens) - 1) % stride, len(self.tokens), stride))

    def thinned(self, max_points: int) -> LossSeries:
        """Return a copy with at most `max_points` points that looks the same: each stretch keeps its extremes.

        Of every stretch of equally many points stay the lowest and the highest loss, and the first gap, if there is one;
        so do the first and the last point. A curve of at most `max_points` points stays complete.

        Args:
            max_points: At least 5.
        """
        count = len(self.tokens)
        if count <= max_points:
            return self._selected(np.arange(count))
        has_gaps = bool(np.isnan(self.loss).any())
        size = -(-count // ((max_points - 2) // (3 if has_gaps else 2)))
        rows = np.full((-(-count // size), size), np.nan, dtype=self.loss.dtype)
        rows.reshape(-1)[:count] = self.loss
        starts, is_gap = np.arange(len(rows)) * size, np.isnan(rows)
        picks = [starts + np.where(is_gap, np.inf, sign * rows).argmin(axis=1) for sign in (1, -1)]
        if has_gaps:
            is_gap.reshape(-1)[count:] = False  # the padding
            picks.append((starts + is_gap.argmax(axis=1))[is_gap.any(axis=1)])
        return self._selected(np.unique(np.concatenate([[0], *picks, [count - 1]])))

    def _selected(self, indices: np.ndarray) -> LossSeries:
        """Return the points at these indices, as copies: a view would keep the whole curve in memory."""
        return LossSeries(self.tokens[indices], self.wall_s[indices], self.loss[indices])

    def to_bytes(self) -> bytes:
        """Return the series as little-endian bytes: differences of `tokens`, then `wall_s`, then `loss`.

        These are float64, float32 and float32, the latter rounded to five digits. The first difference is the first
        value. The bytes of each array are grouped by significance, which compresses better.
        """
        columns = (np.diff(self.tokens, prepend=0.0).astype("<f8"), _rounded(self.wall_s), _rounded(self.loss))
        return b"".join(_bytes_by_significance(column) for column in columns)


@dataclass(frozen=True)
class CellCurves:
    """Training curve of an attempt, thinned.

    `points` counts the rows in the database. `all` has the numbers of points of the training and of the validation
    series before thinning.
    """

    attempt: int
    points: int
    all: tuple[int, int]
    train: LossSeries
    val: LossSeries

    def to_bytes(self) -> bytes:
        """Return the bytes of the training series, followed by those of the validation series."""
        return self.train.to_bytes() + self.val.to_bytes()


def load_curves(store: Store, data: SweepData, attempts: Sequence[Attempt]) -> dict[str, CellCurves]:
    """Return the thinned training curve of every cell that has one, by cell id.

    It is that of the trained attempt, else of the newest training attempt. A curve of more than max(100, 240,000 /
    number of curves) points is thinned to that, its training and its validation series each for itself. Each is thinned
    as soon as it is read, to save memory.

    Args:
        store: The database.
        data: The sweep.
        attempts: Attempts of its cells, oldest first.
    """
    newest = {attempt.cell_id: attempt.id for attempt in attempts if attempt.kind == "train"}
    cell_by_attempt = {cell.trained_attempt_id or newest.get(cell.cell_id): cell.cell_id for cell in data.cells}
    cell_by_attempt.pop(None, None)
    max_points = max(MIN_POINTS, CURVE_POINTS // max(1, len(cell_by_attempt)))
    with store.snapshot() as snapshot:
        read = snapshot.curve_arrays([attempt for attempt in cell_by_attempt if attempt is not None], COLUMNS)
        return {cell_by_attempt[attempt]: _thinned_curves(attempt, rows, max_points) for attempt, rows in read}


def _thinned_curves(attempt: int, rows: np.ndarray, max_points: int) -> CellCurves:
    """Return the curves of an attempt, each series thinned to at most `max_points`.

    A row with a finite validation loss is a point of the validation series. One with a finite training loss, or with
    neither (a step whose loss was not finite, kept as NaN), is a point of the training series.

    Args:
        attempt: Id of the attempt.
        rows: Float array [points, 4] of tokens, wall_s, train_loss and val_loss; NaN where the database has NULL.
        max_points: Maximum points per series.
    """
    validated = np.isfinite(rows[:, 3])
    # a point with neither loss is a step whose loss was not finite: the line breaks there
    trained = np.isfinite(rows[:, 2]) | ~validated
    train, val = _loss_series(rows, trained, 2), _loss_series(rows, validated, 3)
    counts = (len(train.tokens), len(val.tokens))
    return CellCurves(attempt, len(rows), counts, train.thinned(max_points), val.thinned(max_points))


def _loss_series(rows: np.ndarray, mask: np.ndarray, loss: int) -> LossSeries:
    return LossSeries(rows[mask, 0], rows[mask, 1].astype("<f4"), rows[mask, loss].astype("<f4"))


def _rounded(column: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to 17 bits, which are five digits: the rest of the bits is zero and compresses away."""
    bits = np.ascontiguousarray(column, dtype="<f4").view(np.uint32)
    return ((bits + np.uint32(0x40)) & np.uint32(0xFFFFFF80)).view("<f4")


def _bytes_by_significance(column: np.ndarray) -> bytes:
    """Return all first bytes of the values, then all second bytes, and so on, which compresses far better."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.dtype.itemsize).T.tobytes()


def curve_facts(curve: CellCurves) -> dict[str, Any]:
    """Return the JSON of a curve: attempt, points (rows in the database), kept and all.

    `kept` counts the points of the training and of the validation series in the block, `all` those before thinning.
    """
    counts = [len(series.tokens) for series in (curve.train, curve.val)]
    return {"attempt": curve.attempt, "points": curve.points, "kept": counts, "all": list(curve.all)}


def losses_block(data: SweepData, curves: Mapping[str, CellCurves]) -> dict[str, Any]:
    """Return the JSON of the losses of all cells over training, thinned to at most 64 points per line.

    Args:
        data: The sweep.
        curves: Training curves by cell id.

    Returns:
        grids: distinct lists of training tokens at which losses were measured. lines: [index of the cell, index of its
        grid, validation losses in nats per token with five digits, None where not finite]; cells without any have no
        line. training: lines of the training losses of the cells with fewer than two, which begin with the first step.
    """
    grids: dict[tuple[float, ...], int] = {}
    lines: dict[str, list[list[Any]]] = {"lines": [], "training": []}
    for cell_index, cell in enumerate(data.cells):
        curve = curves.get(cell.cell_id)
        if curve is None:
            continue
        validations = len(curve.val.tokens)
        shown_series = {
            "lines": curve.val if validations else None,
            "training": curve.train if validations < 2 else None,
        }
        for name, series in shown_series.items():
            if series is None or not len(series.tokens):
                continue
            shown = series.strided(OVERVIEW_POINTS)
            grid = grids.setdefault(tuple(shown.tokens.tolist()), len(grids))
            losses = [float(f"{loss:.5g}") if math.isfinite(loss) else None for loss in shown.loss.tolist()]
            lines[name].append([cell_index, grid, losses])
    return {"grids": [list(map(int, grid)) for grid in grids], **lines}
