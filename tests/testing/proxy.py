"""A TCP proxy before a PostgreSQL server that loses what it is told to lose: the answers to commits, or the commits.

with Proxy(url) as proxy:
    store = open_store(proxy.url)
    proxy.lose = 1  # the next commit of a transaction that wrote something
"""

from __future__ import annotations

import math
import re
import select
import socket
import threading
import time
from pathlib import Path
from typing import Literal

from sqlalchemy.engine import make_url

COMMIT = b"COMMIT\0"
ENDED = re.compile(rb"Z\0\0\0\x05[ITE]$")
WROTE = re.compile(rb"C\0\0..(INSERT|UPDATE|DELETE) ", re.DOTALL)
"""What a server says of a statement that changed rows; a pattern, since statements may be prepared ones."""
How = Literal["answer", "request", "late"]


class Proxy:
    """Listens on 127.0.0.1 as long as the context lasts. Its threads end with it."""

    def __init__(self, url: str) -> None:
        database_url = make_url(url)
        self._upstream = Path(str(database_url.query["host"])) / f".s.PGSQL.{database_url.port or 5432}"
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = database_url.set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False)
        self.lose: float = 0
        """How many of the next commits are lost; math.inf for all."""
        self.how: How = "answer"
        """`answer`: the commit is done, and the connection cut. `request`: the commit never arrives. `late`: the client
        is cut off, and the commit arrives LATE_S later."""
        self.late_s = 1.0
        self.lost = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        wrote = False
        with client, server:
            try:
                server.connect(str(self._upstream))
                while True:
                    for ready in select.select([client, server], [], [])[0]:
                        data = ready.recv(1 << 16)
                        if not data:
                            return
                        if ready is server:
                            wrote = wrote or bool(WROTE.search(data))
                            client.sendall(data)
                        elif COMMIT in data and wrote and self._loses():
                            self._lose(client, server, data)
                            return
                        else:
                            wrote = wrote and COMMIT not in data
                            server.sendall(data)
            except OSError:
                return

    def _loses(self) -> bool:
        with self._lock:
            if self.lose <= 0:
                return False
            self.lose -= 0 if self.lose == math.inf else 1
            self.lost += 1
            return True

    def _lose(self, client: socket.socket, server: socket.socket, commit: bytes) -> None:
        if self.how == "request":
            return
        if self.how == "late":
            client.close()
            time.sleep(self.late_s)
        server.sendall(commit)
        received = b""
        while not ENDED.search(received):
            more = server.recv(1 << 16)
            if not more:
                return
            received += more
