"""Tables on a terminal: no line longer than it is wide, and a word on everything that was folded away or left out for that."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .text import counted

GAPS = (2, 1)
"""Columns of the terminal between two columns of a table: the first that fits, and the last where columns are hidden."""
WHOLE_GAP = 3
"""As that, where there is room for all."""
LABEL_GAP = 2
MAX_UNBROKEN_CHARS = 20
"""A longer word may be broken where the terminal is too narrow for it."""
MAX_BLOCK_ROWS = 6
"""So many rows become blocks, a line a column, rather than losing columns."""
WIDE = 10_000
"""Where nobody looks at the width: wide enough that nothing is ever wrapped or cut."""


@dataclass(frozen=True)
class ColumnLayout:
    """A table in as many columns as fit: `columns` by their place, their widths (none: as they come), what stands between
    them, and `notes` on what became of the others."""

    columns: tuple[int, ...]
    widths: tuple[int, ...]
    gap: int = GAPS[0]
    notes: tuple[str, ...] = ()


def terminal_width(stream: object) -> int | None:
    """Columns of the terminal that a stream goes to; None for a file, a pipe or anything else."""
    import shutil

    isatty = getattr(stream, "isatty", None)
    return shutil.get_terminal_size().columns if isatty is not None and isatty() else None


def may_style() -> bool:
    """Return whether the environment lets programs send escape codes: not with `TERM=dumb`, nor with a `NO_COLOR` that is set."""
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown") and not os.environ.get("NO_COLOR")


def is_styled(stream: object) -> bool:
    """Return whether a stream goes to a terminal that may be sent escape codes."""
    return terminal_width(stream) is not None and may_style()


def forgo_styles() -> None:
    """Keep rich, and typer with it, from sending escape codes where the environment forbids them.

    With NO_COLOR alone rich would still print bold text and move the cursor.
    """
    if not may_style():
        os.environ["TTY_COMPATIBLE"] = "0"


def wrapped(text: str, width: int | None) -> list[str]:
    """A paragraph in lines of at most that width, broken between words, and within one that is wider; one line where
    there is no width."""
    if width is None:
        return [text]
    from rich.cells import chop_cells

    found = [""]
    for word in text.split():
        for piece in chop_cells(word, width):
            if found[-1] and _cells(found[-1]) + 1 + _cells(piece) <= width:
                found[-1] += f" {piece}"
            elif found[-1]:
                found.append(piece)
            else:
                found[-1] = piece
    return found


def lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: int,
    width: int | None,
    *,
    bold: frozenset[tuple[int, int]] = frozenset(),
    color: bool = False,
) -> list[str]:
    """The table as lines, the first `words` columns on the left, the others, numbers, on the right.

    Too wide for `width` it gives up, in this order: the width of headings and sentences, which are wrapped; columns that
    say the same in every row, which are told once; then, of few rows, the shape of a table: each becomes a block, a line
    a column; and of many the last columns of numbers, which are named.
    """
    whole = ColumnLayout(tuple(range(len(headings))), ())
    if width is None or max(map(_cells, _drawn(headings, rows, words, whole, frozenset(), False)), default=0) <= width:
        return _drawn(headings, rows, words, whole, bold, color)
    fitted = _fit(headings, rows, words, width)
    if fitted is None:
        return _blocks(headings, rows, width)
    drawn = _drawn(headings, rows, words, fitted, bold, color)
    return [*drawn, *(line for note in fitted.notes for line in wrapped(note, width))]


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _pieces(heading: str) -> list[str]:
    """Where a heading may be broken: at its spaces, and before the sign that leads a context length."""
    return [piece for piece in re.split(r" +|(?=@)", heading) if piece] or [""]


def _folded(heading: str, width: int) -> str:
    """The heading in lines, each as long as fits."""
    found: list[str] = []
    for piece in _pieces(heading):
        joint = "" if piece.startswith("@") else " "
        if found and _cells(found[-1] + joint + piece) <= width:
            found[-1] += joint + piece
        else:
            found.append(piece)
    return "\n".join(found)


def _narrowest(heading: str, texts: Sequence[str], words: bool) -> int:
    """The width that a column needs at least: numbers are never broken, sentences between their words."""
    head = max(map(_cells, _pieces(heading)))
    if not words:
        return max([head, *map(_cells, texts)])
    longest = max((_cells(word) for text in texts for word in text.split()), default=0)
    return max(min(head, MAX_UNBROKEN_CHARS), min(longest, MAX_UNBROKEN_CHARS))


def _fit(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int, width: int) -> ColumnLayout | None:
    """None where no table fits."""
    columns = list(range(len(headings)))
    texts = [[row[c] for row in rows] for c in columns]
    natural = [max(map(_cells, [headings[c], *texts[c]])) for c in columns]
    least = [_narrowest(headings[c], texts[c], c < words) for c in columns]

    def room(chosen: Sequence[int], gap: int = GAPS[-1]) -> int:
        return width - gap * (len(chosen) - 1) - sum(least[c] for c in chosen)

    notes = []
    if room(columns) < 0 and len(rows) > 1:
        alike = [c for c in columns if len(set(texts[c])) == 1]
        told = ", ".join(f"{headings[c]} {texts[c][0]}" for c in alike)
        if alike and len(alike) < len(columns):
            columns = [c for c in columns if c not in alike]
            notes.append(f"The same in every row: {told}.")
    if room(columns) < 0:
        hidden = _hidden(columns, words, room)
        if len(rows) <= MAX_BLOCK_ROWS or not hidden or all(c < words for c in columns):
            return None
        columns = [c for c in columns if c not in hidden]
        names = ", ".join(headings[c] for c in hidden)
        notes.append(f"{counted(len(hidden), 'column')} hidden: {names}; --format csv or a wider terminal shows all.")
    gap = next((gap for gap in GAPS if room(columns, gap) >= 0), GAPS[-1])
    spare = room(columns, gap)
    widths = {c: least[c] for c in columns}
    body = {c: max([least[c], *map(_cells, texts[c])]) for c in columns}
    # rows in one line are worth more than headings in one
    for wish in (body, {c: natural[c] for c in columns}):
        for c in sorted(columns, key=lambda c: wish[c] - widths[c]):
            more = min(spare, wish[c] - widths[c])
            widths[c] += more
            spare -= more
    return ColumnLayout(tuple(columns), tuple(widths[c] for c in columns), gap, tuple(notes))


def _hidden(columns: Sequence[int], words: int, room: Callable[[Sequence[int]], int]) -> list[int]:
    """The last columns of numbers that have to go; none where even one of them does not fit beside the words."""
    kept = list(columns)
    while kept and kept[-1] >= words:
        if room(kept) >= 0:
            return [c for c in columns if c not in kept]
        kept.pop()
    return []


def _drawn(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: int,
    fitted: ColumnLayout,
    bold: frozenset[tuple[int, int]],
    color: bool,
) -> list[str]:
    """Rich draws the head and the rows that are folded; the others, which may be thousands, are only padded: Rich takes a
    millisecond a text."""
    widths = fitted.widths or tuple(max(map(_cells, [headings[c], *(row[c] for row in rows)])) for c in fitted.columns)
    gap, edge = (" " * fitted.gap, "") if fitted.widths else (" " * WHOLE_GAP, " ")
    found = _rich(headings, [], words, fitted, widths, color)
    # a table that is not squeezed ends in an empty line
    foot = [] if fitted.widths else [found.pop()]
    for r, row in enumerate(rows):
        texts = [row[c] for c in fitted.columns]
        if all(_cells(text) <= wide and "\n" not in text for text, wide in zip(texts, widths, strict=True)):
            padded = [
                _padded(text, wide, c < words, color and (r, c) in bold)
                for c, text, wide in zip(fitted.columns, texts, widths, strict=True)
            ]
            found.append((edge + gap.join(padded)).rstrip())
        else:
            signs = [(text, "bold" if (r, c) in bold else "") for c, text in zip(fitted.columns, texts, strict=True)]
            found += _rich(None, signs, words, fitted, widths, color)
    return [*found, *foot]


def _padded(text: str, wide: int, left: bool, bold: bool) -> str:
    blank = " " * (wide - _cells(text))
    shown = f"\x1b[1m{text}\x1b[0m" if bold and text else text
    return shown + blank if left else blank + shown


def _rich(
    headings: Sequence[str] | None,
    row: Sequence[tuple[str, str]],
    words: int,
    fitted: ColumnLayout,
    widths: Sequence[int],
    color: bool,
) -> list[str]:
    """The head of a table, or one row of texts with their styles."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # a border is one sign wide, so that padding makes up the rest of the gap
    close: dict[str, Any] = {"show_edge": False, "padding": (0, fitted.gap - 1, 0, 0)} if fitted.widths else {}
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=headings is not None, **close)
    for c, wide in zip(fitted.columns, widths, strict=True):
        heading = headings[c] if headings is not None else ""
        head = Text(_folded(heading, wide) if fitted.widths else heading)
        drawn.add_column(head, justify="left" if c < words else "right", width=wide, overflow="fold")
    if row:
        drawn.add_row(*(Text(text, style) for text, style in row))
    out = io.StringIO()
    colors = "standard" if color else None
    Console(file=out, width=WIDE, color_system=colors, force_terminal=color, highlight=False).print(drawn)  # type: ignore[arg-type]
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _blocks(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Every row as lines of heading and text, which are wrapped under themselves."""
    label = min(max(map(_cells, headings), default=0), max(8, width // 3))
    found = []
    for row in rows:
        found.append("─" * width)
        for heading, text in zip(headings, row, strict=True):
            names = wrapped(heading, label)
            told = wrapped(text, max(8, width - label - LABEL_GAP))
            for place in range(max(len(names), len(told))):
                name = names[place] if place < len(names) else ""
                gap = " " * (label - _cells(name) + LABEL_GAP)
                found.append(f"{name}{gap}{told[place] if place < len(told) else ''}".rstrip())
    return [*found, "─" * width]
