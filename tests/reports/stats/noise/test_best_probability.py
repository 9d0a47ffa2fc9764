"""How probable it is to be the best, or on a front: against integrals, Student's t and brute force."""

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
    (found,) = [one for one in complete_columns(data) if (one.probe, one.metric, one.length) == (probe, metric, length)]
    return found


def exactly(values, sds):
    """The probability that each is the largest: the integral of its density times the others' distribution."""

    def density(x, i):
        others = [stats.norm.cdf(x, v, s) for j, (v, s) in enumerate(zip(values, sds, strict=True)) if j != i]
        return stats.norm.pdf(x, values[i], sds[i]) * math.prod(others)

    return [integrate.quad(density, -9, 12, args=(i,))[0] for i in range(len(values))]


class TestBest:
    @pytest.mark.parametrize("runs", [2, 5, 20])
    def test_luck_is_the_expected_largest_of_normals(self, runs):
        expected = integrate.quad(lambda x: runs * x * stats.norm.pdf(x) * stats.norm.cdf(x) ** (runs - 1), -9, 9)[0]
        assert expected_maximum(runs) == pytest.approx(expected, abs=1e-4)
        assert runs != 5 or f"{expected_maximum(5):.2f}" == "1.16"

    @pytest.mark.thorough
    def test_normals_of_their_own_spread(self):
        values, sds = [1.0, 1.5, 2.0, 2.2], [1.0, 0.5, 0.7, 0.2]
        found = simulate_p_best([Candidate(v, s) for v, s in zip(values, sds, strict=True)], 1)
        assert found == pytest.approx(exactly(values, sds), abs=CLOSE)
        losses = simulate_p_best([Candidate(-v, s) for v, s in zip(values, sds, strict=True)], -1)
        assert losses == pytest.approx(exactly(values, sds), abs=CLOSE)
        assert found.sum() == pytest.approx(1)

    @pytest.mark.parametrize("df", [1, 4, 16])
    def test_a_spread_that_is_itself_estimated_makes_it_students_t(self, df):
        """Two of one stratum: their difference over sd sqrt(1/3 + 1) is Student's t."""
        first, second = simulate_p_best([Candidate(1.0, 2.0, df, ("a",), 3), Candidate(0.0, 2.0, df, ("a",))], 1)
        assert first == pytest.approx(stats.t.cdf(1 / (2 * math.sqrt(1 / 3 + 1)), df), abs=CLOSE)
        assert first + second == pytest.approx(1)

    def test_what_draws_alike_shares(self):
        assert simulate_p_best([Candidate(2.0, 0.0), Candidate(2.0, 0.0), Candidate(1.0, 0.0)], 1).tolist() == [
            0.5,
            0.5,
            0.0,
        ]
        # both draw their 1 with every second draw: 1/4 together, 1/4 each alone, else the larger
        assert simulate_p_best([Candidate(1.0, 0.1, share=True)] * 2, 1) == pytest.approx([0.5, 0.5], abs=CLOSE)
        assert simulate_p_best([], 1).tolist() == []

    def test_a_share_that_cannot_be_more_than_all(self):
        """Against one that is 1 for certain another wins nothing but a half where it draws 1 too."""
        found = simulate_p_best([Candidate(1.0, 0.0, share=True), Candidate(0.9, 0.1, share=True)], 1)
        assert found[1] == pytest.approx(stats.norm.sf(1) / 2, abs=CLOSE)


class TestFront:
    def test_without_a_spread_it_is_the_front(self):
        draw = np.random.default_rng(1)
        for n in range(1, 12):
            # few levels, so that many tie in one coordinate or both
            points = [tuple(point) for point in draw.integers(0, 4, (n, 2)).tolist()]
            for directions in itertools.product((1, -1), repeat=2):
                found = simulate_p_front([(Candidate(x, 0.0), Candidate(y, 0.0)) for x, y in points], directions)
                assert found.tolist() == [float(kept) for kept in pareto(points, directions)]
        assert simulate_p_front([]).tolist() == []

    def test_by_normals(self):
        """The faster one is always on it; the slower one where its quality is the better, or where it is the faster."""
        fast, slow = (Candidate(2.0, 0.0), Candidate(1.0, 1.0)), (Candidate(1.0, 0.0), Candidate(0.5, 1.0))
        assert simulate_p_front([fast, slow]) == pytest.approx([1, stats.norm.sf(0.5 / math.sqrt(2))], abs=CLOSE)
        slow = (Candidate(1.0, 1.0), slow[1])
        faster, better = stats.norm.sf(1.0), stats.norm.sf(0.5 / math.sqrt(2))
        expected = [1 - faster * better, 1 - (1 - faster) * (1 - better)]
        assert simulate_p_front([fast, slow]) == pytest.approx(expected, abs=CLOSE)


class TestSweep:
    @pytest.mark.thorough
    def test_as_a_simulation_of_ones_own(self, paper):
        """Needle at 64K: each cell drawn around its number, variances from the five near-replicates of every mixer and memory."""
        found = best_probabilities(paper, column(paper, *NDL))
        assert sum(found.values()) == pytest.approx(1)
        assert found == best_probabilities(paper, column(paper, *NDL))
        values = {tuple(c.levels.values()): paper.value(c.cell_id, *NDL).value for c in paper.cells}
        groups: dict = {}
        for (mixer, _, distractor, memory, window), value in values.items():
            groups.setdefault((mixer, memory), {}).setdefault((distractor, window), []).append(value)
        sd = {k: math.sqrt(np.mean([np.var(some, ddof=1) for some in group.values()])) for k, group in groups.items()}
        draw, wins = np.random.default_rng(5), dict.fromkeys(values, 0.0)
        shown = list(values)
        for _ in range(4000):
            scale = {k: s * math.sqrt(16 / draw.chisquare(16)) for k, s in sd.items()}
            noise = draw.standard_normal(len(shown))
            drawn = [min(1, max(0, values[k] + scale[k[0], k[3]] * z)) for k, z in zip(shown, noise, strict=True)]
            ahead = [k for k, value in zip(shown, drawn, strict=True) if value == max(drawn)]
            for one in ahead:
                wins[one] += 1 / len(ahead) / 4000
        assert max(abs(found[k] - wins[k]) for k in shown) < 0.03
        top = max(found, key=found.get)
        assert top == ("polar", "baseline", "off", "on", "off")
        assert 0.2 < found[top] < 0.5

    @pytest.mark.thorough
    def test_the_front(self, paper):
        speed, (loss, needle) = speed_column(paper, "x"), quality_columns(paper)
        for quality in (loss, needle):
            found = front_probabilities(paper, speed, quality)
            assert len(found) == 120
            assert all(0 <= p <= 1 for p in found.values())

    def test_no_spread_no_probability(self, filled_data):
        columns = complete_columns(filled_data)
        assert all(best_probabilities(filled_data, one) == {} for one in columns)
        assert front_probabilities(filled_data, columns[-1], columns[0]) == {}


@pytest.fixture
def filled_data(empty, make, run):
    cell, numbers = make
    cells = [cell(1), cell(2, attn_type="nope")]
    empty.record_revision("two", grid_text="x", grid_file="x", cells=cells)
    for index, one in enumerate(cells):
        run(empty, one.id, "done", numbers(1.0 + index))
    return load_sweep_data(empty, "two")


class TestTables:
    @pytest.mark.thorough
    def test_complete_results_name_the_best_with_its_probability(self, complete, paper):
        table = complete
        found = best_probabilities(paper, column(paper, *NDL))
        place = table.columns.index("Ndl@64K") - table.text_columns
        assert [row[place].p_best for row in table.entries] == pytest.approx(list(found.values()))
        (note,) = [note for note in table.notes if note.startswith("Best of Val: ")]
        assert "of being the best (n = 1, spread of near-replicates)" in note
        assert f"of Ndl@64K: polar-baseline-d0-m1-w0, {max(found.values()):.2f}" in note
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
        assert f"{102.9 * sds[0]:.1f} points in Ndl@64K (attn_type polar, memory on)" in chance

    def test_json_and_what_lies_beside_csv_carry_it(self, complete):
        values = [value for row in json.loads(render(complete, "json")) for value in row["values"]]
        beside = json.loads(trace_file_text(complete))["p_best"]
        for heading in ("Val", "Ndl@64K"):
            assert beside[heading] == [value["p_best"] for value in values if value["heading"] == heading]

    def test_rows_over_lengths(self, published):
        notes = " ".join(make_table("2", published, "printed-v2").notes)
        assert "Best at 2K: " in notes
        assert "; at 64K: polar + memory needle, >0.99" in notes

    def test_it_is_said_where_nothing_tells_the_spread(self, filled_data, empty):
        notes = make_table("6", empty, "two").notes
        assert "How probable a bold number is the best is not known: nothing tells how far runs lie apart." in notes
        assert not any("probability" in note for note in notes)
        assert "p_best" not in trace_file_text(make_table("6", empty, "two"))
        assert any(note.startswith("P(front) is not known of Val") for note in make_table("pareto", empty, "two").notes)

    def test_seeds_are_the_spread_where_there_are_several(self, empty, make, run):
        cell, numbers = make
        cells = [cell(10 * place + seed, attn_type=kind, seed=seed) for place, kind in enumerate(("polar", "nope")) for seed in range(3)]  # fmt: skip
        empty.record_revision("seeds", grid_text="x", grid_file="x", cells=cells)
        for one, value in zip(cells, (1.0, 1.1, 1.2, 1.15, 1.3, 1.15), strict=True):
            run(empty, one.id, "done", numbers(value)[:1])
        table = make_table("6", empty, "seeds")
        (note,) = [note for note in table.notes if note.startswith("Best of Val")]
        assert note.endswith("of being the best (up to n = 3, spread of seeds).")
        sds = [np.std(some, ddof=1) for some in ((1.0, 1.1, 1.2), (1.15, 1.3, 1.15))]
        # each stratum's error is Student's t of 2 degrees of freedom; their difference by another simulation
        draw = np.random.default_rng(3)
        first, second = (s / math.sqrt(3) * draw.standard_t(2, 200_000) for s in sds)
        expected = np.mean(1.1 + first < 1.2 + second)
        assert table.entries[0][0].p_best == pytest.approx(expected, abs=CLOSE)

    def test_an_average_over_lengths_is_ranked_by_the_spread_of_averages(self, empty, make, run):
        """Whichever probe it is of, as long as the probe measures at lengths."""
        cell, _ = make
        cells = [cell(10 * place + seed, attn_type=kind, seed=seed) for place, kind in enumerate(("polar", "nope")) for seed in range(3)]  # fmt: skip
        empty.record_revision("tails", grid_text="x", grid_file="x", cells=cells)
        for one, value in zip(cells, (1.0, 1.1, 1.2, 1.15, 1.3, 1.15), strict=True):
            found = [Measurement(probe="same_tail", metric="nats", length=64 * k, value=value / k, unit="nats/token") for k in (1, 2)]  # fmt: skip
            run(empty, one.id, "done", found)
        data = load_sweep_data(empty, "tails")
        tail = column_of("same_tail", "nats")
        parts = [[measured_entry(data, cells, replace(tail, length=length)) for length in (64, 128)] for cells in data.configurations().values()]  # fmt: skip
        rows = [
            [replace(derived_entry(data, tail, (some[0].value + 2 * some[1].value) / 3, some), seeds=3)]
            for some in parts
        ]
        grid, _ = ranked(data, rows, "column")
        expected = best_probabilities(data, replace(tail, metric="nats" + WEIGHTED_SUFFIX))
        assert 0.5 < grid[0][0].p_best < 1
        assert [row[0].p_best for row in grid] == list(expected.values())

    @pytest.mark.thorough
    def test_the_front_has_its_probabilities(self, published):
        table = make_table("pareto", published, "printed-v2")
        assert table.columns[-2:] == ("P(front) Val", "P(front) Ndl@64K")
        assert all(0 <= entry.value <= 1 for row in table.entries for entry in row[-2:])
        assert any(
            "Off the front of Val as measured, but on it with P(front) of 0.25 or more: " in n for n in table.notes
        )
