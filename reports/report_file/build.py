"""Building of an appendix from a report file: its tables and figures, a LaTeX document of them, and an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...results.console.output_files import make_folder, write_file
from ...results.console.text import markdown_escaped, tex_escaped
from ...results.store.store import Store
from ..cell_filter import filtered_cells
from ..figures import FIGURES, figure_name, make_figure
from ..figures.canvas.base import FigureData, caption
from ..figures.canvas.figure_options import options_from_cli, with_highlight
from ..figures.files import renderings
from ..render import SUFFIXES, rendered_files
from ..render.appendix import HEAD, latex_figure, latex_table
from ..sweep_data import ReportError, load_sweep_data
from ..table import Table, presented
from ..tables import TABLES, make_table, table_name
from .schema import FigureItem, ReportFile, TableItem

SUFFIX_BY_FORMAT = {format: suffix for suffix, format in SUFFIXES.items()}


def build_report(
    report: ReportFile,
    locations: Sequence[str],
    out: Path,
    store_of: Callable[[str | None], Store],
    sweep: str | None = None,
) -> list[Path]:
    """Write the tables and figures of a report file into a folder, with appendix.tex and index.md, in its order.

    Files are named after table or figure; the second of one name ends in -2. Everything is made before anything is
    written, so that an error leaves the folder as it was.

    Args:
        report: The checked file.
        locations: File and line of each item, for messages.
        out: Folder, created if necessary; existing files of the same names are replaced.
        store_of: Returns the store that holds a sweep (None: the one launched last).
        sweep: Sweep in place of the file's.

    Returns:
        Written files, in order.

    Raises:
        ReportError: A table or figure cannot be made; the message names the item.
        SweepUnknown, StoreError: The sweep cannot be read.
        WriteRefused: The folder or a file cannot be written.
    """
    chosen = sweep or report.sweep
    store = store_of(chosen)
    contents: dict[Path, str | bytes] = {}
    parts, lines, used = [], [f"# {markdown_escaped(report.title)}", ""], dict[str, int]()
    for index, item in enumerate(report.items):
        try:
            if isinstance(item, TableItem):
                table = _table(item, store, chosen)
                stem = _stem(f"table-{table.number}" if table.number.isdigit() else table.number, used)
                for format in report.formats:
                    contents |= dict(rendered_files(table, out / f"{stem}{SUFFIX_BY_FORMAT[format]}", format))
                parts.append(latex_table(table, rf"\input{{{stem}}}") if "tex" in report.formats else "")
                text, suffixes = table.title, [SUFFIX_BY_FORMAT[format][1:] for format in report.formats]
            else:
                figure, pictures = _figure(item, report, store, chosen)
                stem = _stem(f"figure-{figure.name}", used)
                contents |= {out / f"{stem}.{format}": content for format, content in pictures.items()}
                parts.append(latex_figure(figure, stem, list(pictures)))
                text, suffixes = caption(figure), list(pictures)
        except ReportError as error:
            raise ReportError(f"{locations[index]}: items[{index}]: {error}") from error
        links = ", ".join(f"[{suffix}]({stem}.{suffix})" for suffix in suffixes)
        lines.append(f"- {markdown_escaped(text)} {links}")
    body = "\n\\clearpage\n".join(filter(None, parts))
    title = rf"{{\Large\bfseries {tex_escaped(report.title)}\par}}"
    contents[out / "appendix.tex"] = (
        "\n".join([HEAD, r"\usepackage{pgf}", r"\begin{document}", title, body, r"\end{document}"]) + "\n"
    )
    contents[out / "index.md"] = "\n".join(lines) + "\n"
    make_folder(out)
    for path, content in contents.items():
        write_file(path, content)
    return list(contents)


def _stem(name: str, used: dict[str, int]) -> str:
    """Return the name of a file without suffix, with -2, -3, ... for the second, third, ... of a name; counts it."""
    used[name] = used.get(name, 0) + 1
    return name if used[name] == 1 else f"{name}-{used[name]}"


def _table(item: TableItem, store: Store, sweep: str | None) -> Table:
    """Return the table of an item, with its columns, caption and notes.

    Raises:
        ReportError: The table is unknown, does not take an option, has no such column, or cannot be made.
    """
    name = table_name(str(item.table))
    options: dict[str, Any] = {"seeds": item.seeds, "all_rows": item.all_rows, "reference": item.compare}
    if spec := TABLES.get(name):
        if unfit := [option for option, value in options.items() if value and option not in spec.takes]:
            raise ReportError(f"table {name} takes no {'compare' if unfit[0] == 'reference' else unfit[0]}")
        options = spec.select_options(options)
    options |= {"lengths": item.lengths} if item.lengths else {}
    options |= {"only": item.only} if item.only else {}
    table = make_table(name, store, sweep, **options)
    return presented(table, columns=item.columns, caption=item.caption, notes=item.notes)


def _figure(
    item: FigureItem, report: ReportFile, store: Store, sweep: str | None
) -> tuple[FigureData, dict[str, bytes]]:
    """Return the figure of an item with its caption, and its pictures without title and notes by format.

    Raises:
        ReportError: The figure is unknown, does not take an option, or cannot be made.
    """
    options = {"by": item.by, "log": item.log, "against": item.against, "compare": item.compare}
    name = str(item.figure)
    figure = make_figure(name, store, sweep, lengths=item.lengths, options=options, only=item.only)
    width = item.width if item.width is not None else report.width
    look = options_from_cli(report.style, None if width is None else f"{width}", False)
    if item.highlight:
        if "highlight" not in FIGURES[figure_name(name)].takes:
            raise ReportError(f"figure {figure.name} shows no single cells to highlight")
        with filtered_cells(figure.trace["sweep"], item.only):
            look = with_highlight(look, load_sweep_data(store, figure.trace["sweep"]), item.highlight)
    pictures = renderings(figure, report.pictures, look=look)
    shown = replace(figure, title=item.caption.rstrip(".")) if item.caption else figure
    return (shown if item.notes else replace(shown, notes=(), glossary={})), pictures
