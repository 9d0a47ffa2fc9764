"""An application that is prepared in a thread while its server runs already, so that the address is printed at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

POLL_S = 0.05


class PreparedApp:
    """An ASGI application whose requests wait, without a thread each, until it is prepared."""

    def __init__(self, prepare: Callable[[], ASGIApp]) -> None:
        """Remember what prepares the application."""
        self._prepare = prepare
        self._future: Future[ASGIApp] = Future()

    def start(self, on_failure: Callable[[], None]) -> None:
        """Prepare the application in a thread; `on_failure` is called there after an exception."""
        threading.Thread(target=self._run, args=(on_failure,), name="page", daemon=True).start()

    def _run(self, on_failure: Callable[[], None]) -> None:
        """Prepare the application, in its thread."""
        try:
            self._future.set_result(self._prepare())
        except BaseException as error:  # noqa: BLE001 (raise_failure raises it in the main thread)
            self._future.set_exception(error)
            on_failure()

    def raise_failure(self) -> None:
        """Raise what the preparation raised; nothing where it has succeeded or still runs."""
        if self._future.done():
            self._future.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request once the application is prepared; 503 where that has failed."""
        while not self._future.done():
            await asyncio.sleep(POLL_S)
        if self._future.exception() is not None:
            app: ASGIApp = PlainTextResponse("the page cannot be prepared; the terminal of the server says why\n", 503)
        else:
            app = self._future.result()
        await app(scope, receive, send)
