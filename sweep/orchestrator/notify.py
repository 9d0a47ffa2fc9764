"""`launch --notify URL`: one JSON to a web address when a launch ends, however it does.

Whoever reads it may be anybody, so nothing of the machine or the database is in it, and every text goes without passwords. The
address itself is a secret with many services: only its host is ever said. Nothing that goes wrong here stops or changes a launch.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError

from ... import __version__
from ...results.console.text import sentence
from ...results.errors import UserError
from ...results.store.records import CellState
from ..errors import SweepError
from ..executors.executor import Tell

PATIENCE_S = 5.0
"""For everything: counting, finding the host, connecting, and its answer."""
LISTED = 100
"""Failed cells that are named."""
LONGEST = 300
"""Letters of a cause."""


def checked(url: str) -> str:
    """The address, if it is one that can be posted to. Raises SweepError, which does not say it again."""
    try:
        parts = urlsplit(url)
        port_known = parts.port is None or parts.port > 0
    except ValueError:
        raise SweepError("--notify: that is no address; give http://... or https://...") from None
    if parts.scheme not in ("http", "https"):
        raise SweepError("--notify: only http:// and https:// addresses are posted to")
    if not parts.hostname or not port_known or not url.isascii() or not url.isprintable() or " " in url:
        raise SweepError("--notify: that is no address; give http://HOST/... or https://HOST/...")
    if parts.username is not None or parts.password is not None:
        raise SweepError("--notify: the address must hold neither user nor password; use one with a token in its path")
    return url


class EndNotifier:
    """A context around a launch: when it ends, `url` is told (None: nobody is).

    `count` gives cells by where they stand, `states` how far each is; both ask the database and may take long.
    """

    def __init__(
        self, url: str | None, sweep: str, *, count: Callable[[], Mapping[str, int]],
        states: Callable[[], Sequence[CellState]], tell: Tell,
    ) -> None:  # fmt: skip
        self.url, self.sweep, self.tell = url, sweep, tell
        self._count, self._states = count, states
        self._began = time.monotonic()
        self.finished: bool | None = None
        """Whether every cell is done or has diverged; to be set by a launch that comes to its end, as `counts`."""
        self.counts: Mapping[str, int] | None = None

    def __enter__(self) -> EndNotifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.url is None:
            return
        seconds, failed = time.monotonic() - self._began, []

        def work() -> None:
            try:
                post(str(self.url), self._told(seconds, error))
            except (UserError, SQLAlchemyError, OSError, http.client.HTTPException, ValueError) as problem:
                failed.append(_why(problem))

        # a thread of its own, since neither the database nor the search for a host can be told to hurry
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        why = f"no answer within {PATIENCE_S:.0f} s" if thread.is_alive() else failed[0] if failed else None
        if why is not None:
            self.tell(f"{urlsplit(self.url).hostname} was not notified: {why}")

    def _told(self, seconds: float, error: BaseException | None) -> dict[str, Any]:
        cells = [state for state in self._states() if state.state in ("failed", "diverged")]
        code = _exit_code(error) if error is not None else 0 if self.finished else 1
        ended = "finished" if code == 0 else "stopped" if error is not None else "failed"
        return {
            "sweep": self.sweep,
            "state": ended,
            "exit": code,
            "seconds": round(seconds, 1),
            "counts": {word: count for word, count in sorted((self.counts or self._count()).items()) if count},
            "failed": [
                {
                    "cell": cell.cell_id,
                    "slug": sentence(cell.slug),
                    "state": cell.state,
                    "cause": first_line(cell.cause),
                }
                for cell in cells[:LISTED]
            ],
            "failed_in_all": len(cells),
            "error": None if error is None else first_line(str(error)) or type(error).__name__,
            "atma_sweep": __version__,
        }


def _exit_code(error: BaseException) -> int:
    """What the command ends with after that error."""
    return 130 if isinstance(error, KeyboardInterrupt) else int(getattr(error, "exit_code", 1))


def first_line(text: str | None) -> str | None:
    """What a person reads of a cause, without passwords."""
    line = next(iter((text or "").strip().splitlines()), "")
    return sentence(line)[:LONGEST] or None


def post(url: str, told: Mapping[str, Any]) -> None:
    """Sends it once. Follows no redirect and knows no other protocol. Raises OSError, HTTPException, ValueError."""
    data = json.dumps(told).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"atma-sweep/{__version__}"}
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    request = urllib.request.Request(checked(url), data=data, headers=headers, method="POST")
    opener.open(request, timeout=PATIENCE_S).close()


def _why(problem: BaseException) -> str:
    """In a few words, none of which is the address."""
    if isinstance(problem, urllib.error.HTTPError):
        return f"it answered {problem.code}"
    reason = problem.reason if isinstance(problem, urllib.error.URLError) else problem
    if isinstance(reason, TimeoutError):
        return f"no answer within {PATIENCE_S:.0f} s"
    return sentence(getattr(reason, "strerror", None) or type(reason).__name__)
