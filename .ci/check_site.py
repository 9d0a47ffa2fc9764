"""Fails when a page of the built documentation requests anything from another host, or a file that is not there.

check_site.py FOLDER: the built site. Looks at scripts, styles, images, fonts and frames of every page, and at url() and @import
of every style sheet.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

REQUESTED = {
    "script": ("src",), "link": ("href",), "img": ("src", "srcset"), "source": ("src", "srcset"), "video": ("src", "poster"),
    "audio": ("src",), "iframe": ("src",), "object": ("data",), "embed": ("src",), "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}  # fmt: skip
"""Attributes, by tag, whose address a browser requests by itself."""
IN_STYLES = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s;]+)""")
NOT_REQUESTED = {"next", "prev", "search", "index", "canonical", "author"}
"""Relations of a <link> that name a page and load nothing."""


class Requests(HTMLParser):
    """Addresses that a page requests."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self._is_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses of a tag."""
        attributes = dict(attrs)
        self._is_style = tag == "style"
        self.addresses += IN_STYLES.findall(attributes.get("style") or "")
        if set((attributes.get("rel") or "").split()) & NOT_REQUESTED:
            return
        for name in REQUESTED.get(tag, ()):
            value = attributes.get(name) or ""
            parts = value.split(",") if name == "srcset" else [value]
            self.addresses += [part.split()[0] for part in parts if part.strip()]

    def handle_endtag(self, tag: str) -> None:
        self._is_style = False

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.addresses += IN_STYLES.findall(data)


def problems(site: Path) -> Iterator[str]:
    """Yield one line per request of another host or of a missing file."""
    for file in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        text = file.read_text(encoding="utf-8")
        for address in Requests(text).addresses if file.suffix == ".html" else IN_STYLES.findall(text):
            parts = urlsplit(address)
            if parts.scheme == "data" or address.startswith("#"):
                continue
            if parts.scheme or parts.netloc:
                yield f"{file.relative_to(site)}: requests another host: {address}"
            elif not (file.parent / unquote(parts.path)).resolve().exists():
                yield f"{file.relative_to(site)}: requests a file that is not there: {address}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    n_pages = len(list(folder.rglob("*.html")))
    lines = list(problems(folder))
    print("\n".join(lines) or f"{n_pages} pages request nothing from another host")
    sys.exit(1 if lines or not n_pages else 0)
