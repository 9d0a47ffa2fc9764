"""A real browser, and what every visit to a page must leave behind: a silent console, and nothing asked of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.dashboard.page import write_dashboard
from atma_sweep.results.paper import open_published
from once import once


@pytest.fixture(scope="session")
def printed_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of printed-v2 into a folder of its own and return its path; tests must not change it."""

    def make(folder: Path) -> None:
        write_dashboard(open_published(), folder / "page.html", "printed-v2")

    return once(tmp_path_factory, "printed-page", make) / "page.html"


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a browser page; at the end, check that it logged nothing and requested nothing else."""
    contexts, messages, requests = [], [], []

    def go(address: str, *, width: int = 1280, height: int = 1700, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        # the table of cells, unless the address says otherwise
        page.goto(address if "#" in address else f"{address}#tab=cells")
        page.wait_for_selector("html[data-ready]")
        return page

    yield go
    for context in contexts:
        context.close()
    assert messages == []
    assert {url.split(":")[0] for url in requests} == {"file"}
    assert len(set(requests)) == 1
