"""The page of a sweep served inside a test, on a port of its own."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atma_sweep.reports.dashboard.server.app import app_of
from atma_sweep.reports.dashboard.server.connections import Server, config_of
from atma_sweep.reports.dashboard.server.page_cache import PageCache
from atma_sweep.reports.dashboard.server.serve import listening_socket
from atma_sweep.results.store.store import Store
from patience import PATIENCE_S

TOKEN = "the-token-of-a-test"


@dataclass(frozen=True)
class Site:
    """Address of a served page."""

    port: int
    newest: PageCache

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{TOKEN}/"

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of what a plain client asks, with these headers and `Host`, as `host`, besides."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            headers = {"host": f"127.0.0.1:{self.port}"} | {
                name.replace("_", "-"): text for name, text in headers.items()
            }
            for name, text in headers.items():
                if text:
                    connection.putheader(name, text)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read()
        finally:
            connection.close()


@contextmanager
def serving(store: Store, sweep: str) -> Iterator[Site]:
    with listening_socket(0) as ears:
        port = ears.getsockname()[1]
        newest = PageCache(store, sweep)
        server = Server(config_of(app_of(newest, port=port, token=TOKEN)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [ears]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield Site(port, newest)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
