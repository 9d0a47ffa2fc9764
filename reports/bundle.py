"""Every table of a sweep in every format, in one folder, with an index of what is there."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..results import paper
from ..results.errors import StoreError
from ..results.store import Store
from .data import ReportError, Table, gather
from .render import SUFFIXES, TEX_PREAMBLE, markdown_escaped, plain, render
from .tables import TABLES, make_table

FILES = {format: suffix for suffix, format in SUFFIXES.items()}


@dataclass
class Written:
    """What `write_all` left in a folder: its files, and why a table is not among them."""

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def file_name(name: str) -> str:
    """`table-6` for a numbered table, its name for another."""
    return f"table-{name}" if name.isdigit() else name


def write_all(
    store: Store,
    sweep: str | None = None,
    *,
    out: Path,
    formats: Sequence[str] = tuple(FILES),
    reference: str = paper.SWEEPS[1],
    seeds: bool = False,
) -> Written:
    """Writes every table of the sweep in these formats, with index.md and index.html, and appendix.tex, a LaTeX document of
    all tables. A table that cannot be made is named in the index with the reason. Files are replaced.

    Raises ReportError (an unknown format), SweepUnknown, OSError.
    """
    unknown = [format for format in formats if format not in FILES]
    if unknown:
        raise ReportError(f"--all writes files of {', '.join(FILES)}, not {', '.join(unknown)}")
    name = gather(store, sweep).sweep
    out.mkdir(parents=True, exist_ok=True)
    written = Written()
    tables: dict[str, Table] = {}
    for number in TABLES:
        if number == "compare" and name == reference:
            continue
        options: dict[str, object] = {"reference": reference} if number == "compare" else {}
        options |= {"seeds": True} if number == "6" and seeds else {}
        try:
            tables[number] = make_table(number, store, name, **options)
        except (ReportError, StoreError) as error:
            written.left_out[number] = str(error)
            continue
        for format in formats:
            _write(out / f"{file_name(number)}{FILES[format]}", render(tables[number], format), written)
    if "tex" in formats:
        _write(out / "appendix.tex", _document(tables), written)
    _write(out / "index.md", _index_markdown(name, tables, formats, written.left_out), written)
    _write(out / "index.html", _index_html(name, tables, formats, written.left_out), written)
    return written


def _write(path: Path, text: str, written: Written) -> None:
    path.write_text(text, encoding="utf-8")
    written.files.append(path)


def _document(tables: dict[str, Table]) -> str:
    body = "\n\\clearpage\n".join(rf"\input{{{file_name(number)}}}" for number in tables)
    head = ["\\documentclass{article}", r"\usepackage[margin=15mm,landscape]{geometry}", TEX_PREAMBLE]
    return "\n".join([*head, r"\begin{document}", body, r"\end{document}"]) + "\n"


def _index_markdown(name: str, tables: dict[str, Table], formats: Sequence[str], left_out: dict[str, str]) -> str:
    lines = [f"# Tables of sweep {markdown_escaped(name)}", ""]
    for number, table in tables.items():
        links = ", ".join(f"[{format}]({file_name(number)}{FILES[format]})" for format in formats)
        lines.append(f"- {markdown_escaped(table.title)}: {len(table.rows)} rows: {links}")
    lines += [f"- {number} left out: {markdown_escaped(why)}" for number, why in left_out.items()]
    return "\n".join(lines) + "\n"


def _index_html(name: str, tables: dict[str, Table], formats: Sequence[str], left_out: dict[str, str]) -> str:
    rows = []
    for number, table in tables.items():
        links = " ".join(f'<a href="{file_name(number)}{FILES[format]}">{format}</a>' for format in formats)
        rows.append(f"<li>{html.escape(plain(table.title))}: {len(table.rows)} rows: {links}</li>")
    rows += [f"<li>{number} left out: {html.escape(plain(why))}</li>" for number, why in left_out.items()]
    title = f"Tables of sweep {html.escape(plain(name))}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body>\n<h1>{title}</h1>\n<ul>\n" + "\n".join(rows) + "\n</ul>\n</body>\n</html>\n"
    )
