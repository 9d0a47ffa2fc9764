"""The cells that a grid allows, as points, and the columns of a linear model over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

Term = tuple[str, ...]
"""Axes of a main effect or an interaction, in the order of the space; the mean is ()."""
EXACT = 1e-9
"""Relative tolerance below which a singular value or a weight counts as zero."""


@dataclass(frozen=True)
class DesignSpace:
    """Space of all combinations of the axes' levels that no rule of `exclude` matches.

    `axes` maps each axis with two or more levels to its levels. A rule maps axes to levels. It drops the points that
    have one of these levels on every axis of the rule. A point is an array of level indices, one per axis.
    """

    axes: Mapping[str, tuple[str, ...]]
    exclude: tuple[Mapping[str, tuple[str, ...]], ...] = ()

    @cached_property
    def points(self) -> np.ndarray:
        """Index of every point's level on each axis, int [point, axis]; the last axis varies fastest.

        Excluded points are absent.
        """
        sizes = [len(levels) for levels in self.axes.values()]
        grid = np.indices(sizes).reshape(len(sizes), -1).T
        names = list(self.axes)
        mask = np.ones(len(grid), dtype=bool)
        for rule in self.exclude:
            matched = np.ones(len(grid), dtype=bool)
            for axis, excluded in rule.items():
                column = names.index(axis)
                codes = [code for code, level in enumerate(self.axes[axis]) if level in excluded]
                matched &= np.isin(grid[:, column], codes)
            mask &= ~matched
        return grid[mask]

    def term(self, axes: Iterable[str]) -> Term:
        """Return these axes in the order of the space; unknown axes are dropped."""
        names = set(axes)
        return tuple(axis for axis in self.axes if axis in names)

    def terms(self, order: int) -> list[Term]:
        """Return all terms of `order` axes."""
        return list(combinations(self.axes, order))

    def df(self, term: Term) -> int:
        """Return the degrees of freedom (number of columns) of a term."""
        return math.prod(len(self.axes[axis]) - 1 for axis in term)

    def index(self, levels: Mapping[str, str]) -> int | None:
        """Return the index in `points` of the point with these levels.

        None for a point that the grid does not list, an unknown level, or a missing axis; further axes in `levels` are
        ignored.
        """
        try:
            codes = tuple(axis_levels.index(levels[axis]) for axis, axis_levels in self.axes.items())
        except (KeyError, ValueError):
            return None
        return self.index_by_codes.get(codes)

    @cached_property
    def index_by_codes(self) -> dict[tuple[int, ...], int]:
        """Index of each point by its level indices."""
        return {tuple(point): index for index, point in enumerate(self.points.tolist())}


def hierarchical_closure(terms: Iterable[Term]) -> list[Term]:
    """Return the terms with all terms contained in them, each once, main effects first, without the mean."""
    parts = {part: None for term in terms for n in range(1, len(term) + 1) for part in combinations(term, n)}
    return sorted(parts, key=len)


@dataclass(frozen=True)
class LinearModel:
    """Linear model over a space: the mean and `terms`.

    Each axis is coded by Helmert contrasts over its levels, with sum zero and variance 1; an interaction by products of
    its axes' columns. Over a complete factorial all columns are orthogonal. The mean is always the first column.
    """

    space: DesignSpace
    terms: tuple[Term, ...]

    @cached_property
    def spans(self) -> dict[Term, slice]:
        """Columns of every term as slices, by term.

        The mean, (), has column 0; the other terms follow in their order.
        """
        spans: dict[Term, slice] = {(): slice(0, 1)}
        start = 1
        for term in self.terms:
            spans[term] = slice(start, start + self.space.df(term))
            start = spans[term].stop
        return spans

    def columns(self, points: np.ndarray) -> np.ndarray:
        """Return the model columns of points [point, axis] as [point, column], the mean first."""
        return np.concatenate([term_columns(self.space, term, points) for term in self.spans], axis=1)

    @cached_property
    def full_matrix(self) -> np.ndarray:
        """Model columns of all points of the space, [point, column]."""
        return self.columns(self.space.points)

    @cached_property
    def whitened(self) -> np.ndarray:
        """Orthonormal basis of the model's column space over all points, times the root of their number: [point, rank].

        Its columns have mean square 1.
        """
        vectors, sizes, _ = np.linalg.svd(self.full_matrix, full_matrices=False)
        rank = int((sizes > EXACT * sizes[0]).sum())
        return np.asarray(vectors[:, :rank] * math.sqrt(len(vectors)))

    @property
    def rank(self) -> int:
        """Number of parameters that all points together can estimate."""
        return self.whitened.shape[1]

    def contrast(
        self, axis: str, level: str, reference: str, within: Mapping[str, str] | None = None, stratum: str | None = None
    ) -> np.ndarray:
        """Return the weights [column] by which the coefficients give the mean difference between two levels of an axis.

        The difference is `level` minus `reference`. The mean is over the pairs of points that the grid lists at the
        levels `within`; levels of the axis `stratum` have equal weights. Zeros if there are no such pairs.
        """
        return self.interaction_contrast({axis: (level, reference)}, within, stratum)

    def interaction_contrast(
        self, levels: Mapping[str, tuple[str, str]], within: Mapping[str, str] | None = None, stratum: str | None = None
    ) -> np.ndarray:
        """Return the weights [column] of a difference between two levels, or of a difference of differences.

        With two axes the sign is that of (level, level) - (level, reference) - (reference, level) + (reference,
        reference). The mean is over points whose counterparts at all other combinations are listed, too; others are
        left out.

        Args:
            levels: (level, reference) by axis.
            within: fixed levels by axis; None for none.
            stratum: axis whose levels get equal weights; None for none. An unknown axis has no effect.

        Returns:
            Weights of the model's coefficients; zeros if the grid lists no such points.

        Raises:
            ValueError: an axis or a level of `levels` or `within` is not in the space.
        """
        space, names = self.space, list(self.space.axes)
        corners: list[tuple[dict[str, str], float]] = [({}, 1.0)]
        for axis, pair in levels.items():
            corners = [({**at, axis: word}, sign * s) for at, sign in corners for word, s in zip(pair, (1, -1), strict=True)]  # fmt: skip
        codes = [
            ({names.index(axis): space.axes[axis].index(word) for axis, word in at.items()}, sign)
            for at, sign in corners
        ]
        # only points at the first corner; their other corners are looked up
        is_first_corner = np.ones(len(space.points), dtype=bool)
        for axis, word in (within or {}).items():
            is_first_corner &= space.points[:, names.index(axis)] == space.axes[axis].index(word)
        for column, code in codes[0][0].items():
            is_first_corner &= space.points[:, column] == code
        differences, strata = [], []
        for point in space.points[is_first_corner]:
            difference = np.zeros(self.full_matrix.shape[1])
            for at, sign in codes:
                corner = point.copy()
                corner[list(at)] = list(at.values())
                index = space.index_by_codes.get(tuple(corner.tolist()))
                if index is None:
                    break
                difference += sign * self.full_matrix[index]
            else:
                differences.append(difference)
                strata.append(int(point[names.index(stratum)]) if stratum in names else 0)
        if not differences:
            return np.zeros(self.full_matrix.shape[1])
        rows, stratum_codes = np.array(differences), np.array(strata)
        return np.asarray(
            np.mean(
                [rows[stratum_codes == stratum_code].mean(axis=0) for stratum_code in np.unique(stratum_codes)], axis=0
            )
        )


def term_columns(space: DesignSpace, term: Term, points: np.ndarray) -> np.ndarray:
    """Return the columns of a term for points [point, axis], as [point, df]; a column of ones for the mean.

    The columns are products of the axes' Helmert contrasts.
    """
    names = list(space.axes)
    columns = np.ones((len(points), 1))
    for axis in term:
        own = helmert_contrasts(len(space.axes[axis]))[points[:, names.index(axis)]]
        columns = np.einsum("ni,nj->nij", columns, own).reshape(len(points), -1)
    return columns


def helmert_contrasts(levels: int) -> np.ndarray:
    """Return contrasts [level, levels - 1] that sum to zero, are orthogonal and have mean square 1.

    Column j compares level j + 1 with the mean of the levels before it. The only column is -1 and 1 for two levels.
    """
    contrasts = np.zeros((levels, levels - 1))
    for column in range(levels - 1):
        contrasts[: column + 1, column] = -1
        contrasts[column + 1, column] = column + 1
        contrasts[:, column] *= math.sqrt(levels / ((column + 1) * (column + 2)))
    return contrasts


def is_estimable(columns: np.ndarray, weights: np.ndarray) -> bool:
    """Return True if points with these columns [point, column] determine a combination of the coefficients.

    That is if the weights lie in the row space of `columns`, up to a relative error of 1e-6. `weights` [column] are the
    weights of the combination; zero weights give False.
    """
    if not np.abs(weights).max(initial=0.0) > EXACT:
        return False
    solved, *_ = np.linalg.lstsq(columns.T, weights, rcond=None)
    return bool(np.abs(columns.T @ solved - weights).max() <= 1e-6 * np.abs(weights).max())


def residual(columns: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Return the part of `columns` [point, ...] orthogonal to the column space of `basis` [point, column].

    `columns` itself if the basis has no column.
    """
    if not basis.shape[1]:
        return columns
    solved, *_ = np.linalg.lstsq(basis, columns, rcond=None)
    return np.asarray(columns - basis @ solved)


def term_text(term: Sequence[str]) -> str:
    """Return a term as text: "memory" or "memory x window"."""
    return " x ".join(term)
