"""Page builder: one HTML file in which a reader explores a sweep offline.

The page is our own HTML, CSS and JavaScript (templates/) filled with data. The core (cells, numbers, attempts) and the
answer (main results of the first page) are read at start. The effects and the curve of a cell are inflated only when
they are opened, so that a page of megabytes starts in a fraction of a second. Blocks are zlib
in base64: nothing in them can end a script element.

Charts are drawn by uPlot 1.6.31 (50 KB), read at report time from the wheel `youplot`, which has it unchanged and
nothing that it requires. Plotly added 1.96 MB to every page and took 2 to 3 s to load; the packages with Observable
Plot have it only inside bundles of their own of 0.3 to 1.4 MB. uPlot works under a policy that allows only styles and
scripts of known hashes.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ...results.console.output_files import atomic_file
from ...results.console.text import html_escaped
from ...results.store.store import Store
from ..stats.effects.effects import effects
from ..sweep_data import ExtraLengths, attempts_of_sweep, cached_reads, load_sweep_data
from .comparison import comparison_block, comparison_summary
from .core_block import core_block
from .curves import load_curves, losses_block
from .effects import effects_block
from .gallery import BLOCK_PREFIX, GalleryPicture
from .main_results import answer_block
from .overview import css_variables, overview_block

SCRIPTS = (
    "view.js", "chart.js", "grid.js", "cells.js", "curves.js", "overview.js", "parallel.js", "effects.js",
    "beside.js", "origins.js", "dashboard.js",
)  # fmt: skip
DATA_MARK = "\0data\0"  # stands in the page where its blocks go; no text of a page has this character


def write_dashboard(
    store: Store,
    path: Path,
    sweep: str | None = None,
    *,
    lengths: ExtraLengths = None,
    compare: str | None = None,
    pictures: Sequence[GalleryPicture] = (),
) -> int:
    """Write the page to a file and return its size in bytes.

    The file appears when it is complete; an existing one is replaced and keeps its permissions. Pipes, devices and `-`
    are written to directly. Nothing is written if the page cannot be built.

    Args:
        store: The database.
        path: File to write.
        sweep: Name of the sweep; None: the one launched last.
        lengths: Context lengths to show in addition to those of the launch.
        compare: Name of a reference sweep to compare with; None: no comparison.
        pictures: Figures of the sweep for the gallery.

    Raises:
        SweepUnknown, StoreError, ReportError, WriteRefused: The page cannot be built or written.
    """
    with atomic_file(path, "--dashboard") as stream:
        title, blocks = build_blocks(store, sweep, lengths=lengths, compare=compare, pictures=pictures)
        return sum(stream.write(part) for part in page_parts(title, blocks.items()))


def dashboard(
    store: Store, sweep: str | None = None, *, lengths: ExtraLengths = None, compare: str | None = None
) -> str:
    """Return the HTML of the page of a sweep; the same database gives the same text.

    Its tables have the context lengths of the launch and `lengths`; its lists of numbers have all lengths.

    Args:
        store: The database.
        sweep: Name of the sweep; None: the one launched last.
        lengths: Context lengths to show in addition to those of the launch.
        compare: Name of a reference sweep, of the database or built in; None: no comparison.

    Raises:
        SweepUnknown, ReportError: The sweep cannot be shown or compared.
    """
    title, blocks = build_blocks(store, sweep, lengths=lengths, compare=compare)
    return b"".join(page_parts(title, blocks.items())).decode()


def build_blocks(
    store: Store,
    sweep: str | None = None,
    *,
    lengths: ExtraLengths = None,
    compare: str | None = None,
    pictures: Sequence[GalleryPicture] = (),
    figures: Mapping[str, str] | None = None,
) -> tuple[str, dict[str, bytes]]:
    """Return the title of a page and the content of its blocks by id: JSON in UTF-8, and packed curves.

    Ids: `core` has cells, numbers and attempts, `answer` the main results; `effects`, `losses`, `beside` (the
    comparison, with `compare` alone), `figure-<name>` (`GalleryPicture.block`) for every picture, and `curve-<cell id>` for every cell with a
    curve. An open page takes newer
    `core` and `answer` by `refresh({core, answer})` of templates/dashboard.js.

    Args:
        store: The database.
        sweep: Name of the sweep; None: the one launched last.
        lengths: Context lengths to show in addition to those of the launch.
        compare: Name of a reference sweep, of the database or built in; None: no comparison.
        pictures: Figures of the sweep for the gallery.
        figures: Titles by name of figures without a block, which a server draws on request; None: those of `pictures`.

    Raises:
        SweepUnknown, ReportError: The sweep cannot be shown or compared.
    """
    titles = figures if figures is not None else {picture.name: picture.title for picture in pictures}
    with cached_reads(), _without_cycle_collection():
        data = load_sweep_data(store, sweep, lengths=lengths)
        # each block becomes bytes before the next is made: the objects of a large sweep take most of the memory
        comparison = comparison_block(store, data, compare) if compare is not None else None
        computed_effects = effects(data)
        answer = answer_block(store, data, computed_effects)
        answer |= {"beside": comparison_summary(comparison)} if comparison is not None else {}
        answer |= {"overview": overview_block(data, answer, titles)}
        blocks = {"core": b"", "answer": as_json(answer), "effects": as_json(effects_block(data, computed_effects))}
        del computed_effects, answer
        _return_freed_memory()
        attempts = attempts_of_sweep(store, data)
        curves = load_curves(store, data, attempts)
        blocks["core"] = as_json(core_block(store, data, attempts, curves))
        blocks["losses"] = as_json(losses_block(data, curves))
        if comparison is not None:
            blocks["beside"] = as_json(comparison)
        blocks |= {f"{BLOCK_PREFIX}{picture.name}": picture.block() for picture in pictures}
        blocks |= {f"curve-{cell}": curve.to_bytes() for cell, curve in curves.items()}
    return f"{data.sweep}, revision {data.revision}", blocks


def _return_freed_memory() -> None:
    """Return freed memory to the operating system; does nothing without the GNU C library.

    The arrays of the effects of a large sweep leave gaps of a hundred megabytes, which later blocks would add to.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Pause the collector of reference cycles: walking through millions of numbers takes a fifth of a build."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- the page -------------------------------------------------------------------------------------------------------


def page_parts(
    title: str, blocks: Iterable[tuple[str, bytes]], *, more_script: str = "", connect_sources: str = ""
) -> Iterator[bytes]:
    """Yield the HTML of a page with these blocks, compressed, in parts of UTF-8: a block at a time.

    Its content security policy allows the page's own scripts and styles alone.

    Args:
        title: Title of the page; escaped here.
        blocks: (id, content) of every block. Ids are not escaped.
        more_script: JavaScript appended to the page's own script.
        connect_sources: Sources that the content security policy lets the page fetch from; empty: none.
    """
    script = "\n".join([library_source("uplot.iife.min.js"), *map(_template, SCRIPTS), more_script])
    style = library_source("uplot.min.css") + css_variables() + _template("dashboard.css")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_script_hash(script)}",
            f"style-src {_script_hash(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            *([f"connect-src {connect_sources}"] if connect_sources else []),
        ]
    )
    html = Template(_template("dashboard.html")).substitute(
        title=html_escaped(title), policy=policy, style=style, script=script, data=DATA_MARK
    )
    before, _, after = html.partition(DATA_MARK)
    yield before.encode()
    for index, (name, block) in enumerate(blocks):
        start = "\n" if index else ""
        yield f'{start}<script type="application/octet-stream" id="{name}">{_encoded_block(block)}</script>'.encode()
    yield after.encode()


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def library_source(name: str) -> str:
    """Return a file of uPlot, from the installed package."""
    return resources.files("youplot").joinpath("vendor", name).read_text(encoding="utf-8")


def _script_hash(text: str) -> str:
    """Return the source expression of the content security policy for this text: its SHA-256 in base64."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _encoded_block(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()


def as_json(value: Any) -> bytes:
    """Return the value as compact JSON in UTF-8; a dict key by key, so that the text of one key alone is in memory.

    Raises:
        ValueError: A number is not finite.
    """
    if isinstance(value, dict):
        return (
            b"{" + b",".join(b"%s:%s" % (_json_text(str(key)), _json_text(item)) for key, item in value.items()) + b"}"
        )
    return _json_text(value)


def _json_text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode_block(text: str) -> bytes:
    """Return the content of a block from its text in the page (base64 of zlib), as the page's script reads it."""
    return zlib.decompress(base64.b64decode(text))
