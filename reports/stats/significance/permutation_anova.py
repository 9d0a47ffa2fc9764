"""Linear models of many measures over one design: type III squares, permutation p values, Box's robust F."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special

MAX_PERMUTATIONS, MIN_PERMUTATIONS = 2_000, 200  # largest and smallest number of permutations
PERMUTATION_BUDGET = 3e10  # budget of floating-point operations for the permutations
PERMUTATION_BLOCK = 200  # permutations per block
RANDOM_SEED = 20_260
ROUNDING_TOLERANCE = 1e-9
MIN_RESIDUAL_SHARE = 1e-8  # a row whose leverage is this close to 1 has no residual
KURTOSIS_CORRECTION = (
    2 / 3
)  # correction of a squared single-error variance: E[e^4] of a normal error is three times its squared variance


@dataclass(frozen=True)
class AnovaFit:
    """Analysis of variance of M measures over N rows with T terms; every p is uncorrected."""

    squares: np.ndarray
    """Type III sum of squares: increase of the residual sum of squares without the term and with all others, [T, M]."""
    dfs: np.ndarray
    """Degrees of freedom of each term, [T]."""
    residual: np.ndarray
    """Residual sum of squares, [M]; exactly 0 where it is only rounding."""
    residual_df: int
    """Number of rows minus number of design columns, intercept included."""
    residuals: np.ndarray
    """Residuals of the full model, [N, M]."""
    p: np.ndarray
    """p of the F test, [T, M]; NaN where the residual is 0."""
    p_permuted: np.ndarray
    """Permutation p (Freedman and Lane 1983), [T, M]; NaN where the residual is 0."""
    p_robust: np.ndarray
    """p of Box's F (1954), valid under unequal variances, [T, M]; NaN also where a row has leverage 1."""
    permutations: int
    """Number of permutations behind `p_permuted`."""

    @property
    def f_statistics(self) -> np.ndarray:
        """F statistics, [T, M]; NaN where the residual is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            statistic = (self.squares / self.dfs[:, None]) / (self.residual / self.residual_df)
        return np.where(np.isfinite(statistic), statistic, np.nan)


def fit_anova(columns: Mapping[tuple[str, ...], np.ndarray], y: np.ndarray) -> AnovaFit:
    """Fit the linear model with an intercept and these terms to every measure, with all tests of its terms.

    Tests are F, a permutation test and Box's F. Fewer permutations are made for larger designs (`permutations_for`);
    their random numbers are fixed.

    Args:
        columns: Design columns [N, df] of each term, by the names of its axes; with the intercept they must have full
            rank and be fewer than N.
        y: Values of the measures, [N, M], without NaN; not changed.

    Returns:
        Terms in the order of `columns`, measures in the order of `y`. A residual of at most 1e-12 of the total sum of
        squares counts as 0, and all p are then NaN.
    """
    rows = len(y)
    y = y - y.mean(axis=0)
    design = np.concatenate([np.ones((rows, 1)), *columns.values()], axis=1)
    full = _basis(design)
    residuals = y - full @ (full.T @ y)
    residual, total = (residuals**2).sum(axis=0), (y**2).sum(axis=0)
    residual = np.where(residual <= 1e-12 * np.maximum(total, 1e-300), 0.0, residual)
    df = rows - full.shape[1]
    parts = []
    for name, term_columns in columns.items():
        reduced_columns = [
            np.ones((rows, 1)),
            *(values for name_of_term, values in columns.items() if name_of_term != name),
        ]
        reduced_basis = _basis(np.concatenate(reduced_columns, axis=1))
        parts.append((_basis(term_columns - reduced_basis @ (reduced_basis.T @ term_columns)), reduced_basis))
    squares = np.stack([((term_basis.T @ y) ** 2).sum(axis=0) for term_basis, _ in parts])
    dfs = np.array([term_basis.shape[1] for term_basis, _ in parts])
    permutations = permutations_for(rows, full.shape[1], squares.size)
    has_residual = residual > 0
    p_permuted, p_robust, p = (np.full(squares.shape, np.nan) for _ in range(3))
    # the smaller one of two complementary bases takes less work
    outside = np.linalg.qr(design, mode="complete")[0][:, full.shape[1] :] if 2 * full.shape[1] > rows else None
    residual_share = 1 - (full**2).sum(axis=1)
    variances = residuals**2 / np.maximum(residual_share, MIN_RESIDUAL_SHARE)[:, None]
    residual_box_df = _residual_box_df(full, variances)
    for index, (term_columns, reduced_basis) in enumerate(parts):
        observed = squares[index, has_residual] / residual[has_residual]
        reduced_residuals = y[:, has_residual] - reduced_basis @ (reduced_basis.T @ y[:, has_residual])
        p[index, has_residual] = special.fdtrc(dfs[index], df, observed * df / dfs[index])
        p_permuted[index, has_residual] = _permutation_p(
            full, outside, term_columns, reduced_residuals, observed, permutations
        )
        if residual_share.min() > MIN_RESIDUAL_SHARE:
            p_robust[index, has_residual] = _box_p(
                term_columns, squares[index, has_residual], variances[:, has_residual], residual_box_df[has_residual]
            )
    return AnovaFit(squares, dfs, residual, df, residuals, p, p_permuted, p_robust, permutations)


def permutations_for(rows: int, columns: int, tests: int) -> int:
    """Return the number of permutations for a design.

    All of them take at most 3e10 floating-point operations. The number is at least 200, also beyond that budget, and at
    most 2,000.

    Args:
        rows: Number of observations.
        columns: Number of design columns, with the intercept.
        tests: Number of terms times number of measures.
    """
    return int(np.clip(PERMUTATION_BUDGET / (2 * rows * columns * max(tests, 1)), MIN_PERMUTATIONS, MAX_PERMUTATIONS))


def _basis(columns: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis [N, df] of the space of these columns [N, df], which must be independent."""
    return np.asarray(np.linalg.qr(columns)[0])


def _permutation_p(
    full: np.ndarray,
    outside: np.ndarray | None,
    term_basis: np.ndarray,
    residuals: np.ndarray,
    observed: np.ndarray,
    permutations: int,
) -> np.ndarray:
    """Return the permutation p value of a term for each measure, [M].

    It is the share of permutations of the reduced model's residuals whose ratio of term to residual sum of squares
    reaches the observed one; the observed order counts as one of them, so p is at least 1 / (permutations + 1). The
    random permutations depend on the number of rows alone.

    Args:
        full: Orthonormal basis of the full model, [N, columns].
        outside: Orthonormal basis of its orthogonal complement, used instead of `full` if given.
        term_basis: Orthonormal basis of the term beyond the reduced model, [N, df].
        residuals: Residuals of the model without the term, [N, M].
        observed: Observed ratio of the term's sum of squares to the residual one, without degrees of freedom, [M].
        permutations: Number of permutations.
    """
    rows, measures = residuals.shape
    total = (residuals**2).sum(axis=0)
    split = full if outside is None else outside
    stacked = np.concatenate([split, term_basis], axis=1).T
    random = np.random.default_rng((RANDOM_SEED, rows))
    reached = np.ones(measures)
    for start in range(0, permutations, PERMUTATION_BLOCK):
        size = min(PERMUTATION_BLOCK, permutations - start)
        order = random.permuted(np.tile(np.arange(rows), (size, 1)), axis=1).T
        parts = (stacked @ residuals[order].reshape(rows, -1)).reshape(len(stacked), size, measures) ** 2
        within, term = parts[: split.shape[1]].sum(axis=0), parts[split.shape[1] :].sum(axis=0)
        residual = np.maximum(total - within, 0.0) if outside is None else within
        reached += (term >= (observed - ROUNDING_TOLERANCE * (1 + observed)) * residual).sum(axis=0)
    return np.asarray(reached / (permutations + 1))


def _box_p(
    term_basis: np.ndarray, squares: np.ndarray, variances: np.ndarray, residual_box_df: np.ndarray
) -> np.ndarray:
    """Return the p value of Box's F for a term, [M], valid if errors have unequal variances.

    Both sums of squares are weighted sums of chi-squares. F is the term's sum of squares over its expectation under
    these variances. Its degrees of freedom are those of chi-squares with equal mean and variance, at least 1 and at
    most the ordinary ones.

    Args:
        term_basis: Orthonormal basis of the term beyond the reduced model, [N, df].
        squares: Sum of squares of the term, [M].
        variances: Estimated error variances, [N, M].
        residual_box_df: Box's degrees of freedom of the residual, [M].

    Source:
        Box, Annals of Mathematical Statistics 25, 1954.
    """
    weights = (term_basis**2).sum(axis=1)
    expected = weights @ variances
    with np.errstate(invalid="ignore", divide="ignore"):
        term_box_df = expected**2 / (
            _trace_of_squares(term_basis, variances) - KURTOSIS_CORRECTION * (weights**2 @ variances**2)
        )
        return np.asarray(
            special.fdtrc(np.clip(term_box_df, 1, term_basis.shape[1]), residual_box_df, squares / expected)
        )


def _residual_box_df(full: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Return Box's residual degrees of freedom, [M], from 1 to the ordinary residual degrees of freedom.

    Args:
        full: Orthonormal basis of the full model, [N, columns].
        variances: Estimated error variances, [N, M].
    """
    residual_leverage = 1 - (full**2).sum(axis=1)
    denominators = (
        2 * residual_leverage - 1 - KURTOSIS_CORRECTION * residual_leverage**2
    ) @ variances**2 + _trace_of_squares(full, variances)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.clip((residual_leverage @ variances) ** 2 / denominators, 1, residual_leverage.sum()))


def _trace_of_squares(basis: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Return tr(P V P V) for each measure, [M].

    Args:
        basis: Orthonormal basis, [N, columns], of the space on which P projects.
        variances: Column m is the diagonal of V for measure m, [N, M].
    """
    inner_products = [(basis.T * variance) @ basis for variance in variances.T]
    return np.array([(product**2).sum() for product in inner_products])
