"""Optuna studies that are rebuilt for every request: the database holds the trials, Optuna computes proposals.

A launch that is killed therefore has nothing to repair. The state that a sampler or pruner stores for a trial is kept
with the trial (`attrs`). Random numbers come from the study's seed and the trial's number. The same trials thus give
the same proposal, however many processes requested them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..store.records import TrialStanding
from .search import Interval, LevelChoice, Range, Search

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

NAME = "study-{seed}"
"""Name of the Optuna study; Hyperband assigns trials to its brackets by it."""


@dataclass(frozen=True)
class Trial:
    """A proposal of a study, and its result.

    `standing` is asked (no result yet), done, pruned (ended early), diverged or failed.
    """

    number: int
    """0, 1, 2, ... in the order of the proposals."""
    params: Mapping[str, Any]
    """Proposed levels, by dotted path of the setting."""
    standing: TrialStanding = "asked"
    values: tuple[float, ...] | None = None
    """Values of the objectives, in the order of the search; None until the trial is done."""
    curve: tuple[tuple[int, float], ...] = ()
    """(rung, value of the first objective), sorted by rung.

    Rungs are the points at which a pruner decides; rungs 1, 2, ... are validations.
    """
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """State that Optuna stores for the trial, as JSON."""
    cell: str | None = None
    """Id of its cell; None if its settings give no valid cell."""
    reason: str | None = None
    """Reason of a failure or of pruning, for the user."""


@dataclass(frozen=True)
class Proposal:
    """A proposed trial, earlier trials whose Optuna state has changed, and the Optuna state of the study."""

    trial: Trial
    changed: tuple[Trial, ...]
    memory: Mapping[str, Any]


def propose_trial(search: Search, trials: Sequence[Trial], memory: Mapping[str, Any]) -> Proposal:
    """Return the proposal for the next trial, whose number is that of the trials so far; writes nothing.

    The same arguments always give the same proposal.

    Args:
        search: the study.
        trials: all trials so far, in the order of their numbers 0, 1, 2, ...
        memory: state of the study after the last proposal; empty for the first.

    Raises:
        ModuleNotFoundError: the sampler needs a package that is not installed (cmaes).
    """
    import optuna

    storage = optuna.storages.InMemoryStorage()
    study = build_study(search, trials, storage)
    study_id = storage.get_study_id_from_name(study.study_name)
    for key, value in memory.items():
        storage.set_study_system_attr(study_id, key, value)
    number = len(trials)
    study.sampler = sampler_for(search, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experimental parts of Optuna
        optuna_trial = study.ask(distributions_of(search.ranges))
    frozen_trials = study.get_trials(deepcopy=False)
    changed = tuple(
        replace(old, attrs=dict(new.system_attrs))
        for old, new in zip(trials, frozen_trials, strict=False)
        if dict(new.system_attrs) != dict(old.attrs)
    )
    study_memory = dict(storage.get_study_system_attrs(study_id))
    return Proposal(
        Trial(number, dict(optuna_trial.params), attrs=dict(frozen_trials[number].system_attrs)), changed, study_memory
    )


def check_pruning(search: Search, trials: Sequence[Trial], number: int) -> tuple[bool, Trial]:
    """Return (pruner's decision to end the trial at the end of its curve, the trial with its new Optuna state).

    True means to end it. Writes nothing; the caller stores the trial.

    Args:
        search: the study; without a pruner the decision is False.
        trials: all trials, in the order of their numbers, with their curves.
        number: number of the trial to check.
    """
    import optuna

    storage = optuna.storages.InMemoryStorage()
    study = build_study(search, trials, storage)
    study_id = storage.get_study_id_from_name(study.study_name)
    trial = optuna.trial.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))
    ends = trial.should_prune()
    after = study.get_trials(deepcopy=False)[number]
    return ends, replace(trials[number], attrs=dict(after.system_attrs))


def best_trial_numbers(search: Search, trials: Sequence[Trial]) -> list[int]:
    """Return the sorted numbers of the best trials: one for a single objective, the Pareto front for several.

    Only trials that are done count, by the directions of the search. Empty without any.
    """
    done = [trial for trial in trials if trial.standing == "done"]
    if not done:
        return []
    study = build_study(search, trials)
    return sorted(
        {study.best_trial.number} if len(search.objectives) == 1 else {trial.number for trial in study.best_trials}
    )


def build_study(
    search: Search, trials: Sequence[Trial], storage: optuna.storages.BaseStorage | None = None
) -> optuna.Study:
    """Return the Optuna study with these trials, in memory unless `storage` is given.

    Sets Optuna's log level to WARNING. The study has the sampler for the next trial and the search's pruner.

    Args:
        search: the study.
        trials: trials in the order of their numbers, which become Optuna's numbers.
        storage: empty storage to write to; None for memory.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(
            storage=storage, directions=list(search.objectives.values()), sampler=sampler_for(search, len(trials)),
            pruner=pruner_for(search), study_name=NAME.format(seed=search.seed),
        )  # fmt: skip
    study.add_trials(_frozen_trial(search, trial) for trial in trials)
    return study


def _frozen_trial(search: Search, trial: Trial) -> FrozenTrial:
    """Return the trial in Optuna's form.

    Parameters outside the current ranges are left out, since a study may have been widened. The state is RUNNING for
    asked, COMPLETE for done, PRUNED for pruned or diverged, and FAIL for failed. Diverged trials have no curve. A
    pruned trial of a single objective has the last value of its curve as value.
    """
    from optuna.trial import TrialState, create_trial

    states = {
        "asked": TrialState.RUNNING,
        "done": TrialState.COMPLETE,
        "pruned": TrialState.PRUNED,
        # TPE ranks a pruned trial without a curve below every measured one
        "diverged": TrialState.PRUNED,
        "failed": TrialState.FAIL,
    }
    distributions = distributions_of(search.ranges)
    # a study may have new ranges: an earlier parameter counts if they contain it
    valid_params = {
        path: value
        for path, value in trial.params.items()
        if path in distributions and _contains(distributions[path], value)
    }
    last = trial.curve[-1][1] if trial.standing == "pruned" and trial.curve and len(search.objectives) == 1 else None
    return create_trial(
        state=states[trial.standing],
        params=valid_params,
        distributions={path: distributions[path] for path in valid_params},
        values=trial.values if trial.standing == "done" else None if last is None else (last,),
        intermediate_values={} if trial.standing == "diverged" else dict(trial.curve),
        system_attrs=dict(trial.attrs),
    )


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    """Return True if the distribution contains the value; False for a level that is no longer in the search space."""
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except ValueError:
        return False  # a level that is no longer in the search space


def distributions_of(ranges: Mapping[str, Range]) -> dict[str, BaseDistribution]:
    """Return Optuna's distribution of every range."""
    return {path: _distribution(range_) for path, range_ in ranges.items()}


def _distribution(range_: Range) -> BaseDistribution:
    """Return Optuna's distribution of a range: categorical for levels, else int or float.

    An interval is an int distribution if its ends are integers and its step, if any, is a whole number.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(range_, LevelChoice):
        return CategoricalDistribution(range_.levels)
    assert isinstance(range_, Interval)
    if range_.is_integer and (range_.step is None or float(range_.step).is_integer()):
        return IntDistribution(int(range_.low), int(range_.high), log=range_.log, step=int(range_.step or 1))
    return FloatDistribution(range_.low, range_.high, log=range_.log, step=range_.step)


def sampler_for(search: Search, number: int) -> optuna.samplers.BaseSampler:
    """Return the sampler that proposes the trial of that number, seeded by the study's seed and the number.

    Options of the search that the sampler lacks are ignored. `startup` trials are random: 10 by default for tpe, 1 for
    cmaes.
    """
    from optuna import samplers

    seed = int.from_bytes(hashlib.sha256(f"{search.seed} {number}".encode()).digest()[:4], "little")
    options = dict(search.options or {})
    match search.sampler:
        case "random":
            return samplers.RandomSampler(seed=seed)
        case "tpe":
            # running trials count as bad, so that concurrent proposals differ
            return samplers.TPESampler(seed=seed, n_startup_trials=options.get("startup", 10), constant_liar=True)
        case "cmaes":
            return samplers.CmaEsSampler(
                seed=seed, n_startup_trials=options.get("startup", 1), popsize=options.get("population"),
                independent_sampler=samplers.RandomSampler(seed=seed), warn_independent_sampling=False,
            )  # fmt: skip
        case "nsga2":
            # Optuna's default of 50 would be one random generation in most studies of complete trainings
            size = options.get("population", max(4, round(search.trials**0.5)))
            return samplers.NSGAIISampler(seed=seed, population_size=size)


def pruner_for(search: Search) -> optuna.pruners.BasePruner:
    """Return the pruner of the search; one that never prunes if it has none.

    asha and hyperband keep a third at each rung, from rung 1; median starts after four trials.
    """
    from optuna import pruners

    match search.pruner:
        case "asha":
            return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        case "hyperband":
            return pruners.HyperbandPruner(min_resource=1, max_resource="auto", reduction_factor=3)
        case "median":
            return pruners.MedianPruner(n_startup_trials=4)
        case None:
            return pruners.NopPruner()
