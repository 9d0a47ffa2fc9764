"""Figures that the server draws on request: once per version, one at a time, and while the event loop goes on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from atma_sweep.reports.dashboard.gallery import block_on_request, figure_titles
from atma_sweep.reports.dashboard.server.figure_cache import FigureCache
from atma_sweep.results.paper import open_published


class Drawings:
    """A function that notes what it draws, and how many drawings were made at once."""

    def __init__(self) -> None:
        """Create it; nothing is drawn."""
        self.names: list[str] = []
        self.active = self.most_active = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> bytes:
        with self._lock:
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        time.sleep(0.05)
        self.names.append(name)
        with self._lock:
            self.active -= 1
        if name == "loss":
            raise ValueError("cannot be drawn")
        return name.encode()


def test_figures_are_drawn_once_per_version_in_turn() -> None:
    drawings = Drawings()
    cache = FigureCache(drawings)

    async def ask() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        blocks = await asyncio.gather(
            *(cache.block(1, name) for name in ("needle", "length", "needle", "no-such-figure"))
        )
        ticking.cancel()
        return blocks, ticks

    blocks, ticks = asyncio.run(ask())
    assert blocks == [b"needle", b"length", b"needle", None]
    assert sorted(drawings.names) == ["length", "needle"]
    assert drawings.most_active == 1
    assert ticks >= 2, "the event loop goes on"
    assert asyncio.run(cache.block(1, "needle")) == b"needle"
    assert len(drawings.names) == 2
    assert asyncio.run(cache.block(2, "needle")) == b"needle"
    assert len(drawings.names) == 3


def test_error_of_a_drawing_reaches_its_request() -> None:
    cache = FigureCache(Drawings())
    with pytest.raises(ValueError, match="cannot be drawn"):
        asyncio.run(cache.block(1, "loss"))


@pytest.mark.thorough
def test_gallery_lists_figures_and_reasons() -> None:
    store = open_published()
    titles = figure_titles(store, "printed-v2")
    assert {"needle", "loss"} <= set(titles)
    assert not {"history", "importance"} & set(titles), "no study"
    drawn = json.loads(block_on_request(store, "printed-v2", "needle"))
    assert drawn["svg"].startswith("<?xml")
    assert drawn["title"].startswith("Needle accuracy over context length")
    missing = json.loads(block_on_request(store, "printed-v2", "timeline"))
    assert set(missing) == {"why"}
    assert missing["why"]
