"""Who gives a running supervisor further tasks, from what has come of those before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ...results.store.records import Attempt
from ..config import Resources
from ..planning.planner import Task

Fits = Callable[[Resources], bool]
"""Whether an attempt of that size could start now. Always so while nothing runs: what does not fit then never will."""


class Source(Protocol):
    """Asked by one supervisor, from its thread. Whatever it raises ends the launch."""

    def further(self, fits: Fits) -> Sequence[Task]:
        """Tasks to make now, whose cells the database knows already; none before an attempt that runs has ended.

        Asked again and again while no task waits. None, and nothing runs: the launch has ended.
        """

    def ended(self, task: Task, attempt: Attempt, again: bool) -> None:
        """An attempt of whichever task has ended, however it did; `again`: its cell is tried once more, and nothing is final."""

    def hopeless(self, attempts: Sequence[Attempt]) -> Mapping[int, str]:
        """Which of these running attempts are to save themselves and end now, by id, and why; their cells count as pruned.

        Asked several times a second.
        """
