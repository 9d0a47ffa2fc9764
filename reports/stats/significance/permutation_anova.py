"""Linear models of many measures over one design at once: squares of terms, permutation p, and p that bear unequal spread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special

MOST, LEAST = 2_000, 200  # permutations
WORK = 3e10  # floating-point operations that permutations may take
CHUNK = 200  # permutations worked on at a time
RANDOM = 20_260
DUST = 1e-9
FULL = 1e-8  # of a leverage of 1: such a row has no residual
EXCESS = (
    2 / 3
)  # of the square of a variance that stands on one error: a normal one's fourth power is three times too large


@dataclass(frozen=True)
class AnovaFit:
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
    """[T, M]: of Box's F (1954), which bears unequal spread; NaN where a row has no residual of its own."""
    permutations: int

    @property
    def f(self) -> np.ndarray:
        """[T, M]: NaN where nothing is left over."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (self.squares / self.dfs[:, None]) / (self.residual / self.residual_df)
        return np.where(np.isfinite(found), found, np.nan)


def fit_anova(columns: Mapping[tuple[str, ...], np.ndarray], y: np.ndarray) -> AnovaFit:
    """The model with an intercept and these columns [N, df] of each term, of full rank, for `y` [N, M].

    A measure whose residual is no more than rounding has a residual of 0.
    """
    rows = len(y)
    y = y - y.mean(axis=0)
    design = np.concatenate([np.ones((rows, 1)), *columns.values()], axis=1)
    full = _basis(design)
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
    # of two bases of the same split, the smaller one takes less work
    outside = np.linalg.qr(design, mode="complete")[0][:, full.shape[1] :] if 2 * full.shape[1] > rows else None
    own_share = 1 - (full**2).sum(axis=1)
    variances = left**2 / np.maximum(own_share, FULL)[:, None]
    below = _freedom(full, variances)
    for place, (own, rest) in enumerate(parts):
        seen = squares[place, known] / residual[known]
        less = y[:, known] - rest @ (rest.T @ y[:, known])
        p[place, known] = special.fdtrc(dfs[place], df, seen * df / dfs[place])
        p_permuted[place, known] = _permuted(full, outside, own, less, seen, times)
        if own_share.min() > FULL:
            p_robust[place, known] = _robust(own, squares[place, known], variances[:, known], below[known])
    return AnovaFit(squares, dfs, residual, df, left, p, p_permuted, p_robust, times)


def permutations_for(rows: int, columns: int, tests: int) -> int:
    """How many permutations a design of that size gets: MOST, fewer where they took too long, and LEAST at least."""
    return int(np.clip(WORK / (2 * rows * columns * max(tests, 1)), LEAST, MOST))


def _basis(columns: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.qr(columns)[0])


def _permuted(
    full: np.ndarray, outside: np.ndarray | None, own: np.ndarray, left: np.ndarray, seen: np.ndarray, times: int
) -> np.ndarray:
    """The share of permutations of the residuals `left` [N, M] of the model without a term that give it as large a ratio of
    squares to residual as `seen` [M]. `full` spans the model; `outside`, where it is given, what is orthogonal to it."""
    rows, measures = left.shape
    total = (left**2).sum(axis=0)
    split = full if outside is None else outside
    both = np.concatenate([split, own], axis=1).T
    random = np.random.default_rng((RANDOM, rows))
    reached = np.ones(measures)
    for start in range(0, times, CHUNK):
        size = min(CHUNK, times - start)
        order = random.permuted(np.tile(np.arange(rows), (size, 1)), axis=1).T
        parts = (both @ left[order].reshape(rows, -1)).reshape(len(both), size, measures) ** 2
        within, term = parts[: split.shape[1]].sum(axis=0), parts[split.shape[1] :].sum(axis=0)
        residual = np.maximum(total - within, 0.0) if outside is None else within
        reached += (term >= (seen - DUST * (1 + seen)) * residual).sum(axis=0)
    return np.asarray(reached / (times + 1))


def _robust(own: np.ndarray, squares: np.ndarray, variances: np.ndarray, below: np.ndarray) -> np.ndarray:
    """p of a term's squares [M] over what they come to without an effect, where errors have these variances [N, M].

    Both are sums of squares of unequal weight; F has the degrees of freedom of chi-squares with as large a mean and variance
    (Box, Annals of Mathematical Statistics 25, 1954), `below` those of the residual.
    """
    weights = (own**2).sum(axis=1)
    expected = weights @ variances
    with np.errstate(invalid="ignore", divide="ignore"):
        above = expected**2 / (_trace(own, variances) - EXCESS * (weights**2 @ variances**2))
        return np.asarray(special.fdtrc(np.clip(above, 1, own.shape[1]), below, squares / expected))


def _freedom(full: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Box's degrees of freedom [M] of the residual of the model that `full` spans."""
    left = 1 - (full**2).sum(axis=1)
    both = (2 * left - 1 - EXCESS * left**2) @ variances**2 + _trace(full, variances)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.clip((left @ variances) ** 2 / both, 1, left.sum()))


def _trace(basis: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """tr(P V P V) [M], P the projection on `basis`, V a diagonal matrix of variances."""
    inside = [(basis.T * some) @ basis for some in variances.T]
    return np.array([(one**2).sum() for one in inside])
