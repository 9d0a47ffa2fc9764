"""A table as LaTeX, its trace in a last line that is a comment; and the rows of one that was written."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from ...results.console.text import tex_escaped
from ..number_format import PLUS_MINUS
from ..table import Table
from .trace import TRACE, parse_trace_comment, trace_text

MANY_ROWS = 40  # a LaTeX table with more goes over pages
WIDEST_COLUMN = 5  # centimetres of LaTeX that a column of sentences gets
MIN_SENTENCE_CHARS = 40  # characters that make a column of words one of sentences
MAX_WORD_CHARS = 24  # characters of a word among numbers, or of a heading, beyond which it takes several lines
BREAK_EVERY = 12  # characters, after which a word of more than NARROW may break
SIGN, APART = 4.4, 7.0  # points that a character takes in \\footnotesize, and that keep columns apart
SIZES = (("scriptsize", 7 / 8), ("tiny", 5 / 8))  # of letters smaller than \\footnotesize
PACKAGES = "booktabs,longtable,array,siunitx,adjustbox"
PREAMBLE = "\n".join(
    [
        r"\usepackage[T1]{fontenc}",
        r"\usepackage{textcomp}",
        rf"\usepackage{{{PACKAGES}}}",
        r"\sisetup{detect-weight=true, mode=text, separate-uncertainty=true, group-minimum-digits=9}",
    ]
)
"""What a LaTeX document needs before it can take our tables."""
FIT_TO_WIDTH = r"\begin{adjustbox}{max width=\linewidth}"
"""A table on one page is made as small as its widest row asks for."""
NUMBER = re.compile(r"([+-]?)(\d+)(?:\.(\d+))?")
SPREAD = re.compile(rf"({NUMBER.pattern}){PLUS_MINUS}(\d+(?:\.\d+)?)")
AMPERSANDS = re.compile(r"(?<!\\)&")


def text(table: Table, *, trace: bool = True) -> str:
    headings = _headings(table)
    head = [r"\toprule", " & ".join(map(_stacked, headings)) + r" \\", r"\midrule"]
    columns = "{@{}" + "".join(_columns(table)) + "@{}}"
    # LaTeX counts tables by itself
    title = tex_breakable(table.title.removeprefix(f"Table {table.number}. "))
    caption = rf"\caption{{{title}}}\label{{tab:{re.sub(r'[^a-z0-9-]', '', table.number)}}}"
    notes = [rf"{{\par\smallskip\raggedright {tex_breakable(note)}\par}}" for note in table.notes]
    above = [rf"{{\raggedright {tex_breakable(note)}\par}}\smallskip" for note in table.above]
    small = [r"\begingroup\footnotesize\setlength{\tabcolsep}{3.5pt}"]
    if table.paged or len(table.rows) > MANY_ROWS:
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
    """For LaTeX, which may break a word of more than NARROW signs: a stranger's level may have no other place for it."""

    def pieces(word: str) -> str:
        cut = [word[place : place + BREAK_EVERY] for place in range(0, len(word), BREAK_EVERY)]
        return r"\hspace{0pt}".join(map(tex_escaped, cut)) if len(word) > MAX_WORD_CHARS else tex_escaped(word)

    return " ".join(map(pieces, text.split(" ")))


def _headings(table: Table) -> list[list[str]]:
    """By column, the lines of its heading: not much wider than what stands below."""
    found = []
    for index, heading in enumerate(table.columns):
        below = max((len(row[index]) for row in table.rows), default=0)
        word = max(map(len, heading.split()), default=0)
        found.append(textwrap.wrap(heading, min(MAX_WORD_CHARS, max(BREAK_EVERY, below, word))) or [""])
    return found


def _stacked(lines: list[str]) -> str:
    # braces keep a leading bracket from reading as an argument of the \\ before it
    words = r"\\".join("{" + tex_escaped(line) + "}" for line in lines) if len(lines) > 1 else tex_escaped(lines[0])
    return "{" + (rf"\shortstack{{{words}}}" if len(lines) > 1 else words) + "}"


def _sized(table: Table, headings: list[list[str]]) -> str:
    """Smaller letters where a table over pages, which no box can hold, would be wider than the line: about how wide it is, by the
    signs of its columns."""
    width = 0.0
    for index, lines in enumerate(headings):
        longest = max((len(row[index]) for row in table.rows), default=0)
        sentence = index < table.text_columns and longest >= MIN_SENTENCE_CHARS
        below = min(longest, MAX_WORD_CHARS) if index >= table.text_columns else longest
        signs = max(*map(len, lines), 0 if sentence else below)
        width += max(signs * SIGN, WIDEST_COLUMN * 28.5 if sentence else 0) + APART
    words = ""
    for (size, _), share in zip(SIZES, (1.0, SIZES[0][1]), strict=True):
        words += rf"\ifdim{width * share:.0f}pt>\linewidth\{size}\fi"
    return words


def _columns(table: Table) -> list[str]:
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
    """The siunitx `table-format` that holds every number of a column, None where there is no number in it."""
    sign, whole, decimals, spread = "", 0, 0, 0
    for text in texts:
        found = SPREAD.fullmatch(text)
        number = NUMBER.fullmatch(found[1] if found else text)
        if number is None:
            continue
        sign = max(sign, number[1], key=["", "-", "+"].index)
        whole, decimals = max(whole, len(number[2])), max(decimals, len(number[3] or ""))
        if found:
            spread = max(spread, len(found[SPREAD.groups].replace(".", "").lstrip("0")) or 1)
    if not whole:
        return None
    return f"{sign}{whole}.{decimals}" + (f"({spread})" if spread else "")


def _rows(table: Table) -> list[str]:
    best = table.best

    def line(r: int, row: tuple[str, ...]) -> str:
        # braces keep a leading bracket from reading as an argument of the \\ before it
        words = ["{" + tex_breakable(text) + "}" for text in row[: table.text_columns]]
        numbers = [_number(text, (r, c) in best) for c, text in enumerate(row) if c >= table.text_columns]
        return " & ".join([*words, *numbers]) + r" \\"

    return [line(r, row) for r, row in enumerate(table.rows)]


def _number(text: str, best: bool) -> str:
    """An entry of an S column: a number as it is, words in braces, so that siunitx leaves them alone."""
    spread = SPREAD.fullmatch(text)
    # siunitx leaves out a spread of zero, which is a statement too: written as words
    if NUMBER.fullmatch(text) or (spread and spread[SPREAD.groups].strip("0.")):
        return (r"\bfseries " if best else "") + text.replace(PLUS_MINUS, " +- ")
    words = (r"\bfseries " if best else "") + tex_breakable(text)
    # a sentence among numbers takes several lines
    return rf"{{\parbox[t]{{2.6cm}}{{\raggedright {words}}}}}" if len(text) > MAX_WORD_CHARS else "{" + words + "}"


def rows(written: str) -> list[list[str]]:
    """The headings and the rows, each cell as it is written."""
    lines = [line for line in written.splitlines() if line.endswith(r" \\")]
    found = [[cell.strip() for cell in AMPERSANDS.split(line.removesuffix(r"\\"))] for line in lines]
    # a longtable says its headings twice
    return found[:1] + found[2:] if len(found) > 1 and found[0] == found[1] else found


def trace_of(written: str) -> Any:
    """The trace that it carries, None without any. Raises ValueError where it is no JSON."""
    return parse_trace_comment(written)
