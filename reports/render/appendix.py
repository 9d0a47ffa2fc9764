"""LaTeX document of all tables and figures of a sweep, which the files of its folder make up."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ...results.console.text import tex_escaped
from ..table import Table
from .latex import PREAMBLE, needs_landscape, tex_breakable, title_and_sweep

MARGIN_MM = 13.5
"""Margin of an A4 page that leaves 183 mm, the width of figures over two columns."""
FIGURE_SCALE = 0.75
"""Size of figures relative to print; letters of 7 points become 5.25."""
HEAD = "\n".join(
    [
        "% run pdflatex three times, or tectonic once: the first runs measure the columns of long tables",
        r"\documentclass[10pt]{article}",
        rf"\usepackage[a4paper,margin={MARGIN_MM}mm,footskip=7mm]{{geometry}}",
        r"\usepackage[export]{adjustbox}",
        r"\usepackage{pdflscape,float,multicol}",
        r"\usepackage[font=footnotesize,labelfont=bf,singlelinecheck=false]{caption}",
        r"\captionsetup[figure]{font=scriptsize}",
        PREAMBLE,
        # scalable fonts, if installed; the letters of Times are narrow
        r"\IfFileExists{tgtermes.sty}{\usepackage{tgtermes}}{\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}}",
        # tables and figures stand where they are in the source, in the order of their numbers
        r"\floatplacement{table}{H}\floatplacement{figure}{H}\setlength{\intextsep}{8pt}",
        r"\setlength{\LTpre}{8pt}\setlength{\LTpost}{3pt}\setlength{\parindent}{0pt}\emergencystretch=3em",
    ]
)


class Picture(Protocol):
    """A figure as this document needs it."""

    @property
    def name(self) -> str:
        """Name of the figure, of which its file is made."""

    @property
    def title(self) -> str:
        """Title, without a full stop."""

    @property
    def glossary(self) -> Mapping[str, str]:
        """Meaning of each technical name of the figure."""

    def caption_notes(self, explained: Collection[str] = ()) -> list[str]:
        """Return the sentences below the figure, which explain its technical names except those in `explained`."""


def file_name(name: str) -> str:
    """Return the file name, without suffix, of a table: `table-6` for a numbered one, else its name."""
    return f"table-{name}" if name.isdigit() else name


def appendix_text(
    sweep: str, tables: Mapping[str, Table], pictures: Sequence[Picture], skipped: Mapping[str, str]
) -> str:
    """Return the LaTeX document that includes all tables with rows and all figures.

    It refers to the files of the folder by name. A numbered table keeps its number. Pages are upright; a table that is
    too wide for them has a page of its own on its side. Tables without rows and skipped ones are named with the reason
    on the first page, below the lists of tables and figures. A name is explained in the first caption that has it.

    Args:
        sweep: Name of the sweep.
        tables: Tables by number or name, in order.
        pictures: Figures, in order.
        skipped: Reason by table or figure that could not be made.
    """
    parts = []
    numbers = [int(number) for number in tables if number.isdigit()]
    shown = {number: table for number, table in tables.items() if table.rows}
    following = max(numbers, default=0)
    for number, table in shown.items():
        # LaTeX counts tables by itself; without these lines an omitted one would shift the numbers of the paper
        following += not number.isdigit()
        counter = rf"\setcounter{{table}}{{{(int(number) if number.isdigit() else following) - 1}}}"
        parts.append(latex_table(table, rf"{counter}\input{{{file_name(number)}}}"))
    reasons = {title_and_sweep(table)[0]: empty_reason(table) for table in tables.values() if not table.rows} | dict(
        skipped
    )
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names_by_reason.setdefault(reason, []).append(name)
    omitted = [
        rf"\textbf{{{tex_breakable(', '.join(names))}}}: {tex_breakable(reason.rstrip('.'))}."
        for reason, names in names_by_reason.items()
    ]
    lists = r"\listoftables" + (r"\columnbreak\listoffigures" if pictures else "")
    first = [
        rf"{{\Large\bfseries Tables and figures of sweep {tex_breakable(sweep)}\par}}",
        # two columns of lists in small letters, so that the first page holds them and the omissions
        rf"\begin{{multicols}}{{2}}\raggedcolumns\footnotesize{lists}\end{{multicols}}",
    ]
    if omitted:
        first.append(r"{\footnotesize\raggedright\section*{Omitted}")
        first += [*omitted, r"\par}"]
    figures, explained = [], set[str]()
    for picture in pictures:
        figures.append(latex_figure(picture, explained=explained))
        explained.update(picture.glossary)
    return "\n".join([HEAD, r"\begin{document}", *first, *parts, *figures, r"\end{document}"]) + "\n"


def empty_reason(table: Table) -> str:
    """Return the sentence that says why a table has no rows: its last note; a general one where it has none."""
    return table.notes[-1] if table.notes else "no rows."


def short_title(figure: Picture) -> str:
    """Return the title of a figure without its sweep and revision."""
    return re.sub(r", sweep .+?, revision \d+", "", figure.title)


def latex_table(table: Table, include: str) -> str:
    """Return the LaTeX that includes a table, on its side if it is too wide for an upright page.

    Args:
        table: The table.
        include: LaTeX that reads its file.
    """
    return rf"\begin{{landscape}}{include}\end{{landscape}}" if needs_landscape(table) else include


def latex_figure(
    figure: Picture, stem: str | None = None, formats: Sequence[str] = ("pdf",), *, explained: Collection[str] = ()
) -> str:
    """Return the LaTeX float of a figure: its picture, caption, and label (fig:NAME); "" without a format for LaTeX.

    The picture is the PDF, else the PGF, else the PNG. The caption is title and notes, escaped; the title without sweep
    stands in the list of figures.

    Args:
        figure: The figure.
        stem: Name of its files without suffix; None: figure-NAME, and the label is fig:NAME, else fig:STEM.
        formats: Formats of the files that exist.
        explained: Technical names that the document has explained already.
    """
    file = stem or f"figure-{figure.name}"
    # one scale for all figures keeps their letters of one size; reduced further to the page if necessary
    size = rf"[scale={FIGURE_SCALE},max width=\linewidth,max totalheight=0.85\textheight]"
    codes = {
        "pdf": rf"\includegraphics{size}{{{file}.pdf}}",
        "pgf": rf"\input{{{file}.pgf}}",
        "png": rf"\includegraphics{size}{{{file}.png}}",
    }
    picture = next((code for format, code in codes.items() if format in formats), None)
    if picture is None:
        return ""
    title, text = tex_escaped(f"{figure.title}."), tex_breakable(" ".join(figure.caption_notes(explained)))
    lines = [
        r"\begin{figure}\centering\footnotesize",
        picture,
        rf"\caption[{{{tex_escaped(short_title(figure))}}}]{{\textbf{{{title}}}{' ' + text if text else ''}}}",
        rf"\label{{fig:{stem or figure.name}}}",
        r"\end{figure}",
    ]
    return "\n".join(lines)
