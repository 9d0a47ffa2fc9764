"""An Optuna study that is made again whenever it is asked: the database holds the trials, Optuna only thinks about them.

So a launch that is killed anywhere has nothing to repair. What a sampler or a pruner remembers of a trial is kept with the trial
(`attrs`), and its random numbers come from the study's seed and the trial's number: the same trials give the same proposal,
whether one process asked for them all or twenty.
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
"""Hyperband shares trials out to its brackets by the study's name."""


@dataclass(frozen=True)
class Trial:
    """One proposal, and what came of it."""

    number: int
    """0, 1, 2, ... in the order in which they were proposed."""
    params: Mapping[str, Any]
    """By path, the level that was proposed."""
    standing: TrialStanding = "asked"
    values: tuple[float, ...] | None = None
    """Of the objectives, in the search's order; None until it is done."""
    curve: tuple[tuple[int, float], ...] = ()
    """(rung, the first objective there), rungs 1, 2, ... being validations."""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """What Optuna remembers of it, JSON."""
    cell: str | None = None
    """Id of its cell; None where its settings make none."""
    reason: str | None = None
    """Why it failed or was pruned, for people."""


@dataclass(frozen=True)
class Proposal:
    """A proposal, earlier trials of which Optuna now remembers more, and what it remembers of the whole study."""

    trial: Trial
    changed: tuple[Trial, ...]
    memory: Mapping[str, Any]


def propose_trial(search: Search, trials: Sequence[Trial], memory: Mapping[str, Any]) -> Proposal:
    """The next trial after these, which are all there were, in order of their numbers; `memory` is what the last answer brought.

    Raises ModuleNotFoundError where the sampler needs a package that is not there (cmaes).
    """
    study = made(search, trials)
    for key, value in memory.items():
        study._storage.set_study_system_attr(study._study_id, key, value)
    number = len(trials)
    study.sampler = sampler_for(search, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on parts of Optuna that it calls experimental
        found = study.ask(distributions_of(search.ranges))
    now = study.get_trials(deepcopy=False)
    changed = tuple(
        replace(old, attrs=dict(new.system_attrs))
        for old, new in zip(trials, now, strict=False)
        if dict(new.system_attrs) != dict(old.attrs)
    )
    kept = dict(study._storage.get_study_system_attrs(study._study_id))
    return Proposal(Trial(number, dict(found.params), attrs=dict(now[number].system_attrs)), changed, kept)


def check_pruning(search: Search, trials: Sequence[Trial], number: int) -> tuple[bool, Trial]:
    """Whether the pruner would end that trial where its curve now ends, and the trial with what the pruner remembers of it."""
    import optuna

    study = made(search, trials)
    trial = optuna.trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
    ends = trial.should_prune()
    after = study.get_trials(deepcopy=False)[number]
    return ends, replace(trials[number], attrs=dict(after.system_attrs))


def best(search: Search, trials: Sequence[Trial]) -> list[int]:
    """Numbers of the trials that none beats: one objective's best, or the Pareto front of several."""
    done = [trial for trial in trials if trial.standing == "done"]
    if not done:
        return []
    study = made(search, trials)
    return sorted(
        {study.best_trial.number} if len(search.objectives) == 1 else {one.number for one in study.best_trials}
    )


def made(search: Search, trials: Sequence[Trial], storage: optuna.storages.BaseStorage | None = None) -> optuna.Study:
    """The study as these trials leave it, in memory unless `storage` says where."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(
            storage=storage, directions=list(search.objectives.values()), sampler=sampler_for(search, len(trials)),
            pruner=pruner_for(search), study_name=NAME.format(seed=search.seed),
        )  # fmt: skip
    study.add_trials(_frozen(search, trial) for trial in trials)
    return study


def _frozen(search: Search, trial: Trial) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    states = {
        "asked": TrialState.RUNNING,
        "done": TrialState.COMPLETE,
        "pruned": TrialState.PRUNED,
        # worse than whatever was measured, which is what TPE takes a pruned trial without a curve for
        "diverged": TrialState.PRUNED,
        "failed": TrialState.FAIL,
    }
    distributions = distributions_of(search.ranges)
    # a study may have been widened: what an earlier trial proposed counts where the new ranges still hold it
    known = {
        path: value
        for path, value in trial.params.items()
        if path in distributions and _holds(distributions[path], value)
    }
    last = trial.curve[-1][1] if trial.standing == "pruned" and trial.curve and len(search.objectives) == 1 else None
    return create_trial(
        state=states[trial.standing],
        params=known,
        distributions={path: distributions[path] for path in known},
        values=trial.values if trial.standing == "done" else None if last is None else (last,),
        intermediate_values={} if trial.standing == "diverged" else dict(trial.curve),
        system_attrs=dict(trial.attrs),
    )


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except ValueError:
        return False  # a level that is searched no more


def distributions_of(ranges: Mapping[str, Range]) -> dict[str, BaseDistribution]:
    """Return the distribution of Optuna for every range."""
    return {path: _distribution(one) for path, one in ranges.items()}


def _distribution(one: Range) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(one, LevelChoice):
        return CategoricalDistribution(one.levels)
    assert isinstance(one, Interval)
    if one.whole and (one.step is None or float(one.step).is_integer()):
        return IntDistribution(int(one.low), int(one.high), log=one.log, step=int(one.step or 1))
    return FloatDistribution(one.low, one.high, log=one.log, step=one.step)


def sampler_for(search: Search, number: int) -> optuna.samplers.BaseSampler:
    """Return the sampler that proposes the trial of that number."""
    from optuna import samplers

    seed = int.from_bytes(hashlib.sha256(f"{search.seed} {number}".encode()).digest()[:4], "little")
    options = dict(search.options or {})
    match search.sampler:
        case "random":
            return samplers.RandomSampler(seed=seed)
        case "tpe":
            # what runs at this moment counts as bad, so that trials side by side are not all in one place
            return samplers.TPESampler(seed=seed, n_startup_trials=options.get("startup", 10), constant_liar=True)
        case "cmaes":
            return samplers.CmaEsSampler(
                seed=seed, n_startup_trials=options.get("startup", 1), popsize=options.get("population"),
                independent_sampler=samplers.RandomSampler(seed=seed), warn_independent_sampling=False,
            )  # fmt: skip
        case "nsga2":
            # Optuna's own 50 would be one generation, all at random, of most studies of whole trainings
            size = options.get("population", max(4, round(search.trials**0.5)))
            return samplers.NSGAIISampler(seed=seed, population_size=size)


def pruner_for(search: Search) -> optuna.pruners.BasePruner:
    """Return the pruner of the search; one that ends nothing where it has none."""
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
