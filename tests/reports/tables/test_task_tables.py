"""The tables of the rivals' papers: of a sweep of one's own against formulas by hand, and what they say where numbers are missing."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, Measurement, Owner, Provenance
from atma_sweep.results.store.store import Store
from pictures import figure_of
from scipy import stats
from sweeps import compare

SPARSE = {"fox": (0.95, 0.90, 0.97, 0.93), "tra": (1.0, 1.0, 1.0, 1.0), "nope": (0.999,)}
CONFIG = {
    "model": {"attn_every": 1, "attn_offset": 0, "mlp": "swiglu", "mlp_ratio": 2, "n_layers": 4, "d_model": 256},
    "data": {"corpus": "flipflop"},
    "train": {"tokens": 819_200_000, "seq_len": 512, "batch_tokens": 32_768, "loss_on": "marked", "optimizer": "adamw"},
}
N = {"iid": 16_000, "sparse": 160_000, "dense": 4_000}


def wilson(p: float, n: int) -> tuple[float, float]:
    """Return Wilson's interval as roots of the quadratic |p - x| = z sqrt(x (1 - x) / n)."""
    z = stats.norm.ppf(0.975)
    a, b, c = 1 + z * z / n, -(2 * p + z * z / n), p * p
    root = math.sqrt(b * b - 4 * a * c)
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def flips(iid: float | None = None, sparse: float | None = None, dense: float | None = None) -> list[Measurement]:
    measurements = []
    for name, share in {"iid": iid, "sparse": sparse, "dense": dense}.items():
        if share is not None:
            fields: dict[str, Any] = {"probe": "flipflop", "unit": "fraction", "n": N[name]}
            measurements.append(Measurement(metric=f"exact_{name}", value=share, **fields))
            measurements.append(Measurement(metric=f"coin_{name}", value=0.14, **fields))
    return measurements


def perplexities(*values: float) -> list[Measurement]:
    return [
        Measurement(probe="extrapolation", metric="perplexity", length=128 * 4**i, value=value, unit="perplexity")
        for i, value in enumerate(values)
    ]


def sweep(store: Store, name: str, runs: list[tuple[CellRecord, list[Measurement] | None]], **options: Any) -> Store:
    store.record_revision(name, grid_text="x", grid_file="x", cells=[record for record, _ in runs], options=options)
    for listed_record, values in runs:
        if values is not None:
            attempt = store.start_attempt(
                listed_record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1
            )
            recorder = DatabaseRecorder(store, attempt.id, 1)
            recorder.provenance(
                Provenance(
                    config=listed_record.config, seed=listed_record.seed, tokenizer="flipflop", corpus="flipflop"
                )
            )
            recorder.measurements(values)
            store.finish_attempt(attempt.id, 1, "done")
    return store


@pytest.fixture
def own(empty: Store, make: Any) -> Store:
    """Return a sweep `own`: fox and tra with four seeds, nope with one."""
    cell, _ = make
    runs = []
    for kind, shares in SPARSE.items():
        for seed, share in enumerate(shares):
            record = cell(len(runs), attn_type=kind, memory="off", seed=seed)
            config = CONFIG | {"model": {**CONFIG["model"], "attn_type": kind}}
            dense = 0.0015 if kind == "nope" else 1.0
            runs.append((replace(record, config=config, slug=f"{kind}-s{seed}"), flips(1.0, share, dense)))
    return sweep(empty, "own", runs)


def by_type(table: Any) -> dict[str, dict[str, Any]]:
    return {
        row[0]: {entry.heading: entry for entry in entries}
        for row, entries in zip(table.rows, table.entries, strict=True)
    }


class TestFlipFlop:
    def test_spread_and_both_intervals_by_hand(self, own):
        table = make_table("flipflop", own, "own")
        assert table.columns[:2] == ("Type", "IID"), "of axes that do not vary nothing is said"
        fox = by_type(table)["fox"]
        shares = SPARSE["fox"]
        mean, sd = statistics.fmean(shares), statistics.stdev(shares)
        assert fox["Sparse"].text == "93.75 ± 2.99"
        low, high = stats.t.interval(0.95, 3, mean, sd / 2)
        assert (fox["Sparse 95% seeds"].low, fox["Sparse 95% seeds"].high) == pytest.approx((low, high))
        assert fox["Sparse 95% seeds"].text == f"[{100 * low:.2f}, {100 * high:.2f}]"
        items = fox["Sparse 95% sequences"]
        assert (items.low, items.high) == pytest.approx(wilson(mean, N["sparse"]))
        assert items.n == N["sparse"], "every seed is asked the same sequences"
        dense = by_type(table)["nope"]["Dense 95% sequences"]
        assert (dense.low, dense.high) == pytest.approx(wilson(0.0015, N["dense"]))

    def test_seed_interval_of_single_and_equal_runs(self, own):
        rows = by_type(make_table("flipflop", own, "own"))
        assert rows["nope"]["Sparse 95% seeds"].text == "-"
        assert rows["tra"]["Sparse 95% seeds"].text == "[100.00, 100.00]"
        assert rows["tra"]["Sparse"].text == "100.00 ± 0.00"

    def test_the_notes_have_what_coins_score(self, own, published):
        notes = make_table("flipflop", own, "own").notes
        assert "Exactly correct by fair coins: IID 14.0% of 16,000, Sparse 14.0% of 160,000, Dense 14.0% of 4,000 sequences." in notes  # fmt: skip
        notes = make_table("flipflop", published, "printed-tra").notes
        # 0.5 (1 - p_r / 2)^254 with p_r = 0.1, 0.01 and 0.45
        assert (
            "Exactly correct by fair coins, from the task's definition: IID 1e-06, Sparse 14.0%, Dense 4e-29." in notes
        )

    def test_missing_seeds_are_counted_with_reasons(self, empty, make):
        cell, _ = make
        kinds = [("fox", 0), ("fox", 1), ("fox", 2), ("rope", 0)]
        cells = [cell(i, attn_type=kind, seed=seed) for i, (kind, seed) in enumerate(kinds)]
        lost = [Measurement(probe="flipflop", metric="exact_sparse", reason="oom: too long", unit="fraction", n=0)]
        runs = [(cells[0], flips(1, 0.9, 1)), (cells[1], flips(1, 0.8, 1)), (cells[2], None), (cells[3], lost)]
        table = make_table("flipflop", sweep(empty, "holes", runs, requested=[["flipflop", 0]]), "holes")
        rows = by_type(table)
        assert rows["fox"]["Sparse"].text == "85.00 ± 7.07 (n=2)"
        low, high = stats.t.interval(0.95, 1, 0.85, statistics.stdev((0.9, 0.8)) / math.sqrt(2))
        assert (low, high) != (rows["fox"]["Sparse 95% seeds"].low, rows["fox"]["Sparse 95% seeds"].high)
        assert rows["fox"]["Sparse 95% seeds"].text == "[21.47, 100.00]", "a share ends at 100"
        assert rows["rope"]["Sparse"].text == "oom"
        assert "oom (1 value): too long." in table.notes

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", ["flipflop", "extrapolation", "downstream"])
    def test_nothing_measured_is_a_note(self, empty, make, name):
        cell, _ = make
        table = make_table(name, sweep(empty, "none", [(cell(0), None)]), "none")
        assert table.rows == ()
        assert f"No number of the probe {name} was measured or requested." in table.notes
        requested_sweep = sweep(empty, "asked", [(cell(1), None)], requested=[[name, 128]])
        assert make_table(name, requested_sweep, "asked").rows[0][0] == "polar"


class TestExtrapolation:
    def test_ratio_and_intervals_by_hand(self, empty, make):
        cell, _ = make
        runs = {"tra": [(30.0, 29.0, 28.5), (30.2, 29.4, 29.3)], "rope": [(30.1, 50.0, 90.0), (30.3, 55.0, 99.0)]}
        cells = [
            (cell(10 * i + seed, attn_type=kind, seed=seed), perplexities(*values))
            for i, (kind, by_seed) in enumerate(runs.items())
            for seed, values in enumerate(by_seed)
        ]
        table = make_table("extrapolation", sweep(empty, "long", cells), "long")
        assert table.columns == ("Type", "PPL@128", "PPL@128 95% seeds", "PPL@512", "PPL@512 95% seeds", "PPL@2K",
                                 "PPL@2K 95% seeds", "longest/shortest", "longest/shortest 95% seeds")  # fmt: skip
        rows = by_type(table)
        for kind, kind_values in runs.items():
            ratios = [values[-1] / values[0] for values in kind_values]
            ratio = rows[kind]["longest/shortest"]
            assert (ratio.value, ratio.sd) == (
                pytest.approx(statistics.fmean(ratios)),
                pytest.approx(statistics.stdev(ratios)),
            )
            ends = stats.t.interval(0.95, 1, ratio.value, ratio.sd / math.sqrt(2))
            interval = rows[kind]["longest/shortest 95% seeds"]
            assert (interval.low, interval.high) == pytest.approx(ends)
        assert rows["tra"]["PPL@128"].text == "30.10 ± 0.14"


class TestDownstream:
    def test_what_is_printed_and_the_average_that_is_not_the_fours(self, published):
        table = make_table("downstream", published, "printed-wall")
        assert [row[2:] for row in table.rows] == [
            ("68.0", "46.5", "31.1", "62.4", "52.0"),
            ("66.9", "45.0", "28.8", "61.2", "50.4"),
            ("67.1", "46.6", "33.1", "63.1", "52.5"),
            ("68.9", "47.1", "39.8", "63.0", "54.7"),
        ]
        assert (
            "Printed averages that differ from the mean of the four printed numbers: fox 50.4, mean of the four 50.475."
            in table.notes
        )
        assert any("rescale factor at C = 128: 5.91" in note for note in table.notes)

    @pytest.mark.thorough
    def test_an_average_of_ones_own_is_worked_out(self, empty, make):
        cell, _ = make
        tasks = {"hellaswag": 0.4, "arc_c": 0.3, "mmlu": 0.25, "winogrande": 0.55}
        values = [
            Measurement(probe="downstream", metric=name, value=value, unit="fraction") for name, value in tasks.items()
        ]
        table = make_table("downstream", sweep(empty, "mine", [(cell(0), values)]), "mine")
        assert table.entries[0][-1].value == pytest.approx(1.5 / 4)

    def test_tasks_of_the_harness_have_standard_errors(self, empty, make):
        cell, _ = make

        def scores(value: float, n: int = 400, **facts: object) -> list[Measurement]:
            description = {"task": "blimp", "version": "2.0", "shots": 0, "main": True, **facts}
            part = {"task": "blimp_island", "main": False, "part_of": "blimp", "chance": 0.5}
            fields = {"probe": "downstream", "unit": "fraction", "n": n}
            return [
                Measurement(**fields, metric="blimp/acc", value=value, description=description),
                Measurement(**fields, metric="blimp/acc_stderr", value=0.0158, description={"task": "blimp"}),
                Measurement(**fields, metric="blimp_island/acc", value=0.1, description=part),
                Measurement(**fields, metric="own/acc", value=None, reason="no-data: task own: gone",
                            description={"task": "own", "main": True}),
            ]  # fmt: skip

        store = sweep(
            empty, "mine", [(cell(0), scores(0.5213, limit=20)), (cell(1, attn_type="rope"), scores(0.62, limit=20))]
        )
        table = make_table("downstream", store, "mine")
        assert table.columns[table.text_columns :] == ("BLiMP", "own")
        assert [row[table.text_columns :] for row in table.rows] == [
            ("52.1 (1.6)", "no-data"),
            ("62.0 (1.6)", "no-data"),
        ]
        notes = " ".join(table.notes)
        assert (
            "BLiMP: blimp, acc, version 2.0, 0 shots, 400 questions, the first 20 of each task, chance level 50%"
            in notes
        )
        assert "no-data (2 values): task own: gone." in notes
        figure = make_figure("downstream", store, "mine")
        assert list(figure.frame["value"]) == [0.5213, 0.62]
        assert set(figure.frame["chance"]) == {0.5}
        (axes,) = figure_of(figure).axes
        ((x0, x1),) = {tuple(line.get_xdata()) for line in axes.lines if list(line.get_ydata()) == [0, 1]}
        assert (x0, x1) == (50.0, 50.0), "the chance level"


class TestCompare:
    """Beside printed means with the standard deviation of their runs."""

    def test_welch_by_scipy(self, own):
        comparison_by_key = {
            (comparison.levels[0], comparison.column.metric): comparison
            for comparison in compare(own, "own", "printed-tra")
        }
        assert set(comparison_by_key) == {
            (kind, f"exact_{name}") for kind in SPARSE for name in N
        }  # fmt: skip
        fox = comparison_by_key["fox", "exact_sparse"]
        mean, sd = statistics.fmean(SPARSE["fox"]), statistics.stdev(SPARSE["fox"])
        judged = stats.ttest_ind_from_stats(mean, sd, 4, 0.934, 0.0421, 4, equal_var=False)
        (low, high) = judged.confidence_interval(0.95) if hasattr(judged, "confidence_interval") else (None, None)
        a, b = sd**2 / 4, 0.0421**2 / 4
        df = (a + b) ** 2 / (a**2 / 3 + b**2 / 3)
        reach = stats.t.ppf(0.975, df) * math.sqrt(a + b)
        assert low is None or (high - low) / 2 == pytest.approx(reach)
        assert fox.limit == pytest.approx(reach)
        assert (fox.verdict, judged.pvalue > 0.05) == ("within", True)
        assert fox.p == pytest.approx(judged.pvalue)
        # a single seed is held against the spread of the four runs
        nope = comparison_by_key["nope", "exact_sparse"]
        reach = 0.001 * math.sqrt(1 + 1 / 4)
        assert nope.limit == pytest.approx(stats.t.ppf(0.975, 3) * reach)
        assert nope.p == pytest.approx(2 * stats.t.sf(abs(0.999 - 0.9997) / reach, 3))

    def test_equal_printed_runs_are_judged_by_sequences(self, empty, make):
        """Four runs at 100%: what is beyond is beyond Wilson's interval, and p is that of exchanging the runs, counted by hand."""
        cell, _ = make
        runs = []
        for i, (kind, seed, dense) in enumerate(
            (("rope", 0, 0.6295), ("rope", 1, 0.9418), ("cope", 0, 0.9453), ("fox", 0, 1.0))
        ):
            config = CONFIG | {"model": {**CONFIG["model"], "attn_type": kind}}
            runs.append((replace(cell(i, attn_type=kind, memory="off", seed=seed), config=config), flips(dense=dense)))
        store = sweep(empty, "dense", runs)
        compared = {row.levels[0]: row for row in compare(store, "dense", "printed-tra")}
        # both seeds on one side: 1 of the 15 ways to choose two runs of six; one seed: 1 of 5
        assert {kind: row.p for kind, row in compared.items()} == {
            "rope": pytest.approx(1 / 15), "cope": pytest.approx(1 / 5), "fox": 1.0,
        }  # fmt: skip
        assert compared["cope"].limit == pytest.approx(wilson(0.9453, N["dense"])[1] - 0.9453)
        mean = (0.6295 + 0.9418) / 2
        assert compared["rope"].limit == pytest.approx(wilson(mean, N["dense"])[1] - mean)
        assert {kind: row.verdict for kind, row in compared.items()} == {
            "rope": "beyond",
            "cope": "beyond",
            "fox": "within",
        }
        table = make_table("compare", store, "dense", reference="printed-tra")
        assert table.columns[-5:] == ("Measured", "Published", "Difference", "Limit", "p")
        assert [row[-1] for row in table.rows] == ["0.0667", "1.0000", "0.2000"]
        assert any(note.startswith("Where all published runs have the same number") for note in table.notes)

    @pytest.mark.thorough
    def test_number_far_from_printed_value_is_beyond(self, empty, make):
        cell, _ = make
        record = replace(cell(0, attn_type="rope", memory="off"), config=CONFIG)
        store = sweep(empty, "far", [(record, flips(1.0, 0.99, 1.0))])
        compared = {
            row.column.metric: (row.verdict, row.published.text) for row in compare(store, "far", "printed-tra")
        }
        assert compared == {
            "exact_iid": ("within", "100.00 ± 0.00"),
            "exact_sparse": ("beyond", "72.82 ± 1.27"),
            "exact_dense": ("within", "100.00 ± 0.00"),
        }

    @pytest.mark.thorough
    def test_incomparable_recipes_are_not_judged(self, empty, make):
        cell, _ = make
        config = CONFIG | {
            "train": {**CONFIG["train"], "tokens": 1_000_000},
            "model": {**CONFIG["model"], "n_layers": 2},
        }
        record = replace(cell(0, attn_type="fox", memory="off"), config=config)
        store = sweep(empty, "small", [(record, flips(1.0, 0.5, 1.0))])
        table = make_table("compare", store, "small", reference="printed-tra")
        assert table.above[0] == (
            "Not judged, since the sweeps differ in kind: train.tokens 1000000 instead of 819200000; model.n_layers 2 "
            "instead of 4."
        )
        assert [row[-4:] for row in table.rows] == [
            ("100.00", "100.00 ± 0.00", "0.00", "-"),
            ("50.00", "93.40 ± 4.21", "-43.40", "-"),
            ("100.00", "100.00 ± 0.00", "0.00", "-"),
        ]

    @pytest.mark.thorough
    def test_positions_tell_configurations_apart_by_axis_or_config(self, empty, make):
        cell, _ = make
        runs = []
        for i, (kind, positions) in enumerate((("nope", "none"), ("nope", "ape"), ("nope", "label"), ("fox", "none"))):
            config = CONFIG | {
                "model": {**CONFIG["model"], **({"positions": positions} if positions != "none" else {})}
            }
            axes = {"attn_type": kind, "model.positions": positions}
            record = replace(
                cell(i, attn_type=kind, memory="off"), config=config, axes=axes, slug=f"{kind}-{positions}"
            )
            runs.append((record, flips(sparse=0.9)))
        store = sweep(empty, "places", runs)
        labels = [
            (*comparison.levels[:1], *comparison.further, comparison.published.text)
            for comparison in compare(store, "places", "printed-tra")
        ]
        assert labels == [
            ("nope", "none", "99.97 ± 0.10"),
            ("nope", "ape", "90.61 ± 5.64"),
            ("nope", "label", "86.93 ± 9.93"),
            ("fox", "none", "93.40 ± 4.21"),
        ]
        table = make_table("compare", store, "places", reference="printed-tra")
        assert table.columns[5] == "model.positions"

    @pytest.mark.thorough
    def test_an_axis_of_which_the_paper_says_nothing_matches_nothing(self, empty, make):
        cell, _ = make
        runs = [
            (
                replace(cell(i, attn_type="fox", memory="off"), config=CONFIG, axes={"train.matrix_lr": rate}),
                flips(sparse=0.9),
            )
            for i, rate in enumerate(("0.001", "0.002"))
        ]
        with pytest.raises(ReportError, match=r"further axes vary: .*train\.matrix_lr"):
            compare(sweep(empty, "rates", runs), "rates", "printed-tra")

    def test_setting_omitted_in_config_is_a_difference(self, empty, make):
        """Muon, the identity default, is in no stored config; the paper's optimizer is another. Its cosine is left out as well."""
        cell, _ = make
        default = {name: value for name, value in CONFIG["train"].items() if name != "optimizer"}
        record = replace(cell(0, attn_type="fox", memory="off"), config=CONFIG | {"train": default})
        table = make_table(
            "compare", sweep(empty, "muon", [(record, flips(sparse=0.9))]), "muon", reference="printed-tra"
        )
        assert table.above[0] == ("Not judged, since the sweeps differ in kind: train.optimizer muon instead of adamw.")
        assert not any(note.startswith("Not recorded for muon") and "train." in note for note in table.notes)

    def test_flipflop_page_has_the_rows_of_the_command(self, empty, make):
        """docs/experiments/flipflop.md: its runs in a database give its comparison, every number of it, and its intervals of sequences."""
        page = (Path(__file__).parents[3] / "docs" / "experiments" / "flipflop.md").read_text(encoding="utf-8")
        lines = [
            [entry.strip() for entry in line.strip("|").split("|")]
            for line in page.splitlines()
            if line.startswith("|")
        ]
        runs = [row for row in lines if len(row) == 4 and row[0].rpartition(" ")[2].isdigit()]
        rows = [row for row in lines if len(row) == 8 and row[1] in N]
        assert (len(runs), len(rows)) == (6, 15)
        cell, _ = make
        cells = []
        for i, (name, *shares) in enumerate(runs):
            kind, _, seed = name.partition(" ")
            for text, n in zip(shares, N.values(), strict=True):
                share, low, high = map(float, text.replace("[", "").replace("]", "").replace(",", "").split())
                # Wilson's of the printed share, so half a printed digit may move its ends by a digit
                assert (low, high) == pytest.approx([100 * end for end in wilson(share / 100, n)], abs=0.0151)
            config = CONFIG | {"model": {**CONFIG["model"], "attn_type": kind}}
            record = replace(cell(i, attn_type=kind, memory="off", seed=int(seed)), config=config)
            cells.append((record, flips(*(float(text.split()[0]) / 100 for text in shares))))
        store = sweep(empty, "page", cells)
        table = make_table("compare", store, "page", reference="printed-tra")
        printed = [[row[0], row[5].removeprefix("FF "), *row[8:], row[6]] for row in table.rows]
        assert sorted(printed) == sorted(rows)
