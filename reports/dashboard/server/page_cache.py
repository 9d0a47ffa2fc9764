"""What a page of a sweep is made of, made anew when the database has something new, and not more often than it can bear."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy.exc import DBAPIError

from ....results.console.text import plain
from ....results.errors import UserError
from ....results.store.store import Store
from ..page import build_blocks

CHECK_INTERVAL_S = 1.0
"""The database is asked for changes once in this time, however many pages ask."""
REBUILD_PAUSE_FACTOR = 4.0
"""Making blocks is followed by a rest of so many times what it took, so that it never takes more than a fifth of a core."""
MAX_VERSIONS = 2
"""A page that asks for a curve may be of the state before."""

Blocks = tuple[str, Mapping[str, bytes]]


@dataclass(frozen=True)
class PageVersion:
    """The blocks of a page as they were at one moment; `version` counts from 1."""

    version: int
    title: str
    blocks: Mapping[str, bytes]
    at: datetime


class PageCache:
    """The newest state of a sweep, for threads: `poll` never waits for it to be made, that happens in a thread of its own."""

    def __init__(self, store: Store, sweep: str, make: Callable[[Store, str], Blocks] = build_blocks) -> None:
        """Reads it once. Raises SweepUnknown, StoreError, ReportError."""
        self._store, self._sweep, self._make = store, sweep, make
        self._lock = threading.Lock()
        self._builds: deque[PageVersion] = deque(maxlen=MAX_VERSIONS)
        self._trouble: str | None = None
        self._rebuild_thread: threading.Thread | None = None
        self._checked_at = self._rebuild_after = 0.0
        self._mark = store.mark(sweep)
        self._build(self._mark)

    @property
    def build(self) -> PageVersion:
        """The newest that there is."""
        return self._builds[-1]

    @property
    def builds(self) -> list[PageVersion]:
        """The states that are retained, oldest first."""
        return list(self._builds)

    def find_version(self, version: int) -> PageVersion | None:
        """The state of that version, while it is kept."""
        return next((build for build in self.builds if build.version == version), None)

    def poll(self) -> dict[str, object]:
        """The newest version and what is wrong with the database, if anything; a newer one is made meanwhile where there is
        something new."""
        with self._lock:
            now = time.monotonic()
            if (
                self._rebuild_thread is None
                and now >= self._rebuild_after
                and now - self._checked_at >= CHECK_INTERVAL_S
            ):
                self._checked_at = now
                self._start_if_new()
            build = self.build
        return {"version": build.version, "at": build.at.isoformat(timespec="seconds"), "trouble": self._trouble}

    def _start_if_new(self) -> None:
        try:
            mark = self._store.mark(self._sweep)
        except (UserError, DBAPIError) as error:
            self._trouble = _first_line(error)
            return
        if mark == self._mark:
            self._trouble = None
            return
        self._rebuild_thread = threading.Thread(target=self._rebuild, args=(mark,), name="page", daemon=True)
        self._rebuild_thread.start()

    def _rebuild(self, mark: str) -> None:
        began = time.monotonic()
        try:
            self._build(mark)
            self._trouble = None
        except (UserError, DBAPIError) as error:
            self._trouble = _first_line(error)
        finally:
            ended = time.monotonic()
            self._rebuild_after = ended + REBUILD_PAUSE_FACTOR * (ended - began)
            self._rebuild_thread = None

    def _build(self, mark: str) -> None:
        title, blocks = self._make(self._store, self._sweep)
        version = self._builds[-1].version + 1 if self._builds else 1
        self._builds.append(PageVersion(version, title, blocks, datetime.now(UTC)))
        self._mark = mark


def _first_line(error: Exception) -> str:
    text = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    first = text.splitlines()[0] if text else type(error).__name__
    return plain(first.removesuffix(" and launch again"))  # which is said to whoever writes


def join_json_blocks(build: PageVersion, names: tuple[str, ...] = ("core", "answer")) -> bytes:
    """Blocks that are JSON as one object, with the version; not parsed again, since they are long."""
    head = json.dumps({"version": build.version})[:-1].encode()
    return head + b"".join(b',"%s":%s' % (name.encode(), build.blocks[name]) for name in names) + b"}"
