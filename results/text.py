"""Text that came from outside, made fit for where it goes: one function for each kind of exit.

A name, a level, a host, the cause of a failure, a path, an attempt's log: a grid, a plugin, another machine or a bundle
may have put anything into them. Nothing of it may move a terminal's cursor, end a comment, become a formula of a
spreadsheet, or tell a password. JSON alone keeps every character, since its own rules make all of them safe.
"""

from __future__ import annotations

import difflib
import html
import re
import unicodedata
from collections.abc import Iterable

HIDDEN = "***"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# user:password@ of an address; up to the last @, since a password that nobody encoded may hold one
_USER = re.compile(r"(//[^\s/?#:@'\"]*:)\S*(?=@)")
_PASSWORD = re.compile(r"(?i)(\b\w*(?:password|passwd|passphrase|pwd)\w*\s*=\s*)('[^']*'|\"[^\"]*\"|[^\s&;'\"]+)")
_SECRET = re.compile(r"(?i)([?&][\w.%-]*(?:pass|pwd|secret|token|key|sig|credential)[\w.%-]*=)[^\s&#'\"]+")

# what programs send to terminals: colours and movements, titles and links, single letters
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\-~]")
_BREAK = re.compile(r"\s*[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
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
}


def without_passwords(text: str) -> str:
    """The text with every password in it as ***: of `//user:password@host`, of `password=...`, of `?token=...`."""
    if "@" in text:
        text = _USER.sub(rf"\1{HIDDEN}", text)
    return _SECRET.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1{HIDDEN}", text)) if "=" in text else text


def _visible(text: str, kept: str = "") -> str:
    if text.isprintable():
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


def paragraphs(text: str) -> str:
    """For a terminal: as `plain`, but newlines and tabs stay; an old line end becomes a new one."""
    return _visible(_LINE_END.sub("\n", without_passwords(text)), "\n\t")


def printed(text: str) -> str:
    """For what another program printed, its log: as `paragraphs`, without the colours and movements that it asked for."""
    return paragraphs(_SEQUENCE.sub("", text))


def html_escaped(text: str) -> str:
    """For HTML and XML, between tags and in quoted attributes."""
    return html.escape(plain(text))


def markdown_escaped(text: str) -> str:
    """For GitHub Markdown: no markup, no HTML, no column break."""
    safe = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", safe)


def tex_escaped(text: str) -> str:
    """For LaTeX, every special character spelled out, and hyphens and marks that it would join kept apart."""
    return "".join(map(_tex_sign, plain(text))).replace("--", "-{}-").replace("--", "-{}-").replace(",,", ",{},")


def _tex_sign(sign: str) -> str:
    if sign in _TEX:
        return _TEX[sign]
    # pdflatex stops at a sign that no font of ours has: its code point is shown instead
    return sign if sign.isascii() or "\u00c0" <= sign <= "\u00ff" else f"[U+{ord(sign):04X}]"


def csv_cell(text: str) -> str:
    """For a cell of CSV, before it is quoted: newlines and tabs stay, and text that a spreadsheet would calculate gets an
    apostrophe before it.

    That is text which begins with = + - @ or a tab, spaces aside, and is neither a number as we print one nor a lone sign.
    """
    safe = paragraphs(text)
    risky = safe.lstrip(" \n").startswith(_FORMULA) and not _NUMBER.fullmatch(safe)
    return f"'{safe}" if risky else safe


def json_safe(text: str) -> str:
    """JSON for a terminal: the same value, with what steers a terminal written as \\uXXXX."""
    if text.isprintable():
        return text
    return "".join(sign if sign in "\n" or sign.isprintable() else _code(sign) for sign in text)


def _code(sign: str) -> str:
    units = sign.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text that may hold some from outside, on standard output or standard error."""
    import typer

    typer.echo(paragraphs(text), err=err, nl=nl)


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word most like `word`, or None when none is near."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return near[0] if near else None


def choice(word: str, allowed: Iterable[str]) -> str:
    """For the end of an error about a word that is none of the allowed: these, and the nearest."""
    known = list(allowed)
    near = nearest(word, known)
    return f"choose one of: {', '.join(known)}" + (f"; did you mean {near}?" if near else "")
