"""Tables on a terminal: no line is wider than the terminal.

Notes name the columns that were merged or hidden.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .streams import terminal_width
from .text import counted

GAPS = (2, 1)
"""Character columns between two columns of a table: the first that fits; the last if columns are hidden."""
FULL_GAP = 3
"""Gap between columns if the complete table fits."""
LABEL_GAP = 2
MAX_UNBROKEN_CHARS = 44
"""Words up to this length are never broken."""
MAX_BLOCK_ROWS = 6
"""Up to this number of rows, a table that is too wide becomes blocks instead of losing columns."""
WIDE = 10_000
"""Width for output without a limit: nothing is ever wrapped or cut."""


@dataclass(frozen=True)
class ColumnLayout:
    """Layout of a table.

    `columns` are the indices of the shown columns, `widths` their widths in characters (empty: natural widths), `gap`
    the characters between two columns, and `notes` sentences about the other columns.
    """

    columns: tuple[int, ...]
    widths: tuple[int, ...]
    gap: int = GAPS[0]
    notes: tuple[str, ...] = ()


def may_style() -> bool:
    """Return True if the environment allows escape codes: not with `TERM=dumb` or a non-empty `NO_COLOR`."""
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown") and not os.environ.get("NO_COLOR")


def is_styled(stream: object) -> bool:
    """Return True if a stream goes to a terminal that accepts escape codes."""
    return terminal_width(stream) is not None and may_style()


def forgo_styles() -> None:
    """Keep rich, and typer with it, from sending escape codes if the environment forbids them.

    Sets the environment variable TTY_COMPATIBLE of this process. With NO_COLOR alone rich would still print bold text
    and move the cursor.
    """
    if not may_style():
        os.environ["TTY_COMPATIBLE"] = "0"


def wrapped(text: str, width: int | None) -> list[str]:
    """Return a paragraph as lines of at most `width` characters, broken between words if possible.

    Longer words are split. Spaces and line breaks between words become single spaces. Empty text gives one empty line;
    None as width gives the text unchanged, as one line. Wide characters count as two.
    """
    if width is None:
        return [text]
    from rich.cells import chop_cells

    wrapped_lines = [""]
    for word in text.split():
        for piece in chop_cells(word, width):
            if wrapped_lines[-1] and _cell_width(wrapped_lines[-1]) + 1 + _cell_width(piece) <= width:
                wrapped_lines[-1] += f" {piece}"
            elif wrapped_lines[-1]:
                wrapped_lines.append(piece)
            else:
                wrapped_lines[-1] = piece
    return wrapped_lines


def table_lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    label_columns: int,
    width: int | None,
    *,
    bold: frozenset[tuple[int, int]] = frozenset(),
    color: bool = False,
) -> list[str]:
    """Return a table as lines, with text columns aligned left and number columns aligned right.

    If the table is too wide, it is reduced in this order. Headings and texts are wrapped. Columns with the same value
    in every row are moved to a note. Then up to six rows (MAX_BLOCK_ROWS) become blocks with one line per column, and
    of more rows the last number columns are hidden and named in a note. If hiding cannot help, these become blocks,
    too.

    Args:
        headings: heading of each column.
        rows: texts of each row, one per column.
        label_columns: number of text columns; they are the first columns.
        width: maximum width in characters; None for no limit.
        bold: (row, column) indices of bold entries, from 0; ignored without `color`.
        color: write escape codes.

    Returns:
        Heading lines with a rule below, one or more lines per row, and notes. A table that fits ends with an empty
        line.
    """
    full_layout = ColumnLayout(tuple(range(len(headings))), ())
    if (
        width is None
        or max(map(_cell_width, _draw(headings, rows, label_columns, full_layout, frozenset(), False)), default=0)
        <= width
    ):
        return _draw(headings, rows, label_columns, full_layout, bold, color)
    layout = _fit(headings, rows, label_columns, width)
    if layout is None:
        return _blocks(headings, rows, width)
    drawn = _draw(headings, rows, label_columns, layout, bold, color)
    return [*drawn, *(line for note in layout.notes for line in wrapped(note, width))]


def _cell_width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _pieces(heading: str) -> list[str]:
    """Return the parts between which a heading may be broken: at spaces, and before the @ of a context length."""
    return [piece for piece in re.split(r" +|(?=@)", heading) if piece] or [""]


def _fold_heading(heading: str, width: int) -> str:
    """Return the heading with line breaks, so that each line is at most `width` wide if possible.

    Pieces that are wider stay whole.
    """
    folded: list[str] = []
    for piece in _pieces(heading):
        joint = "" if piece.startswith("@") else " "
        if folded and _cell_width(folded[-1] + joint + piece) <= width:
            folded[-1] += joint + piece
        else:
            folded.append(piece)
    return "\n".join(folded)


def _min_width(heading: str, texts: Sequence[str], is_label: bool) -> int:
    """Return the minimum width of a column: numbers are never broken, texts only between words.

    Words of texts count with at most 44 characters (MAX_UNBROKEN_CHARS), since longer ones may be broken.

    Args:
        heading: heading of the column.
        texts: its texts.
        is_label: True for a text column, False for a number column.
    """
    head = max(map(_cell_width, _pieces(heading)))
    if not is_label:
        return max([head, *map(_cell_width, texts)])
    longest_word = max((_cell_width(word) for text in texts for word in text.split()), default=0)
    return max(min(head, MAX_UNBROKEN_CHARS), min(longest_word, MAX_UNBROKEN_CHARS))


def _fit(headings: Sequence[str], rows: Sequence[Sequence[str]], label_columns: int, width: int) -> ColumnLayout | None:
    """Return a layout that fits the width; None if the rows have to become blocks.

    Reduces the table as `table_lines` describes. Spare width goes first to unwrapped rows, then to unwrapped headings,
    columns with the smallest need first.

    Args:
        headings: heading of each column.
        rows: texts of each row.
        label_columns: number of text columns at the start.
        width: maximum width in characters.
    """
    columns = list(range(len(headings)))
    texts = [[row[c] for row in rows] for c in columns]
    natural = [max(map(_cell_width, [headings[c], *texts[c]])) for c in columns]
    min_widths = [_min_width(headings[c], texts[c], c < label_columns) for c in columns]

    def spare_width(chosen: Sequence[int], gap: int = GAPS[-1]) -> int:
        return width - gap * (len(chosen) - 1) - sum(min_widths[c] for c in chosen)

    notes = []
    if spare_width(columns) < 0 and len(rows) > 1:
        constant_columns = [c for c in columns if len(set(texts[c])) == 1]
        repeated = ", ".join(f"{headings[c]} {texts[c][0]}" for c in constant_columns)
        if constant_columns and len(constant_columns) < len(columns):
            columns = [c for c in columns if c not in constant_columns]
            notes.append(f"The same in every row: {repeated}.")
    if spare_width(columns) < 0:
        hidden = _columns_to_hide(columns, label_columns, spare_width)
        if len(rows) <= MAX_BLOCK_ROWS or not hidden or all(c < label_columns for c in columns):
            return None
        columns = [c for c in columns if c not in hidden]
        names = ", ".join(headings[c] for c in hidden)
        notes.append(f"{counted(len(hidden), 'column')} hidden: {names}; --format csv or a wider terminal shows all.")
    gap = next((gap for gap in GAPS if spare_width(columns, gap) >= 0), GAPS[-1])
    spare = spare_width(columns, gap)
    widths = {c: min_widths[c] for c in columns}
    body = {c: max([min_widths[c], *map(_cell_width, texts[c])]) for c in columns}
    # unwrapped rows have precedence over unwrapped headings
    for target in (body, {c: natural[c] for c in columns}):
        for c in sorted(columns, key=lambda c: target[c] - widths[c]):
            more = min(spare, target[c] - widths[c])
            widths[c] += more
            spare -= more
    return ColumnLayout(tuple(columns), tuple(widths[c] for c in columns), gap, tuple(notes))


def _columns_to_hide(
    columns: Sequence[int], label_columns: int, spare_width: Callable[[Sequence[int]], int]
) -> list[int]:
    """Return the last number columns, as many as must be hidden for the others to fit, in the order of `columns`.

    Empty if hiding all of them would not suffice, or if none must be hidden.

    Args:
        columns: indices of the columns.
        label_columns: number of text columns at the start, which are never hidden.
        spare_width: returns the spare width for a list of columns; negative if they do not fit.
    """
    shown = list(columns)
    while shown and shown[-1] >= label_columns:
        if spare_width(shown) >= 0:
            return [c for c in columns if c not in shown]
        shown.pop()
    return []


def _draw(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    label_columns: int,
    layout: ColumnLayout,
    bold: frozenset[tuple[int, int]],
    color: bool,
) -> list[str]:
    """Return the lines of the table, without the notes of the layout.

    Rich draws the head and the rows that are folded. Other rows, possibly thousands, are only padded, since Rich takes
    a millisecond per text. A table in natural widths ends with an empty line.

    Args:
        headings: heading of each column.
        rows: texts of each row.
        label_columns: number of text columns at the start.
        layout: shown columns and their widths.
        bold: (row, column) indices of bold entries.
        color: write escape codes.
    """
    widths = layout.widths or tuple(
        max(map(_cell_width, [headings[c], *(row[c] for row in rows)])) for c in layout.columns
    )
    gap, edge = (" " * layout.gap, "") if layout.widths else (" " * FULL_GAP, " ")
    drawn = _draw_with_rich(headings, [], label_columns, layout, widths, color)
    # a table in its natural width ends with an empty line
    foot = [] if layout.widths else [drawn.pop()]
    for r, row in enumerate(rows):
        texts = [row[c] for c in layout.columns]
        if all(_cell_width(text) <= wide and "\n" not in text for text, wide in zip(texts, widths, strict=True)):
            padded = [
                _padded(text, wide, c < label_columns, color and (r, c) in bold)
                for c, text, wide in zip(layout.columns, texts, widths, strict=True)
            ]
            drawn.append((edge + gap.join(padded)).rstrip())
        else:
            signs = [(text, "bold" if (r, c) in bold else "") for c, text in zip(layout.columns, texts, strict=True)]
            drawn += _draw_with_rich(None, signs, label_columns, layout, widths, color)
    return [*drawn, *foot]


def _padded(text: str, wide: int, is_label: bool, bold: bool) -> str:
    blank = " " * (wide - _cell_width(text))
    shown = f"\x1b[1m{text}\x1b[0m" if bold and text else text
    return shown + blank if is_label else blank + shown


def _draw_with_rich(
    headings: Sequence[str] | None,
    row: Sequence[tuple[str, str]],
    label_columns: int,
    layout: ColumnLayout,
    widths: Sequence[int],
    color: bool,
) -> list[str]:
    """Return the lines of the head of a table with the rule below it, or those of one row.

    Lines have no spaces at their ends. Texts wider than their column are folded onto further lines.

    Args:
        headings: heading of each column for the head; None for a row.
        row: (text, style) of each shown column, style being "bold" or empty; empty for the head.
        label_columns: number of text columns at the start, which are aligned left.
        layout: shown columns and their gap.
        widths: widths of the shown columns, in characters.
        color: write escape codes.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # a border is one character wide; padding makes up the rest of the gap
    close: dict[str, Any] = {"show_edge": False, "padding": (0, layout.gap - 1, 0, 0)} if layout.widths else {}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=headings is not None, **close)
    for c, wide in zip(layout.columns, widths, strict=True):
        heading = headings[c] if headings is not None else ""
        head = Text(_fold_heading(heading, wide) if layout.widths else heading)
        table.add_column(head, justify="left" if c < label_columns else "right", width=wide, overflow="fold")
    if row:
        table.add_row(*(Text(text, style) for text, style in row))
    out = io.StringIO()
    colors = "standard" if color else None
    Console(file=out, width=WIDE, color_system=colors, force_terminal=color, highlight=False).print(table)  # type: ignore[arg-type]
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _blocks(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return each row as lines of heading and wrapped text.

    A rule of `width` characters stands before, between and after the rows.
    """
    label = min(max(map(_cell_width, headings), default=0), max(8, width // 3))
    blocks = []
    for row in rows:
        blocks.append("─" * width)
        for heading, text in zip(headings, row, strict=True):
            names = wrapped(heading, label)
            text_lines = wrapped(text, max(8, width - label - LABEL_GAP))
            for index in range(max(len(names), len(text_lines))):
                name = names[index] if index < len(names) else ""
                gap = " " * (label - _cell_width(name) + LABEL_GAP)
                blocks.append(f"{name}{gap}{text_lines[index] if index < len(text_lines) else ''}".rstrip())
    return [*blocks, "─" * width]
