"""Limits on clients of the local server: connections at once, seconds per request, bytes in memory.

uvicorn has no deadline before the first request, for an unfinished request or for a response that is not read, and its
`limit_concurrency` answers 503 to complete requests only: idle connections stay open until file descriptors run out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import traceback
from collections.abc import Callable, Hashable
from contextlib import nullcontext, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 32
"""Connections that are served at once; a browser opens six for a page. Further ones are answered 503 and closed."""
CLIENT_TIMEOUT_S = 10.0
"""Seconds in which a client has to send a complete request, and to read some of a response that waits for it."""
LINGER_S = 1.0
"""Seconds for which a refused connection stays open, so that its client reads the answer before a reset discards it."""
MAX_LINGERING = 64
ACCEPTED_AT_ONCE = 64
"""Connections that asyncio accepts in one turn of its loop: until the next turn each holds a file descriptor."""
BACKLOG = 1024
"""Connections that the kernel queues: a client beyond them waits for a second before it tries again."""

REFUSAL = b"the dashboard server serves %d connections at once, and they are taken; try again in %d seconds\n"
REFUSAL_HEAD = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
    b"cache-control: no-store\r\nretry-after: %d\r\nconnection: close\r\n\r\n"
)


class LimitedState(ServerState):
    """State of a server, with a count of the refused connections that are not closed yet."""

    lingering = 0


class RefusedConnection(asyncio.Protocol):
    """A connection beyond MAX_CONNECTIONS: it gets the answer 503 and is closed."""

    def __init__(self, transport: asyncio.Transport, state: LimitedState) -> None:
        """Send the answer 503; the connection ends when its client closes it, or after a second at the latest.

        The count of lingering connections in `state` is increased. With 64 of them open, this one is closed at once and
        not counted.
        """
        self._state = state
        body = REFUSAL % (MAX_CONNECTIONS, CLIENT_TIMEOUT_S)
        transport.write(REFUSAL_HEAD % (len(body), CLIENT_TIMEOUT_S) + body)
        self._deadline: asyncio.TimerHandle | None = None
        if state.lingering < MAX_LINGERING:
            state.lingering += 1
            with suppress(OSError):  # the client may have gone already
                transport.write_eof()
            self._deadline = asyncio.get_running_loop().call_later(LINGER_S, transport.abort)
        else:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline and decrease the count of lingering connections, if this one was counted."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._state.lingering -= 1


class LimitedProtocol(H11Protocol):
    """An HTTP connection that is aborted when its client keeps the server waiting for more than ten seconds.

    `Server.on_tick` checks it; nothing here runs a timer.
    """

    _pending: Hashable = None
    _pending_since = 0.0
    _resumed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Serve the connection, or hand it to RefusedConnection (503) if 32 connections are served already."""
        if len(self.connections) < MAX_CONNECTIONS:
            super().connection_made(transport)
        else:
            assert isinstance(self.server_state, LimitedState)
            transport.set_protocol(RefusedConnection(transport, self.server_state))

    def abort_if_overdue(self, now: float) -> None:
        """Abort the connection if its client has made no progress for more than ten seconds.

        Progress is a complete request or a part of a response that is read; time in which the server works does not
        count. Call it regularly, since it remembers when it saw the last progress.

        Args:
            now: Time of the event loop's clock, in seconds.
        """
        pending = self._pending_of_client()
        if pending is None or pending != self._pending:
            self._pending, self._pending_since = pending, now
        elif now - self._pending_since > CLIENT_TIMEOUT_S:
            self.transport.abort()

    def _pending_of_client(self) -> Hashable:
        """Return a value that changes with every request sent and every part of a response read.

        It is None while the server works. The bytes of an incomplete request do not change it: a byte every second
        would otherwise hold the connection forever.
        """
        unsent = self.transport.get_write_buffer_size()
        if unsent or self.cycle is None or self.cycle.response_complete:
            return self.cycle, unsent, self._resumed
        return None

    def resume_writing(self) -> None:
        """Note that the client has read most of what was buffered for it."""
        self._resumed += 1
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer 400 with the text `msg`, or abort if the response to an earlier part of the request has begun.

        HTTP allows no second response.
        """
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def shutdown(self) -> None:
        """Close the connection unless it is closing already: h11 refuses to end a connection that has failed."""
        if not self.transport.is_closing():
            super().shutdown()


class FirstOfEachKind(logging.Filter):
    """Logging filter that passes only the first failure of each type at each line of code, and no other message."""

    def __init__(self) -> None:
        """Start without recorded failures."""
        super().__init__()
        self._seen: set[Hashable] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is to be printed: the first failure of its kind, other than a cancellation.

        Records without an exception are dropped.
        """
        error = record.exc_info[1] if record.exc_info else None
        return error is not None and not isinstance(error, asyncio.CancelledError) and self.is_first(error)

    def is_first(self, error: BaseException) -> bool:
        """Return whether this is the first failure of its kind, and record it.

        The kind is the exception type, its errno, and the innermost line of its traceback.
        """
        last = list(traceback.walk_tb(error.__traceback__))[-1:]
        kind = (type(error), getattr(error, "errno", None), *((frame.f_code, line) for frame, line in last))
        is_new = kind not in self._seen
        self._seen.add(kind)
        return is_new

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report a failure outside a request; this is an exception handler for asyncio.

        An OSError is one line on stderr, once per kind; other failures go to asyncio's default handler.

        Args:
            loop: The event loop.
            context: Asyncio's context of the failure, with the key `exception`.
        """
        error = context.get("exception")
        if not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif self.is_first(error):
            more = "clients wait until connections are closed (reported once)"
            # without an import, which needs a file descriptor
            print(
                f"the dashboard server cannot accept a connection: {error.strerror or error}; {more}", file=sys.stderr
            )


class Server(uvicorn.Server):
    """uvicorn server within the limits of this module.

    It leaves signals to its caller and reports each kind of failure once.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        """Prepare to serve by a configuration of `config_of`."""
        super().__init__(config)
        self.server_state = LimitedState()
        self._failures = FirstOfEachKind()

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        """Return a context that leaves signals alone."""
        return nullcontext()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on these listening sockets until `should_exit` is set.

        Meanwhile the failure filter is on the loggers of uvicorn and asyncio; the loop's exception handler stays
        replaced.
        """
        asyncio.get_running_loop().set_exception_handler(self._failures.handle)
        loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
        for logger in loggers:
            logger.addFilter(self._failures)
        try:
            await super().serve(sockets)
        finally:
            for logger in loggers:
                logger.removeFilter(self._failures)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, then set the kernel's queue of these sockets to 1024.

        asyncio uses a single number for the connections that it accepts per turn and for the queue.
        """
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Abort overdue connections, and return whether to stop; uvicorn calls it ten times a second."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.abort_if_overdue(now)
        return await super().on_tick(counter)


def config_of(app: Callable[..., Any]) -> uvicorn.Config:
    """Return the uvicorn configuration for `Server`: plain HTTP/1.1, no web sockets, no logs of access.

    It ends a second after a stop, even if pages are open.
    """
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=1,
    )
