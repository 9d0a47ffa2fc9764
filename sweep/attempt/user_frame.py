"""The line of the user's own code that an exception came from, whether Python, the compiler or autograd raised it."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_QUOTED = re.compile(r'File "([^"\n]+)", line (\d+)')
_FROZEN = re.compile(r"^[0-9a-f]{12}_(?=.)")
"""What a copy of a plugin has before the name of the file that it was made from."""


def user_frame(error: BaseException) -> str | None:
    """Return `file.py:12` of the innermost frame outside this package, Python's library and installed packages.

    The frames of the exception come first, then those of the exceptions that it was raised from, then the frames that
    their messages quote, as torch's compiler quotes them for code that it traces. A plugin runs from a copy; the name is
    that of its own file, whose lines are the same. None when no such frame exists.
    """
    chain = list(_chain(error))
    for raised in chain:
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(raised.__traceback__)]
        if (location := _innermost(frames)) is not None:
            return location
    for raised in chain:
        frames = [(file, int(line)) for file, line in _QUOTED.findall(str(raised))]
        if (location := _innermost(frames)) is not None:
            return location
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and those that it was raised from, each once."""
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _innermost(frames: list[tuple[str, int]]) -> str | None:
    for file, line in reversed(frames):
        if _is_users(file):
            return f"{_FROZEN.sub('', Path(file).name)}:{line}"
    return None


def _is_users(file: str) -> bool:
    """Return whether a source file is the user's: one on disk that neither we nor Python nor an installer put there."""
    path = Path(file)
    if _FROZEN.match(path.name) and path.parent.name == "plugins":
        return True  # wherever the runs folder lies, within a checkout of this package for instance
    if not path.is_absolute() or _INSTALLED.search(file):
        return False
    libraries = [PACKAGE, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))]
    return path.is_file() and not any(path.resolve().is_relative_to(library) for library in libraries)
