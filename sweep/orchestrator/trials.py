"""Gives a supervisor the trials of a study: proposes one wherever there is room, and ends those that a pruner gives up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...results.failure_classes import PRUNED
from ...results.store.records import Attempt
from ...results.store.store import Store
from ...results.studies import optuna_study, study_store
from ...results.studies.optuna_study import Trial
from ...results.studies.study_store import StudyWriter
from ..errors import GridError
from ..grid.cell import Cell
from ..planning import cost_estimate, planner
from ..planning.cost_estimate import Pricer
from ..planning.planner import Task
from ..planning.studies import StudyProgress, design_remarks
from .supervisor import CapacityCheck

PRUNED_AT = "by {pruner}, with a loss of {loss:.4f} at validation {rung}"


class TrialSource:
    """A supervisor's Source. The database holds every trial before its cell is trained, and all that the sampler remembers."""

    def __init__(self, progress: StudyProgress, store: Store, fence: int, prices: Pricer) -> None:
        """`fence`: under which the caller holds the sweep. `prices`: of the machine, as the launch begins."""
        self._space, self._search = progress.space, progress.space.search
        sweep = progress.space.grid.name
        self._store, self._prices = store, prices
        self._studies = StudyWriter(store, sweep, fence)
        self._memory = study_store.sampler_state(store, sweep)
        self._trials = list(progress.trials)
        self._looked: dict[int, int] = {}
        """By attempt: how many validations were seen."""
        self._write_back(study_store.trials_of(store, sweep))
        listed = {cell for cell, _ in store.members(sweep)}
        self._studies.enlist([planner.record(cell) for key, cell in progress.cells.items() if key not in listed])

    def _write_back(self, before: Sequence[Trial]) -> None:
        changed = [now for old, now in zip(before, self._trials, strict=True) if now != old]
        changed = [self._with_curve(one) if one.standing == "done" else one for one in changed]
        for one in changed:
            self._trials[one.number] = one
        if changed:
            self._studies.tell(*changed)

    # --- what a supervisor asks -----------------------------------------------------------------------------------------

    def further(self, fits: CapacityCheck) -> Sequence[Task]:
        """The next trial that has anything to train or to measure."""
        resources = self._space.ends[0].config.resources
        while len(self._trials) < self._search.trials and fits(resources):
            tasks = self._propose()
            if tasks:
                return tasks
        return []

    def ended(self, task: Task, attempt: Attempt, again: bool) -> None:
        """What has become of its cell becomes of all trials of it."""
        if again:
            return
        now = [self._after(trial, attempt) for trial in self._trials if trial.cell == task.cell.id]
        now = [trial for trial in now if trial != self._trials[trial.number]]
        for trial in now:
            self._trials[trial.number] = trial
        if now:
            self._studies.tell(*now)

    def hopeless(self, attempts: Sequence[Attempt]) -> Mapping[int, str]:
        """Those that the pruner would end where their curves now end."""
        found: dict[int, str] = {}
        if self._search.pruner is None:
            return found
        for attempt in attempts:
            if attempt.kind == "train" and attempt.phase == "training" and attempt.step < (attempt.steps_total or 0):
                why = self._look(attempt)
                if why is not None:
                    found[attempt.id] = why
        return found

    # --- proposing ------------------------------------------------------------------------------------------------------

    def _propose(self) -> list[Task]:
        asked = optuna_study.propose_trial(self._search, self._trials, self._memory)
        trial = replace(asked.trial, params=self._space.tidy(asked.trial.params))
        try:
            cell = self._space.cell(trial.params)
        except GridError as error:
            trial = replace(trial, standing="failed", reason=f"makes no cell: {error.problem}")
            self._add(trial, None, asked)
            return []
        twin = next((one for one in self._trials if one.cell == cell.id), None)
        if twin is not None:
            same = replace(twin, number=trial.number, params=trial.params, attrs=trial.attrs)
            self._add(same, cell, asked)
            return []
        self._add(replace(trial, cell=cell.id), cell, asked)
        return self._tasks(cell)

    def _add(self, trial: Trial, cell: Cell | None, asked: optuna_study.Proposal) -> None:
        record = planner.record(cell) if cell is not None else None
        cost = cost_estimate.forecast([cell], self._prices) if cell is not None else None
        self._studies.propose(trial, record, asked.changed, asked.memory, cost)
        for old in asked.changed:
            self._trials[old.number] = old
        self._memory = dict(asked.memory)
        self._trials.append(trial)

    def _tasks(self, cell: Cell) -> list[Task]:
        """What is left to do for a cell that was proposed now; one that somebody has trained already counts at once."""
        states = self._store.states({cell.id})
        plan = planner.plan([cell], states)
        word = plan.standings[cell.id]
        if word == "weights gone":
            return planner.plan([cell], states, retrain=True).tasks
        if word in ("done", "diverged"):
            trial = self._trials[-1]
            state = states[cell.id]
            now = (
                replace(trial, standing="diverged", reason=state.cause) if word == "diverged" else self._finished(trial)
            )
            self._trials[-1] = now
            self._studies.tell(now)
        return plan.tasks

    # --- what became of them --------------------------------------------------------------------------------------------

    def _after(self, trial: Trial, attempt: Attempt) -> Trial:
        if attempt.state == "done":
            return self._finished(trial)
        if attempt.state == "diverged":
            return replace(trial, standing="diverged", values=None, reason=attempt.cause)
        if attempt.state == "failed":
            return replace(trial, standing="failed", values=None, reason=attempt.cause)
        if attempt.failure == PRUNED:
            return replace(trial, standing="pruned", reason=attempt.cause)
        return trial  # the launch ends, and another goes on with it

    def _finished(self, trial: Trial) -> Trial:
        return design_remarks(self._search, self._store, self._with_curve(trial))

    def _with_curve(self, trial: Trial) -> Trial:
        assert trial.cell is not None
        state = self._store.states({trial.cell})[trial.cell]
        return (
            trial if state.trained_attempt_id is None else replace(trial, curve=self._curve(state.trained_attempt_id))
        )

    def _curve(self, attempt: int) -> tuple[tuple[int, float], ...]:
        losses = [point.val_loss for point in self._store.curve(attempt) if point.val_loss is not None]
        finite = itertools.takewhile(math.isfinite, losses)  # training ends where a loss is not
        return tuple(enumerate(finite, 1))

    # --- pruning --------------------------------------------------------------------------------------------------------

    def _look(self, attempt: Attempt) -> str | None:
        every = self._space.ends[0].config.eval.validate_every
        if attempt.step // every <= self._looked.get(attempt.id, 0):
            return None
        curve = self._curve(attempt.id)
        self._looked[attempt.id] = len(curve)
        trial = next((one for one in self._trials if one.cell == attempt.cell_id and one.standing == "asked"), None)
        if trial is None:
            return None
        # one validation after the other, however many came since the last look: whoever looks more often decides the same
        for rung, loss in curve[len(trial.curve) :]:
            self._trials[trial.number] = replace(self._trials[trial.number], curve=curve[:rung])
            ends, now = optuna_study.check_pruning(self._search, self._trials, trial.number)
            self._trials[trial.number] = now
            if ends:
                # written when it has ended: a launch that is killed before has to come to the same verdict again
                return PRUNED_AT.format(pruner=self._search.pruner, rung=rung, loss=loss)
            self._studies.tell(now)
        return None
