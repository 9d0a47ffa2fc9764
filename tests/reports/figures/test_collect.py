"""The numbers behind the figures: against the shipped CSV, formulas by hand, and the tables."""

import math
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from statistics import fmean, stdev
from typing import Any

import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas.base import FigureData, frame_sha256
from atma_sweep.reports.figures.canvas.length_frames import line_means
from atma_sweep.reports.figures.loss import exponential_mean
from atma_sweep.reports.stats.untrained_formulas import state_norms
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.results import paper
from atma_sweep.results.shipped import shipped_store
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Measurement, Owner, Provenance
from atma_sweep.results.store.schema import AttemptRow
from atma_sweep.results.store.store import Store
from sqlalchemy import update
from synthetic import synthetic_sweep

AXES = ("attn_type", "reg_mode", "distractor", "memory", "window")
START = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
Rows = list[dict[str, Any]]


def rows(figure_data: FigureData) -> Rows:
    records: Rows = figure_data.as_json()["rows"]
    return records


@pytest.fixture(scope="module")
def needles(published: Store) -> FigureData:
    return make_figure("1", published, "printed-v2")


class TestLengths:
    @pytest.mark.thorough
    def test_every_needle_accuracy_is_that_of_the_logs(self, needles: FigureData) -> None:
        expected = defaultdict(list)
        for row in paper.rows("lengths"):
            line = f"memory {row['memory']}, window {row['window']}"
            expected[row["attn_type"], line, int(row["length"])].append(float(row["needle"]) / 100)
        values_by_key = defaultdict(list)
        for row in rows(needles):
            values_by_key[row["panel"], row["line"], row["length"]].append(row["value"])
            assert (row["trained"], row["n"], row["ratio"]) == (2048, 80, row["length"] / 2048)
        assert values_by_key.keys() == expected.keys()
        for key, values in values_by_key.items():
            assert sorted(values) == pytest.approx(sorted(expected[key]), abs=1e-6)

    def test_line_is_mean_of_cells_with_interval(self, needles: FigureData) -> None:
        """The interval is over the ten configurations, computed by hand, not over the 800 digits."""
        means = line_means(needles.frame)
        selected = (means["panel"] == "polar") & (means["line"] == "memory on, window off") & (means["length"] == 65536)
        (line,) = means[selected].to_dict("records")
        logged = [
            round(float(row["needle"]) / 1.25) / 80
            for row in paper.rows("lengths")
            if [row[name] for name in ("attn_type", "memory", "window", "length")] == ["polar", "on", "off", "65536"]
        ]
        assert (line["cells"], line["configurations"], len(logged)) == (10, 10, 10)
        assert line["value"] == pytest.approx(fmean(logged), abs=1e-12)
        half = 2.262157162798 * stdev(logged) / math.sqrt(10)
        assert (line["low"], line["high"]) == pytest.approx((fmean(logged) - half, fmean(logged) + half), abs=1e-9)
        assert [round(100 * line[side], 1) for side in ("value", "low", "high")] == [63.0, 50.6, 75.4]
        assert "Bars: 95 % t intervals across configurations" in needles.notes[0]

    def test_a_single_cell_has_the_interval_of_its_trials(self, needles: FigureData) -> None:
        best = needles.frame[(needles.frame["value"] == 0.925) & (needles.frame["length"] == 65536)]
        assert [round(100 * float(best[side].iloc[0]), 1) for side in ("low", "high")] == [70.1, 98.5]
        (alone,) = line_means(best).to_dict("records")
        assert (alone["low"], alone["high"]) == (best["low"].iloc[0], best["high"].iloc[0])
        assert (alone["interval"], alone["cells"]) == ("trials", 1)

    def test_seeds_are_averaged_before_configurations_are_counted(self, needles: FigureData) -> None:
        """Three configurations, of which one has three seeds and another two; a line of one configuration has its seeds'."""
        base = needles.frame[(needles.frame["panel"] == "polar") & (needles.frame["length"] == 65536)]
        base = base[base["line"] == base["line"].iloc[0]].iloc[:6]
        names, values = ["a", "a", "a", "b", "b", "c"], [0.1, 0.2, 0.6, 0.4, 0.6, 0.9]
        (line,) = line_means(base.assign(configuration=names, value=values)).to_dict("records")
        means = [0.3, 0.5, 0.9]
        half = 4.302652729911 * stdev(means) / math.sqrt(3)
        assert (line["value"], line["cells"], line["configurations"]) == (pytest.approx(fmean(means)), 6, 3)
        assert (line["low"], line["high"]) == (0, pytest.approx(min(1, fmean(means) + half)))
        assert line["interval"] == "configurations"
        (line,) = line_means(base.iloc[:3].assign(configuration="a", value=values[:3])).to_dict("records")
        half = 4.302652729911 * stdev(values[:3]) / math.sqrt(3)
        assert (line["low"], line["high"]) == (0, pytest.approx(min(1, 0.3 + half)))
        assert line["interval"] == "seeds"

    def test_losses_are_those_of_the_logs(self, published: Store) -> None:
        expected = sorted(
            (probe, int(row["length"]), float(row[probe]))
            for row in paper.rows("lengths")
            for probe in ("clean", "junk")
        )
        figure_data = make_figure("length", published, "printed-v2")
        assert sorted((row["probe"], row["length"], row["value"]) for row in rows(figure_data)) == expected

    def test_the_trace_names_every_cell_and_attempt(self, needles: FigureData, published: Store) -> None:
        cells = published.cell_states("printed-v2")
        trace = needles.trace
        assert trace["cells"] == {cell.cell_id: [cell.attempt_id] for cell in cells}
        (source,) = trace["sources"]
        assert (source["gpu"], len(source["attempts"])) == ("NVIDIA L4", 120)
        assert (trace["figure"], trace["sweep"], trace["revision"]) == ("needle", "printed-v2", 1)
        assert trace["data"] == frame_sha256(needles.frame)
        changed = needles.frame.assign(value=needles.frame["value"] + 1e-15)
        assert frame_sha256(changed) != trace["data"]

    def test_unknown_training_length_falls_back_to_shortest(self, store: Store) -> None:
        figure_data = make_figure("needle", store)
        assert {row["trained"] for row in rows(figure_data)} == {128}
        assert {(row["length"], row["ratio"]) for row in rows(figure_data)} == {
            (128, 1.0),
            (2048, 16.0),
            (65536, 512.0),
        }


class TestDiagnostics:
    def test_count_map_is_the_formula(self, published: Store) -> None:
        drawn = rows(make_figure("2a", published, "printed-v2"))
        at = {row["m"]: row["mag"] for row in drawn if row["source"] == "init"}
        assert (at[0], max(at)) == (0.0, 1000)
        slope = math.log1p(math.exp(-1.5))
        for source, factor in (("init", 1.0), ("0.5 × init", 0.5), ("2 × init", 2.0)):
            curve = [(row["m"], row["mag"]) for row in drawn if row["source"] == source]
            expected = [math.tanh(factor * slope * math.log1p(m)) for m, _ in curve]
            assert [mag for _, mag in curve] == pytest.approx(expected)
        # docs/reference/mechanisms.md, "Polar attention"
        assert [round(at[1], 4), round(at[1000], 4)] == [0.1387, 0.8835]

    def test_state_norms_of_printed_sweep_are_initial(self, published: Store) -> None:
        figure_data = make_figure("2b", published, "printed-v2")
        for row in rows(figure_data):
            formula = state_norms(
                [row["length"]], erases="delta" in row["metric"], keeps=row["metric"].endswith("_kept")
            )
            assert row["value"] == formula[0]
        assert len(rows(figure_data)) == 4 * (4 * 10 + 1)
        remembering = [cell.cell_id for cell in published.cell_states("printed-v2") if cell.levels["memory"] == "on"]
        assert sorted(figure_data.trace["cells"]) == sorted(remembering)
        assert "The trained weights are not available" in " ".join(figure_data.notes)

    def test_learned_slopes_join(self, store: Store, make: Any, run: Callable[..., None]) -> None:
        cell, _ = make
        cells = [cell(21), cell(22, attn_type="nope")]
        store.record_revision("learned", grid_text="x", grid_file="x.yaml", cells=cells)
        slopes = {"beta": 0.5, "beta_lowest": 0.25, "beta_highest": 1.0}
        run(store, cells[0].id, "done", [Measurement(probe="count_map", metric=k, value=v) for k, v in slopes.items()])
        run(store, cells[1].id, "done", [Measurement(probe="count_map", metric="beta", reason="n/a: no Polar layer")])
        learned = [row for row in rows(make_figure("count-map", store, "learned")) if row["source"] != "init"]
        assert {(row["source"], row["lowest"], row["highest"]) for row in learned} == {("slug-21", 0.25, 1.0)}
        for row in learned:
            grown = (1 + row["m"]) ** 1.0  # tanh(ln(x) / 2) = (x - 1) / (x + 1)
            assert row["mag"] == pytest.approx((grown - 1) / (grown + 1), abs=1e-12)

    def test_state_norms(self, store: Store, make: Any, run: Callable[..., None]) -> None:
        cell, _ = make
        store.record_revision("norms", grid_text="x", grid_file="x.yaml", cells=[cell(31)])
        norms = {("delta_norm", 64): 9.5, ("delta_norm", 128): 10.5, ("hebbian_norm_kept", 64): 70.25}
        run(
            store,
            cell(31).id,
            "done",
            [
                Measurement(probe="state_norm", metric=metric, length=length, value=value, unit="frobenius", n=8)
                for (metric, length), value in norms.items()
            ],
        )
        value_by_key = {(row["metric"], row["length"]): row["value"] for row in rows(make_figure("2b", store, "norms"))}
        assert value_by_key == norms

    def test_states_of_different_memories_are_not_averaged(
        self, store: Store, make: Any, run: Callable[..., None]
    ) -> None:
        cell, _ = make
        cells = [cell(35 + index, memory=memory) for index, memory in enumerate(("on", "kda", "omega"))]
        store.record_revision("three", grid_text="x", grid_file="x.yaml", cells=cells)
        for i, record in enumerate(cells):
            norm = {"probe": "state_norm", "metric": "delta_norm", "unit": "frobenius", "n": 8}
            run(store, record.id, "done", [Measurement(**norm, length=64, value=10.0**i)])
        value_by_panel = {row["panel"]: row["value"] for row in rows(make_figure("state-norm", store, "three"))}
        assert value_by_panel == {"PoLAR, gated delta": 1.0, "PoLAR, KDA": 10.0, "PoLAR, Omega": 100.0}


class TestTraining:
    def test_the_newest_curve_of_every_cell(self, store: Store, make: Any) -> None:
        cell, _ = make
        record = cell(41)
        store.record_revision("curves", grid_text="x", grid_file="x.yaml", cells=[record])
        for offset, end in ((1.0, "interrupted"), (0.0, "done")):
            attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
            recorder = DatabaseRecorder(store, attempt.id, 1)
            recorder.curve(
                [
                    CurvePoint(step=step, tokens=10 * step, wall_s=step / 2, train_loss=offset + 1000 / step)
                    for step in range(1, 121)
                ]
            )
            store.finish_attempt(attempt.id, 1, end)
        figure_data = make_figure("loss", store, "curves")
        records = rows(figure_data)
        assert [(row["tokens"], row["wall_s"]) for row in records] == [(10 * s, s / 2) for s in range(1, 121)]
        assert {row["attempt"] for row in records} == {attempt.id}
        # 120 points are smoothed over a span of 3: each weighs half of the next
        assert records[0]["smoothed"] == 1000
        assert records[2]["smoothed"] == pytest.approx((1000 / 4 + 500 / 2 + 1000 / 3) / (1 / 4 + 1 / 2 + 1))
        assert "exponential mean of span 3 points" in figure_data.notes[1]

    def test_smoothing_of_width_1_changes_nothing(self) -> None:
        assert exponential_mean([3.0, 1.0, 2.0], 1).tolist() == [3.0, 1.0, 2.0]

    def test_successive_attempts_share_a_lane(self, store: Store, make: Any) -> None:
        cell, _ = make
        cells = [cell(51), cell(52), cell(53)]
        store.record_revision("times", grid_text="x", grid_file="x.yaml", cells=cells)
        for record, (start, end, state) in zip(
            cells, ((0, 10, "failed"), (5, 20, "done"), (10, 30, "diverged")), strict=True
        ):
            attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h1", pid=1, started=0.0), fence=1)
            DatabaseRecorder(store, attempt.id, 1).provenance(
                Provenance(config={}, seed=0, device="cuda", gpu_name="H200")
            )
            store.finish_attempt(attempt.id, 1, state)
            times = {"started_at": START + timedelta(minutes=start), "finished_at": START + timedelta(minutes=end)}

            def move(session: Any, which: int = attempt.id, times: dict[str, Any] = times) -> None:
                session.execute(update(AttemptRow).where(AttemptRow.id == which).values(**times))

            store.write(move)
        lanes = [
            (row["gpu"], row["lane"], row["start"], row["end"], row["state"])
            for row in rows(make_figure("timeline", store, "times"))
        ]
        assert lanes == [
            ("H200", 0, 0, 600, "failed"),
            ("H200", 1, 300, 1200, "done"),
            ("H200", 0, 600, 1800, "diverged"),
        ]


class TestComparisons:
    def test_front_has_undominated_points(self, published: Store) -> None:
        records = rows(make_figure("pareto", published, "printed-v2"))
        logged = {tuple(row[axis] for axis in AXES): row for row in paper.rows("runs")}
        for quality, sign in (("Val", -1), ("Ndl@64K", 1)):
            points = [row for row in records if row["quality"] == quality]
            assert len(points) == 120
            for point in points:
                seconds = float(logged[tuple(point[axis] for axis in AXES)]["train_seconds"])
                assert point["speed"] == pytest.approx(seconds / 3600)
                beaten = any(
                    rival["speed"] <= point["speed"]
                    and sign * rival["value"] >= sign * point["value"]
                    and (rival["speed"], rival["value"]) != (point["speed"], point["value"])
                    for rival in points
                )
                assert point["front"] == (not beaten and (quality == "Val" or point["value"] > 17.5))

    def test_front_bars_and_probabilities_follow_the_run_noise(self, published: Store) -> None:
        records = rows(make_figure("pareto", published, "printed-v2"))
        # by hand: the pooled deviation of the four near-replicates without the strong mode, of polar with memory
        groups = defaultdict(list)
        for row in paper.rows("complete-v2"):
            if (row["attn_type"], row["memory"]) == ("polar", "on") and row["reg_mode"] != "strong":
                groups[row["distractor"], row["window"]].append(float(row["val_loss"]))
        squares = sum((value - fmean(values)) ** 2 for values in groups.values() for value in values)
        sd = math.sqrt(squares / sum(len(values) - 1 for values in groups.values()))
        mine = [row for row in records if (row["attn_type"], row["memory"], row["quality"]) == ("polar", "on", "Val")]
        assert [row["sd"] for row in mine] == pytest.approx([sd] * 20, abs=1e-6)
        assert {row["speed_sd"] for row in records} == {None}, "a regularizer changes the speed"
        for quality in ("Val", "Ndl@64K"):
            points = [row for row in records if row["quality"] == quality]
            # the fastest of all is on the front of losses, as speeds are taken as measured; with 1 % of the digits it
            # is hardly ever above the constant-digit baseline
            fastest = min(points, key=lambda row: row["speed"])
            assert fastest["p_front"] == 1.0 if quality == "Val" else fastest["p_front"] < 0.05
            # a front has at least a point in every draw
            assert sum(row["p_front"] for row in points) >= 1

    def test_bars_are_standard_errors_of_means_over_seeds(self, empty: Store) -> None:
        """By hand: the deviations of seeds from their configuration, pooled over a mixer and memory, over sqrt(4)."""
        cells = synthetic_sweep(empty, 64, 1, seeds=4)
        data = make_figure("pareto", empty)
        losses = {value.cell_id: value.value for value in empty.values("big") if value.metric == "val_loss"}
        squares, free = 0.0, 0
        for start in range(0, 64, 4):
            if (cells[start].levels["attn_type"], cells[start].levels["memory"]) == ("polar", "on"):
                values = [losses[cell.id] for cell in cells[start : start + 4]]
                squares, free = squares + sum((value - fmean(values)) ** 2 for value in values), free + 3
        mine = [row for row in rows(data) if (row["memory"], row["quality"]) == ("on", "Val")]
        assert {row["attn_type"] for row in mine} == {"polar"}
        assert [row["sd"] for row in mine] == pytest.approx([math.sqrt(squares / free) / 2] * len(mine))
        assert any("one standard error of utilization and quality, from the spread" in note for note in data.notes)
        assert not any(row["front"] for row in rows(data)), "utilization is no cost"

    def test_no_front_of_speeds_measured_on_a_shared_gpu(self) -> None:
        data = make_figure("pareto", shipped_store("replication-pilot"), "replication-pilot")
        assert not data.frame["front"].any()
        assert any("shared their GPU with up to 11 others" in note for note in data.notes)
        alone = make_figure("pareto", shipped_store("headline-370m"), "headline-370m")
        losses = alone.frame[alone.frame["quality"] == "Val"].sort_values("speed")
        assert losses["front"].tolist() == [False, True, False, True]


class TestUnavailable:
    def test_no_machine_of_ours_ran_a_printed_sweep(self, published: Store) -> None:
        with pytest.raises(ReportError, match="sweep printed-v2 has printed numbers only"):
            make_figure("timeline", published, "printed-v2")

    def test_sweep_without_norms_says_how_to_measure(self, store: Store) -> None:
        with pytest.raises(ReportError, match=r"no cell of sweep quick has norms .* evaluate .* --probe state_norm"):
            make_figure("state-norm", store)

    def test_unknown_figure_suggests_nearest_name(self, empty: Store) -> None:
        with pytest.raises(ReportError, match=r"unknown figure parto; .*did you mean pareto\?"):
            make_figure("parto", empty)
