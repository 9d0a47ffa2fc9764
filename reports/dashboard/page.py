"""One HTML file in which a reader who has nothing else explores a whole sweep, offline.

The page is our own HTML, CSS and JavaScript (templates/) filled with data. The core (cells, numbers, attempts) is read at
start; the effects, the plotting library and the curve of a cell are each inflated only when somebody looks at them, so a
page of megabytes starts in a fraction of a second. Blocks are zlib in base64: nothing in them can end a script element.

Curves are drawn by Plotly, from the wheel of that name, at report time. Measured on two busy CPU cores with Chromium:
Plotly adds 1.96 MB to the page and takes 2 to 3 s to load when the first curve is asked for; Bokeh adds 0.47 MB and takes
0.6 s. Plotly it is all the same: it draws under a policy that lets in only styles and scripts of known hashes, while Bokeh
writes style sheets of its own into the page and would need 'unsafe-inline'; and its SVG can be read and tested.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ...results.files import replacing
from ...results.store.store import Store
from ...results.text import html_escaped
from ..data import Lengths, gather, one_reading
from .core import core, effects_of
from .curves import curves_of

SCRIPTS = ("view.js", "grid.js", "cells.js", "curves.js", "dashboard.js")
EMPTY_STYLE = ""  # a style element without text, which the plotting library fills rule by rule

Block = tuple[str, str]


def write_dashboard(store: Store, path: Path, sweep: str | None = None, *, lengths: Lengths = None) -> int:
    """Writes the page and returns its size in bytes. Raises SweepUnknown, StoreError, ReportError, WriteRefused."""
    with replacing(path, "--dashboard") as stream:
        page = dashboard(store, sweep, lengths=lengths).encode()
        stream.write(page)
    return len(page)


def dashboard(store: Store, sweep: str | None = None, *, lengths: Lengths = None) -> str:
    """The page of a sweep (None: the one launched last); the same database gives the same text.

    Its tables have the context lengths that the launch asked for, and `lengths` besides; its lists of numbers have all.
    Raises SweepUnknown, ReportError.
    """
    with one_reading():
        data = gather(store, sweep, lengths=lengths)
        attempts = store.attempts_of([cell.cell_id for cell in data.cells])
        curves = curves_of(store, data, attempts)
        blocks = [
            ("core", packed(core(store, data, attempts, curves))),
            ("effects", packed(effects_of(store, data))),
            ("library", _deflated(_library().encode())),
            *((f"curve-{cell}", _deflated(curve.packed())) for cell, curve in curves.items()),
        ]
    return _page(f"{data.sweep}, revision {data.revision}", blocks)


# --- the page -------------------------------------------------------------------------------------------------------


def _page(title: str, blocks: Iterable[Block]) -> str:
    script = '"use strict";\n' + "\n".join(map(_template, SCRIPTS))
    style = _template("dashboard.css")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)} {_hash(_library())}",
            f"style-src {_hash(style)} {_hash(EMPTY_STYLE)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    data = "\n".join(f'<script type="application/octet-stream" id="{name}">{text}</script>' for name, text in blocks)
    return Template(_template("dashboard.html")).substitute(
        title=html_escaped(title), policy=policy, style=style, script=script, data=data
    )


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _library() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def packed(value: Any) -> str:
    """Plain data as JSON, compressed, in letters that mean nothing to HTML."""
    return _deflated(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode())


def unpacked(text: str) -> bytes:
    """What `packed` and the curve blocks hold, as the page reads them."""
    return zlib.decompress(base64.b64decode(text))
