"""What a launch remembers of its failures, and what it decides from that."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...results.failure_classes import FAILURES, PREEMPTED, Failure
from ...results.store.records import Attempt
from ..attempt.failures import ALIKE, FRUITLESS, cause_pattern
from ..errors import SweepError
from ..planning.planner import Task

MICRO_BATCH = "train.micro_batch"


class SweepBroken(SweepError):
    """Cell after cell fails in the same way; the rest would, too."""

    exit_code = 1


@dataclass
class RetryTracker:
    """Tries by cell and class of failure, progress between deaths, and mistakes that repeat."""

    _tries: Counter[tuple[str, Failure]] = field(default_factory=Counter)
    _furthest: dict[str, int] = field(default_factory=dict)
    _fruitless: Counter[str] = field(default_factory=Counter)
    _mistakes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def after(self, task: Task, attempt: Attempt, failure: Failure) -> Task | None:
        """The task as it is to be tried again, None when its cell is given up for this launch.

        A preempted cell goes on for ever as long as it gains steps between its deaths; without, each counts as a failure
        of the machine.
        """
        cell = task.cell.id
        if failure == PREEMPTED:
            gained = attempt.step > self._furthest.get(cell, -1)
            self._furthest[cell] = max(attempt.step, self._furthest.get(cell, -1))
            self._fruitless[cell] = 0 if gained else self._fruitless[cell] + 1
            if self._fruitless[cell] < FRUITLESS:
                return task
            failure = "infrastructure"
        self._tries[cell, failure] += 1
        policy, tries = FAILURES[failure], self._tries[cell, failure]
        if policy.tries is not None and tries >= policy.tries:
            return None
        if policy.smaller:
            deviation = _smaller(task)
            return None if deviation is None else replace(task, deviation=deviation)
        later = time.monotonic() + policy.wait_s * 2 ** (tries - 1) if policy.wait_s else 0.0
        return replace(task, alone=task.alone or policy.alone, not_before=later)

    def broken(self, cell: str, cause: str) -> SweepBroken | None:
        """Notes a mistake in code or config; the error that stops the sweep once enough cells have made the same."""
        cells = self._mistakes[cause_pattern(cause)]
        cells.add(cell)
        if len(cells) < ALIKE:
            return None
        return SweepBroken(f"stopped, since {len(cells)} cells failed alike: {cause}; mend it and launch again")


def _smaller(task: Task) -> Mapping[str, Any] | None:
    """Half the micro-batch, its accumulation doubled; None where the cell forbids it or it cannot be halved."""
    config = task.cell.config
    rows = config.train.micro_batch
    return {MICRO_BATCH: rows // 2} if config.resources.on_cuda_oom == "halve" and rows % 2 == 0 else None
