"""Failures of one launch, and the decisions to retry, give up or stop that follow from them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...results.failure_classes import FAILURES, PREEMPTED, Failure
from ...results.store.records import Attempt
from ..attempt.failures import MAX_KILLS_WITHOUT_PROGRESS, MAX_SAME_FAILURES, cause_pattern
from ..errors import SweepError
from ..planning.planner import Task

MICRO_BATCH = "train.micro_batch"


class SweepBroken(SweepError):
    """Error that stops a sweep in which several cells failed with the same error."""

    exit_code = 1


@dataclass
class RetryTracker:
    """Number of tries per cell and failure class, progress between kills, and repeated errors of one launch."""

    _tries: Counter[tuple[str, Failure]] = field(default_factory=Counter)
    """Number of failures by (cell id, failure class)."""
    _furthest_step: dict[str, int] = field(default_factory=dict)
    """Highest step that each preempted cell has reached, by cell id."""
    _kills_without_progress: Counter[str] = field(default_factory=Counter)
    """Number of preemptions in a row that gained no step, by cell id."""
    _cells_by_cause: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ids of the cells that failed with an error in code or config, by the normalised cause."""

    def next_try(self, task: Task, attempt: Attempt, failure: Failure) -> Task | None:
        """Return the task to retry after a failure, or None if the launch gives its cell up. Counts the failure.

        Tries are counted per cell and failure class. By FAILURES, node_lost is retried without limit, infrastructure
        and hang have 3 tries, host_oom 2 (the second alone on the machine), cuda_oom 2 (the second with half the
        micro-batch). The classes code, diverged and pruned have a single try. The retried task may have a halved
        micro-batch, run alone on the machine, or wait until `not_before`. That is a time on the monotonic clock: 5 s
        ahead after the first infrastructure failure, doubled with each further one; 0.0 for other classes.

        A preempted cell is retried at once, without limit, while it gains steps. The third preemption
        (MAX_KILLS_WITHOUT_PROGRESS) in a row that reached no higher step, and each one after it, counts as an
        infrastructure failure.

        Args:
            task: Task of the failed attempt.
            attempt: Its record; only the step reached is read.
            failure: Failure class of the attempt.
        """
        cell = task.cell.id
        if failure == PREEMPTED:
            gained = attempt.step > self._furthest_step.get(cell, -1)
            self._furthest_step[cell] = max(attempt.step, self._furthest_step.get(cell, -1))
            self._kills_without_progress[cell] = 0 if gained else self._kills_without_progress[cell] + 1
            if self._kills_without_progress[cell] < MAX_KILLS_WITHOUT_PROGRESS:
                return task
            failure = "infrastructure"
        self._tries[cell, failure] += 1
        policy, tries = FAILURES[failure], self._tries[cell, failure]
        if policy.tries is not None and tries >= policy.tries:
            return None
        if policy.smaller:
            deviation = _halved_micro_batch(task)
            return None if deviation is None else replace(task, deviation=deviation)
        not_before = time.monotonic() + policy.wait_s * 2 ** (tries - 1) if policy.wait_s else 0.0
        return replace(task, alone=task.alone or policy.alone, not_before=not_before)

    def note_code_failure(self, cell: str, cause: str) -> SweepBroken | None:
        """Count an error in code or config; return the error that is to stop the sweep, or None.

        The error comes once MAX_SAME_FAILURES (3) different cells have failed with the same cause, and again for each
        later one. Causes are compared without numbers, hashes and paths. Nothing is raised here.

        Args:
            cell: Id of the failed cell.
            cause: Error text of its attempt.
        """
        cells = self._cells_by_cause[cause_pattern(cause)]
        cells.add(cell)
        if len(cells) < MAX_SAME_FAILURES:
            return None
        return SweepBroken(
            f"stopped because {len(cells)} cells failed with the same error: {cause}; fix it and launch again"
        )


def _halved_micro_batch(task: Task) -> Mapping[str, Any] | None:
    """Return the deviation that halves the config's micro-batch and so doubles gradient accumulation.

    None if the cell's `on_cuda_oom` is not "halve" or the micro-batch is odd. An earlier deviation of the task is not
    taken into account.

    Returns:
        {"train.micro_batch": number of rows}, or None.
    """
    config = task.cell.config
    rows = config.train.micro_batch
    return {MICRO_BATCH: rows // 2} if config.resources.on_cuda_oom == "halve" and rows % 2 == 0 else None
