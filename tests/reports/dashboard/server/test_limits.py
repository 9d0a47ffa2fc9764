"""The served page under attack: clients that hold connections, send slowly, read slowly, or speak broken HTTP."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from atma_sweep.reports.dashboard.server import connections as module
from atma_sweep.results.store.store import open_store
from attacks import DIGITS, is_closed, odd_requests, open_connections, status_of
from patience import PATIENCE_S, until
from serving import TOKEN, Site, serving
from synthetic import synthetic_sweep

MIB = 1024


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("served") / "atma.db"
    store = open_store(path, create=True)
    synthetic_sweep(store, 4, 10)
    store.close()
    with serving(open_store(path, read_only=True), "big") as server:
        # larger than what the kernels of both sides hold
        server.newest.build.blocks["large"] = b"x" * 4_600_000
        yield server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the deadline, so that tests need not wait for ten seconds."""
    monkeypatch.setattr(module, "CLIENT_TIMEOUT_S", 0.5)


def status(site: Site, path: str = "state") -> int:
    return site.ask(f"/{TOKEN}/{path}")[0]


def served_again(site: Site) -> None:
    """Wait until the page is served again: the kernel reports closed clients a moment late."""
    until(lambda: status(site) == 200)


def test_connection_beyond_the_limit_gets_503(site: Site) -> None:
    served_again(site)
    with open_connections(site.port, module.MAX_CONNECTIONS):
        code, headers, body = site.ask(f"/{TOKEN}/state")
        assert (code, headers["connection"], headers["retry-after"]) == (503, "close", "10")
        assert (
            body == b"the dashboard server serves 32 connections at once, and they are taken; try again in 10 seconds\n"
        )
    served_again(site)


def test_2000_idle_connections_take_32_slots(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "CLIENT_TIMEOUT_S", 1e3)  # none is cut off, however slow this machine is
    served_again(site)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(2000, (soft - 200) // 2)  # client and server are one process here
    with open_connections(site.port, count) as clients:
        refused = [client for client in clients[module.MAX_CONNECTIONS :] if is_closed(client)]
        assert len(refused) == count - module.MAX_CONNECTIONS
        assert status(site) == 503
    served_again(site)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET /",
        b"GET / HTTP/1.1\r\nhost: x\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhello",
    ],
    ids=["idle", "line", "headers", "body"],
)
def test_unfinished_request_is_cut_off(site: Site, quick: None, first: bytes) -> None:
    served_again(site)
    with open_connections(site.port, module.MAX_CONNECTIONS, first) as clients:
        assert status(site) == 503
        served_again(site)
        assert all(map(is_closed, clients))


def test_a_byte_now_and_then_extends_no_deadline(site: Site, quick: None) -> None:
    with open_connections(site.port, 1, b"GET / HTTP/1.1\r\n") as (client,):

        def cut_off() -> bool:
            try:
                client.sendall(b"x: y\r\n")
            except (BrokenPipeError, ConnectionResetError):
                return True
            time.sleep(0.05)
            return False

        until(cut_off)


def large_request(site: Site) -> bytes:
    return f"GET /{TOKEN}/1/large HTTP/1.1\r\nhost: 127.0.0.1:{site.port}\r\nconnection: close\r\n\r\n".encode()


def small_client(site: Site) -> socket.socket:
    """Return a client whose kernel buffers little of an answer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", site.port))
    client.sendall(large_request(site))
    return client


def test_unread_response_is_cut_off(site: Site, quick: None) -> None:
    expected = len(site.ask(f"/{TOKEN}/1/large")[2])
    with small_client(site) as client:
        time.sleep(2)  # four times the deadline
        got = 0
        try:
            while part := client.recv(1 << 20):
                got += len(part)
        except ConnectionResetError:
            pass
        # the rest is what the kernels of both sides hold
        assert got < expected
    served_again(site)


@pytest.mark.thorough
def test_response_that_is_read_slowly_arrives(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says that it has room again once 170 KiB are read, here four times in the deadline."""
    monkeypatch.setattr(module, "CLIENT_TIMEOUT_S", 1.0)
    content = site.ask(f"/{TOKEN}/1/large")[2]
    with small_client(site) as client:
        got = b""
        began = time.monotonic()
        while part := client.recv(65_536):
            got += part
            time.sleep(0.1)
        assert got.endswith(content)
        assert time.monotonic() - began > module.CLIENT_TIMEOUT_S, "it took longer than the deadline"


@pytest.mark.parametrize(
    "path", ["{}/core", "1/{}", "{}", "state?since={}", "data?version={}", "{0}/{0}", "../{}/core"]
)
def test_a_number_of_5000_digits_is_no_server_error(site: Site, path: str) -> None:
    code, _, body = site.ask(f"/{TOKEN}/{path.format(DIGITS.decode())}")
    assert (code, len(body.splitlines())) == ((200, 1) if "?" in path else (404, 1))


def test_odd_requests_get_no_server_error(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    served_again(site)
    codes = [status_of(site.port, request) for request in odd_requests(1000, site.port, TOKEN)]
    wrong = {code for code in codes if code is not None and code >= 500}
    assert wrong <= {503}
    # the draw is fixed: most are refused as HTTP, some reach every answer
    assert {200, 400, 404, 405} <= set(codes)
    assert status(site) == 200
    assert capfd.readouterr().err == ""


def test_lack_of_descriptors_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    failures = module.FirstOfEachKind()
    loop = asyncio.new_event_loop()
    for _ in range(100):
        error = OSError(errno.EMFILE, "Too many open files")
        failures.handle(loop, {"message": "socket.accept() out of system resource", "exception": error})
    loop.close()
    assert capfd.readouterr().err == (
        "the dashboard server cannot accept a connection: Too many open files; clients wait until connections are "
        "closed (reported once)\n"
    )


SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
from atma_sweep.reports.dashboard.server.serve import serve
serve(None, sys.argv[1], browser=False, tell=lambda address: print(address, flush=True))
"""


def is_served(address: str) -> bool:
    """Return whether a page arrives; a client that ends its sending side early may get none, so this one does not."""
    try:
        return urllib.request.urlopen(address, timeout=PATIENCE_S).status == 200
    except OSError:
        return False


def rss_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc")
@pytest.mark.parametrize("files", [60, 1024])
def test_attacked_process_stays_small_and_silent(tmp_path: Path, files: int) -> None:
    """With 60 descriptors it runs out of them; its memory grows by less than 48 MiB.

    Each of 32 connections may hold 64 KiB of a response and 256 KiB that were read at once, which makes 10 MiB;
    threads, parsers and fragmentation get the rest. One page held per connection would be 32 times 2.5 MiB.
    """
    store = open_store(tmp_path / "atma.db", create=True)
    synthetic_sweep(store, 4, 10)
    store.close()
    command = [sys.executable, "-c", SERVER, str(tmp_path / "atma.db"), str(files)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        port, token = int(address.split(":")[2].split("/")[0]), address.split("/")[3]
        for _ in range(3):
            urllib.request.urlopen(address, timeout=PATIENCE_S).read()
        before = rss_kib(server.pid)
        page = f"GET /{token}/ HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode()
        for first in (b"", b"GET / HTTP/1.1\r\nx: " + b"y" * 9000, page):
            with open_connections(port, 80 if files < 100 else 2000, first):
                time.sleep(1)
        codes = [status_of(port, request) for request in odd_requests(1000, port, token)]
        assert {code for code in codes if code is not None and code >= 500} <= {503}
        until(lambda: is_served(address))
        assert rss_kib(server.pid) - before < 48 * MIB
    finally:
        server.terminate()
        _, err = server.communicate()
    assert "Traceback" not in err
    assert err.count("Too many open files") == (1 if files < 100 else 0)
