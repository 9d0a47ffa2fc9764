"""Properties of a design from its model matrix: aliases, efficiency, and the inflation of its intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..console.text import counted
from .design_space import EXACT, DesignSpace, LinearModel, Term, is_estimable, term_columns, term_text

MIN_CORRELATION = 0.5
"""Correlation above which a pair of terms is reported."""
COMPLETE_CORRELATION = 1 - 1e-6
MAX_PAIRS = 4_000
"""Number of pairs of terms up to which all are compared.

In larger spaces only pairs with a term of the model are.
"""
MAX_LISTED = 6


@dataclass(frozen=True)
class Alias:
    """Two terms whose columns are correlated over the points of a design (aliasing).

    `correlation` is the largest canonical correlation between the centred columns of both, from 0 to 1. `first` is the
    term with fewer columns. `is_complete`: all of `first` is confounded with `second`. `is_mutual`: each is confounded
    completely with the other.
    """

    first: Term
    second: Term
    correlation: float
    is_complete: bool
    is_mutual: bool


def aliases(model: LinearModel, members: np.ndarray, min_correlation: float = MIN_CORRELATION) -> list[Alias]:
    """Return the pairs of terms that these points confound, the strongest first.

    The terms are main effects, interactions of two axes, and other terms of the model. With more than 4,000 pairs
    (MAX_PAIRS), only those with a term of the model are compared. Pairs that the complete space confounds as strongly
    are left out, and so are terms that are constant over the points. The correlation is the largest singular value of
    AᵀB, for orthonormal bases A and B of the terms' columns; a pair is complete if the smallest one is at least 1 -
    1e-6 (COMPLETE_CORRELATION). Of equal correlations, complete aliases and shorter terms come first.

    Args:
        model: linear model.
        members: indices of the design's points in the space, int [point].
        min_correlation: correlation above which a pair is returned, by default 0.5.
    """
    space = model.space
    terms = list(dict.fromkeys([*space.terms(1), *model.terms, *space.terms(2)]))
    compares_all = len(terms) * (len(terms) - 1) // 2 <= MAX_PAIRS
    bases = {term: _basis(space, term, space.points[members]) for term in terms}
    result = []
    for first, second in combinations(terms, 2):
        if not compares_all and first not in model.terms and second not in model.terms:
            continue
        a, b = bases[first], bases[second]
        if not a.shape[1] or not b.shape[1]:
            continue
        sizes = np.linalg.svd(a.T @ b, compute_uv=False)
        if sizes[0] <= min_correlation + 1e-6:  # up to rounding
            continue
        # pairs that the complete space confounds as strongly are no property of the design
        if len(members) < len(space.points):
            all_over = _basis(space, first, space.points).T @ _basis(space, second, space.points)
            if np.linalg.svd(all_over, compute_uv=False)[0] >= sizes[0] - 1e-6:
                continue
        is_complete = bool(sizes[-1] >= COMPLETE_CORRELATION)
        pair = (first, second) if a.shape[1] <= b.shape[1] else (second, first)
        result.append(Alias(*pair, min(1.0, float(sizes[0])), is_complete, is_complete and a.shape[1] == b.shape[1]))
    return sorted(
        result,
        key=lambda alias: (-round(alias.correlation, 6), not alias.is_complete, len(alias.first) + len(alias.second)),
    )


def constant_terms(model: LinearModel, members: np.ndarray) -> list[Term]:
    """Return the terms that are constant over the design's points, so that it shows nothing of them.

    Examined are main effects, then other terms of the model, then interactions of two axes; the result has this order.
    `members` are indices of the design's points in the space.
    """
    space = model.space
    terms = dict.fromkeys([*space.terms(1), *model.terms, *space.terms(2)])
    return [term for term in terms if not _basis(space, term, space.points[members]).shape[1]]


def _basis(space: DesignSpace, term: Term, points: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis [point, rank] of a term's centred columns.

    Centred means that the mean over these points is subtracted. The rank is 0 for a term that is constant over the
    points.
    """
    columns = term_columns(space, term, points)
    vectors, sizes, _ = np.linalg.svd(columns - columns.mean(axis=0), full_matrices=False)
    return np.asarray(vectors[:, sizes > EXACT * math.sqrt(len(points))])


def efficiency(model: LinearModel, members: np.ndarray) -> float:
    """Return the D-efficiency: information per cell relative to the complete space, where 1 is equal.

    That is det(X'X / n) to the power 1 / rank, for the whitened columns X of the n points; it may exceed 1. 0 if a part
    of the model cannot be estimated. `members` are indices of the design's points in the space.
    """
    rows = model.whitened[members]
    sign, value = np.linalg.slogdet(rows.T @ rows / len(rows))
    return float(math.exp(value / model.rank)) if sign > 0 and math.isfinite(value) else 0.0


@dataclass(frozen=True)
class IntervalInflation:
    """Factor by which intervals of an axis's differences are wider than from all cells, at the same noise.

    `fewer` is the factor due to the smaller number of cells, the root of (all cells / cells). `balance` is the factor
    due to their lack of balance.
    """

    axis: str
    fewer: float
    balance: float

    @property
    def total(self) -> float:
        """Product of both factors."""
        return self.fewer * self.balance


def interval_inflations(model: LinearModel, members: np.ndarray) -> list[IntervalInflation]:
    """Return the interval inflation of every axis of the space, in its order.

    The ratio is that of the root mean variance of the differences between the axis's levels. Axes that are no main
    effect of the model raise KeyError; those that cannot be estimated are left out.
    """
    all_rows, rows = model.full_matrix, model.full_matrix[members]
    inverse, full_inverse = np.linalg.pinv(rows.T @ rows), np.linalg.pinv(all_rows.T @ all_rows)
    fewer = math.sqrt(len(all_rows) / len(rows))
    inflations = []
    for axis in model.space.axes:
        span = model.spans[axis,]
        unit = np.eye(all_rows.shape[1])[span]
        if all(is_estimable(rows, column) for column in unit):
            ratio = math.sqrt(float(np.trace(inverse[span, span]) / np.trace(full_inverse[span, span])))
            inflations.append(IntervalInflation(axis, fewer, ratio / fewer))
    return inflations


# --- in words -------------------------------------------------------------------------------------------------------


def alias_sentences(model: LinearModel, members: np.ndarray) -> list[str]:
    """Return sentences (without a full stop) about the terms that the design confounds; one or two.

    The first is about terms that cannot be separated, such as "with these 8 cells, memory cannot be told from a x b",
    the second about a correlation above 0.5 (MIN_CORRELATION). Partial aliases are named only for terms of the model.
    Lists are cut to 6 parts. Without any confounding, one sentence says so.

    Args:
        model: linear model of the design.
        members: indices of the design's points in the space.
    """
    n, pairs = len(members), aliases(model, members)
    start = f"with these {counted(n, 'cell')}, "
    inseparable = [f"{term_text(term)} is aliased with the mean" for term in constant_terms(model, members)]
    for first, *further in _mutual_groups([a for a in pairs if a.is_mutual]):
        inseparable.append(f"{term_text(first)} is aliased with {' and '.join(map(term_text, further))}")
    inseparable += [
        f"{term_text(a.first)} is aliased with {term_text(a.second)}"
        for a in pairs
        if a.is_complete and not a.is_mutual
    ]
    exact = [
        f"some contrasts of {term_text(a.first)} are aliased with {term_text(a.second)}"
        for a in _with_model_terms(model, pairs)
        if not a.is_complete and a.correlation >= COMPLETE_CORRELATION
    ]
    partly = [
        f"{term_text(a.first)} with {term_text(a.second)} ({a.correlation:.2f})"
        for a in _with_model_terms(model, pairs)
        if a.correlation < COMPLETE_CORRELATION
    ]
    sentences = []
    if inseparable or exact:
        sentences.append(start + _first_parts([*inseparable, *exact], "; "))
    if partly:
        sentences.append(
            f"{'' if sentences else start}partly aliased (correlation above {MIN_CORRELATION:g}): "
            f"{_first_parts(partly, ', ')}"
        )
    if not sentences:
        terms_text = "main effects and interactions of two axes"
        if aliases(model, members, 1e-6):
            sentences.append(f"{start}no two of the {terms_text} have a correlation above {MIN_CORRELATION:g}")
        else:
            sentences.append(f"{start}no two of the {terms_text} are aliased")
    return sentences


def _with_model_terms(model: LinearModel, pairs: Sequence[Alias]) -> list[Alias]:
    """Return the pairs with at least one term of the model."""
    return [a for a in pairs if a.first in model.terms or a.second in model.terms]


def _first_parts(parts: Sequence[str], between: str) -> str:
    """Return at most six parts (MAX_LISTED), joined, and the number of the others."""
    rest = len(parts) - MAX_LISTED
    return between.join(parts[:MAX_LISTED]) + (f"{between}and {rest} more" if rest > 0 else "")


def _mutual_groups(pairs: Sequence[Alias]) -> Iterator[list[Term]]:
    """Yield groups of terms that are completely confounded with each other, in each the shorter terms first.

    `pairs` are the mutual aliases; pairs with a common term are joined.
    """
    groups: list[list[Term]] = []
    for alias in pairs:
        touched = [group for group in groups if alias.first in group or alias.second in group]
        joined = list(dict.fromkeys([*(term for group in touched for term in group), alias.first, alias.second]))
        groups = [group for group in groups if group not in touched] + [joined]
    yield from (sorted(group, key=len) for group in groups)


def precision_sentences(model: LinearModel, members: np.ndarray) -> list[str]:
    """Return a list of one sentence (without a full stop) about D-efficiency and interval inflation.

    The efficiency is in percent; the inflation, a factor per axis, is left out if no axis can be estimated. `members`
    are indices of the design's points in the space.
    """
    inflations = interval_inflations(model, members)
    share = (
        f"D-efficiency {100 * efficiency(model, members):.0f}% (information per cell, relative to the complete grid)"
    )
    if not inflations:
        return [share]
    factors = ", ".join(f"{inflation.axis} {inflation.total:.2f}" for inflation in inflations)
    return [
        f"{share}; intervals are wider than with all {counted(len(model.space.points), 'cell')} by {factors}: "
        f"{inflations[0].fewer:.2f} from having fewer cells, the rest from imbalance"
    ]
