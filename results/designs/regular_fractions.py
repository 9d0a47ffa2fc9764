"""Regular fractions: 2^(k-p) combinations of k two-level axes, crossed with all levels of the other axes.

An effect is a set of two-level axes, stored as bits. The defining words of a fraction are the effects that it confounds
with the mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .design_space import DesignSpace, Term

MAX_GROUPS = 3_000_000
"""Number of groups of words that are tried before the search is abandoned."""
ROMAN = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")


@dataclass(frozen=True)
class RegularFraction:
    """A regular fraction, given by its defining words as bits over the two-level `axes`, all with positive sign.

    Bit i of a word stands for `axes[i]`. The fraction consists of the points at which the product of the axes' codes
    (-1 for the first level, 1 for the second) is 1 for every word.
    """

    axes: tuple[str, ...]
    defining_relation: tuple[int, ...]
    """All defining words, the shortest first, without the mean."""

    @property
    def resolution(self) -> int:
        """Length of the shortest word; number of axes + 1 for the complete factorial."""
        return self.defining_relation[0].bit_count() if self.defining_relation else len(self.axes) + 1

    def relation_as_terms(self) -> list[Term]:
        """Return the words as tuples of axes."""
        return [tuple(a for bit, a in enumerate(self.axes) if word >> bit & 1) for word in self.defining_relation]

    def members(self, space: DesignSpace) -> np.ndarray:
        """Return the sorted indices of the fraction's points in a space, int [point].

        Excluded points of the space are no members.
        """
        names = list(space.axes)
        signs = space.points[:, [names.index(axis) for axis in self.axes]] * 2 - 1
        mask = np.ones(len(signs), dtype=bool)
        for word in self.defining_relation:
            bits = [bit for bit in range(len(self.axes)) if word >> bit & 1]
            mask &= signs[:, bits].prod(axis=1) == 1
        return np.flatnonzero(mask)


def two_level_axes(space: DesignSpace) -> tuple[str, ...]:
    """Return the axes with two levels."""
    return tuple(axis for axis, levels in space.axes.items() if len(levels) == 2)


def best_fraction(space: DesignSpace, halvings: int, terms: Collection[Term], least: int = 3) -> RegularFraction | None:
    """Return the fraction 1/2^halvings that separates all `terms` with minimum aberration (the fewest short words).

    Args:
        space: all possible points; its axes with two levels are halved.
        halvings: number of halvings.
        terms: terms that must not be confounded with each other or the mean.
        least: minimum resolution (length of the shortest defining word).

    Returns:
        None if there is no such fraction, if `halvings` is not between 1 and the number of two-level axes less one, or
        if there are too many groups to try.
    """
    axes = two_level_axes(space)
    if not 0 < halvings < len(axes):
        return None
    forbidden = _forbidden(space, axes, terms)
    best_pattern: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    for group in _subgroups(len(axes), halvings):
        lengths = [word.bit_count() for word in group]
        if min(lengths) < least or not forbidden.isdisjoint(group):
            continue
        pattern = tuple(lengths.count(n) for n in range(1, len(axes) + 1))
        if best_pattern is None or (pattern, group) < best_pattern:
            best_pattern = pattern, group
    return (
        None
        if best_pattern is None
        else RegularFraction(axes, tuple(sorted(best_pattern[1], key=lambda word: (word.bit_count(), word))))
    )


def smallest_fraction(space: DesignSpace, resolution: int, terms: Collection[Term]) -> RegularFraction | None:
    """Return the smallest fraction with at least that resolution that separates all `terms`; None if there is none.

    Only proper fractions are tried, not the complete factorial. Skipped are fractions too small for the resolution: for
    k axes, resolution 3 needs k + 1 points, 4 needs 2 k, and 5 needs 1 + k + k (k - 1) / 2.

    Args:
        space: all possible points; its axes with two levels are halved.
        resolution: minimum length of the defining words: 3, 4 or 5 (a larger one sets the same minimum size as 5).
        terms: terms that must not be confounded with each other or the mean.
    """
    k = len(two_level_axes(space))
    # a design of resolution 2 t + 1 separates all terms of up to t axes
    min_runs = {3: k + 1, 4: 2 * k}.get(resolution, 1 + k + k * (k - 1) // 2)
    for halvings in range(k - 1, 0, -1):
        if (
            2 ** (k - halvings) >= min_runs
            and (fraction := best_fraction(space, halvings, terms, resolution)) is not None
        ):
            return fraction
    return None


def _forbidden(space: DesignSpace, axes: Sequence[str], terms: Collection[Term]) -> set[int]:
    """Return the words (as bits) that would confound two of these terms, or one of them with the mean.

    Two terms can be confounded only if they agree on all axes with more than two levels.

    Args:
        space: all possible points.
        axes: axes with two levels, which give the bits of a word.
        terms: terms to separate.
    """
    split = []
    for term in [(), *terms]:
        bits = sum(1 << bit for bit, axis in enumerate(axes) if axis in term)
        split.append((tuple(axis for axis in term if axis not in axes), bits))
    return {a ^ b for (outside, a), (outside_second, b) in combinations(split, 2) if outside == outside_second}


def _subgroups(k: int, p: int) -> Iterator[tuple[int, ...]]:
    """Yield the defining words of every fraction 2^(k-p), each fraction once.

    An item is a sorted tuple of 2^p - 1 words, as bits over the k axes. Yields nothing if there are more than 3 million
    (MAX_GROUPS) per base (choice of k - p independent axes). If there are too many in total, only those whose last p
    axes are products of the others are yielded.
    """
    # each of p axes is the product of two or more of the others
    groups_per_base = math.comb(max(2 ** (k - p) - (k - p) - 1, 0), p) * 2**p
    bases = list(combinations(range(k), k - p))
    if groups_per_base > MAX_GROUPS:
        return
    if groups_per_base * len(bases) > MAX_GROUPS:
        bases = bases[:1]
    yielded = set()
    for base_axes in bases:
        rest = [axis for axis in range(k) if axis not in base_axes]
        products = [sum(1 << axis for axis in axes) for n in range(2, k - p + 1) for axes in combinations(base_axes, n)]
        for generators in combinations(products, p):
            span = [0]
            for axis, product in zip(rest, generators, strict=True):
                generator = product | 1 << axis
                span += [word ^ generator for word in span]
            group = tuple(sorted(span[1:]))
            if group not in yielded:
                yielded.add(group)
                yield group
