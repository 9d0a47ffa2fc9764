"""Linear models of many measures over one design at once: squares of terms, permutation p, and p that bear unequal spread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special

__all__ = ["Fit", "fit", "permutations_for"]

MOST, LEAST = 2_000, 200  # permutations
WORK = 3e10  # floating-point operations that permutations may take
CHUNK = 200  # permutations worked on at a time
RANDOM = 20_260
DUST = 1e-9
FULL = 1e-8  # of a leverage of 1: such a row has no residual


@dataclass(frozen=True)
class Fit:
    """T terms and M measures over N rows."""

    squares: np.ndarray
    """[T, M]: type III, what the residual grows by without the term."""
    dfs: np.ndarray
    """[T]"""
    residual: np.ndarray
    """[M]: sum of squares."""
    residual_df: int
    residuals: np.ndarray
    """[N, M]"""
    p: np.ndarray
    """[T, M]: of the F test; NaN where nothing is left over."""
    p_permuted: np.ndarray
    """[T, M]: Freedman and Lane's (1983)."""
    p_robust: np.ndarray
    """[T, M]: of the Wald test with HC3 (MacKinnon and White 1985); NaN where a row has no residual of its own."""
    permutations: int

    @property
    def f(self) -> np.ndarray:
        """[T, M]: NaN where nothing is left over."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (self.squares / self.dfs[:, None]) / (self.residual / self.residual_df)
        return np.where(np.isfinite(found), found, np.nan)


def fit(columns: Mapping[tuple[str, ...], np.ndarray], y: np.ndarray) -> Fit:
    """The model with an intercept and these columns [N, df] of each term, of full rank, for `y` [N, M].

    A measure whose residual is no more than rounding has a residual of 0.
    """
    rows = len(y)
    y = y - y.mean(axis=0)
    full = _basis(np.concatenate([np.ones((rows, 1)), *columns.values()], axis=1))
    left = y - full @ (full.T @ y)
    residual, total = (left**2).sum(axis=0), (y**2).sum(axis=0)
    residual = np.where(residual <= 1e-12 * np.maximum(total, 1e-300), 0.0, residual)
    df = rows - full.shape[1]
    parts = []
    for name, own in columns.items():
        others = [np.ones((rows, 1)), *(some for other, some in columns.items() if other != name)]
        rest = _basis(np.concatenate(others, axis=1))
        parts.append((_basis(own - rest @ (rest.T @ own)), rest))
    squares = np.stack([((own.T @ y) ** 2).sum(axis=0) for own, _ in parts])
    dfs = np.array([own.shape[1] for own, _ in parts])
    times = permutations_for(rows, full.shape[1], squares.size)
    known = residual > 0
    p_permuted, p_robust, p = (np.full(squares.shape, np.nan) for _ in range(3))
    leverage = 1 - (full**2).sum(axis=1)
    for place, (own, rest) in enumerate(parts):
        seen = squares[place, known] / residual[known]
        p[place, known] = special.fdtrc(dfs[place], df, seen * df / dfs[place])
        p_permuted[place, known] = _permuted(full, own, y[:, known] - rest @ (rest.T @ y[:, known]), seen, times)
        if leverage.min() > FULL:
            p_robust[place, known] = _robust(own, y[:, known], left[:, known] / leverage[:, None], df)
    return Fit(squares, dfs, residual, df, left, p, p_permuted, p_robust, times)


def permutations_for(rows: int, columns: int, tests: int) -> int:
    """How many permutations a design of that size gets: MOST, fewer where they took too long, and LEAST at least."""
    return int(np.clip(WORK / (2 * rows * columns * max(tests, 1)), LEAST, MOST))


def _basis(columns: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.qr(columns)[0])


def _permuted(full: np.ndarray, own: np.ndarray, left: np.ndarray, seen: np.ndarray, times: int) -> np.ndarray:
    """The share of permutations of the residuals `left` [N, M] of the model without a term that give it as large a ratio of
    squares to residual as `seen` [M]."""
    rows, measures = left.shape
    total = (left**2).sum(axis=0)
    both = np.concatenate([full, own], axis=1).T
    random = np.random.default_rng((RANDOM, rows))
    reached = np.ones(measures)
    for start in range(0, times, CHUNK):
        size = min(CHUNK, times - start)
        order = random.permuted(np.tile(np.arange(rows), (size, 1)), axis=1).T
        parts = (both @ left[order].reshape(rows, -1)).reshape(len(both), size, measures) ** 2
        explained, term = parts[: full.shape[1]].sum(axis=0), parts[full.shape[1] :].sum(axis=0)
        reached += (term >= (seen - DUST * (1 + seen)) * np.maximum(total - explained, 0.0)).sum(axis=0)
    return np.asarray(reached / (times + 1))


def _robust(own: np.ndarray, y: np.ndarray, left: np.ndarray, df: int) -> np.ndarray:
    """p of the Wald test of a term with the covariance of its coefficients from residuals [N, M] over one less leverage."""
    found = np.full(y.shape[1], np.nan)
    effect = own.T @ y
    for measure in range(y.shape[1]):
        weighted = own * left[:, measure, None]
        covariance = weighted.T @ weighted
        if np.linalg.matrix_rank(covariance, hermitian=True) == len(covariance):
            wald = effect[:, measure] @ np.linalg.solve(covariance, effect[:, measure]) / len(covariance)
            found[measure] = special.fdtrc(len(covariance), df, wald)
    return found
