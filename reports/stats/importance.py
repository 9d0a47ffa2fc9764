"""How much of what differs between the trials of a study each setting accounts for, by evaluators of Optuna's.

fANOVA (Hutter et al. 2014) where scikit-learn is installed, of whose random forest it is made; else PED-ANOVA (Watanabe et al.
2023), which takes numpy alone and is Optuna's own choice: how far the settings of the best trials are from those of all.
Neither knows what chance alone gives, so the values are dealt to the trials anew many times.
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
NAMES = {FANOVA: "fANOVA", PED_ANOVA: "PED-ANOVA"}
LEAST = 10
"""Trials: of fewer the best part would be three or four."""
BEST_PART, MOST_PART = 5, 0.5
"""PED-ANOVA holds so many of the best trials against all, but not more than this part of them, nor less than a tenth."""
DEALT: Mapping[str, tuple[int, int]] = {FANOVA: (20, 40), PED_ANOVA: (40, 200)}
"""How often values are dealt anew, at least and at most: less often the more trials there are, which take longer."""
WORTH = 20_000  # trials times deals
CHANCE = 0.95
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Of one setting: its share of what all account for (they sum to 1), and in the same measure what 95% stay below when the
    values are dealt to the trials by chance, which may be more than 1."""

    path: str
    share: float
    chance: float


def evaluator_here() -> str:
    """The evaluator that this machine has."""
    try:
        importlib.import_module("sklearn.ensemble")
    except ImportError:
        return PED_ANOVA
    return FANOVA


def deals(how: str, trials: int) -> int:
    """How often the values of so many trials are dealt anew."""
    least, most = DEALT[how]
    return min(most, max(least, WORTH // trials))


def importances(study: Study, objective: Objective, how: str) -> list[Importance]:
    """Of every setting that differs between the trials that are done, the most important first; ties in the grid's order.

    Raises ModuleNotFoundError where fANOVA is asked for and scikit-learn is not there.
    """
    from ...results.studies.optuna_study import made

    paths = study.moving()
    seen = made(study.search, study.done)
    evaluator = _evaluator(how, len(study.done))
    values = [objective.shown(one.values[objective.place]) for one in study.done if one.values is not None]
    # both take less for better
    better = -objective.sign * np.array(values)
    draw = np.random.default_rng(SEED)
    found = _amounts(evaluator, seen, paths, better)
    dealt = [_amounts(evaluator, seen, paths, draw.permutation(better)) for _ in range(deals(how, len(values)))]
    chance = np.quantile(dealt, CHANCE, axis=0)
    whole = found.sum()
    if whole <= 0:
        # what never differs is due to nothing
        return [Importance(path=path, share=1 / len(paths), chance=1.0) for path in paths]
    listed = [
        Importance(path=path, share=float(one / whole), chance=float(most / whole))
        for path, one, most in zip(paths, found, chance, strict=True)
    ]
    return sorted(listed, key=lambda one: -one.share)


def _evaluator(how: str, trials: int) -> BaseImportanceEvaluator:
    from optuna import importance

    if how == FANOVA:
        return importance.FanovaImportanceEvaluator(seed=SEED)
    part = min(MOST_PART, max(0.1, BEST_PART / trials))
    return importance.PedAnovaImportanceEvaluator(target_quantile=part)


def _amounts(evaluator: Any, seen: Any, paths: Sequence[str], values: np.ndarray) -> np.ndarray:
    """What the evaluator says of each setting, before these are made to sum to 1."""
    numbers = {one.number: float(value) for one, value in zip(seen.get_trials(deepcopy=False), values, strict=True)}

    def target(trial: FrozenTrial) -> float:
        return numbers[trial.number]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a target is minimised, and parts that are called experimental
        found = evaluator.evaluate(seen, list(paths), target=target)
    return np.array([found[path] for path in paths])
