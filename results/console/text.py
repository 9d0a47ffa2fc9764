"""Sanitizing of untrusted text, with one function per destination, and helpers for messages.

A grid, a plugin, another machine or a bundle may have put anything into a name, a level, a host, the cause of a
failure, a path or a log. None of it may move the cursor of a terminal, end a comment, become a formula of a
spreadsheet, or reveal a password. Only JSON keeps every character, since its own escapes make them safe.
"""

from __future__ import annotations

import difflib
import html
import re
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

from .streams import terminal_width, write_out

HIDDEN = "***"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Repetitions are bounded, so that hostile text takes time in proportion to its length.
# user:password@ of an address; up to the last @, since an unencoded password may contain one
_USER = re.compile(r"(//[^\s/?#:@'\"]{0,200}:)\S{0,256}(?=@)")
_PASSWORD = re.compile(
    r"(?i)(\b\w{0,40}?(?:password|passwd|passphrase|pwd)\w{0,40}\s{0,4}=\s{0,4})('[^']*'|\"[^\"]*\"|['\"]?[^\s&;'\"]+)"
)
_SECRET_NAME = re.compile(r"(?i)pass(?!file)|pwd|secret|token|key|sig|credential")
_SECRET = re.compile(
    rf"(?i)([?&][\w.%-]{{0,40}}(?:{_SECRET_NAME.pattern.removeprefix('(?i)')})[\w.%-]{{0,40}}=)[^\s&#'\"]+"
)

# escape sequences for terminals: colours and movements, titles and links, single letters
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\-~]")
_UNFINISHED = re.compile(
    r"(?:\x1b(?:\[[0-?]*[ -/]*|[\]P^_X][^\x07\x1b]{0,500}\x1b?|[ -/]*)|\r|\S{0,200}(?://|=)\S{0,500}|(?i:\w*pass\w*)\s{0,3})\Z"
)
_BREAK = re.compile(r"[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029]+")
_LINE_END = re.compile(r"\r+\n|[\r\v\f\x85\u2028\u2029]")
_STEERING = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_COLUMN_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
MAX_HANGING_SHARE = 0.6
"""Largest share of a terminal's width at which continuation lines may begin."""
_FORMULA = ("=", "+", "-", "@", "\t", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four: full width
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?: ± \d+(?:\.\d+)?)?(?: \(n=\d+\))?|[+-]")
_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "±": r"\textpm{}",
    "×": r"\texttimes{}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "²": r"\texttwosuperior{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{
        sign: rf"\ensuremath{{\{name}}}"
        for sign, name in zip(
            "βγδηλμσ√≤≥∞∝≈",
            ("beta", "gamma", "delta", "eta", "lambda", "mu", "sigma", "surd", "le", "ge", "infty", "propto", "approx"),
            strict=True,
        )
    },
    "−": r"\ensuremath{-}",
}


def without_passwords(text: str) -> str:
    """Return the text with every password replaced by ***.

    It recognizes `//user:password@host`, `password=...` (and similar names), and parameters of a URL such as
    `?token=...`.
    """
    if "@" in text:
        text = _USER.sub(rf"\1{HIDDEN}", text)
    return _SECRET.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1{HIDDEN}", text)) if "=" in text else text


def is_secret(name: str) -> bool:
    """Return True if a setting of a URL with that name holds a password or a key."""
    return _SECRET_NAME.search(name) is not None


def _replace_control_characters(text: str, allowed: tuple[str, ...] = ()) -> str:
    """Return the text with every control or formatting character replaced, except those in `allowed`.

    Each becomes U+FFFD. Private, unassigned and surrogate characters are replaced, too.
    """
    rest = text
    for sign in allowed:
        rest = rest.replace(sign, "")
    if rest.isprintable():
        return text
    return "".join(
        sign if sign in allowed or unicodedata.category(sign) not in _STEERING else REPLACEMENT for sign in text
    )


def sanitize_line(text: str) -> str:
    """Return one line without passwords and control characters, for table entries, names in sentences and titles.

    Control characters, escapes and marks that change the writing direction become replacement characters; line breaks
    become spaces. XML and HTML can contain the result; `html_escaped` escapes their special characters.
    """
    text = without_passwords(text)
    return text if text.isprintable() else _replace_control_characters(_BREAK.sub(" ", text))


def sanitize_sentence(text: str) -> str:
    """Return one line as `sanitize_line`, with single spaces, for error messages."""
    return " ".join(sanitize_line(text).split())


def sanitize_text(text: str) -> str:
    """Return text for a terminal: without passwords and control characters.

    Newlines and tabs stay, other line ends become newlines.
    """
    return _replace_control_characters(_LINE_END.sub("\n", without_passwords(text)), ("\n", "\t"))


def sanitize_log(text: str) -> str:
    """Return the output of another program for a terminal: as `sanitize_text`, without colours and cursor movements."""
    return sanitize_text(_SEQUENCE.sub("", text))


def storable_text(text: str) -> str:
    """Return the text with what a database cannot store replaced: lone surrogates by `?`, NUL characters by U+FFFD."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def html_escaped(text: str) -> str:
    """Return one sanitized line for HTML and XML, between tags and in quoted attributes."""
    return html.escape(sanitize_line(text))


def markdown_escaped(text: str) -> str:
    """Return one sanitized line for GitHub Markdown: markup, HTML, table columns, math and entities are escaped."""
    safe = sanitize_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", safe)


def tex_escaped(text: str) -> str:
    """Return one sanitized line for LaTeX, with special characters escaped and ligatures prevented."""
    return re.sub(r"([-,])(?=\1)", r"\1{}", "".join(map(_tex_sign, sanitize_line(text))))


def _tex_sign(sign: str) -> str:
    if sign in _TEX:
        return _TEX[sign]
    # pdflatex stops at a character that its fonts lack; the code point is shown instead
    return sign if sign.isascii() or "\u00c0" <= sign <= "\u00ff" else f"[U+{ord(sign):04X}]"


def csv_field(text: str) -> str:
    """Return sanitized text for a CSV field, before quoting; newlines and tabs stay.

    Text that a spreadsheet would evaluate gets an apostrophe before it. That is text that begins (after spaces) with =
    + - @ or a tab, and is neither a number in this program's format nor a single + or -.
    """
    safe = sanitize_text(text)
    risky = safe.lstrip(" \n").startswith(_FORMULA) and not _NUMBER.fullmatch(safe)
    return f"'{safe}" if risky else safe


def json_safe(text: str) -> str:
    """Return JSON text with every unprintable character except line breaks written as a JSON escape of its code.

    The value is the same. The input must be valid JSON, in which such characters only occur inside strings.
    """
    # line by line, since nearly all lines are completely printable
    return "\n".join(line if line.isprintable() else _escape_line(line) for line in text.split("\n"))


def _escape_line(line: str) -> str:
    return "".join(sign if sign.isprintable() else _json_escape(sign) for sign in line)


def _json_escape(sign: str) -> str:
    units = sign.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


_WITHOUT_TEXT = frozenset({int, float, bool, type(None)})


def sanitize_all(value: Any, sanitize: Callable[[str], str] = sanitize_line) -> Any:
    """Return the value with a function applied to every text in it, including keys of mappings.

    Lists, tuples, named tuples, sets, mappings (which become dicts) and dataclasses (their init fields) are searched
    and copied; other values are returned unchanged. Keys that become equal collapse into one.
    """
    if type(value) in _WITHOUT_TEXT:
        return value
    if isinstance(value, str):
        return sanitize(value)
    if isinstance(value, Mapping):
        return {sanitize_all(key, sanitize): sanitize_all(element, sanitize) for key, element in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(sanitize_all(element, sanitize) for element in value)
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(sanitize_all(element, sanitize) for element in value)
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: safe for name, unsafe in old.items() if (safe := sanitize_all(unsafe, sanitize)) is not unsafe}
        return replace(value, **new)
    return value


class TextStream(Protocol):
    """Destination of text: standard output, or any object with these two methods."""

    def write(self, text: str, /) -> Any:
        """Write text."""

    def flush(self) -> Any:
        """Make the written text visible."""


class LogSanitizer:
    """TextStream that forwards the output of another program through `sanitize_log`.

    Escape sequences and passwords are recognized across several writes, so that the end of a write may be held back
    until the next one or `close`.
    """

    def __init__(self, out: TextStream) -> None:
        self._out, self._rest = out, ""

    def write(self, text: str, /) -> None:
        """Forward the text except an end that may continue in the next call; it stays held back until then."""
        text = self._rest + text
        last = max(0, len(text) - 800)
        match = _UNFINISHED.search(text, last)
        cut = match.start() if match else len(text)
        self._rest = text[cut:]
        self._out.write(sanitize_log(text[:cut]))

    def flush(self) -> None:
        """Flush the forwarded text; an end that was held back stays so."""
        self._out.flush()

    def close(self) -> None:
        """Forward the rest and flush; the destination stays open."""
        self._out.write(sanitize_log(self._rest))
        self._rest = ""
        self.flush()


def fold(text: str, width: int | None) -> str:
    """Return text with the lines that are wider than `width` continued on further lines, broken between words only.

    Continuation lines begin below the last column of the line, which a gap of two or more spaces starts, unless that
    is in the right part of the terminal; without columns they are indented by two more characters. A long word, such as
    a path, moves them to the left where it needs the place; one that is wider than the terminal stays whole.

    Args:
        text: lines; each fitting one is unchanged.
        width: characters per line; None for no limit.
    """
    if width is None:
        return text
    folded: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            folded.append(line)
            continue
        columns = [gap.end() for gap in _COLUMN_GAP.finditer(line) if gap.end() <= width * MAX_HANGING_SHARE]
        indent = columns[-1] if columns else len(line) - len(line.lstrip()) + 2
        longest = max(map(len, line.split()))
        indent = indent if longest > width else min(indent, width - longest)
        folded += textwrap.wrap(
            line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False,
            expand_tabs=False,
        )  # fmt: skip
    return "\n".join(folded)


def echo_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print sanitized text on standard output or standard error, with a newline unless `nl` is False.

    On a terminal, complete lines are folded to its width; in a pipe or file every line stays as it is.
    """
    safe = sanitize_text(text)
    if nl:
        safe = fold(safe, terminal_width(sys.stderr if err else sys.stdout)) + "\n"
    write_out(safe, err=err)


def closest_match(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word most similar to `word`; None if none has a similarity (difflib) of 0.5 or more."""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(word: str, allowed: Iterable[str], *, most: int = 1, shown: Callable[[str], str] = str) -> str:
    """Return the end of an error about a word that is not allowed, such as "; did you mean a, b or c?".

    It names the most similar words, best first; "" if none has a similarity (difflib) of 0.5 or more.

    Args:
        word: word that is not allowed.
        allowed: allowed words.
        most: maximum number of words to name.
        shown: formats a word, such as repr.
    """
    similar = [shown(name) for name in difflib.get_close_matches(word, list(allowed), n=most, cutoff=0.5)]
    return f"; did you mean {' or '.join(filter(None, (', '.join(similar[:-1]), similar[-1])))}?" if similar else ""


def choices_hint(word: str, allowed: Iterable[str]) -> str:
    """Return the end of an error about a word that is not allowed: the allowed words and the most similar one."""
    choices = list(allowed)
    return f"choose one of: {', '.join(choices)}{did_you_mean(word, choices)}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return the number and its noun, in the plural unless the number is 1: `1 cell`, `1,200 cells`.

    Args:
        number: count, written with commas between thousands.
        noun: noun in the singular.
        plural: its plural, if it is not formed with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
