"""ASGI application of the local server: the page, its state, newer data, and curves, all below the token.

Responses are made in threads of Starlette's pool, off the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from importlib import resources

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..gallery import BLOCK_PREFIX
from ..page import page_parts
from .access_guard import AccessGuard
from .figure_cache import FigureCache
from .page_cache import PageCache, join_json_blocks

CHUNK_BYTES = 65_536
"""Bytes of a long response that wait for a slow client, rather than the complete response."""


class LongResponse(Response):
    """A response that is sent in parts, each after the client has read most of the previous part."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, then the body in parts of 64 KiB, then an empty last part."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), CHUNK_BYTES):
            part = self.body[start : start + CHUNK_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def app_of(cache: PageCache, *, port: int, token: str, figures: FigureCache | None = None) -> AccessGuard:
    """Return the ASGI application of a sweep's pages behind the access guard."""
    return AccessGuard(pages_of(cache, token, figures), port=port, token=token)


def pages_of(cache: PageCache, token: str, figures: FigureCache | None = None) -> Starlette:
    """Return the ASGI application of a page, without the access guard.

    Figures are drawn on request by `figures`; None: there are none. It answers GET /TOKEN/ (HTML of the newest version), /TOKEN/state (JSON of `PageCache.poll`), /TOKEN/data (JSON with
    version, core and answer) and /TOKEN/VERSION/BLOCK (bytes of a block; 404 if version or block is gone). Any other
    path is 404.
    """
    page_lock = threading.Lock()

    @lru_cache(maxsize=1)
    def page(version: int) -> bytes:
        """Return the HTML, as bytes, of a version of the page, or of the newest if that version is gone.

        The last result is cached. Curves are not in the page.
        """
        # the page contains the blocks that it reads at start; curves are fetched one by one
        build = cache.find_version(version) or cache.build
        blocks = {name: block for name, block in build.blocks.items() if not name.startswith("curve-")}
        version_json = b'{"version":%d}' % build.version
        script = resources.files(__package__).joinpath("live.js").read_text(encoding="utf-8")
        page_blocks = [*blocks.items(), ("live", version_json)]
        return b"".join(page_parts(build.title, page_blocks, more_script=script, connect_sources="'self'"))

    def show(request: Request) -> Response:
        with page_lock:  # clients that come together wait for one page instead of making one each
            html = page(cache.build.version)
        return LongResponse(html, media_type="text/html")

    def state(request: Request) -> Response:
        return JSONResponse(cache.poll())

    def data(request: Request) -> Response:
        return LongResponse(join_json_blocks(cache.build), media_type="application/json")

    async def block(request: Request) -> Response:
        """Answer with a block, such as a curve or a figure, of a version; 404 if either is gone."""
        # compared as text: int() refuses a number of thousands of digits
        version = request.path_params["version"]
        build = next((build for build in cache.builds if str(build.version) == version), None)
        name = request.path_params["name"]
        content = build.blocks.get(name) if build else None
        if content is None and build is not None and figures is not None and name.startswith(BLOCK_PREFIX):
            content = await figures.block(build.version, name.removeprefix(BLOCK_PREFIX))
        if content is None:
            return PlainTextResponse("these data are no longer available\n", 404)
        return LongResponse(content, media_type="application/octet-stream")

    prefix = f"/{token}"
    routes = [
        Route(f"{prefix}/", show, methods=["GET"]),
        Route(f"{prefix}/state", state, methods=["GET"]),
        Route(f"{prefix}/data", data, methods=["GET"]),
        Route(f"{prefix}/{{version:str}}/{{name:str}}", block, methods=["GET"]),
    ]
    return Starlette(routes=routes)


POLL_S = 0.05


class PreparedApp:
    """An ASGI application whose requests wait, without a thread each, until it is prepared."""

    def __init__(self, prepare: Callable[[], ASGIApp]) -> None:
        """Store the function that prepares the application; nothing is started."""
        self._prepare = prepare
        self._future: Future[ASGIApp] = Future()

    def start(self, on_failure: Callable[[], None]) -> None:
        """Prepare the application in a daemon thread and return at once.

        After an exception, which `raise_failure` raises later, `on_failure` is called in that thread.
        """
        threading.Thread(target=self._run, args=(on_failure,), name="page", daemon=True).start()

    def _run(self, on_failure: Callable[[], None]) -> None:
        """Prepare the application; runs in its own thread and stores an exception for `raise_failure`."""
        try:
            self._future.set_result(self._prepare())
        except BaseException as error:  # noqa: BLE001 (raise_failure raises it in the main thread)
            self._future.set_exception(error)
            on_failure()

    def raise_failure(self) -> None:
        """Raise the exception of the preparation, if it has failed; do nothing if it succeeded or still runs."""
        if self._future.done():
            self._future.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application once it is prepared; with 503 if the preparation failed."""
        while not self._future.done():
            await asyncio.sleep(POLL_S)
        if self._future.exception() is not None:
            app: ASGIApp = PlainTextResponse(
                "the page cannot be prepared; see the error in the terminal of the server\n", 503
            )
        else:
            app = self._future.result()
        await app(scope, receive, send)
