"""Corrected p values: by hand, against statsmodels, and against every flip of signs one by one."""

import itertools
import math

import numpy as np
import pytest
from atma_sweep.reports.number_format import Column
from atma_sweep.reports.stats.effects import effects as ef
from atma_sweep.reports.stats.significance import paired_tests as rs
from atma_sweep.reports.sweep_data import load_sweep_data
from statsmodels.stats.multitest import multipletests
from sweeps import matched_pairs

NEEDLE_64K = Column("Ndl@64K", "needle", "digit_accuracy", 1, percent=True, length=65536)


def test_holm_by_hand():
    # sorted .01 .02 .03 .04 times 4 3 2 1: .04 .06 .06 .04, made to rise: .04 .06 .06 .06
    assert rs.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert rs.holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert rs.holm([]) == []


def test_holm_ignores_nan():
    assert rs.holm([0.02, math.nan, 0.03]) == pytest.approx([0.04, math.nan, 0.04], nan_ok=True)
    assert all(math.isnan(p) for p in rs.holm([math.nan, math.nan]))


def step_down_max_t(samples: list[dict[str, float]]) -> list[float]:
    """Return step-down maxT p values by definition: every flip of every configuration, studentised sums."""
    names = sorted({name for sample in samples for name in sample})
    seen = [abs(sum(sample.values())) / math.sqrt(sum(x * x for x in sample.values())) for sample in samples]
    order = sorted(range(len(samples)), key=lambda test: -seen[test])
    corrected_p, before = [0.0] * len(samples), 0.0
    for step, test in enumerate(order):
        reached = 0
        for flip in itertools.product((-1, 1), repeat=len(names)):
            sign = dict(zip(names, flip, strict=True))
            most = max(
                abs(sum(sign[name] * x for name, x in samples[later].items()))
                / math.sqrt(sum(x * x for x in samples[later].values()))
                for later in order[step:]
            )
            reached += most >= seen[test] - 1e-9
        before = corrected_p[test] = max(before, reached / 2 ** len(names))
    return corrected_p


def test_max_t_equals_enumeration():
    draw = np.random.default_rng(7)
    names = [f"c{number}" for number in range(9)]
    common = draw.normal(size=9)
    full = [0.7 * common + draw.normal(shift, 0.6, 9) for shift in (0.0, 0.4, 1.2)]
    part = draw.normal(0.8, 1, 7)
    samples = [*full, part]
    keys = [names, names, names, names[2:]]
    expected = step_down_max_t(
        [dict(zip(sample_keys, d, strict=True)) for d, sample_keys in zip(samples, keys, strict=True)]
    )
    assert rs.correct_family(samples, rs.paired_difference_tests(samples), keys) == pytest.approx(expected)
    # without names, rows at one place belong together where there are as many in each
    expected = step_down_max_t([dict(zip(names, d, strict=True)) for d in full])
    assert rs.correct_family(full, rs.paired_difference_tests(full)) == pytest.approx(expected)


def test_max_t_draws_approximate_enumeration():
    draw = np.random.default_rng(3)
    samples = [draw.normal(shift, 1, 15) for shift in (0.0, 0.3, 0.55, 0.7)]
    signs = 1 - 2 * ((np.arange(1 << 15)[:, None] >> np.arange(15)) & 1)
    table = np.stack([d / np.sqrt((d**2).sum()) for d in samples], axis=1)
    flipped, seen = np.abs(signs @ table), np.abs(table.sum(axis=0))
    order = np.argsort(-seen)
    expected, before = np.zeros(4), 0.0
    for step, test in enumerate(order):
        before = expected[test] = max(before, (flipped[:, order[step:]].max(axis=1) >= seen[test] - 1e-12).mean())
    corrected_p = rs.correct_family(samples, rs.paired_difference_tests(samples))
    assert corrected_p == pytest.approx(expected.tolist(), abs=0.01)
    assert corrected_p == rs.correct_family(samples, rs.paired_difference_tests(samples))


def test_max_t_of_copies_needs_no_correction():
    """A family of ten copies is a single test; Holm would multiply its p by ten."""
    d = np.random.default_rng(6).normal(0.9, 1, 9)
    (alone,) = rs.paired_difference_tests([d])
    assert rs.correct_family([d] * 10, rs.paired_difference_tests([d] * 10)) == pytest.approx([alone.p] * 10)


@pytest.mark.thorough
def test_holm_is_used_unless_all_are_sign_flip_tests():
    draw = np.random.default_rng(9)
    samples = [draw.normal(1, 1, 8), draw.normal(1, 1, 5), draw.normal(1, 1, (5, 3)), np.array([1.0])]
    results = rs.paired_difference_tests(samples)
    assert [result.method for result in results] == ["sign-flip", "t", "crossed", "none"]
    expected = multipletests([result.p for result in results[:3]], method="holm")[1]
    assert rs.correct_family(samples, results) == pytest.approx([*expected, math.nan], nan_ok=True)
    # unequal numbers of rows without names cannot be flipped together
    samples = [draw.normal(1, 1, 8), draw.normal(1, 1, 9)]
    results = rs.paired_difference_tests(samples)
    assert rs.correct_family(samples, results) == pytest.approx(rs.holm([result.p for result in results]))


def test_max_t_of_a_constant_member():
    samples = [np.zeros(8), np.random.default_rng(1).normal(3, 1, 8)]
    corrected_p = rs.correct_family(samples, rs.paired_difference_tests(samples))
    assert corrected_p[0] == 1.0
    assert corrected_p[1] == pytest.approx(2 / 2**8)


def test_nope_minus_polar_is_significant_in_its_family(published):
    """Holm's correction of sign tests over the full table gave 0.0945, though the permutation p is below 1e-4."""
    data = load_sweep_data(published, "printed-v2")
    rows = [row for row in ef.effects(data, [NEEDLE_64K], include_strata=False) if row.axis == "attn_type"]
    pairs = [matched_pairs(data, NEEDLE_64K, "attn_type", row.level) for row in rows]
    axes = [axis for axis in AXES_BUT_MIXER if axis in pairs[0]]
    samples = [pair_frame["difference"].to_numpy(dtype=float) for pair_frame in pairs]
    keys = [list(pair_frame[axes].itertuples(index=False, name=None)) for pair_frame in pairs]
    summed = rs.paired_difference_tests(samples, [1.0] * len(samples))
    p = dict(
        zip((row.level for row in rows), rs.correct_family(samples, summed, keys, [1.0] * len(samples)), strict=True)
    )
    assert p["nope"] < 0.005
    assert p["rope"] < 0.005


AXES_BUT_MIXER = ("reg_mode", "distractor", "memory", "window", "seed")
