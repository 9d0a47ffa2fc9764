"""The commands that read the database: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..results.console import completion
from ..results.console.command_line import BY_NAME, AsJson, Db, SweepName, print_json
from ..results.console.completion import Offer, silent
from ..results.console.text import cleaned, say
from .figures import FIGURES
from .report_spec import Listed
from .tables import SECOND_VERSION, TABLES


def status(
    sweep: SweepName = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show one sweep live until Ctrl-C.")] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, max=86_400, help="Time between two looks of --watch."),
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
    from ..results import shipped
    from ..results.builtin_sweeps import nothing_launched, open_known
    from ..results.errors import StoreMissing
    from ..results.paper import is_published
    from ..results.store.store import open_store

    if watch:
        from rich.console import Console

        from .live.watch import watch as follow
        from .sweep_data import ReportError

        if sweep is not None and is_published(sweep):
            raise ReportError(f"{sweep} holds numbers of the paper and nothing of it runs; leave --watch out")
        if sweep is not None and shipped.comes_along(sweep) and open_known(db, sweep) is shipped.shared(sweep):
            raise ReportError(f"{sweep} comes along with this program and nothing of it runs; leave --watch out")

        follow(open_store(db), sweep, Console(), interval=interval, until_end=until_end, as_json=as_json)
        return
    from .live.status import Status, status_of

    try:
        report = status_of(open_known(db, sweep), sweep)
    except StoreMissing as error:
        # whoever names a database or a sweep mistook it
        if db is not None or sweep is not None:
            raise
        report = Status((), nothing_launched(error))
    if as_json:
        print_json(report.as_json())
    else:
        say(cleaned(report).text())


def show(
    cell: Annotated[
        str,
        typer.Argument(metavar="CELL", help=f"Cell {BY_NAME}.", autocompletion=completion.cells),
    ],
    sweep: SweepName = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show one cell: its config, its attempts, its curve and its measurements.

    \b
    Example:
      atma-sweep show polar-baseline-d0-m1-w0-s0
    """
    from ..results.builtin_sweeps import open_known
    from .live.status import cell_sheet

    sheet = cell_sheet(open_known(db, sweep), cell, sweep)
    if as_json:
        print_json(sheet.as_json())
    else:
        say(cleaned(sheet).text())


@silent
def tables(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the tables by number or name, each with its contents."""
    return [(name, shows) for kind, name, shows in listing() if kind == "table"]


@silent
def figures(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the figures by number and name, each with its contents."""
    return [(name, shows) for kind, name, shows in listing() if kind == "figure"]


TableName = Annotated[
    str | None,
    typer.Option(
        "--table",
        metavar="N|NAME",
        help="Table by its number in the paper (6: complete results; v2:8: its number in the second version), or by name such as effects.",
        autocompletion=tables,
    ),
]
FigureName = Annotated[
    str | None,
    typer.Option(
        "--figure",
        metavar="N|NAME",
        help="Figure by its number in the paper (1, 2a, 2b), or by name such as loss; without --out an SVG in this folder.",
        autocompletion=figures,
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Table: terminal, md, csv, tex, html, json. Figure: svg, pdf, png. Else by --out's ending.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE|FOLDER", help="File to write; with --all the folder to write into."),
]
Compare = Annotated[
    str | None,
    typer.Option(
        "--compare",
        metavar="SWEEP",
        help="Put the numbers beside those of another sweep, such as printed-v2.",
        autocompletion=completion.reference_sweeps,
    ),
]
Check = Annotated[
    list[Path] | None,
    typer.Option(
        "--check",
        metavar="FILE|FOLDER",
        help="Compare a written table or figure, or all in a folder, with the database; repeatable.",
    ),
]
All = Annotated[
    bool,
    typer.Option("--all", help="Write all tables, figures and the dashboard, with an index, into the folder --out."),
]
Seeds = Annotated[bool, typer.Option("--seeds", help="List every seed instead of mean and deviation (table 6).")]
AllRows = Annotated[
    bool,
    typer.Option(
        "--all-rows",
        help="Tables effects and interactions: every length, pair of levels and stratum, sure or not. Table study: every trial.",
    ),
]
Length = Annotated[
    list[str] | None,
    typer.Option(
        "--length",
        metavar="TOKENS|all",
        help="Also show this context length, which the grid does not ask for; repeatable. all: every length and probe measured.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="AXIS=LEVEL,...",
        help="Of cells at these levels alone, such as recipe=intended or seed=0 (a table or figure); repeatable, all must hold.",
    ),
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace/--no-trace",
        help="Whether to write into the file where its numbers come from, which --check needs.",
    ),
]
Dashboard = Annotated[
    Path | None, typer.Option("--dashboard", metavar="FILE.html", help="Write the sweep as one page to explore.")
]


StyleName = Annotated[
    str | None,
    typer.Option(
        "--style",
        metavar="NAME|FILE.mplstyle",
        help="How figures look: paper, nature, neurips, screen, or a style file of matplotlib's.",
    ),
]
Width = Annotated[
    str | None, typer.Option("--width", metavar="LENGTH", help="How wide figures are: 89mm, 8.9cm, 3.5in or 252pt.")
]
Title = Annotated[
    bool | None,
    typer.Option(
        "--title/--no-title",
        help="Whether title and notes stand in the figure; not with --all and styles of journals, whose captions say them.",
        show_default=False,
    ),
]
Highlight = Annotated[
    list[str] | None,
    typer.Option(
        "--highlight",
        metavar="CELL",
        help="Cell to stand out in a figure, by slug, beginning of an id, or levels (polar,memory=on); repeatable.",
        autocompletion=completion.cells,
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        "--by", metavar="AXIS", help="Axis that colours the lines of figure loss, or that figure response goes over."
    ),
]
Log = Annotated[bool, typer.Option("--log", help="Logarithmic axes (figure loss).")]
Against = Annotated[
    Literal["tokens", "time"] | None,
    typer.Option(
        "--against",
        metavar="tokens|time",
        help="What the loss is drawn over (figure loss): tokens, or time of training.",
    ),
]


def dashboard(
    sweep: SweepName = None,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen at; 0 is any that is free.")
    ] = 0,
    compare: Compare = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, open no browser.")] = False,
    db: Db = None,
) -> None:
    """Serve the page of a sweep to this machine alone and open it in the browser; it follows the sweep. Ctrl-C ends it.

    The address holds a password that is drawn anew each time. Nothing can be changed through it.

    \b
    Example:
      atma-sweep dashboard
      atma-sweep dashboard --sweep quick --compare printed-v2
      atma-sweep dashboard --port 8000 --no-open
    """
    from .dashboard.server.serve import serve

    def tell(address: str) -> None:
        say(address)
        say("the page follows the sweep while this runs; Ctrl-C ends it", err=True)

    serve(sweep, db, compare=compare, port=port, browser=not no_open, tell=tell)
    say("ended: the page is served no more", err=True)


List = Annotated[bool, typer.Option("--list", help="List every table and figure with its contents, and write nothing.")]


def report(
    table: TableName = None,
    figure: FigureName = None,
    sweep: SweepName = None,
    format_: Format = None,
    out: Out = None,
    compare: Compare = None,
    check: Check = None,
    all_: All = False,
    seeds: Seeds = False,
    all_rows: AllRows = False,
    length: Length = None,
    only: Only = None,
    trace: Trace = True,
    dashboard: Dashboard = None,
    style: StyleName = None,
    width: Width = None,
    title: Title = None,
    highlight: Highlight = None,
    by: By = None,
    log: Log = False,
    against: Against = None,
    list_: List = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Write the tables and figures of the paper from the database, compare them with published numbers, or check written ones.

    Tables: {tables}.

    Figures: {figures}.

    The numbers of the paper are always there, as sweeps printed-v1, printed-v2 and printed-v2-open-weight, and those of
    rivals as printed-tra, printed-wall and printed-atlas: for this command, dashboard, show, status and export. So are
    sweeps of our own that come along: replication, replication-pilot, replication-rates,
    replication-longer and replication-retrieval.

    Exit code 1: --check found a file that says something else than the database.

    \b
    Example:
      atma-sweep report --list
      atma-sweep report --table 6
      atma-sweep report --figure needle --sweep printed-v2 --out needle.svg
      atma-sweep report --figure loss --style nature --width 89mm
      atma-sweep report --table 6 --sweep printed-v2 --only memory=on
      atma-sweep report --figure loss --against time --compare printed-v2
      atma-sweep report --compare printed-v2
      atma-sweep report --dashboard quick.html
      atma-sweep report --all --out appendix
      atma-sweep report --check appendix
    """
    if list_:
        if as_json:
            print_json([{"kind": kind, "name": name, "shows": shows} for kind, name, shows in listing()])
        else:
            say("\n".join(f"{f'--{kind} {name}':<24} {shows}" for kind, name, shows in listing()))
        return
    from .report_request import Request, carry_out, lengths_of

    asked = Request(
        table=table,
        figure=figure,
        compare=compare,
        check=tuple(check or ()),
        all=all_,
        dashboard=dashboard,
        sweep=sweep,
        db=db,
        format=format_,
        out=out,
        seeds=seeds,
        all_rows=all_rows,
        lengths=lengths_of(length or []),
        only=tuple(only or ()),
        trace=trace,
        style=style,
        width=width,
        title=title,
        highlight=tuple(highlight or ()),
        by=by,
        log=log,
        against=against,
        as_json=as_json,
    )
    if not carry_out(asked):
        raise typer.Exit(1)


def listing() -> list[tuple[str, str, str]]:
    """Return (table or figure, number or name, contents) of everything that report makes."""
    numbered = [(figure.number, figure.shows) for figure in FIGURES.values() if figure.number]
    return [
        *(("table", name, table.shows) for name, table in TABLES.items()),
        *(
            ("table", name, f"{TABLES[number].shows}, by its number in the second version")
            for name, number in SECOND_VERSION.items()
        ),
        *(("figure", number, shows) for number, shows in numbered),
        *(("figure", name, figure.shows) for name, figure in FIGURES.items()),
    ]


def _listed(lines: Mapping[str, Listed]) -> str:
    return "; ".join(
        f"{name} ({line.number}: {line.shows})" if line.number else f"{name} ({line.shows})"
        for name, line in lines.items()
    )


# in the words of the lists, which import none of what they name
report.__doc__ = str(report.__doc__).format(tables=_listed(TABLES), figures=_listed(FIGURES))
