"""Attempts of a frozen copy of the code whose database is of another schema: they write journals, which are applied here."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ...results.errors import LostLease
from ...results.store.journal import JOURNAL, Reader
from ...results.store.schema import HEAD
from ...results.store.store import Store
from ..attempt.job import Job
from . import source_snapshot
from .executor import Executor, Finished, Launch, LocalExecutor, Opening

APPLY_S = 0.5
"""Between two looks at the journals."""
AT_ONCE = 500
"""Lines of a journal, a second or two of writing, before the supervisor looks after everything else again."""


class Journalled:
    """An executor of this machine whose attempts do not open the database, since their code knows another schema of it."""

    writes_directly = False

    def __init__(self, inner: Executor, store: Store) -> None:
        self.name = inner.name
        self._inner, self._store = inner, store
        # the executor knows an attempt's process once the journal that names it is applied
        self.admit, self.fits, self.close = inner.admit, inner.fits, inner.close
        self.stop, self.kill, self.end = inner.stop, inner.kill, inner.end
        self.away, self.broken = inner.away, inner.broken
        self._readers: dict[int, Reader] = {}
        self._ended: list[Finished] = []
        self._applied = 0.0

    @classmethod
    def opened(cls, opening: Opening) -> Executor:
        """Around children of this process."""
        return cls(LocalExecutor.opened(opening), opening.store)

    def start(self, launch: Launch) -> None:
        """Starts the attempt's process."""
        fence = Job.read(launch.runs / launch.folder).fence
        self._inner.start(launch)
        path = launch.runs / launch.folder / JOURNAL
        self._readers[launch.attempt] = Reader(path, self._store, launch.attempt, fence)

    def wait(self, seconds: float) -> list[Finished]:
        """Attempts whose process has ended and whose journal is applied whole."""
        self._ended += self._inner.wait(seconds)
        codes = dict(self._ended)
        if codes or time.monotonic() - self._applied > APPLY_S:
            for attempt, reader in self._readers.items():
                if not applied(reader, AT_ONCE) and attempt not in codes:
                    self._inner.kill(self._store.attempt(attempt))
            self._applied = time.monotonic()
        done = [(attempt, code) for attempt, code in self._ended if not self._readers[attempt].behind]
        self._ended = [(attempt, code) for attempt, code in self._ended if self._readers[attempt].behind]
        for attempt, _ in done:
            del self._readers[attempt]
        return done


def understood(executor: Executor, store: Store, source: Path | None) -> Executor:
    """The executor, or around it one with journals, when the copy in `source` knows another schema of the database."""
    if source is None or not executor.writes_directly or source_snapshot.schema_of(source) == HEAD:
        return executor
    return Journalled(executor, store)


def applied(reader: Reader, limit: int) -> bool:
    """Applies what has come, not too much at once; False when the attempt is nobody's or somebody else's by now."""
    with contextlib.suppress(LostLease):
        reader.apply(limit)
        return True
    return False
