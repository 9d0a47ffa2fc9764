"""Access to the served page: no answer without the token, none for another origin."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from atma_sweep.reports.dashboard.page import build_blocks
from atma_sweep.results.errors import WriteRefused
from atma_sweep.results.store.store import open_store
from serving import TOKEN, Site, serving
from synthetic import synthetic_sweep


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("served") / "atma.db"
    store = open_store(path, create=True)
    synthetic_sweep(store, 4, 10)
    name = store.default_sweep()
    store.close()
    with serving(open_store(path, read_only=True), name) as served:
        yield served


@pytest.mark.thorough
def test_the_page_and_its_data(site: Site) -> None:
    status, headers, body = site.ask(f"/{TOKEN}/")
    page = body.decode()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert not [name for name in headers if name.startswith("access-control") or name == "server"]
    assert "default-src 'none'; script-src 'sha256-" in page
    assert "; connect-src 'self'\"" in page
    assert 'id="curve-' not in page
    assert json.loads(site.ask(f"/{TOKEN}/state")[2])["version"] == 1
    _, blocks = build_blocks(site.newest._store, "big")
    payload = json.loads(site.ask(f"/{TOKEN}/data")[2])
    assert payload == {"version": 1, "core": json.loads(blocks["core"]), "answer": json.loads(blocks["answer"])}
    curve = next(name for name in blocks if name.startswith("curve-"))
    for name in ("effects", curve):
        assert site.ask(f"/{TOKEN}/1/{name}")[2] == blocks[name]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/state",
        "/data",
        f"/{TOKEN}x/",
        f"/{TOKEN[:-1]}/",
        f"/x/{TOKEN}/",
        "//",
        f"/{TOKEN.upper()}/",
        "/x/state",
        "*",
    ],
)
def test_without_the_token_there_is_nothing(site: Site, path: str) -> None:
    status, headers, body = site.ask(path)
    assert (status, b"core" in body) == (404, False)
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/1/../../../../etc/passwd", "/1/..%2f..%2f..%2fetc%2fpasswd", "/1/%2e%2e/%2e%2e/setup", "/2/core",
        "/0/core", "/-1/core", "/1/nothing", "/1/", "/1/core/", "/static/x", "/1/__class__", "/1e0/core",
    ],
)  # fmt: skip
def test_below_the_token_there_are_only_blocks(site: Site, path: str) -> None:
    status, _, body = site.ask(f"/{TOKEN}{path}")
    assert status in (307, 404)
    assert b"root:" not in body


@pytest.mark.parametrize("host", ["", "example.org", "example.org:{port}", "127.0.0.1", "localhost", "127.0.0.1:1", "[::1]:{port}",
                                  "127.0.0.1:{port}.example.org", "evil@127.0.0.1:{port}"])  # fmt: skip
def test_another_host_is_refused(site: Site, host: str) -> None:
    assert site.ask(f"/{TOKEN}/data", host=host.format(port=site.port))[0] == 400


def test_localhost_is_this_host(site: Site) -> None:
    assert site.ask(f"/{TOKEN}/state", host=f"localhost:{site.port}")[0] == 200


FOREIGN_ORIGIN = "http://example.org"
OWN = "http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"origin": OWN}),
        (200, {"referer": OWN + "/x"}),
        (200, {"sec_fetch_site": "same-origin"}),
        (200, {"sec_fetch_site": "none"}),
        (403, {"origin": FOREIGN_ORIGIN}),
        (403, {"origin": "null"}),
        (403, {"origin": "http://127.0.0.1:1"}),
        (403, {"origin": "https://127.0.0.1:{port}"}),
        (403, {"referer": FOREIGN_ORIGIN + "/x"}),
        (403, {"referer": OWN + ".example.org/x"}),
        (403, {"sec_fetch_site": "cross-site"}),
        (403, {"sec_fetch_site": "same-site"}),
        (403, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"}),
        (403, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}),
        (403, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "script"}),
        # an address that somebody opened, from a file say, which is how the browser is sent here
        (200, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}),
    ],
)
def test_guard_refuses_foreign_origins(site: Site, status: int, headers: dict[str, str]) -> None:
    request_headers = {name: text.format(port=site.port) for name, text in headers.items()}
    answer_status, body, _ = site.ask(f"/{TOKEN}/data", **request_headers)
    assert answer_status == status
    assert not any(name.startswith("access-control") for name in body)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT"])
def test_nothing_but_get(site: Site, method: str) -> None:
    for path in (f"/{TOKEN}/", f"/{TOKEN}/data"):
        status, headers, _ = site.ask(path, method)
        assert (status, headers.get("allow")) == (405, "GET")


def test_it_listens_on_the_loopback_alone(site: Site) -> None:
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        with socket.socket() as client:
            client.settimeout(5)
            assert client.connect_ex((address, site.port)) != 0


def test_the_database_refuses_to_be_changed(tmp_path: Path) -> None:
    open_store(tmp_path / "atma.db", create=True).close()
    store = open_store(tmp_path / "atma.db", read_only=True)
    with pytest.raises(WriteRefused, match="is read-only here"):
        store.record_revision("mine", grid_text="", grid_file="", cells=[])
    assert store.sweeps() == []
