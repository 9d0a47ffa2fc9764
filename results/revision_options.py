"""Reading of options that a launch stored with its revision; the database is not trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Read = TypeVar("Read")


def read_option(options: object, key: str, parse: Callable[[Mapping[str, Any]], Read | None]) -> Read | None:
    """Return `parse(options[key])`; None if the key is missing, its value is no mapping, or `parse` raises an error.

    KeyError, TypeError and ValueError count as an invalid value.

    Args:
        options: options of a stored revision; anything but a mapping counts as empty.
        key: key of the option.
        parse: function that returns the parsed value, or None for an invalid one.
    """
    value = options.get(key) if isinstance(options, Mapping) else None
    try:
        return parse(value) if isinstance(value, Mapping) else None
    except (KeyError, TypeError, ValueError):
        return None
