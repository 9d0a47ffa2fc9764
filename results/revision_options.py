"""What a launch stored with its revision, read again: whoever wrote the database is not trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Read = TypeVar("Read")


def read_option(options: object, key: str, read: Callable[[Mapping[str, Any]], Read | None]) -> Read | None:
    """What `read` makes of the part of a revision's options under `key`; None where there is none, or where it is not what `read` expects."""
    found = options.get(key) if isinstance(options, Mapping) else None
    try:
        return read(found) if isinstance(found, Mapping) else None
    except (KeyError, TypeError, ValueError):
        return None
