"""Critical values of repeated looks against the printed tables (Jennison and Turnbull 2000; Lan and DeMets 1983)."""

from __future__ import annotations

import numpy as np
import pytest
from atma_sweep.results.stopping.alpha_spending import (
    SPENDING_FUNCTIONS,
    alpha_levels,
    critical_values,
    repeated_p_value,
)

FIVE = [0.2, 0.4, 0.6, 0.8, 1.0]
PRINTED = {"obrien-fleming": [4.877, 3.357, 2.680, 2.290, 2.031], "pocock": [2.438, 2.427, 2.410, 2.397, 2.386]}


@pytest.mark.parametrize("spending", SPENDING_FUNCTIONS)
def test_five_looks_as_printed(spending: str) -> None:
    assert critical_values(FIVE, spending=spending) == pytest.approx(PRINTED[spending], abs=0.002)


def test_single_look_equals_the_ordinary_test() -> None:
    for spending in SPENDING_FUNCTIONS:
        assert critical_values([1.0], spending=spending) == pytest.approx([1.959964], abs=1e-5)


@pytest.mark.parametrize("spending", SPENDING_FUNCTIONS)
def test_the_level_holds_and_looking_without_it_does_not(spending: str) -> None:
    random = np.random.default_rng(0)
    looks = [2, 3, 4, 6, 8]
    sums = random.normal(size=(200_000, looks[-1])).cumsum(axis=1)[:, [n - 1 for n in looks]]
    z = np.abs(sums / np.sqrt(looks))
    bounds = critical_values([n / looks[-1] for n in looks], spending=spending)
    assert (z > bounds).any(axis=1).mean() == pytest.approx(0.05, abs=0.002)
    assert (z > 1.96).any(axis=1).mean() > 0.11
    assert alpha_levels(looks, looks[-1], spending=spending)[0] < 0.05


@pytest.mark.parametrize("wrong", [[], [0.5, 0.5], [0.0, 1.0], [0.5, 1.1]])
def test_shares_that_do_not_grow(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="fractions of the sample must rise"):
        critical_values(wrong)


@pytest.mark.parametrize("spending", SPENDING_FUNCTIONS)
def test_a_p_value_is_worth_what_the_rule_leaves_of_it(spending: str) -> None:
    looks = [3, 4, 5]
    each = alpha_levels(looks, 8, spending=spending)
    # just sure at its look: worth the level of the whole rule
    assert repeated_p_value(each[-1], looks, 8, spending=spending) == pytest.approx(0.05, rel=1e-4)
    worth = [repeated_p_value(p, looks, 8, spending=spending) for p in (0.5, 0.1, 0.01, 1e-6, 0.0)]
    assert worth == sorted(worth, reverse=True)
    assert all(more >= p for more, p in zip(worth, (0.5, 0.1, 0.01, 1e-6), strict=False))
    assert repeated_p_value(0.03, [8], 8, spending=spending) == pytest.approx(0.03, rel=1e-4), (
        "one look at the end is an ordinary test"
    )
    assert repeated_p_value(1.0, looks, 8, spending=spending) == 1.0
