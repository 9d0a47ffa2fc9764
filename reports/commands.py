"""The commands that read the database: parse, call one function, print."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..results.options import AsJson, Db, SweepName, as_text, print_json
from ..results.text import choice, cleaned, say

if TYPE_CHECKING:
    from .table import Table


def status(
    sweep: SweepName = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show one sweep live until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Time between two looks of --watch.")
    ] = 2.0,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="With --watch: end when the sweep does not run any more.")
    ] = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show where sweeps stand: counts, running cells with their speed and time left, failures with their cause.

    \b
    Example:
      atma-sweep status
      atma-sweep status --sweep quick --watch
    """
    from ..results.paper import is_published, open_with_published
    from ..results.store.store import open_store

    if watch:
        from rich.console import Console

        from .data import ReportError
        from .live.watch import watch as follow

        if sweep is not None and is_published(sweep):
            raise ReportError(f"{sweep} holds numbers of the paper and nothing of it runs; leave --watch out")

        follow(open_store(db), sweep, Console(), interval=interval, until_end=until_end, as_json=as_json)
        return
    from .live.status import status_of

    report = status_of(open_with_published(db, sweep), sweep)
    if as_json:
        print_json(report.as_json())
    else:
        say(cleaned(report).text())


def show(
    cell: Annotated[str, typer.Argument(metavar="CELL", help="Cell by id, the beginning of an id, or slug.")],
    sweep: SweepName = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show one cell: its config, its attempts, its curve and its measurements.

    \b
    Example:
      atma-sweep show polar-baseline-d0-m1-w0-s0
    """
    from ..results.paper import open_with_published
    from .live.status import cell_sheet

    sheet = cell_sheet(open_with_published(db, sweep), cell, sweep)
    if as_json:
        print_json(sheet.as_json())
    else:
        say(cleaned(sheet).text())


class ReportCommand(TyperCommand):
    """`report`, whose help names the tables and figures that there are; reading them takes a second, so only then."""

    def full_help(self) -> str:
        """The help with those names in it."""
        from .figures import FIGURES
        from .tables import TABLES

        figures = ", ".join(f"{name} ({line.number})" if line.number else name for name, line in FIGURES.items())
        return str(self.help).replace("{tables}", ", ".join(TABLES)).replace("{figures}", figures)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Prints it."""
        self.help = self.full_help()
        super().format_help(ctx, formatter)


def report(
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="N|NAME",
            help="Table by its number in the paper (6: complete results), or by name such as effects.",
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            "--figure",
            metavar="N|NAME",
            help="Figure by its number in the paper (1, 2a, 2b), or by name such as loss; without --out an SVG in this folder.",
        ),
    ] = None,
    sweep: SweepName = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Table: terminal, md, csv, tex, html, json. Figure: svg, pdf, png. Else by --out's ending.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE|FOLDER", help="File to write; with --all the folder to write into."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare", metavar="SWEEP", help="Put the numbers beside those of another sweep, such as printed-v2."
        ),
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(
            "--check",
            metavar="FILE|FOLDER",
            help="Compare a written table or figure, or all in a folder, with the database; repeatable.",
        ),
    ] = None,
    all_: Annotated[
        bool,
        typer.Option(
            "--all", help="Write all tables, figures and the dashboard, with an index, into the folder --out."
        ),
    ] = False,
    seeds: Annotated[
        bool, typer.Option("--seeds", help="List every seed instead of mean and deviation (table 6).")
    ] = False,
    length: Annotated[
        list[str] | None,
        typer.Option(
            "--length",
            metavar="TOKENS|all",
            help="Also show this context length, which the grid does not ask for; repeatable.",
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace/--no-trace",
            help="Whether to write into the file where its numbers come from, which --check needs.",
        ),
    ] = True,
    dashboard: Annotated[
        Path | None, typer.Option("--dashboard", metavar="FILE.html", help="Write the sweep as one page to explore.")
    ] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Write the tables and figures of the paper from the database, compare them with published numbers, or check written ones.

    Tables: {tables}.
    Figures: {figures}.
    The numbers of the paper are always there, as sweeps printed-v1 and printed-v2.
    Exit code 1: --check found a file that says something else than the database.

    \b
    Example:
      atma-sweep report --table 6
      atma-sweep report --figure needle --sweep printed-v2 --out needle.svg
      atma-sweep report --compare printed-v2
      atma-sweep report --dashboard quick.html
      atma-sweep report --all --out appendix
      atma-sweep report --check appendix
    """
    from ..results.files import format_of
    from ..results.paper import open_with_published
    from .data import ReportError
    from .render import SUFFIXES
    from .tables import make_table

    if not (table or figure or compare or all_ or check or dashboard):
        raise ReportError(
            "say what to report: --table 6, --figure needle, --dashboard FILE.html, --compare printed-v2, "
            "--all --out FOLDER or --check FILE"
        )
    if check:
        _check_files(check, db, as_json)
        return
    store = open_with_published(db, sweep)
    lengths = _lengths(length or [])
    if dashboard is not None:
        _write_dashboard(store, dashboard, sweep, as_json, lengths)
        if not (table or figure or compare or all_):
            return
    if figure and not all_:
        if table or compare:
            raise ReportError("a table and a figure are two files; ask for one of them at a time, or for --all")
        _write_figure(store, figure, sweep, format_, out, as_json, trace, lengths)
        return
    if all_:
        _write_tables(store, sweep, out, compare, seeds, lengths)
        return
    format_ = format_of(out, "json" if as_json else format_, SUFFIXES, "terminal")
    options: dict[str, Any] = {"seeds": True} if seeds and table == "6" and not compare else {}
    if compare:
        options = {"reference": compare} | ({"table": table} if table and table != "compare" else {})
    options |= {"lengths": lengths} if lengths else {}
    make = functools.partial(make_table, "compare" if compare else str(table), store, sweep, **options)
    _write_table(make, format_, out, trace)


def _write_table(make: Callable[[], Table], format_: str, out: Path | None, trace: bool) -> None:
    """Prints the table that `make` makes, or writes it to `out`, a CSV's trace beside it."""
    from ..results.files import is_straight, replacing, told, write
    from ..results.terminal import terminal_width
    from .render import files_of, render, trace_file

    if out is None:
        color = format_ == "terminal" and sys.stdout.isatty()
        typer.echo(render(make(), format_, trace=trace, color=color, width=terminal_width(sys.stdout)), nl=False)
        return
    # opened first: that it cannot be written is no news for after the work
    with replacing(out) as stream:
        written = files_of(make(), out, format_, trace=trace)
        stream.write(written.pop(out).encode())
    for beside, text in written.items():
        write(beside, text)
    if format_ == "csv" and not trace and not is_straight(out):
        # that of an older file of the same name says nothing about this one
        trace_file(out).unlink(missing_ok=True)
    say(f"wrote {told(out)}", err=True)


def _lengths(words: list[str]) -> Any:
    """What --length means for reports: every measured length, or those that are named."""
    from .data import ReportError

    wrong = [word for word in words if word != "all" and not (word.isascii() and word.isdigit() and len(word) < 20)]
    if wrong:
        raise ReportError(f"--length takes a number of tokens, or all, not {wrong[0][:40]!r}")
    return "all" if "all" in words else [int(word) for word in words]


def _write_dashboard(store: Any, file: Path, sweep: str | None, as_json: bool, lengths: Any) -> None:
    from ..results.files import format_of, is_standard, told
    from .dashboard.page import write_dashboard

    format_of(file, None, {".html": "html", ".htm": "html"}, "html", option="")
    size = write_dashboard(store, file, sweep, lengths=lengths)
    if as_json:
        print_json({"file": str(file), "bytes": size}, err=is_standard(file))
    say(f"wrote {told(file)} ({size / 1e6:.1f} MB); open it in a browser, no network needed", err=True)


def _write_figure(
    store: Any,
    name: str,
    sweep: str | None,
    format_: str | None,
    out: Path | None,
    as_json: bool,
    trace: bool,
    lengths: Any,
) -> None:
    from ..results.files import format_of, replacing, told, write
    from ..results.names import file_name
    from .data import ReportError
    from .figures import make_figure
    from .figures.files import FORMATS, rendered

    endings = {".json": "json"} if as_json else {f".{format}": format for format in FORMATS}
    wanted = format_of(out, "json" if as_json else format_, endings, "svg")
    if wanted not in FORMATS and not as_json:
        raise ReportError(f"a figure is written as {', '.join(FORMATS)}, not {wanted!r}; {choice(wanted, FORMATS)}")
    if as_json and out is None:
        print_json(make_figure(name, store, sweep, lengths=lengths).as_json())
        return
    if out is None:
        made = make_figure(name, store, sweep, lengths=lengths)
        out = Path(f"{file_name(made.trace['sweep'])}-{made.name}.{wanted}")
        write(out, rendered(made, wanted, trace=trace))
    else:
        with replacing(out) as stream:
            made = make_figure(name, store, sweep, lengths=lengths)
            stream.write(as_text(made.as_json()).encode() if as_json else rendered(made, wanted, trace=trace))
    say(f"wrote {told(out)}", err=True)


def _check_files(files: list[Path], db: str | None, as_json: bool) -> None:
    from ..results.paper import open_with_published
    from .check import check_file, files_in, sweep_of

    named = [one for file in files for one in (files_in(file) if file.is_dir() else [file])]
    store_of = functools.cache(lambda sweep: open_with_published(db, sweep))
    known: dict[str, Any] = {}
    rows = [{"file": str(file), "problems": check_file(file, store_of(sweep_of(file)), known=known)} for file in named]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            say("\n".join(cleaned(row["problems"] or [f"{row['file']}: as the database says"])))
    if any(row["problems"] for row in rows):
        raise typer.Exit(1)


def _write_tables(
    store: Any, sweep: str | None, out: Path | None, compare: str | None, seeds: bool, lengths: Any
) -> None:
    from ..results.paper import SWEEPS
    from .bundle import write_all
    from .data import ReportError

    if out is None:
        raise ReportError("--all writes many files; say where with --out FOLDER")
    written = write_all(store, sweep, out=out, reference=compare or SWEEPS[-1], seeds=seeds, lengths=lengths)
    for name, why in written.left_out.items():
        say(f"left out {name}: {why}", err=True)
    say(f"wrote {len(written.files)} files in {out}; start at {out / 'index.html'}", err=True)
