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
from studied import DECAY, ENDS, RATE, SEARCH, loss, record, trials_at_random

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def tuned(studies: Store) -> Study:
    return study_of(studies, load_sweep_data(studies, "tuned"))


def plain_optuna_study(study: Study) -> optuna.Study:
    """Return an Optuna study with the same trials, made without this package."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    optuna_study = optuna.create_study()
    spaces = dict(
        zip(
            SEARCH.ranges,
            (
                FloatDistribution(0.003, 0.1, log=True), IntDistribution(4, 16, step=4),
                CategoricalDistribution(["polar", "nope", "rope"]), FloatDistribution(0, 0.2),
            ),
            strict=True,
        )
    )  # fmt: skip
    for trial in trials_at_random(SEARCH, 39, ends=ENDS):
        if trial.standing == "done":
            optuna_trial = optuna.trial.create_trial(
                params=dict(trial.params), distributions=spaces, value=loss(dict(trial.params))
            )
            optuna_study.add_trial(optuna_trial)
    assert len(optuna_study.trials) == len(study.done) == 33
    return optuna_study


@pytest.mark.thorough
def test_ped_anova_equals_optuna(tuned: Study) -> None:
    results = importances(tuned, tuned.objectives[0], PED_ANOVA)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=5 / 33)
    expected = optuna.importance.get_param_importances(plain_optuna_study(tuned), evaluator=evaluator)
    assert {result.path: result.share for result in results} == pytest.approx(expected)
    assert results[0].path == RATE
    assert results[0].share > 0.6
    assert results[0].share > 2 * results[0].chance, "far beyond chance"
    assert all(result.share <= result.chance for result in results[1:])
    assert sum(result.share for result in results) == pytest.approx(1)
    assert results == importances(tuned, tuned.objectives[0], PED_ANOVA), "the same every time"


@pytest.mark.thorough
def test_fanova_equals_optuna(tuned: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install -e '.[oracles]'")
    monkeypatch.setattr(importance, "PERMUTATION_RANGE", {FANOVA: (3, 3)})
    results = importances(tuned, tuned.objectives[0], FANOVA)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    expected = optuna.importance.get_param_importances(plain_optuna_study(tuned), evaluator=evaluator)
    # Optuna divides by the sum over settings; here interactions are the rest of the variance
    total = sum(result.share for result in results)
    assert 0.9 < total < 1
    assert {result.path: result.share / total for result in results} == pytest.approx(expected)
    assert results[0].path == RATE
    assert results[0].share > 0.8


@pytest.mark.thorough
def test_pure_noise_rarely_exceeds_chance(empty: Store) -> None:
    """Without any effect, one importance in twenty exceeds its chance level: of 40 hardly more than six."""
    draw = np.random.default_rng(5)
    sure = 0
    for number in range(10):
        trials = [
            type(trial)(trial.number, trial.params, "done", (float(draw.normal()),), cell=trial.cell)
            for trial in trials_at_random(SEARCH, 30, first_cell=100 * number + 1)
        ]
        record(empty, f"noise-{number}", SEARCH, trials)
        study = study_of(empty, load_sweep_data(empty, f"noise-{number}"))
        sure += sum(result.share > result.chance for result in importances(study, study.objectives[0], PED_ANOVA))
    assert sure <= 6


def test_permutation_count_falls_with_trials() -> None:
    assert [importance.permutation_count(PED_ANOVA, n) for n in (10, 100, 200, 1000, 10_000)] == [200, 200, 100, 40, 40]


@pytest.mark.thorough
def test_constant_values_have_equal_importances(empty: Store) -> None:
    trials = [
        type(trial)(trial.number, trial.params, "done", (2.0,), cell=trial.cell)
        for trial in trials_at_random(SEARCH, 12)
    ]
    record(empty, "flat", SEARCH, trials)
    study = study_of(empty, load_sweep_data(empty, "flat"))
    assert all(result.share <= result.chance for result in importances(study, study.objectives[0], PED_ANOVA))


@pytest.mark.thorough
def test_figure_trace_records_the_evaluator(studies: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    figure = make_figure("importance", studies, "tuned")
    assert figure.trace["options"] == {"evaluator": PED_ANOVA}
    assert figure.notes[0].startswith("PED-ANOVA of 33 finished trials")
    rows = figure.frame.set_index("setting")
    assert rows["share"].sum() == pytest.approx(100)
    assert list(rows["sure"]) == [True, False, False, False]
    assert rows.loc[DECAY, "name"] == "weight_decay"


@pytest.mark.thorough
def test_check_of_a_fanova_figure_names_scikit_learn(studies: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(**options: Any) -> Any:
        raise ImportError("No module named 'sklearn'")

    # optuna.importance is a stand-in until something imports the module itself
    monkeypatch.setattr(importlib.import_module("optuna.importance"), "FanovaImportanceEvaluator", lacking)
    with pytest.raises(ReportError, match=r"of sweep tuned was made with fANOVA, which needs scikit-learn; install it"):
        make_figure("importance", studies, "tuned", options={"evaluator": FANOVA})
