"""Trials of a study for a supervisor: proposes one whenever an attempt fits, and prunes unpromising ones."""

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
from ..planning.studies import StudyProgress, with_objectives
from .supervisor import CapacityCheck

PRUNED_AT = "by {pruner}, with a loss of {loss:.4f} at validation {rung}"
"""Reason recorded for a pruned attempt."""


class TrialSource:
    """Task source of a study: proposes trials, stores their outcomes, and prunes unpromising ones.

    A trial is one setting of the search space; its cell is the config that trains it. The database holds every trial
    before its cell is trained, and the sampler's entire state.
    """

    def __init__(self, progress: StudyProgress, store: Store, fence: int, prices: Pricer) -> None:
        """Load the study, store trials whose state changed since the last launch, and enlist their cells in the sweep.

        Writes to the database.

        Args:
            progress: Study with its trials so far.
            store: Database.
            fence: Fencing token under which the caller holds the sweep.
            prices: Pricing on the machine, for the forecast of each trial.

        Raises:
            LeaseLost: Another supervisor holds the sweep.
        """
        self._space, self._search = progress.space, progress.space.search
        sweep = progress.space.grid.name
        self._store, self._prices = store, prices
        self._study_writer = StudyWriter(store, sweep, fence)
        self._sampler_state = study_store.sampler_state(store, sweep)
        self._trials = list(progress.trials)
        self._rungs_checked: dict[int, int] = {}
        """Number of validations already checked for pruning, by attempt id."""
        self._store_changed_trials(study_store.trials_of(store, sweep))
        listed = {cell for cell, _ in store.members(sweep)}
        self._study_writer.append_cells(
            [planner.to_record(cell) for key, cell in progress.cells.items() if key not in listed]
        )

    def _store_changed_trials(self, before: Sequence[Trial]) -> None:
        """Write the trials that differ from the stored ones, finished ones with their loss curve; nothing if none does.

        Args:
            before: Stored trials; as many as the current ones, in the same order.
        """
        changed = [now for old, now in zip(before, self._trials, strict=True) if now != old]
        changed = [self._with_curve(trial) if trial.standing == "done" else trial for trial in changed]
        for trial in changed:
            self._trials[trial.number] = trial
        if changed:
            self._study_writer.update_trials(*changed)

    # --- called by the supervisor -------------------------------------------------------------------------------------

    def next_tasks(self, fits: CapacityCheck) -> Sequence[Task]:
        """Propose trials until one has work to do, and return its tasks.

        Empty if all trials are proposed or none fits now. Every proposal is stored, also one without work: settings
        that make no valid cell, repetitions, and cells that are trained already.

        Args:
            fits: Tells if an attempt of a given size could start now.
        """
        resources = self._space.corner_cells[0].config.resources
        while len(self._trials) < self._search.trials and fits(resources):
            tasks = self._propose()
            if tasks:
                return tasks
        return []

    def ended(self, task: Task, attempt: Attempt, will_retry: bool) -> None:
        """Store the outcome of a finished attempt for every trial of its cell.

        Does nothing if the cell is retried, or if no trial changes (as after an interruption).
        """
        if will_retry:
            return
        changed = [self._trial_after(trial, attempt) for trial in self._trials if trial.cell == task.cell.id]
        changed = [trial for trial in changed if trial != self._trials[trial.number]]
        for trial in changed:
            self._trials[trial.number] = trial
        if changed:
            self._study_writer.update_trials(*changed)

    def attempts_to_prune(self, attempts: Sequence[Attempt]) -> Mapping[int, str]:
        """Return the reasons, by attempt id, of training attempts that the pruner ends at their newest validation.

        Attempts in another phase than "training", or at their last step, are left out. Empty without a pruner. Stores
        the curves of trials that go on.
        """
        reasons: dict[int, str] = {}
        if self._search.pruner is None:
            return reasons
        for attempt in attempts:
            if attempt.kind == "train" and attempt.phase == "training" and attempt.step < (attempt.steps_total or 0):
                reason = self._check_pruning(attempt)
                if reason is not None:
                    reasons[attempt.id] = reason
        return reasons

    # --- proposals ----------------------------------------------------------------------------------------------------

    def _propose(self) -> list[Task]:
        """Propose and store one trial; return its tasks.

        Returns no tasks for parameters that make no valid cell (stored as failed), for a repetition of an earlier
        trial, which takes over that trial's outcome, and for a cell that is trained already.
        """
        proposal = optuna_study.propose_trial(self._search, self._trials, self._sampler_state)
        trial = replace(proposal.trial, params=self._space.rounded(proposal.trial.params))
        try:
            cell = self._space.cell(trial.params)
        except GridError as error:
            trial = replace(trial, standing="failed", reason=f"not a valid cell: {error.problem}")
            self._record_trial(trial, None, proposal)
            return []
        twin = next((earlier for earlier in self._trials if earlier.cell == cell.id), None)
        if twin is not None:
            same = replace(twin, number=trial.number, params=trial.params, attrs=trial.attrs)
            self._record_trial(same, cell, proposal)
            return []
        self._record_trial(replace(trial, cell=cell.id), cell, proposal)
        return self._remaining_tasks(cell)

    def _record_trial(self, trial: Trial, cell: Cell | None, proposal: optuna_study.Proposal) -> None:
        """Store a proposed trial with the sampler's new state, in the database and here.

        Args:
            trial: New trial, appended to the study.
            cell: Its cell, which is enlisted with its cost forecast; None if its parameters make none.
            proposal: Result of the sampler, with earlier trials that it changed and its state.
        """
        record = planner.to_record(cell) if cell is not None else None
        cost = cost_estimate.forecast([cell], self._prices) if cell is not None else None
        self._study_writer.propose(trial, record, proposal.changed, proposal.memory, cost)
        for old in proposal.changed:
            self._trials[old.number] = old
        self._sampler_state = dict(proposal.memory)
        self._trials.append(trial)

    def _remaining_tasks(self, cell: Cell) -> list[Task]:
        """Return the remaining tasks of the cell of the newest trial; empty if the cell is trained and measured.

        The outcome of such a cell, or of a diverged one, is stored at once. A cell whose weights are gone is trained
        again.
        """
        states = self._store.states({cell.id})
        plan = planner.plan([cell], states)
        cell_standing = plan.standings[cell.id]
        if cell_standing == "weights gone":
            return planner.plan([cell], states, retrain=True).tasks
        if cell_standing in ("done", "diverged"):
            trial = self._trials[-1]
            state = states[cell.id]
            updated = (
                replace(trial, standing="diverged", reason=state.cause)
                if cell_standing == "diverged"
                else self._finished(trial)
            )
            self._trials[-1] = updated
            self._study_writer.update_trials(updated)
        return plan.tasks

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _trial_after(self, trial: Trial, attempt: Attempt) -> Trial:
        """Return the trial with the outcome of an attempt of its cell.

        A finished trial gets its curve and objectives. A diverged or failed one gets the attempt's cause as its reason
        and no values, a pruned one the reason alone. Unchanged for an interrupted attempt, which another launch
        resumes.
        """
        if attempt.state == "done":
            return self._finished(trial)
        if attempt.state == "diverged":
            return replace(trial, standing="diverged", values=None, reason=attempt.cause)
        if attempt.state == "failed":
            return replace(trial, standing="failed", values=None, reason=attempt.cause)
        if attempt.failure == PRUNED:
            return replace(trial, standing="pruned", reason=attempt.cause)
        return trial  # interrupted: another launch resumes it

    def _finished(self, trial: Trial) -> Trial:
        return with_objectives(self._search, self._store, self._with_curve(trial))

    def _with_curve(self, trial: Trial) -> Trial:
        """Return the trial with the validation curve of its cell's newest finished training; unchanged without one."""
        assert trial.cell is not None
        state = self._store.states({trial.cell})[trial.cell]
        return (
            trial if state.trained_attempt_id is None else replace(trial, curve=self._curve(state.trained_attempt_id))
        )

    def _curve(self, attempt: int) -> tuple[tuple[int, float], ...]:
        """Return (validation number from 1, validation loss) pairs of an attempt, in order.

        They end before the first loss that is not finite. Curve points without a validation loss are skipped and not
        numbered.
        """
        losses = [point.val_loss for point in self._store.curve(attempt) if point.val_loss is not None]
        finite = itertools.takewhile(math.isfinite, losses)  # training ends at a loss that is not finite
        return tuple(enumerate(finite, 1))

    # --- pruning ------------------------------------------------------------------------------------------------------

    def _check_pruning(self, attempt: Attempt) -> str | None:
        """Return the reason to prune a training attempt, or None; store the trial after each passed validation.

        New validations are checked one by one, so that the decision does not depend on how often this is called. The
        deciding validation is not stored: a launch that dies here has to reach the same verdict again. None at once if
        the step admits no new validation, or if no open trial has the attempt's cell.
        """
        validate_every = self._space.corner_cells[0].config.eval.validate_every
        if attempt.step // validate_every <= self._rungs_checked.get(attempt.id, 0):
            return None
        curve = self._curve(attempt.id)
        self._rungs_checked[attempt.id] = len(curve)
        trial = next(
            (
                candidate
                for candidate in self._trials
                if candidate.cell == attempt.cell_id and candidate.standing == "asked"
            ),
            None,
        )
        if trial is None:
            return None
        # each new validation in turn, so that the decision does not depend on how often this is called
        for rung, loss in curve[len(trial.curve) :]:
            self._trials[trial.number] = replace(self._trials[trial.number], curve=curve[:rung])
            is_pruned, updated = optuna_study.check_pruning(self._search, self._trials, trial.number)
            self._trials[trial.number] = updated
            if is_pruned:
                # not stored before the attempt ends: a launch killed in between must reach the same verdict again
                return PRUNED_AT.format(pruner=self._search.pruner, rung=rung, loss=loss)
            self._study_writer.update_trials(updated)
        return None
