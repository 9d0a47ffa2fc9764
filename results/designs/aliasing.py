"""What a design can and cannot tell, from its model matrix: aliases, efficiency, and how much wider its intervals are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..console.text import counted
from .design_space import EXACT, DesignSpace, LinearModel, Term, is_estimable, term_columns, words

MIN_CORRELATION = 0.5
"""Correlations above it are told."""
COMPLETE_CORRELATION = 1 - 1e-6
MOST_PAIRS = 4_000
"""Of terms that are all held against each other; in larger grids those of the model are held against all."""
MAX_LISTED = 6


@dataclass(frozen=True)
class Alias:
    """Two terms whose columns are correlated over the cells of a design. `correlation` is the largest between any combination
    of the columns of one and any of the other (canonical), `whole` whether all of `first`, the smaller one, is lost in `second`,
    `equal` whether each is in the other."""

    first: Term
    second: Term
    correlation: float
    whole: bool
    equal: bool


def aliases(model: LinearModel, members: np.ndarray, least: float = MIN_CORRELATION) -> list[Alias]:
    """The pairs of terms, main effects and interactions of two axes and what the model has besides, that these points
    [places in the space] mix with a correlation above `least` and all points together do not; the strongest first."""
    space = model.space
    terms = list(dict.fromkeys([*space.terms(1), *model.terms, *space.terms(2)]))
    every = len(terms) * (len(terms) - 1) // 2 <= MOST_PAIRS
    here = {term: _basis(space, term, space.points[members]) for term in terms}
    found = []
    for first, second in combinations(terms, 2):
        if not every and first not in model.terms and second not in model.terms:
            continue
        a, b = here[first], here[second]
        if not a.shape[1] or not b.shape[1]:
            continue
        sizes = np.linalg.svd(a.T @ b, compute_uv=False)
        if sizes[0] <= least + 1e-6:  # but for dust
            continue
        # what exclude mixes, no design can help
        if len(members) < len(space.points):
            all_over = _basis(space, first, space.points).T @ _basis(space, second, space.points)
            if np.linalg.svd(all_over, compute_uv=False)[0] >= sizes[0] - 1e-6:
                continue
        whole = bool(sizes[-1] >= COMPLETE_CORRELATION)
        pair = (first, second) if a.shape[1] <= b.shape[1] else (second, first)
        found.append(Alias(*pair, min(1.0, float(sizes[0])), whole, whole and a.shape[1] == b.shape[1]))
    return sorted(found, key=lambda one: (-round(one.correlation, 6), not one.whole, len(one.first) + len(one.second)))


def lost(model: LinearModel, members: np.ndarray) -> list[Term]:
    """The terms of which the design shows nothing, since they are the same in all its cells."""
    space = model.space
    terms = dict.fromkeys([*space.terms(1), *model.terms, *space.terms(2)])
    return [term for term in terms if not _basis(space, term, space.points[members]).shape[1]]


def _basis(space: DesignSpace, term: Term, points: np.ndarray) -> np.ndarray:
    """An orthonormal basis [point, rank] of a term's columns beside the mean."""
    columns = term_columns(space, term, points)
    left, sizes, _ = np.linalg.svd(columns - columns.mean(axis=0), full_matrices=False)
    return np.asarray(left[:, sizes > EXACT * math.sqrt(len(points))])


def efficiency(model: LinearModel, members: np.ndarray) -> float:
    """D-efficiency: how much a cell of the design tells, beside a cell of all of them; 1 is as much. 0 where something of the
    model cannot be told at all."""
    rows = model.whitened[members]
    sign, value = np.linalg.slogdet(rows.T @ rows / len(rows))
    return float(math.exp(value / model.rank)) if sign > 0 and math.isfinite(value) else 0.0


@dataclass(frozen=True)
class IntervalInflation:
    """How much wider the intervals of an axis's differences are than from all cells, at the same noise: `fewer` because there
    are fewer cells, times `balance` because they are not as balanced."""

    axis: str
    fewer: float
    balance: float

    @property
    def whole(self) -> float:
        """Both together."""
        return self.fewer * self.balance


def widths(model: LinearModel, members: np.ndarray) -> list[IntervalInflation]:
    """Of every axis: by the mean variance of the differences between its levels; axes that cannot be told are left out."""
    every, here = model.every, model.every[members]
    inverse, whole = np.linalg.pinv(here.T @ here), np.linalg.pinv(every.T @ every)
    fewer = math.sqrt(len(every) / len(here))
    found = []
    for axis in model.space.axes:
        span = model.spans[axis,]
        unit = np.eye(every.shape[1])[span]
        if all(is_estimable(here, one) for one in unit):
            ratio = math.sqrt(float(np.trace(inverse[span, span]) / np.trace(whole[span, span])))
            found.append(IntervalInflation(axis, fewer, ratio / fewer))
    return found


# --- in words -------------------------------------------------------------------------------------------------------


def alias_sentences(model: LinearModel, members: np.ndarray) -> list[str]:
    """What cannot be told from what with these cells, in sentences without an end."""
    n, found = len(members), aliases(model, members)
    start = f"with these {counted(n, 'cell')}, "
    told = [f"{words(term)} cannot be told from the mean" for term in lost(model, members)]
    for first, *others in _groups([a for a in found if a.equal]):
        told.append(f"{words(first)} cannot be told from {' or '.join(map(words, others))}")
    told += [f"{words(a.first)} cannot be told from {words(a.second)}" for a in found if a.whole and not a.equal]
    exact = [
        f"part of {words(a.first)} cannot be told from {words(a.second)}"
        for a in _of_model(model, found)
        if not a.whole and a.correlation >= COMPLETE_CORRELATION
    ]
    partly = [
        f"{words(a.first)} with {words(a.second)} ({a.correlation:.2f})"
        for a in _of_model(model, found)
        if a.correlation < COMPLETE_CORRELATION
    ]
    sentences = []
    if told or exact:
        sentences.append(start + _some([*told, *exact], "; "))
    if partly:
        sentences.append(
            f"{'' if sentences else start}mixed in part (correlation above {MIN_CORRELATION:g}): {_some(partly, ', ')}"
        )
    if not sentences:
        what = "main effects and interactions of two axes"
        if aliases(model, members, 1e-6):
            sentences.append(f"{start}no two of the {what} are mixed with a correlation above {MIN_CORRELATION:g}")
        else:
            sentences.append(f"{start}{what} can all be told from each other")
    return sentences


def _of_model(model: LinearModel, found: Sequence[Alias]) -> list[Alias]:
    """Those in which a term of the model has a share."""
    return [a for a in found if a.first in model.terms or a.second in model.terms]


def _some(parts: Sequence[str], between: str) -> str:
    rest = len(parts) - MAX_LISTED
    return between.join(parts[:MAX_LISTED]) + (f"{between}and {rest} more" if rest > 0 else "")


def _groups(found: Sequence[Alias]) -> Iterator[list[Term]]:
    """The terms that are one and the same, together, as they come."""
    groups: list[list[Term]] = []
    for alias in found:
        mine = [group for group in groups if alias.first in group or alias.second in group]
        joined = list(dict.fromkeys([*(term for group in mine for term in group), alias.first, alias.second]))
        groups = [group for group in groups if group not in mine] + [joined]
    yield from (sorted(group, key=len) for group in groups)


def precision(model: LinearModel, members: np.ndarray) -> list[str]:
    """Efficiency and widths in sentences without an end."""
    found = widths(model, members)
    share = f"D-efficiency {100 * efficiency(model, members):.0f}% (of what as many cells of the whole grid would tell)"
    if not found:
        return [share]
    told = ", ".join(f"{one.axis} {one.whole:.2f}" for one in found)
    return [
        f"{share}; intervals are wider than from all {counted(len(model.space.points), 'cell')} by {told}: {found[0].fewer:.2f} since there are "
        "fewer, the rest for lack of balance"
    ]
