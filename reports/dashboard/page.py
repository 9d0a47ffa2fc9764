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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ... import __version__
from ...results.files import replacing
from ...results.store.records import Attempt, Provenance
from ...results.store.store import Store
from ...results.text import html_escaped
from ..columns import complete_columns
from ..data import Lengths, SweepData, gather, one_reading
from ..stats.audit import homogeneity
from ..table import Entry, Table
from ..tables.complete import table6
from ..tables.effects import effects_table
from ..tables.failures import failures
from ..tables.provenance import provenance

CURVE_POINTS = 240_000
"""Points of all training curves together; with more, each is thinned and the page says so."""
SCRIPTS = ("view.js", "grid.js", "cells.js", "curves.js", "dashboard.js")
COLUMNS = ("tokens", "wall_s", "train_loss", "val_loss")
FEWEST = 100  # points that a curve keeps however many cells there are
EMPTY_STYLE = ""  # a style element without text, which the plotting library fills rule by rule

Block = tuple[str, str]


@dataclass(frozen=True)
class Series:
    """One loss over training: `tokens` (float64), `wall_s` and `loss` (float32; NaN where it was not finite)."""

    tokens: np.ndarray
    wall_s: np.ndarray
    loss: np.ndarray

    def thinned(self, most: int) -> Series:
        """Every k-th point counted from the last, at most `most`."""
        every = max(1, -(-len(self.tokens) // most))
        kept = slice((len(self.tokens) - 1) % every, None, every)
        # copies: a view would keep the whole curve in memory
        return Series(self.tokens[kept].copy(), self.wall_s[kept].copy(), self.loss[kept].copy())

    def packed(self) -> bytes:
        """Differences of `tokens`, then `wall_s`, then `loss`, little-endian, each with its bytes grouped by place."""
        columns = (np.diff(self.tokens, prepend=0.0).astype("<f8"), self.wall_s, self.loss)
        return b"".join(_bytes_by_place(column) for column in columns)


@dataclass(frozen=True)
class Curve:
    """The training curve of an attempt, thinned; `points` counts what the database has, `all` what either series has of it."""

    attempt: int
    points: int
    all: tuple[int, int]
    train: Series
    val: Series


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
            *((f"curve-{cell}", _curve_block(curve)) for cell, curve in curves.items()),
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


# --- the core -------------------------------------------------------------------------------------------------------


def core(store: Store, data: SweepData, attempts: Sequence[Attempt], curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Everything but effects and curves. Cells stand by their place in `cells`, attempts by id, metrics by `keys`."""
    launched = store.revision(data.sweep, data.revision)
    table = table6(store, data.sweep, lengths=data.also)
    several = "Seeds" in table.columns
    keys = sorted({key[1:] for key in data.values})
    units = {key[1:]: value.unit for key, value in data.values.items() if value.unit}
    origins = provenance(store, data.sweep)
    groups = {attempt: r for r, row in enumerate(origins.entries) for _, attempt in row[0].origins}
    known = store.provenances([attempt.id for attempt in attempts])
    audit = homogeneity(store, data.sweep)
    return {
        "sweep": data.sweep,
        "revision": data.revision,
        "version": __version__,
        "launched": _moment(launched.created_at),
        "commit": launched.git_commit,
        "dirty": launched.git_dirty,
        "grid": launched.grid_text,
        "done": data.done,
        "audit": audit,
        "notes": list(table.notes),
        "columns": _columns(data),
        "tables": {"mean": _rows(data, table)} | ({"each": _rows(data, table6(store, data.sweep, seeds=True, lengths=data.also))} if several else {}),
        "keys": [_key(data, key, units.get(key, "")) for key in keys],
        "cells": _cells(data, keys, curves),
        "attempts": {attempt.id: _attempt(attempt, known.get(attempt.id), groups.get(attempt.id)) for attempt in attempts},
        "origins": {"columns": origins.columns[: origins.text_columns], "rows": [r[: origins.text_columns] for r in origins.rows]},
        "failures": _failures(failures(store, data.sweep)),
    }  # fmt: skip


def _moment(moment: datetime | None) -> str | None:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment is not None else None


def _columns(data: SweepData) -> list[dict[str, Any]]:
    """The numbers of the complete results, as their headings."""
    return [
        {
            "heading": column.heading,
            "probe": column.probe,
            "metric": column.metric,
            "length": column.length,
            "percent": column.percent,
            "better": column.direction,
        }
        for column in complete_columns(data)
    ]


def _key(data: SweepData, key: tuple[str, str, int], unit: str) -> dict[str, Any]:
    probe, metric, length = key
    told = data.metric(probe, metric).definition
    return {"probe": probe, "metric": metric, "length": length, "unit": unit, "definition": told}


def _rows(data: SweepData, table: Table) -> dict[str, Any]:
    place = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    words = table.text_columns
    return {
        "words": table.columns[:words],
        "rows": [
            {"words": row[:words], "cells": [place[cell] for cell in entries[0].cells], "numbers": [_number(e) for e in entries]}
            for row, entries in zip(table.rows, table.entries, strict=True)
        ],
    }  # fmt: skip


def _number(one: Entry) -> list[Any]:
    """[printed, value, sd, seeds, best, attempt of every cell]."""
    return [one.text, one.value, one.sd, one.seeds, one.best, [attempt for _, attempt in one.origins]]


def _cells(data: SweepData, keys: Sequence[tuple[str, str, int]], curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    place = {key: index for index, key in enumerate(keys)}
    values: dict[str, list[list[Any]]] = {}
    for v in data.values.values():
        row = [place[(v.probe, v.metric, v.length)], v.value, v.n, v.low, v.high, v.attempt_id, v.reason]
        values.setdefault(v.cell_id, []).append(row)
    found = []
    for cell in data.cells:
        curve = curves.get(cell.cell_id)
        found.append(
            {
                "id": cell.cell_id,
                "slug": cell.slug,
                "seed": cell.seed,
                "state": data.word(cell),
                "cause": cell.cause,
                "axes": {**cell.levels, **cell.axes},
                "values": sorted(values.get(cell.cell_id, []), key=lambda row: row[0]),
                "curve": _curve_facts(curve) if curve else None,
            }
        )
    return found


def _attempt(attempt: Attempt, known: Provenance | None, group: int | None) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "kind": attempt.kind,
        "state": attempt.state,
        "host": attempt.host,
        "started": _moment(attempt.started_at),
        "finished": _moment(attempt.finished_at),
        "commit": known.git_commit if known else None,
        "dirty": known.git_dirty if known else None,
        "gpu": (known.gpu_name or known.device or None) if known else None,
        "deviation": attempt.deviation,
        "origin": group,
    }


def _failures(table: Table) -> dict[str, Any]:
    tracebacks = [row["traceback"] for row in table.raw]
    return {"columns": table.columns, "rows": table.rows, "tracebacks": tracebacks, "notes": table.notes[1:]}


def effects_of(store: Store, data: SweepData) -> dict[str, Any]:
    """The table of effects: words, numbers as [printed, value], and the cells of the pairs by their place in the sweep."""
    table = effects_table(store, data.sweep, lengths=data.also)
    place = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    words = table.text_columns
    rows = [
        {
            "words": row[:words],
            "numbers": [[one.text, one.value] for one in entries],
            "cells": [place[cell] for cell, _ in entries[0].origins],
            "about": [entries[1].probe, entries[1].metric, entries[1].length],
        }
        for row, entries in zip(table.rows, table.entries, strict=True)
    ]
    return {"words": table.columns[:words], "numbers": table.columns[words:], "rows": rows, "notes": table.notes[1:]}


# --- curves ---------------------------------------------------------------------------------------------------------


def curves_of(store: Store, data: SweepData, attempts: Sequence[Attempt]) -> dict[str, Curve]:
    """By cell: the curve of its newest finished training, else of its newest training, for cells that have one.

    Each is thinned as soon as it is read, so that all of them together take no more room than the page.
    """
    newest = {attempt.cell_id: attempt.id for attempt in attempts if attempt.kind == "train"}
    wanted = {cell.trained_attempt_id or newest.get(cell.cell_id): cell.cell_id for cell in data.cells}
    wanted.pop(None, None)
    most = max(FEWEST, CURVE_POINTS // max(1, len(wanted)))
    with store.snapshot() as seen:
        read = seen.curve_arrays([attempt for attempt in wanted if attempt is not None], COLUMNS)
        return {wanted[attempt]: _curve(attempt, rows, most) for attempt, rows in read}


def _curve(attempt: int, rows: np.ndarray, most: int) -> Curve:
    """`rows`: COLUMNS; NaN for what the database has as NULL."""
    validated = np.isfinite(rows[:, 3])
    # a point with neither loss is a step whose loss was not finite: the line breaks there
    trained = np.isfinite(rows[:, 2]) | ~validated
    train, val = _series(rows[trained][:, (0, 1, 2)]), _series(rows[validated][:, (0, 1, 3)])
    counts = (len(train.tokens), len(val.tokens))
    return Curve(attempt, len(rows), counts, train.thinned(most), val.thinned(most))


def _series(rows: np.ndarray) -> Series:
    return Series(rows[:, 0].copy(), rows[:, 1].astype("<f4"), rows[:, 2].astype("<f4"))


def _bytes_by_place(column: np.ndarray) -> bytes:
    """All first bytes, then all second ones, and so on: neighbours resemble each other, so this compresses far better."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.dtype.itemsize).T.tobytes()


def _curve_facts(curve: Curve) -> dict[str, Any]:
    """`kept`: the points of the training and of the validation series that the block holds; `points`: of the database."""
    kept = [len(series.tokens) for series in (curve.train, curve.val)]
    return {"attempt": curve.attempt, "points": curve.points, "kept": kept, "all": list(curve.all)}


def _curve_block(curve: Curve) -> str:
    return _deflated(b"".join(series.packed() for series in (curve.train, curve.val)))
