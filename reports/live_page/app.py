"""What the server answers, all of it below the token: the page, whether there is something new, newer data, and curves.

Every answer is made in a thread of Starlette's pool, off the event loop.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..dashboard.page import library, page_of
from .guard import Guard
from .newest import Newest, joined


def app_of(newest: Newest, *, port: int, token: str) -> Guard:
    """The ASGI application of a page: GET /TOKEN/, state, data and VERSION/BLOCK below it, and nothing else."""

    @lru_cache(maxsize=1)
    def page(version: int) -> bytes:
        # what is read at once stands in the page; curves are fetched one by one
        build = newest.of(version) or newest.build
        blocks = {name: block for name, block in build.blocks.items() if not name.startswith("curve-")}
        told = b'{"version":%d}' % build.version
        script = resources.files(__package__).joinpath("live.js").read_text(encoding="utf-8")
        given = [*blocks.items(), ("live", told), ("library", library().encode())]
        return page_of(build.title, given, more_script=script, connect="'self'").encode()

    def show(request: Request) -> Response:
        return HTMLResponse(page(newest.build.version))

    def state(request: Request) -> Response:
        return JSONResponse(newest.look())

    def data(request: Request) -> Response:
        return Response(joined(newest.build), media_type="application/json")

    def block(request: Request) -> Response:
        build = newest.of(request.path_params["version"])
        found = build.blocks.get(request.path_params["name"]) if build else None
        if found is None:
            return PlainTextResponse("no such data any more\n", 404)
        return Response(found, media_type="application/octet-stream")

    below = f"/{token}"
    routes = [
        Route(f"{below}/", show, methods=["GET"]),
        Route(f"{below}/state", state, methods=["GET"]),
        Route(f"{below}/data", data, methods=["GET"]),
        Route(f"{below}/{{version:int}}/{{name:str}}", block, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes), port=port, token=token)
