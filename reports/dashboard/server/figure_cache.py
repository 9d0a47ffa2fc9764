"""Cache of the figures of a page: each is drawn when a page asks for it, one at a time, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from ...figures import FIGURES


class FigureCache:
    """Blocks of figures by name, of the newest version of a page that was asked for; safe in several threads."""

    def __init__(self, draw: Callable[[str], bytes]) -> None:
        """Create an empty cache; nothing is drawn.

        Args:
            draw: Function of a figure's name that returns its block; it never runs in two threads at once.
        """
        self._draw = draw
        self._drawing = threading.Lock()
        self._lock = threading.Lock()
        self._version = 0
        self._blocks: dict[str, Future[bytes]] = {}

    async def block(self, version: int, name: str) -> bytes | None:
        """Return the block of a figure, drawn at most once per version, while the event loop goes on.

        A figure of an older version is forgotten, and not drawn if it has not begun.

        Args:
            version: Version of the page that asks.
            name: Name of the figure, as on the command line.

        Returns:
            The block; None if no figure has this name, or if a newer version was asked for meanwhile.
        """
        if name not in FIGURES:
            return None
        with self._lock:
            if version > self._version:
                for waiting in self._blocks.values():
                    waiting.cancel()
                self._version, self._blocks = version, {}
            if name not in self._blocks:
                self._blocks[name] = Future()
                # a daemon: the end of the server waits for no figure
                threading.Thread(target=self._run, args=(self._blocks[name], name), daemon=True).start()
            future = self._blocks[name]
        while not future.done():
            await asyncio.sleep(POLL_S)
        return None if future.cancelled() else future.result()

    def _run(self, future: Future[bytes], name: str) -> None:
        """Draw a figure in the calling thread once it is its turn; exceptions go to the future."""
        with self._drawing:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._draw(name))
            except Exception as error:  # noqa: BLE001 (raised again where the figure is awaited)
                future.set_exception(error)


POLL_S = 0.05
