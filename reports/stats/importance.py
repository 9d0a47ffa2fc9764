"""Importance of each setting of a study: its share of the variation between trials, by Optuna's evaluators.

fANOVA (Hutter et al. 2014) is used where scikit-learn, whose random forest it needs, is installed. Otherwise it is
PED-ANOVA (Watanabe et al. 2023), which needs numpy only: how far the settings of the best trials differ from those of
all. Neither has a null distribution, so the values are also permuted among the trials many times.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from optuna.importance import BaseImportanceEvaluator
    from optuna.trial import FrozenTrial

    from .study_data import Objective, Study

FANOVA, PED_ANOVA = "fanova", "ped-anova"
EVALUATOR_NAMES = {FANOVA: "fANOVA", PED_ANOVA: "PED-ANOVA"}
MIN_TRIALS = 10
"""Smallest number of trials for an analysis: with fewer, the best part would be three or four trials."""
NUM_BEST_TRIALS, MAX_BEST_SHARE = 5, 0.5
"""PED-ANOVA compares the best trials to all: NUM_BEST_TRIALS, but at least a tenth and at most MAX_BEST_SHARE."""
PERMUTATION_RANGE: Mapping[str, tuple[int, int]] = {FANOVA: (20, 40), PED_ANOVA: (40, 200)}
"""Smallest and largest number of permutations, by evaluator: fewer with more trials, which take longer."""
PERMUTATION_BUDGET = 20_000  # trials times permutations
CHANCE_QUANTILE = 0.95
FOLDS, NUM_TREES = 5, 64
"""Parts of the trials that are left out in turn, and trees of the forest, as fANOVA has them."""
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Importance of one setting.

    `share` is its share of the total: of the variance of the objective (fANOVA, where interactions are the rest), or of
    the importances of all settings (PED-ANOVA). `chance` is the 95% quantile of the setting's own importance when the
    values are permuted among the trials, over the same total; it may exceed 1.
    """

    path: str
    share: float
    chance: float


def available_evaluator() -> str:
    """Return the supported evaluator: "fanova" if scikit-learn can be imported, else "ped-anova".

    Imports scikit-learn where it is installed.
    """
    try:
        importlib.import_module("sklearn.ensemble")
    except ImportError:
        return PED_ANOVA
    return FANOVA


def permutation_count(evaluator_name: str, trials: int) -> int:
    """Return the number of permutations of the values of so many trials (at least one).

    It is 20,000 / trials, rounded down, within 20 to 40 for "fanova" and 40 to 200 for "ped-anova".

    Raises:
        KeyError: No such evaluator.
    """
    min_count, max_count = PERMUTATION_RANGE[evaluator_name]
    return min(max_count, max(min_count, PERMUTATION_BUDGET // trials))


def importances(study: Study, objective: Objective, evaluator_name: str) -> list[Importance]:
    """Return the importance of every setting that differs between finished trials, most important first.

    Permutations have a fixed seed. If the objective is the same in all trials, every setting has an equal share and a
    chance of 1, in the order of the search. Sets Optuna's log level to WARNING.

    Args:
        study: The study; it needs finished trials and a setting that differs between them.
        objective: Objective whose values are explained.
        evaluator_name: "fanova", or "ped-anova" (any other name is an error).

    Raises:
        KeyError: The evaluator is unknown.
        ModuleNotFoundError: fANOVA is requested and scikit-learn is not installed.
    """
    from ...results.studies.optuna_study import build_study

    paths = study.varying_settings()
    optuna_study = build_study(study.search, study.done)
    evaluator = _evaluator(evaluator_name, len(study.done))
    values = [
        objective.display_value(trial.values[objective.index]) for trial in study.done if trial.values is not None
    ]
    # both evaluators minimise
    better = -objective.sign * np.array(values)
    draw = np.random.default_rng(SEED)
    raw = _raw_importances(evaluator, optuna_study, paths, better)
    permuted = [
        _raw_importances(evaluator, optuna_study, paths, draw.permutation(better))
        for _ in range(permutation_count(evaluator_name, len(values)))
    ]
    chance = np.quantile(permuted, CHANCE_QUANTILE, axis=0)
    # fANOVA gives shares of the forest's variance, PED-ANOVA amounts without an upper end
    total = raw.sum() if evaluator_name != FANOVA or raw.sum() <= 0 else 1.0
    if total <= 0:
        # constant values give no importance to any setting
        return [Importance(path=path, share=1 / len(paths), chance=1.0) for path in paths]
    listed = [
        Importance(path=path, share=float(importance / total), chance=float(quantile / total))
        for path, importance, quantile in zip(paths, raw, chance, strict=True)
    ]
    return sorted(listed, key=lambda importance: -importance.share)


def out_of_sample_r2(study: Study, objective: Objective) -> float:
    """Return the share of the variance of left-out trials that a forest like fANOVA's explains, in five folds.

    It is 1 - (squared errors / squared deviations from the mean of all trials); below 0 a mean predicts better.
    Settings of levels are indices, those that a trial lacks -1.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    ensemble = importlib.import_module("sklearn.ensemble")
    paths = study.varying_settings()
    done = [trial for trial in study.done if trial.values is not None]
    columns = []
    for path in paths:
        levels = list(dict.fromkeys(str(trial.params.get(path)) for trial in done))
        numbers = [trial.params.get(path) for trial in done]
        is_numeric = all(type(number) in (int, float) for number in numbers)
        columns.append(numbers if is_numeric else [levels.index(str(number)) for number in numbers])
    settings, values = (
        np.array(columns, dtype=float).T,
        np.array([trial.values[objective.index] for trial in done if trial.values]),
    )
    fold = np.random.default_rng(SEED).permutation(len(done)) % FOLDS
    predicted = np.empty(len(done))
    for index in range(FOLDS):
        forest = ensemble.RandomForestRegressor(n_estimators=NUM_TREES, random_state=SEED)
        forest.fit(settings[fold != index], values[fold != index])
        predicted[fold == index] = forest.predict(settings[fold == index])
    deviations = float(np.sum((values - values.mean()) ** 2))
    return 1 - float(np.sum((values - predicted) ** 2)) / deviations if deviations else 0.0


def _evaluator(evaluator_name: str, trials: int) -> BaseImportanceEvaluator:
    """Return Optuna's evaluator; any name but FANOVA gives PED-ANOVA.

    Args:
        evaluator_name: "fanova" or "ped-anova".
        trials: Number of trials, which sets the share of best trials for PED-ANOVA: five trials, but at least a tenth
            and at most half of them.
    """
    from optuna import importance

    if evaluator_name == FANOVA:
        return importance.FanovaImportanceEvaluator(seed=SEED)
    part = min(MAX_BEST_SHARE, max(0.1, NUM_BEST_TRIALS / trials))
    return importance.PedAnovaImportanceEvaluator(target_quantile=part)


def _raw_importances(evaluator: Any, optuna_study: Any, paths: Sequence[str], values: np.ndarray) -> np.ndarray:
    """Return the evaluator's importance of each setting, [path], before normalisation; suppresses all warnings.

    Args:
        evaluator: Optuna's evaluator.
        optuna_study: Optuna study of the finished trials.
        paths: Settings, by dotted path.
        values: Value of each trial in the study's order, less is better, [trial].
    """
    values_by_trial = {
        trial.number: float(value) for trial, value in zip(optuna_study.get_trials(deepcopy=False), values, strict=True)
    }

    def target(trial: FrozenTrial) -> float:
        return values_by_trial[trial.number]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on minimised targets and experimental features
        importance_by_setting = evaluator.evaluate(optuna_study, list(paths), target=target)
    return np.array([importance_by_setting[path] for path in paths])
