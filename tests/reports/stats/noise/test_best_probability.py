"""Probability of being the best, or on a front, against integrals, Student's t and brute force."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from atma_sweep.reports.best_values import ranked
from atma_sweep.reports.number_format import column_of
from atma_sweep.reports.render import render
from atma_sweep.reports.render.csv_renderer import trace_file_text
from atma_sweep.reports.result_columns import complete_columns, quality_columns, speed_column
from atma_sweep.reports.stats.effects.effects import pareto
from atma_sweep.reports.stats.noise.best_probability import (
    Candidate,
    best_probabilities,
    expected_maximum,
    front_probabilities,
    simulate_p_best,
    simulate_p_front,
)
from atma_sweep.reports.sweep_data import WEIGHTED_SUFFIX, load_sweep_data
from atma_sweep.reports.table_builder import derived_entry, measured_entry
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.records import Measurement
from scipy import integrate, stats

CLOSE = 0.015  # four standard errors of a share of 10,000 draws
NDL = "needle", "digit_accuracy", 65536


@pytest.fixture(scope="module")
def paper(published):
    return load_sweep_data(published, "printed-v2")


@pytest.fixture(scope="module")
def complete(published):
    return make_table("6", published, "printed-v2")


def column(data, probe, metric, length):
    (match,) = [
        candidate
        for candidate in complete_columns(data)
        if (candidate.probe, candidate.metric, candidate.length) == (probe, metric, length)
    ]
    return match


def p_best_by_integration(values, sds):
    """Return the probability that each is the largest: the integral of its density times the rivals' cdf."""

    def density(x, i):
        rival_cdfs = [stats.norm.cdf(x, v, s) for j, (v, s) in enumerate(zip(values, sds, strict=True)) if j != i]
        return stats.norm.pdf(x, values[i], sds[i]) * math.prod(rival_cdfs)

    return [integrate.quad(density, -9, 12, args=(i,))[0] for i in range(len(values))]


class TestBest:
    @pytest.mark.parametrize("runs", [2, 5, 20])
    def test_expected_maximum_of_normals(self, runs):
        expected = integrate.quad(lambda x: runs * x * stats.norm.pdf(x) * stats.norm.cdf(x) ** (runs - 1), -9, 9)[0]
        assert expected_maximum(runs) == pytest.approx(expected, abs=1e-4)
        assert runs != 5 or f"{expected_maximum(5):.2f}" == "1.16"

    @pytest.mark.thorough
    def test_p_best_of_normals_with_fixed_sd(self):
        values, sds = [1.0, 1.5, 2.0, 2.2], [1.0, 0.5, 0.7, 0.2]
        probabilities = simulate_p_best([Candidate(v, s) for v, s in zip(values, sds, strict=True)], 1)
        assert probabilities == pytest.approx(p_best_by_integration(values, sds), abs=CLOSE)
        losses = simulate_p_best([Candidate(-v, s) for v, s in zip(values, sds, strict=True)], -1)
        assert losses == pytest.approx(p_best_by_integration(values, sds), abs=CLOSE)
        assert probabilities.sum() == pytest.approx(1)

    @pytest.mark.parametrize("df", [1, 4, 16])
    def test_p_best_with_estimated_sd_is_student_t(self, df):
        """For two candidates of one stratum, the difference over sd sqrt(1/3 + 1) is Student's t."""
        first, second = simulate_p_best([Candidate(1.0, 2.0, df, ("a",), 3), Candidate(0.0, 2.0, df, ("a",))], 1)
        assert first == pytest.approx(stats.t.cdf(1 / (2 * math.sqrt(1 / 3 + 1)), df), abs=CLOSE)
        assert first + second == pytest.approx(1)

    def test_p_best_shares_ties(self):
        assert simulate_p_best([Candidate(2.0, 0.0), Candidate(2.0, 0.0), Candidate(1.0, 0.0)], 1).tolist() == [
            0.5,
            0.5,
            0.0,
        ]
        # both draw their 1 with every second draw: 1/4 together, 1/4 each alone, else the larger
        assert simulate_p_best([Candidate(1.0, 0.1, share=True)] * 2, 1) == pytest.approx([0.5, 0.5], abs=CLOSE)
        assert simulate_p_best([], 1).tolist() == []

    def test_p_best_clips_shares(self):
        """Against a certain 1, another candidate wins only half of the draws that are clipped to 1."""
        probabilities = simulate_p_best([Candidate(1.0, 0.0, share=True), Candidate(0.9, 0.1, share=True)], 1)
        assert probabilities[1] == pytest.approx(stats.norm.sf(1) / 2, abs=CLOSE)


class TestFront:
    def test_p_front_without_noise_is_the_front(self):
        draw = np.random.default_rng(1)
        for n in range(1, 12):
            # few levels, so that many tie in one coordinate or both
            points = [tuple(point) for point in draw.integers(0, 4, (n, 2)).tolist()]
            for directions in itertools.product((1, -1), repeat=2):
                probabilities = simulate_p_front(
                    [(Candidate(x, 0.0), Candidate(y, 0.0)) for x, y in points], directions
                )
                assert probabilities.tolist() == [float(is_on_front) for is_on_front in pareto(points, directions)]
        assert simulate_p_front([]).tolist() == []

    def test_p_front_of_normals(self):
        """The faster one is always on the front; the slower one if its quality, or its drawn speed, is higher."""
        fast, slow = (Candidate(2.0, 0.0), Candidate(1.0, 1.0)), (Candidate(1.0, 0.0), Candidate(0.5, 1.0))
        assert simulate_p_front([fast, slow]) == pytest.approx([1, stats.norm.sf(0.5 / math.sqrt(2))], abs=CLOSE)
        slow = (Candidate(1.0, 1.0), slow[1])
        faster, better = stats.norm.sf(1.0), stats.norm.sf(0.5 / math.sqrt(2))
        expected = [1 - faster * better, 1 - (1 - faster) * (1 - better)]
        assert simulate_p_front([fast, slow]) == pytest.approx(expected, abs=CLOSE)

    def test_p_front_counts_qualities_above_a_bound(self):
        """A quality of mean 0.5 and deviation 1 exceeds 1 as often as a standard normal exceeds 0.5."""
        fast, slow = (Candidate(2.0, 0.0), Candidate(0.5, 1.0)), (Candidate(1.0, 0.0), Candidate(3.0, 0.0))
        expected = [stats.norm.sf(0.5), stats.norm.cdf(2.5)]
        assert simulate_p_front([fast, slow], above=1.0) == pytest.approx(expected, abs=CLOSE)


class TestSweep:
    @pytest.mark.thorough
    def test_p_best_equals_an_independent_simulation(self, paper):
        """Needle at 64K: cells simulated around their numbers, variances from five near-replicates per stratum."""
        probabilities = best_probabilities(paper, column(paper, *NDL))
        assert sum(probabilities.values()) == pytest.approx(1)
        assert probabilities == best_probabilities(paper, column(paper, *NDL))
        values = {tuple(c.levels.values()): paper.value(c.cell_id, *NDL).value for c in paper.cells}
        groups: dict = {}
        for (mixer, _, distractor, memory, window), value in values.items():
            groups.setdefault((mixer, memory), {}).setdefault((distractor, window), []).append(value)
        sd = {
            k: math.sqrt(np.mean([np.var(values, ddof=1) for values in group.values()])) for k, group in groups.items()
        }
        draw, wins = np.random.default_rng(5), dict.fromkeys(values, 0.0)
        shown = list(values)
        for _ in range(4000):
            scale = {k: s * math.sqrt(16 / draw.chisquare(16)) for k, s in sd.items()}
            noise = draw.standard_normal(len(shown))
            drawn = [min(1, max(0, values[k] + scale[k[0], k[3]] * z)) for k, z in zip(shown, noise, strict=True)]
            ahead = [k for k, value in zip(shown, drawn, strict=True) if value == max(drawn)]
            for leader in ahead:
                wins[leader] += 1 / len(ahead) / 4000
        assert max(abs(probabilities[k] - wins[k]) for k in shown) < 0.03
        top = max(probabilities, key=probabilities.get)
        assert top == ("polar", "baseline", "off", "on", "off")
        assert 0.2 < probabilities[top] < 0.5

    @pytest.mark.thorough
    def test_front_probabilities_of_the_published_sweep(self, paper):
        speed, (loss, needle) = speed_column(paper, "x"), quality_columns(paper)
        for quality in (loss, needle):
            probabilities = front_probabilities(paper, speed, quality)
            assert len(probabilities) == 120
            assert all(0 <= p <= 1 for p in probabilities.values())

    def test_no_probability_without_noise_estimate(self, filled_data):
        columns = complete_columns(filled_data)
        assert all(best_probabilities(filled_data, each_column) == {} for each_column in columns)
        assert front_probabilities(filled_data, columns[-1], columns[0]) == {}


@pytest.fixture
def filled_data(empty, make, run):
    cell, numbers = make
    cells = [cell(1), cell(2, attn_type="nope")]
    empty.record_revision("two", grid_text="x", grid_file="x", cells=cells)
    for index, record in enumerate(cells):
        run(empty, record.id, "done", numbers(1.0 + index))
    return load_sweep_data(empty, "two")


class TestTables:
    @pytest.mark.thorough
    def test_complete_results_name_the_best_with_its_probability(self, complete, paper):
        table = complete
        probabilities = best_probabilities(paper, column(paper, *NDL))
        column_index = table.columns.index("Ndl@64K") - table.text_columns
        assert [row[column_index].p_best for row in table.entries] == pytest.approx(list(probabilities.values()))
        (note,) = [note for note in table.notes if note.startswith("Best of Val: ")]
        assert "P(best) " in note
        assert " (n = 1, noise estimated from near-replicates)" in note
        assert f"of Ndl@64K: polar-baseline-d0-m1-w0, {max(probabilities.values()):.2f}" in note
        (chance,) = [note for note in table.notes if note.startswith("By chance alone")]
        # four modes of the regularizer are near; the expected largest of four normal draws is 1.029
        assert "the best of 4 near-replicates lies 1.03 sd above their mean: " in chance
        sds = []
        for near in (4, 5):
            groups = {}
            for cell in paper.cells:
                attn, mode, distractor, memory, window = cell.levels.values()
                if (attn, memory) == ("polar", "on") and (near == 5 or mode != "strong"):
                    groups.setdefault((distractor, window), []).append(paper.value(cell.cell_id, *NDL).value)
            sds.append(math.sqrt(np.mean([np.var(group, ddof=1) for group in groups.values()])))
        assert f"{100 * expected_maximum(5) * sds[1]:.0f}" == "23", "points, were all five alike"
        assert f"{102.9 * sds[0]:.1f} points in Ndl@64K (PoLAR, with memory)" in chance

    def test_json_and_csv_trace_contain_p_best(self, complete):
        values = [value for row in json.loads(render(complete, "json")) for value in row["values"]]
        trace_by_name = json.loads(trace_file_text(complete))["p_best"]
        for heading in ("Val", "Ndl@64K"):
            assert trace_by_name[heading] == [value["p_best"] for value in values if value["heading"] == heading]

    def test_ranking_of_rows_over_lengths(self, published):
        notes = " ".join(make_table("2", published, "printed-v2").notes)
        assert "Best at 2K: " in notes
        assert "; at 64K: polar + memory needle, >0.99" in notes

    def test_note_without_noise_estimate(self, filled_data, empty):
        notes = make_table("6", empty, "two").notes
        assert (
            "Bold: best value. P(best) not available: without an estimate of run-to-run variation, differences may be noise."
            in notes
        )
        assert not any("probability" in note for note in notes)
        assert "p_best" not in trace_file_text(make_table("6", empty, "two"))
        assert any(
            note.startswith("P(front) is not available for Val") for note in make_table("pareto", empty, "two").notes
        )

    def test_noise_kind_is_seeds_with_several_seeds(self, empty, make, run):
        cell, numbers = make
        cells = [cell(10 * group + seed, attn_type=kind, seed=seed) for group, kind in enumerate(("polar", "nope")) for seed in range(3)]  # fmt: skip
        empty.record_revision("seeds", grid_text="x", grid_file="x", cells=cells)
        for record, value in zip(cells, (1.0, 1.1, 1.2, 1.15, 1.3, 1.15), strict=True):
            run(empty, record.id, "done", numbers(value)[:1])
        table = make_table("6", empty, "seeds")
        (note,) = [note for note in table.notes if note.startswith("Best of Val")]
        assert note.endswith(" (up to n = 3, noise estimated from seeds).")
        sds = [np.std(values, ddof=1) for values in ((1.0, 1.1, 1.2), (1.15, 1.3, 1.15))]
        # each stratum's error is Student's t of 2 degrees of freedom; their difference by another simulation
        draw = np.random.default_rng(3)
        first, second = (s / math.sqrt(3) * draw.standard_t(2, 200_000) for s in sds)
        expected = np.mean(1.1 + first < 1.2 + second)
        assert table.entries[0][0].p_best == pytest.approx(expected, abs=CLOSE)

    def test_average_over_lengths_uses_its_own_noise(self, empty, make, run):
        """This holds for every probe that measures at several lengths."""
        cell, _ = make
        cells = [cell(10 * group + seed, attn_type=kind, seed=seed) for group, kind in enumerate(("polar", "nope")) for seed in range(3)]  # fmt: skip
        empty.record_revision("tails", grid_text="x", grid_file="x", cells=cells)
        for record, value in zip(cells, (1.0, 1.1, 1.2, 1.15, 1.3, 1.15), strict=True):
            measurements = [Measurement(probe="same_tail", metric="nats", length=64 * k, value=value / k, unit="nats/token") for k in (1, 2)]  # fmt: skip
            run(empty, record.id, "done", measurements)
        data = load_sweep_data(empty, "tails")
        tail = column_of("same_tail", "nats")
        parts = [[measured_entry(data, cells, replace(tail, length=length)) for length in (64, 128)] for cells in data.configurations().values()]  # fmt: skip
        rows = [
            [
                replace(
                    derived_entry(data, tail, (group_values[0].value + 2 * group_values[1].value) / 3, group_values),
                    seeds=3,
                )
            ]
            for group_values in parts
        ]
        grid, _ = ranked(data, rows, "column")
        expected = best_probabilities(data, replace(tail, metric="nats" + WEIGHTED_SUFFIX))
        assert 0.5 < grid[0][0].p_best < 1
        assert [row[0].p_best for row in grid] == list(expected.values())

    @pytest.mark.thorough
    def test_pareto_figure_states_probabilities(self, published):
        table = make_table("pareto", published, "printed-v2")
        assert table.columns[-2:] == ("P(front) Val", "P(front) Ndl@64K")
        assert all(0 <= entry.value <= 1 for row in table.entries for entry in row[-2:])
        assert any("Not on the measured front of Val, but with P(front) of at least 0.25: " in n for n in table.notes)
