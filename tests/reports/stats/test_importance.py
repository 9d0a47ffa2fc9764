"""Importance of settings against Optuna's own answer on a study made apart, and against what must come out."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import optuna
import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.stats import importance
from atma_sweep.reports.stats.importance import FANOVA, PED_ANOVA, importances
from atma_sweep.reports.stats.study_data import Study, study_of
from atma_sweep.reports.sweep_data import ReportError, load_sweep_data
from atma_sweep.results.store.store import Store
from studied import DECAY, ENDS, ONE, RATE, loss, record, trials_at_random

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def tuned(studies: Store) -> Study:
    return study_of(studies, load_sweep_data(studies, "tuned"))


def apart(study: Study) -> optuna.Study:
    """The same trials in a study that is made from nothing but Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found = optuna.create_study()
    spaces = dict(
        zip(
            ONE.ranges,
            (
                FloatDistribution(0.003, 0.1, log=True), IntDistribution(4, 16, step=4),
                CategoricalDistribution(["polar", "nope", "rope"]), FloatDistribution(0, 0.2),
            ),
            strict=True,
        )
    )  # fmt: skip
    for trial in trials_at_random(ONE, 39, ends=ENDS):
        if trial.standing == "done":
            made = optuna.trial.create_trial(
                params=dict(trial.params), distributions=spaces, value=loss(dict(trial.params))
            )
            found.add_trial(made)
    assert len(found.trials) == len(study.done) == 33
    return found


@pytest.mark.thorough
def test_ped_anova_is_optunas_and_one_setting_does_nearly_everything(tuned: Study) -> None:
    found = importances(tuned, tuned.objectives[0], PED_ANOVA)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=5 / 33)
    expected = optuna.importance.get_param_importances(apart(tuned), evaluator=evaluator)
    assert {one.path: one.share for one in found} == pytest.approx(expected)
    assert found[0].path == RATE
    assert found[0].share > 0.6
    assert found[0].share > 2 * found[0].chance, "far beyond chance"
    assert all(one.share <= one.chance for one in found[1:])
    assert sum(one.share for one in found) == pytest.approx(1)
    assert found == importances(tuned, tuned.objectives[0], PED_ANOVA), "the same every time"


@pytest.mark.thorough
def test_fanova_is_optunas(tuned: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install -e '.[oracles]'")
    monkeypatch.setattr(importance, "DEALT", {FANOVA: (3, 3)})
    found = importances(tuned, tuned.objectives[0], FANOVA)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    expected = optuna.importance.get_param_importances(apart(tuned), evaluator=evaluator)
    assert {one.path: one.share for one in found} == pytest.approx(expected)
    assert found[0].path == RATE
    assert found[0].share > 0.8


@pytest.mark.thorough
def test_of_noise_few_settings_are_sure(empty: Store) -> None:
    """Values that no setting decides: one in twenty lies beyond the line, so of 40 hardly more than six."""
    draw = np.random.default_rng(5)
    sure = 0
    for number in range(10):
        trials = [
            type(one)(one.number, one.params, "done", (float(draw.normal()),), cell=one.cell)
            for one in trials_at_random(ONE, 30, first_cell=100 * number + 1)
        ]
        record(empty, f"noise-{number}", ONE, trials)
        study = study_of(empty, load_sweep_data(empty, f"noise-{number}"))
        sure += sum(one.share > one.chance for one in importances(study, study.objectives[0], PED_ANOVA))
    assert sure <= 6


def test_few_trials_are_dealt_often_and_many_less_often() -> None:
    assert [importance.deals(PED_ANOVA, n) for n in (10, 100, 200, 1000, 10_000)] == [200, 200, 100, 40, 40]


@pytest.mark.thorough
def test_values_that_never_differ_are_due_to_nothing(empty: Store) -> None:
    trials = [type(one)(one.number, one.params, "done", (2.0,), cell=one.cell) for one in trials_at_random(ONE, 12)]
    record(empty, "flat", ONE, trials)
    study = study_of(empty, load_sweep_data(empty, "flat"))
    assert all(one.share <= one.chance for one in importances(study, study.objectives[0], PED_ANOVA))


@pytest.mark.thorough
def test_the_figure_keeps_which_evaluator_it_was_made_with(studies: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    made = make_figure("importance", studies, "tuned")
    assert made.trace["options"] == {"evaluator": PED_ANOVA}
    assert made.notes[0].startswith("PED-ANOVA of 33 trials that are done")
    rows = made.frame.set_index("setting")
    assert rows["share"].sum() == pytest.approx(100)
    assert list(rows["sure"]) == [True, False, False, False]
    assert rows.loc[DECAY, "name"] == "weight_decay"


@pytest.mark.thorough
def test_a_figure_made_with_fanova_says_what_it_needs(studies: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(**options: Any) -> Any:
        raise ImportError("No module named 'sklearn'")

    # optuna.importance is a stand-in until something imports the module itself
    monkeypatch.setattr(importlib.import_module("optuna.importance"), "FanovaImportanceEvaluator", lacking)
    with pytest.raises(ReportError, match=r"of sweep tuned was made with fANOVA, which needs scikit-learn; install it"):
        make_figure("importance", studies, "tuned", options={"evaluator": FANOVA})
