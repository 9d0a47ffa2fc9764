"""Table as LaTeX, with its trace as a comment in the last line; and functions that read a rendering back."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from ...results.console.text import tex_escaped
from ..number_format import PLUS_MINUS
from ..table import Table
from .trace import TRACE, parse_trace_comment, trace_text

MAX_ROWS_PER_PAGE = 40  # a table with more rows becomes a longtable
WIDEST_COLUMN = 5  # centimetres, width of a text column of sentences
MIN_SENTENCE_CHARS = 40  # characters from which on a text column counts as one of sentences
MAX_WORD_CHARS = 24  # characters beyond which a heading, or a text among numbers, takes several lines
BREAK_EVERY = 12  # characters after which a word of more than MAX_WORD_CHARS may break
SIGN, APART = 4.4, 7.0  # points: width of a character in \\footnotesize, and the gap between columns
SIZES = (("scriptsize", 7 / 8), ("tiny", 5 / 8))  # font sizes relative to \\footnotesize
PACKAGES = "booktabs,longtable,array,siunitx,adjustbox"
PREAMBLE = "\n".join(
    [
        r"\usepackage[T1]{fontenc}",
        r"\usepackage{textcomp}",
        rf"\usepackage{{{PACKAGES}}}",
        r"\sisetup{detect-weight=true, mode=text, separate-uncertainty=true, group-minimum-digits=9}",
    ]
)
"""Preamble lines that a LaTeX document needs before it can include our tables."""
FIT_TO_WIDTH = r"\begin{adjustbox}{max width=\linewidth}"
"""Start of the box that shrinks a one-page table to the width of the line."""
NUMBER = re.compile(r"([+-]?)(\d+)(?:\.(\d+))?")
SPREAD = re.compile(rf"({NUMBER.pattern}){PLUS_MINUS}(\d+(?:\.\d+)?)")
AMPERSANDS = re.compile(r"(?<!\\)&")


def text(table: Table, *, trace: bool = True) -> str:
    """Return the table as LaTeX: a `table`, or a `longtable` that runs over pages.

    A table with `paged` and one of more than 40 rows is a `longtable`, every other a floating `table`. The first lines
    are comments that list the required preamble. The label is "tab:" and the table's number. With `trace` the last line
    is a comment with the trace.
    """
    headings = _headings(table)
    head = [r"\toprule", " & ".join(map(_stacked, headings)) + r" \\", r"\midrule"]
    columns = "{@{}" + "".join(_columns(table)) + "@{}}"
    # LaTeX counts tables by itself
    title = tex_breakable(table.title.removeprefix(f"Table {table.number}. "))
    caption = rf"\caption{{{title}}}\label{{tab:{re.sub(r'[^a-z0-9-]', '', table.number)}}}"
    notes = [rf"{{\par\smallskip\raggedright {tex_breakable(note)}\par}}" for note in table.notes]
    above = [rf"{{\raggedright {tex_breakable(note)}\par}}\smallskip" for note in table.above]
    small = [r"\begingroup\footnotesize\setlength{\tabcolsep}{3.5pt}"]
    if table.paged or len(table.rows) > MAX_ROWS_PER_PAGE:
        repeated = [*head, r"\endhead", r"\midrule", r"\endfoot", r"\bottomrule", r"\endlastfoot"]
        body = [rf"\begin{{longtable}}{columns}", caption + r"\\", *head, r"\endfirsthead", *repeated]
        lines = [*small, *above, _sized(table, headings), *body, *_rows(table), r"\end{longtable}", *notes]
        lines.append(r"\par\endgroup")
    else:
        begin = [r"\begin{table}[htbp]\centering", *small, caption, *above, FIT_TO_WIDTH]
        body = [*begin, rf"\begin{{tabular}}{columns}", *head]
        end = [r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}"]
        lines = [*body, *_rows(table), *end, *notes, r"\par\endgroup", r"\end{table}"]
    needs = [f"% needs {line}" for line in PREAMBLE.splitlines()]
    return "\n".join([*needs, *lines, *([f"% {TRACE} {trace_text(table)}"] if trace else [])]) + "\n"


def tex_breakable(text: str) -> str:
    """Return the text escaped for LaTeX, with break points in long words.

    A word (between spaces) of more than 24 characters may break after every 12. Level names of a plugin can be longer
    than a column and contain nothing else to break at.
    """

    def pieces(word: str) -> str:
        cut = [word[start : start + BREAK_EVERY] for start in range(0, len(word), BREAK_EVERY)]
        return r"\hspace{0pt}".join(map(tex_escaped, cut)) if len(word) > MAX_WORD_CHARS else tex_escaped(word)

    return " ".join(map(pieces, text.split(" ")))


def _headings(table: Table) -> list[list[str]]:
    """Return the lines of each column's heading, wrapped to about the width of the column's entries; not escaped.

    A line has up to as many characters as the longest entry or word, but at least 12 and at most 24. An empty heading
    is one empty line.
    """
    headings = []
    for index, heading in enumerate(table.columns):
        below = max((len(row[index]) for row in table.rows), default=0)
        word = max(map(len, heading.split()), default=0)
        headings.append(textwrap.wrap(heading, min(MAX_WORD_CHARS, max(BREAK_EVERY, below, word))) or [""])
    return headings


def _stacked(lines: list[str]) -> str:
    """Return a heading of these lines as one LaTeX cell."""
    # braces keep a leading bracket from reading as an argument of the \\ before it
    text = r"\\".join("{" + tex_escaped(line) + "}" for line in lines) if len(lines) > 1 else tex_escaped(lines[0])
    return "{" + (rf"\shortstack{{{text}}}" if len(lines) > 1 else text) + "}"


def _sized(table: Table, headings: list[list[str]]) -> str:
    """Return LaTeX that switches to a smaller font (scriptsize, tiny) where a longtable would be wider than the line.

    No box can shrink a longtable. Its width is estimated from the number of characters of its columns; LaTeX decides
    when it knows the width of the line.

    Args:
        table: The table.
        headings: Lines of each column's heading.
    """
    width = 0.0
    for index, lines in enumerate(headings):
        longest = max((len(row[index]) for row in table.rows), default=0)
        sentence = index < table.text_columns and longest >= MIN_SENTENCE_CHARS
        below = min(longest, MAX_WORD_CHARS) if index >= table.text_columns else longest
        signs = max(*map(len, lines), 0 if sentence else below)
        width += max(signs * SIGN, WIDEST_COLUMN * 28.5 if sentence else 0) + APART
    size_switches = ""
    for (size, _), share in zip(SIZES, (1.0, SIZES[0][1]), strict=True):
        size_switches += rf"\ifdim{width * share:.0f}pt>\linewidth\{size}\fi"
    return size_switches


def _columns(table: Table) -> list[str]:
    """Return the LaTeX column type of each column.

    A label column has `l`, or a paragraph 5 cm wide if any of its texts has 40 characters or more. A number column has
    `S[table-format=...]` (siunitx), or `r` if none of its texts is a plain number.
    """
    kinds = []
    for index in range(len(table.columns)):
        texts = [row[index] for row in table.rows]
        if index < table.text_columns:
            longest = max(map(len, texts), default=0)
            kinds.append(
                "l" if longest < MIN_SENTENCE_CHARS else rf">{{\raggedright\arraybackslash}}p{{{WIDEST_COLUMN}cm}}"
            )
            continue
        shape = _number_format(texts)
        # siunitx leaves an explicit plus out unless it is told to print every one
        plus = ", print-implicit-plus" if shape and shape.startswith("+") else ""
        kinds.append(f"S[table-format={shape}{plus}]" if shape else "r")
    return kinds


def _number_format(texts: Iterable[str]) -> str | None:
    """Return the siunitx `table-format` that holds every number of a column; None where it has no number.

    Texts that are no plain number, with or without a spread, are ignored.

    Args:
        texts: Printed texts of the column.
    """
    sign, integer_digits, decimals, spread = "", 0, 0, 0
    for text in texts:
        spread_match = SPREAD.fullmatch(text)
        number = NUMBER.fullmatch(spread_match[1] if spread_match else text)
        if number is None:
            continue
        sign = max(sign, number[1], key=["", "-", "+"].index)
        integer_digits, decimals = max(integer_digits, len(number[2])), max(decimals, len(number[3] or ""))
        if spread_match:
            spread = max(spread, len(spread_match[SPREAD.groups].replace(".", "").lstrip("0")) or 1)
    if not integer_digits:
        return None
    return f"{sign}{integer_digits}.{decimals}" + (f"({spread})" if spread else "")


def _rows(table: Table) -> list[str]:
    r"""Return the table's rows as lines of LaTeX, labels first, each ending in \\, the best values in bold."""
    best = table.best

    def line(r: int, row: tuple[str, ...]) -> str:
        # braces keep a leading bracket from reading as an argument of the \\ before it
        labels = ["{" + tex_breakable(text) + "}" for text in row[: table.text_columns]]
        numbers = [_number(text, (r, c) in best) for c, text in enumerate(row) if c >= table.text_columns]
        return " & ".join([*labels, *numbers]) + r" \\"

    return [line(r, row) for r, row in enumerate(table.rows)]


def _number(text: str, best: bool) -> str:
    """Return the entry of an S column.

    A plain number is returned as it is, with its spread after "+-". Any other text, and a number with a spread of zero,
    is in braces, so that siunitx does not parse it; a long one is a paragraph.

    Args:
        text: Printed text.
        best: Whether it is bold.
    """
    spread = SPREAD.fullmatch(text)
    # siunitx omits a spread of zero, which is information too, so such a number is written as text
    if NUMBER.fullmatch(text) or (spread and spread[SPREAD.groups].strip("0.")):
        return (r"\bfseries " if best else "") + text.replace(PLUS_MINUS, " +- ")
    text_in_braces = (r"\bfseries " if best else "") + tex_breakable(text)
    # a sentence among numbers takes several lines
    return (
        rf"{{\parbox[t]{{2.6cm}}{{\raggedright {text_in_braces}}}}}"
        if len(text) > MAX_WORD_CHARS
        else "{" + text_in_braces + "}"
    )


def rows(written: str) -> list[list[str]]:
    """Return the headings and the rows of a LaTeX rendering, each cell as LaTeX source."""
    lines = [line for line in written.splitlines() if line.endswith(r" \\")]
    rows = [[cell.strip() for cell in AMPERSANDS.split(line.removesuffix(r"\\"))] for line in lines]
    # a longtable repeats its headings
    return rows[:1] + rows[2:] if len(rows) > 1 and rows[0] == rows[1] else rows


def trace_of(written: str) -> Any:
    """Return the trace that the rendering carries; None where it has none.

    Raises:
        ValueError: The trace is not JSON.
    """
    return parse_trace_comment(written)
