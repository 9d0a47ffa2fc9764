"""The pairs that a difference takes: against statsmodels, against counting up, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from atma_sweep.reports.stats.noise.run_noise import detectable, detectable_factor
from atma_sweep.reports.stats.power_analysis import MAX_PAIRS, pairs_needed, power_analyses
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.store import Store
from scipy import stats
from statsmodels.stats.power import TTestPower


def needed(sd: float, df: int, difference: float) -> int:
    (num_pairs,) = pairs_needed(np.array([sd]), np.array([df]), np.array([difference])).tolist()
    return int(num_pairs)


def test_ten_points_on_polar_with_memory() -> None:
    """Sd is 19.9 points with 16 degrees of freedom.

    The usual 2 ((t + t) sd / 10)^2 gives 71 pairs, but ignores that the pairs' own sd is an estimate, too.
    """
    usual = 2 * ((stats.t.ppf(0.975, 16) + stats.t.ppf(0.8, 16)) * 19.907 / 10) ** 2
    assert math.ceil(usual) == 71
    assert needed(19.907, 16, 10) == 72


@pytest.mark.parametrize(("pairs", "df"), [(2, 4), (3, 12), (10, 3), (72, 16)])
def test_the_power_by_simulation(pairs: int, df: int) -> None:
    """Student's t over pairs of runs whose true sd is drawn given an estimate of 1 with `df` degrees of freedom."""
    draw, num_draws = np.random.default_rng(pairs), 200_000
    true = np.sqrt(df / draw.chisquare(df, num_draws))
    mean = detectable_factor(pairs, df) + true * math.sqrt(2 / pairs) * draw.normal(size=num_draws)
    own = true * np.sqrt(2 * draw.chisquare(pairs - 1, num_draws) / (pairs - 1))
    seen = mean > stats.t.ppf(0.975, pairs - 1) * own / math.sqrt(pairs)
    assert abs(float(seen.mean()) - 0.8) < 0.005


@pytest.mark.parametrize("ratio", [0.2, 0.5, 1.0])
def test_pairs_needed_equals_statsmodels(ratio: float) -> None:
    expected = TTestPower().solve_power(ratio / math.sqrt(2), power=0.8, alpha=0.05)
    assert needed(1, 10**7, ratio) == math.ceil(expected)


@pytest.mark.parametrize(("ratio", "df"), [(0.5, 3), (1.0, 12), (2.0, 12), (6.0, 4), (0.0001, 12)])
def test_pairs_needed_is_the_minimum(ratio: float, df: int) -> None:
    num_pairs = needed(1, df, ratio)
    if num_pairs > MAX_PAIRS:
        assert detectable_factor(MAX_PAIRS, df) > ratio
        return
    assert num_pairs == next(n for n in range(2, 10_000) if detectable_factor(n, df) <= ratio)


@pytest.mark.thorough
def test_power_analyses_of_the_published_sweep(published: Store) -> None:
    by_stratum = {
        (analysis.measure.heading, *analysis.stratum): analysis
        for analysis in power_analyses(load_sweep_data(published, "printed-v2"))
    }
    polar = by_stratum["Ndl@64K", "polar", "on"]
    assert (polar.pairs, polar.differences) == (10, (0.05, 0.1, 0.2)), "distractor: ten pairs of configurations"
    for share, n in zip(polar.differences, polar.needed, strict=True):
        assert n is not None
        assert detectable(polar.spread, n) <= share < detectable(polar.spread, n - 1)
    assert polar.detectable_one_pair > polar.detectable_all_pairs > 0.1, "the design's own pairs do not show ten points"
    assert by_stratum["Val", "polar", "on"].differences == (0.01, 0.02, 0.05)
    assert not any(heading == "MFU" for heading, *_ in by_stratum)
    table = make_table("power", published, "printed-v2")
    row = next(row for row in table.rows if row[:3] == ("Ndl@64K", "polar", "on"))
    assert row[-2:] == tuple(str(n) for n in polar.needed[1:])
    assert len(table.trace["cells"]) == 120
