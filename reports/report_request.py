"""Execution of the command `report`: validation of its options, and one function per kind of output."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results.builtin_sweeps import open_store_with_builtins
from ..results.console.command_line import as_text, print_json
from ..results.console.output_files import atomic_file, is_stdout, is_stream, resolve_format, told, write
from ..results.console.streams import write_out
from ..results.console.terminal_table import is_styled, terminal_width
from ..results.console.text import choices_hint, counted, echo_text, sanitize_all
from ..results.names import safe_file_name
from ..results.paper import SWEEPS
from ..results.store.store import Store
from .cell_filter import only
from .figures import FIGURES, figure_name, make_figure
from .figures.canvas.figure_options import FigureOptions, wanted, with_highlight
from .render import SUFFIXES, render, rendered_files, trace_path
from .report_options import FIGURE_OPTIONS, ReportRequest
from .report_spec import CURVE_X_COLUMNS
from .sweep_data import ExtraLengths, ReportError, cached_reads, load_sweep_data
from .table import Table
from .tables import TABLES, make_table, table_name

if TYPE_CHECKING:
    from .figures.canvas.base import FigureData


def checked(asked: ReportRequest) -> ReportRequest:
    """Return the request with the table by its name here. Raises ReportError for options that do not go together."""
    parse_lengths(asked.length)
    asked = replace(asked, table=table_name(asked.table)) if asked.table else asked
    if not (asked.table or asked.figure or asked.compare or asked.all_ or asked.check or asked.dashboard):
        raise ReportError(
            "say what to report: --table 6, --figure needle, --dashboard FILE.html, --compare printed-v2, "
            "--all --out FOLDER or --check FILE; --list lists tables and figures"
        )
    having = [name for name, line in TABLES.items() if "all_rows" in line.takes]
    if asked.all_rows and not asked.all_ and asked.table not in having:
        raise ReportError(f"--all-rows is about the tables {' and '.join(having)}; give --table {having[0]} with it")
    if asked.only and (asked.all_ or asked.dashboard or asked.check or asked.compare):
        raise ReportError("--only is about one table or figure; give it with --table or --figure alone")
    if asked.against is not None and asked.against not in CURVE_X_COLUMNS:
        raise ReportError(f"--against {asked.against[:40]}: {choices_hint(asked.against, CURVE_X_COLUMNS)}")
    given = [name for name in FIGURE_OPTIONS if name != "title" and getattr(asked, name)]
    given += [] if asked.title is None else ["title" if asked.title else "no-title"]
    if given and not (asked.figure or asked.all_):
        raise ReportError(f"--{given[0]} is about figures; give --figure NAME or --all with it")
    return asked


def parse_lengths(words: list[str] | None) -> ExtraLengths:
    """Return the context lengths of `--length` in tokens; "all" for every measured one.

    Raises:
        ReportError: A value is neither a number nor "all".
    """
    words = words or []
    wrong = [word for word in words if word != "all" and not (word.isascii() and word.isdigit() and len(word) < 20)]
    if wrong:
        raise ReportError(f"--length takes a number of tokens, or all, not {wrong[0][:40]!r}")
    return "all" if "all" in words else [int(word) for word in words]


@cached_reads()
def run_report(asked: ReportRequest) -> bool:
    """Write or check everything that the request names.

    Returns:
        False if a checked file differs from the database, else True.

    Raises:
        ReportError: The request is invalid or cannot be fulfilled.
        SweepUnknown: No such sweep.
        StoreError: The database cannot be read.
        WriteRefused: A file cannot be written.
    """
    asked = checked(asked)
    if asked.check:
        return _check(asked)
    store = open_store_with_builtins(asked.db, asked.sweep)
    if asked.dashboard is not None:
        _write_dashboard(asked, store, asked.dashboard)
    if asked.all_:
        _write_all(asked, store)
    elif asked.figure:
        _write_figure(asked, store, asked.figure)
    elif asked.table or (asked.compare and asked.dashboard is None):
        _write_table(asked, store)
    return True


def _check(asked: ReportRequest) -> bool:
    """Check all named files, print the differences, and return True if there is none."""
    from .check import check_file, checkable_files, sweep_of

    for file in asked.check or ():
        if not file.exists() and not trace_path(file).exists():
            raise ReportError(f"{file}: no such file or folder; name what report --out or report --all wrote")
    named = [one for file in asked.check or () for one in (checkable_files(file) if file.is_dir() else [file])]
    store_of = functools.cache(lambda sweep: open_store_with_builtins(asked.db, sweep))
    known: dict[str, Any] = {}
    rows = [{"file": str(file), "problems": check_file(file, store_of(sweep_of(file)), known=known)} for file in named]
    if asked.as_json:
        print_json(rows)
    else:
        for row in rows:
            echo_text("\n".join(sanitize_all(row["problems"] or [f"{row['file']}: as the database says"])))
    return not any(row["problems"] for row in rows)


def _write_dashboard(asked: ReportRequest, store: Store, file: Path) -> None:
    """Write the dashboard to a file and print its size to stderr."""
    from .dashboard.page import write_dashboard

    resolve_format(file, None, {".html": "html", ".htm": "html"}, "html", option="")
    size = write_dashboard(store, file, asked.sweep, lengths=parse_lengths(asked.length), compare=asked.compare)
    if asked.as_json:
        print_json({"file": str(file), "bytes": size}, err=is_stdout(file))
    echo_text(f"wrote {told(file)} ({size / 1e6:.1f} MB); open it in a browser, no network needed", err=True)


def _write_all(asked: ReportRequest, store: Store) -> None:
    """Write all tables and figures into the folder `--out`, and print skipped ones and a summary to stderr."""
    from .report_folder import write_report_folder

    if asked.out is None:
        raise ReportError("--all writes many files; say where with --out FOLDER")
    reference = asked.compare or SWEEPS[-1]
    written = write_report_folder(
        store,
        asked.sweep,
        out=asked.out,
        reference=reference,
        seeds=asked.seeds,
        all_rows=asked.all_rows,
        lengths=parse_lengths(asked.length),
        # beside a caption, a title would say it twice
        look=wanted(asked.style, asked.width, bool(asked.title)),
        highlight=asked.highlight or (),
        options={"by": asked.by, "log": asked.log, "against": asked.against},
    )
    for name, why in written.left_out.items():
        echo_text(f"left out {name}: {why}", err=True)
    echo_text(
        f"wrote {counted(len(written.files), 'file')} in {asked.out}; start at {asked.out / 'index.html'}", err=True
    )


def _write_figure(asked: ReportRequest, store: Store, name: str) -> None:
    """Write one figure to `--out`, or to a file named after sweep and figure; with --json print its data."""
    from .figures.canvas.base import caption
    from .figures.files import FORMATS, rendered

    with_others = [one for one, line in FIGURES.items() if "compare" in line.takes]
    if asked.table or (asked.compare and figure_name(name) not in with_others):
        besides = "" if asked.table else f"; figures that --compare draws into: {', '.join(with_others)}"
        raise ReportError(f"a table and a figure are two files; ask for one of them at a time, or for --all{besides}")
    endings = {".json": "json"} if asked.as_json else {f".{format}": format for format in FORMATS}
    format = resolve_format(asked.out, "json" if asked.as_json else asked.format_, endings, "svg")
    if format not in FORMATS and not asked.as_json:
        raise ReportError(
            f"a figure is written as {', '.join(FORMATS)}, not {format!r}; {choices_hint(format, FORMATS)}"
        )
    look = wanted(asked.style, asked.width, asked.title)
    options = {"by": asked.by, "log": asked.log, "against": asked.against, "compare": asked.compare}

    def make() -> tuple[FigureData, FigureOptions]:
        """Return the figure and its appearance, with highlighted cells."""
        made = make_figure(
            name, store, asked.sweep, lengths=parse_lengths(asked.length), options=options, only=asked.only or ()
        )
        if not asked.highlight:
            return made, look
        if "highlight" not in FIGURES[made.name].takes:
            having = ", ".join(name for name, line in FIGURES.items() if "highlight" in line.takes)
            raise ReportError(f"figure {made.name} shows no single cells to --highlight; those that do: {having}")
        with only(made.trace["sweep"], asked.only or ()):
            return made, with_highlight(look, load_sweep_data(store, made.trace["sweep"]), asked.highlight)

    out = asked.out
    if out is None:
        made, look = make()
        if asked.as_json:
            print_json(made.as_json())
            return
        out = Path(f"{safe_file_name(made.trace['sweep'])}-{made.name}.{format}")
        write(out, rendered(made, format, look=look, trace=asked.trace))
    else:
        # opened first, as of a table
        with atomic_file(out) as stream:
            made, look = make()
            content = (
                as_text(made.as_json()).encode()
                if asked.as_json
                else rendered(made, format, look=look, trace=asked.trace)
            )
            stream.write(content)
    if not look.title and not asked.as_json:
        echo_text(f"caption: {caption(made)}", err=True)
    echo_text(f"wrote {told(out)}", err=True)


def _write_table(asked: ReportRequest, store: Store) -> None:
    """Print one table, or write it to `--out` together with its trace file."""
    format = resolve_format(asked.out, "json" if asked.as_json else asked.format_, SUFFIXES, "terminal")
    if asked.out is None:
        color = format == "terminal" and is_styled(sys.stdout)
        text = render(_table(asked, store), format, trace=asked.trace, color=color, width=terminal_width(sys.stdout))
        write_out(text)
        return
    # opened first: that it cannot be written is no news for after the work
    with atomic_file(asked.out) as stream:
        written = rendered_files(_table(asked, store), asked.out, format, trace=asked.trace)
        stream.write(written.pop(asked.out).encode())
    for beside, text in written.items():
        write(beside, text)
    if format == "csv" and not asked.trace and not is_stream(asked.out):
        # that of an older file of the same name says nothing about this one
        trace_path(asked.out).unlink(missing_ok=True)
    echo_text(f"wrote {told(asked.out)}", err=True)


def _table(asked: ReportRequest, store: Store) -> Table:
    """Return the requested table: that of `--table`, or the comparison of `--compare`, with the columns of `--table`."""
    name = "compare" if asked.compare else str(asked.table)
    kept = asked.table if asked.table != "compare" else None
    wanted = {
        "seeds": asked.seeds,
        "all_rows": asked.all_rows,
        "reference": asked.compare,
        "table": kept if asked.compare else None,
    }
    line = TABLES.get(name)
    options = line.options(wanted) if line else {}
    if lengths := parse_lengths(asked.length):
        options["lengths"] = lengths
    return make_table(name, store, asked.sweep, **options, **({"only": asked.only} if asked.only else {}))
