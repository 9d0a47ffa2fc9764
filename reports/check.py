"""Verification of written tables and figures: comparison of a file with the current content of the database."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..results.errors import StoreError
from ..results.store.store import Store
from .render import RENDERERS, SUFFIXES, render, trace_path
from .render.csv_renderer import trace_file_text
from .render.trace import differences
from .sweep_data import ReportError
from .table import Table
from .tables import make_table

OTHER_SOURCE = "its numbers are the same, but not the code or the GPU that they are told to come from"
Grid = list[list[str]]


def _pictures() -> tuple[str, ...]:
    from .figures.files import FORMATS

    return FORMATS


def _format(path: Path) -> str:
    """Return the format of a file by its suffix.

    Raises:
        ReportError: Files with that suffix cannot be checked.
    """
    ending = path.suffix.lower()
    if ending.removeprefix(".") in _pictures():
        return ending.removeprefix(".")
    if ending not in SUFFIXES:
        known = ", ".join([*SUFFIXES, *(f".{format}" for format in _pictures())])
        raise ReportError(f"{path.name}: only files ending in {known} can be checked; write one with --out")
    return SUFFIXES[ending]


def trace_in(text: str, format: str, name: str) -> dict[str, Any]:
    """Return the trace in the text of a rendered table; for a CSV, `text` is the content of its trace file.

    Args:
        text: Content of the file.
        format: Format of the table, a key of RENDERERS.
        name: Name of the file, for messages.

    Raises:
        ReportError: There is no readable trace.
    """
    found: Any = None
    try:
        if format == "json" and json.loads(text) == []:
            raise ReportError(f"{name} has no row and so no trace; check another format of the table")
        found = RENDERERS[format].trace_of(text)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ReportError(f"{name}: its trace cannot be read ({error}); write the table again") from error
    if not isinstance(found, dict) or not {"table", "sweep", "revision", "options"} <= set(found):
        raise ReportError(f"{name} carries no trace of its table; write it again with atma-sweep report --out")
    return found


def _read(path: Path) -> tuple[str, str, dict[str, Any]]:
    """Return (text, format, trace) of a file; the text of a figure is empty.

    Raises:
        ReportError: The file cannot be read, or has no trace.
    """
    format = _format(path)
    try:
        if format not in SUFFIXES.values():
            return "", format, _figure_trace(path.read_bytes(), format, path.name)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {path}: {error}; name a file that atma-sweep report wrote") from error
    if format == "csv":
        return text, format, _trace_beside(path)
    return text, format, trace_in(text, format, path.name)


def _trace_beside(path: Path) -> dict[str, Any]:
    beside = trace_path(path)
    try:
        return trace_in(beside.read_text(encoding="utf-8"), "csv", beside.name)
    except FileNotFoundError as error:
        raise ReportError(
            f"{path.name} cannot be checked without its trace, the file {beside.name} beside it; write the table again "
            "with atma-sweep report --out, or put that file back"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {beside}: {error}; write the table again") from error


def _figure_trace(content: bytes, format: str, name: str) -> dict[str, Any]:
    """Return the trace embedded in a figure.

    Raises:
        ReportError: There is none, or it is incomplete.
    """
    from .figures.files import read_trace as figure_trace

    try:
        found = figure_trace(content, format)
    except ReportError as error:
        raise ReportError(
            f"{name} carries no trace of its figure; draw it again with atma-sweep report --out"
        ) from error
    if not {"figure", "sweep", "revision", "cells", "data"} <= set(found):
        raise ReportError(f"{name}: its trace cannot be read; draw the figure again")
    return found


def sweep_of(path: str | Path) -> str:
    """Return the name of the sweep of a written table or figure.

    Raises:
        ReportError: The file was not written by `report`.
    """
    return str(_read(Path(path))[2]["sweep"])


def checkable_files(folder: Path) -> list[Path]:
    """Return the tables and figures in a folder written by `report --all`, sorted by name.

    Files without a trace (index, document, dashboard, empty JSON) are left out. A CSV of which only the trace file exists is
    included.

    Raises:
        ReportError: The folder cannot be read, or has no such file.
    """
    from .report_folder import FILES_WITHOUT_TRACE

    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        names = [
            name for name in names if not name.lower().endswith(".json") or (folder / name).read_bytes() != b"[]\n"
        ]
    except OSError as error:
        raise ReportError(f"cannot read {folder}: {error.strerror}; name a folder that report --all wrote") from error
    ending = trace_path(Path("x")).name[1:]
    orphans = {name.removesuffix(ending) for name in names if name.endswith(f".csv{ending}")} - set(names)
    endings = {*SUFFIXES, *(f".{format}" for format in _pictures())}
    found = [name for name in names if Path(name).suffix.lower() in endings and not name.endswith(ending)]
    kept = [folder / name for name in sorted({*found, *orphans}) if name not in FILES_WITHOUT_TRACE]
    if not kept:
        raise ReportError(f"there is no table and no figure in {folder}; name a folder that report --all wrote")
    return kept


def check_file(path: str | Path, store: Store, *, known: dict[str, Any] | None = None) -> list[str]:
    """Return the differences between a written table or figure and the current content of the database; empty for none.

    The file is made again from its trace. For a table, every changed number is named, and a changed title, note or source of
    numbers. For a figure: changed numbers, cells with other attempts, and the first change of the picture. A figure drawn by
    another version of matplotlib, with a different picture, counts as a difference.

    Args:
        path: Table (Markdown, CSV, LaTeX, HTML, JSON) or figure (SVG, PDF, PNG).
        store: The database.
        tables_by_request: Cache of tables by request, filled here, for further files and an unchanged database.

    Returns:
        Lines that begin with the file's name.

    Raises:
        ReportError: The file was not written by `report`.
    """
    path = Path(path)
    text, format, trace = _read(path)
    if "figure" in trace:
        return [f"{path.name}: {line}" for line in _figure_differences(path.read_bytes(), format, trace, store)]
    known = {} if known is None else known
    asked = json.dumps([trace[name] for name in ("table", "sweep", "revision", "options")], sort_keys=True)
    try:
        if asked not in known:
            options = {"revision": trace["revision"], **trace["options"]}
            known[asked] = make_table(trace["table"], store, trace["sweep"], **options)
        table: Table = known[asked]
    except (StoreError, ReportError, TypeError) as error:
        return [f"{path.name}: its table cannot be made any more: {error}"]
    fresh = render(table, format)
    if fresh == text and (format != "csv" or json.loads(trace_file_text(table)) == trace):
        return []
    return [f"{path.name}: {line}" for line in _differences(text, fresh, format, trace, table)]


def _differences(text: str, fresh: str, format: str, trace: dict[str, Any], table: Table) -> list[str]:
    try:
        old, new = RENDERERS[format].rows(text), RENDERERS[format].rows(fresh)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return [f"its rows cannot be read ({error})"]
    if format == "json":
        old, new = [list(table.columns), *old], [list(table.columns), *new]
    found = _rows(old, new, table)
    if not found:
        found = differences(trace, table.trace)
    if not found:
        found = _lines(text, fresh)
    return found or [OTHER_SOURCE]


def _rows(old: Grid, new: Grid, table: Table) -> list[str]:
    found = []
    for index, (was, now) in enumerate(zip_longest(old, new)):
        label = " ".join(table.rows[index - 1][: table.text_columns]) if 0 < index <= len(table.rows) else "headings"
        if was is None:
            found.append(f"row {index} ({label}) is missing from the file")
        elif now is None:
            found.append(f"row {index} ({' '.join(was[: table.text_columns])}) is no longer in the database")
        else:
            found += [
                f"row {index} ({label}), {_column(table, column)}: the file says {left}, the database {right}"
                for column, (left, right) in enumerate(zip_longest(was, now, fillvalue="nothing"))
                if left != right
            ]
    return found


def _column(table: Table, index: int) -> str:
    return table.columns[index] if index < len(table.columns) else f"column {index + 1}"


def _figure_differences(content: bytes, format: str, trace: dict[str, Any], store: Store) -> list[str]:
    from .figures import make_figure
    from .figures.canvas.figure_options import options_from_trace

    drawn_with, look = trace.pop("drawn_with", None), trace.pop("look", None)
    try:
        made = make_figure(
            trace["figure"],
            store,
            trace["sweep"],
            revision=trace["revision"],
            lengths=trace.get("lengths"),
            options=trace.get("options"),
            only=trace.get("only", ()),
        )
    except (StoreError, ReportError) as error:
        return [f"its figure cannot be made any more: {error}"]
    found = []
    if made.trace["data"] != trace["data"]:
        found.append(f"its numbers are no longer those of the database; draw it again with --figure {made.name}")
    found += differences(trace, made.trace)
    if not found and json.loads(json.dumps(made.trace)) != trace:
        found.append(OTHER_SOURCE)
    if found:
        return found
    try:
        return _picture_differences(content, format, made, options_from_trace(look), drawn_with)
    except ReportError as error:
        return [f"its figure cannot be drawn any more: {error}"]


def _picture_differences(content: bytes, format: str, made: Any, look: Any, drawn_with: Any) -> list[str]:
    from .figures import redraw
    from .figures.files import rendered

    found = redraw.difference(content, rendered(made, format, look=look), format)
    if found is None:
        return []
    here = redraw.versions()
    if drawn_with == here:
        return [f"it does not show what the database says: {found}; draw it again with --figure {made.name}"]
    return [
        f"it was drawn with {_drawn_with(drawn_with)}, here is {_drawn_with(here)}, and the pictures differ: only its "
        f"numbers could be compared, and they are the same; draw it again with --figure {made.name}, or check it with that one"
    ]


def _drawn_with(told: Any) -> str:
    known = isinstance(told, dict) and set(told) == {"matplotlib", "freetype"}
    return f"matplotlib {told['matplotlib']} and freetype {told['freetype']}" if known else "an unknown matplotlib"


def _lines(text: str, fresh: str) -> list[str]:
    pairs = zip_longest(text.splitlines(), fresh.splitlines(), fillvalue="")
    return [
        f"line {number} differs: {was[:160]!r} is now {now[:160]!r}"
        for number, (was, now) in enumerate(pairs, 1)
        if was != now
    ]
