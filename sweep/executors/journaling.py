"""Attempts of a frozen copy of the code whose database is of another schema: they write journals, which are applied here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from ...results.errors import LeaseLost
from ...results.store.journal import JOURNAL, JournalReader
from ...results.store.schema import HEAD
from ...results.store.store import Store
from ..attempt.job import Job
from . import source_snapshot
from .executor import AttemptExit, Executor, ExecutorContext, LocalExecutor, ProcessSpec

APPLY_S = 0.5
"""Between two looks at the journals."""
AT_ONCE = 500
"""Lines of a journal, a second or two of writing, before the supervisor looks after everything else again."""


class Journals:
    """Journals of attempts that run or have just ended, applied to the database. Used from one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers: dict[int, JournalReader] = {}
        self._applied = 0.0

    def open(self, launch: ProcessSpec) -> int:
        """Reads the journal of that attempt from now on; returns the attempt's fence."""
        folder = launch.runs / launch.folder
        fence = Job.read(folder).fence
        self._readers[launch.attempt] = JournalReader(folder / JOURNAL, self._store, launch.attempt, fence)
        return fence

    def apply(self, codes: Mapping[int, int]) -> tuple[list[AttemptExit], list[int]]:
        """Applies what has come, not too much at once: of attempts that run now and then, of those that ended (`codes`) always.

        Returns the ended ones whose journal is applied whole, and running ones that are nobody's or somebody else's by now.
        """
        lost = []
        due = time.monotonic() - self._applied > APPLY_S
        for attempt in list(self._readers) if due else list(codes):
            try:
                self._readers[attempt].apply(AT_ONCE)
            except LeaseLost:
                lost += [attempt] if attempt not in codes else []
        self._applied = time.monotonic() if due else self._applied
        done = [(attempt, code) for attempt, code in codes.items() if not self._readers[attempt].behind]
        for attempt, _ in done:
            del self._readers[attempt]
        return done, lost


class JournalingExecutor:
    """An executor of this machine whose attempts do not open the database, since their code knows another schema of it."""

    writes_directly = False

    def __init__(self, inner: Executor, store: Store) -> None:
        self.name = inner.name
        self._inner, self._store, self._journals = inner, store, Journals(store)
        # the executor knows an attempt's process once the journal that names it is applied
        self.admit, self.fits, self.close = inner.admit, inner.fits, inner.close
        self.stop, self.kill, self.end = inner.stop, inner.kill, inner.end
        self.away, self.broken = inner.away, inner.broken
        self._ended: dict[int, int] = {}

    @classmethod
    def opened(cls, opening: ExecutorContext) -> Executor:
        """Around children of this process."""
        return cls(LocalExecutor.opened(opening), opening.store)

    def start(self, launch: ProcessSpec) -> None:
        """Starts the attempt's process."""
        self._inner.start(launch)
        self._journals.open(launch)

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Attempts whose process has ended and whose journal is applied whole."""
        self._ended |= dict(self._inner.wait(seconds))
        done, lost = self._journals.apply(self._ended)
        for attempt in lost:
            self._inner.kill(self._store.attempt(attempt))
        for attempt, _ in done:
            del self._ended[attempt]
        return done


def with_journal_if_needed(executor: Executor, store: Store, source: Path | None) -> Executor:
    """The executor, or around it one with journals, when the copy in `source` knows another schema of the database."""
    if source is None or not executor.writes_directly or source_snapshot.schema_of(source) == HEAD:
        return executor
    return JournalingExecutor(executor, store)
