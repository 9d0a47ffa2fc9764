"""HTML gallery of a folder of tables and figures: a small picture of each, with links to its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...results.console.text import counted, html_escaped
from ..table import Table
from .appendix import Picture, empty_reason, short_title
from .column_heads import column_heads
from .html_renderer import spanning_cells
from .latex import caption_notes, title_and_sweep

THUMBNAIL_ROWS = 12
THUMBNAIL_PX, SMALLEST_PX, LARGEST_PX = 320.0, 4.5, 9.0
"""Width of a small table, and the smallest and the largest size of its letters, in pixels."""
MAX_CELL_CHARS, CHAR_EM = 40, 0.52
"""Characters after which a text of a small table is cut, and the mean width of one relative to its size."""
CSS = """
:root{--ink:#1b1b1f;--dim:#585b66;--page:#fff;--card:#f5f6f9;--line:#d9dbe3;--link:#0b57c4}
@media (prefers-color-scheme:dark){
:root{--ink:#e6e6ea;--dim:#a4a7b3;--page:#16171b;--card:#202228;--line:#383b45;--link:#8ab4f8}
.t img{filter:invert(.91) hue-rotate(180deg)}
}
*{box-sizing:border-box}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:78rem;margin:0 auto;padding:1.2rem 1rem 3rem}
h1{font-size:1.4rem;margin:.3rem 0}h2{font-size:1.1rem;margin:1.6rem 0 .6rem}h3{font-size:.95rem;margin:.6rem 0 .2rem}
a{color:var(--link)}p{margin:.2rem 0;color:var(--dim)}
.g{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,22rem),1fr))}
.c{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.7rem;min-width:0;font-size:.85rem}
.t{display:block;height:11rem;overflow:hidden;border-radius:4px;background:var(--page);color:inherit;text-decoration:none;padding:.4rem}
.t:focus-visible{outline:2px solid var(--link)}
.t img{width:100%;height:100%;object-fit:contain;background:#fff}
.t table{border-collapse:collapse;line-height:1.35;font-variant-numeric:tabular-nums;margin:0 auto}
.t table{border-top:1.5px solid;border-bottom:1.5px solid}
.t td,.t th{padding:0 .5em;text-align:right;white-space:nowrap;max-width:21em;overflow:hidden;text-overflow:ellipsis}
.t td.l{text-align:left}.t .s th{text-align:center;font-weight:400;background:linear-gradient(currentColor,currentColor) center bottom/calc(100% - .8em) 1px no-repeat}.t tr.h td{border-bottom:1px solid;vertical-align:bottom}
.n{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:3;overflow:hidden}
.f a{display:inline-block;padding:.15rem .5rem .15rem 0}
summary{cursor:pointer;padding:.3rem 0}li{margin:.2rem 0;color:var(--dim)}
""".strip()


def gallery_text(
    sweep: str,
    tables: Mapping[str, Table],
    pictures: Mapping[str, Picture],
    files: Mapping[str, Mapping[str, str]],
    skipped: Mapping[str, str],
    dashboard: str | None,
) -> str:
    """Return the page: a link to the dashboard, the figures, the tables with rows, and a list of what is absent.

    Args:
        sweep: Name of the sweep.
        tables: Tables by number or name, in order.
        pictures: Figures by name, in order.
        files: File by format, per table number and per "figure NAME"; a figure has a PNG.
        skipped: Reason by table or figure that could not be made.
        dashboard: File of the dashboard; None where it was not written.
    """
    title = f"Tables and figures of sweep {html_escaped(sweep)}"
    shown = {number: table for number, table in tables.items() if table.rows}
    figures = [_figure_card(picture, files[f"figure {name}"]) for name, picture in pictures.items()]
    cards = [_table_card(number, table, files[number]) for number, table in shown.items()]
    absent = [
        f"<li>{html_escaped(title_and_sweep(table)[0])}: {html_escaped(empty_reason(table))} {_links(files[number])}</li>"
        for number, table in tables.items()
        if number not in shown
    ]
    absent += [f"<li>{html_escaped(name)} skipped: {html_escaped(reason)}</li>" for name, reason in skipped.items()]
    first = f'<p><a href="{dashboard}">Dashboard: interactive page of the sweep</a></p>' if dashboard else ""
    parts = [f"<h1>{title}</h1>", first]
    for heading, group in (("Figures", figures), ("Tables", cards)):
        if group:
            parts += [f'<h2>{heading}</h2>\n<div class="g">', *group, "</div>"]
    if absent:
        parts.append(
            f"<details><summary>Not shown: {counted(len(absent), 'table or figure', 'tables and figures')}</summary>"
        )
        parts += ["<ul>", *absent, "</ul></details>"]
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<style>{CSS}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _figure_card(picture: Picture, files: Mapping[str, str]) -> str:
    """Return the card of a figure: its PNG, title, notes and links."""
    title, notes = html_escaped(short_title(picture)), html_escaped(" ".join(picture.caption_notes()))
    image = f'<img loading="lazy" src="{files["png"]}" alt="{title}. {notes}">'
    return _card(files, image, title, notes)


def _table_card(number: str, table: Table, files: Mapping[str, str]) -> str:
    """Return the card of a table: its first rows in small letters, title, caption and links."""
    title, _ = title_and_sweep(table)
    heads, first = column_heads(table), table.text_columns

    def line(texts: Sequence[str], kind: str = "") -> str:
        cells = (f"<td{' class=l' if c < first else ''}>{html_escaped(text)}</td>" for c, text in enumerate(texts))
        return f"<tr{kind}>{''.join(cells)}</tr>"

    labels, shown = [head.label for head in heads], table.rows[:THUMBNAIL_ROWS]
    above = [f"<tr class=s>{spanning_cells(heads)}</tr>"] if any(head.span for head in heads) else []
    rows = [*above, line(labels, " class=h"), *map(line, shown)]
    chars = sum(min(MAX_CELL_CHARS, max(map(len, column))) + 2 for column in zip(labels, *shown, strict=True))
    size = min(LARGEST_PX, max(SMALLEST_PX, THUMBNAIL_PX / (chars * CHAR_EM)))
    name = f"Table {number}. {title}" if number.isdigit() else title
    # the sweep stands above all cards
    notes = " ".join(caption_notes(table)[1:])
    # the thumbnail repeats what the linked page says, so screen readers skip it
    thumbnail = f'<table aria-hidden="true" style="font-size:{size:.1f}px">{"".join(rows)}</table>'
    rows_text = counted(len(table.rows), "row")
    return _card(files, thumbnail, f"{html_escaped(name)} ({rows_text})", html_escaped(notes))


def _card(files: Mapping[str, str], picture: str, title: str, notes: str) -> str:
    """Return a card: a picture that links to the page or drawing, a title, notes and links to all files.

    Args:
        files: File by format.
        picture: HTML of the picture.
        title: Title as HTML.
        notes: Notes as HTML.
    """
    target = files.get("html") or files.get("svg") or next(iter(files.values()), "")
    return (
        f'<article class="c"><a class="t" href="{target}" aria-label="{title}">{picture}</a>\n'
        f'<h3>{title}</h3><p class="n">{notes}</p><p class="f">{_links(files)}</p></article>'
    )


def _links(files: Mapping[str, str]) -> str:
    return " ".join(f'<a href="{file}">{format}</a>' for format, file in files.items())
