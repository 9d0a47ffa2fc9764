"""Cache of a page's blocks: rebuilt in the background when the database changes, at a limited rate."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy.exc import DBAPIError

from ....results.console.text import sanitize_line
from ....results.errors import UserError
from ....results.store.store import Store
from ..page import build_blocks

CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of the database for changes, however many pages ask."""
REBUILD_PAUSE_FACTOR = 4.0
"""Pause after a rebuild as a multiple of its duration, so that rebuilds take at most a fifth of a core."""
MAX_VERSIONS = 2
"""Versions that are retained, since an open page may fetch a curve of the previous one."""

Blocks = tuple[str, Mapping[str, bytes]]


@dataclass(frozen=True)
class PageVersion:
    """Blocks of a page at one time, by id; `version` counts from 1, `at` is the time of the build in UTC."""

    version: int
    title: str
    blocks: Mapping[str, bytes]
    at: datetime


class PageCache:
    """Newest version of a sweep's page, and the one before it; safe to use from several threads.

    `poll` never waits for a rebuild, which runs in a thread of its own. Nothing is rebuilt unless `poll` is called. An
    error of a rebuild leaves the versions as they are and becomes the `trouble` that `poll` returns.
    """

    def __init__(self, store: Store, sweep: str, make: Callable[[Store, str], Blocks] = build_blocks) -> None:
        """Build the first version, which reads the database and takes seconds.

        Args:
            store: The database.
            sweep: Name of the sweep.
            make: Function of database and name that returns the title and the blocks by id.

        Raises:
            SweepUnknown, StoreError, ReportError: The page cannot be built.
        """
        self._store, self._sweep, self._make = store, sweep, make
        self._lock = threading.Lock()
        self._builds: deque[PageVersion] = deque(maxlen=MAX_VERSIONS)
        self._trouble: str | None = None
        self._rebuild_thread: threading.Thread | None = None
        self._checked_at = self._rebuild_after = 0.0
        self._mark = store.change_token(sweep)
        self._build(self._mark)

    @property
    def build(self) -> PageVersion:
        """Newest version."""
        return self._builds[-1]

    @property
    def builds(self) -> list[PageVersion]:
        """Retained versions, oldest first."""
        return list(self._builds)

    def find_version(self, version: int) -> PageVersion | None:
        """Return the version with this number; None if it is no longer retained."""
        return next((build for build in self.builds if build.version == version), None)

    def poll(self) -> dict[str, object]:
        """Return the newest version that is built, and start a rebuild in a thread if the database has changed.

        The version returned is the one before that rebuild. The database is checked, in the calling thread, at most
        once per second, not during a rebuild, and not until four times the duration of the last rebuild has passed
        after it. Errors of the database are not raised.

        Returns:
            version (its number), at (its time in ISO format) and trouble (the first line of the last error of the
            database, None once a check or rebuild has succeeded).
        """
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
        """Start a rebuild in a daemon thread if the sweep's change token in the database has changed.

        An error of the database is stored as trouble; an unchanged token clears it. The lock must be held.
        """
        try:
            mark = self._store.change_token(self._sweep)
        except (UserError, DBAPIError) as error:
            self._trouble = _first_line(error)
            return
        if mark == self._mark:
            self._trouble = None
            return
        self._rebuild_thread = threading.Thread(target=self._rebuild, args=(mark,), name="page", daemon=True)
        self._rebuild_thread.start()

    def _rebuild(self, mark: str) -> None:
        """Build a new version; runs in its own thread, stores an error as trouble, and sets the pause that follows.

        Args:
            mark: Change token that the new version stands for.
        """
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
    """Return the first line of an error without control characters; its type's name if it has no text.

    For an error of SQLAlchemy it is that of the driver. The advice to launch again is removed.
    """
    text = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    first = text.splitlines()[0] if text else type(error).__name__
    return sanitize_line(first.removesuffix(" and launch again"))  # advice for a launch, not for a reader


def join_json_blocks(build: PageVersion, names: tuple[str, ...] = ("core", "answer")) -> bytes:
    """Return, as JSON bytes, an object with the keys version and `names`, whose values are the blocks.

    They are joined as bytes, since parsing them again takes long.

    Args:
        build: The version of the page.
        names: Ids of JSON blocks that it has.
    """
    head = json.dumps({"version": build.version})[:-1].encode()
    return head + b"".join(b',"%s":%s' % (name.encode(), build.blocks[name]) for name in names) + b"}"
