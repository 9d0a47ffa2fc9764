"""The figures of studies against their trials: the best so far and the front by hand, positions on axes, and that words are readable."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import studied
from atma_sweep.reports.check import check_file
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.figures.canvas.scales import Scale
from atma_sweep.reports.figures.files import rendered
from atma_sweep.reports.figures.studies import contours
from atma_sweep.reports.figures.studies.contours import interpolated_values
from atma_sweep.reports.figures.studies.parallel import folded
from atma_sweep.reports.stats.importance import FOLDS, NUM_TREES, SEED, out_of_sample_r2
from atma_sweep.reports.stats.study_data import study_of
from atma_sweep.reports.sweep_data import ReportError, load_sweep_data
from atma_sweep.results.store.store import Store
from atma_sweep.results.studies.optuna_study import Trial
from atma_sweep.results.studies.search import Interval, LevelChoice, Search
from figure_layout import luminance
from here import run_in_process
from matplotlib.text import Text
from pictures import COLUMN, assert_texts_apart, figure_of
from studied import DECAY, DEPTH, ENDS, FIGURES, KIND, RATE, SEARCH, TWO, loss, speed, trials_at_random
from tiers import every_nth

PAIRS = [
    (name, sweep)
    for name in FIGURES
    for sweep in ("tuned", "both")
    if (name, sweep) != ("front", "tuned") and name != "contours"
]


@pytest.mark.usefixtures("few_deals")
@pytest.mark.parametrize(("name", "sweep"), every_nth(PAIRS, 11))
def test_no_texts_overlap_in_study_figures(studies: Store, name: str, sweep: str) -> None:
    figure_data = make_figure(name, studies, sweep)
    for look in (COLUMN, FigureOptions()):
        assert assert_texts_apart(figure_of(figure_data, look)) > 5


class TestHistory:
    def test_the_best_so_far_by_hand(self, studies: Store) -> None:
        frame = make_figure("history", studies, "tuned").frame
        assert list(frame["number"]) == list(range(39)), "the fortieth has not ended"
        so_far = math.inf
        for trial, (_, row) in zip(trials_at_random(SEARCH, 39, ends=ENDS), frame.iterrows(), strict=True):
            if trial.standing == "done":
                so_far = min(so_far, loss(dict(trial.params)))
                assert row["value"] == pytest.approx(loss(dict(trial.params)))
            elif trial.standing == "pruned":
                assert row["value"] == pytest.approx(loss(dict(trial.params)) + 0.5), "the last of its curve"
            else:
                assert math.isnan(row["value"])
            assert row["so_far"] == pytest.approx(so_far)

    def test_caption_names_marks_without_value(self, studies: Store) -> None:
        figure_data = make_figure("history", studies, "tuned")
        notes = " ".join(figure_data.notes)
        assert "Strip beyond the axis: trials that diverged or failed, without a value." in notes
        assert "Not drawn: trial 39, not finished." in notes
        beyond = [text.get_text() for text in figure_of(figure_data).axes[0].texts]
        legend = [text.get_text() for text in figure_of(figure_data).legends[0].get_texts()]
        assert beyond == ["5.7"]
        counts = ["done (33)", "pruned, last value (4; arrow: beyond the axis)", "diverged (1)", "failed (1)"]
        assert legend == [*counts, "best so far"]

    @pytest.mark.thorough
    def test_maximised_objective_has_highest_as_best(self, studies: Store) -> None:
        figure_data = make_figure("history", studies, "both")
        speeds = [
            speed(dict(trial.params)) for trial in trials_at_random(TWO, 30, ends={5: "failed"}) if trial.number != 5
        ]
        mine = figure_data.frame[figure_data.frame["objective"] == "throughput.tokens_per_s"]
        assert mine["so_far"].iloc[-1] == pytest.approx(max(speeds))
        axes = figure_of(figure_data).axes
        (line,) = (line for line in axes[1].lines if line.get_drawstyle() == "steps-post")
        assert list(line.get_ydata()) == list(mine["so_far"])
        assert [list(line.get_xdata()) for line in axes[0].lines if line.get_marker() == "v"] == [[5]]


class TestFront:
    def test_it_is_that_of_brute_force(self, studies: Store) -> None:
        frame = make_figure("front", studies, "both").frame
        points = {
            trial.number: (loss(dict(trial.params)), -speed(dict(trial.params)))
            for trial in trials_at_random(TWO, 30)
            if trial.number != 5
        }

        def beaten(a: tuple[float, float]) -> bool:
            return any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in points.values())

        expected = {number for number, point in points.items() if not beaten(point)}
        assert set(frame[frame["front"]]["number"]) == expected
        assert 1 < len(expected) < len(points)
        assert set(frame["number"]) == set(points)

    @pytest.mark.thorough
    def test_steps_lead_from_trial_to_trial_of_the_front(self, studies: Store) -> None:
        figure_data = make_figure("front", studies, "both")
        (axes,) = figure_of(figure_data, FigureOptions()).axes
        front = figure_data.frame[figure_data.frame["front"]].sort_values("x_value")
        (line,) = (line for line in axes.lines if line.get_drawstyle() == "steps-post")
        assert list(line.get_xdata()) == list(front["x_value"])
        assert {text.get_text() for text in axes.texts} == {"better", *(f"#{number}" for number in front["number"])}

    @pytest.mark.thorough
    def test_front_labels_cover_no_trial(self, studies: Store) -> None:
        figure_data = make_figure("front", studies, "both")
        for look in (COLUMN, FigureOptions()):
            (axes,) = figure_of(figure_data, look).axes
            marks = axes.transData.transform(figure_data.frame[["x_value", "y_value"]].to_numpy())
            boxes = [Text.get_window_extent(text) for text in axes.texts]
            assert sum(box.padded(2).count_contains(marks) for box in boxes) == 0
            (line,) = (line for line in axes.lines if line.get_drawstyle() == "steps-post")
            path = line.get_path().transformed(axes.transData)
            assert not any(path.intersects_bbox(box, filled=False) for box in boxes)
            assert all(text.get_bbox_patch() is None for text in axes.texts)

    @pytest.mark.thorough
    def test_three_objectives_have_three_panels(self, empty: Store) -> None:
        search = replace(TWO, objectives={**TWO.objectives, "needle.digit_accuracy@64": "maximize"})
        trials = [
            Trial(
                n, {RATE: 0.01, DEPTH: 4, KIND: "polar"}, "done", (1.0 + n, 5.0 * n, (7 - n) / 10), cell=f"{n + 1:012x}"
            )
            for n in range(5)
        ]
        studied.record(empty, "three", search, trials)
        figure_data = make_figure("front", empty, "three")
        assert figure_data.frame["front"].sum() == 3 * 5
        assert set(figure_data.frame["y_label"]) == {
            "speed, tokens/s (more is better)",
            "needle accuracy, 64, % (more is better)",
        }
        assert figure_data.frame["y_value"].max() == pytest.approx(70), "a share is shown in percent"
        assert len(figure_of(figure_data, FigureOptions()).axes) == 4


class TestPositions:
    @pytest.mark.thorough
    def test_slices_stand_at_what_was_proposed_the_best_ringed(self, studies: Store) -> None:
        figure_data = make_figure("slices", studies, "tuned")
        done = {trial.number: trial for trial in trials_at_random(SEARCH, 39, ends=ENDS) if trial.standing == "done"}
        for _, row in figure_data.frame.iterrows():
            proposed = done[row["number"]].params[row["setting"]]
            assert row["place"] == (("polar", "nope", "rope").index(proposed) if row["setting"] == KIND else proposed)
        best = min(done.values(), key=lambda trial: loss(dict(trial.params)))
        assert set(figure_data.frame[figure_data.frame["best"]]["number"]) == {best.number}
        axes = figure_of(figure_data, FigureOptions()).axes
        assert [panel.get_xscale() for panel in axes[:4]] == ["log", "linear", "linear", "linear"]
        assert [label.get_text() for label in axes[1].get_xticklabels()] == ["4", "8", "12", "16"]
        ring = [line for line in axes[0].lines if line.get_markerfacecolor() == "none"]
        assert [list(line.get_xdata()) for line in ring] == [[best.params[RATE]]]

    @pytest.mark.thorough
    def test_parallel_axes_run_from_the_low_to_the_high_end(self, studies: Store) -> None:
        frame = make_figure("parallel", studies, "tuned").frame
        for trial in trials_at_random(SEARCH, 39, ends=ENDS):
            mine = frame[frame["number"] == trial.number].set_index("axis")["share"]
            if trial.standing != "done":
                assert mine.empty
                continue
            rate, depth = trial.params[RATE], trial.params[DEPTH]
            assert mine[RATE] == pytest.approx(math.log(rate / 0.003) / math.log(0.1 / 0.003))
            assert mine[DEPTH] == pytest.approx((depth - 4) / 12)
            assert mine[KIND] == ("polar", "nope", "rope").index(trial.params[KIND]) / 2
            assert 0 <= mine["val.val_loss"] <= 1

    @pytest.mark.thorough
    def test_contours_draw_pairs_with_a_joint_effect(self, joint: Store) -> None:
        figure_data = make_figure("contours", joint)
        pairs = figure_data.frame[["x", "y"]].drop_duplicates()
        # the best rate depends on the decay and on the mixer (`studied.joint_loss`), and on nothing else
        assert {y for _, y in pairs.itertuples(index=False)} == {RATE}
        assert {x for x, _ in pairs.itertuples(index=False)} == {KIND, DECAY}
        frame = figure_data.frame
        assert (frame["skill"] >= frame[["x_alone", "y_alone"]].max(axis=1).clip(0) + 0.05).all()
        assert list(frame["skill"]) == sorted(frame["skill"], reverse=True)
        assert any("Drawn: 2 pairs of 6; not drawn: " in note for note in figure_data.notes)
        kinds = [
            {type(part).__name__ for part in panel.collections} for panel in figure_of(figure_data).axes[: len(pairs)]
        ]
        field = {DECAY: "QuadContourSet", KIND: "QuadMesh"}
        assert [field[x] in kind for x, kind in zip(pairs["x"], kinds, strict=True)] == [True] * 2

    def test_contours_of_a_single_setting_that_matters_say_so(self, studies: Store) -> None:
        """The loss depends on the rate, so that no pair explains more than the rate alone."""
        with pytest.raises(
            ReportError, match=r"nothing to show: no pair of settings .* explains more .* --figure slices"
        ):
            make_figure("contours", studies, "tuned")

    def test_contour_strips_interpolate_within_a_level(self) -> None:
        levels, numbers = Scale(levels=("a", "b")), Scale(0, 1)
        coordinates, values = np.array([[0, 0.0], [0, 1.0], [1, 0.5]]), np.array([2.0, 4.0, 9.0])
        at = np.array([[0, 0.25], [0, 1.0], [1, 0.5], [1, 0.6]])
        assert interpolated_values(coordinates, values, at, levels, numbers).tolist()[:3] == [2.5, 4.0, 9.0]
        assert np.isnan(interpolated_values(coordinates, values, at, levels, numbers)[3])
        both = np.array([[0, 1.0], [1, 0.0]])
        twice = np.array([[0, 1.0], [0, 1.0], [1, 1.0]])
        assert interpolated_values(twice, np.array([1.0, 2.0, 5.0]), both, levels, levels)[0] == 1.5

    @pytest.mark.parametrize("sweep", ["tuned", "both"])
    def test_parallel_lines_of_a_level_meet(self, studies: Store, sweep: str) -> None:
        frame = make_figure("parallel", studies, sweep).frame
        depth = frame[frame["axis"] == DEPTH].astype({"text": int})
        assert depth["height"].to_numpy() == pytest.approx((depth["text"].to_numpy() - 4) / 16 + 0.125)

    def test_parallel_lines_are_darker_and_in_front_the_better(self, studies: Store) -> None:
        for sweep, look in (("tuned", COLUMN), ("both", FigureOptions())):
            figure_data = make_figure("parallel", studies, sweep)
            frame = figure_data.frame[figure_data.frame["axis"] == "val.val_loss"].sort_values("value")
            (axes,) = figure_of(figure_data, look).axes
            assert {"PoLAR", "NoPE", "RoPE", "(log scale)"} <= {
                line for text in [*axes.texts, *axes.get_xticklabels()] for line in text.get_text().split("\n")
            }
            lines = [part for part in axes.collections if type(part).__name__ == "PathCollection"]
            lines.sort(key=lambda part: -part.get_zorder())
            heights = [part.get_paths()[0].vertices[:, 1] for part in lines]
            assert all(0 <= each.min() <= each.max() <= 1 for each in heights), "no line leaves its axis"
            excess = frame["value"].to_numpy() - frame["value"].min()
            logs = np.log(np.maximum(excess, excess[1] / 3) / excess[1] * 3) / np.log(1.3 * excess[-1] / excess[1] * 3)
            at = list(dict.fromkeys(figure_data.frame["axis"])).index("val.val_loss")
            assert [each[2 * at - 1] for each in heights] == pytest.approx(logs)
            inks = luminance(np.array([part.get_edgecolor()[0][:3] for part in lines]))
            assert (np.diff(inks) >= 0).all()
            named = {int(text.get_text()[1:].partition(":")[0]) for text in axes.texts if text.get_text()[0] == "#"}
            best = max(3, min(5, math.ceil(len(frame) / 10)))
            assert named == {*frame["number"][:best], *frame["number"][frame["best"]]}

    def test_slice_marks_of_a_level_stand_apart(self, studies: Store) -> None:
        figure_data = make_figure("slices", studies, "tuned")
        axes = figure_of(figure_data, FigureOptions()).axes
        for panel in axes[1:3]:
            (marks,) = panel.collections
            positions = panel.transData.transform(marks.get_offsets())
            gaps = np.hypot(*(positions[:, None] - positions).transpose(2, 0, 1))[np.triu_indices(len(positions), 1)]
            diameter = marks.get_sizes()[0] ** 0.5 * panel.figure.dpi / 72
            assert gaps.min() > 0.7 * diameter

    def test_a_name_is_broken_where_a_word_of_it_ends(self) -> None:
        assert folded("weight_decay", 8) == "weight_\ndecay"
        assert folded("muon_lr", 8) == "muon_lr"
        assert folded("", 8) == ""


class TestChanged:
    """A study that was widened: earlier trials stand where they stood, or have no place."""

    SEARCH = Search(
        {"train.lr": Interval(0.01, 0.1, log=True), "memory": LevelChoice(("on", True, None)), "model.memory": Interval(1, 9)},
        {"val_loss": "minimize"}, trials=5,
    )  # fmt: skip
    TRIALS = (
        Trial(0, {"train.lr": 0.001, "memory": "titans"}, "done", (3.0,), cell="a" * 12),
        Trial(1, {"train.lr": 0.02, "memory": True, "model.memory": 3}, "done", (2.0,), cell="b" * 12),
        Trial(2, {"train.lr": 0.03, "memory": None, "model.memory": 9}, "done", (2.5,), cell="c" * 12),
        Trial(3, {"train.lr": 0.09, "memory": "on", "model.memory": 1}, "done", (900.0,), cell="d" * 12),
        Trial(4, {"train.lr": 0.05, "memory": "on", "model.memory": 5}, "failed", reason="makes no cell"),
    )

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", [name for name in FIGURES if name not in ("front", "importance")])
    def test_every_figure_of_it_is_a_picture(self, empty: Store, tmp_path: Path, name: str) -> None:
        studied.record(empty, "odd", self.SEARCH, self.TRIALS)
        figure_data = make_figure(name, empty, "odd")
        assert assert_texts_apart(figure_of(figure_data, FigureOptions())) > 5
        (tmp_path / "x.svg").write_bytes(rendered(figure_data))
        assert check_file(tmp_path / "x.svg", empty) == []
        if name == "slices":
            mine = figure_data.frame[figure_data.frame["setting"] == "memory"].set_index("number")
            assert list(mine["place"]) == [3.0, 1.0, 2.0, 0.0], "a level that is searched no more stands last"
            assert list(mine["level"]) == ["titans", "on", "none", "on"]
            assert set(figure_data.frame["name"]) == {"lr", "memory", "model.memory"}
            assert set(figure_data.frame[figure_data.frame["setting"] == "model.memory"]["number"]) == {1, 2, 3}
            axes = figure_of(figure_data, FigureOptions()).axes[:3]
            assert len({panel.get_ylim() for panel in axes}) == 1, "only the first says its numbers"


@pytest.mark.thorough
class TestPruned:
    """A study of which a pruner left three of twenty."""

    @pytest.fixture
    def pruned(self, empty: Store) -> Store:
        trials = []
        for trial in trials_at_random(SEARCH, 20):
            full = tuple((rung, loss(dict(trial.params)) + 1 / rung) for rung in (1, 2, 3, 4))
            ends = 4 if trial.number % 7 == 0 else 2 + trial.number % 2
            trials.append(
                replace(trial, curve=full)
                if ends == 4
                else replace(trial, standing="pruned", values=None, curve=full[:ends])
            )
        studied.record(empty, "cut", SEARCH, [*trials, Trial(20, trials[0].params, "failed", cell="f" * 12)])
        return empty

    @pytest.mark.parametrize("name", ["slices", "contours", "parallel", "importance"])
    def test_pruned_trials_are_compared_at_common_rung(
        self, pruned: Store, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Contours are drawn although the rate alone matters, since no gain is asked for."""
        monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)  # with it importance is fANOVA's
        monkeypatch.setattr(contours, "MIN_GAIN", -1.0)
        figure_data = make_figure(name, pruned, "cut")
        assert any(
            note.startswith("Most trials were pruned, so all are compared at validation 2")
            for note in figure_data.notes
        )
        assert assert_texts_apart(figure_of(figure_data, FigureOptions())) > 5
        assert_texts_apart(figure_of(figure_data))
        if name == "importance":
            assert figure_data.notes[0].startswith("PED-ANOVA of 20 trials (n), objective: ")
            return
        values = dict(zip(figure_data.frame["number"], figure_data.frame["value"], strict=True))
        assert values == pytest.approx({n: loss(studied.drawn(SEARCH, n)) + 0.5 for n in range(20)})
        ended = min((0, 7, 14), key=lambda n: loss(studied.drawn(SEARCH, n)))
        assert set(figure_data.frame[figure_data.frame["best"]]["number"]) == {ended}, "of those that ended"

    @pytest.mark.parametrize("name", ["slices", "contours", "parallel"])
    def test_study_without_finished_trials_says_so(self, empty: Store, name: str) -> None:
        ends = dict.fromkeys(range(6), "failed")
        studied.record(empty, "none", SEARCH, trials_at_random(SEARCH, 6, ends=ends))
        with pytest.raises(ReportError, match=r"no trial|0 .*finished|finished"):
            make_figure(name, empty, "none")

    def test_with_enough_that_are_done_the_end_counts(self, studies: Store) -> None:
        figure_data = make_figure("slices", studies, "tuned")
        assert not any("pruned" in note for note in figure_data.notes)
        assert set(figure_data.frame["number"]).isdisjoint(n for n, end in ENDS.items() if end == "pruned")


REFUSED = [
    ("tuned", "front", "the figure front needs two objectives, and the study of sweep tuned has only val.val_loss; use --figure"),
    ("few", "importance", "the figure importance needs at least 10 finished trials; sweep few has 3; launch it"),
    ("few", "contours", "the figure contours needs at least 4 finished trials; sweep few has 3; launch it"),
    ("none", "history", "the figure history needs at least 1 finished trial; sweep none has 0; launch it"),
    ("still", "contours", "two settings that vary, and only train.muon_lr differs between the trials of sweep still; use --figure slices"),
    ("still", "importance", "two settings that vary, and only train.muon_lr differs between the trials of sweep still; use --figure slices"),
    ("tuned", "response", "the trials of sweep tuned differ in all searched settings, so there are no means over trials; use --figure"),
    ("grid", "slices", "sweep grid is not a study; add search: to its grid"),
]  # fmt: skip


@pytest.fixture
def poor(studies: Store, make: Any) -> Store:
    """Return studies that have too little for some figure, and a sweep that is not a study."""
    cell, _ = make
    studies.record_revision("grid", grid_text="x", grid_file="x.yaml", cells=[cell(9000)])
    studied.record(studies, "few", SEARCH, trials_at_random(SEARCH, 3, first_cell=2001))
    studied.record(studies, "none", SEARCH, trials_at_random(SEARCH, 1, ends={0: "failed"}, first_cell=3001))
    still = [
        replace(trial, params={RATE: trial.params[RATE], DEPTH: 4, KIND: "polar", DECAY: 0.0})
        for trial in trials_at_random(SEARCH, 12, first_cell=4001)
    ]
    studied.record(studies, "still", SEARCH, still)
    return studies


@pytest.mark.thorough
def test_study_refusals_are_single_lines(poor: Store, tmp_path: Path) -> None:
    for sweep, name, why in REFUSED:
        arguments = ("report", "--figure", name, "--sweep", sweep, "--db", "studies.db")
        code, out, err = run_in_process(tmp_path, *arguments)
        assert (code, out) == (2, ""), (sweep, name)
        assert why in err
        assert err.count("\n") == 1


@pytest.mark.thorough
def test_report_folder_of_plain_sweep_omits_studies(poor: Store, tmp_path: Path, shown: Callable[[str], Store]) -> None:
    from atma_sweep.reports.report_folder import write_report_folder

    wanted = ("history", "timeline")
    plain = write_report_folder(poor, "grid", out=tmp_path / "plain", formats=["csv"], figures=wanted)
    assert not {"study", "figure history"} & set(plain.skipped)
    assert "study.csv" not in {path.name for path in plain.files}
    study = write_report_folder(poor, "tuned", out=tmp_path / "study", formats=["csv"], figures=wanted)
    assert {"study.csv", "figure-history.svg"} <= {path.name for path in study.files}


@pytest.mark.thorough
@pytest.mark.usefixtures("few_deals")
def test_importance_bars_have_their_values(studies: Store) -> None:
    figure_data = make_figure("importance", studies, "tuned")
    (axes,) = figure_of(figure_data).axes
    shares = list(figure_data.frame["share"])  # the evaluator depends on what is installed
    expected = ["< 1 %" if share < 0.5 else f"{share:.0f} %" for share in shares]
    assert [text.get_text() for text in axes.texts] == expected
    *settings, last = figure_data.frame["name"]
    explained = shares[: len(settings) + (last != "interactions")]
    assert explained == sorted(explained, reverse=True)
    assert sum(shares) == pytest.approx(100)
    assert ("Arrow" in " ".join(figure_data.notes)) == bool((figure_data.frame["chance"] > 100).any())


def test_importance_says_what_a_forest_predicts(studies: Store) -> None:
    """Oracle: scikit-learn's own R2 of its own cross-validated predictions, in the same folds."""
    ensemble = pytest.importorskip("sklearn.ensemble")
    from sklearn.metrics import r2_score
    from sklearn.model_selection import PredefinedSplit, cross_val_predict

    study = study_of(studies, load_sweep_data(studies, "tuned"))
    kinds = list(dict.fromkeys(trial.params[KIND] for trial in study.done))
    table = [
        [kinds.index(trial.params[path]) if path == KIND else trial.params[path] for path in study.varying_settings()]
        for trial in study.done
    ]
    values = [trial.values[0] for trial in study.done if trial.values]
    folds = PredefinedSplit(np.random.default_rng(SEED).permutation(len(values)) % FOLDS)
    forest = ensemble.RandomForestRegressor(n_estimators=NUM_TREES, random_state=SEED)
    expected = r2_score(values, cross_val_predict(forest, np.array(table), values, cv=folds))
    assert 0.5 < expected < 1
    assert out_of_sample_r2(study, study.objectives[0]) == pytest.approx(expected)


def test_unknown_evaluator_is_refused(studies: Store) -> None:
    with pytest.raises(ReportError, match="unknown evaluator palm-reading of importance"):
        make_figure("importance", studies, options={"evaluator": "palm-reading"})
