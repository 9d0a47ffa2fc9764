"""Clients that a server on this machine must survive: idle ones, slow ones, and ones that speak broken HTTP."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

DIGITS = b"9" * 5000
METHODS = (b"GET", b"POST", b"BREW", b"get", b"", b"G\x00T", b"CONNECT", b"OPTIONS", b"PRI", b"\xff" * 9)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"HTTP/" + DIGITS, b"", b"http/1.1", b"JUNK/1.1")
PIECES = (
    b"state", b"data", b"core", b"effects", b"..", b"%2e%2e", b"%", b"%zz", b"%00", b"\x00", b"%ff%fe", b"%ed%a0%80", DIGITS, b"-1", b"1e9", b"\xc3\xa9",
    b"?version=" + DIGITS, b"?" + b"a" * 9000, b"//", b" ", b"curve-" + DIGITS, b"http://example.org/", b"*",
)  # fmt: skip
HEADERS = (
    b"content-length: " + DIGITS, b"content-length: -1", b"content-length: 5", b"transfer-encoding: chunked", b"transfer-encoding: junk", b"x: " + b"y" * 20_000,
    b"no colon", b": empty", b"host: example.org", b"origin: \xff", b"referer: " + DIGITS, b"expect: 100-continue", b"connection: upgrade\r\nupgrade: websocket",
    b"range: bytes=" + DIGITS + b"-", b" folded", b"x\x00y: 1", b"cookie: a=b", b"accept-encoding: gzip", b"connection: close",
)  # fmt: skip
BODIES = (b"", b"", b"zz\r\n", b"5\r\nhello\r\n0\r\n\r\n", DIGITS + b"\r\n", b"\x00" * 500, b"GET / HTTP/1.1\r\n\r\n")


def odd_requests(count: int, port: int, token: str) -> Iterator[bytes]:
    """Yield requests of one seed, of which about half reach the routes below the token and few are valid."""
    draw = random.Random(7)
    host = b"host: 127.0.0.1:%d" % port
    for _ in range(count):
        path = b"/".join(
            [b"", token.encode() if draw.random() < 0.7 else b"x", *draw.choices(PIECES, k=draw.randrange(4))]
        )
        method = draw.choice(METHODS) if draw.random() < 0.3 else b"GET"
        version = draw.choice(VERSIONS) if draw.random() < 0.3 else b"HTTP/1.1"
        headers = [host] * (draw.random() < 0.9) + draw.choices(HEADERS, k=draw.choice((0, 0, 1, 2)))
        yield b"\r\n".join([b" ".join([method, path, version]), *headers, b"", draw.choice(BODIES)])


def status_of(port: int, request: bytes, timeout_s: float = 60.0) -> int | None:
    """Send a request and return the status of the answer; None where the server closes without one.

    The sending side is shut down after it, so that a server which waits for more sees the end.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            head = client.recv(65_536)
        except (ConnectionResetError, BrokenPipeError, OSError):
            return None
    return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else None


@contextmanager
def open_connections(port: int, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """Hold so many connections open, each of which has sent `first` and nothing more."""
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            if first:
                client.sendall(first)
            clients.append(client)
        yield clients


def is_closed(client: socket.socket, within_s: float = 60.0) -> bool:
    """Return whether the server ends this connection; what it sends before that is read and dropped."""
    end = time.monotonic() + within_s
    client.settimeout(within_s)
    try:
        while client.recv(65_536):
            if time.monotonic() > end:
                return False
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True
