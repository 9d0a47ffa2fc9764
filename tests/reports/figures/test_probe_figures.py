"""The figures of single probes: their numbers against the items that they come from, and how they are drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.figure_options import with_highlight
from atma_sweep.reports.figures.probes.position_nll import complete_line_means
from atma_sweep.reports.sweep_data import ReportError, load_sweep_data
from atma_sweep.results.paper import open_published
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Example, Measurement, Owner
from atma_sweep.results.store.store import Store
from pictures import COLUMN, check_column, figure_of
from probed import gates, memory_recall
from scipy import stats

Run = Callable[..., Any]


class TestPosition:
    def test_points_are_means_of_their_tokens_and_add_up_to_the_loss(self, empty: Store, make: Any) -> None:
        """700 tokens in runs of 16, the last of 12: from the ninth run on several make a point."""
        cell, _ = make
        empty.record_revision("s", grid_text="x", grid_file="x.yaml", cells=[cell(1)])
        losses = np.random.default_rng(0).normal(3, 1, (3, 44))
        record(empty, cell(1).id, 700, losses, 16)
        frame = make_figure("position-nll", empty).frame
        sizes = np.full(44, 16.0)
        sizes[-1] = 12
        assert (frame["stop"] - frame["start"]).sum() == 700
        assert list(frame["start"])[1:] == list(frame["stop"])[:-1]
        assert 8 < len(frame) < 44
        for _, point in frame.iterrows():
            runs = slice(int(point["start"]) // 16, -(-int(point["stop"]) // 16))
            each = (losses[:, runs] * sizes[runs]).sum(1) / sizes[runs].sum()
            assert point["value"] == pytest.approx(each.mean())
            # Student's t of three documents
            assert point["high"] - point["value"] == pytest.approx(4.302652729911275 * each.std(ddof=1) / 3**0.5)
        mean = (frame["value"] * (frame["stop"] - frame["start"])).sum() / 700
        assert mean == pytest.approx((losses * sizes).sum() / (3 * 700))

    @pytest.mark.thorough
    def test_position_line_ends_with_shortest_cell(self, empty: Store, make: Any) -> None:
        cell, _ = make
        cells = [cell(seed + 1, seed=seed) for seed in (0, 1)]
        empty.record_revision("s", grid_text="x", grid_file="x.yaml", cells=cells)
        for record_of_cell, length in zip(cells, (64, 128), strict=True):
            record(empty, record_of_cell.id, length, np.full((2, length // 16), 2.0 + record_of_cell.seed), 16)
        frame = make_figure("position-nll", empty).frame
        assert frame.groupby("cell")["stop"].max().to_dict() == {cells[0].id: 64, cells[1].id: 128}
        means = complete_line_means(frame)
        assert set(means["value"]) == {2.5}
        assert means["length"].max() < 64

    @pytest.mark.thorough
    def test_few_lines_share_a_panel(self, empty: Store, make: Any, probed: Store) -> None:
        assert set(make_figure("position-nll", probed).frame["panel"]) == {""}
        cell, _ = make
        levels = [(m, r, w) for m in ("nope", "fox") for r in ("off", "on") for w in ("off", "on")]
        cells = [cell(i + 20, attn_type=m, memory=r, window=w) for i, (m, r, w) in enumerate(levels)]
        empty.record_revision("many", grid_text="x", grid_file="x.yaml", cells=cells)
        for i, record_of_cell in enumerate(cells):
            record(empty, record_of_cell.id, 64, np.full((2, 4), 2.0 + i), 16)
        assert set(make_figure("position-nll", empty, "many").frame["panel"]) == {"nope", "fox"}

    @pytest.mark.thorough
    def test_a_highlighted_cell_is_named_at_its_end(self, probed: Store) -> None:
        look = with_highlight(COLUMN, load_sweep_data(probed), ["fox,seed=1"])
        (axes, *_) = figure_of(make_figure("position-nll", probed), look).axes
        assert "seed 1" in {text.get_text() for text in axes.texts}


class TestEvictableKeys:
    def test_shares_are_those_of_the_items(self, probed: Store) -> None:
        """Invented keys (`probed.gate_dynamics`) fade by half in a fixed number of tokens, by layer."""
        frame = make_figure("evictable-keys", probed).frame
        assert set(frame["threshold"]) == {1e-2, 1e-3, 1e-4}
        assert list(frame.groupby(["cell", "layer", "threshold"])["length"].agg(list).map(tuple).unique()) == [
            (64, 128, 256, 512, 1024)
        ]
        shares = frame.set_index(["cell", "layer", "length", "threshold"])["value"].unstack("threshold")
        assert (shares[1e-2] >= shares[1e-3]).all()
        longest = frame[(frame["length"] == 1024) & (frame["layer"] == 2)]
        for _, row in longest.iterrows():
            half_lives = (1 - row["value"]) * 1024 / -np.log2(row["threshold"])
            assert 20 * 2 ** (2 / 3) <= half_lives <= 40 * 2 ** (2 / 3) + 1e-9

    def test_a_line_per_layer_and_a_mean_per_threshold_in_percent(self, probed: Store) -> None:
        figure_data = make_figure("evictable-keys", probed)
        frame, cell = figure_data.frame, figure_data.draw_options["first"][0]
        figure = figure_of(figure_data, COLUMN)
        *layers, middle, loose, strict = (np.asarray(line.get_ydata(), dtype=float) for line in figure.axes[0].lines)
        wanted = frame[frame["cell"] == cell].pivot(index=["threshold", "layer"], columns="length", values="value")
        assert np.allclose(layers, 100 * wanted.loc[1e-3])
        for mean, threshold in ((middle, 1e-3), (loose, 1e-2), (strict, 1e-4)):
            assert np.allclose(mean, 100 * wanted.loc[threshold].mean())
        assert len({str(line._unscaled_dash_pattern) for line in figure.axes[0].lines[-3:]}) == 3
        assert "the 2 heads of a layer and 2 texts of 1K tokens" in figure_data.notes[0]

    def test_shares_that_rise_with_a_stricter_threshold_are_refused(self, empty: Store, make: Any) -> None:
        cell, _ = make
        empty.record_revision("odd", grid_text="x", grid_file="x.yaml", cells=[cell(1, attn_type="fox")])
        owner = Owner(name="ada", host="here", pid=1, started=0.0)
        attempt = empty.start_attempt(cell(1, attn_type="fox").id, owner=owner, fence=1)
        recorder, fields = DatabaseRecorder(empty, attempt.id, 1), {"probe": "gate_dynamics", "metric": "evictable"}
        shares = {1e-2: 0.5, 1e-3: 0.2, 1e-4: 0.25}
        recorder.examples(
            [
                Example(**fields, item=3, position=i, value=share, detail={"length": 64, "threshold": threshold})
                for i, (threshold, share) in enumerate(shares.items())
            ]
        )
        recorder.measurements([Measurement(**fields, value=0.2, n=64)])
        empty.finish_attempt(attempt.id, 1, "done")
        with pytest.raises(
            ReportError, match=r"looser threshold \(layer 3, length 64\), which is impossible; evaluate"
        ):
            make_figure("evictable-keys", empty, "odd")

    def test_without_counted_keys_the_error_names_the_probe(self, empty: Store, make: Any) -> None:
        cell, _ = make
        empty.record_revision("old", grid_text="x", grid_file="x.yaml", cells=[cell(1)])
        with pytest.raises(ReportError, match="evictable keys; evaluate with --probe gate_dynamics"):
            make_figure("evictable-keys", empty, "old")


class TestGateDynamics:
    def test_first_token_loses_nothing_at_its_own_gate(self, probed: Store) -> None:
        """Against exp of sums of logs of the gates after the first: that one acts on the state before it."""
        figure_data = make_figure("gate-dynamics", probed)
        frame, cell = figure_data.frame, figure_data.draw_options["first"][0]
        traced = frame[(frame["cell"] == cell) & (frame["part"] == "trace")].sort_values(["layer", "series", "x"])
        panel = figure_of(figure_data, COLUMN).axes[2 * len(figure_data.draw_options["first"])]
        gates = [rows["value"].to_numpy() for _, rows in traced.groupby(["layer", "series"])]
        assert any(gate[0] < 1 for gate in gates)
        for line, gate in zip(panel.lines, gates, strict=True):
            assert line.get_ydata() == pytest.approx(np.exp([0.0, *np.cumsum(np.log(gate[1:]))]))


class TestRetention:
    def test_half_lives_follow_from_retention(self, probed: Store) -> None:
        frame = make_figure("retention", probed).frame
        assert set(frame["part"]) == {"mixer", "memory"}
        for _, row in frame.iterrows():
            if row["retention"] == 1:
                assert np.isnan(row["half_life"])
            else:
                assert row["retention"] ** row["half_life"] == pytest.approx(0.5)
        mine = frame[(frame["part"] == "mixer") & (frame["cell"] == frame["cell"].iloc[0])]
        assert [(r["layer"], r["head"], r["channel"]) for _, r in mine.iterrows()] == [
            (layer, head, 0) for layer in (2, 6) for head in range(4)
        ]

    @pytest.mark.thorough
    def test_retention_map_sorts_channels_per_head(self, empty: Store, make: Any) -> None:
        cell, _ = make
        empty.record_revision("s", grid_text="x", grid_file="x.yaml", cells=[cell(1, attn_type="wall")])
        attempt = empty.start_attempt(cell(1).id, owner=Owner(name="ada", host="here", pid=1, started=0.0), fence=1)
        gates(DatabaseRecorder(empty, attempt.id, 1), 0.5, channels=3, heads=2)
        empty.finish_attempt(attempt.id, 1, "done")
        figure_data = make_figure("retention", empty)
        mine = figure_data.frame[figure_data.frame["part"] == "mixer"]
        assert [(r["layer"], r["head"], r["channel"]) for _, r in mine.iterrows()] == [
            (layer, head, channel) for layer in (2, 6) for head in (0, 1) for channel in (0, 1, 2)
        ]
        wall, memory, *_ = figure_of(figure_data).axes
        assert wall.images[0].get_array().shape == (4, 3)
        assert memory.images[0].get_array().shape == (2, 2)
        assert all(list(row) == sorted(row) for row in wall.images[0].get_array())

    @pytest.mark.thorough
    def test_first_cells_or_highlighted_ones_are_drawn(self, probed: Store) -> None:
        figure_data = make_figure("retention", probed)
        titles = {axes.get_title() for axes in figure_of(figure_data).axes} - {""}
        gates = ("mixer gates", "memory gates")
        assert titles == {f"{part}\n{mixer}" for part in gates for mixer in ("FoX", "NoPE")}
        look = with_highlight(COLUMN, load_sweep_data(probed), ["fox,seed=1"])
        titles = {axes.get_title().replace("\n", " ") for axes in figure_of(figure_data, look).axes} - {""}
        assert titles == {f"{part} FoX, seed 1" for part in gates}

    def test_half_lives_are_written_into_their_squares(self, probed: Store) -> None:
        figure_data = make_figure("retention", probed)
        lives = figure_data.frame[figure_data.frame["cell"] == figure_data.draw_options["first"][0]]
        lives = lives[lives["part"] == "mixer"].sort_values(["layer", "head"])["half_life"]
        written = [text.get_text() for text in figure_of(figure_data).axes[0].texts]
        expected = ["≥ 1M" if math.isnan(life) else f"{life:.0f}" for life in lives]
        assert [text for text in written if text != "a"] == expected


class TestPasskey:
    def test_squares_are_means_over_trials_of_each_depth(self, probed: Store) -> None:
        """The items of `probed.passkey`: 20 digits a depth, of which 20 share + 3 place are right, in trials of five."""
        frame = make_figure("passkey", probed).frame
        assert len(frame) == 4 * 3 * 3
        cells = list(dict.fromkeys(frame["cell"]))
        for _, row in frame.iterrows():
            right = min(20, 5 * cells.index(row["cell"]) + 3 * int(2 * row["depth"]))
            assert row["value"] == pytest.approx(right / 20)
            assert row["exact"] == pytest.approx(right // 5 / 4)
            assert (row["trials"], row["answers"], row["constant"]) == (4, 20, 0.2)
            shares = [min(5, max(0, right - 5 * trial)) / 5 for trial in range(4)]
            assert row["se"] == pytest.approx(stats.sem(shares))

    def test_caption_has_runs_and_error_of_the_trials(self, probed: Store) -> None:
        figure_data = make_figure("passkey", probed)
        squares = figure_data.frame.groupby(["configuration", "length", "depth"])["se"]
        errors = [100 * math.hypot(*group) / len(group) for _, group in squares]
        assert figure_data.notes[0] == (
            "Share of the digits of a passkey that are recalled (colour and number, in %); each square: mean over 2 seeds "
            "of a configuration, 4 trials of 5 digits per seed. Standard error of a square, from the spread of "
            "its trials, taken as independent across seeds: median "
            f"{np.median(errors):.0f}, at most {max(errors):.0f} points. Depth: share of the text that precedes the digits."
        )

    @pytest.mark.thorough
    def test_axis_label_is_between_maps_and_bar(self, probed: Store) -> None:
        """Every map of the lowest row has the label of its axis, which ends above the colour bar."""
        figure = figure_of(make_figure("passkey", probed))
        maps, (bar,) = [axes for axes in figure.axes if axes.get_title()], [a for a in figure.axes if not a.get_title()]
        assert [axes.get_xlabel() for axes in maps] == ["context length, tokens"] * 2
        assert bar.get_xlabel() == "digits recalled"
        top = bar.get_window_extent().y1
        for axes in maps:
            box = axes.xaxis.label.get_window_extent()
            assert axes.get_window_extent().y0 > box.y0 > top

    @pytest.mark.thorough
    def test_seeds_are_averaged_and_a_cell_that_stands_out_is_alone(self, probed: Store) -> None:
        figure_data = make_figure("passkey", probed)
        maps = [axes for axes in figure_of(figure_data).axes if axes.get_title()]
        assert [axes.get_title() for axes in maps] == ["FoX", "NoPE"]
        mean = figure_data.frame.groupby(["configuration", "depth", "length"], sort=False)["value"].mean()
        for axes, (_, values) in zip(maps, mean.groupby("configuration", sort=False), strict=True):
            shown = axes.images[0].get_array()
            assert shown.ravel().tolist() == pytest.approx(values.sort_index().tolist())
            # 64 is the training length: the line stands between it and 128
            assert {line.get_xdata()[0] for line in axes.lines} == {0.5}
        look = with_highlight(COLUMN, load_sweep_data(probed), ["nope,seed=0"])
        assert [axes.get_title() for axes in figure_of(figure_data, look).axes if axes.get_title()] == ["NoPE, seed 0"]


class TestAttentionMap:
    @pytest.mark.thorough
    def test_every_weight_stands_at_its_query_and_key(self, probed: Store) -> None:
        figure_data = make_figure("attention-map", probed)
        frame = figure_data.frame
        assert len(frame) == 4 * 4 * 8 * 9 // 2
        assert (frame["key"] <= frame["query"]).all()
        sums = frame.groupby(["cell", "layer", "head", "query"])["weight"].sum()
        assert sums.to_numpy() == pytest.approx(1.0)
        look = with_highlight(COLUMN, load_sweep_data(probed), ["nope,seed=1"])
        maps = [axes for axes in figure_of(figure_data, look).axes if axes.get_title()]
        assert [axes.get_title().split("\n")[0] for axes in maps] == [
            f"layer {layer}, head {head}" for layer in (2, 6) for head in (0, 1)
        ]
        mine = frame[frame["cell"] == look.highlight[0]]
        for axes, (_, rows) in zip(maps, mine.groupby(["layer", "head"]), strict=True):
            shown = axes.images[0].get_array()
            assert shown.shape == (8, 8)
            assert shown.mask.tolist() == np.triu(np.ones((8, 8), bool), 1).tolist()
            for query, key, weight in rows[["query", "key", "weight"]].itertuples(index=False):
                assert shown[query, key] == weight

    @pytest.mark.thorough
    def test_axes_show_tokens_of_a_letter_each(self, probed: Store) -> None:
        figure_data = make_figure("attention-map", probed)
        assert set(figure_data.frame["token"]) == {""}
        for letters, shown in (
            ("wri01wr0", list("wri01wr0")),
            (["the", "cat"] * 4, ["the", "cat"] * 4),
            ("wri01w ?", [str(position) for position in range(8)]),
        ):
            figure_data.frame["token"] = [letters[query] for query in figure_data.frame["query"]]
            maps = [axes for axes in figure_of(figure_data).axes if axes.get_title()]
            for axes in maps:
                labels = axes.get_xticklabels(), axes.get_yticklabels()
                assert [[label.get_text() for label in every] for every in labels] == [shown, shown]

    @pytest.mark.thorough
    def test_map_of_a_cell_is_its_most_selective_head(self, probed: Store) -> None:
        figure_data = make_figure("attention-map", probed)
        panels = [axes for axes in figure_of(figure_data).axes if axes.get_title()]
        assert len(panels) == 2
        for axes, mixer, cell in zip(panels, ("FoX", "NoPE"), (f"{1:012x}", f"{3:012x}"), strict=True):
            rows = figure_data.frame[figure_data.frame["cell"] == cell]
            rows = rows[rows["layer"] == rows["layer"].max()]
            keys = rows[rows["query"] >= 4].drop_duplicates(["head", "query"]).groupby("head")["keys"].mean()
            head = keys.index[int(np.argmin(keys))]
            title = f"{mixer}\nlayer {rows['layer'].iloc[0]}, head {head}\n{keys[head]:.1f} keys ({keys.mean():.1f})"
            assert axes.get_title() == title
            shown = axes.images[0].get_array()
            for row in rows[rows["head"] == head].itertuples():
                assert shown[row.query, row.key] == row.weight
            assert axes.get_xticks()[0] == axes.get_yticks()[0] == 0


class TestMemoryRecall:
    def test_points_are_means_over_heads_or_rows_with_their_interval(self, probed: Store) -> None:
        """The items of `probed.memory_recall`: share (1 + i) / n, i counting the heads of both layers, or the rows."""
        frame = make_figure("memory-recall", probed).frame
        assert len(frame) == 4 * (3 + 2)
        cells = list(dict.fromkeys(frame["cell"]))
        for _, row in frame.iterrows():
            share, pairs = cells.index(row["cell"]) / 4, row["pairs"]
            units = 4 if row["panel"] == "the memory alone" else 3
            each = np.minimum(1, share * (1 + np.arange(units)) / pairs)
            assert row["value"] == pytest.approx(each.mean())
            assert (row["n"], row["chance"]) == (units, 1 / pairs)
            # Student's t of three and of two degrees of freedom
            half = {4: 3.182446305284263, 3: 4.302652729911275}[units] * each.std(ddof=1) / units**0.5
            assert row["low"] == pytest.approx(max(0, each.mean() - half))
            assert row["high"] == pytest.approx(min(1, each.mean() + half))

    def test_recall_lines_name_memories(self, empty: Store, make: Any) -> None:
        cell, _ = make
        names = {"off": "no memory", "on": "gated delta", "kda": "KDA", "omega": "Omega", "mine": "memory mine"}
        cells = [cell(i + 1, memory=memory) for i, memory in enumerate(names)]
        empty.record_revision("s", grid_text="x", grid_file="x.yaml", cells=cells)
        for i, record in enumerate(cells):
            attempt = empty.start_attempt(record.id, owner=Owner(name="ada", host="here", pid=1, started=0.0), fence=1)
            recorder = DatabaseRecorder(empty, attempt.id, 1)
            if record.levels["memory"] == "off":
                reason = "n/a: the network has no memory"
                recorder.measurements([Measurement(probe="memory_recall", metric="share", reason=reason)])
                fields = {"probe": "memory_recall", "metric": "context_share"}
                recorder.examples([Example(**fields, item=0, value=0.5, detail={"pairs": 2, "chance": 0.5})])
                recorder.measurements([Measurement(**fields, value=0.5)])
            else:
                memory_recall(recorder, i / 4)
            empty.finish_attempt(attempt.id, 1, "done")
        figure_data = make_figure("memory-recall", empty)
        figure = figure_of(figure_data)
        check_column(figure)
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [
            "no memory (b only)", *list(names.values())[1:], "chance level, a random value", "95 % interval",
        ]  # fmt: skip
        alone, context = figure.axes
        inks = {line.get_color() for line in context.lines if len(line.get_xdata()) <= 2} - {"#ffffff"}
        assert len(inks) == 5 + 1, "every memory has a colour of its own, and so has chance"
        assert not set(figure_data.frame[figure_data.frame["first"] == "off"]["panel"]) - {"in context"}
        chance = next(line for line in alone.lines if line.get_color() == drawing.GREY)
        assert list(zip(chance.get_xdata(), chance.get_ydata(), strict=True)) == [(2, 50), (4, 25), (8, 12.5)]

    def test_pairs_that_are_not_measured_are_in_the_caption(self, probed: Store) -> None:
        figure_data = make_figure("memory-recall", probed)
        pairs = {name: set(rows["pairs"]) for name, rows in figure_data.frame.groupby("panel")}
        assert pairs["the memory alone"] - pairs["in context"] == {8}
        assert "Not measured: 8 pairs (in context)." in figure_data.notes


class TestExtrapolation:
    def test_single_length_is_a_row_per_configuration(self) -> None:
        """Against the table: rows by perplexity, and bars from the printed deviations of four runs."""
        figure_data = make_figure("extrapolation", open_published(), "printed-tra")
        printed = {
            "Diff": (29.46, 0.12), "TRA": (30.04, 0.32), "RoPE": (30.11, 0.04), "CoPE": (30.20, 0.09), "FoX": (30.30, 0.04),
            "REL": (31.27, 0.11), "APE": (31.61, 0.16), "NoPE": (31.74, 0.11), "randomized positions": (32.09, 0.07),
        }  # fmt: skip
        figure = figure_of(figure_data)
        (axes,) = figure.axes
        check_column(figure)
        assert [label.get_text() for label in axes.get_yticklabels()] == list(printed)
        assert [float(line.get_xdata()[0]) for line in axes.lines] == [mean for mean, _ in printed.values()]
        assert axes.yaxis_inverted(), "the lowest perplexity is on top"
        bars = [bar.get_segments()[0][:, 0] for bar in axes.collections]
        for bar, (mean, sd) in zip(bars, printed.values(), strict=True):
            assert bar == pytest.approx(stats.t.interval(0.95, 3, loc=mean, scale=sd / 2))
        assert figure_data.notes[0] == (
            "9 configurations, lowest perplexity on top. Points: means over seeds (runs per mean: 4)."
        )

    @pytest.mark.parametrize("length_count", [1, 3])
    def test_lines_and_rows_differ_by_positions(self, empty: Store, make: Any, length_count: int) -> None:
        """Lines of one mixer whose positions differ have different dashes or markers; rows different labels."""
        pairs = [(kind, positions) for kind in ("nope", "rope") for positions in ("none", "ape", "label")]
        cells = [
            dataclasses.replace(record, axes=record.axes | {"model.positions": positions, "data.order": str(i % 2)})
            for i, (kind, positions) in enumerate(pairs)
            for record in [make[0](i + 1, attn_type=kind)]
        ]
        empty.record_revision("placed", grid_text="x", grid_file="x.yaml", cells=cells)
        for i, record in enumerate(cells):
            attempt = empty.start_attempt(record.id, owner=Owner(name="ada", host="here", pid=1, started=0.0), fence=1)
            DatabaseRecorder(empty, attempt.id, 1).measurements(
                [
                    Measurement(probe="extrapolation", metric="perplexity", length=128 * 2**k, value=20.0 + i + k, n=10)
                    for k in range(length_count)
                ]
            )
            empty.finish_attempt(attempt.id, 1, "done")
        figure = figure_of(make_figure("extrapolation", empty, "placed"))
        if length_count == 1:
            labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
            assert len(set(labels)) == 6
            return
        looks = [
            (axes.get_title(), line.get_color(), str(line._unscaled_dash_pattern), line.get_marker())
            for axes in figure.axes
            for line in axes.lines
            if len(line.get_xdata()) == length_count and line.get_color() != "#ffffff"
        ]
        assert len(looks) == len(set(looks)) == 6

    @pytest.mark.thorough
    def test_perplexity_axis_is_log_for_wide_range(self, probed: Store, empty: Store, make: Any) -> None:
        figure_data = make_figure("extrapolation", probed)
        assert sorted(figure_data.frame["value"]) == pytest.approx(
            sorted(np.exp(3 + i / 10 + length / 1000) for i in range(4) for length in (64, 128, 256)), rel=1e-6
        )
        assert set(figure_data.frame["panel"]) == {""}
        assert figure_of(figure_data).axes[0].get_yscale() == "linear"
        cells = [make[0](i + 1, attn_type=kind) for i, kind in enumerate(("tra", "rope"))]
        empty.record_revision("far", grid_text="x", grid_file="x.yaml", cells=cells)
        for record, worse in zip(cells, (1, 4), strict=True):
            attempt = empty.start_attempt(record.id, owner=Owner(name="ada", host="here", pid=1, started=0.0), fence=1)
            DatabaseRecorder(empty, attempt.id, 1).measurements(
                [
                    Measurement(
                        probe="extrapolation", metric="perplexity", length=length, value=30.0 * worse**index, n=10
                    )
                    for index, length in enumerate((128, 256, 512))
                ]
            )
            empty.finish_attempt(attempt.id, 1, "done")
        figure = figure_of(make_figure("extrapolation", empty, "far"))
        assert figure.axes[0].get_yscale() == "log"
        check_column(figure)


def record(store: Store, cell_id: str, length: int, losses: np.ndarray, run: int) -> None:
    """Record a finished attempt of the probe position_nll with these losses [documents, runs]."""
    attempt = store.start_attempt(cell_id, owner=Owner(name="ada", host="here", pid=1, started=0.0), fence=1)
    recorder, fields = DatabaseRecorder(store, attempt.id, 1), {"probe": "position_nll", "length": length}
    recorder.examples(
        [
            Example(**fields, metric="nats", item=item, position=position, value=float(loss))
            for item, row in enumerate(losses)
            for position, loss in enumerate(row)
        ]
    )
    values = {"nats": float(losses.mean()), "bin": float(run)}
    recorder.measurements([Measurement(**fields, metric=name, value=value) for name, value in values.items()])
    store.finish_attempt(attempt.id, 1, "done")
