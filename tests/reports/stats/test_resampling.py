"""Tests and intervals of matched differences: by hand, against scipy, and many at once against one by one."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from atma_sweep.reports.stats import resampling as rs
from scipy import stats


def test_sign_test_by_hand():
    assert rs.sign_test([1] * 20) == pytest.approx(2 / 2**20)
    # 1 of 5 or fewer, or 4 of 5 or more: 2 (1 + 5) / 32
    assert rs.sign_test([1, 2, 3, 4, -5, 0, 0]) == pytest.approx(12 / 32)
    assert rs.sign_test([0, 0]) == rs.sign_test([]) == 1.0


def test_permutation_by_hand():
    # of the 8 sign patterns of 1, 2, 3 only +++ and --- reach a sum of 6
    assert rs.sign_flip([1, 2, 3]) == 2 / 8
    # -1+2+3 = 4: +++, ---, -++ and +-- reach it
    assert rs.sign_flip([-1, 2, 3]) == 4 / 8
    assert rs.sign_flip([0.0, 0.0]) == 1.0
    assert rs.sign_flip([5.0]) == 1.0


@pytest.mark.parametrize("n", [1, 2, 5, 9, 10])
def test_permutation_against_every_pattern(n):
    d = np.random.default_rng(n).normal(0.4, 1, n)
    sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((-1, 1), repeat=n)]
    assert rs.sign_flip(d) == pytest.approx(np.mean([total >= abs(d.sum()) - 1e-12 for total in sums]))


def test_permutation_against_scipy():
    d = np.random.default_rng(0).normal(0.3, 1, 12)
    found = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert rs.sign_flip(d) == pytest.approx(found.pvalue, abs=1e-12)
    many = np.random.default_rng(1).normal(0.2, 1, 60)
    t = stats.ttest_1samp(many, 0).pvalue
    assert rs.sign_flip(many) == pytest.approx(t, abs=0.02)
    assert rs.sign_flip(many) == rs.sign_flip(many)


def test_holm_by_hand():
    # sorted .01 .02 .03 .04 times 4 3 2 1: .04 .06 .06 .04, made to rise: .04 .06 .06 .06
    assert rs.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert rs.holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert rs.holm([]) == []


def test_bootstrap():
    d = np.random.default_rng(3).normal(1, 2, 40)
    low, high = rs.bootstrap(d)
    found = stats.bootstrap((d,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(0))
    assert (low, high) == pytest.approx(tuple(found.confidence_interval), abs=0.03)
    assert (low, high) == rs.bootstrap(d)
    assert all(math.isnan(x) for x in rs.bootstrap([1.0]))
    assert rs.bootstrap([2.0, 2.0]) == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("n", [rs.MANY, rs.MANY + 1, 333])
def test_hundreds_of_pairs_against_scipy(n):
    d = np.random.default_rng(n).exponential(2, n) - 1.8
    found = stats.bootstrap((d,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(0))
    error = d.std() / math.sqrt(n)
    assert rs.bootstrap(d) == pytest.approx(tuple(found.confidence_interval), abs=0.1 * error)
    flips = np.random.default_rng(1).choice([-1, 1], size=(20_000, n))
    assert rs.sign_flip(d) == pytest.approx((np.abs(flips @ d) >= abs(d.sum())).mean(), abs=0.015)


@pytest.mark.parametrize("n", [rs.EXACT + 1, rs.MANY, rs.MANY + 1])
def test_draws_are_fair(n):
    """A sign is as often plus as minus, a pair is drawn once on average with the variance of a multinomial count."""
    signs = np.concatenate(list(rs._signs(n)))
    assert signs.shape == (rs.FLIPS, n)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert np.abs(signs.mean(axis=0)).max() < 5 / math.sqrt(rs.FLIPS)
    counts = np.concatenate(list(rs._weights(n))) * n
    assert counts.shape == (rs.RESAMPLES, n)
    assert counts.sum(axis=1) == pytest.approx(np.full(rs.RESAMPLES, n))
    assert np.abs(counts.mean(axis=0) - 1).max() < 5 / math.sqrt(rs.RESAMPLES)
    assert counts.var() == pytest.approx(1 - 1 / n, rel=0.02)


def test_many_at_once_are_what_each_is_alone():
    draw = np.random.default_rng(5)
    samples = [draw.normal(0.1, 1, n) for n in (3, 40, 1, 0, 40, 250, 3, 250)]
    found = rs.summaries(samples)
    assert [one.up + one.down for one in found] == [len(d) for d in samples]
    for one, d in zip(found, samples, strict=True):
        if not len(d):
            assert math.isnan(one.mean)
            assert one.p_sign == one.p_permutation == 1.0
            continue
        assert (one.mean, one.median) == pytest.approx((d.mean(), np.median(d)))
        assert (one.low, one.high) == pytest.approx(rs.bootstrap(d), nan_ok=True)
        assert one.p_permutation == rs.sign_flip(d)
        assert one.p_sign == rs.sign_test(d)
    assert rs.summaries([]) == []


def test_memory_does_not_grow_with_the_draws():
    """10,000 resamples of 2,000 pairs are 160 MB, 20,000 flips are 320 MB; never all of them exist."""
    d = np.random.default_rng(0).normal(size=2000)
    tracemalloc.start()
    rs.summaries([d, -d])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
