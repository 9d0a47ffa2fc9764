"""Names of sweeps and corpora, of files called after them, and of levels: the only place that decides them."""

from __future__ import annotations

import re

DATABASE = "atma.db"
"""The database's file, in the working folder, where neither --db nor ATMA_DB names one."""
MAX_NAME_CHARS = 100
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
NAME_RULE = f"letters, digits, '.', '_' and '-', at most {MAX_NAME_CHARS}, of which the first is a letter or digit"
PUBLISHED_PREFIX = "printed-"
"""How the names of published numbers begin, and no other's."""
PUBLISHED = ("printed-v1", "printed-v2", "printed-v2-open-weight", "printed-tra", "printed-wall", "printed-atlas")
"""The sweeps of the paper's numbers, then those of its rivals; every reading command knows them, whatever the database holds."""
SHIPPED = ("replication-pilot", "replication-rates", "replication", "replication-longer", "replication-retrieval")
"""Sweeps of our own that come along (results/shipped); a sweep of that name in a database goes before."""
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,119}")
"""What is a file's name as it stands: every sweep's name, and the slug of nearly every cell."""
SHOWN = 60


def is_valid_name(name: object) -> bool:
    """Whether it is made of the letters that names are made of. Names of databases made earlier may be others."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def why_not(name: object) -> str | None:
    """Why a sweep of one's own cannot be called so, to follow the name in a message; None when it can."""
    if not is_valid_name(name):
        return f"is no name for a sweep: {NAME_RULE}"
    if str(name).lower().startswith(PUBLISHED_PREFIX):
        return f"is no name for a sweep of your own: {PUBLISHED_PREFIX}... are the numbers that the paper prints"
    return None


def quoted_short(text: object, longest: int = SHOWN) -> str:
    """Quoted for a message, and cut when it is longer than anybody reads."""
    text = str(text)
    return repr(text) if len(text) <= longest else f"{text[:longest]!r}... ({len(text)} letters)"


def is_utf8(text: str) -> bool:
    """Return whether a text can be written as UTF-8: that of a command line or a folder may hold bytes that are none."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def safe_file_name(name: str) -> str:
    """What a file or folder is called after `name`, whatever that is: the name itself where it can be.

    Else its letters that are allowed, at most 60, and a hash, so that different names never mean one file. Never
    empty, hidden, a path, or longer than 120 letters; an ending can follow.
    """
    if FILE.fullmatch(name):
        return name
    plain = re.sub(r"[^A-Za-z0-9._+=@-]+", "_", name)[:SHOWN].lstrip("._+=@-") or "unnamed"
    import hashlib  # every command imports this module

    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


SWITCHES = {"true": "on", "yes": "on", "on": "on", "false": "off", "no": "off", "off": "off"}


def level_word(level: object) -> str:
    """YAML's true/false and yes/no read as on/off, in any case; any other scalar as its text."""
    text = str(level)
    return SWITCHES.get(text.lower(), text)
