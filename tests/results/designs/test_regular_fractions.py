"""Regular fractions against the tables of the textbooks (Box, Hunter and Hunter; Montgomery)."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from atma_sweep.results.designs import aliasing, design_choice, regular_fractions
from atma_sweep.results.designs.design_space import DesignSpace, LinearModel, Term, hierarchical_closure, term_text


def letters(k: int) -> DesignSpace:
    return DesignSpace(dict.fromkeys("ABCDEFGHIJK"[:k], ("-", "+")))


def signs(space: DesignSpace, members: np.ndarray) -> np.ndarray:
    return space.points[members] * 2 - 1


def test_the_half_of_five_axes_is_i_abcde() -> None:
    space = letters(5)
    fraction = regular_fractions.best_fraction(space, 1, space.terms(1))
    assert fraction is not None
    assert fraction.relation_as_terms() == [("A", "B", "C", "D", "E")]
    members = fraction.members(space)
    table = signs(space, members)
    assert len(table) == 16
    # the book: A = BCDE, AB = CDE; every main effect and interaction of two axes is clear of the others
    assert (table[:, 0] == table[:, 1:].prod(axis=1)).all()
    assert (table[:, :2].prod(axis=1) == table[:, 2:].prod(axis=1)).all()
    assert aliasing.aliases(LinearModel(space, tuple(space.terms(1))), members, 1e-6) == []


TABLE = {
    # (k, p): resolution, words of length 3 and 4 of the fraction with minimum aberration
    (3, 1): (3, 1, 0), (4, 1): (4, 0, 1), (5, 1): (5, 0, 0), (5, 2): (3, 2, 1), (6, 1): (6, 0, 0), (6, 2): (4, 0, 3),
    (6, 3): (3, 4, 3), (7, 1): (7, 0, 0), (7, 2): (4, 0, 1), (7, 3): (4, 0, 7), (7, 4): (3, 7, 7), (8, 2): (5, 0, 0),
    (8, 4): (4, 0, 14), (9, 4): (4, 0, 6),
}  # fmt: skip


@pytest.mark.parametrize(("k", "p"), TABLE)
def test_resolutions_and_words_are_the_book_s(k: int, p: int) -> None:
    space = letters(k)
    fraction = regular_fractions.best_fraction(space, p, space.terms(1))
    assert fraction is not None
    lengths = [len(word) for word in fraction.relation_as_terms()]
    assert (fraction.resolution, lengths.count(3), lengths.count(4)) == TABLE[k, p]
    assert len(fraction.members(space)) == 2 ** (k - p)


def test_seven_axes_in_eight_runs_are_orthogonal() -> None:
    space = letters(7)
    fraction = regular_fractions.smallest_fraction(space, 3, space.terms(1))
    assert fraction is not None
    table = signs(space, fraction.members(space))
    assert (table.T @ table == 8 * np.eye(7)).all()
    assert not table.sum(axis=0).any()


def by_hand(space: DesignSpace, members: np.ndarray) -> set[frozenset[Term]]:
    """Pairs of effects of one or two axes whose columns are the same but for a sign."""
    table = dict(zip(space.axes, signs(space, members).T, strict=True))
    columns = {term: np.prod([table[axis] for axis in term], axis=0) for n in (1, 2) for term in space.terms(n)}
    return {frozenset((a, b)) for a, b in combinations(columns, 2) if abs(columns[a] @ columns[b]) == len(members)}


@pytest.mark.parametrize(("k", "p"), [(5, 2), (6, 2), (7, 3)])
def test_aliases_are_the_columns_that_are_equal(k: int, p: int) -> None:
    space = letters(k)
    design, members = design_choice.regular_fraction(
        space, space.terms(1), regular_fractions.best_fraction(space, p, space.terms(1))
    )  # type: ignore[arg-type]
    pairs = {
        frozenset((alias.first, alias.second)) for alias in aliasing.aliases(design.model, members) if alias.is_mutual
    }
    assert pairs == by_hand(space, members)
    sentence = aliasing.alias_sentences(design.model, members)[0]
    assert sentence.startswith(f"with these {2 ** (k - p)} cells, ")
    assert " is aliased with " in sentence


def test_best_fraction_separates_the_terms() -> None:
    space = letters(6)
    wanted = hierarchical_closure([("A", "B"), ("C", "E"), ("C", "D"), ("B", "F")])
    fraction = regular_fractions.smallest_fraction(space, 4, wanted)
    assert fraction is not None
    design, members = design_choice.regular_fraction(space, wanted, fraction)
    rows = design.model.columns(space.points[members])
    assert np.allclose(rows.T @ rows, len(members) * np.eye(rows.shape[1]))


def test_multilevel_axes_are_crossed_with_the_fraction() -> None:
    space = DesignSpace({"mixer": ("a", "b", "c")} | dict.fromkeys("ABCD", ("-", "+")))
    fraction = regular_fractions.smallest_fraction(space, 4, space.terms(1))
    assert fraction is not None
    points = space.points[fraction.members(space)]
    assert len(points) == 24
    assert {tuple(p) for p in points} == {(m, *p) for m in range(3) for p in np.ndindex(2, 2, 2, 2) if sum(p) % 2 == 0}  # type: ignore[misc]


def test_no_fraction_where_there_is_none() -> None:
    assert regular_fractions.smallest_fraction(letters(3), 4, letters(3).terms(1)) is None
    assert regular_fractions.best_fraction(letters(5), 1, letters(5).terms(1), least=6) is None
    assert term_text(("memory", "window")) == "memory x window"
