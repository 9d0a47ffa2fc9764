"""The served page in a real browser: numbers come while it is open, and the reader stays where he is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement
from atma_sweep.results.store.store import Store, open_store
from patience import until
from serving import Site, serving
from synthetic import OWNER, synthetic_sweep

LATE = "f00000000001"
COUNT = 24


@pytest.fixture
def store(blank: Path, tmp_path: Path) -> Store:
    """24 finished cells and one that was never started."""
    store = open_store(shutil.copy(blank, tmp_path / "atma.db"))
    cells = synthetic_sweep(store, COUNT, 20)
    levels = dict(zip(AXES, ("rope", "baseline", "off", "off", "off"), strict=True))
    axes = levels | {"train.lr": "0", "seed": "0"}
    late = CellRecord(id=LATE, slug="comes-late", seed=0, levels=levels, config={}, axes=axes, tokens=1)
    store.record_revision("big", grid_text="axes: {a: 1}\n", grid_file="big.yaml", cells=[*cells, late])
    return store


@pytest.fixture
def site(store: Store) -> Iterator[Site]:
    assert store.path is not None
    with serving(open_store(store.path, read_only=True), "big") as served:
        yield served


class Visit:
    """A page in a context of its own, with what it said on the console and every address that it asked for."""

    def __init__(self, browser: Any, address: str, *, width: int = 1280, height: int = 700) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height})
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url.partition("#")[0]))
        self.page.goto(address)
        self.page.wait_for_selector("#live-note")

    def version(self, number: int) -> None:
        """Wait until the page shows this version."""
        self.page.wait_for_selector(f"html[data-version='{number}']")

    def count(self, path: str) -> int:
        return sum(url.endswith(path) for url in self.requests)


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    visits: list[Visit] = []

    def go(address: str, **options: Any) -> Visit:
        visits.append(Visit(browser, address, **options))
        return visits[-1]

    yield go
    for visitor in visits:
        visitor.context.close()


def finish(store: Store, loss: float) -> None:
    """Let the late cell run and finish with this loss."""
    attempt = store.start_attempt(LATE, owner=OWNER, fence=1)
    loss_row = Measurement(probe="val", metric="val_loss", value=loss, unit="nats/token", n=777)
    DatabaseRecorder(store, attempt.id, 1).measurements([loss_row])
    store.finish_attempt(attempt.id, 1, "done")


ENDS = "(({min, max}) => [min, max])(charts.get('chart-training').plot.scales.x)"
SEEN = """() => [scrollY, document.querySelector("#panel-cells .viewport").scrollTop, location.hash,
  document.activeElement.textContent, document.querySelector("#filters").open]"""


@pytest.mark.thorough
def test_live_page_adds_finished_cell_and_keeps_position(visit: Callable[..., Visit], site: Site, store: Store) -> None:
    seen = visit(f"{site.address}#tab=cells")
    page = seen.page
    assert page.get_by_role("button", name="1.234", exact=True).count() == 0
    page.evaluate("window.stands = 7")
    page.locator("[data-group=State] .level[data-level=done] input").check()
    assert page.locator("#matches").text_content() == f"{COUNT} of {COUNT + 1} cells match"
    page.evaluate("document.querySelector('#panel-cells .viewport').scrollTop = 170")
    page.locator("#panel-cells tbody th button").nth(9).focus()
    page.evaluate("scrollTo(0, 40)")
    page.wait_for_timeout(100)
    before = page.evaluate(SEEN)
    assert before[1] == 170
    finish(store, 1.234)
    seen.version(2)
    assert page.locator("#matches").text_content() == f"{COUNT + 1} of {COUNT + 1} cells match"
    assert page.evaluate(SEEN) == before
    page.evaluate("document.querySelector('#panel-cells .viewport').scrollTop = 1e6")
    page.get_by_role("button", name="1.234", exact=True).wait_for()
    assert page.evaluate("window.stands") == 7, "the page was loaded anew"
    assert f"{COUNT + 1} done" in page.locator("#summary").text_content()
    assert page.locator("#live-note").text_content().startswith("Live; the numbers are those of ")
    assert page.locator("#footer").text_content().startswith("Served by atma-sweep ")
    assert (seen.messages, seen.count("/data")) == ([], 1)
    assert {url.split("/")[2] for url in seen.requests} == {f"127.0.0.1:{site.port}"}


@pytest.mark.thorough
def test_what_is_open_and_enlarged_stays_so(visit: Callable[..., Visit], site: Site, store: Store) -> None:
    cell = store.cell_states("big")[0].cell_id
    seen = visit(f"{site.address}#tab=curves&pick={cell}")
    page = seen.page
    page.wait_for_selector("#chart-training[data-traces]")
    page.locator("#lengths ~ details summary").click()
    page.locator("#chart-training .u-over").scroll_into_view_if_needed()
    box = page.locator("#chart-training .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.32 * box["height"], steps=5)
    page.mouse.up()
    enlarged = page.evaluate(ENDS)
    page.get_by_role("tab", name="Results").click()
    page.locator("#panel-answer summary").first.click()
    finish(store, 1.234)
    seen.version(2)
    assert page.locator("#panel-answer details").first.get_attribute("open") is not None
    page.get_by_role("tab", name="Curves").click()
    page.wait_for_function("() => document.querySelector('#curves-hint').textContent.startsWith('Curves of 1')")
    store.add_event("told", "something happened", sweep="big")
    seen.version(3)
    page.wait_for_function("() => document.querySelector('#curves-hint').textContent.startsWith('Curves of 1')")
    assert page.evaluate(ENDS) == enlarged
    assert 0.4 < (enlarged[1] - enlarged[0]) / (20 * 524_288) < 0.6
    assert page.locator("#lengths ~ details").get_attribute("open") is not None
    assert seen.messages == []
    assert seen.count(f"/3/curve-{cell}") == 0, "a curve that did not change is not asked for again"


@pytest.mark.thorough
def test_live_page_replaces_expired_version(visit: Callable[..., Visit], site: Site, store: Store) -> None:
    """Replay a wake-up after sleep: the page is at version 1, the server at 4."""
    seen = visit(f"{site.address}#tab=cells")
    page = seen.page
    hide(page, True)
    page.wait_for_timeout(3000)  # what was on its way
    for version in (2, 3, 4):
        finish(store, 1.0 + version / 10) if version == 2 else store.add_event("told", str(version), sweep="big")

        def is_rebuilt(version: int = version) -> bool:
            return site.newest.poll()["version"] == version

        until(is_rebuilt)
    page.evaluate("live.first = 0")
    page.get_by_role("tab", name="Effects").click()
    seen.version(4)
    page.locator("#panel-effects tbody th").first.wait_for()
    assert page.locator("#trouble").is_hidden()
    assert seen.count("/4/effects") == 1


def hide(page: Any, hidden: bool) -> None:
    """Hide or show the page, as another tab or a closed lid would."""
    page.evaluate(
        """(hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


@pytest.mark.thorough
def test_live_page_polls_only_while_visible(visit: Callable[..., Visit], site: Site, store: Store) -> None:
    seen = visit(site.address)
    page = seen.page
    hide(page, True)
    page.wait_for_timeout(3000)  # what was on its way
    n_requests = seen.count("/state")
    page.wait_for_timeout(6000)
    assert seen.count("/state") == n_requests
    finish(store, 1.234)
    until(lambda: site.newest.poll()["version"] == 2)
    hide(page, False)
    seen.version(2)


@pytest.mark.thorough
def test_where_nothing_happens_it_asks_ever_less(visit: Callable[..., Visit], site: Site) -> None:
    page = visit(site.address).page
    waits = [page.evaluate("live.wait")]
    for _ in range(3):
        before = waits[-1]
        page.wait_for_function("(before) => live.wait !== before", arg=before)
        waits.append(page.evaluate("live.wait"))
    assert waits == sorted(waits)
    assert page.evaluate("[ASK_MS, MOST_MS]") == [2000, 15000]


@pytest.mark.thorough
def test_live_page_reports_end_of_server_and_keeps_data(visit: Callable[..., Visit], store: Store) -> None:
    assert store.path is not None
    with serving(open_store(store.path, read_only=True), "big") as site:
        seen = visit(site.address)
    page = seen.page
    page.wait_for_function("() => document.querySelector('#live-note').textContent.startsWith('No longer live')")
    assert "the server has stopped" in page.locator("#live-note").text_content()
    page.get_by_role("tab", name="Effects").click()
    page.locator("#panel-effects tbody th").first.wait_for()
    assert page.locator("#trouble").is_hidden()
    assert all("ERR_CONNECTION_REFUSED" in text or "ERR_CONNECTION_RESET" in text for text in seen.messages)


@pytest.mark.thorough
def test_another_page_can_neither_read_nor_frame_it(browser: Any, site: Site, tmp_path: Path) -> None:
    """Check a page of another origin that has learnt the complete address."""
    context = browser.new_context()
    page = context.new_page()
    html = f'<iframe id="f" src="{site.address}"></iframe><script src="{site.address}data"></script>'
    context.route("http://elsewhere.test/*", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.goto("http://elsewhere.test/")
    read = """async (url) => { try { return (await fetch(url)).status } catch (error) { return error.name } }"""
    assert page.evaluate(read, f"{site.address}data") == "TypeError"
    assert (
        page.evaluate(read.replace("fetch(url)", "fetch(url, { mode: 'no-cors' })"), f"{site.address}data")
        == "TypeError"
    )
    frame = page.frames[1]
    assert "Results" not in frame.content()
    context.close()
