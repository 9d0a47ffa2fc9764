"""Options of the command `report`, each declared once with its name, type and help, and whether it concerns figures."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import typer

from ..results.console import completion
from ..results.console.command_line import AsJson, Db, SweepName
from ..results.console.completion import Offer, silent
from .figures import FIGURES
from .tables import SECOND_VERSION, TABLES


def listing() -> list[tuple[str, str, str]]:
    """Return (kind "table" or "figure", number or name, contents) of everything that `report` makes.

    Tables come first, then tables by their numbers in the second version, figures by number, and all figures by name;
    so numbered figures occur twice.
    """
    numbered = [(figure.number, figure.shows) for figure in FIGURES.values() if figure.number]
    return [
        *(("table", name, table.shows) for name, table in TABLES.items()),
        *(
            ("table", name, f"{TABLES[number].shows} (number in the paper's second version)")
            for name, number in SECOND_VERSION.items()
        ),
        *(("figure", number, shows) for number, shows in numbered),
        *(("figure", name, figure.shows) for name, figure in FIGURES.items()),
    ]


@silent
def tables(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the completions of `--table`: (number or name, contents) of each table."""
    return [(name, shows) for kind, name, shows in listing() if kind == "table"]


@silent
def figures(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Return the completions of `--figure`: (number or name, contents) of each figure."""
    return [(name, shows) for kind, name, shows in listing() if kind == "figure"]


Compare = Annotated[
    str | None,
    typer.Option(
        "--compare",
        metavar="SWEEP",
        help="Compare with another sweep, such as printed-v2.",
        autocompletion=completion.reference_sweeps,
    ),
]


OF_FIGURES = {"figures": True}
"""Field metadata of an option that requires --figure or --all."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """Options of one `report` command."""

    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="N|NAME",
            help="Table by its number in the paper (6: complete results; v2:8: the same in the paper's second version), or by name such as effects.",
            autocompletion=tables,
        ),
    ] = None
    figure: Annotated[
        str | None,
        typer.Option(
            "--figure",
            metavar="N|NAME",
            help="Figure by its number in the paper (1, 2a, 2b), or by name such as loss; without --out, an SVG in the current folder.",
            autocompletion=figures,
        ),
    ] = None
    sweep: SweepName = None
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Table: terminal, md, csv, tex, html, json. Figure: svg, pdf, png, pgf. Default: by the file extension of --out.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE|FOLDER", help="File to write; with --all the folder to write into."),
    ] = None
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="SWEEP",
            help="Write a table of this sweep and of another, such as printed-v2, a row per cell and number; with --table N only of the "
            "numbers that table N prints; with --figure loss draw the other's curves, too.",
            autocompletion=completion.reference_sweeps,
        ),
    ] = None
    check: Annotated[
        list[Path] | None,
        typer.Option(
            "--check",
            metavar="FILE|FOLDER",
            help="Compare a written table or figure, or all in a folder, with the database; repeatable.",
        ),
    ] = None
    all_: Annotated[
        bool,
        typer.Option(
            "--all", help="Write all tables, figures and the dashboard, with an index, into the folder --out."
        ),
    ] = False
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE.yaml",
            help="Write the tables and figures that a report file lists, with an appendix, into the folder --out.",
        ),
    ] = None
    seeds: Annotated[
        bool, typer.Option("--seeds", help="List every seed instead of mean and standard deviation (table 6).")
    ] = False
    all_rows: Annotated[
        bool,
        typer.Option(
            "--all-rows",
            help="Tables effects and interactions: every length, pair of levels and stratum, significant or not. Table study: every trial.",
        ),
    ] = False
    length: Annotated[
        list[str] | None,
        typer.Option(
            "--length",
            metavar="TOKENS|all",
            help="Also show this context length, beyond those that the grid requests; repeatable. all: every measured length and probe.",
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="AXIS=LEVEL,...",
            help="Use only cells at these levels, such as recipe=intended or seed=0 (a single table or figure); repeatable, all must match.",
        ),
    ] = None
    trace: Annotated[
        bool,
        typer.Option(
            "--trace/--no-trace",
            help="Record in the file where its numbers come from, which --check needs.",
        ),
    ] = True
    dashboard: Annotated[
        Path | None,
        typer.Option("--dashboard", metavar="FILE.html", help="Write an interactive HTML page of the sweep."),
    ] = None
    figures: Annotated[
        bool, typer.Option("--figures", help="Put every figure of the sweep on the page of --dashboard, too.")
    ] = False
    style: Annotated[
        str | None,
        typer.Option(
            "--style",
            metavar="NAME|FILE.mplstyle",
            help="Style of figures: paper, nature, neurips, screen, or a matplotlib style file.",
        ),
    ] = field(default=None, metadata=OF_FIGURES)
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            metavar="LENGTH",
            help="Width of figures: 89, 120 or 183 (millimetres, one to two columns of a journal), or any such as 8.9cm, 3.5in or 252pt.",
        ),
    ] = field(default=None, metadata=OF_FIGURES)
    title: Annotated[
        bool | None,
        typer.Option(
            "--title/--no-title",
            help="Print title and notes in the figure; off by default with --all and journal styles, where the caption has them.",
            show_default=False,
        ),
    ] = field(default=None, metadata=OF_FIGURES)
    bare: Annotated[
        bool, typer.Option("--bare", help="Figure without title and notes, for a paper whose caption has them.")
    ] = field(default=False, metadata=OF_FIGURES)
    caption: Annotated[
        bool, typer.Option("--caption", help="Also write the caption of the figure, to a text file beside it.")
    ] = field(default=False, metadata=OF_FIGURES)
    highlight: Annotated[
        list[str] | None,
        typer.Option(
            "--highlight",
            metavar="CELL",
            help="Cell to highlight in a figure, by slug, beginning of an id, or levels (polar,memory=on); repeatable.",
            autocompletion=completion.cells,
        ),
    ] = field(default=None, metadata=OF_FIGURES)
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="AXIS",
            help="Axis that colours the lines (figure loss), or that is the x axis (figure response).",
        ),
    ] = field(default=None, metadata=OF_FIGURES)
    log: Annotated[bool, typer.Option("--log", help="Logarithmic axes (figure loss).")] = field(
        default=False, metadata=OF_FIGURES
    )
    against: Annotated[
        Literal["tokens", "time"] | None,
        typer.Option(
            "--against",
            metavar="tokens|time",
            help="x axis of figure loss: tokens, or training time.",
        ),
    ] = field(default=None, metadata=OF_FIGURES)
    list_: Annotated[bool, typer.Option("--list", help="List every table and figure with its contents, and exit.")] = (
        False
    )
    db: Db = None
    as_json: AsJson = False


FIGURE_OPTIONS = tuple(option.name for option in fields(ReportRequest) if option.metadata)
"""Names of the options that concern figures only."""
_HINTS = get_type_hints(ReportRequest, include_extras=True)
SIGNATURE = Signature(
    [
        Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=_HINTS[option.name])
        for option in fields(ReportRequest)
    ]
)
"""Signature that typer reads instead of the parameters of the command."""
