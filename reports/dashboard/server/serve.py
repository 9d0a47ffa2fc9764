"""`atma-sweep dashboard`: the page of a sweep on 127.0.0.1, until Ctrl-C."""

from __future__ import annotations

import errno
import html
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ....results.builtin_sweeps import open_store_with_builtins
from ....results.console.output_files import write
from ....results.errors import UserError
from ....results.store.store import Store

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

LOOPBACK = "127.0.0.1"
DATABASE_PATIENCE_S = 10.0
"""A page is rather told that the database is locked than kept waiting."""
SEND_BUFFER_BYTES = 262_144
"""Bytes that the kernel holds for a client that does not read; its default grows to megabytes per connection."""


class PortUnavailable(UserError):
    """The port cannot be had."""

    exit_code = 3


def serve(
    sweep: str | None,
    db: str | None,
    *,
    compare: str | None = None,
    port: int = 0,
    browser: bool = True,
    tell: Callable[[str], None] = print,
) -> None:
    """Serves the page of a sweep (None: the one launched last), and gives its address to `tell`; returns after Ctrl-C.

    `compare` puts another sweep beside it; `port` 0 is any that is free. The database is opened for reading alone. Another
    request to stop than Ctrl-C reaches its handler once the server has ended. The address is told before the page is
    prepared, which takes seconds; requests wait for it.
    Raises PortTaken, SweepUnknown and StoreError before the address is told; after it ReportError, and StoreError again.
    """
    with listening_socket(port) as listener:
        store = open_store_with_builtins(db, sweep, patience=DATABASE_PATIENCE_S, read_only=True)
        name = sweep or store.default_sweep()
        store.mark(name)  # raises SweepUnknown
        bound_port, token = listener.getsockname()[1], secrets.token_urlsafe(32)
        address = f"http://{LOOPBACK}:{bound_port}/{token}/"
        tell(address)
        from .access_guard import AccessGuard
        from .app import PreparedApp
        from .connections import Server, config_of  # imports uvicorn, which takes a quarter of a second

        pages = PreparedApp(partial(_prepare, store, name, compare, token))
        server = Server(config_of(AccessGuard(pages, port=bound_port, token=token)))
        pages.start(on_failure=partial(setattr, server, "should_exit", True))
        with stop_on_signals(server), opened_in_browser(address if browser else None) as note:
            if note:
                print(note, file=sys.stderr)
            server.run(sockets=[listener])
        pages.raise_failure()


def _prepare(store: Store, sweep: str, compare: str | None, token: str) -> ASGIApp:
    """Import what makes the page, and make its first version. Raises SweepUnknown, StoreError, ReportError."""
    from ..page import build_blocks
    from .app import pages_of
    from .page_cache import PageCache

    return pages_of(PageCache(store, sweep, partial(build_blocks, compare=compare)), token)


@contextmanager
def stop_on_signals(server: uvicorn.Server) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the server; the handlers that were there before hear of the latter two afterwards.

    A handler that raises must not be called while the server runs: asyncio swallows what is raised inside a callback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        server.force_exit = bool(received)
        server.should_exit = True
        received.append(number)

    handled = [signal.SIGINT, *(number for number in (signal.SIGTERM, signal.SIGHUP) if _is_handled(number))]
    previous_handlers = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    if received and received[0] != signal.SIGINT:
        signal.raise_signal(received[0])


def _is_handled(number: int) -> bool:
    return signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP


@contextmanager
def listening_socket(port: int) -> Iterator[socket.socket]:
    """A socket of the loopback that listens already, so that a browser may come before the server runs. Raises PortTaken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # which connections inherit
        try:
            listener.bind((LOOPBACK, port))
            listener.listen(64)
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
            raise PortUnavailable(
                f"port {port} of {LOOPBACK} {reason}; name another with --port, or leave it out"
            ) from error
        yield listener
    finally:
        listener.close()


@contextmanager
def opened_in_browser(address: str | None) -> Iterator[str | None]:
    """Opens the address in the browser, if there is one to see; gives a note where there is not.

    The browser gets the name of a file that leads there and that only its user can read: arguments of a program can be
    read by everybody on the machine, and the token is in the address.
    """
    if address is None:
        yield None
        return
    if sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))):
        yield "no browser to open here; open the address yourself"
        return
    with tempfile.TemporaryDirectory(prefix="atma-page-") as folder:  # mode 0700
        file = Path(folder) / "open.html"
        write(file, f'<meta http-equiv="refresh" content="0;url={html.escape(address)}">')
        yield None if webbrowser.open(file.as_uri()) else "no browser could be opened; open the address yourself"
