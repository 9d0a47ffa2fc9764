"""Table as LaTeX, with its trace as a comment in the last line; and functions that read a rendering back."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from ...results.console.text import sanitize_line, tex_escaped
from ..number_format import PLUS_MINUS
from ..table import Table
from .column_heads import ColumnHead, column_heads, row_blocks
from .trace import TRACE, parse_trace_comment, trace_text

MAX_ROWS_PER_PAGE = 40  # a table with more lines becomes a longtable
MIN_PARTED_ROWS = 4  # mean number of rows between two little spaces, at least
MIN_SENTENCE_CHARS = 40  # characters from which on a text column counts as one of sentences
MIN_SENTENCE_SHARE = 0.12  # least share of the line for a column of sentences
MIN_LABEL_DIGITS = 13.0  # least width, in digits, to which label columns of a wide table are shortened
MAX_WORD_CHARS = 24  # characters beyond which a heading, or a text among numbers, takes several lines
BREAK = "\0"  # stands for a break point; no sanitized text contains it
BREAK_EVERY = 12  # characters after which a word of more than MAX_WORD_CHARS may break
CHAR_WIDTHS = {"ijlt.,:;!|'()[]/ I-": 0.65, "mwMW%@<>=~": 1.65, "ABCDEFGHJKLNOPQRSTUVXYZ+": 1.4, "acefgkrsvxyz": 0.92}
"""Widths of characters of Computer Modern and Times in digits; every other character is as wide as a digit."""
COLUMN_GAP = 6.0  # points between columns
SCRIPT_DIGIT_PT, FOOTNOTE_DIGIT_PT = 3.5, 4.0  # points: width of a digit of Times at \\scriptsize and \\footnotesize
LINE_PT = 520.6
"""Width in points of a line of 183 mm, the text width of the appendix and of a page in most journals."""
MAX_DIGITS = 3000.0  # largest width in digits that LaTeX can compute with
SIZES = ("scriptsize", "tiny")  # font sizes for tables wider than the line
PACKAGES = "booktabs,longtable,array,siunitx,adjustbox,threeparttable"
PREAMBLE = "\n".join(
    [
        r"\usepackage[T1]{fontenc}",
        r"\usepackage{textcomp}",
        rf"\usepackage{{{PACKAGES}}}",
        r"\sisetup{detect-weight=true, mode=text, separate-uncertainty=true, group-minimum-digits=9}",
    ]
)
"""Preamble lines that a LaTeX document needs before it can include our tables."""
FIT_TO_WIDTH = r"\begin{adjustbox}{max width=\linewidth,center}"
"""Start of the box that shrinks a one-page table to the width of the line."""
NOTES_START = r"\begin{tablenotes}[flushleft]\scriptsize\setlength{\itemsep}{0pt}\setlength{\labelsep}{0pt}"
ROWS_START, ROWS_END = "% rows", "% end of rows"
"""Comments around the rows of a table, between which `rows` reads them."""
NUMBER = re.compile(r"([+-]?)(\d+)(?:\.(\d+))?")
SPREAD = re.compile(rf"({NUMBER.pattern}){PLUS_MINUS}(\d+(?:\.\d+)?)")
BELOW = re.compile(r"<\d+\.\d+")
AMPERSANDS = re.compile(r"(?<!\\)&")
BLOCK = re.compile(r"\\multicolumn\{\d+\}\{@\{\}l\}\{\\itshape (.*)\} \\\\\*")
EXPLAINS_SPREAD = re.compile("Low, High|Means? (±|over)")
"""Beginnings of notes on intervals and standard deviations."""
SWEEP_NAMED = re.compile(r"Sweep (.+?, revision \d+)")


def text(table: Table, *, trace: bool = True) -> str:
    r"""Return the table as LaTeX: a `table` with notes below it, or a `longtable` that runs over pages.

    A table with `paged` and one of more than 40 lines is a `longtable`, every other a floating `table`. Adjacent columns
    with a common heading have it above them, with a \cmidrule, and units stand in a line of their own. The caption
    stands alone: title, sweep and what the numbers are. The first lines are comments that list the required preamble.
    The label is "tab:" and the table's number. With `trace` the last line is a comment with the trace.
    """
    heads, blocks = column_heads(table), row_blocks(table)
    layout, is_long = _layout(table, heads), _is_long(table)
    first = 1 if blocks else 0
    head = [r"\toprule", *_heading_lines(heads[first:]), r"\midrule"]
    columns = "{@{}" + "".join(_columns(table, layout)[first:]) + "@{}}"
    in_caption = caption_notes(table)
    notes = [tex_breakable(note) for note in table.notes if note not in in_caption]
    rows = [ROWS_START, *_rows(table, blocks), ROWS_END]
    small = rf"\{'scriptsize' if is_long else 'footnotesize'}\setlength{{\tabcolsep}}{{{COLUMN_GAP / 2}pt}}"
    small += r"\setlength{\abovecaptionskip}{4pt}\setlength{\belowcaptionskip}{4pt}"
    if is_long:
        begin = [rf"\begingroup{small}\setlength{{\LTcapwidth}}{{\linewidth}}", _sized(layout)]
        begin += [r"\renewcommand{\arraystretch}{0.93}", rf"\begin{{longtable}}{columns}", _caption(table) + r"\\"]
        body = [*head, r"\endfirsthead", *head, r"\endhead", r"\midrule", r"\endfoot", r"\bottomrule", r"\endlastfoot"]
        below = [rf"{{\scriptsize\raggedright {note}\par}}" for note in notes]
        lines = [*begin, *body, *rows, r"\end{longtable}", *below, r"\par\endgroup"]
    else:
        begin = [
            rf"\begin{{table}}\centering{small}",
            _caption(table),
            r"\renewcommand{\TPTminimum}{\linewidth}",
        ]
        begin += [
            _sized(layout),
            r"\begin{threeparttable}\centering",
            FIT_TO_WIDTH,
            rf"\begin{{tabular}}{columns}",
        ]
        below = [NOTES_START, *(rf"\item[] {note}" for note in notes), r"\end{tablenotes}"] if notes else []
        end = [r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}", *below, r"\end{threeparttable}", r"\end{table}"]
        lines = [*begin, *head, *rows, *end]
    needs = [f"% needs {line}" for line in PREAMBLE.splitlines()]
    return "\n".join([*needs, *lines, *([f"% {TRACE} {trace_text(table)}"] if trace else [])]) + "\n"


def tex_breakable(text: str) -> str:
    """Return the text escaped for LaTeX, with break points in long words.

    A part of a word (between spaces and hyphens) of more than 24 characters may break after every 12. Level names of a
    plugin can be longer than a column and contain nothing else to break at.
    """

    def pieces(part: str) -> str:
        if len(part) <= MAX_WORD_CHARS:
            return part
        return BREAK.join(part[start : start + BREAK_EVERY] for start in range(0, len(part), BREAK_EVERY))

    with_breaks = "".join(map(pieces, re.split("([- ])", sanitize_line(text))))
    return r"\hspace{0pt}".join(map(tex_escaped, with_breaks.split(BREAK)))


def needs_landscape(table: Table) -> bool:
    r"""Return True if a table at \scriptsize is wider than a line of 183 mm, by estimate."""
    return _layout(table, column_heads(table)).width_pt(SCRIPT_DIGIT_PT) > LINE_PT + 1


def _is_long(table: Table) -> bool:
    """Return True if a table runs over pages, in small letters: more than 40 lines, by estimate, or `paged`."""
    lines = (max(1.0, *(len(text) / MIN_SENTENCE_CHARS for text in row)) for row in table.rows)
    return table.paged or sum(lines) > MAX_ROWS_PER_PAGE


def title_and_sweep(table: Table) -> tuple[str, str]:
    """Return the title without number and sweep, and the sentence that names the sweep ("" if the title does)."""
    title = table.title.removeprefix(f"Table {table.number}. ")
    named = SWEEP_NAMED.match(table.notes[0]) if table.notes else None
    if named is None:
        return title, ""
    for suffix in (f", sweep {named[1]}", f" of sweep {named[1]}"):
        title = title.replace(suffix, "")
    return title, table.notes[0]


def caption_notes(table: Table) -> list[str]:
    """Return the notes that a caption needs to stand alone: sweep and cells, units, and what an interval or "±" is.

    They are the first two and those that begin as EXPLAINS_SPREAD; none where the first does not name the sweep.
    """
    if not title_and_sweep(table)[1]:
        return []
    return [*table.notes[:2], *(note for note in table.notes[2:] if EXPLAINS_SPREAD.match(note))]


def _caption(table: Table) -> str:
    """Return the caption, with a short form for the list of tables, and the label.

    After the title it has `caption_notes` and the lines above the table.
    """
    title = title_and_sweep(table)[0]
    sentences = [*caption_notes(table), *table.above]
    after = "".join(f" {tex_breakable(sentence)}" for sentence in sentences)
    label = re.sub(r"[^a-z0-9-]", "", table.number)
    return rf"\caption[{{{tex_breakable(title)}}}]{{\textbf{{{tex_breakable(title)}.}}{after}}}\label{{tab:{label}}}"


def _heading_lines(heads: Sequence[ColumnHead]) -> list[str]:
    r"""Return the lines of headings: common ones with a \cmidrule below each, labels, and units.

    The first and the last of these are left out where no column has any.
    """
    lines = []
    if any(head.span for head in heads):
        spans = [(span, list(columns)) for span, columns in groupby(enumerate(heads, 1), lambda pair: pair[1].span)]
        cells, rules = [], []
        for span, columns in spans:
            cells += [_spanning(span, len(columns))] if span else [""] * len(columns)
            rules += [rf"\cmidrule(lr){{{columns[0][0]}-{columns[-1][0]}}}"] if span else []
        lines += [" & ".join(cells) + r" \\", "".join(rules)]
    lines.append(" & ".join(_stacked(_wrapped(head.label)) for head in heads) + r" \\")
    if any(head.unit for head in heads):
        same = groupby(heads, lambda head: (head.span, head.unit) if head.span and head.unit else id(head))
        groups = [list(columns) for _, columns in same]
        lines.append(" & ".join(_spanning(columns[0].unit, len(columns)) for columns in groups) + r" \\")
    return lines


def _spanning(text: str, columns: int) -> str:
    """Return a LaTeX cell over several columns, or one of a single column in braces."""
    return rf"\multicolumn{{{columns}}}{{c}}{{{tex_escaped(text)}}}" if columns > 1 else f"{{{tex_escaped(text)}}}"


def _wrapped(label: str) -> list[str]:
    """Return the lines of a heading, of at most 12 characters or its longest word, up to 24; [""] for an empty one."""
    word = max(map(len, label.split()), default=0)
    return textwrap.wrap(label, min(MAX_WORD_CHARS, max(BREAK_EVERY, word))) or [""]


def _stacked(lines: list[str]) -> str:
    """Return a heading of these lines as one LaTeX cell."""
    # braces keep a leading bracket from reading as an argument of the \\ before it
    text = r"\\".join("{" + tex_escaped(line) + "}" for line in lines) if len(lines) > 1 else tex_escaped(lines[0])
    return "{" + (rf"\shortstack{{{text}}}" if len(lines) > 1 else text) + "}"


def _digits(text: str) -> float:
    """Return the width of a text in digits, by estimate."""
    return sum(next((width for chars, width in CHAR_WIDTHS.items() if char in chars), 1.0) for char in text)


@dataclass(frozen=True)
class _Layout:
    """Widths of a table's columns: in digits, or for paragraphs as shares of the line."""

    digits: list[float]
    """Width of each column without gaps; 0 for a paragraph, and for a first column that becomes lines among rows."""
    shares: dict[int, float]
    """Share of the line, gap included, of each column that is a paragraph."""
    gaps_pt: float
    """Sum of the gaps of the other columns in points."""

    def width_pt(self, digit_pt: float) -> float:
        """Return the width of the table in points on a line of 183 mm, with digits of this width."""
        return sum(self.digits) * digit_pt + sum(self.shares.values()) * LINE_PT + self.gaps_pt

    def with_paragraph(self, column: int, share: float) -> _Layout:
        """Return the layout with a column as a paragraph of a share of the line."""
        digits = [0.0 if index == column else width for index, width in enumerate(self.digits)]
        gaps_pt = self.gaps_pt - (COLUMN_GAP if column not in self.shares else 0.0)
        return _Layout(digits, {**self.shares, column: share}, gaps_pt)


def _layout(table: Table, heads: Sequence[ColumnHead]) -> _Layout:
    r"""Return the widths of a table's columns, estimated from their texts.

    Columns of sentences are paragraphs that share what the others leave of a line of 183 mm, by the square root of
    their text. In a table that is too wide for it at \scriptsize, label columns are paragraphs of at most the same
    width, as far as necessary.
    """
    digits, sentences = [], {}
    for index, head in enumerate(heads):
        texts = [row[index] for row in table.rows]
        is_text = index < table.text_columns
        if is_text and max(map(len, texts), default=0) >= MIN_SENTENCE_CHARS:
            sentences[index] = math.sqrt(sum(map(len, texts)))
        shown = texts if is_text else [text[:MAX_WORD_CHARS] for text in texts]
        digits.append(max(map(_digits, [*_wrapped(head.label), "" if head.span else head.unit, *shown])))
    is_blocked = bool(row_blocks(table))
    if is_blocked:
        digits[0] = 0.0
    layout = _Layout(digits, {}, COLUMN_GAP * (len(heads) - is_blocked))
    for index in sentences:
        layout = layout.with_paragraph(index, 0.0)
    free_share = 1 - layout.width_pt(SCRIPT_DIGIT_PT if _is_long(table) else FOOTNOTE_DIGIT_PT) / LINE_PT
    for index, weight in sentences.items():
        share = max(free_share * weight / sum(sentences.values()), MIN_SENTENCE_SHARE)
        layout = layout.with_paragraph(index, share)
    labels = [index for index in range(is_blocked, table.text_columns) if index not in sentences]
    cap = max((digits[index] for index in labels), default=0.0)
    wide = layout
    while wide.width_pt(SCRIPT_DIGIT_PT) > LINE_PT and cap > MIN_LABEL_DIGITS:
        cap -= 0.5
        wide = layout
        for index in labels:
            if digits[index] > cap:
                wide = wide.with_paragraph(index, (cap * SCRIPT_DIGIT_PT + COLUMN_GAP) / LINE_PT)
    return wide


def _sized(layout: _Layout) -> str:
    """Return LaTeX that switches to a smaller font (scriptsize, tiny) where a table would be wider than the line.

    LaTeX measures a digit of the font and the line, which differ between documents.

    Args:
        layout: Widths of the table's columns.
    """
    digits, share = min(sum(layout.digits), MAX_DIGITS), sum(layout.shares.values())
    width = rf"\dimexpr{digits:.1f}\fontcharwd\font`\0 +{share:.3f}\linewidth+{layout.gaps_pt:.0f}pt\relax"
    return "".join(rf"\ifdim{width}>\dimexpr\linewidth+1pt\relax\{size}\fi" for size in SIZES)


def _columns(table: Table, layout: _Layout) -> list[str]:
    """Return the LaTeX column type of each column.

    A label column has `l`, or a paragraph of a share of the line if it is too wide. A number column has `S[table-format=...]`
    (siunitx), or `r` if none of its texts is a plain number.
    """
    kinds = []
    for index in range(len(layout.digits)):
        if index >= table.text_columns:
            shape = _number_format(row[index] for row in table.rows)
            # siunitx leaves an explicit plus out unless it is told to print every one
            plus = ", print-implicit-plus" if shape and shape.lstrip("<").startswith("+") else ""
            kinds.append(f"S[table-format={shape}{plus}]" if shape else "r")
        elif index in layout.shares:
            share = layout.shares[index] - COLUMN_GAP / LINE_PT
            kinds.append(rf">{{\raggedright\arraybackslash}}p{{{share:.3f}\linewidth}}")
        else:
            kinds.append("l")
    return kinds


def _number_format(texts: Iterable[str]) -> str | None:
    """Return the siunitx `table-format` that holds every number of a column; None where it has no number.

    Texts that are no plain number, with or without a spread or "<" before it, are ignored.

    Args:
        texts: Printed texts of the column.
    """
    below, sign, integer_digits, decimals, spread = "", "", 0, 0, 0
    for text in texts:
        if BELOW.fullmatch(text):
            below, text = "<", text[1:]
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
    return f"{below}{sign}{integer_digits}.{decimals}" + (f"({spread})" if spread else "")


def _rows(table: Table, blocks: Sequence[tuple[str, int]]) -> list[str]:
    r"""Return the table's rows as lines of LaTeX, labels first, each ending in \\, the best values in bold.

    Args:
        table: The table.
        blocks: Blocks of rows (`row_blocks`); each begins with a line of its name, and its rows lack the first label.
            Without any, a little space parts rows where the first of several labels changes in a table over pages, if
            it seldom does.
    """
    best = table.best
    names = dict(zip(accumulate([0, *(size for _, size in blocks)]), (name for name, _ in blocks), strict=False))
    first = 1 if blocks else 0
    breaks = {r for r in range(1, len(table.rows)) if table.rows[r][0] != table.rows[r - 1][0]}
    if not table.paged or table.text_columns < 2 or len(breaks) * MIN_PARTED_ROWS > len(table.rows):
        breaks = set()
    lines = []
    for r, row in enumerate(table.rows):
        if r in names:
            lines += [r"\addlinespace[2pt]"] if r else []
            lines.append(rf"\multicolumn{{{len(row) - 1}}}{{@{{}}l}}{{\itshape {tex_breakable(names[r])}}} \\*")
        elif r in breaks:
            lines.append(r"\addlinespace[3pt]")
        # braces keep a leading bracket from reading as an argument of the \\ before it
        labels = ["{" + tex_breakable(text) + "}" for text in row[first : table.text_columns]]
        numbers = [_number(text, (r, c) in best) for c, text in enumerate(row) if c >= table.text_columns]
        lines.append(" & ".join([*labels, *numbers]) + r" \\")
    return lines


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
    if NUMBER.fullmatch(text) or BELOW.fullmatch(text) or (spread and spread[SPREAD.groups].strip("0.")):
        return (r"\bfseries " if best else "") + text.replace(PLUS_MINUS, " +- ")
    text_in_braces = (r"\bfseries " if best else "") + tex_breakable(text)
    # a sentence among numbers takes several lines
    return (
        rf"{{\parbox[t]{{2.6cm}}{{\raggedright {text_in_braces}}}}}"
        if len(text) > MAX_WORD_CHARS
        else "{" + text_in_braces + "}"
    )


def rows(written: str) -> list[list[str]]:
    """Return the headings and the rows of a LaTeX rendering, each cell as LaTeX source.

    The headings are their last line before the rows, without units. Rows below the line of a block begin with its name.
    """
    head, _, body = written.partition(f"{ROWS_START}\n")
    headings = [line for line in head.splitlines() if line.endswith(r" \\") and r"\multicolumn" not in line]
    block: list[str] = []
    rows = []
    for line in body.partition(f"{ROWS_END}\n")[0].splitlines():
        if match := BLOCK.fullmatch(line):
            block = [match[1]]
        elif line.endswith(r" \\"):
            rows.append([*block, *(cell.strip() for cell in AMPERSANDS.split(line.removesuffix(r"\\")))])
    labels = [[cell.strip() for cell in AMPERSANDS.split(line.removesuffix(r"\\"))] for line in headings[:1]]
    return [[*([""] if block else []), *line] for line in labels] + rows


def trace_of(written: str) -> Any:
    """Return the trace that the rendering carries; None where it has none.

    Raises:
        ValueError: The trace is not JSON.
    """
    return parse_trace_comment(written)
