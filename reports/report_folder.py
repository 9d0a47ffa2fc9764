"""Writes all tables, figures and the dashboard of a sweep into one folder, with an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..results import paper
from ..results.console.output_files import make_folder, write_file
from ..results.console.text import counted, html_escaped, markdown_escaped, tex_escaped
from ..results.errors import StoreError
from ..results.store.store import Store
from ..results.studies.study_store import search_of
from .dashboard.overview import Picture
from .dashboard.page import write_dashboard
from .figures import FIGURES, figure_name, make_figure
from .figures.canvas.base import FigureData
from .figures.canvas.figure_options import FigureOptions, with_highlight
from .figures.files import FORMATS, renderings
from .render import SUFFIXES, rendered_files
from .render.latex import PREAMBLE
from .sweep_data import ExtraLengths, ReportError, cached_reads, load_sweep_data
from .table import Table
from .tables import TABLES, make_table

CSS = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1b1b1f;background:#fff;max-width:48rem;margin:2rem auto;padding:0 1rem}"
    "h1{font-size:1.4rem}ul{padding-left:1.2rem}li{margin:.2rem 0}a{color:#0b57c4}"
    "img{max-width:100%;height:auto}figure{margin:2rem 0}figcaption{color:#585b66}"
)
DASHBOARD = "dashboard.html"
MAX_INLINE_ROWS = 200
"""Tables with more rows are placed at the end of the appendix."""
FILES_WITHOUT_TRACE = ("index.md", "index.html", "appendix.tex", DASHBOARD)
"""Files in the folder that are neither tables nor figures."""
FORMAT_SUFFIXES = {format: suffix for suffix, format in SUFFIXES.items()}


@dataclass
class WrittenFiles:
    """Result of `write_report_folder`."""

    files: list[Path] = field(default_factory=list)
    """Written files, in order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reason for each skipped table ("NAME") or figure ("figure NAME")."""


def file_name(name: str) -> str:
    """Return the file name, without suffix, of a table: `table-6` for a numbered one, else its name."""
    return f"table-{name}" if name.isdigit() else name


@cached_reads()
def write_report_folder(
    store: Store,
    sweep: str | None = None,
    *,
    out: Path,
    formats: Sequence[str] = tuple(FORMAT_SUFFIXES),
    reference: str = paper.SWEEPS[1],
    seeds: bool = False,
    all_rows: bool = False,
    figures: Sequence[str] = tuple(FIGURES),
    lengths: ExtraLengths = None,
    look: FigureOptions | None = None,
    highlight: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> WrittenFiles:
    """Write every table in every requested format and every figure as SVG, PDF and PNG, with an index.

    The index is index.md and index.html. The format "tex" adds appendix.tex, a document of them all; "html" adds the
    dashboard. Tables and figures that cannot be made are listed in the index with the reason. Those about studies are
    left out silently for other sweeps, and so is the comparison of the reference with itself. Existing files are
    replaced, others stay.

    Args:
        store: The database.
        sweep: Name of the sweep; None for the one launched last.
        out: Folder, created if necessary.
        formats: Formats of tables, out of "md", "csv", "tex", "html" and "json"; all by default.
        reference: Sweep that the comparison table compares with.
        seeds: List every seed in tables that can.
        all_rows: List all rows in tables that can.
        figures: Names or numbers of figures; all by default.
        lengths: Context lengths in tokens to show besides the requested ones; "all" for every measured one and every
            probe. Tables and figures that take no lengths ignore them.
        look: Appearance of figures; None for the paper's, without titles.
        highlight: Cells to emphasise in figures, by slug, beginning of an id, or levels such as "polar,memory=on".
        options: Options of figures (by, log, against); each figure gets those that it accepts and that are not empty.

    Returns:
        Written files in order, and the reason of each skipped table ("NAME") or figure ("figure NAME").

    Raises:
        ReportError: Unknown format or figure, a length without a measurement, or an unknown cell to highlight.
        SweepUnknown: No such sweep.
        StoreError: The database cannot be read.
        WriteRefused: The folder or a file cannot be written.
    """
    unknown = [format for format in formats if format not in FORMAT_SUFFIXES]
    if unknown:
        raise ReportError(f"--all cannot write {', '.join(unknown)}; formats: {', '.join(FORMAT_SUFFIXES)}")
    data = load_sweep_data(store, sweep, lengths=lengths)
    name = data.sweep
    look = with_highlight(look or FigureOptions(title=False), data, highlight)
    make_folder(out)
    written = WrittenFiles()
    # tables and figures about studies are not listed as skipped for other sweeps
    searched = search_of(store, name) is not None
    figures = [figure for figure in figures if searched or not FIGURES[figure_name(figure)].study]
    tables: dict[str, Table] = {}
    wanted = {"reference": reference, "seeds": seeds, "all_rows": all_rows, "lengths": lengths}
    for number, spec in TABLES.items():
        if (number == "compare" and name == reference) or (spec.study and not searched):
            continue
        if spec.probes and not data.has_any(spec.probes):
            written.skipped[number] = f"sweep {name} has no measurement of {' or '.join(spec.probes)}"
            continue
        try:
            tables[number] = make_table(number, store, name, **spec.select_options(wanted))
        except (ReportError, StoreError) as error:
            written.skipped[number] = str(error)
            continue
        for format in formats:
            for path, text in rendered_files(
                tables[number], out / f"{file_name(number)}{FORMAT_SUFFIXES[format]}", format
            ).items():
                _write(path, text, written)
    pictures = _write_figures(store, name, figures, out, written, {"lengths": lengths, **(options or {})}, look)
    if "tex" in formats:
        _write(out / "appendix.tex", _document(tables, pictures), written)
    if "html" in formats:
        gallery = [
            Picture(figure.name, figure.title, " ".join(figure.notes), (out / f"figure-{figure.name}.svg").read_bytes())
            for figure in pictures.values()
        ]
        write_dashboard(store, out / DASHBOARD, name, lengths=lengths, pictures=gallery)
        written.files.append(out / DASHBOARD)
    _write(out / "index.md", _index_markdown(name, tables, pictures, formats, written.skipped), written)
    _write(out / "index.html", _index_html(name, tables, pictures, formats, written.skipped), written)
    return written


def _write_figures(
    store: Store,
    sweep: str,
    names: Sequence[str],
    out: Path,
    written: WrittenFiles,
    all_options: Mapping[str, Any],
    look: FigureOptions,
) -> dict[str, FigureData]:
    """Write every figure in all formats as figure-NAME.FORMAT and return those that could be made, by name.

    Args:
        store: The database.
        sweep: Name of the sweep.
        names: Names or numbers of figures.
        out: Folder.
        written: Receives the written files, and the reasons of skipped figures under "figure NAME".
        all_options: Options, `lengths` among them; each figure gets those that it accepts.
        look: Appearance.

    Raises:
        ReportError: There is no such figure.
    """
    figures = {}
    for name in names:
        options = FIGURES[figure_name(name)].select_options(all_options)
        try:
            figure = make_figure(name, store, sweep, lengths=options.pop("lengths", None), options=options)
            contents = renderings(figure, FORMATS, look=look)
        except (ReportError, StoreError) as error:
            written.skipped[f"figure {name}"] = str(error)
            continue
        figures[figure.name] = figure
        for format, content in contents.items():
            _write(out / f"figure-{figure.name}.{format}", content, written)
    return figures


def _write(path: Path, content: str | bytes, written: WrittenFiles) -> None:
    write_file(path, content)
    written.files.append(path)


def _document(tables: dict[str, Table], pictures: dict[str, FigureData]) -> str:
    """Return the LaTeX document that includes all tables and figures, long tables last.

    It has lists of both, and refers to the files of the folder by name. Long are tables of more than 200 rows.
    """
    # long tables come last
    short = [number for number, table in tables.items() if len(table.rows) <= MAX_INLINE_ROWS]
    parts = [rf"\input{{{file_name(number)}}}" for number in short]
    parts += [latex_figure(figure) for figure in pictures.values()]
    parts += [rf"\input{{{file_name(number)}}}" for number in tables if number not in short]
    body = "\n\\clearpage\n".join(parts)
    head = [
        "% run pdflatex twice: the first run measures the columns of long tables",
        "\\documentclass{article}",
        r"\usepackage[margin=15mm,landscape]{geometry}",
        r"\usepackage[export]{adjustbox}",
        # scalable fonts, if installed
        r"\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}",
    ]
    head.append(PREAMBLE)
    lists = r"\listoftables\listoffigures\clearpage"
    return "\n".join([*head, r"\begin{document}", lists, body, r"\end{document}"]) + "\n"


def latex_figure(figure: FigureData) -> str:
    """Return the LaTeX float of a figure: its PDF (figure-NAME.pdf), caption, and label (fig:NAME).

    The caption is title and notes, escaped; the title alone stands in the list of figures.
    """
    # natural size, reduced to the page if necessary
    size = r"[max width=\linewidth,max totalheight=0.85\textheight]"
    title, notes = tex_escaped(f"{figure.title}."), tex_escaped(" ".join(figure.notes))
    lines = [
        r"\begin{figure}[htbp]\centering",
        rf"\includegraphics{size}{{figure-{figure.name}.pdf}}",
        rf"\caption[{{{tex_escaped(figure.title)}}}]{{\textbf{{{title}}}{' ' + notes if notes else ''}}}",
        rf"\label{{fig:{figure.name}}}",
        r"\end{figure}",
    ]
    return "\n".join(lines)


def _rows(table: Table) -> str:
    """Return the number of rows of a table as text: "12 rows"."""
    return counted(len(table.rows), "row")


def _index_markdown(
    name: str,
    tables: dict[str, Table],
    pictures: dict[str, FigureData],
    formats: Sequence[str],
    skipped: dict[str, str],
) -> str:
    """Return index.md: links to all tables and figures, and the skipped ones with reasons.

    Args:
        name: Name of the sweep.
        tables: Tables by number or name.
        pictures: Figures by name.
        formats: Formats of the written tables.
        skipped: Reason by table or figure.
    """
    lines = [f"# Tables and figures of sweep {markdown_escaped(name)}", ""]
    if "html" in formats:
        lines.append(f"- Interactive page of the sweep: [dashboard]({DASHBOARD})")
    for number, table in tables.items():
        links = ", ".join(f"[{format}]({file_name(number)}{FORMAT_SUFFIXES[format]})" for format in formats)
        lines.append(f"- {markdown_escaped(table.title)} ({_rows(table)}): {links}")
    for number, picture in pictures.items():
        links = ", ".join(f"[{format}](figure-{number}.{format})" for format in FORMATS)
        lines.append(f"- {markdown_escaped(picture.title)}: {links}")
    lines += [f"- {number} skipped: {markdown_escaped(reason)}" for number, reason in skipped.items()]
    return "\n".join(lines) + "\n"


def _index_html(
    name: str,
    tables: dict[str, Table],
    pictures: dict[str, FigureData],
    formats: Sequence[str],
    skipped: dict[str, str],
) -> str:
    """Return index.html: links to all tables, the figures as images, and the skipped ones with reasons.

    Args:
        name: Name of the sweep.
        tables: Tables by number or name.
        pictures: Figures by name.
        formats: Formats of the written tables.
        skipped: Reason by table or figure.
    """
    rows = [f'<li>Interactive page of the sweep: <a href="{DASHBOARD}">dashboard</a></li>'] if "html" in formats else []
    for number, table in tables.items():
        links = " ".join(f'<a href="{file_name(number)}{FORMAT_SUFFIXES[format]}">{format}</a>' for format in formats)
        rows.append(f"<li>{html_escaped(table.title)} ({_rows(table)}): {links}</li>")
    rows += [f"<li>{number} skipped: {html_escaped(reason)}</li>" for number, reason in skipped.items()]
    shown = []
    for number, picture in pictures.items():
        links = " ".join(f'<a href="figure-{number}.{format}">{format}</a>' for format in FORMATS)
        title_text = html_escaped(picture.title)
        notes = html_escaped(" ".join(picture.notes))
        shown.append(
            f'<figure><img src="figure-{number}.png" alt="{title_text}. {notes}">'
            f"<figcaption><b>{title_text}.</b> {notes} {links}</figcaption></figure>"
        )
    title = f"Tables and figures of sweep {html_escaped(name)}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{CSS}</style></head>\n"
        f"<body>\n<h1>{title}</h1>\n<ul>\n" + "\n".join(rows) + "\n</ul>\n" + "\n".join(shown) + "\n</body>\n</html>\n"
    )
