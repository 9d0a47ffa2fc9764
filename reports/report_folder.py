"""Writes all tables, figures and the dashboard of a sweep into one folder, with an index."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..results import paper
from ..results.console.output_files import make_folder, write_file
from ..results.console.text import counted, markdown_escaped, sanitize_log
from ..results.errors import StoreError
from ..results.exchange.installed_parts import InstalledPartError
from ..results.store.store import Store
from ..results.studies.study_store import search_of
from .dashboard.gallery import GalleryPicture
from .dashboard.page import write_dashboard
from .figures import FIGURES, figure_name, make_figure
from .figures.canvas.base import FigureData
from .figures.canvas.figure_options import FigureOptions, with_highlight
from .figures.files import FORMATS, renderings
from .render import SUFFIXES, rendered_files
from .render.appendix import appendix_text, empty_reason, file_name
from .render.gallery import gallery_text
from .sweep_data import ExtraLengths, ReportError, SweepData, cached_reads, load_sweep_data
from .table import Table
from .tables import TABLES, make_table

DASHBOARD = "dashboard.html"
FILES_WITHOUT_TRACE = ("index.md", "index.html", "appendix.tex", "appendix.pdf", DASHBOARD)
"""Files in the folder that are neither tables nor figures."""
FAILURES = "failures.log"
"""File in the folder with the tracebacks of failed tables and figures of installed packages; absent without any."""
FORMAT_SUFFIXES = {format: suffix for suffix, format in SUFFIXES.items()}


@dataclass
class WrittenFiles:
    """Result of `write_report_folder`."""

    files: list[Path] = field(default_factory=list)
    """Written files, in order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reason for each skipped table ("NAME") or figure ("figure NAME")."""
    failures: dict[str, str] = field(default_factory=dict)
    """Traceback of each skipped table or figure of an installed package that failed, by the same keys."""

    def skip(self, key: str, error: Exception) -> None:
        """Record why a table or figure could not be made."""
        self.skipped[key] = str(error)
        if isinstance(error, InstalledPartError):
            self.failures[key] = "".join(traceback.format_exception(error))


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
    figures: Sequence[str] = (),
    lengths: ExtraLengths = None,
    look: FigureOptions | None = None,
    highlight: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> WrittenFiles:
    """Write every table in every requested format and every figure as SVG, PDF and PNG, with an index.

    The index is index.md and index.html, a gallery. The format "tex" adds appendix.tex, a document of them all; "html" adds the
    dashboard. Tables and figures that cannot be made are listed in the index with the reason. Those about studies are
    left out silently for other sweeps, and so is the comparison of the reference with itself. Existing files are
    replaced, others stay. Tables and figures of installed packages that fail are skipped like those that cannot be
    made; their tracebacks are in failures.log.

    Args:
        store: The database.
        sweep: Name of the sweep; None for the one launched last.
        out: Folder, created if necessary.
        formats: Formats of tables, out of "md", "csv", "tex", "html" and "json"; all by default.
        reference: Sweep that the comparison table compares with.
        seeds: List every seed in tables that can.
        all_rows: List all rows in tables that can.
        figures: Names or numbers of figures; empty: all.
        lengths: Context lengths in tokens to show besides the requested ones; "all" for every measured one and every
            probe. Tables and figures that take no lengths ignore them.
        look: Appearance of figures; None for the paper's, without titles.
        highlight: Cells to emphasise in figures, by slug, beginning of an id, or levels such as "polar,memory=on".
        options: Options of figures (by, log, against); each figure gets those that it accepts and that are not empty.

    Returns:
        Written files in order, the reason of each skipped table ("NAME") or figure ("figure NAME"), and tracebacks.

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
    figures = [figure for figure in figures or FIGURES if searched or not FIGURES[figure_name(figure)].study]
    wanted = {"reference": reference, "seeds": seeds, "all_rows": all_rows, "lengths": lengths}
    tables = _write_tables(store, data, out, formats, written, wanted, is_study=searched)
    pictures = _write_figures(store, name, figures, out, written, {"lengths": lengths, **(options or {})}, look)
    if "tex" in formats:
        _write(out / "appendix.tex", appendix_text(name, tables, list(pictures.values()), written.skipped), written)
    if "html" in formats:
        gallery = [
            GalleryPicture(
                figure.name,
                figure.title,
                " ".join(figure.caption_notes()),
                (out / f"figure-{figure.name}.svg").read_bytes(),
            )
            for figure in pictures.values()
        ]
        write_dashboard(store, out / DASHBOARD, name, lengths=lengths, pictures=gallery)
        written.files.append(out / DASHBOARD)
    files = {
        number: {format: f"{file_name(number)}{FORMAT_SUFFIXES[format]}" for format in formats} for number in tables
    } | {f"figure {key}": {format: f"figure-{key}.{format}" for format in FORMATS} for key in pictures}
    index = (name, tables, pictures, files, written.skipped, DASHBOARD if "html" in formats else None)
    _write(out / "index.md", _index_markdown(*index), written)
    _write(out / "index.html", gallery_text(*index), written)
    if written.failures:
        _write(out / FAILURES, sanitize_log("\n".join(written.failures.values())), written)
    else:
        (out / FAILURES).unlink(missing_ok=True)
    return written


def _write_tables(
    store: Store,
    data: SweepData,
    out: Path,
    formats: Sequence[str],
    written: WrittenFiles,
    options: Mapping[str, Any],
    *,
    is_study: bool,
) -> dict[str, Table]:
    """Write every table that can be made in every format, and return them by name.

    Reasons of the others are added to `written.skipped`, except for tables about studies without `is_study` and for the
    comparison of the reference with itself.

    Args:
        store: The database.
        data: The sweep.
        out: The folder.
        formats: Formats of tables.
        written: Receives the written files and the reasons.
        options: Options of tables (reference, seeds, all_rows, lengths); each table gets those that it accepts.
        is_study: Write the tables about studies too.
    """
    tables: dict[str, Table] = {}
    for number, spec in TABLES.items():
        if (number == "compare" and data.sweep == options["reference"]) or (spec.study and not is_study):
            continue
        if spec.probes and not data.has_any(spec.probes):
            written.skipped[number] = f"sweep {data.sweep} has no measurement of {' or '.join(spec.probes)}"
            continue
        try:
            tables[number] = make_table(number, store, data.sweep, **spec.select_options(options))
        except (ReportError, StoreError, InstalledPartError) as error:
            written.skip(number, error)
            continue
        for format in formats:
            for path, text in rendered_files(
                tables[number], out / f"{file_name(number)}{FORMAT_SUFFIXES[format]}", format
            ).items():
                _write(path, text, written)
    return tables


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
        spec = FIGURES[figure_name(name)]
        options = spec.select_options(all_options)
        try:
            figure = make_figure(name, store, sweep, lengths=options.pop("lengths", None), options=options)
            contents = renderings(figure, FORMATS, look=look)
        except (ReportError, StoreError, InstalledPartError) as error:
            written.skip(f"figure {name}", error)
            continue
        figures[figure.name] = figure
        for format, content in contents.items():
            _write(out / f"figure-{figure.name}.{format}", content, written)
    return figures


def _write(path: Path, content: str | bytes, written: WrittenFiles) -> None:
    write_file(path, content)
    written.files.append(path)


def _index_markdown(
    name: str,
    tables: Mapping[str, Table],
    pictures: Mapping[str, FigureData],
    files: Mapping[str, Mapping[str, str]],
    skipped: Mapping[str, str],
    dashboard: str | None,
) -> str:
    """Return index.md: links to all tables and figures, and the empty and skipped ones with reasons.

    Args:
        name: Name of the sweep.
        tables: Tables by number or name.
        pictures: Figures by name.
        files: File by format, per table number and per "figure NAME".
        skipped: Reason by table or figure.
        dashboard: File of the dashboard; None where it was not written.
    """

    def links(key: str) -> str:
        return ", ".join(f"[{format}]({file})" for format, file in files[key].items())

    lines = [f"# Tables and figures of sweep {markdown_escaped(name)}", ""]
    if dashboard:
        lines.append(f"- Interactive page of the sweep: [dashboard]({dashboard})")
    for number, table in tables.items():
        rows = counted(len(table.rows), "row") if table.rows else f"0 rows: {empty_reason(table).rstrip('.')}"
        lines.append(f"- {markdown_escaped(f'{table.title} ({rows})')}: {links(number)}")
    lines += [f"- {markdown_escaped(picture.title)}: {links(f'figure {key}')}" for key, picture in pictures.items()]
    lines += [f"- {number} skipped: {markdown_escaped(reason)}" for number, reason in skipped.items()]
    return "\n".join(lines) + "\n"
