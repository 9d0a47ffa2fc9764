"""`launch --notify URL`: POST a JSON summary to a web address when a launch ends, whatever the outcome.

The receiver is untrusted, so the payload holds nothing about the machine or the database, and no passwords. The address
is itself a secret with many services, so messages name its host only. A failure here never stops or changes a launch.
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
from ...results.console.text import sanitize_sentence
from ...results.errors import UserError
from ...results.store.records import CellState
from ..errors import SweepError
from ..executors.executor import Tell

TIMEOUT_S = 5.0
"""Seconds for all of it: counting cells, resolving the host, connecting, and the response."""
MAX_FAILED_CELLS = 100
"""Maximum number of failed cells listed in the payload."""
MAX_CAUSE_CHARS = 300
"""Maximum number of characters of a cause."""


def validated_url(url: str) -> str:
    """Return the address unchanged if it can be posted to. No connection is made.

    Raises:
        SweepError: It is no http(s) address with a host, contains a user or password, or has spaces or characters
            outside printable ASCII. The message omits the address.
    """
    try:
        parts = urlsplit(url)
        is_port_valid = parts.port is None or parts.port > 0
    except ValueError:
        raise SweepError("--notify: not a web address; give http://... or https://...") from None
    if parts.scheme not in ("http", "https"):
        raise SweepError("--notify: only http:// and https:// addresses are supported")
    if not parts.hostname or not is_port_valid or not url.isascii() or not url.isprintable() or " " in url:
        raise SweepError("--notify: not a web address; give http://HOST/... or https://HOST/...")
    if parts.username is not None or parts.password is not None:
        raise SweepError(
            "--notify: the address must not contain a user or a password; use one with a token in its path"
        )
    return url


class EndNotifier:
    """Context manager around a launch that posts a summary to `url` when the launch ends."""

    def __init__(
        self, url: str | None, sweep: str, *, count: Callable[[], Mapping[str, int]],
        states: Callable[[], Sequence[CellState]], tell: Tell,
    ) -> None:  # fmt: skip
        """Prepare the notification; nothing is sent before the context ends. The duration counts from here.

        Args:
            url: Web address; None to send nothing.
            sweep: Name of the sweep.
            count: Returns the number of cells by state; may query the database for long. Called at the end, unless
                `counts` is set.
            states: Returns the states of the cells; may query the database for long. Called at the end.
            tell: Prints one line when the notification fails.
        """
        self.url, self.sweep, self.tell = url, sweep, tell
        self._count, self._states = count, states
        self._started_at = time.monotonic()
        self.finished: bool | None = None
        """True if every cell is done or has diverged. Set, like `counts`, by a launch that comes to its end."""
        self.counts: Mapping[str, int] | None = None
        """Number of cells by state; None to query it with `count`."""

    def __enter__(self) -> EndNotifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Post the summary; a failure prints one line. The launch's exception passes through.

        The summary is counted and sent in a daemon thread. This waits 5 s (TIMEOUT_S) for it at most, and leaves it
        running then. Does nothing without an address.
        """
        if self.url is None:
            return
        seconds, failures = time.monotonic() - self._started_at, []

        def send() -> None:
            try:
                post(str(self.url), self._payload(seconds, error))
            except (UserError, SQLAlchemyError, OSError, http.client.HTTPException, ValueError) as problem:
                failures.append(_failure_reason(problem))

        # in a thread, since neither database queries nor name resolution accept a timeout
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        reason = f"no answer within {TIMEOUT_S:.0f} s" if thread.is_alive() else failures[0] if failures else None
        if reason is not None:
            self.tell(f"{urlsplit(self.url).hostname} was not notified: {reason}")

    def _payload(self, seconds: float, error: BaseException | None) -> dict[str, Any]:
        """Return the JSON payload. Queries the database.

        Args:
            seconds: Duration of the launch.
            error: Exception that ended the launch; None after a regular end.

        Returns:
            A dict with these keys:

            - sweep: its name
            - state: "finished" (exit code 0), "stopped" (by an exception) or "failed" (a regular end with unfinished
              cells)
            - exit: exit code of the command
            - seconds: duration, to a tenth
            - counts: number of cells by state, without zeros
            - failed: failed and diverged cells, 100 (MAX_FAILED_CELLS) at most, as dicts of cell (id), slug, state,
              cause
            - failed_in_all: number of all failed and diverged cells
            - error: first line of the exception's text, or its class; None without one
            - atma_sweep: version of this package
        """
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
                    "slug": sanitize_sentence(cell.slug),
                    "state": cell.state,
                    "cause": first_line(cell.cause),
                }
                for cell in cells[:MAX_FAILED_CELLS]
            ],
            "failed_in_all": len(cells),
            "error": None if error is None else first_line(str(error)) or type(error).__name__,
            "atma_sweep": __version__,
        }


def _exit_code(error: BaseException) -> int:
    """Return the exit code of the command after that error."""
    return 130 if isinstance(error, KeyboardInterrupt) else int(getattr(error, "exit_code", 1))


def first_line(text: str | None) -> str | None:
    """Return the first line of a text, without passwords and control characters; None if it is empty or None.

    At most 300 characters (MAX_CAUSE_CHARS); leading blank lines are skipped.
    """
    line = next(iter((text or "").strip().splitlines()), "")
    return sanitize_sentence(line)[:MAX_CAUSE_CHARS] or None


def post(url: str, payload: Mapping[str, Any]) -> None:
    """POST the payload as JSON once, without following redirects. Proxies of the environment are used.

    Args:
        url: Web address, which is validated again.
        payload: JSON object to send.

    Raises:
        SweepError: The address is invalid.
        OSError: The host cannot be reached within 5 s (TIMEOUT_S), or its status is not 2xx (HTTPError, also for a
            redirect).
        HTTPException: The response is no HTTP.
        ValueError: The request cannot be built.
    """
    data = json.dumps(payload).encode()
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
    request = urllib.request.Request(validated_url(url), data=data, headers=headers, method="POST")
    opener.open(request, timeout=TIMEOUT_S).close()


def _failure_reason(problem: BaseException) -> str:
    """Return a short reason for a failed notification; it never contains the address.

    It is the HTTP status, "no answer within N s", the system's error text, or the class of the exception.

    Args:
        problem: Exception raised by `post` or by the queries for the payload.
    """
    if isinstance(problem, urllib.error.HTTPError):
        return f"HTTP status {problem.code}"
    reason = problem.reason if isinstance(problem, urllib.error.URLError) else problem
    if isinstance(reason, TimeoutError):
        return f"no answer within {TIMEOUT_S:.0f} s"
    return sanitize_sentence(getattr(reason, "strerror", None) or type(reason).__name__)
