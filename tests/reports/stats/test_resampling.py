"""Tests and intervals of matched differences: by hand, against scipy, by enumeration, and many at once against one by one."""

import itertools
import math
import tracemalloc
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
from atma_sweep.reports.data import gather
from atma_sweep.reports.stats import effects as ef
from atma_sweep.reports.stats import flips
from atma_sweep.reports.stats import resampling as rs
from atma_sweep.results.paper import rows as printed_rows
from atma_sweep.results.store.records import AXES
from scipy import stats


def every_sign(n: int) -> np.ndarray:
    return np.array(list(itertools.product((-1, 1), repeat=n)))


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


class TestInterval:
    @pytest.mark.parametrize("n", [6, 7, 10, flips.LISTED])
    def test_it_is_what_the_test_does_not_reject(self, n):
        """Every flip of the differences less theta, on both sides of both ends."""
        d = np.random.default_rng(n).gamma(2.0, 1.0, n)
        (found,) = rs.summaries([d])
        signs, gap = every_sign(n), 1e-6 * np.ptp(d)

        def p(theta: float) -> float:
            return float((np.abs(signs @ (d - theta)) >= abs((d - theta).sum()) - 1e-12).mean())

        assert p(found.low + gap) >= 0.05 > p(found.low - gap)
        assert p(found.high - gap) >= 0.05 > p(found.high + gap)
        assert found.p == pytest.approx(p(0))
        assert (found.method, found.n, found.seeds) == ("sign-flip", n, 1)

    @pytest.mark.parametrize("n", [flips.LISTED + 1, 21, flips.EXACT])
    def test_two_halves_find_the_same_ends(self, n):
        """`sign_flip` counts flips without looking for an end; it was compared with every pattern."""
        d = np.random.default_rng(n).normal(0.5, 1, n)
        d[:3] = 0.25  # ties
        (found,) = rs.summaries([d])
        gap = 3e-6 * np.ptp(d)
        for end, side in ((found.low, 1), (found.high, -1)):
            assert rs.sign_flip(d - end - side * gap) >= 0.05 > rs.sign_flip(d - end + side * gap)

    @pytest.mark.parametrize("n", [flips.EXACT + 1, 250])
    def test_draws_find_the_same_ends(self, n):
        d = np.random.default_rng(n).normal(0.5, 1, n)
        (found,) = rs.summaries([d])
        for end, side in ((found.low, 1), (found.high, -1)):
            assert rs.sign_flip(d - end - side * 1e-9) >= 0.05 > rs.sign_flip(d - end + side * 1e-9)
        t = stats.t.interval(0.95, n - 1, d.mean(), stats.sem(d))
        assert (found.low, found.high) == pytest.approx(t, abs=0.2 * stats.sem(d))

    def test_six_differences_by_hand(self):
        # of 64 flips 2 are beyond all others: p = 2/64, and what leaves all on one side is rejected
        (found,) = rs.summaries([[1.0, 2.0, 3.0, 4.0, 5.0, 9.0]])
        assert (found.low, found.high, found.p) == (1.0, 9.0, 2 / 64)

    def test_zero_is_left_out_where_p_is_below_five_percent(self):
        draw = np.random.default_rng(8)
        samples = [draw.normal(shift, 1, n) for n in (2, 5, 6, 9, 14, 17, 22, 31) for shift in np.linspace(0, 1.5, 8)]
        samples += [np.round(one, 0) for one in samples]
        samples += [draw.normal(shift, 1, (6, 3)) for shift in np.linspace(0, 1.5, 8)]
        found = [one for one in rs.summaries(samples) if one.method != "none"]
        assert [one.p < 0.05 for one in found] == [one.low > 0 or one.high < 0 for one in found]
        assert 30 < sum(one.p < 0.05 for one in found) < len(found) - 30

    def test_below_six_it_is_students(self):
        d = [1.0, 2.0, 4.0, 3.5, 0.5]
        (found,) = rs.summaries([d])
        assert found.method == "t"
        assert found.p == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
        assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 4, np.mean(d), stats.sem(d)))


class TestDegenerate:
    def test_one_difference_or_none_has_no_test(self):
        for found in rs.summaries([[], [1.0], [math.nan, 1.0], [2.0, 2.0, 2.0], [0.0, 0.0]]):
            assert found.method == "none"
            assert all(math.isnan(x) for x in (found.low, found.high, found.p))

    def test_a_constant_measure(self):
        (found,) = rs.summaries([np.zeros(8)])
        assert (found.low, found.high, found.p, found.ties, found.p_sign) == (0.0, 0.0, 1.0, 8, 1.0)
        (found,) = rs.summaries([np.full(20, 0.1)])
        assert (found.low, found.high) == pytest.approx((0.1, 0.1))
        assert found.p == 2 / 2**20

    def test_a_constant_difference_over_seeds(self):
        (found,) = rs.summaries([np.full((6, 3), 0.5)])
        assert found.method == "none"


class TestTies:
    def test_dust_is_no_sign(self):
        dust = 0.1 + 0.2 - 0.3
        (found,) = rs.summaries([[dust, -dust, 0.5, 0.25, 1.0, 2.0]])
        assert (found.up, found.down, found.ties) == (4, 0, 2)
        # where all of them are dust, only the numbers behind them tell
        (found,) = rs.summaries([[dust] * 7], [0.3])
        assert (found.up, found.ties, found.p) == (0, 7, 1.0)

    def test_the_published_validation_losses_against_exact_fractions(self, published):
        data = gather(published, "printed-v2")
        found = self.compared(data, "v2", ["val_loss"])
        # of 1e-16, five of which stood on the wrong side
        assert found["Val", ("attn_type", "window"), ("nope", "on")] == [5, 14, 1]

    @pytest.mark.thorough
    @pytest.mark.parametrize("version", ["v1", "v2"])
    def test_every_published_row_against_exact_fractions(self, published, version):
        metrics = ["val_loss", "mfu_paper", "nats", "digit_accuracy"]
        assert len(self.compared(gather(published, f"printed-{version}"), version, metrics)) > 400

    def compared(self, data, version, metrics):
        """Ups, downs and ties of all effects and interactions, those of the text of the CSV by the row they stand in."""
        exact = {}
        for row in printed_rows(f"complete-{version}"):
            key = tuple(row[axis] for axis in AXES)
            exact[key] = {
                ("val", "val_loss", 0): Fraction(row["val_loss"]),
                ("throughput", "mfu_paper", 0): Fraction(row["mfu"]) / 100,
            }
        for row in printed_rows("lengths"):
            if (numbers := exact.get(tuple(row[axis] for axis in AXES))) is not None:
                length = int(row["length"])
                numbers["clean", "nats", length] = Fraction(row["clean"])
                numbers["junk", "nats", length] = Fraction(row["junk"])
                numbers["needle", "digit_accuracy", length] = Fraction(round(float(row["needle"]) * 80 / 100), 80)
        columns = [c for c in ef.measures(data) if (c.probe, c.metric, c.length) in next(iter(exact.values()))]
        columns = [c for c in columns if c.metric in metrics]
        checked = {}
        for one in ef.interactions(data, columns):
            measure, (a, b) = (one.measure.probe, one.measure.metric, one.measure.length), map(AXES.index, one.axes)
            found = []
            for key in exact:
                others = [(*key[:a], x, *key[a + 1 :]) for x in (one.levels[0], one.references[0])]
                corners = [(*k[:b], y, *k[b + 1 :]) for k in others for y in (one.levels[1], one.references[1])]
                if key == corners[0] and all(corner in exact for corner in corners):
                    here = [exact[corner][measure] for corner in corners]
                    found.append((here[0] - here[2]) - (here[1] - here[3]))
            signs = [sum(d > 0 for d in found), sum(d < 0 for d in found), sum(d == 0 for d in found)]
            row = (one.measure.heading, one.axes, one.levels)
            assert [one.up, one.down, one.ties] == signs, row
            checked[row] = signs
        for one in ef.effects(data, columns):
            measure, a = (one.measure.probe, one.measure.metric, one.measure.length), AXES.index(one.axis)
            mixer = one.where.removeprefix("attn_type=")
            found = [
                numbers[measure] - exact[other][measure]
                for key, numbers in exact.items()
                if key[a] == one.level and (not mixer or key[0] == mixer)
                if (other := (*key[:a], one.reference, *key[a + 1 :])) in exact
            ]
            signs = [sum(d > 0 for d in found), sum(d < 0 for d in found), sum(d == 0 for d in found)]
            row = (one.measure.heading, one.axis, one.level, one.where)
            assert [one.up, one.down, one.ties] == signs, row
            checked[row] = signs
        return checked


class TestSeeds:
    def test_balanced_against_the_textbook(self):
        """Cornfield and Tukey's mean squares, by hand."""
        draw = np.random.default_rng(2)
        d = draw.normal(0.4, 1, (6, 3)) + draw.normal(0, 2, (6, 1)) + draw.normal(0, 1.5, (1, 3))
        rows, columns, mean = d.mean(axis=1), d.mean(axis=0), d.mean()
        a, b = 3 * rows.var(ddof=1), 6 * columns.var(ddof=1)
        e = ((d - rows[:, None] - columns + mean) ** 2).sum() / 10
        assert b > e
        variance = (a + b - e) / 18
        df = (a + b - e) ** 2 / (a**2 / 5 + b**2 / 2 + e**2 / 10)
        (found,) = rs.summaries([d])
        assert (found.method, found.n, found.seeds) == ("crossed", 6, 3)
        assert found.mean == pytest.approx(mean)
        half = stats.t.ppf(0.975, df) * math.sqrt(variance)
        assert (found.low, found.high) == pytest.approx((mean - half, mean + half))
        assert found.p == pytest.approx(2 * stats.t.sf(abs(mean) / math.sqrt(variance), df))

    def test_missing_runs_against_expected_squares(self):
        """Over many draws from known variances, the variance of the mean is what is estimated on average, but for what is
        cut at zero."""
        draw = np.random.default_rng(4)
        holes = np.ones((7, 4))
        holes[0, 1:3] = holes[3, 0] = holes[5, 3] = holes[6, 1] = math.nan
        means, halves = [], []
        for _ in range(600):
            d = draw.normal(size=(7, 4)) + draw.normal(size=(7, 1)) + 2 * draw.normal(size=(1, 4))
            (found,) = rs.summaries([d * holes])
            means.append(found.mean)
            halves.append(abs(found.mean) <= (found.high - found.low) / 2)
        assert np.mean(halves) == pytest.approx(0.95, abs=0.03)

    def test_one_run_each_is_no_crossing(self):
        d = np.random.default_rng(1).normal(1, 1, 8)
        table = np.full((8, 8), math.nan)
        np.fill_diagonal(table, d)
        assert rs.summaries([table])[0] == rs.summaries([d])[0]

    def test_a_single_configuration_speaks_of_its_seeds(self):
        d = np.array([[1.0, 2.0, 4.0, 3.0]])
        (found,) = rs.summaries([d])
        assert (found.method, found.n, found.seeds) == ("seeds", 1, 4)
        assert found.p == pytest.approx(stats.ttest_1samp(d[0], 0).pvalue)

    def test_seeds_that_never_meet_are_averaged(self):
        table = np.full((6, 4), math.nan)
        table[:3, :2], table[3:, 2:] = np.arange(6).reshape(3, 2) + 1.0, np.arange(6).reshape(3, 2) + 3.0
        (found,) = rs.summaries([table])
        assert (found.method, found.n, found.seeds) == ("sign-flip", 6, 2)
        assert found.mean == pytest.approx(np.nanmean(table))

    def test_five_seeds_are_not_five_configurations(self):
        """Effects that differ by two standard deviations between configurations; seeds as pairs hold the truth in 65%."""
        draw = np.random.default_rng(11)
        samples = [draw.normal(size=(8, 5)) + 2 * draw.normal(size=(8, 1)) for _ in range(600)]
        held = [one.low <= 0 <= one.high for one in rs.summaries(samples)]
        assert 0.93 <= np.mean(held) <= 0.97


@pytest.mark.parametrize("n", [rs.EXACT + 1, 200, 333])
def test_draws_are_fair(n):
    signs = np.concatenate(list(flips.signs(n)))
    assert signs.shape == (rs.FLIPS, n)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert np.abs(signs.mean(axis=0)).max() < 5 / math.sqrt(rs.FLIPS)


def test_many_at_once_are_what_each_is_alone():
    draw = np.random.default_rng(5)
    samples = [draw.normal(0.1, 1, n) for n in (3, 40, 1, 0, 40, 250, 8, 8, 16, 250)]
    samples += [draw.normal(0.1, 1, (4, 3)), draw.normal(0.1, 1, (4, 2))]
    for one, d in zip(rs.summaries(samples), samples, strict=True):
        (alone,) = rs.summaries([d])
        # a product of matrices adds up in an order that depends on their shape
        assert one.method == alone.method
        known, expected = ([x for x in asdict(some).values() if x != some.method] for some in (one, alone))
        assert known == pytest.approx(expected, nan_ok=True, rel=1e-9)
        assert (one.n, one.up + one.down) == (len(d), len(d))
        assert one.mean == pytest.approx(d.mean() if len(d) else math.nan, nan_ok=True)
    assert rs.summaries([]) == []


def test_memory_does_not_grow_with_the_draws():
    """20,000 flips of 2,000 differences are 320 MB; never all of them exist."""
    d = np.random.default_rng(0).normal(size=2000)
    tracemalloc.start()
    rs.summaries([d, -d])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
