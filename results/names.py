"""Rules for names of sweeps, corpora, files and levels."""

from __future__ import annotations

import re

DATABASE = "atma.db"
"""Database file in the working folder, used if neither --db nor ATMA_DB names one."""
MAX_NAME_CHARS = 100
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
NAME_RULE = f"letters, digits, '.', '_' and '-', at most {MAX_NAME_CHARS}, of which the first is a letter or digit"
PUBLISHED_PREFIX = "printed-"
"""Prefix of the names of published sweeps, reserved for them."""
PUBLISHED = ("printed-v1", "printed-v2", "printed-v2-open-weight", "printed-tra", "printed-wall", "printed-atlas")
"""Sweeps with the paper's numbers, then those of rival papers; every reading command can show them."""
SHIPPED = (
    "replication-pilot", "replication-rates", "replication", "replication-longer", "replication-retrieval",
    "headline-370m", "rivals-fla",
)  # fmt: skip
"""Sweeps that come with the program (results/shipped); a sweep of that name in a database has precedence."""
SAFE_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,119}")
"""Names that are used as file names unchanged: every sweep's name, and the slug of nearly every cell."""
MAX_SHOWN_CHARS = 60


def is_valid_name(name: object) -> bool:
    """Return True if the name has only allowed characters and length. Names in older databases may be others."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def sweep_name_problem(name: object) -> str | None:
    """Return the reason why a user's sweep cannot have the name, to follow the name in a message.

    None for a valid name. Names of published sweeps are refused; whether a sweep of the name exists is not examined.
    """
    if not is_valid_name(name):
        return f"is not a valid sweep name: {NAME_RULE}"
    if str(name).lower().startswith(PUBLISHED_PREFIX):
        return f"is not available as a sweep name: {PUBLISHED_PREFIX}... is reserved for the paper's numbers"
    return None


def quoted_short(text: object, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return the text quoted for a message, as by repr.

    Text of more than `max_chars` characters is cut to that many, followed by "..." and its length.
    """
    text = str(text)
    return repr(text) if len(text) <= max_chars else f"{text[:max_chars]!r}... ({len(text)} letters)"


def is_utf8(text: str) -> bool:
    """Return True if a text can be written as UTF-8.

    Text from a command line or a folder may contain undecodable bytes.
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def safe_file_name(name: str) -> str:
    """Return a file or folder name for any name: the name itself if it is safe.

    Otherwise at most 60 allowed characters of it and a hash, so that different names hardly ever give the same file
    name. The result is never empty, hidden, a path, or longer than 120 characters; a suffix may be appended.
    """
    if SAFE_FILE_NAME.fullmatch(name):
        return name
    plain = re.sub(r"[^A-Za-z0-9._+=@-]+", "_", name)[:MAX_SHOWN_CHARS].lstrip("._+=@-") or "unnamed"
    import hashlib  # every command imports this module

    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


SWITCHES = {"true": "on", "yes": "on", "on": "on", "false": "off", "no": "off", "off": "off"}


def normalized_level(level: object) -> str:
    """Return the level as text, with YAML's true/false, yes/no and on/off (in any case) as `on` or `off`.

    Other levels keep their case.
    """
    text = str(level)
    return SWITCHES.get(text.lower(), text)
