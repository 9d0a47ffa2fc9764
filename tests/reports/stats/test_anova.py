"""The analysis of variance against statsmodels, against every permutation, and on designs that carry none."""

import itertools
import math
import warnings

import numpy as np
import pandas as pd
import patsy
import pytest
import statsmodels.formula.api as smf
from atma_sweep.reports.number_format import Column
from atma_sweep.reports.render import render
from atma_sweep.reports.stats.anova import anova_results
from atma_sweep.reports.stats.effects import effects as ef
from atma_sweep.reports.stats.significance import permutation_anova
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.records import Measurement
from scipy import stats
from statsmodels.stats.anova import anova_lm

NEEDLE_64K = Column("Ndl@64K", "needle", "digit_accuracy", 1, percent=True, length=65536)
VAL = Column("Val", "val", "val_loss", 3)
FIVE = ("attn_type", "reg_mode", "distractor", "memory", "window")


def by_statsmodels(frame: pd.DataFrame, terms: list[tuple[str, ...]]) -> pd.DataFrame:
    formula = " + ".join(":".join(f"C({name}, Sum)" for name in term) for term in terms)
    table = anova_lm(smf.ols(f"value ~ {formula}", data=frame).fit(), typ=3)
    table.index = ["intercept", *(" x ".join(term) for term in terms), "residual"]
    return table


def sum_contrasts(levels: pd.Series) -> np.ndarray:
    """Return sum contrasts, [N, levels - 1]."""
    return np.asarray(patsy.dmatrix("C(levels, Sum)", {"levels": levels}))[:, 1:]


def crossed_columns(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a[:, :, None] * b[:, None, :]).reshape(len(a), -1)


def anova_frame(data, column):
    """Return the frame of one measure, and its remarks as printed by the table."""
    (result,) = anova_results(data, [column])
    return result.frame, [f"{column.heading}: {remark}" for remark in result.remarks]


class TestPublished:
    @pytest.mark.thorough
    @pytest.mark.parametrize("column", [VAL, NEEDLE_64K])
    def test_complete_design_equals_statsmodels(self, published, column):
        data = load_sweep_data(published, "printed-v2")
        table, _ = anova_frame(data, column)
        terms = [term for order in (1, 2, 3) for term in itertools.combinations(FIVE, order)]
        expected = by_statsmodels(ef.values_frame(data, column), terms)
        rows = table.set_index("term")
        assert rows.index.tolist() == expected.index.tolist()[1:]
        assert rows.loc["residual", "df"] == 38
        for name in rows.index:
            assert rows.loc[name, "sum_sq"] == pytest.approx(expected.loc[name, "sum_sq"], rel=1e-6, abs=1e-12)
            assert rows.loc[name, "df"] == expected.loc[name, "df"]
            expected_row = expected.loc[name, ["F", "PR(>F)"]].tolist()
            assert rows.loc[name, ["F", "p"]].tolist() == pytest.approx(expected_row, rel=1e-5, abs=1e-12, nan_ok=True)

    @pytest.mark.thorough
    def test_incomplete_design_equals_statsmodels(self, published):
        data = load_sweep_data(published, "printed-v1")
        table, remarks = anova_frame(data, VAL)
        assert remarks[0] == "Val: attn_type x reg_mode is excluded, since some of its combinations have no measurement"
        assert "attn_type x reg_mode x window are excluded" in remarks[1]
        terms = [
            term
            for order in (1, 2, 3)
            for term in itertools.combinations(FIVE, order)
            if not {"attn_type", "reg_mode"} <= set(term)
        ]
        expected = by_statsmodels(ef.values_frame(data, VAL), terms)["sum_sq"]
        sums_of_squares = table.set_index("term")["sum_sq"]
        assert sums_of_squares.index.tolist() == expected.index.tolist()[1:]
        assert sums_of_squares.tolist() == pytest.approx(expected.tolist()[1:], rel=1e-6, abs=1e-12)

    @pytest.mark.thorough
    def test_effect_sizes_by_hand(self, published):
        data = load_sweep_data(published, "printed-v2")
        rows = anova_frame(data, NEEDLE_64K)[0].set_index("term")
        values = ef.values_frame(data, NEEDLE_64K)["value"]
        total, residual = ((values - values.mean()) ** 2).sum(), rows.loc["residual", "sum_sq"]
        assert rows["sum_sq"].sum() == pytest.approx(total)
        for name, df in (("memory", 1), ("attn_type x memory x window", 2)):
            square, error = rows.loc[name, "sum_sq"], residual / 38
            assert rows.loc[name, "omega_sq"] == pytest.approx((square - df * error) / (total + error))
            assert rows.loc[name, "partial_eta_sq"] == pytest.approx(square / (square + residual))

    @pytest.mark.thorough
    def test_needle_remarks_name_violated_assumptions(self, published):
        data = load_sweep_data(published, "printed-v2")
        (remark,) = anova_frame(data, NEEDLE_64K)[1]
        assert "not normal (Shapiro p" in remark
        assert "spread of the residuals differs by attn_type and memory (Levene p" in remark
        # rope without and with memory, and others that are at 0 whatever the regularizer
        frame = ef.values_frame(data, NEEDLE_64K).groupby(["attn_type", "distractor", "memory", "window"])["value"]
        flat = int((frame.nunique() == 1).sum())
        assert flat == 8
        assert f"{flat} of 24 groups that differ in reg_mode alone have no variance at all" in remark

    @pytest.mark.thorough
    def test_what_two_axes_at_a_time_leave_over(self, published):
        """Reference numbers from other code: the residual of the model without three-way terms, and two such terms."""
        frame = ef.values_frame(load_sweep_data(published, "printed-v2"), NEEDLE_64K)
        y = frame[["value"]].to_numpy()
        main = {name: sum_contrasts(frame[name]) for name in FIVE}
        terms = {(name,): columns_of_term for name, columns_of_term in main.items()}
        for a, b in itertools.combinations(FIVE, 2):
            terms[a, b] = crossed_columns(main[a], main[b])
        fit = permutation_anova.fit_anova(terms, y)
        residuals, strata = fit.residuals[:, 0], frame.reset_index().groupby(["attn_type", "memory"]).indices
        assert fit.residual_df == 81
        assert stats.shapiro(residuals).pvalue == pytest.approx(3.2e-6, rel=0.1, abs=0)
        raw = [y[rows, 0] for rows in strata.values()]
        assert stats.levene(*raw).pvalue == pytest.approx(5e-20, rel=0.1, abs=0)
        spread = {key: 100 * float(residuals[rows].std(ddof=1)) for key, rows in strata.items()}
        assert (spread["polar", "on"], spread["rope", "on"]) == pytest.approx((17.0, 4.0), abs=0.05)
        for third in ("distractor", "window"):
            terms["attn_type", "memory", third] = crossed_columns(terms["attn_type", "memory"], main[third])
        more = permutation_anova.fit_anova(terms, y)
        f = (fit.residual[0] - more.residual[0]) / 4 / (more.residual[0] / 77)
        assert (f, stats.f.sf(f, 4, 77)) == pytest.approx((2.67, 0.038), abs=0.005)

    @pytest.mark.thorough
    def test_measures_together_equal_each_alone(self, published):
        data = load_sweep_data(published, "printed-v2")
        both = anova_results(data, [VAL, NEEDLE_64K])
        for fitted_result, column in zip(both, (VAL, NEEDLE_64K), strict=True):
            alone = anova_frame(data, column)[0]
            pd.testing.assert_frame_equal(fitted_result.frame, alone, rtol=1e-9)


class TestModel:
    @pytest.mark.thorough
    def test_permutation_p_equals_freedman_and_lane(self):
        """Freedman and Lane step by step: fit without the term, permute the residuals, add them back, fit again."""
        draw = np.random.default_rng(1)
        a = np.array([1.0, 1, 1, -1, -1, -1, -1])
        b = np.array([1.0, -1, 1, -1, 1, -1, -1])
        y = 0.9 * a + 0.5 * b + draw.exponential(1, 7)
        ones = np.ones(7)

        def f(values: np.ndarray) -> float:
            full, less = (np.stack(columns, axis=1) for columns in ((ones, a, b), (ones, b)))
            errors = [((values - x @ np.linalg.lstsq(x, values, rcond=None)[0]) ** 2).sum() for x in (full, less)]
            return float((errors[1] - errors[0]) / errors[0])

        less = np.stack((ones, b), axis=1)
        fitted = less @ np.linalg.lstsq(less, y, rcond=None)[0]
        residuals = y - fitted
        shares = [f(fitted + residuals[list(order)]) >= f(y) - 1e-9 for order in itertools.permutations(range(7))]
        fit = permutation_anova.fit_anova({("a",): a[:, None], ("b",): b[:, None]}, y[:, None])
        assert fit.p_permuted[0, 0] == pytest.approx(np.mean(shares), abs=0.03)
        assert fit.permutations == permutation_anova.MAX_PERMUTATIONS

    def test_box_p_by_definition(self):
        """F over HC2's expectation, with Box's degrees of freedom from the matrices themselves.

        With one degree of freedom the statistic is the square of statsmodels' t with HC2.
        """
        draw = np.random.default_rng(3)
        frame = pd.DataFrame(list(itertools.product("abc", "xy", range(5))), columns=["u", "v", "rep"]).iloc[:-2]
        frame["value"] = draw.normal(0, 1, 28) * np.where(frame["u"] == "a", 4, 0.5) + (frame["u"] == "b")
        u = np.array([[1.0, 0], [0, 1], [-1, -1]])[pd.factorize(frame["u"])[0]]
        v = np.array([[1.0], [-1]])[pd.factorize(frame["v"])[0]]
        fit = permutation_anova.fit_anova({("u",): u, ("v",): v}, frame[["value"]].to_numpy())
        ones, y = np.ones((28, 1)), frame["value"].to_numpy()

        def hat(*parts: np.ndarray) -> np.ndarray:
            x = np.concatenate(parts, axis=1)
            return x @ np.linalg.inv(x.T @ x) @ x.T

        residual = np.eye(28) - hat(ones, u, v)
        variances = np.diag((residual @ y) ** 2 / np.diag(residual))

        def freedom(p: np.ndarray) -> float:
            # of a normal error, the fourth power is three times the square of its variance
            twice = np.trace(p @ variances @ p @ variances) - 2 / 3 * np.trace(np.diag(np.diag(p) ** 2) @ variances**2)
            return float(np.trace(p @ variances) ** 2 / twice)

        fitted = smf.ols("value ~ C(u, Sum) + C(v, Sum)", data=frame).fit(cov_type="HC2", use_t=True)
        for index, less in enumerate((hat(ones, v), hat(ones, u))):
            term = hat(ones, u, v) - less
            f = y @ term @ y / np.trace(term @ variances)
            if index == 1:
                assert f == pytest.approx(fitted.tvalues.iloc[-1] ** 2)
            above = min(max(freedom(term), 1), 2 - index)
            assert fit.p_robust[index, 0] == pytest.approx(stats.f.sf(f, above, min(freedom(residual), 24)))

    @pytest.mark.thorough
    def test_box_p_keeps_its_level_with_unequal_variances(self, published, monkeypatch):
        """Design of the published sweep, two-way and three-way terms, with variances as unequal as its needle's."""
        frame = ef.values_frame(load_sweep_data(published, "printed-v2"), VAL)
        names = ("attn_type", "distractor", "memory", "window")
        terms = {(name,): sum_contrasts(frame[name]) for name in names}
        for term_names in itertools.chain(itertools.combinations(names, 2), itertools.combinations(names, 3)):
            terms[term_names] = crossed_columns(terms[term_names[:-1]], terms[term_names[-1:]])
        unlike = {("polar", "on"): 17.0, ("polar", "off"): 4, ("nope", "on"): 7, ("nope", "off"): 2}
        sd = [unlike.get(key, 0.1) for key in zip(frame["attn_type"], frame["memory"], strict=True)]
        noise = np.random.default_rng(0).normal(size=(120, 400))
        monkeypatch.setattr(permutation_anova, "permutations_for", lambda *_: 1)
        for spread, most in ((np.array(sd)[:, None], 0.085), (1.0, 0.06)):
            fit = permutation_anova.fit_anova(terms, noise * spread)
            wrong = (fit.p_robust < 0.05).mean(axis=1)
            assert wrong.mean() == pytest.approx(0.05, abs=0.015)
            assert wrong.max() < most + 2.5 * math.sqrt(0.05 * 0.95 / 400)

    def test_permutation_p_keeps_its_level(self):
        """300 measures without any effect, with exponential noise."""
        draw = np.random.default_rng(9)
        x = np.tile([1.0, -1.0], 12)
        fit = permutation_anova.fit_anova({("x",): x[:, None]}, draw.exponential(1, (24, 300)))
        assert (fit.p_permuted < 0.05).mean() == pytest.approx(0.05, abs=0.035)

    def test_observed_order_counts_as_a_permutation(self):
        """Two of the 24! / (12!)^2 splits reach a huge effect, and 2,000 draws contain neither: p = 1 / 2,001."""
        x = np.tile([1.0, -1.0], 12)
        y = 100 * x + np.random.default_rng(4).normal(size=24)
        fit = permutation_anova.fit_anova({("x",): x[:, None]}, y[:, None])
        assert fit.p_permuted.item() == 1 / (permutation_anova.MAX_PERMUTATIONS + 1)

    def test_permutations_for_large_designs(self):
        assert permutation_anova.permutations_for(120, 82, 200) == permutation_anova.MAX_PERMUTATIONS
        assert permutation_anova.permutations_for(4_000, 300, 500) == permutation_anova.MIN_PERMUTATIONS


@pytest.fixture
def sweep(empty, make, run):
    """Store a sweep of (levels, seed, value) cells and return its data and store; None is a diverged run."""

    def make_sweep(rows, measure=("val", "val_loss", 0)):
        cell, _ = make
        cells = [cell(index, seed=seed, **levels) for index, (levels, seed, _) in enumerate(rows)]
        empty.record_revision("own", grid_text="x", grid_file="x", cells=cells)
        probe, metric, length = measure
        for record, (*_, value) in zip(cells, rows, strict=True):
            measurements = (
                [] if value is None else [Measurement(probe=probe, metric=metric, length=length, value=value, n=80)]
            )
            run(empty, record.id, "diverged" if value is None else "done", measurements)
        return empty

    return make_sweep


class TestOwn:
    @pytest.mark.thorough
    def test_residual_is_split_with_several_seeds(self, sweep):
        draw = np.random.default_rng(2)
        rows = [
            (
                {"memory": m, "window": w, "attn_type": t},
                seed,
                float(draw.normal(m == "on", 0.3) + (t == "rope") * (w == "on")),
            )
            for m, w, t, seed in itertools.product(("off", "on"), ("off", "on"), ("polar", "nope", "rope"), range(2))
        ]
        data = load_sweep_data(sweep(rows[:-1]))
        table_rows = anova_frame(data, VAL)[0].set_index("term")
        frame = ef.values_frame(data, VAL)
        groups = frame.groupby(["memory", "window", "attn_type"])["value"]
        assert table_rows.loc["residual", "df"] == 11
        # the model with all three axes together is saturated: what is left over is between seeds alone
        assert table_rows.loc["residual", "sum_sq"] == pytest.approx(
            ((frame["value"] - groups.transform("mean")) ** 2).sum()
        )
        assert "lack of fit" not in table_rows.index
        # without one configuration the three-way term cannot be, and is the lack of fit
        data = load_sweep_data(
            sweep([row for row in rows if row[0] != {"memory": "on", "window": "on", "attn_type": "rope"}])
        )
        table_rows = anova_frame(data, VAL)[0].set_index("term")
        frame = ef.values_frame(data, VAL)
        groups = frame.groupby(["memory", "window", "attn_type"])["value"]
        pure = ((frame["value"] - groups.transform("mean")) ** 2).sum()
        lack = table_rows.loc["residual", "sum_sq"] - pure
        assert table_rows.loc["pure error", ["df", "sum_sq"]].tolist() == pytest.approx([11, pure])
        df = table_rows.loc["residual", "df"] - 11
        assert table_rows.loc["lack of fit", ["df", "sum_sq"]].tolist() == pytest.approx([df, lack])
        f = (lack / df) / (pure / 11)
        assert table_rows.loc["lack of fit", ["F", "p"]].tolist() == pytest.approx([f, stats.f.sf(f, df, 11)])

    def test_axis_names_with_special_characters(self, empty, make, run):
        cell, _ = make
        axis = "__import__('os').getcwd() + C("
        cells = [cell(i, axes={axis: str(i % 2)}, seed=i // 2) for i in range(6)]
        empty.record_revision("names", grid_text="x", grid_file="x", cells=cells)
        for index, record in enumerate(cells):
            value = 1.0 + index % 2 + index / 100
            run(empty, record.id, "done", [Measurement(probe="val", metric="val_loss", value=value)])
        table, _ = anova_frame(load_sweep_data(empty), VAL)
        assert table["term"].tolist() == [axis, "residual"]
        assert table.loc[0, "sum_sq"] == pytest.approx(6 * 0.505**2)


class TestNothing:
    """Each reason is given in the result, and stderr stays empty."""

    def printed(self, store) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return " ".join(render(make_table("anova", store), "terminal").split())

    @pytest.mark.parametrize(
        ("rows", "table", "remark"),
        [
            ([({}, 0, 1.0)], "Nothing to analyse", "no axis varies among the cells that have Val"),
            ([({"memory": m}, 0, value) for m, value in (("on", 1.0), ("off", 2.0))], "too few cells have Val (2)", "too few cells"),
            ([({"memory": m}, seed, 1.5) for m in ("off", "on") for seed in range(3)], "Val is the same in all 6 cells", "the same"),
        ],
        ids=["a single cell", "two cells", "a constant measure"],
    )  # fmt: skip
    def test_reasons_for_no_analysis(self, sweep, rows, table, remark):
        store = sweep(rows)
        assert table in self.printed(store)
        assert remark in anova_frame(load_sweep_data(store), VAL)[1][0]

    def test_exact_fit_has_no_residual(self, sweep):
        store = sweep([({"memory": m}, seed, 1.0 + (m == "on")) for m in ("off", "on") for seed in range(3)])
        assert "the residual is zero: the terms give every value exactly" in self.printed(store)
        row = anova_frame(load_sweep_data(store), VAL)[0].iloc[0]
        assert all(math.isnan(row[name]) for name in ("F", "p", "p_permuted", "p_robust", "omega_sq"))

    @pytest.mark.thorough
    def test_no_analysis_if_all_diverged(self, sweep):
        store = sweep([({"memory": m}, seed, None) for m in ("off", "on") for seed in range(3)])
        assert "nothing to analyse" in self.printed(store).lower()

    def test_missing_seeds(self, sweep):
        rows = [({"memory": m, "window": w}, seed, 1.0 + seed / 7 + (m == "on")) for m in ("off", "on") for w in ("off", "on") for seed in range(3)]  # fmt: skip
        rows = [
            (levels, seed, None if index in (1, 5, 6) else value) for index, (levels, seed, value) in enumerate(rows)
        ]
        assert "memory x window" in self.printed(sweep(rows))

    def test_group_without_variance_and_few_rows(self, sweep):
        rows = [({"memory": m, "window": w}, seed, 2.0 if m == "off" else 1.0 + seed) for m in ("off", "on") for w in ("off", "on") for seed in range(2)]  # fmt: skip
        assert "residual degrees of freedom, so the F tests have little power" in self.printed(sweep(rows))
