"""Studies that are made again at every question, against Optuna's own that are not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import optuna
import pytest
from atma_sweep.results.studies import optuna_study as studies
from atma_sweep.results.studies.optuna_study import Trial, best_trial_numbers, build_study, check_pruning, propose_trial
from atma_sweep.results.studies.search import Interval, LevelChoice, Search
from tiers import shared_out

RANGES = {
    "train.matrix_lr": Interval(1e-3, 1e-1, log=True),
    "model.n_layers": Interval(2, 8),
    "train.clip": Interval(0.5, 2.0),
}
MIXED = RANGES | {"attn_type": LevelChoice(("polar", "nope"))}


def score(params: Any) -> tuple[float, float]:
    lr, layers, clip = params["train.matrix_lr"], params["model.n_layers"], params["train.clip"]
    good = (math.log10(lr) + 2) ** 2 + (layers - 5) ** 2 / 10 + (clip - 1) ** 2
    return good - 0.5 * (params.get("attn_type") == "nope"), layers * 1.0


def search_of(sampler: Any, **more: Any) -> Search:
    ranges = RANGES if sampler == "cmaes" else MIXED
    objectives = {"val_loss": "minimize"} | ({"tokens_per_s": "maximize"} if sampler == "nsga2" else {})
    return Search(ranges, objectives, sampler, **{"trials": 16, "options": {"startup": 3, "population": 4}} | more)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", shared_out(["random", "tpe", "nsga2", "cmaes"], lambda name: name != "cmaes"))
def test_rebuilt_study_proposes_like_a_persistent_study(sampler: str) -> None:
    search = search_of(sampler)
    stays = optuna.create_study(directions=list(search.objectives.values()), sampler=studies.sampler_for(search, 0))
    trials: list[Trial] = []
    memory: Any = {}
    for number in range(16):
        stays.sampler = studies.sampler_for(search, number)
        wanted = stays.ask(studies.distributions_of(search.ranges))
        proposal = propose_trial(search, trials, memory)
        memory = json.loads(json.dumps(proposal.memory))
        for old in proposal.changed:
            trials[old.number] = old
        assert proposal.trial.params == wanted.params, number
        values = score(wanted.params)[: len(search.objectives)]
        stays.tell(wanted, values)
        trials.append(replace(proposal.trial, standing="done", values=values))
    assert best_trial_numbers(search, trials) == sorted(best_trial.number for best_trial in stays.best_trials)
    assert len({tuple(sorted(map(str, trial.params.items()))) for trial in trials}) > 8


def test_unfinished_and_failed_trials_have_their_own_states() -> None:
    """Eight asked at once get eight proposals, none twice; a failed one says nothing about its neighbourhood."""
    search = search_of("tpe")
    trials: list[Trial] = []
    for _ in range(8):
        trials.append(propose_trial(search, trials, {}).trial)
    assert len({trial.params["train.matrix_lr"] for trial in trials}) == 8
    trials[3] = replace(trials[3], standing="failed")
    trials[5] = replace(trials[5], standing="done", values=(1.0,))
    assert best_trial_numbers(search, trials) == [5]
    assert [frozen.state.name for frozen in build_study(search, trials).trials].count("RUNNING") == 6


@pytest.mark.thorough
def test_the_search_finds_what_chance_does_not() -> None:
    best_values = {}
    for sampler in ("random", "tpe"):
        search = search_of(sampler, trials=60, options={"startup": 10})
        ends = []
        for seed in range(3):
            trials: list[Trial] = []
            for _ in range(60):
                trial = propose_trial(replace(search, seed=seed), trials, {}).trial
                trials.append(replace(trial, standing="done", values=score(trial.params)[:1]))
            ends.append(min(trial.values[0] for trial in trials if trial.values))
        best_values[sampler] = sum(ends) / 3
    # the optimum is -0.5
    assert best_values["tpe"] < best_values["random"] - 0.02
    assert best_values["tpe"] < -0.45


@pytest.mark.parametrize("pruner", ["asha", "hyperband", "median"])
def test_rebuilt_pruner_prunes_the_same_trials(pruner: Any) -> None:
    search = search_of("random", pruner=pruner)
    stays = optuna.create_study(
        study_name="study-0", sampler=studies.sampler_for(search, 0), pruner=studies.pruner_for(search)
    )
    trials: list[Trial] = []
    ended = {"stays": [], "again": []}  # type: dict[str, list[tuple[int, int]]]
    for number in range(12):
        stays.sampler = studies.sampler_for(search, number)
        wanted = stays.ask(studies.distributions_of(search.ranges))
        trials.append(propose_trial(search, trials, {}).trial)
        level = score(wanted.params)[0]
        for rung in range(1, 10):
            loss = level + 3 / rung
            wanted.report(loss, rung)
            trials[number] = replace(trials[number], curve=(*trials[number].curve, (rung, loss)))
            end, trials[number] = check_pruning(search, trials, number)
            if wanted.should_prune():
                ended["stays"].append((number, rung))
            if end:
                ended["again"].append((number, rung))
                break
        if end:
            stays.tell(wanted, state=optuna.trial.TrialState.PRUNED)
            trials[number] = replace(trials[number], standing="pruned")
        else:
            stays.tell(wanted, loss)
            trials[number] = replace(trials[number], standing="done", values=(loss,))
    assert ended["again"] == ended["stays"]
    assert 3 <= len(ended["again"]) < 12
    # what would have been the best is still there
    assert min(score(trial.params)[0] for trial in trials) == min(
        score(trial.params)[0] for trial in trials if trial.standing == "done"
    )


def test_a_widened_study_keeps_what_the_new_ranges_hold() -> None:
    search = search_of("tpe")
    trials = []
    for _ in range(6):
        trial = propose_trial(search, trials, {}).trial
        trials.append(replace(trial, standing="done", values=score(trial.params)[:1]))
    wider = replace(
        search,
        ranges=MIXED | {"train.matrix_lr": Interval(1e-2, 1.0, log=True), "model.mlp_ratio": LevelChoice((2, 4))},
    )
    study = build_study(wider, trials)
    for trial, frozen in zip(trials, study.trials, strict=True):
        assert ("train.matrix_lr" in frozen.params) == (trial.params["train.matrix_lr"] >= 1e-2)
        assert frozen.params["attn_type"] == trial.params["attn_type"]
        assert frozen.values == list(trial.values or ())
    assert propose_trial(wider, trials, {}).trial.params.keys() == wider.ranges.keys()
