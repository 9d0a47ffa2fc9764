"""The cells that a grid allows as points, and the columns of a linear model over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

Term = tuple[str, ...]
"""The axes of a main effect or an interaction, in the order of the space; the mean is ()."""
EXACT = 1e-9


@dataclass(frozen=True)
class DesignSpace:
    """Every combination of the levels of axes but those that a rule of `exclude` matches, as a grid lists them.

    `axes` are those with two or more levels; a rule maps axes to levels and drops the points that stand at one of them on
    every axis that it names.
    """

    axes: Mapping[str, tuple[str, ...]]
    exclude: tuple[Mapping[str, tuple[str, ...]], ...] = ()

    @cached_property
    def points(self) -> np.ndarray:
        """The place of every point's level on each axis, [point, axis], the last axis fastest."""
        sizes = [len(levels) for levels in self.axes.values()]
        every = np.indices(sizes).reshape(len(sizes), -1).T
        names = list(self.axes)
        kept = np.ones(len(every), dtype=bool)
        for rule in self.exclude:
            matched = np.ones(len(every), dtype=bool)
            for axis, words in rule.items():
                column = names.index(axis)
                places = [place for place, word in enumerate(self.axes[axis]) if word in words]
                matched &= np.isin(every[:, column], places)
            kept &= ~matched
        return every[kept]

    def term(self, axes: Iterable[str]) -> Term:
        """These axes in the order of the space."""
        given = set(axes)
        return tuple(axis for axis in self.axes if axis in given)

    def terms(self, order: int) -> list[Term]:
        """Every term of so many axes."""
        return list(combinations(self.axes, order))

    def df(self, term: Term) -> int:
        """How many numbers a term takes."""
        return math.prod(len(self.axes[axis]) - 1 for axis in term)

    def index(self, levels: Mapping[str, str]) -> int | None:
        """The place of a point among `points`, by its levels; None for one that the grid does not list."""
        try:
            codes = tuple(words.index(levels[axis]) for axis, words in self.axes.items())
        except (KeyError, ValueError):
            return None
        return self._places.get(codes)

    @cached_property
    def _places(self) -> dict[tuple[int, ...], int]:
        return {tuple(point): place for place, point in enumerate(self.points.tolist())}


def hierarchical_closure(terms: Iterable[Term]) -> list[Term]:
    """The terms with all that are part of one, main effects first; without the mean."""
    found = {part: None for term in terms for n in range(1, len(term) + 1) for part in combinations(term, n)}
    return sorted(found, key=len)


@dataclass(frozen=True)
class LinearModel:
    """A linear model over a space: the mean and `terms`, each axis in contrasts that sum to zero and have variance 1 over its
    levels, so that over a complete factorial all columns are orthogonal."""

    space: DesignSpace
    terms: tuple[Term, ...]

    @cached_property
    def spans(self) -> dict[Term, slice]:
        """The columns of every term, the mean's too."""
        found: dict[Term, slice] = {(): slice(0, 1)}
        at = 1
        for term in self.terms:
            found[term] = slice(at, at + self.space.df(term))
            at = found[term].stop
        return found

    def columns(self, points: np.ndarray) -> np.ndarray:
        """The columns of these points, [point, column], the mean first."""
        return np.concatenate([term_columns(self.space, term, points) for term in self.spans], axis=1)

    @cached_property
    def every(self) -> np.ndarray:
        """The columns of all points of the space."""
        return self.columns(self.space.points)

    @cached_property
    def whitened(self) -> np.ndarray:
        """Columns [point, rank] that span the same and are orthonormal times the root of the number of points: as many as
        all points together can tell apart."""
        left, sizes, _ = np.linalg.svd(self.every, full_matrices=False)
        rank = int((sizes > EXACT * sizes[0]).sum())
        return np.asarray(left[:, :rank] * math.sqrt(len(left)))

    @property
    def rank(self) -> int:
        """How many numbers the model has that all points together can tell apart."""
        return self.whitened.shape[1]

    def contrast(
        self, axis: str, level: str, reference: str, within: Mapping[str, str] | None = None, stratum: str | None = None
    ) -> np.ndarray:
        """The weights [column] that make, of the model's coefficients, the mean difference between two levels of an axis: over
        the pairs of points that the grid lists within these levels, each level of `stratum` with the same weight."""
        return self.contrasted({axis: (level, reference)}, within, stratum)

    def contrasted(
        self, levels: Mapping[str, tuple[str, str]], within: Mapping[str, str] | None = None, stratum: str | None = None
    ) -> np.ndarray:
        """As `contrast`; for several axes of the difference of differences. Zeros where the grid lists no such points."""
        space, names = self.space, list(self.space.axes)
        corners: list[tuple[dict[str, str], float]] = [({}, 1.0)]
        for axis, pair in levels.items():
            corners = [({**at, axis: word}, sign * s) for at, sign in corners for word, s in zip(pair, (1, -1), strict=True)]  # fmt: skip
        codes = [
            ({names.index(axis): space.axes[axis].index(word) for axis, word in at.items()}, sign)
            for at, sign in corners
        ]
        # points at the first corner, whose other corners are looked up
        here = np.ones(len(space.points), dtype=bool)
        for axis, word in (within or {}).items():
            here &= space.points[:, names.index(axis)] == space.axes[axis].index(word)
        for column, code in codes[0][0].items():
            here &= space.points[:, column] == code
        found, strata = [], []
        for point in space.points[here]:
            made = np.zeros(self.every.shape[1])
            for at, sign in codes:
                corner = point.copy()
                corner[list(at)] = list(at.values())
                place = space._places.get(tuple(corner.tolist()))
                if place is None:
                    break
                made += sign * self.every[place]
            else:
                found.append(made)
                strata.append(int(point[names.index(stratum)]) if stratum in names else 0)
        if not found:
            return np.zeros(self.every.shape[1])
        rows, which = np.array(found), np.array(strata)
        return np.asarray(np.mean([rows[which == one].mean(axis=0) for one in np.unique(which)], axis=0))


def term_columns(space: DesignSpace, term: Term, points: np.ndarray) -> np.ndarray:
    """The columns of a term, [point, df]."""
    names = list(space.axes)
    found = np.ones((len(points), 1))
    for axis in term:
        own = helmert_contrasts(len(space.axes[axis]))[points[:, names.index(axis)]]
        found = np.einsum("ni,nj->nij", found, own).reshape(len(points), -1)
    return found


def helmert_contrasts(levels: int) -> np.ndarray:
    """Contrasts [level, levels - 1] that sum to zero, are orthogonal and have mean square 1; -1 and 1 for two levels."""
    found = np.zeros((levels, levels - 1))
    for column in range(levels - 1):
        found[: column + 1, column] = -1
        found[column + 1, column] = column + 1
        found[:, column] *= math.sqrt(levels / ((column + 1) * (column + 2)))
    return found


def is_estimable(columns: np.ndarray, weights: np.ndarray) -> bool:
    """Whether points with these columns [point, column] tell that combination of the coefficients, [column]."""
    if not np.abs(weights).max(initial=0.0) > EXACT:
        return False
    solved, *_ = np.linalg.lstsq(columns.T, weights, rcond=None)
    return bool(np.abs(columns.T @ solved - weights).max() <= 1e-6 * np.abs(weights).max())


def residual(columns: np.ndarray, given: np.ndarray) -> np.ndarray:
    """What is left of `columns` [point, ...] beside the column space of `given`."""
    if not given.shape[1]:
        return columns
    solved, *_ = np.linalg.lstsq(given, columns, rcond=None)
    return np.asarray(columns - given @ solved)


def words(term: Sequence[str]) -> str:
    """memory; memory x window."""
    return " x ".join(term)
