"""Text that came from outside, made fit for where it goes: one function for each kind of exit; and words for messages.

A name, a level, a host, the cause of a failure, a path, an attempt's log: a grid, a plugin, another machine or a bundle
may have put anything into them. Nothing of it may move a terminal's cursor, end a comment, become a formula of a
spreadsheet, or tell a password. JSON alone keeps every character, since its own rules make all of them safe.
"""

from __future__ import annotations

import difflib
import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

from .streams import write_out

HIDDEN = "***"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Whatever repeats is bounded, so that hostile text costs time in proportion to its length.
# user:password@ of an address; up to the last @, since a password that nobody encoded may hold one
_USER = re.compile(r"(//[^\s/?#:@'\"]{0,200}:)\S{0,256}(?=@)")
_PASSWORD = re.compile(
    r"(?i)(\b\w{0,40}?(?:password|passwd|passphrase|pwd)\w{0,40}\s{0,4}=\s{0,4})('[^']*'|\"[^\"]*\"|['\"]?[^\s&;'\"]+)"
)
_SECRET_NAME = re.compile(r"(?i)pass(?!file)|pwd|secret|token|key|sig|credential")
_SECRET = re.compile(
    rf"(?i)([?&][\w.%-]{{0,40}}(?:{_SECRET_NAME.pattern.removeprefix('(?i)')})[\w.%-]{{0,40}}=)[^\s&#'\"]+"
)

# what programs send to terminals: colours and movements, titles and links, single letters
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\-~]")
_UNFINISHED = re.compile(
    r"(?:\x1b(?:\[[0-?]*[ -/]*|[\]P^_X][^\x07\x1b]{0,500}\x1b?|[ -/]*)|\r|\S{0,200}(?://|=)\S{0,500}|(?i:\w*pass\w*)\s{0,3})\Z"
)
_BREAK = re.compile(r"[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029]+")
_LINE_END = re.compile(r"\r+\n|[\r\v\f\x85\u2028\u2029]")
_STEERING = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
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
            "βγδηλμσ√≤≥∞",
            ("beta", "gamma", "delta", "eta", "lambda", "mu", "sigma", "surd", "le", "ge", "infty"),
            strict=True,
        )
    },
    "−": r"\ensuremath{-}",
}


def without_passwords(text: str) -> str:
    """The text with every password in it as ***: of `//user:password@host`, of `password=...`, of `?token=...`."""
    if "@" in text:
        text = _USER.sub(rf"\1{HIDDEN}", text)
    return _SECRET.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1{HIDDEN}", text)) if "=" in text else text


def is_secret(name: str) -> bool:
    """Whether a setting of an address by that name holds a password or a key."""
    return _SECRET_NAME.search(name) is not None


def _visible(text: str, kept: tuple[str, ...] = ()) -> str:
    rest = text
    for sign in kept:
        rest = rest.replace(sign, "")
    if rest.isprintable():
        return text
    return "".join(
        sign if sign in kept or unicodedata.category(sign) not in _STEERING else REPLACEMENT for sign in text
    )


def plain(text: str) -> str:
    """For a cell of a table, a name in a sentence, a title: one line without passwords, and without a character that steers
    (control characters, escapes, marks that turn the direction of writing), which becomes a replacement character.

    XML and HTML can hold all that is left; what has a meaning in them is escaped by `html_escaped`.
    """
    text = without_passwords(text)
    return text if text.isprintable() else _visible(_BREAK.sub(" ", text))


def sentence(text: str) -> str:
    """For an error: as `plain`, with single spaces."""
    return " ".join(plain(text).split())


def sanitize_text(text: str) -> str:
    """For a terminal: as `plain`, but newlines and tabs stay; an old line end becomes a new one."""
    return _visible(_LINE_END.sub("\n", without_passwords(text)), ("\n", "\t"))


def printed(text: str) -> str:
    """For what another program printed, its log: as `sanitize_text`, without the colours and movements that it asked for."""
    return sanitize_text(_SEQUENCE.sub("", text))


def storable_text(text: str) -> str:
    """The text without what a database cannot hold: NUL (PostgreSQL) and undecodable bytes, as lone surrogates (both)."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def html_escaped(text: str) -> str:
    """For HTML and XML, between tags and in quoted attributes."""
    return html.escape(plain(text))


def markdown_escaped(text: str) -> str:
    """For GitHub Markdown: no markup, no HTML, no column break."""
    safe = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", safe)


def tex_escaped(text: str) -> str:
    """For LaTeX, every special character spelled out, and hyphens and marks that it would join kept apart."""
    return re.sub(r"([-,])(?=\1)", r"\1{}", "".join(map(_tex_sign, plain(text))))


def _tex_sign(sign: str) -> str:
    if sign in _TEX:
        return _TEX[sign]
    # pdflatex stops at a sign that no font of ours has: its code point is shown instead
    return sign if sign.isascii() or "\u00c0" <= sign <= "\u00ff" else f"[U+{ord(sign):04X}]"


def csv_field(text: str) -> str:
    """For a cell of CSV, before it is quoted: newlines and tabs stay, and text that a spreadsheet would calculate gets an
    apostrophe before it.

    That is text which begins with = + - @ or a tab, spaces aside, and is neither a number as we print one nor a lone sign.
    """
    safe = sanitize_text(text)
    risky = safe.lstrip(" \n").startswith(_FORMULA) and not _NUMBER.fullmatch(safe)
    return f"'{safe}" if risky else safe


def json_safe(text: str) -> str:
    """JSON for a terminal: the same value, with what steers a terminal written as \\uXXXX."""
    # line by line, since nearly all are printable as a whole
    return "\n".join(line if line.isprintable() else _coded(line) for line in text.split("\n"))


def _coded(line: str) -> str:
    return "".join(sign if sign.isprintable() else _code(sign) for sign in line)


def _code(sign: str) -> str:
    units = sign.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


_WITHOUT_TEXT = frozenset({int, float, bool, type(None)})


def sanitize_all(value: Any, word: Callable[[str], str] = plain) -> Any:
    """The value with `word` around every text in it, keys too: of lists, tuples, sets, mappings and dataclasses."""
    if type(value) in _WITHOUT_TEXT:
        return value
    if isinstance(value, str):
        return word(value)
    if isinstance(value, Mapping):
        return {sanitize_all(key, word): sanitize_all(one, word) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(sanitize_all(one, word) for one in value)
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(sanitize_all(one, word) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        old = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        new = {name: made for name, one in old.items() if (made := sanitize_all(one, word)) is not one}
        return replace(value, **new)
    return value


class TextStream(Protocol):
    """Where text goes: standard output, or anything with these two."""

    def write(self, text: str, /) -> Any:
        """Takes text, any amount of it."""

    def flush(self) -> Any:
        """Lets it be seen."""


class LogSanitizer:
    """An Out that hands on what another program printed as `printed` makes it, whole sequences and passwords at a time."""

    def __init__(self, out: TextStream) -> None:
        self._out, self._rest = out, ""

    def write(self, text: str, /) -> None:
        """Hands on all but an end that may belong to what comes next."""
        text = self._rest + text
        last = max(0, len(text) - 800)
        found = _UNFINISHED.search(text, last)
        cut = found.start() if found else len(text)
        self._rest = text[cut:]
        self._out.write(printed(text[:cut]))

    def flush(self) -> None:
        """Lets be seen what was handed on."""
        self._out.flush()

    def close(self) -> None:
        """Hands on the rest."""
        self._out.write(printed(self._rest))
        self._rest = ""
        self.flush()


def echo_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text that may hold some from outside, on standard output or standard error."""
    write_out(sanitize_text(text) + ("\n" if nl else ""), err=err)


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word most like `word`, or None when none is near."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return near[0] if near else None


def did_you_mean(word: str, allowed: Iterable[str], *, most: int = 1, shown: Callable[[str], str] = str) -> str:
    """Return the end of an error about a word that is not allowed: the nearest words, or "" without any.

    Args:
        word: The word that is not known.
        allowed: Words that are.
        most: Number of words to name at most.
        shown: Writes a word, such as repr.
    """
    near = [shown(name) for name in difflib.get_close_matches(word, list(allowed), n=most, cutoff=0.5)]
    return f"; did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?" if near else ""


def choices_hint(word: str, allowed: Iterable[str]) -> str:
    """For the end of an error about a word that is none of the allowed: these, and the nearest."""
    known = list(allowed)
    return f"choose one of: {', '.join(known)}{did_you_mean(word, known)}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return the number and its noun, the noun in the plural unless the number is 1: `1 cell`, `1,200 cells`.

    Args:
        number: How many there are; thousands are set apart by commas.
        noun: What is counted, in the singular.
        plural: Its plural, for a noun that does more than take an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
