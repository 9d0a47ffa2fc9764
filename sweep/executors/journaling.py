"""Executor for code snapshots with another database schema: attempts write journals, which this process applies."""

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
"""Minimum seconds between two passes over the journals of running attempts."""
MAX_LINES_PER_PASS = 500
"""Maximum journal lines applied per attempt and pass. They take a second or two, and the supervisor has other work."""


class Journals:
    """Journals of running and just ended attempts, applied to the database. Used from one thread.

    A journal is the file in an attempt's folder to which it writes results instead of the database.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers: dict[int, JournalReader] = {}
        self._last_pass = 0.0

    def open(self, spec: ProcessSpec) -> int:
        """Start to track the attempt's journal; return the fencing token from its job.json.

        The journal need not exist yet, but job.json must.
        """
        folder = spec.runs / spec.folder
        fence = Job.read(folder).fence
        self._readers[spec.attempt] = JournalReader(folder / JOURNAL, self._store, spec.attempt, fence)
        return fence

    def apply(self, exit_codes: Mapping[int, int]) -> tuple[list[AttemptExit], list[int]]:
        """Apply new journal lines, at most 500 (MAX_LINES_PER_PASS) per attempt.

        Journals of ended attempts are read in every call, those of running ones only if 0.5 s (APPLY_S) has passed
        since the last time.

        Args:
            exit_codes: Exit codes of ended attempts, by id; each must have been opened and not been returned before.

        Returns:
            Exits of the ended attempts whose journal is fully applied, which are forgotten, and the ids of running
            attempts that lost their lease. A lost lease of an ended attempt is ignored.
        """
        lost = []
        is_due = time.monotonic() - self._last_pass > APPLY_S
        for attempt in list(self._readers) if is_due else list(exit_codes):
            try:
                self._readers[attempt].apply(MAX_LINES_PER_PASS)
            except LeaseLost:
                lost += [attempt] if attempt not in exit_codes else []
        self._last_pass = time.monotonic() if is_due else self._last_pass
        done = [(attempt, code) for attempt, code in exit_codes.items() if not self._readers[attempt].has_more]
        for attempt, _ in done:
            del self._readers[attempt]
        return done, lost


class JournalingExecutor:
    """Wrapper of an executor on this machine whose attempts write journals, since their code has another schema."""

    writes_directly = False

    def __init__(self, inner: Executor, store: Store) -> None:
        """Wrap an open executor; every method but `start` and `wait` is that of `inner`, also `close`.

        Args:
            inner: Executor on this machine.
            store: Database to apply journals to.
        """
        self.name = inner.name
        self._inner, self._store, self._journals = inner, store, Journals(store)
        # `inner` finds an attempt's process once the journal entry with its pid is applied
        self.admit, self.fits, self.close = inner.admit, inner.fits, inner.close
        self.stop, self.kill, self.end = inner.stop, inner.kill, inner.end
        self.is_unreachable, self.failure = inner.is_unreachable, inner.failure
        self._ended: dict[int, int] = {}

    @classmethod
    def open(cls, context: ExecutorContext) -> Executor:
        """Return a wrapper of a new LocalExecutor."""
        return cls(LocalExecutor.open(context), context.store)

    def start(self, spec: ProcessSpec) -> None:
        """Start the attempt's process and begin to read its journal."""
        self._inner.start(spec)
        self._journals.open(spec)

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Return the attempts whose process has ended and whose journal is fully applied.

        Others are returned by a later call. Running attempts that lost their lease are killed. Waits `seconds` at most
        for a process to end; applying the journals takes extra time.
        """
        self._ended |= dict(self._inner.wait(seconds))
        done, lost = self._journals.apply(self._ended)
        for attempt in lost:
            self._inner.kill(self._store.attempt(attempt))
        for attempt, _ in done:
            del self._ended[attempt]
        return done


def with_journal_if_needed(executor: Executor, store: Store, source: Path | None) -> Executor:
    """Return the executor, wrapped to use journals if the code snapshot in `source` has another database schema.

    Returned unchanged for the installed package and for an executor whose attempts write journals anyway. A snapshot
    whose schema cannot be read counts as another schema.

    Args:
        executor: Open executor.
        store: Database to apply journals to.
        source: Folder of the code snapshot; None for the installed package.
    """
    if source is None or not executor.writes_directly or source_snapshot.schema_revision(source) == HEAD:
        return executor
    return JournalingExecutor(executor, store)
