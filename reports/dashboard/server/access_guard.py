"""Who may ask the server: programs of this machine that know the token, and no page of another origin.

The token keeps other users of the machine out, and every page that does not know it. The Host header is looked at because a
name that an attacker owns may lead to 127.0.0.1 (DNS rebinding); the headers that browsers set themselves, because a page
elsewhere may have learnt the address all the same.
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
    """Lets through what may be answered, and puts the headers of ALWAYS on every answer."""

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self._app, self._token = app, token
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. A web socket is closed."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def answer(message: Message) -> None:
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
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("this server answers for 127.0.0.1 and localhost alone\n", 400)
        if scope["method"] != "GET":
            return PlainTextResponse("this server only reads: GET\n", 405, {"allow": "GET"})
        if not self._is_allowed_origin(headers):
            return PlainTextResponse("this server answers no other page\n", 403)
        first = scope["path"].split("/")[1] if scope["path"].startswith("/") else ""
        if not secrets.compare_digest(first.encode(), self._token.encode()):
            return PlainTextResponse("no such page; use the address that atma-sweep dashboard printed, whole\n", 404)
        return None

    def _is_allowed_origin(self, headers: Headers) -> bool:
        """Whether it was asked for by the page itself, by an address that somebody opened, or by no browser at all."""
        origins = {f"http://{host}" for host in self._hosts}
        if any(origin not in origins for origin in headers.getlist("origin")):
            return False
        if any(_origin(referer) not in origins for referer in headers.getlist("referer")):
            return False
        opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        return opened or all(site in ("same-origin", "none") for site in _values(headers.getlist("sec-fetch-site")))


def _origin(url: str) -> str:
    return "/".join(url.split("/")[:3])


def _values(headers: Iterable[str]) -> list[str]:
    return [header.strip().lower() for header in headers]
