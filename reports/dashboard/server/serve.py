"""Command `atma-sweep dashboard`: serve the page of a sweep on 127.0.0.1 until Ctrl-C."""

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

from ....results.builtin_sweeps import is_builtin, store_opener
from ....results.console.output_files import write_file
from ....results.errors import UserError
from ....results.store.store import Store

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

LOOPBACK = "127.0.0.1"
DATABASE_PATIENCE_S = 10.0
"""Seconds to wait for a locked database before the page reports it."""
SEND_BUFFER_BYTES = 262_144
"""Bytes that the kernel holds for a client that does not read; its default grows to megabytes per connection."""


class PortUnavailable(UserError):
    """Error: the port cannot be bound."""

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
    """Serve the page of a sweep until Ctrl-C; its address is given to `tell`.

    Blocks the calling thread, and returns normally after Ctrl-C. The database is opened read-only. The address is
    reported before the page is prepared, which takes seconds; requests wait for it. A signal other than Ctrl-C reaches
    its previous handler once the server has ended.

    Args:
        sweep: Name of the sweep; None: the one launched last.
        db: Address of the database; None: the default.
        compare: Name of a reference sweep to compare with; None: no comparison.
        port: Port to bind; 0: any free one.
        browser: Whether to open the page in a browser.
        tell: Function that reports the address.

    Raises:
        PortUnavailable: The port cannot be bound; before the address is reported.
        SweepUnknown: There is no such sweep (before the address is reported), or no sweep `compare` (after it, when the
            server has ended).
        ReportError: The page cannot be built; after the address was reported, when the server has ended.
        StoreError: The database cannot be read; before or after it.
    """
    with listening_socket(port) as listener:
        open_store = store_opener(db, sweep, patience=DATABASE_PATIENCE_S, read_only=True)
        if sweep is None or not is_builtin(sweep):  # a built-in sweep exists, and takes seconds to load
            sweep = sweep or open_store().default_sweep()
            open_store().change_token(sweep)  # raises SweepUnknown
        bound_port, token = listener.getsockname()[1], secrets.token_urlsafe(32)
        address = f"http://{LOOPBACK}:{bound_port}/{token}/"
        tell(address)
        from .access_guard import AccessGuard
        from .app import PreparedApp
        from .connections import Server, config_of  # imports uvicorn, which takes a quarter of a second

        pages = PreparedApp(partial(_prepare, open_store, sweep, compare, token))
        server = Server(config_of(AccessGuard(pages, port=bound_port, token=token)))
        pages.start(on_failure=partial(setattr, server, "should_exit", True))
        with stop_on_signals(server), opened_in_browser(address if browser else None) as note:
            if note:
                print(note, file=sys.stderr)
            server.run(sockets=[listener])
        pages.raise_failure()


def _prepare(open_store: Callable[[], Store], sweep: str, compare: str | None, token: str) -> ASGIApp:
    """Import the page builder, open the store, build the first version of the page and return its ASGI application.

    It takes seconds, and has no access guard.

    Raises:
        SweepUnknown, StoreError, ReportError: The page cannot be built.
    """
    from ..gallery import block_on_request, figure_titles
    from ..page import build_blocks
    from .app import pages_of
    from .figure_cache import FigureCache
    from .page_cache import PageCache

    store = open_store()
    build = partial(build_blocks, compare=compare, figures=figure_titles(store, sweep))
    return pages_of(PageCache(store, sweep, build), token, FigureCache(partial(block_on_request, store, sweep)))


@contextmanager
def stop_on_signals(server: uvicorn.Server) -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP end the server while the context lasts; a second signal forces the exit.

    Previous handlers are restored at the end. If SIGTERM or SIGHUP was the first signal, it is raised again for them;
    Ctrl-C is not. An ignored SIGTERM or SIGHUP stays ignored. Previous handlers must not run while the server runs,
    because asyncio swallows what is raised inside a callback. Outside the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        """Ask the server to stop; on a second signal, force it."""
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
    """Yield a loopback socket that already listens, so that a browser can connect before the server runs.

    It is closed at the end.

    Args:
        port: Port to bind; 0: any free one.

    Raises:
        PortUnavailable: The port cannot be bound.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # which connections inherit
        try:
            listener.bind((LOOPBACK, port))
            listener.listen(64)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
            raise PortUnavailable(
                f"port {port} of {LOOPBACK} {reason}; choose another with --port, or omit it"
            ) from error
        yield listener
    finally:
        listener.close()


@contextmanager
def opened_in_browser(address: str | None) -> Iterator[str | None]:
    """Open the address in the browser, and yield None, or a note for the user where there is no browser to open.

    An address of None opens nothing. The browser gets a temporary file that redirects to the address, which only its
    user can read and which is deleted when the context ends. Arguments of a program are visible to all users of the
    machine, and the address contains the token.
    """
    if address is None:
        yield None
        return
    if sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))):
        yield "no browser available; open the address yourself"
        return
    with tempfile.TemporaryDirectory(prefix="atma-page-") as folder:  # mode 0700
        file = Path(folder) / "open.html"
        write_file(file, f'<meta http-equiv="refresh" content="0;url={html.escape(address)}">')
        yield None if webbrowser.open(file.as_uri()) else "no browser could be opened; open the address yourself"
