"""Verification of written tables and figures: comparison of a file with the current content of the database.

A trace is the record of a table's or figure's origin: its sweep, revision, options, cells and attempts. It is embedded
in the file; that of a CSV is a file beside it.
"""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..results.errors import StoreError
from ..results.exchange.installed_parts import InstalledPartError
from ..results.store.store import Store
from .render import RENDERERS, SUFFIXES, render, trace_path
from .render.csv_renderer import trace_file_text
from .render.trace import differences
from .sweep_data import ReportError
from .table import Table, presented
from .tables import make_table

SOURCE_DIFFERS = "the numbers match, but the recorded commit or GPU differs"
Grid = list[list[str]]


def _figure_formats() -> tuple[str, ...]:
    """Return the file formats of figures: svg, pdf, png and pgf."""
    from .figures.files import WRITABLE_FORMATS

    return WRITABLE_FORMATS


def _format(path: Path) -> str:
    """Return the format of a file by its suffix (case ignored): md, csv, tex, html, json, svg, pdf or png.

    Raises:
        ReportError: Files with that suffix cannot be checked.
    """
    ending = path.suffix.lower()
    if ending.removeprefix(".") in _figure_formats():
        return ending.removeprefix(".")
    if ending not in SUFFIXES:
        endings_text = ", ".join([*SUFFIXES, *(f".{format}" for format in _figure_formats())])
        raise ReportError(f"{path.name}: only files ending in {endings_text} can be checked; write one with --out")
    return SUFFIXES[ending]


def trace_in(text: str, format: str, name: str) -> dict[str, Any]:
    """Return the trace in the text of a rendered table: a dict with at least table, sweep, revision and options.

    Args:
        text: Content of the file; for a CSV the content of its trace file.
        format: Format of the table: "md", "csv", "tex", "html" or "json".
        name: Name of the file, for messages alone.

    Raises:
        ReportError: There is no readable trace, or the JSON table has no row.
    """
    trace: Any = None
    try:
        if format == "json" and json.loads(text) == []:
            raise ReportError(f"{name} has no rows, so it has no trace; check the table in another format")
        trace = RENDERERS[format].trace_of(text)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ReportError(f"{name}: its trace cannot be read ({error}); write the table again") from error
    if not isinstance(trace, dict) or not {"table", "sweep", "revision", "options"} <= set(trace):
        raise ReportError(
            f"{name} has no trace (record of where its numbers come from); write the table again with atma-sweep report --out"
        )
    return trace


def _read(path: Path) -> tuple[str, str, dict[str, Any]]:
    """Return (text, format, trace) of a file; the text of a figure is empty.

    The format is md, csv, tex, html, json, svg, pdf or png. Reads the trace of a CSV from the file beside it.

    Raises:
        ReportError: The file cannot be read, has a suffix that cannot be checked, or has no trace.
    """
    format = _format(path)
    try:
        if format not in SUFFIXES.values():
            return "", format, _figure_trace(path.read_bytes(), format, path.name)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {path}: {error}; name a file that atma-sweep report wrote") from error
    if format == "csv":
        return text, format, _read_trace_file(path)
    return text, format, trace_in(text, format, path.name)


def _read_trace_file(path: Path) -> dict[str, Any]:
    """Return the trace in the file beside a CSV.

    Raises:
        ReportError: It is missing, cannot be read or holds no trace.
    """
    trace_file = trace_path(path)
    try:
        return trace_in(trace_file.read_text(encoding="utf-8"), "csv", trace_file.name)
    except FileNotFoundError as error:
        raise ReportError(
            f"cannot check {path.name}: its trace file {trace_file.name} is missing; write the table again with "
            "atma-sweep report --out, or restore that file"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {trace_file}: {error}; write the table again") from error


def _figure_trace(content: bytes, format: str, name: str) -> dict[str, Any]:
    """Return the trace embedded in a figure, a dict with at least figure, sweep, revision, cells and data.

    Args:
        content: Content of the file.
        format: svg, pdf or png.
        name: Name of the file, for messages alone.

    Raises:
        ReportError: There is none, or it is incomplete.
    """
    from .figures.files import read_trace as figure_trace

    try:
        trace = figure_trace(content, format)
    except ReportError as error:
        raise ReportError(
            f"{name} has no trace (record of where its numbers come from); draw the figure again with atma-sweep report --out"
        ) from error
    if not {"figure", "sweep", "revision", "cells", "data"} <= set(trace):
        raise ReportError(f"{name}: its trace cannot be read; draw the figure again")
    return trace


def sweep_of(path: str | Path) -> str:
    """Return the name of the sweep of a written table or figure, from its trace.

    Raises:
        ReportError: The file cannot be read, or was not written by `report`.
    """
    return str(_read(Path(path))[2]["sweep"])


def checkable_files(folder: Path) -> list[Path]:
    """Return the tables and figures in a folder written by `report --all`, sorted by name.

    Subfolders are not searched. Files are recognised by their suffix alone: .md, .csv, .tex, .html, .json, .svg, .pdf
    or .png, in any case. Files without a trace (index, document, dashboard, empty JSON) are left out. A CSV of which
    only the trace file exists is included.

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
    endings = {*SUFFIXES, *(f".{format}" for format in _figure_formats())}
    names_with_trace = [name for name in names if Path(name).suffix.lower() in endings and not name.endswith(ending)]
    paths = [folder / name for name in sorted({*names_with_trace, *orphans}) if name not in FILES_WITHOUT_TRACE]
    if not paths:
        raise ReportError(f"no table or figure in {folder}; name a folder that report --all wrote")
    return paths


def check_file(path: str | Path, store: Store, *, tables_by_request: dict[str, Any] | None = None) -> list[str]:
    """Return the differences between a written table or figure and the current content of the database.

    The file is made again from its trace, of the revision named there. For a table, every changed number is named, and
    a changed title, note or source of numbers. For a figure: changed numbers, cells with other attempts, and the first
    change of the picture. A figure drawn by another version of matplotlib, with a different picture, counts as a
    difference. A table or figure that can no longer be made is a difference, no error.

    Args:
        path: Table (Markdown, CSV, LaTeX, HTML, JSON) or figure (SVG, PDF, PNG).
        store: The database.
        tables_by_request: Cache of tables by request, filled here, for further files and an unchanged database.

    Returns:
        Lines that begin with the file's name (without folder); empty if the file is as it would be written now.

    Raises:
        ReportError: The file was not written by `report`, or cannot be read.
    """
    path = Path(path)
    text, format, trace = _read(path)
    if "figure" in trace:
        return [f"{path.name}: {line}" for line in _figure_problems(path.read_bytes(), format, trace, store)]
    tables_by_request = {} if tables_by_request is None else tables_by_request
    request_key = json.dumps([trace[name] for name in ("table", "sweep", "revision", "options")], sort_keys=True)
    try:
        if request_key not in tables_by_request:
            options = {"revision": trace["revision"], **trace["options"]}
            tables_by_request[request_key] = make_table(trace["table"], store, trace["sweep"], **options)
        table: Table = presented(tables_by_request[request_key], **trace.get("shown", {}))
    except (StoreError, ReportError, InstalledPartError, TypeError) as error:
        return [f"{path.name}: the table can no longer be built: {error}"]
    fresh = render(table, format)
    if fresh == text and (format != "csv" or json.loads(trace_file_text(table)) == trace):
        return []
    return [f"{path.name}: {line}" for line in _table_problems(text, fresh, format, trace, table)]


def _table_problems(text: str, fresh: str, format: str, trace: dict[str, Any], table: Table) -> list[str]:
    """Return the differences of a table: of its rows, or else of its trace, or else of its lines of text.

    Only the first kind that has any is returned; without any, one line that code or GPU differ. Never empty.

    Args:
        text: Content of the file.
        fresh: Content as it would be written now.
        format: Format of both: "md", "csv", "tex", "html" or "json".
        trace: Trace of the file.
        table: Table made now.
    """
    try:
        old, new = RENDERERS[format].rows(text), RENDERERS[format].rows(fresh)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return [f"its rows cannot be read ({error})"]
    if format == "json":
        old, new = [list(table.columns), *old], [list(table.columns), *new]
    problems = _row_problems(old, new, table)
    if not problems:
        problems = differences(trace, table.trace)
    if not problems:
        problems = _line_problems(text, fresh)
    return problems or [SOURCE_DIFFERS]


def _row_problems(old: Grid, new: Grid, table: Table) -> list[str]:
    """Return a line for each entry that differs, with both texts, and for each row that only one side has.

    Rows are compared by position, headings as row 0, entries by exact text; so a row inserted in the middle makes all
    later rows differ. A row has "nothing" as the text of an entry that it lacks.

    Args:
        old: Texts of the file, headings first, [row][column].
        new: Texts made now, headings first.
        table: Table made now, for labels of rows and columns.
    """
    problems = []
    for index, (was, now) in enumerate(zip_longest(old, new)):
        label = " ".join(table.rows[index - 1][: table.text_columns]) if 0 < index <= len(table.rows) else "headings"
        if was is None:
            problems.append(f"row {index} ({label}) is missing from the file")
        elif now is None:
            problems.append(f"row {index} ({' '.join(was[: table.text_columns])}) is no longer in the database")
        else:
            problems += [
                f"row {index} ({label}), {_column(table, column)}: the file says {written_text}, the database {database_text}"
                for column, (written_text, database_text) in enumerate(zip_longest(was, now, fillvalue="nothing"))
                if written_text != database_text
            ]
    return problems


def _column(table: Table, index: int) -> str:
    return table.columns[index] if index < len(table.columns) else f"column {index + 1}"


def _figure_problems(content: bytes, format: str, trace: dict[str, Any], store: Store) -> list[str]:
    """Return the differences of a figure: of its data and trace, or else of its picture; empty for none.

    Args:
        content: Content of the file.
        format: svg, pdf or png.
        trace: Trace of the file; its keys `drawn_with` and `look` are removed from it.
        store: The database.
    """
    from .figures import make_figure
    from .figures.canvas.figure_options import options_from_trace

    drawn_with, look = trace.pop("drawn_with", None), trace.pop("look", None)
    try:
        figure = make_figure(
            trace["figure"],
            store,
            trace["sweep"],
            revision=trace["revision"],
            lengths=trace.get("lengths"),
            options=trace.get("options"),
            only=trace.get("only", ()),
        )
    except (StoreError, ReportError, InstalledPartError) as error:
        return [f"the figure can no longer be built: {error}"]
    problems = []
    if figure.trace["data"] != trace["data"]:
        problems.append(f"its numbers differ from the database; draw it again with --figure {figure.name}")
    problems += differences(trace, figure.trace)
    if not problems and json.loads(json.dumps(figure.trace)) != trace:
        problems.append(SOURCE_DIFFERS)
    if problems:
        return problems
    try:
        options = options_from_trace(look)
    except ReportError as error:
        return [f"{error}; draw it again with --figure {figure.name}"]
    try:
        return _picture_problems(content, format, figure, options, drawn_with)
    except (ReportError, InstalledPartError) as error:
        return [f"the figure can no longer be drawn: {error}"]


def _picture_problems(content: bytes, format: str, figure: Any, look: Any, drawn_with: Any) -> list[str]:
    """Return the difference of a picture to one drawn now, as a list of at most one line.

    Args:
        content: Content of the file.
        format: svg, pdf or png.
        figure: Figure made now.
        look: Appearance recorded in the file.
        drawn_with: Versions of matplotlib and FreeType recorded in the file; the line names them if they differ from
            the installed ones.

    Raises:
        ReportError: The figure cannot be drawn.
    """
    from .figures import redraw
    from .figures.files import rendered

    difference = redraw.first_difference(content, rendered(figure, format, look=look), format)
    if difference is None:
        return []
    versions = redraw.drawing_versions()
    if drawn_with == versions:
        return [f"the picture does not match the database: {difference}; draw it again with --figure {figure.name}"]
    return [
        f"it was drawn with {_drawn_with(drawn_with)}, but {_drawn_with(versions)} is installed, and the pictures differ; "
        f"only the numbers could be compared, and they match; draw it again with --figure {figure.name}, or check it with the "
        "version that drew it"
    ]


def _drawn_with(versions: Any) -> str:
    """Return the recorded versions of matplotlib and FreeType as text; "an unknown version of matplotlib" if invalid."""
    is_valid = isinstance(versions, dict) and set(versions) == {"matplotlib", "freetype"}
    return (
        f"matplotlib {versions['matplotlib']} and freetype {versions['freetype']}"
        if is_valid
        else "an unknown version of matplotlib"
    )


def _line_problems(text: str, fresh: str) -> list[str]:
    """Return a line for each line of text that differs, by position, with at most 160 characters of either side.

    Args:
        text: Content of the file.
        fresh: Its current form; a line that one side lacks is empty.
    """
    pairs = zip_longest(text.splitlines(), fresh.splitlines(), fillvalue="")
    return [
        f"line {number} differs: {was[:160]!r} is now {now[:160]!r}"
        for number, (was, now) in enumerate(pairs, 1)
        if was != now
    ]
