"""Table `study`: the best trials of a study, and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...results import metrics
from ...results.console.text import counted
from ...results.store.store import Store
from ...results.studies.optuna_study import Trial
from ..number_format import format_number
from ..stats.study_data import STANDING_LABELS, CellCost, Objective, Study, cell_costs, level_text, study_of
from ..sweep_data import SweepData
from ..table import Table, TableEntry
from ..table_builder import EMPTY_TEXT, TableRow, build_table
from .run_records import gpu_share

BEST = 10
"""Number of trials that are listed without --all-rows."""
ENDS = ("done", "pruned", "diverged", "failed", "asked")
SELECTED = (
    "The best of many trials is partly luck. To check its settings, run a grid with them and several seeds (`seeds:`)."
)


def study_table(store: Store, data: SweepData, *, all_rows: bool = False) -> Table:
    """Return the table `study`: the best trials, one row each, with settings, standing, cost and objectives.

    A trial is one proposed configuration of a study. The best trial, or the Pareto front of several objectives, comes
    first, then other finished trials by the first objective. Without `all_rows` the first ten trials that are done are
    listed; with it every trial: done, pruned, diverged, failed and asked ones, in this order. Costs are hours of GPUs
    if any cell asks for one, else of cores.

    Raises:
        ReportError: The sweep is not a study.
    """
    study = study_of(store, data)
    ranked = _ranked_trials(study)
    shown = ranked if all_rows else [trial for trial in ranked if trial.standing == "done"][:BEST]
    attempts = store.attempts_of(sorted({trial.cell for trial in study.trials if trial.cell is not None}))
    shares = {cell: gpu_share(config) for cell, config in study.data.configs.items()}
    costs = cell_costs(study, attempts, shares)
    unit = (
        "GPU h" if any(config.get("resources", {}).get("gpus") for config in study.data.configs.values()) else "core h"
    )
    first = _first_trial_by_cell(study.trials)
    lines = [_trial_row(study, trial, costs, first) for trial in shown]
    headings = ("Trial", "Cell", *(study.names[path] for path in study.search.ranges), "Standing", "Seconds", unit)
    return build_table(
        study.data, "study", "Study", headings, lines,
        numbers=[objective.words for objective in study.objectives], notes=_study_notes(study, len(shown), all_rows, costs, unit),
        options={"all_rows": True} if all_rows else {}, sources=store.sources([attempt.id for attempt in attempts]),
        above=(f"{study.search_text()}.", f"{study.trial_counts_text()}."),
    )  # fmt: skip


def _ranked_trials(study: Study) -> list[Trial]:
    """Return all trials ranked: by standing, then those of `study.best` first.

    Standings are in the order done, pruned, diverged, failed, asked. Within these, trials that are done come by the
    first objective, the better first; ties and other standings by number.
    """
    sign = study.objectives[0].sign

    def sort_key(trial: Trial) -> tuple[Any, ...]:
        value = -sign * trial.values[0] if trial.standing == "done" and trial.values else 0.0
        return ENDS.index(trial.standing), trial.number not in study.best, value, trial.number

    return sorted(study.trials, key=sort_key)


def _first_trial_by_cell(trials: Sequence[Trial]) -> Mapping[str, int]:
    """Return, by cell id, the number of the trial that first proposed a cell; the cell was trained for that trial.

    Args:
        trials: Trials in the order of their numbers; those without a cell are skipped.
    """
    first_trials: dict[str, int] = {}
    for trial in trials:
        if trial.cell is not None:
            first_trials.setdefault(trial.cell, trial.number)
    return first_trials


def _trial_row(study: Study, trial: Trial, costs: Mapping[str, CellCost], first: Mapping[str, int]) -> TableRow:
    """Return the row of a trial; its cost is zero if an earlier trial proposed the same cell, or without a cell.

    Labels: number, cell id, one text per searched setting ("-" where the trial lacks it), standing, seconds, hours.
    JSON fields: number, cell, params, standing, reason, best, seconds, hours, and curve ([validation, value] pairs).

    Args:
        study: The study.
        trial: The trial.
        costs: Cost by cell id.
        first: Number of the trial that first proposed a cell, by cell id.
    """
    owner = first.get(trial.cell or "", trial.number)
    cost = costs.get(trial.cell or "", CellCost(seconds=0.0, hours=0.0)) if owner == trial.number else None
    cost = cost or CellCost(seconds=0.0, hours=0.0)
    standing = STANDING_LABELS.get(trial.standing, trial.standing)
    if owner != trial.number:
        standing += f" (cell of trial {owner})"
    elif trial.standing == "pruned" and trial.curve:
        standing += f" at validation {trial.curve[-1][0]}"
    settings = [level_text(trial.params[path]) if path in trial.params else EMPTY_TEXT for path in study.search.ranges]
    labels = (
        str(trial.number),
        trial.cell or EMPTY_TEXT,
        *settings,
        standing,
        f"{cost.seconds:.0f}",
        f"{cost.hours:.3g}",
    )
    json_fields: dict[str, Any] = {"number": trial.number, "cell": trial.cell, "params": dict(trial.params)}
    json_fields |= {"standing": trial.standing, "reason": trial.reason, "best": trial.number in study.best}
    json_fields |= {"seconds": cost.seconds, "hours": cost.hours, "curve": [list(point) for point in trial.curve]}
    entries = tuple(_objective_entry(study, trial, objective) for objective in study.objectives)
    return TableRow(labels=labels, entries=entries, origins=tuple(study.origins([trial])), json_fields=json_fields)


def _objective_entry(study: Study, trial: Trial, objective: Objective) -> TableEntry:
    """Return the entry of a trial's value of an objective; "-" unless the trial is done.

    It is bold for trials of `study.best`. The value is in the stored unit (shares as fractions); the text has shares in
    %.
    """
    metric = metrics.builtin_metric(objective.probe, objective.metric)
    base = TableEntry(
        text=EMPTY_TEXT, heading=objective.words, probe=objective.probe, metric=objective.metric, length=objective.length,
        direction=objective.sign, unit=metric.unit if metric else None, origins=tuple(study.origins([trial])),
    )  # fmt: skip
    if trial.standing != "done" or trial.values is None:
        return base
    value = trial.values[objective.index]
    text = format_number(value, metric.decimals, percent=metric.percent) if metric else f"{value:.4g}"
    return replace(base, text=text, value=value, best=trial.number in study.best)


def _study_notes(study: Study, shown: int, all_rows: bool, costs: Mapping[str, CellCost], unit: str) -> list[str]:
    """Return the notes on bold values, units, costs and unlisted trials, and a caution if several trials are done.

    If no trial is done, a single note says so.

    Args:
        study: The study.
        shown: Number of listed trials.
        all_rows: Whether --all-rows was given.
        costs: Cost by cell id, which is summed.
        unit: "GPU h" or "core h".
    """
    seconds, hours = (sum(getattr(cost, name) for cost in costs.values()) for name in ("seconds", "hours"))
    units = ", ".join(f"{objective.words} in {objective.unit}" for objective in study.objectives if objective.unit)
    first = (
        "Bold: best trial."
        if len(study.objectives) == 1
        else "Bold: Pareto front. Ordered by front, then by the first objective."
    )
    notes = [
        first + (f" {units[0].upper()}{units[1:]}." if units else ""),
        f"Seconds and {unit}: all attempts of a trial's cell, finished or not; a cell that an earlier trial "
        f"proposed is not charged again. All trials together: {seconds:,.0f} s, {hours:.3g} {unit}.",
    ]
    if not study.done:
        return [f"No trial of sweep {study.name} is done yet."]
    if not all_rows and shown < len(study.trials):
        notes.append(f"{shown} of {counted(len(study.trials), 'trial')}; --all-rows lists all.")
    return [*notes, *([SELECTED] if len(study.done) > 1 else [])]
