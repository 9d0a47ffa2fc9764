"""The figures of noise: what pairs can show, how far runs that ought to agree lie apart, who answers which trial."""

import math
from collections import defaultdict
from statistics import mean
from typing import Any

import matplotlib.colors as colors
import numpy as np
import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import FigureData
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.tables import make_table
from atma_sweep.results import paper
from atma_sweep.results.store.records import Measurement
from atma_sweep.results.store.store import Store
from matplotlib.collections import PolyCollection
from pictures import check_column, figure_of
from scipy import stats

NEEDLE = ("Ndl@64K", "polar", "on")


@pytest.fixture(scope="module")
def power(published: Store) -> FigureData:
    return make_figure("power", published, "printed-v2")


@pytest.fixture(scope="module")
def seeds(published: Store) -> FigureData:
    return make_figure("seeds", published, "printed-v2")


def near_replicates() -> dict[tuple[str, ...], list[float]]:
    """Return the printed needle accuracies at 64K of near-replicates, by mixer, memory, distractor and window."""
    values = defaultdict(list)
    for row in paper.rows("complete-v2"):
        if row["reg_mode"] != "strong":
            key = tuple(row[axis] for axis in ("attn_type", "memory", "distractor", "window"))
            digits = round(0.8 * float(row["needle_64k"]))  # of 80
            values[key].append(digits / 0.8)
    return values


def of(frame: Any, measure: str, kind: str, memory: str) -> Any:
    return frame[(frame["measure"] == measure) & (frame["attn_type"] == kind) & (frame["memory"] == memory)]


class TestPower:
    @pytest.mark.thorough
    def test_what_is_drawn_is_seen_four_times_of_five(self, power: FigureData) -> None:
        row = of(power.frame, *NEEDLE).set_index("pairs").loc[10]
        assert row["design"] == 10, "distractor on against off: five modes, with and without a window"
        rng = np.random.default_rng(5)
        # the truth as the spread leaves it open: what was measured is W of it
        sigma = row["sd"] / np.sqrt(rng.chisquare(row["df"], 40_000) / row["df"])
        differences = rng.normal(row["detectable"], math.sqrt(2) * sigma[:, None], (40_000, 10))
        t = differences.mean(1) / (differences.std(1, ddof=1) / math.sqrt(10))
        assert np.mean(t > stats.t.ppf(0.975, 9)) == pytest.approx(0.8, abs=0.008)

    @pytest.mark.thorough
    def test_it_says_what_the_table_says(self, power: FigureData, published: Store) -> None:
        table = make_table("power", published, "printed-v2")
        for measure in ("Val", "Ndl@64K"):
            for row in table.rows:
                cells = dict(zip(table.columns, row, strict=True))
                if cells["Measure"] != measure:
                    continue
                line = of(power.frame, measure, cells["Type"], cells["Mem"]).set_index("pairs")["detectable"]
                needed = int(cells["10 pt / 0.02"])
                points = 10 if measure == "Ndl@64K" else 0.02
                assert all((line[pairs] <= points) == (pairs >= needed) for pairs in line.index)

    @pytest.mark.thorough
    def test_lines_rings_and_names_are_those_of_the_frame(self, power: FigureData) -> None:
        figure = figure_of(power)
        check_column(figure)
        assert [axes.get_title() for axes in figure.axes] == ["validation loss", "needle accuracy, 64K"]
        for axes, measure in zip(figure.axes, ("Val", "Ndl@64K"), strict=True):
            measure_rows = power.frame[power.frame["measure"] == measure]
            data_lines = [line for line in axes.lines if line.get_label() != "_guide" and len(line.get_xdata()) > 2]
            (bar,) = (line for line in axes.lines if line.get_label() == "_guide")
            # the 95 % range of a standard deviation of 12 degrees of freedom: chi-square quantiles 4.4038 and 23.3367
            foot, top = axes.transData.inverted().transform(axes.transAxes.transform(bar.get_xydata()))[:, 1]
            assert top / foot == pytest.approx(math.sqrt(23.3367 / 4.4038), rel=1e-4)
            drawn_lines = {tuple(line.get_ydata()) for line in data_lines if line.get_linestyle() != "None"}
            assert drawn_lines == {tuple(line["detectable"]) for _, line in measure_rows.groupby("stratum")}
            assert len(drawn_lines) == (6 if measure == "Val" else 4), "all runs of rope are at 0 % at 64K"
            assert [list(line.get_xdata()) for line in axes.lines].count([10, 10]) == 1
            texts = {text.get_text() for text in axes.texts}
            assert {"PoLAR, with memory", "PoLAR, no memory" + " *" * (measure != "Val")} <= texts
            assert ("RoPE, with memory" in texts) == (measure == "Val")
            recalls = {"PoLAR, with memory"} if measure != "Val" else set(measure_rows["stratum"])
            assert set(measure_rows[measure_rows["recalls"]]["stratum"]) == recalls
        assert not any(note.startswith("Left out, since no spread was seen") for note in power.notes)
        assert any("all runs have one accuracy without recall: RoPE" in note for note in power.notes)
        assert "PoLAR, with memory,\n28 percentage points\nwith 10 pairs" in texts

    @pytest.mark.thorough
    def test_constant_number_is_omitted(self, replicated: Store) -> None:
        figure_data = make_figure("power", replicated)
        assert set(figure_data.frame["measure"]) == {"Val", "Ndl@128"}
        check_column(figure_of(figure_data))


class TestSeeds:
    def test_runs_are_those_that_ought_to_agree(self, seeds: FigureData) -> None:
        for kind in ("polar", "nope", "rope"):
            for memory in ("off", "on"):
                groups = [values for key, values in near_replicates().items() if key[:2] == (kind, memory)]
                assert [len(values) for values in groups] == [4] * 4
                expected = sorted(value - mean(values) for values in groups for value in values)
                group_rows = of(seeds.frame, "Ndl@64K", kind, memory)
                assert sorted(group_rows["difference"]) == pytest.approx(expected, abs=1e-9)
                (sd,) = set(group_rows["sd"])
                assert sd == pytest.approx(math.sqrt(sum(d * d for d in expected) / 12), abs=1e-9)
                assert set(group_rows["kind"]) == {"near-replicates"}

    def test_an_accuracy_moves_at_least_as_its_trials_do(self, seeds: FigureData) -> None:
        rope = of(seeds.frame, "Ndl@64K", "rope", "on")
        assert set(rope["sd"]) == {0.0}
        share = 0.5 / (20 * 16 + 1)  # Jeffreys: none of 16 trials in any of 20 cells
        assert rope["floor"].tolist() == pytest.approx([100 * math.sqrt(share * (1 - share) / 16)] * 16)
        axes = figure_of(seeds).axes[1]
        bands = [band.get_paths()[0].get_extents() for band in axes.collections if isinstance(band, PolyCollection)]
        widths = [(band.x1 - band.x0) / 2 for band in bands]
        used = seeds.frame[seeds.frame["measure"] == "Ndl@64K"].drop_duplicates("place").sort_values("place")
        assert widths == pytest.approx(np.maximum(used["sd"], used["floor"]).tolist())
        assert [text.get_text() for text in axes.texts if "±" in text.get_text()][1] == "±19"

    @pytest.mark.thorough
    def test_seeds_come_before_near_replicates(self, replicated: Store) -> None:
        figure_data = make_figure("seeds", replicated)
        val = figure_data.frame[figure_data.frame["measure"] == "Val"]
        assert set(figure_data.frame["kind"]) == {"seeds"}
        for memory, apart in (("off", 0.01), ("on", 0.02)):
            group_rows = val[(val["memory"] == memory) & (val["attn_type"] == "nope")]
            assert group_rows["difference"].tolist() == pytest.approx([-apart, 0, apart])
            assert group_rows["sd"].tolist() == pytest.approx([apart] * 3)
        figure = figure_of(figure_data)
        check_column(figure)
        names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert names == ["PoLAR, no memory", "PoLAR, with memory", "NoPE, no memory", "NoPE, with memory"]
        marks = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
        assert sorted(x for line in marks for x in line.get_xdata()) == pytest.approx(sorted(val["difference"]))

    @pytest.mark.thorough
    def test_a_column_holds_the_published_ones(self, seeds: FigureData) -> None:
        check_column(figure_of(seeds))


class TestItems:
    def test_item_map_sorts_cells_and_trials(self, replicated: Store) -> None:
        figure_data = make_figure("items", replicated)
        frame = figure_data.frame
        assert set(frame["length"]) == {128}
        # polar: 8 of 20 digits with memory, 5 without; nope: 5 (4 of 15 for the seed that lacks a trial) and 3
        strata = frame.drop_duplicates("stratum").sort_values("row")["stratum"].tolist()
        assert strata == ["PoLAR, with memory", "PoLAR, no memory", "NoPE, with memory", "NoPE, no memory"]
        (lacking,) = (cell for cell, part in frame.groupby("cell") if len(part) == 3)
        nope = frame[frame["stratum"] == "NoPE, with memory"]
        assert nope.loc[nope["row"].idxmax(), "cell"] == lacking, "a missing answer lifts no cell"
        right = frame.groupby("trial")["value"].sum()
        columns = frame.drop_duplicates("column").set_index("column")["trial"]
        assert list(columns[range(4)]) == list(right.sort_values(ascending=False).index) == [2, 3, 0, 1]

    @pytest.mark.thorough
    def test_the_picture_is_the_frame(self, replicated: Store) -> None:
        figure_data = make_figure("items", replicated)
        figure = figure_of(figure_data)
        check_column(figure)
        axes, bar = figure.axes
        table = np.ma.concatenate([image.get_array() for image in axes.images])
        assert table.shape == (12 + 1, 4)
        table, last = table[:12], table[12]
        by_trial = figure_data.frame.groupby("column")["value"].mean()
        assert last.tolist() == pytest.approx(by_trial.to_list()), "a row of the means of trials"
        expected = figure_data.frame.pivot(index="row", columns="column", values="value").to_numpy()
        assert np.ma.filled(table, np.nan) == pytest.approx(expected, nan_ok=True)
        assert int(np.ma.count_masked(table)) == 1, "the trial that nobody asked of one seed"
        assert figure_data.frame["value"].max() == 1.0
        assert colors.same_color(axes.images[0].cmap(1.0), drawing.GOOD)
        legend_labels = [legend.get_text() for legend in figure.legends[0].get_texts()]
        assert legend_labels == ["no answer"]
        assert [label.get_text() for label in bar.get_xticklabels()] == ["0", "20", "40", "60", "80", "100"]
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert (labels[0], labels[-1]) == ("PoLAR, with memory, seed 0", "mean of all")
        means = [text.get_text() for text in axes.texts]
        # trials of shares 1, 0.4, 0.2, 0 have a standard error of 0.432 / 2
        memory = [*["40 ± 22 %"] * 3, *["25 ± 25 %"] * 3, *["25 ± 13 %"] * 2, "27 ± 18 % of 3 trials"]
        assert means == [*memory, *["15 ± 15 %"] * 3]
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "3", "0", "1"]

    @pytest.mark.thorough
    def test_item_maps_of_all_lengths_share_order(self, replicated: Store) -> None:
        figure_data = make_figure("items", replicated, lengths="all")
        assert set(figure_data.frame["length"]) == {64, 128}
        row_counts = figure_data.frame.groupby("cell")["row"].nunique()
        assert set(row_counts) == {1}
        assert len(figure_of(figure_data).axes) == 3

    def test_printed_numbers_have_no_trials(self, published: Store) -> None:
        with pytest.raises(ReportError, match="sweep printed-v2 has no stored needle trials") as error:
            make_figure("items", published, "printed-v2")
        assert "\n" not in str(error.value)


# Python 3.13 warns of databases of earlier tests, which nothing refers to any more
@pytest.mark.filterwarnings("error", "ignore:unclosed database:ResourceWarning")
class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "why"),
        [("power", "has two runs with a"), ("seeds", "has two runs with a"), ("items", "no stored needle trials")],
    )
    def test_single_runs_are_refused_in_single_line(self, every: Store, name: str, why: str) -> None:
        with pytest.raises(ReportError, match=why) as error:
            make_figure(name, every)
        assert "\n" not in str(error.value)

    def test_replicates_that_all_agree(self, empty: Store, make: Any, run: Any) -> None:
        cell, _ = make
        empty.record_revision("same", grid_text="x", grid_file="x.yaml", cells=[cell(i, seed=i) for i in range(3)])
        for i in range(3):
            run(empty, cell(i).id, "done", [Measurement(probe="val", metric="val_loss", value=3.0, unit="nats/token")])
        with pytest.raises(ReportError, match="no number of sweep same varies between replicates"):
            make_figure("power", empty)
        figure_data = make_figure("seeds", empty)
        assert set(figure_data.frame["difference"]) == {0.0}
        check_column(figure_of(figure_data))

    @pytest.mark.thorough
    def test_two_strata_and_forty_fit_a_column(self, empty: Store, make: Any, run: Any) -> None:
        cell, _ = make
        mixers = [f"mixer-of-number-{k}" for k in range(20)]
        levels = [(kind, memory, seed) for kind in mixers for memory in ("off", "on") for seed in (0, 1)]
        for name, group in (("few", levels[:4]), ("many", levels)):
            cells = [cell(i, attn_type=kind, memory=memory, seed=seed) for i, (kind, memory, seed) in enumerate(group)]
            empty.record_revision(name, grid_text="x", grid_file="x.yaml", cells=cells)
        for record in cells:
            loss = 3 + 0.01 * record.seed * (1 + int(record.id, 16) // 2)
            run(empty, record.id, "done", [Measurement(probe="val", metric="val_loss", value=loss, unit="nats/token")])
        for sweep in ("few", "many"):
            for name in ("power", "seeds"):
                check_column(figure_of(make_figure(name, empty, sweep)))
        figure_data = make_figure("power", empty, "many")
        texts = [text.get_text() for text in figure_of(figure_data).axes[0].texts]
        assert sum("mixer" in word for word in texts) == 10
        assert {"mixer-of-number-0, no memory", "mixer-of-number-19, with memory"} <= set(texts), (
            "of least and most noise"
        )
        assert any("5 strata with most" in note for note in figure_data.notes)
