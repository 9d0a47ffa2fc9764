"""Regular fractions: of k axes with two levels 2^(k-p) combinations, crossed with all levels of the other axes.

An effect is a set of the two-level axes, kept as bits; the words of a fraction are the effects that it cannot tell from the mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .design_space import DesignSpace, Term

MOST_TRIES = 3_000_000
"""Words that are looked at before a fraction is given up as too large to search."""
ROMAN = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")


@dataclass(frozen=True)
class RegularFraction:
    """A regular fraction: its words as bits over `axes`, those with two levels, all with the sign +."""

    axes: tuple[str, ...]
    words: tuple[int, ...]
    """Every word, the shortest first; the mean is not among them."""

    @property
    def resolution(self) -> int:
        """The length of the shortest word; one more than there are axes for the complete factorial."""
        return self.words[0].bit_count() if self.words else len(self.axes) + 1

    def named(self) -> list[Term]:
        """The words by their axes."""
        return [tuple(a for bit, a in enumerate(self.axes) if word >> bit & 1) for word in self.words]

    def members(self, space: DesignSpace) -> np.ndarray:
        """The places of its points among those of a space."""
        names = list(space.axes)
        signs = space.points[:, [names.index(axis) for axis in self.axes]] * 2 - 1
        kept = np.ones(len(signs), dtype=bool)
        for word in self.words:
            bits = [bit for bit in range(len(self.axes)) if word >> bit & 1]
            kept &= signs[:, bits].prod(axis=1) == 1
        return np.flatnonzero(kept)


def two_level_axes(space: DesignSpace) -> tuple[str, ...]:
    """The axes with two levels."""
    return tuple(axis for axis, levels in space.axes.items() if len(levels) == 2)


def best(space: DesignSpace, halvings: int, terms: Collection[Term], least: int = 3) -> RegularFraction | None:
    """The fraction 1/2^halvings that tells all `terms` apart and has the fewest short words (minimum aberration); None where
    none does with at least that resolution, or where there are too many to try."""
    axes = two_level_axes(space)
    if not 0 < halvings < len(axes):
        return None
    apart = _forbidden(space, axes, terms)
    found: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    for words in _subgroups(len(axes), halvings):
        lengths = [word.bit_count() for word in words]
        if min(lengths) < least or not apart.isdisjoint(words):
            continue
        pattern = tuple(lengths.count(n) for n in range(1, len(axes) + 1))
        if found is None or (pattern, words) < found:
            found = pattern, words
    return (
        None
        if found is None
        else RegularFraction(axes, tuple(sorted(found[1], key=lambda word: (word.bit_count(), word))))
    )


def smallest_fraction(space: DesignSpace, resolution: int, terms: Collection[Term]) -> RegularFraction | None:
    """The smallest fraction of at least that resolution that tells all `terms` apart; None where only the complete factorial
    does."""
    k = len(two_level_axes(space))
    # a design of resolution 2 t + 1 tells all terms of up to t axes apart
    least = {3: k + 1, 4: 2 * k}.get(resolution, 1 + k + k * (k - 1) // 2)
    for halvings in range(k - 1, 0, -1):
        if 2 ** (k - halvings) >= least and (found := best(space, halvings, terms, resolution)) is not None:
            return found
    return None


def _forbidden(space: DesignSpace, axes: Sequence[str], terms: Collection[Term]) -> set[int]:
    """The words that would mix two of these terms, or one of them with the mean: they agree on all axes but the two-level ones."""
    split = []
    for term in [(), *terms]:
        bits = sum(1 << bit for bit, axis in enumerate(axes) if axis in term)
        split.append((tuple(axis for axis in term if axis not in axes), bits))
    return {a ^ b for (others, a), (more, b) in combinations(split, 2) if others == more}


def _subgroups(k: int, p: int) -> Iterator[tuple[int, ...]]:
    """The words of every fraction 2^(k-p), sorted; of too many, those whose last p axes are made from the first."""
    # each of p axes is the product of two or more of the others
    one_base = math.comb(max(2 ** (k - p) - (k - p) - 1, 0), p) * 2**p
    bases = list(combinations(range(k), k - p))
    if one_base > MOST_TRIES:
        return
    if one_base * len(bases) > MOST_TRIES:
        bases = bases[:1]
    seen = set()
    for base in bases:
        rest = [axis for axis in range(k) if axis not in base]
        products = [sum(1 << axis for axis in some) for n in range(2, k - p + 1) for some in combinations(base, n)]
        for made in combinations(products, p):
            words = [0]
            for axis, product in zip(rest, made, strict=True):
                generator = product | 1 << axis
                words += [word ^ generator for word in words]
            group = tuple(sorted(words[1:]))
            if group not in seen:
                seen.add(group)
                yield group
