"""Notification at the end of a launch, received by a web server; no address delays a launch."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.host.signals import Interrupted
from atma_sweep.sweep.orchestrator import notify
from atma_sweep.sweep.orchestrator.notify import EndNotifier, validated_url
from bench import Bench
from databases import finished
from factories import cell_record
from tiers import every_nth


class Listening:
    """Server that stores what is posted to it and answers with `status`."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.status, outer = 200, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.heard.append((self.path, json.loads(body), dict(self.headers)))
                self.send_response(outer.status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=geheim"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setenv("no_proxy", "*")
    server = Listening()
    thread = threading.Thread(target=server.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def ended(tmp_path: Path) -> Callable[..., list[str]]:
    """ended(url, error=None) ends a launch of three cells, one done and two failed, and returns its output."""
    store = open_store(tmp_path / "atma.db", create=True)
    cells = [cell_record(letter) for letter in "abc"]
    store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    for cell, cause in zip(
        cells, (None, "no room on postgresql://ada:geheim@db/x\nmore", "a\x1b[31m" + "b" * 999), strict=True
    ):
        finished(store, cell, "failed" if cause else "done", cause=cause)

    def end(url: str | None, error: BaseException | None = None, is_finished: bool = False) -> list[str]:
        printed: list[str] = []
        ending = EndNotifier(
            url, "s", count=lambda: {"done": 1, "failed": 2, "new": 0},
            states=lambda: list(store.states([c.id for c in cells]).values()), tell=printed.append,
        )  # fmt: skip
        with contextlib.nullcontext() if error is None else pytest.raises(type(error)), ending:
            ending.finished = is_finished
            if error is not None:
                raise error
        return printed

    return end


def test_notifier_posts_the_payload(web: Listening, ended: Callable[..., list[str]]) -> None:
    assert ended(web.url) == []
    ((path, payload, headers),) = web.heard
    assert (path, headers["Content-Type"]) == ("/hook?token=geheim", "application/json")
    assert 0 <= payload.pop("seconds") < 600
    version = payload.pop("atma_sweep")
    assert (headers["User-Agent"], version) == (f"atma-sweep/{version}", version)
    first, second = payload.pop("failed")
    assert first == {
        "cell": "b" * 12,
        "slug": "slug-b",
        "state": "failed",
        "cause": "no room on postgresql://ada:***@db/x",
    }
    assert (len(second["cause"]), "\x1b" in second["cause"]) == (300, False)
    counts = {"done": 1, "failed": 2}
    assert payload == {"sweep": "s", "state": "failed", "exit": 1, "counts": counts, "failed_in_all": 2, "error": None}


@pytest.mark.parametrize(
    ("error", "finished", "expected"),
    every_nth([
        (None, True, ("finished", 0, None)),
        (Interrupted(15), False, ("stopped", 143, "stopped; launch again to continue")),
        (KeyboardInterrupt(), False, ("stopped", 130, "KeyboardInterrupt")),
        (SweepError("no; password=geheim\nsecond"), False, ("stopped", 2, "no; password=***")),
        (ZeroDivisionError("x"), False, ("stopped", 1, "x")),
    ], 3),
)  # fmt: skip
def test_how_it_ended(
    web: Listening, ended: Callable[..., list[str]], error: BaseException | None, finished: bool, expected: object
) -> None:
    assert ended(web.url, error, finished) == []
    ((_, payload, _),) = web.heard
    assert (payload["state"], payload["exit"], payload["error"]) == expected
    assert "geheim" not in json.dumps(payload)


@pytest.mark.parametrize("status", every_nth([302, 404, 500], 3))
def test_error_responses_and_redirects_are_reported_once(
    web: Listening, ended: Callable[..., list[str]], status: int
) -> None:
    web.status = status
    assert ended(web.url) == [f"127.0.0.1 was not notified: HTTP status {status}"]
    assert len(web.heard) == 1


def test_silent_server_takes_no_longer_than_the_timeout(
    ended: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        printed = ended(f"http://127.0.0.1:{deaf.getsockname()[1]}/geheim")
    assert printed == ["127.0.0.1 was not notified: no answer within 0 s"]


def test_silent_database_takes_no_longer_than_the_timeout(web: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.3)
    printed: list[str] = []
    stuck = threading.Event()

    def states() -> list[Any]:
        stuck.wait(60)
        return []

    with pytest.raises(ZeroDivisionError), EndNotifier(web.url, "s", count=dict, states=states, tell=printed.append):
        raise ZeroDivisionError
    assert printed == ["127.0.0.1 was not notified: no answer within 0 s"]
    stuck.set()


def test_nothing_is_posted_without_a_url(ended: Callable[..., list[str]]) -> None:
    assert ended(None) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    time.sleep(0)  # the port is closed now
    assert ended(f"http://127.0.0.1:{port}/") == ["127.0.0.1 was not notified: Connection refused"]


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://x/y", "example.com/hook", "http://", "http:///x", "https://u:p@x/", "http://x:99999/", "http://x/a b", "http://x/\n", "gopher://x", "data:,x", "http://[::1", "http://é/"],
)  # fmt: skip
def test_addresses_that_are_refused_before_anything_starts(run, url: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SweepError):
        validated_url(url)
    code, out, err = run("launch", "quick", "--dry-run", "--notify", url)
    assert (code, out, len(err.splitlines()), "--notify" in err) == (2, "", 1, True)


@pytest.mark.parametrize(
    "url", ["http://x", "https://a.example.org/T0/B0?x=1", "http://127.0.0.1:80/", "http://[::1]:80/x"]
)
def test_valid_urls_are_accepted(url: str) -> None:
    assert validated_url(url) == url


@pytest.mark.slow
@pytest.mark.thorough
def test_launch_posts_its_end(web: Listening, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.launch("--only", "attn_type=nope", "--notify", web.url)
    bench.launch("--only", "attn_type=nope", "--notify", web.url)
    first, again = (payload for _, payload, _ in web.heard)
    assert first["seconds"] > 0
    expected = {"sweep": "micro", "state": "finished", "exit": 0, "counts": {"done": 1}, "failed": []}
    assert all(payload | expected == payload for payload in (first, again))
    assert bench.sql("SELECT count(*) FROM event WHERE message LIKE '%geheim%'") == [(0,)]
