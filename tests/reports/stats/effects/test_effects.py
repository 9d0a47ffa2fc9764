"""Effects against hand-computed numbers, and against scipy and statsmodels by another way."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from atma_sweep.reports.number_format import Column
from atma_sweep.reports.stats.effects import effects as ef
from atma_sweep.reports.stats.significance.paired_tests import correct_family, paired_difference_tests
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.paper import rows
from atma_sweep.results.store.records import AXES, Measurement
from scipy import stats
from statsmodels.stats.oneway import anova_oneway
from sweeps import matched_pairs

MIXERS = ("polar", "nope", "rope")
NEEDLE_64K = Column("Ndl@64K", "needle", "digit_accuracy", 1, percent=True, length=65536)
VAL = Column("Val", "val", "val_loss", 3)


def matched(frame: pd.DataFrame, axis: str, level: str, reference: str) -> pd.DataFrame:
    keys = [name for name in (*AXES, "seed") if name != axis]
    sides = [frame[frame[axis] == word].set_index(keys)["value"] for word in (level, reference)]
    return (sides[0] - sides[1]).dropna().rename("difference").reset_index()


@pytest.fixture(scope="module")
def paper(published):
    return load_sweep_data(published, "printed-v2")


class TestFormulas:
    def test_pareto(self):
        points = [(1.0, 5.0), (2.0, 4.0), (2.0, 3.0), (3.0, 1.0), (1.0, 5.0), (0.5, 0.5)]
        assert ef.pareto(points) == [True, True, False, True, True, False]
        # the second coordinate now is a loss
        assert ef.pareto(points, (1, -1)) == [False, False, False, True, False, True]
        assert ef.pareto([]) == []


class TestPublished:
    def test_effect_of_memory_on_polar_at_64k(self, paper):
        (effect,) = [
            row
            for row in ef.effects(paper, [NEEDLE_64K])
            if (row.axis, row.level, row.where) == ("memory", "on", "attn_type=polar")
        ]
        assert f"{100 * effect.mean:+.1f}" == "+47.8" or effect.mean == pytest.approx(0.4775)
        assert (effect.pairs, effect.up, effect.down) == (20, 20, 0)
        assert effect.p_sign == pytest.approx(2**-19)
        assert 0 < effect.low < effect.mean < effect.high < 1
        assert len(effect.origins) == 40

    def test_effects_table_prints_memory_on_polar(self, published_effects):
        table = published_effects
        (row,) = [row for row in table.rows if row[:4] == ("Ndl@64K", "memory", "on - off", "polar")]
        shown = dict(zip(table.columns, row, strict=True))
        assert [shown[name] for name in ("Pairs", "Mean", "Up", "Down")] == ["20", "+47.8", "20", "0"]
        assert "n = 1" in " ".join(table.notes)
        assert "printed-v2" in table.title

    def test_every_effect_by_exact_fractions(self, paper):
        """Every pair of levels, over the sweep and in its strata, from the printed numbers by plain dictionaries."""
        values = {tuple(row[axis] for axis in AXES): Fraction(row["val_loss"]) for row in rows("complete-v2")}
        effect_rows = ef.effects(paper, [VAL])
        assert {(row.axis, row.level, row.reference) for row in effect_rows} == {
            ("attn_type", "nope", "polar"), ("attn_type", "rope", "polar"), ("attn_type", "rope", "nope"),
            *(("reg_mode", b, a) for a, b in itertools.combinations(("baseline", "weak", "strong", "discrete", "zipfian"), 2)),
            *((axis, "on", "off") for axis in ("distractor", "memory", "window")),
        }  # fmt: skip
        assert {row.where for row in effect_rows if row.axis == "window"} >= {"", *(f"attn_type={m}" for m in MIXERS)}
        for row in effect_rows:
            axis_index = AXES.index(row.axis)
            at = dict(part.split("=") for part in row.where.split(", ") if part)
            differences = [
                value - values[(*key[:axis_index], row.reference, *key[axis_index + 1 :])]
                for key, value in values.items()
                if key[axis_index] == row.level and all(key[AXES.index(axis)] == level for axis, level in at.items())
            ]
            assert (row.pairs, row.expected, row.missing) == (len(differences), len(differences), {})
            assert row.mean == pytest.approx(float(sum(differences) / len(differences)), abs=1e-12)
            assert (row.up, row.down) == (sum(d > 0 for d in differences), sum(d < 0 for d in differences))

    @pytest.mark.thorough
    def test_strata_weigh_equally(self, published):
        """Version 1 lacks 20 cells of rope: the mean over the sweep is that of mixer means, not of all cells."""
        memory = {
            version: next(
                row
                for row in ef.effects(load_sweep_data(published, f"printed-{version}"), [NEEDLE_64K])
                if (row.axis, row.where) == ("memory", "")
            )
            for version in ("v1", "v2")
        }
        values = {tuple(row[axis] for axis in AXES): Fraction(row["needle_64k"]) for row in rows("complete-v1")}
        means = []
        for mixer in MIXERS:
            on = {key: value for key, value in values.items() if key[0] == mixer and key[3] == "on"}
            off = {key: (*key[:3], "off", key[4]) for key in on}
            differences = [value - values[off[key]] for key, value in on.items() if off[key] in values]
            means.append(sum(differences) / len(differences))
        assert 100 * memory["v1"].mean == pytest.approx(float(sum(means) / 3), abs=0.02), "printed to 0.1"
        assert f"{100 * memory['v1'].mean:.1f}" == f"{100 * memory['v2'].mean:.1f}" == "17.4"

    @pytest.mark.thorough
    def test_effects_form_families_by_measure_and_axis(self, paper):
        rows = ef.effects(paper, [VAL, NEEDLE_64K])
        assert {row.family for row in rows if row.axis == "memory"} == {
            f"{row.measure.heading}: memory" for row in rows
        }
        assert not any(row.confirmatory for row in rows)
        assert all(row.p_corrected >= row.p - 1e-12 for row in rows)
        (nope,) = [
            row
            for row in rows
            if (row.measure.heading, row.axis, row.level, row.reference, row.where)
            == ("Ndl@64K", "attn_type", "nope", "polar", "")
        ]
        assert nope.p < 1e-4
        assert nope.is_significant, "as printed before: Holm on the sign test over all axes and measures, 0.0945"

    @pytest.mark.thorough
    def test_heterogeneity_is_brown_and_forsythe_s(self, paper):
        """The reference is statsmodels' test; some strata have no variance."""
        shown = 0
        for row in ef.effects(paper, [VAL, NEEDLE_64K]):
            frame = ef.values_frame(paper, row.measure)
            if row.where or row.axis == "attn_type":
                continue
            pairs = matched(frame, row.axis, row.level, row.reference)
            strata = [part["difference"].to_numpy() for _, part in pairs.groupby("attn_type")]
            if all(np.ptp(part) < 1e-12 for part in strata):
                continue
            with np.errstate(all="ignore"):
                expected = anova_oneway(strata, use_var="bf")
            assert row.p_heterogeneity == pytest.approx(expected.pvalue, rel=1e-6), row.axis
            assert row.i2 == pytest.approx(max(0.0, 1 - 1 / expected.statistic))
            assert row.is_heterogeneous == (expected.pvalue < 0.05)
            shown += 1
        assert shown > 20
        (memory,) = [row for row in ef.effects(paper, [NEEDLE_64K]) if (row.axis, row.where) == ("memory", "")]
        assert memory.is_heterogeneous, "polar +47.8, nope +4.6, rope 0.0"

    @pytest.mark.thorough
    def test_measures_are_all_lengths_and_their_weighted_average(self, paper, published):
        headings = [column.heading for column in ef.measures(paper)]
        assert [heading for heading in headings if heading.startswith("Ndl")] == [
            "Ndl@2K", "Ndl@4K", "Ndl@8K", "Ndl@16K", "Ndl@32K", "Ndl@64K", "Ndl avg",
        ]  # fmt: skip
        assert [column.heading for column in ef.main_measures(paper)] == [
            "Val", "Clean@2K", "Clean@64K", "Junk@2K", "Junk@64K", "Ndl@2K", "Ndl@64K", "MFU",
        ]  # fmt: skip
        (average,) = [column for column in ef.measures(paper) if column.heading == "Ndl avg"]
        assert (average.metric, average.length) == ("digit_accuracy_weighted", 0)
        cells = {tuple(cell.levels.values()): cell.cell_id for cell in paper.cells}
        for key in {tuple(row[axis] for axis in AXES) for row in rows("lengths")} & cells.keys():
            logged = [row for row in rows("lengths") if tuple(row[axis] for axis in AXES) == key]
            hits = {int(row["length"]): round(float(row["needle"]) * 80 / 100) for row in logged}
            exact = Fraction(sum(length * n for length, n in hits.items()), 80 * sum(hits))
            value = paper.value(cells[key], "needle", "digit_accuracy_weighted", 0)
            assert value.value == pytest.approx(float(exact))
        best = paper.value(cells["polar", "baseline", "off", "on", "off"], "needle", "digit_accuracy_weighted", 0)
        assert f"{100 * best.value:.2f}" == "94.15", "the paper: 94%"

    def test_pooled_noise_of_near_replicates(self, paper):
        near = {"attn_type": "polar", "memory": "on", "distractor": "off", "window": "off"}
        noise = ef.pooled_noise(paper, NEEDLE_64K, near)
        assert (noise.kind, noise.df, noise.groups) == ("near-replicates", 3, 1)
        numbers = [
            0.925,
            0.5125,
            0.7375,
            0.6375,
        ]  # docs/reference/mechanisms.md, "Decisions", unrounded, without strong
        assert noise.sd == pytest.approx(np.std(numbers, ddof=1))

    def test_distractor_effect_is_below_its_error(self, paper):
        pairs = matched_pairs(paper, NEEDLE_64K, "distractor", "on", {"attn_type": "polar", "memory": "on"})
        error = pairs["difference"].std() / math.sqrt(len(pairs))
        assert (len(pairs), f"{100 * pairs['difference'].mean():.1f}", f"{100 * error:.1f}") == (10, "-6.0", "8.3")

    @pytest.mark.thorough
    def test_pareto_front_holds_the_fastest_and_the_best(self, published):
        table = make_table("pareto", published, "printed-v2")
        assert table.columns[5:9] == ("Front", "Train s", "Val", "Ndl@64K")
        fronts = {row[6:9]: row[5] for row in table.rows}
        # the fastest of all recalls less than the constant digit: not on the front of recall
        assert fronts["51924", "3.224", "1.3"] == "Val"
        assert {front for numbers, front in fronts.items() if numbers[1:] == ("3.169", "92.5")} == {"Ndl@64K"}
        assert {front for numbers, front in fronts.items() if numbers[1:] == ("3.140", "16.3")} == {"Val"}

    def test_accuracy_intervals(self, paper):
        accuracies = [
            value
            for value in paper.values.values()
            if value.value is not None and paper.metric(value.probe, value.metric).trials
        ]
        assert len(accuracies) == 720
        (best,) = (value for value in accuracies if (value.value, value.length) == (0.925, 65536))
        assert (best.n, round(best.low, 4), round(best.high, 4)) == (80, 0.7006, 0.9849)  # 16 trials
        assert all(value.low <= value.value <= value.high for value in accuracies)


class TestOwn:
    @pytest.fixture
    def design(self, empty, make, run):
        """Return a store of two mixers, memory off and on, two seeds: effects -1 and -1.5, and one missing cell."""
        cell, _ = make
        store = empty
        numbers = {
            ("polar", "off", 0): 4.0,
            ("polar", "off", 1): 4.2,
            ("polar", "on", 0): 3.0,
            ("polar", "on", 1): 3.2,
            ("nope", "off", 0): 5.0,
            ("nope", "off", 1): 5.2,
            ("nope", "on", 0): 3.5,
        }
        keys = [*numbers, ("nope", "on", 1)]
        cells = [cell(i, attn_type=mixer, memory=memory, seed=seed) for i, (mixer, memory, seed) in enumerate(keys)]
        store.record_revision("design", grid_text="x", grid_file="x", cells=cells)
        for record, value in zip(cells, numbers.values(), strict=False):
            run(store, record.id, "done", [Measurement(probe="val", metric="val_loss", value=value)])
        return store

    def test_effects_by_hand(self, design):
        by_axis_and_subset = {(row.axis, row.where): row for row in ef.effects(load_sweep_data(design))}
        memory = by_axis_and_subset["memory", ""]
        # configurations are the pairs: polar -1 and -1, nope -1.5; its second seed is missing
        assert (memory.level, memory.reference, memory.pairs, memory.up, memory.down) == ("on", "off", 2, 0, 2)
        assert (memory.mean, memory.median) == pytest.approx((-1.25, -1.25))
        assert (memory.seeds, memory.expected, memory.missing) == (2, 2, {"new": 1})
        assert len(memory.origins) == 6
        assert by_axis_and_subset["memory", "attn_type=nope"].pairs == 1
        assert math.isnan(by_axis_and_subset["memory", "attn_type=nope"].low)
        assert by_axis_and_subset["attn_type", ""].mean == pytest.approx((1 + 0.5) / 2)

    def test_effects_are_corrected_by_family(self, design):
        rows = [row for row in ef.effects(load_sweep_data(design)) if row.axis == "memory"]
        polar, nope = np.array([[-1.0, -1.0]]), np.array([[-1.5, np.nan]])
        samples = [np.concatenate([polar, nope]), polar, nope[:, 0]]
        expected_p = correct_family(samples, paired_difference_tests(samples, [5.2] * 3))
        assert [row.where for row in rows] == ["", "attn_type=polar", "attn_type=nope"]
        assert [row.p_corrected for row in rows] == pytest.approx(expected_p, nan_ok=True)

    def test_interaction_by_hand(self, design):
        (interaction,) = ef.interactions(load_sweep_data(design))
        assert interaction.expected == 1
        assert (interaction.axes, interaction.levels, interaction.references) == (
            ("attn_type", "memory"),
            ("nope", "on"),
            ("polar", "off"),
        )
        # (3.5 - 5) - (3 - 4)
        assert (interaction.fours, interaction.mean) == pytest.approx((1, -0.5))
        assert len(interaction.origins) == 4

    def test_noise_comes_from_seeds(self, design):
        noise = ef.pooled_noise(load_sweep_data(design), VAL)
        # three pairs of seeds, each 0.2 apart
        assert (noise.kind, noise.df, noise.groups) == ("seeds", 3, 3)
        assert noise.sd == pytest.approx(0.2 / math.sqrt(2))
        t = stats.t.ppf(0.975, 3) + stats.t.ppf(0.8, 3)
        assert ef.detectable(noise, 1) == pytest.approx(t * noise.sd * math.sqrt(2))
        notes = " ".join(make_table("effects", design).notes)
        assert "n = 1" not in notes
        assert "spread between seeds" in notes
