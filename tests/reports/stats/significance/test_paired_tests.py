"""Tests and intervals of matched differences, by hand, against scipy and by enumeration."""

import itertools
import math
import tracemalloc
from collections import defaultdict
from dataclasses import asdict
from fractions import Fraction
from functools import cache, partial

import numpy as np
import pytest
from atma_sweep.reports.stats.effects import effects as ef
from atma_sweep.reports.stats.significance import paired_tests as rs
from atma_sweep.reports.stats.significance import sign_flip_test
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.results.paper import rows as printed_rows
from atma_sweep.results.store.records import AXES
from scipy import stats


def every_sign(n: int) -> np.ndarray:
    return np.array(list(itertools.product((-1, 1), repeat=n)))


def sign_flip(d) -> float:
    return float(sign_flip_test.sign_flip_p_values(np.array(d, dtype=float)[:, None])[0])


def sign_test(d) -> float:
    (result,) = rs.paired_difference_tests([d])
    return result.p_sign


def test_sign_test_by_hand():
    assert sign_test([1] * 20) == pytest.approx(2 / 2**20)
    # 1 of 5 or fewer, or 4 of 5 or more: 2 (1 + 5) / 32
    assert sign_test([1, 2, 3, 4, -5, 0, 0]) == pytest.approx(12 / 32)
    assert sign_test([0, 0]) == sign_test([]) == 1.0


def test_sign_flip_p_by_hand():
    # of the 8 sign patterns of 1, 2, 3 only +++ and --- reach a sum of 6
    assert sign_flip([1, 2, 3]) == 2 / 8
    # -1+2+3 = 4: +++, ---, -++ and +-- reach it
    assert sign_flip([-1, 2, 3]) == 4 / 8
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([5.0]) == 1.0


@pytest.mark.parametrize("n", [1, 2, 5, 9, 10])
def test_sign_flip_p_equals_enumeration(n):
    d = np.random.default_rng(n).normal(0.4, 1, n)
    sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((-1, 1), repeat=n)]
    assert sign_flip(d) == pytest.approx(np.mean([total >= abs(d.sum()) - 1e-12 for total in sums]))


def test_sign_flip_p_equals_scipy():
    d = np.random.default_rng(0).normal(0.3, 1, 12)
    permutation = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip(d) == pytest.approx(permutation.pvalue, abs=1e-12)
    large_sample = np.random.default_rng(1).normal(0.2, 1, 60)
    t = stats.ttest_1samp(large_sample, 0).pvalue
    assert sign_flip(large_sample) == pytest.approx(t, abs=0.02)
    assert sign_flip(large_sample) == sign_flip(large_sample)


class TestInterval:
    @pytest.mark.parametrize("n", [6, 7, 10, sign_flip_test.MAX_ENUMERATED_N])
    def test_interval_inverts_the_test(self, n):
        """Enumerate every flip of the differences minus theta, on both sides of both ends."""
        d = np.random.default_rng(n).gamma(2.0, 1.0, n)
        (result,) = rs.paired_difference_tests([d])
        signs, gap = every_sign(n), 1e-6 * np.ptp(d)

        def p(theta: float) -> float:
            return float((np.abs(signs @ (d - theta)) >= abs((d - theta).sum()) - 1e-12).mean())

        assert p(result.low + gap) >= 0.05 > p(result.low - gap)
        assert p(result.high - gap) >= 0.05 > p(result.high + gap)
        assert result.p == pytest.approx(p(0))
        assert (result.method, result.n, result.seeds) == ("sign-flip", n, 1)

    @pytest.mark.parametrize("n", [sign_flip_test.MAX_ENUMERATED_N + 1, 21, sign_flip_test.MAX_EXACT_N])
    def test_interval_by_split_halves(self, n):
        """The reference `sign_flip` does not search for ends, and was itself compared with an enumeration."""
        d = np.random.default_rng(n).normal(0.5, 1, n)
        d[:3] = 0.25  # ties
        (result,) = rs.paired_difference_tests([d])
        gap = 3e-6 * np.ptp(d)
        for end, side in ((result.low, 1), (result.high, -1)):
            assert sign_flip(d - end - side * gap) >= 0.05 > sign_flip(d - end + side * gap)

    @pytest.mark.parametrize("n", [sign_flip_test.MAX_EXACT_N + 1, 250])
    def test_interval_by_random_flips(self, n):
        d = np.random.default_rng(n).normal(0.5, 1, n)
        (result,) = rs.paired_difference_tests([d])
        for end, side in ((result.low, 1), (result.high, -1)):
            assert sign_flip(d - end - side * 1e-9) >= 0.05 > sign_flip(d - end + side * 1e-9)
        t = stats.t.interval(0.95, n - 1, d.mean(), stats.sem(d))
        assert (result.low, result.high) == pytest.approx(t, abs=0.2 * stats.sem(d))

    def test_six_differences_by_hand(self):
        # of 64 flips 2 are beyond all others: p = 2/64, and what leaves all on one side is rejected
        (result,) = rs.paired_difference_tests([[1.0, 2.0, 3.0, 4.0, 5.0, 9.0]])
        assert (result.low, result.high, result.p) == (1.0, 9.0, 2 / 64)

    def test_interval_excludes_zero_iff_p_is_below_5_percent(self):
        draw = np.random.default_rng(8)
        samples = [draw.normal(shift, 1, n) for n in (2, 5, 6, 9, 14, 17, 22, 31) for shift in np.linspace(0, 1.5, 8)]
        samples += [np.round(sample, 0) for sample in samples]
        samples += [draw.normal(shift, 1, (6, 3)) for shift in np.linspace(0, 1.5, 8)]
        results = [result for result in rs.paired_difference_tests(samples) if result.method != "none"]
        assert [result.p < 0.05 for result in results] == [result.low > 0 or result.high < 0 for result in results]
        assert 30 < sum(result.p < 0.05 for result in results) < len(results) - 30

    def test_method_below_six_is_student_t(self):
        d = [1.0, 2.0, 4.0, 3.5, 0.5]
        (result,) = rs.paired_difference_tests([d])
        assert result.method == "t"
        assert result.p == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
        assert (result.low, result.high) == pytest.approx(stats.t.interval(0.95, 4, np.mean(d), stats.sem(d)))


class TestDegenerate:
    def test_no_test_below_two_differences(self):
        for result in rs.paired_difference_tests([[], [1.0], [math.nan, 1.0], [2.0, 2.0, 2.0], [0.0, 0.0]]):
            assert result.method == "none"
            assert all(math.isnan(x) for x in (result.low, result.high, result.p))

    def test_constant_measure_has_p_of_1(self):
        (result,) = rs.paired_difference_tests([np.zeros(8)])
        assert (result.low, result.high, result.p, result.ties, result.p_sign) == (0.0, 0.0, 1.0, 8, 1.0)
        (result,) = rs.paired_difference_tests([np.full(20, 0.1)])
        assert (result.low, result.high) == pytest.approx((0.1, 0.1))
        assert result.p == 2 / 2**20

    def test_constant_difference_over_seeds(self):
        (result,) = rs.paired_difference_tests([np.full((6, 3), 0.5)])
        assert result.method == "none"


class TestTies:
    def test_rounding_errors_are_ties(self):
        dust = 0.1 + 0.2 - 0.3
        (result,) = rs.paired_difference_tests([[dust, -dust, 0.5, 0.25, 1.0, 2.0]])
        assert (result.up, result.down, result.ties) == (4, 0, 2)
        # where all of them are dust, only the numbers behind them tell
        (result,) = rs.paired_difference_tests([[dust] * 7], [0.3])
        assert (result.up, result.ties, result.p) == (0, 7, 1.0)

    def test_published_validation_losses_by_fractions(self, published):
        data = load_sweep_data(published, "printed-v2")
        counts_by_row = self.counts_compared_with_fractions(
            data, "v2", [column for column in ef.measures(data) if column.metric == "val_loss"]
        )
        # of 1e-16, five of which stood on the wrong side
        assert counts_by_row["Val", ("attn_type", "window"), ("nope", "on"), ("polar", "off"), ""] == (5, 14, 1)

    @pytest.mark.thorough
    @pytest.mark.parametrize("version", ["v1", "v2"])
    def test_published_rows_by_exact_fractions(self, published, version):
        data = load_sweep_data(published, f"printed-{version}")
        measures = ef.measures(data)
        assert len(measures) == 23
        counts_by_row = self.counts_compared_with_fractions(data, version, measures)
        assert {row[0] for row in counts_by_row} == {column.heading for column in measures}

    def counts_compared_with_fractions(self, data, version, columns):
        """Return (up, down, ties) of each effect and interaction, each asserted against the CSV's exact decimals.

        Where strata have one size, and numbers have few digits, the exact permutation p is asserted, too.
        """
        exact = exact_numbers(version)
        keys = [tuple(row[axis] for axis in AXES) for row in printed_rows(f"complete-{version}")]
        corners = cache(partial(corners_of, keys))
        checked = {}
        for effect in [*ef.effects(data, columns), *ef.interactions(data, columns)]:
            pairs, numbers = ends_of(effect), exact[effect.measure.probe, effect.measure.metric, effect.measure.length]
            row = (effect.measure.heading, tuple(pairs), *zip(*pairs.values(), strict=True), effect.where)
            signs = [math.prod(corner_signs) for corner_signs in itertools.product((1, -1), repeat=len(pairs))]
            differences = [
                sum(sign * numbers[corner] for sign, corner in zip(signs, cells, strict=True))
                for cells in corners(tuple(pairs.items()), effect.where)
            ]
            counts = sum(d > 0 for d in differences), sum(d < 0 for d in differences), sum(d == 0 for d in differences)
            assert (effect.up, effect.down, effect.ties) == counts, row
            listed = version == "v2" and effect.method == "sign-flip" and effect.n <= rs.MAX_EXACT_N
            if listed and effect.measure.probe not in ("clean", "junk"):
                assert effect.p == pytest.approx(exact_p(differences), rel=1e-12), row
            assert row not in checked
            checked[row] = counts
        return checked


def ends_of(effect):
    """Return (level, reference) of the axes of an effect or interaction."""
    if isinstance(effect, ef.Effect):
        return {effect.axis: (effect.level, effect.reference)}
    return dict(zip(effect.axes, zip(effect.levels, effect.references, strict=True), strict=True))


def corners_of(keys, pairs, where):
    """Return the cells behind the difference of each configuration at these levels, if all of them exist."""
    axes = [AXES.index(axis) for axis, _ in pairs]
    at = [(AXES.index(axis), level) for axis, level in (part.split("=") for part in where.split(", ") if part)]
    at += [(axis, level) for axis, (_, (level, _)) in zip(axes, pairs, strict=True)]
    configurations = []
    for key in keys:
        if all(key[axis] == level for axis, level in at):
            corner_cells = []
            for levels in itertools.product(*(pair for _, pair in pairs)):
                there = dict(zip(axes, levels, strict=True))
                corner_cells.append(tuple(there.get(axis, level) for axis, level in enumerate(key)))
            if set(corner_cells) <= set(keys):
                configurations.append(corner_cells)
    return configurations


def exact_numbers(version):
    """Return every measure of the published cells, from the CSV files, as integer multiples of its smallest unit."""
    exact = defaultdict(dict)
    for row in printed_rows(f"complete-{version}"):
        exact["val", "val_loss", 0][tuple(row[axis] for axis in AXES)] = Fraction(row["val_loss"])
    for row in printed_rows("runs"):
        exact["throughput", "mfu_paper", 0][tuple(row[axis] for axis in AXES)] = Fraction(row["mfu"])
    for row in printed_rows("lengths"):
        key, length = tuple(row[axis] for axis in AXES), int(row["length"])
        # digits of 80, written with the dust of single precision
        needle = round(float(row["needle"]) * 80 / 100)
        for probe, metric, number in (("clean", "nats", row["clean"]), ("junk", "nats", row["junk"]), ("needle", "digit_accuracy", needle)):  # fmt: skip
            exact[probe, metric, length][key] = Fraction(number)
            average = exact[probe, f"{metric}_weighted", 0]
            average[key] = average.get(key, 0) + length * Fraction(number)
    denominators = {measure: math.lcm(*(x.denominator for x in numbers.values())) for measure, numbers in exact.items()}
    return {m: {key: int(x * denominators[m]) for key, x in numbers.items()} for m, numbers in exact.items()}


def exact_p(differences):
    """Return the share of sign flips whose absolute sum is at least the observed one, counted in integers."""
    step = math.gcd(*differences) or 1
    sizes = [abs(d) // step for d in differences]
    counts = np.zeros(sum(sizes) + 1, dtype=np.int64)
    counts[0] = 1
    for size in sizes:
        counts[size:] += counts[: len(counts) - size].copy()
    sums = np.abs(2 * np.arange(len(counts)) - sum(sizes))
    return int(counts[sums >= abs(sum(differences)) // step].sum()) / (1 << len(differences))


class TestSeeds:
    @pytest.mark.parametrize("seeds", [2, 3, 5])
    def test_crossed_balanced_equals_the_textbook(self, seeds):
        """Cornfield and Tukey's mean squares and Satterthwaite's t by hand, the generalized p from a million draws."""
        draw = np.random.default_rng(seeds)
        d = draw.normal(0.4, 1, (6, seeds)) + draw.normal(0, 1, (6, 1)) + draw.normal(0, 1.5, (1, seeds))
        rows, columns, mean = d.mean(axis=1), d.mean(axis=0), d.mean()
        a, b = seeds * rows.var(ddof=1), 6 * columns.var(ddof=1)
        rest = 5 * (seeds - 1)
        e = ((d - rows[:, None] - columns + mean) ** 2).sum() / rest
        assert b > e
        variance = (a + b - e) / (6 * seeds)
        df = (a + b - e) ** 2 / (a**2 / 5 + b**2 / (seeds - 1) + e**2 / rest)
        ones, seed_part = 5 * a / draw.chisquare(5, 10**6), (seeds - 1) * b / draw.chisquare(seeds - 1, 10**6)
        spread = np.sqrt((ones + np.maximum(0, seed_part - e)) / (6 * seeds))

        def p(distance: float) -> float:
            satterthwaite, generalized = (
                2 * stats.t.sf(distance / math.sqrt(variance), df),
                2 * stats.norm.sf(distance / spread),
            )
            return satterthwaite + (generalized.mean() - satterthwaite) / (2 * seeds - 3)

        (result,) = rs.paired_difference_tests([d])
        assert (result.method, result.n, result.seeds) == ("crossed", 6, seeds)
        assert result.mean == pytest.approx(mean)
        assert result.p == pytest.approx(p(abs(mean)), abs=0.002)
        half = (result.high - result.low) / 2
        assert (result.low + result.high) / 2 == pytest.approx(mean)
        assert p(half) == pytest.approx(0.05, abs=0.002)

    def test_crossed_two_seeds_keep_their_coverage(self):
        """With Satterthwaite alone, 12% of such intervals miss the truth, since two seeds often agree by chance."""
        draw = np.random.default_rng(3)
        samples = [draw.normal(size=(8, 2)) + draw.normal(size=(1, 2)) for _ in range(400)]
        assert np.mean([result.p < 0.05 for result in rs.paired_difference_tests(samples)]) < 0.06

    def test_crossed_interval_is_finite_if_variances_cancel(self):
        """Seeds differ as expected by chance, configurations hardly: Satterthwaite's df would be 0.002."""
        e = np.random.default_rng(0).normal(size=(5, 3))
        e = e - e.mean(axis=1, keepdims=True) - e.mean(axis=0) + e.mean()
        b = np.array([-1.0, 0, 1]) * math.sqrt(1.001 * (e**2).sum() / 8 / 5)
        (result,) = rs.paired_difference_tests([e + b + 0.001 * np.arange(5)[:, None]])
        assert result.method == "crossed"
        assert 0 < result.high - result.low < 10

    def test_crossed_missing_runs_keep_the_coverage(self):
        """Over many draws from known variances, the interval has its nominal coverage."""
        draw = np.random.default_rng(4)
        holes = np.ones((7, 4))
        holes[0, 1:3] = holes[3, 0] = holes[5, 3] = holes[6, 1] = math.nan
        means, halves = [], []
        for _ in range(600):
            d = draw.normal(size=(7, 4)) + draw.normal(size=(7, 1)) + 2 * draw.normal(size=(1, 4))
            (result,) = rs.paired_difference_tests([d * holes])
            means.append(result.mean)
            halves.append(abs(result.mean) <= (result.high - result.low) / 2)
        assert np.mean(halves) == pytest.approx(0.95, abs=0.03)

    def test_crossed_needs_several_runs(self):
        d = np.random.default_rng(1).normal(1, 1, 8)
        table = np.full((8, 8), math.nan)
        np.fill_diagonal(table, d)
        assert rs.paired_difference_tests([table])[0] == rs.paired_difference_tests([d])[0]

    def test_method_of_a_single_configuration_is_seeds(self):
        d = np.array([[1.0, 2.0, 4.0, 3.0]])
        (result,) = rs.paired_difference_tests([d])
        assert (result.method, result.n, result.seeds) == ("seeds", 1, 4)
        assert result.p == pytest.approx(stats.ttest_1samp(d[0], 0).pvalue)

    def test_unconnected_seeds_are_averaged(self):
        table = np.full((6, 4), math.nan)
        table[:3, :2], table[3:, 2:] = np.arange(6).reshape(3, 2) + 1.0, np.arange(6).reshape(3, 2) + 3.0
        (result,) = rs.paired_difference_tests([table])
        assert (result.method, result.n, result.seeds) == ("sign-flip", 6, 2)
        assert result.mean == pytest.approx(np.nanmean(table))

    def test_crossed_five_seeds_keep_their_coverage(self):
        """Effects differ by two sd between configurations; seeds as pairs would have a coverage of 65%."""
        draw = np.random.default_rng(11)
        samples = [draw.normal(size=(8, 5)) + 2 * draw.normal(size=(8, 1)) for _ in range(600)]
        held = [result.low <= 0 <= result.high for result in rs.paired_difference_tests(samples)]
        assert 0.93 <= np.mean(held) <= 0.97


@pytest.mark.parametrize("n", [rs.MAX_EXACT_N + 1, 200, 333])
def test_random_sign_blocks_are_balanced(n):
    signs = np.concatenate(list(sign_flip_test.random_sign_blocks(n)))
    assert signs.shape == (rs.RANDOM_FLIPS, n)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert np.abs(signs.mean(axis=0)).max() < 5 / math.sqrt(rs.RANDOM_FLIPS)


def test_samples_together_equal_each_alone():
    draw = np.random.default_rng(5)
    samples = [draw.normal(0.1, 1, n) for n in (3, 40, 1, 0, 40, 250, 8, 8, 16, 250)]
    samples += [draw.normal(0.1, 1, (4, 3)), draw.normal(0.1, 1, (4, 2))]
    for result, d in zip(rs.paired_difference_tests(samples), samples, strict=True):
        (alone,) = rs.paired_difference_tests([d])
        # a product of matrices adds up in an order that depends on their shape
        assert result.method == alone.method
        values, expected = (
            [x for x in asdict(test_result).values() if x != test_result.method] for test_result in (result, alone)
        )
        assert values == pytest.approx(expected, nan_ok=True, rel=1e-9)
        assert (result.n, result.up + result.down) == (len(d), len(d))
        assert result.mean == pytest.approx(d.mean() if len(d) else math.nan, nan_ok=True)
    assert rs.paired_difference_tests([]) == []


def test_memory_is_bounded_with_random_flips():
    """20,000 flips of 2,000 differences are 320 MB, which are never in memory at once."""
    d = np.random.default_rng(0).normal(size=2000)
    tracemalloc.start()
    rs.paired_difference_tests([d, -d])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
