"""The Wilson interval."""

from __future__ import annotations

import math

import pytest
from atma_sweep.results.intervals import wilson, wilson_of_trials
from statsmodels.stats.proportion import proportion_confint


def test_a_known_interval() -> None:
    assert wilson(45, 50) == pytest.approx((0.786399, 0.956525), abs=1e-5)


@pytest.mark.parametrize(
    ("hits", "n"), [(45, 50), (0, 1), (1, 1), (0, 80), (80, 80), (1, 80), (79, 80), (37, 80), (3, 7)]
)
def test_bounds_are_the_roots_of_the_score_equation(hits: int, n: int) -> None:
    """(p - x)^2 = z^2 x (1 - x) / n, solved as a quadratic in x."""
    z2, p = 1.959963984540054**2, hits / n
    a, b, c = 1 + z2 / n, -(2 * p + z2 / n), p * p
    root = math.sqrt(b * b - 4 * a * c)
    low, high = wilson(hits, n)
    assert low == pytest.approx(max(0.0, (-b - root) / (2 * a)), abs=1e-12)
    assert high == pytest.approx(min(1.0, (-b + root) / (2 * a)), abs=1e-12)
    assert 0 <= low <= p <= high <= 1


def test_mirrored_counts_have_mirrored_bounds() -> None:
    low, high = wilson(13, 80)
    assert wilson(67, 80) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize(("hits", "n"), [(0, 80), (1, 80), (45, 50), (79, 80), (80, 80), (3, 7)])
def test_statsmodels_says_the_same(hits: int, n: int) -> None:
    assert wilson(hits, n) == pytest.approx(proportion_confint(hits, n, method="wilson"), abs=1e-12)


@pytest.mark.parametrize(("hits", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_no_share_has_no_interval(hits: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{hits} of {n} is not a share"):
        wilson(hits, n)


def test_a_share_of_sixteen_trials() -> None:
    """92.5% of 80 digits in 16 trials."""
    assert wilson_of_trials(0.925, 16) == pytest.approx(proportion_confint(14.8, 16, method="wilson"), abs=1e-12)
    assert [round(100 * end, 1) for end in wilson_of_trials(0.925, 16)] == [70.1, 98.5]
