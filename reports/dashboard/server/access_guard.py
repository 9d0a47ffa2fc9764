"""Access guard of the local server.

Only programs of this machine that know the token, and no page of another origin. The token excludes other users of the
machine and every page that does not know it. The Host header is checked because a name that an attacker owns may
resolve to 127.0.0.1 (DNS rebinding). The headers that browsers set themselves are checked because a page of another
origin may still have learnt the address.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURITY_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class AccessGuard:
    """ASGI middleware that refuses requests without permission and adds SECURITY_HEADERS to every response.

    These forbid caching, frames, other origins, referrers and guesses of the content type.

    `port` is the port of the server, `token` the first part of every permitted path.
    """

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self._app, self._token = app, token
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: by the application, or with a refusal (400, 403, 404 or 405).

        A web socket is closed with code 1008.
        """
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def answer(message: Message) -> None:
            """Send a message, with the SECURITY_HEADERS that a response lacks added to its start."""
            if message["type"] == "http.response.start":
                present = {name.decode() for name, _ in message.get("headers", ())}
                extra_headers = [
                    (name.encode(), text.encode()) for name, text in SECURITY_HEADERS.items() if name not in present
                ]
                message = {**message, "headers": [*message.get("headers", ()), *extra_headers]}
            await send(message)

        refused = self._refusal(scope)
        await (refused or self._app)(scope, receive, answer)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        """Return the response that refuses a request; None if it is allowed.

        Checked in this order: Host must be 127.0.0.1 or localhost with the server's port (400), the method GET (405),
        the origin allowed (403), and the first part of the path the token (404, compared in constant time).
        """
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("this server accepts requests for 127.0.0.1 and localhost only\n", 400)
        if scope["method"] != "GET":
            return PlainTextResponse("this server accepts GET requests only\n", 405, {"allow": "GET"})
        if not self._is_allowed_origin(headers):
            return PlainTextResponse("this server refuses requests from other pages\n", 403)
        first = scope["path"].split("/")[1] if scope["path"].startswith("/") else ""
        if not secrets.compare_digest(first.encode(), self._token.encode()):
            return PlainTextResponse("no such page; use the complete address that atma-sweep dashboard printed\n", 404)
        return None

    def _is_allowed_origin(self, headers: Headers) -> bool:
        """Return whether the page itself, a user who opened the address, or a client without a browser asks.

        Every Origin and Referer that is present must be this server's. Every Sec-Fetch-Site must be same-origin or
        none, unless the request is a top-level navigation (Sec-Fetch-Mode navigate, Sec-Fetch-Dest document), which is
        allowed from any site. Without these headers a request is allowed. Host is checked elsewhere.
        """
        origins = {f"http://{host}" for host in self._hosts}
        if any(origin not in origins for origin in headers.getlist("origin")):
            return False
        if any(_origin(referer) not in origins for referer in headers.getlist("referer")):
            return False
        opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        return opened or all(site in ("same-origin", "none") for site in _values(headers.getlist("sec-fetch-site")))


def _origin(url: str) -> str:
    """Return scheme, host and port of a URL, "http://host:port"; the text itself if it has fewer than four parts."""
    return "/".join(url.split("/")[:3])


def _values(headers: Iterable[str]) -> list[str]:
    return [header.strip().lower() for header in headers]
