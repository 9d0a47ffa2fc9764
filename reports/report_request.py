"""Execution of the command `report`: validation of its options, and one function per kind of output."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results.builtin_sweeps import open_store_with_builtins
from ..results.console.command_line import json_text, print_json
from ..results.console.output_files import atomic_file, display_path, is_stdout, is_stream, resolve_format, write_file
from ..results.console.streams import terminal_width, write_out
from ..results.console.terminal_table import is_styled
from ..results.console.text import choices_hint, counted, echo_text, sanitize_all
from ..results.names import safe_file_name
from ..results.paper import SWEEPS
from ..results.store.store import Store
from .cell_filter import filtered_cells
from .figures import FIGURES, figure_name, make_figure
from .figures.canvas.figure_options import FigureOptions, options_from_cli, with_highlight
from .render import SUFFIXES, render, rendered_files, trace_path
from .report_options import FIGURE_OPTIONS, ReportRequest
from .report_spec import CURVE_X_COLUMNS
from .sweep_data import ExtraLengths, ReportError, cached_reads, load_sweep_data
from .table import Table
from .tables import TABLES, make_table, table_name

if TYPE_CHECKING:
    from .figures.canvas.base import FigureData


FROM_OPTIONS = ("from_", "sweep", "out", "db")
"""Options that go with --from; every other choice is in the file."""


def validate_request(request: ReportRequest) -> ReportRequest:
    """Return the request with the table under its current name.

    Files, sweeps and names of figures are not checked yet.

    Raises:
        ReportError: Options are missing, unknown, or cannot be combined.
    """
    parse_lengths(request.length)
    request = replace(request, table=table_name(request.table)) if request.table else request
    if request.from_:
        extra = [
            name for name, value in vars(request).items() if value and name not in FROM_OPTIONS and name != "trace"
        ]
        if extra:
            raise ReportError(
                f"--{extra[0].strip('_').replace('_', '-')} does not go with --from; write it into {display_path(request.from_)}"
            )
        return request
    if not (request.table or request.figure or request.compare or request.all_ or request.check or request.dashboard):
        raise ReportError(
            "nothing to report; give --table 6, --figure needle, --dashboard FILE.html, --compare printed-v2, "
            "--all --out FOLDER, --from report.yaml or --check FILE; --list lists tables and figures"
        )
    if request.figures and request.dashboard is None:
        raise ReportError(
            "--figures puts the figures on a page; add --dashboard FILE.html (--all has them in any case)"
        )
    having = [name for name, spec in TABLES.items() if "all_rows" in spec.takes]
    if request.all_rows and not request.all_ and request.table not in having:
        raise ReportError(f"--all-rows applies to the tables {' and '.join(having)}; add --table {having[0]}")
    if request.only and (request.all_ or request.dashboard or request.check):
        raise ReportError("--only applies to a single table or figure; use it with --table or --figure only")
    if request.only and request.compare and not request.figure:
        raise ReportError(
            "--only: the comparison of two sweeps needs all cells; remove --only, or compare curves of some cells with "
            "--figure loss"
        )
    if request.against is not None and request.against not in CURVE_X_COLUMNS:
        raise ReportError(f"--against {request.against[:40]}: {choices_hint(request.against, CURVE_X_COLUMNS)}")
    figure_options = [name for name in FIGURE_OPTIONS if name != "title" and getattr(request, name)]
    figure_options += [] if request.title is None else ["title" if request.title else "no-title"]
    if request.bare and request.title:
        raise ReportError("--bare leaves out what --title prints; use one of them")
    if request.caption and not request.figure:
        raise ReportError(
            "--caption applies to a single figure; add --figure NAME (--all has the captions in its index)"
        )
    if figure_options and not (request.figure or request.all_):
        raise ReportError(f"--{figure_options[0]} applies to figures; add --figure NAME or --all")
    return request


def parse_lengths(texts: list[str] | None) -> ExtraLengths:
    """Return the context lengths of `--length` in tokens; "all" if any value is "all"; an empty list for None.

    Raises:
        ReportError: A value is neither a number nor "all".
    """
    texts = texts or []
    wrong = [text for text in texts if text != "all" and not (text.isascii() and text.isdigit() and len(text) < 20)]
    if wrong:
        raise ReportError(f"--length takes a number of tokens, or all, not {wrong[0][:40]!r}")
    return "all" if "all" in texts else [int(text) for text in texts]


def run_report(request: ReportRequest) -> bool:
    """Write, print or check everything that the request names.

    With files to check nothing else is done. Otherwise the dashboard is written if named, and then the folder of
    everything (`all_`), else a figure (a table beside it is an error), else a table or comparison. `list_` is not
    looked at: the command handles it. Messages go to stderr. Every sweep is read once, but again for the dashboard.

    Returns:
        False if a checked file differs from the database, or a table or figure of an installed package failed among
        all; else True.

    Raises:
        ReportError: The request is invalid or cannot be fulfilled.
        SweepUnknown: No such sweep.
        StoreError: The database cannot be read.
        WriteRefused: A file cannot be written.
    """
    request = validate_request(request)
    if request.dashboard is not None and not request.check and not request.from_:
        # outside of the reads below, so that what was read is gone before the page is compressed
        _write_dashboard(request, open_store_with_builtins(request.db, request.sweep), request.dashboard)
    return _write_or_check(request)


@cached_reads()
def _write_or_check(request: ReportRequest) -> bool:
    """Write, print or check everything that a valid request names except the dashboard; return what `run_report` does.

    Raises what `run_report` raises.
    """
    if request.check:
        return _check(request)
    if request.from_:
        _write_report_file(request, request.from_)
        return True
    store = open_store_with_builtins(request.db, request.sweep)
    if request.all_:
        return _write_all(request, store)
    if request.figure:
        _write_figure(request, store, request.figure)
    elif request.table or (request.compare and request.dashboard is None):
        _write_table(request, store)
    return True


def _check(request: ReportRequest) -> bool:
    """Check all named files, print the differences to stdout, and return True if there is none.

    Folders stand for their tables and figures. A file that is as the database says has a line, too; with --json a list
    of objects (file, problems) is printed.

    Raises:
        ReportError: A file is missing, or was not written by `report`.
    """
    from .check import check_file, checkable_files, sweep_of

    for file in request.check or ():
        if not file.exists() and not trace_path(file).exists():
            raise ReportError(f"{file}: no such file or folder; name what report --out or report --all wrote")
    paths = [path for file in request.check or () for path in (checkable_files(file) if file.is_dir() else [file])]
    store_of = functools.cache(lambda sweep: open_store_with_builtins(request.db, sweep))
    tables_by_request: dict[str, Any] = {}
    rows = [
        {"file": str(file), "problems": check_file(file, store_of(sweep_of(file)), tables_by_request=tables_by_request)}
        for file in paths
    ]
    if request.as_json:
        print_json(rows)
    else:
        for row in rows:
            echo_text("\n".join(sanitize_all(row["problems"] or [f"{row['file']}: matches the database"])))
    return not any(row["problems"] for row in rows)


def _write_dashboard(request: ReportRequest, store: Store, file: Path) -> None:
    """Write the dashboard to a file (.html or .htm) and print its size to stderr; with --json also file and bytes.

    The JSON goes to stdout, or to stderr if the dashboard itself goes to stdout.
    """
    from .dashboard.gallery import drawn_pictures
    from .dashboard.page import write_dashboard

    resolve_format(file, None, {".html": "html", ".htm": "html"}, "html", option="")
    lengths = parse_lengths(request.length)
    sweep = request.sweep or store.default_sweep()
    with cached_reads():
        pictures = list(drawn_pictures(store, sweep, lengths)) if request.figures else []
    size = write_dashboard(store, file, sweep, lengths=lengths, compare=request.compare, pictures=pictures)
    if request.as_json:
        print_json({"file": str(file), "bytes": size}, err=is_stdout(file))
    more = "" if request.figures else "; --figures adds every figure of the sweep"
    echo_text(f"wrote {display_path(file)} ({size / 1e6:.1f} MB); open it in a browser (works offline){more}", err=True)


def _write_all(request: ReportRequest, store: Store) -> bool:
    """Write all tables and figures into the folder `--out`, and print skipped ones and a summary to stderr.

    The comparison is with `--compare`, else with printed-v2. Figures have no titles unless `--title` is given.

    Returns:
        False if a table or figure of an installed package failed.

    Raises:
        ReportError: `--out` is missing.
    """
    from .report_folder import FAILURES, write_report_folder

    if request.out is None:
        raise ReportError("--all writes many files; name a folder with --out FOLDER")
    reference = request.compare or SWEEPS[-1]
    written = write_report_folder(
        store,
        request.sweep,
        out=request.out,
        reference=reference,
        seeds=request.seeds,
        all_rows=request.all_rows,
        lengths=parse_lengths(request.length),
        # a title would repeat the caption
        look=options_from_cli(request.style, request.width, bool(request.title)),
        highlight=request.highlight or (),
        options={"by": request.by, "log": request.log, "against": request.against},
    )
    for name, reason in written.skipped.items():
        echo_text(f"skipped {name}: {reason}", err=True)
    echo_text(
        f"wrote {counted(len(written.files), 'file')} in {request.out}; start at {request.out / 'index.html'}", err=True
    )
    if written.failures:
        echo_text(f"tracebacks of {', '.join(written.failures)}: {request.out / FAILURES}", err=True)
    return not written.failures


def _write_report_file(request: ReportRequest, file: Path) -> None:
    """Write the appendix of a report file, and print the number of files and the folder to stderr.

    Raises:
        ReportError: The file is not valid, or an item cannot be made.
    """
    from .report_file.build import build_report
    from .report_file.schema import read_report_file

    report, lines = read_report_file(file)
    out = request.out or (file.parent / report.out if report.out else file.with_suffix(""))
    written = build_report(
        report,
        [f"{file}:{line}" for line in lines],
        out,
        lambda sweep: open_store_with_builtins(request.db, sweep),
        sweep=request.sweep,
    )
    echo_text(f"wrote {counted(len(written), 'file')} in {out}; start at {out / 'index.md'}", err=True)


def _write_figure(request: ReportRequest, store: Store, name: str) -> None:
    """Write one figure to `--out`, or to a file named after sweep and figure in the current folder.

    With --json its data is written to `--out` or printed to stdout instead. The file's path, and the caption if the
    figure has no title, are printed to stderr. With --caption that text is also in a file of the same name and the
    suffix .txt.

    Raises:
        ReportError: A table is requested too, the format is unknown, or the figure cannot be made as requested.
    """
    from .figures.canvas.base import caption
    from .figures.files import WRITABLE_FORMATS, rendered

    comparing = [figure_key for figure_key, spec in FIGURES.items() if "compare" in spec.takes]
    if request.table or (request.compare and figure_name(name) not in comparing):
        if request.table:
            raise ReportError("a table and a figure need one command each, or --all")
        raise ReportError(
            f"figure {figure_name(name)} does not take --compare; figures that do: {', '.join(comparing)}; for all numbers "
            "remove --figure"
        )
    endings = {".json": "json"} if request.as_json else {f".{format}": format for format in WRITABLE_FORMATS}
    format = resolve_format(request.out, "json" if request.as_json else request.format_, endings, "svg")
    if format not in WRITABLE_FORMATS and not request.as_json:
        raise ReportError(f"figures cannot be written as {format!r}; {choices_hint(format, WRITABLE_FORMATS)}")
    look = options_from_cli(request.style, request.width, False if request.bare else request.title)
    options = {"by": request.by, "log": request.log, "against": request.against, "compare": request.compare}

    def make() -> tuple[FigureData, FigureOptions]:
        """Return the figure and its appearance, with highlighted cells.

        Raises:
            ReportError: The figure cannot be made, or shows no single cells to highlight.
        """
        figure = make_figure(
            name, store, request.sweep, lengths=parse_lengths(request.length), options=options, only=request.only or ()
        )
        if not request.highlight:
            return figure, look
        if "highlight" not in FIGURES[figure.name].takes:
            having = ", ".join(name for name, spec in FIGURES.items() if "highlight" in spec.takes)
            raise ReportError(f"--highlight: figure {figure.name} shows no single cells; figures that do: {having}")
        with filtered_cells(figure.trace["sweep"], request.only or ()):
            return figure, with_highlight(look, load_sweep_data(store, figure.trace["sweep"]), request.highlight)

    out = request.out
    if out is None:
        figure, look = make()
        if request.as_json:
            print_json(figure.as_json())
            return
        out = Path(f"{safe_file_name(figure.trace['sweep'])}-{figure.name}.{format}")
        write_file(out, rendered(figure, format, look=look, trace=request.trace))
    else:
        # opened before the work, so that an unwritable file fails early
        with atomic_file(out) as stream:
            figure, look = make()
            content = (
                json_text(figure.as_json()).encode()
                if request.as_json
                else rendered(figure, format, look=look, trace=request.trace)
            )
            stream.write(content)
    if request.caption and not is_stream(out):
        write_file(out.with_suffix(".txt"), caption(figure) + "\n")
    if not look.title and not request.as_json:
        echo_text(f"caption: {caption(figure)}", err=True)
    echo_text(f"wrote {display_path(out)}", err=True)


def _write_table(request: ReportRequest, store: Store) -> None:
    """Print one table, or write it to `--out` together with its trace file, if its format has one.

    Without --out the terminal's colours and width are used. With --no-trace, an older trace file beside a CSV is
    deleted. The path of a written file is printed to stderr.
    """
    format = resolve_format(request.out, "json" if request.as_json else request.format_, SUFFIXES, "terminal")
    if request.out is None:
        color = format == "terminal" and is_styled(sys.stdout)
        text = render(
            _table(request, store), format, trace=request.trace, color=color, width=terminal_width(sys.stdout)
        )
        write_out(text)
        return
    # opened before the work, so that an unwritable file fails early
    with atomic_file(request.out) as stream:
        written = rendered_files(_table(request, store), request.out, format, trace=request.trace)
        stream.write(written.pop(request.out).encode())
    for path, text in written.items():
        write_file(path, text)
    if format == "csv" and not request.trace and not is_stream(request.out):
        # the trace of an older file of the same name is obsolete
        trace_path(request.out).unlink(missing_ok=True)
    echo_text(f"wrote {display_path(request.out)}", err=True)


def _table(request: ReportRequest, store: Store) -> Table:
    """Return the requested table: that of `--table`, or with `--compare` the comparison with that sweep.

    With both, the comparison shows only the numbers that this table of the paper prints. Options that a table does not
    accept are ignored, except lengths and cell filters.
    """
    name = "compare" if request.compare else str(request.table)
    table_number = request.table if request.table != "compare" else None
    wanted = {
        "seeds": request.seeds,
        "all_rows": request.all_rows,
        "reference": request.compare,
        "table": table_number if request.compare else None,
    }
    spec = TABLES.get(name)
    options = spec.select_options(wanted) if spec else {}
    if lengths := parse_lengths(request.length):
        options["lengths"] = lengths
    return make_table(name, store, request.sweep, **options, **({"only": request.only} if request.only else {}))
