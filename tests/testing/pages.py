"""The dashboard read back: its blocks, its policy and its tags."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

from atma_sweep.reports.dashboard.page import decode_block


class Page(HTMLParser):
    """Script blocks and style sheets by id or place, the policy, and the tags in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.blocks: dict[str, str] = {}
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.tags: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self._open = (tag, attributes.get("id"))
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"] or ""

    def handle_data(self, data: str) -> None:
        tag, name = getattr(self, "_open", ("", None))
        if tag == "script" and name:
            self.blocks[name] = self.blocks.get(name, "") + data
        elif tag == "script":
            self.scripts.append(data)
        elif tag == "style":
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ("", None)

    def block(self, name: str) -> dict[str, Any]:
        """Return the decoded content of a block of JSON."""
        data: dict[str, Any] = json.loads(decode_block(self.blocks[name]))
        return data

    def core(self) -> dict[str, Any]:
        """Cells, numbers and attempts."""
        return self.block("core")
