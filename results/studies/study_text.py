"""Text and JSON about the progress of a study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..console.text import counted
from .optuna_study import Trial
from .search import Search

DIRECTION_PHRASES = {"minimize": "less is better", "maximize": "more is better"}


def remaining_trials(search: Search, trials: Sequence[Trial]) -> int:
    """Return the number of trials that are still to be proposed; 0 if more exist than the search asks for."""
    return max(0, search.trials - len(trials))


def count_standings(trials: Sequence[Trial]) -> Counter[str]:
    """Return the number of trials by standing; standings without trials are absent."""
    return Counter(trial.standing for trial in trials)


def describe_study(search: Search, trials: Sequence[Trial]) -> str:
    """Return one line about a study: size, sampler, objectives, trials by standing, best value of one objective.

    Example: "study of 20 trials (tpe) for val_loss (less is better): 3 done, 1 not finished, 16 to propose; best 3.1,
    trial 2". Trials that are `asked` are called not finished. The best value is left out for several objectives or
    without a result.
    """
    objectives_text = " and ".join(
        f"{name} ({DIRECTION_PHRASES[direction]})" for name, direction in search.objectives.items()
    )
    sampler_text = search.sampler + (f", pruner {search.pruner}" if search.pruner else "")
    counts = sorted(
        (word if word != "asked" else "not finished", count) for word, count in count_standings(trials).items()
    )
    parts = [f"{count} {standing}" for standing, count in counts]
    parts += [f"{remaining_trials(search, trials)} to propose"] if remaining_trials(search, trials) else []
    line = f"study of {counted(search.trials, 'trial')} ({sampler_text}) for {objectives_text}: {', '.join(parts) or 'none'}"
    first = best_single_objective(search, trials)
    return (
        line if first is None or first.values is None else f"{line}; best {first.values[0]:.5g}, trial {first.number}"
    )


def best_single_objective(search: Search, trials: Sequence[Trial]) -> Trial | None:
    """Return the best finished trial of a study with one objective; of equal ones the one with the lowest number.

    None for several objectives or no finished trial.
    """
    if len(search.objectives) > 1:
        return None
    sign = 1 if next(iter(search.objectives.values())) == "minimize" else -1
    done = [trial for trial in trials if trial.standing == "done" and trial.values is not None]
    return min(done, key=lambda trial: (sign * trial.values[0], trial.number), default=None)  # type: ignore[index]


def study_as_json(search: Search, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the search's main fields, the trials by standing, and the number of remaining trials as JSON values.

    Keys: sampler, pruner, objectives (direction by measure), trials (planned number), counts (number by standing), left
    (number of trials still to be proposed). Standings are asked, done, pruned, diverged and failed.
    """
    return {
        "sampler": search.sampler, "pruner": search.pruner, "objectives": dict(search.objectives),
        "trials": search.trials, "counts": dict(count_standings(trials)), "left": remaining_trials(search, trials),
    }  # fmt: skip
