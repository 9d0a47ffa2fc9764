"""Interval of configurations crossed with seeds, its p against adaptive quadrature of another parametrisation."""

import math
from itertools import pairwise

import numpy as np
import pytest
from atma_sweep.reports.stats.significance.crossed_interval import crossed_interval
from scipy import integrate, special, stats

FAR = pytest.mark.thorough
DESIGNS = [(6, 3, 0.3), (48, 5, 0.5), *(pytest.param(*size, marks=FAR) for size in (
    (2, 2, 0.3), (3, 3, 1.0), (10, 5, 0.5), (12, 2, 0.0), (20, 5, 0.1), (20, 5, 2.0), (24, 3, 0.5), (60, 3, 0.5), (80, 3, 0.2), (120, 5, 0.3),
))]  # fmt: skip
"""(configurations, seeds, standard deviation of seeds), as in sweeps and their items."""
PROBABILITIES = (0.5, 0.05, 1e-3, 1e-4, 1e-6, 1e-9, 1e-12)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)


def draw_table(configurations: int, seeds: int, shock: float) -> np.ndarray:
    random = np.random.default_rng(10 * configurations + seeds)
    table = random.normal(size=(configurations, seeds)) + shock * random.normal(size=(1, seeds))
    return table - table.mean()


def tail_probability(distance: float, v1: float, df: int, shared: float) -> float:
    """Return P(|sqrt(v1) T + sqrt(shared) Z| > distance), T Student's with df, by panels over the normal Z."""
    wide, narrow = math.sqrt(v1), math.sqrt(shared)
    if distance > 1e9 * narrow or not narrow:
        return 2 * float(special.stdtr(df, -distance / wide))
    middle = distance / narrow
    ends = [-38, -20, -8, -3, 0, 3, 8, 20, 38, *(middle + step * wide / narrow for step in (-20, -5, -1, 0, 1, 5, 20))]
    total = 0.0
    for low, high in pairwise(sorted(min(max(end, -38.0), 38.0) for end in ends)):
        z = (low + high) / 2 + (high - low) / 2 * NODES
        tails = 2 * special.stdtr(df, -(distance - narrow * z) / wide)
        total += (high - low) / 2 * float(WEIGHTS @ (np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * tails))
    return total


def exact_p(table: np.ndarray, distance: float) -> float:
    """Return p of a mean that far from zero, from the mean squares of a complete design.

    The generalized p is computed by adaptive quadrature over the logarithm of the lower tail of the seeds' chi-square,
    with Student's t and a normal convolved inside.
    """
    c, s = table.shape
    rows, columns, mean = table.mean(axis=1), table.mean(axis=0), table.mean()
    a, b = s * rows.var(ddof=1), c * columns.var(ddof=1)
    e = ((table - rows[:, None] - columns + mean) ** 2).sum() / ((c - 1) * (s - 1))
    above = [a**2 / (c - 1), *([b**2 / (s - 1), e**2 / ((c - 1) * (s - 1))] if b > e else [])]
    variance = a + max(0.0, b - e)
    df = max(variance**2 / sum(above), min(c, s) - 1)
    satterthwaite = 2 * float(stats.t.sf(distance / math.sqrt(variance / (c * s)), df))

    def integrand(log: float) -> float:
        lower = math.exp(log)
        square = stats.chi2.ppf(lower, s - 1) if lower < 0.5 else stats.chi2.isf(-math.expm1(log), s - 1)
        return lower * tail_probability(distance, a / (c * s), c - 1, max(0.0, b * (s - 1) / square - e) / (c * s))

    border = b * (s - 1) / e
    top = min(math.log(float(stats.chi2.cdf(border, s - 1))), -1e-16)
    ends = [top - back for back in (0, 1, 4, 10, 18, 28, 46)]
    parts = [integrate.quad(integrand, low, high, epsabs=0, epsrel=1e-7, limit=200)[0] for high, low in pairwise(ends)]
    alone = float(stats.chi2.sf(border, s - 1)) * 2 * float(special.stdtr(c - 1, -distance / math.sqrt(a / (c * s))))
    return satterthwaite + (sum(parts) + alone - satterthwaite) / (2 * s - 3)


def p_of_mean(table: np.ndarray, mean: float) -> float:
    interval = crossed_interval(table + mean)
    assert interval is not None
    return interval[2]


def mean_with_p(table: np.ndarray, p: float) -> float:
    """Return a mean whose p is about this one."""
    low, high = 0.0, 1.0
    while p_of_mean(table, high) > p:
        low, high = high, 4 * high
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if p_of_mean(table, middle) > p else (low, middle)
    return high


@pytest.mark.thorough
@pytest.mark.parametrize(("configurations", "seeds", "shock"), DESIGNS)
def test_crossed_interval_p_in_the_far_tail(configurations: int, seeds: int, shock: float) -> None:
    table = draw_table(configurations, seeds, shock)
    for p in PROBABILITIES:
        mean = mean_with_p(table, p)
        # the trapezoid rule is good to 2e-7, as a finer step shows, and the reference to 2e-6 where Student's t has one degree of
        # freedom; of a far mean, rounding leaves the differences from it, which are about 1, wrong in its last places
        assert p_of_mean(table, mean) == pytest.approx(exact_p(table, mean), rel=max(5e-6, 1e-15 * mean), abs=0), p


@pytest.mark.parametrize(("configurations", "seeds"), [(46, 3), (80, 3), (75, 5), (120, 6)])
def test_crossed_interval_of_large_complete_designs(configurations: int, seeds: int) -> None:
    """A numerical rank once misjudged these as designs with unconnected seeds."""
    table = draw_table(configurations, seeds, 0.5) + 0.1
    assert p_of_mean(table, 0.0) == pytest.approx(exact_p(table, 0.1), rel=1e-6)


@pytest.mark.filterwarnings("error")
def test_crossed_interval_of_equal_seeds_is_student_t() -> None:
    """Without variance between seeds, the interval is Student's t over configurations."""
    means = np.array([0.25, 0.5, 1.0, 1.25])
    low, high = stats.t.interval(0.95, 3, means.mean(), stats.sem(means))
    interval = crossed_interval(np.tile(means[:, None], 3))
    assert interval == pytest.approx((low, high, stats.ttest_1samp(means, 0).pvalue))


def test_crossed_interval_refuses_unconnected_seeds() -> None:
    table = np.full((6, 4), math.nan)
    table[:3, :2], table[3:, 2:] = np.arange(6).reshape(3, 2), np.arange(6).reshape(3, 2)
    assert crossed_interval(table) is None
    table[0, 2] = 1.0
    assert crossed_interval(table) is not None
