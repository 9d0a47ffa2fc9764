"""Type checks of the arguments of the documented Python functions."""

from __future__ import annotations

import numbers
import os
from typing import Any

TEXT = (str,)
PATH = (str, os.PathLike)
NUMBER = (numbers.Real,)
COUNT = (numbers.Integral,)
FLAG = (bool,)
_TYPE_TEXTS: dict[tuple[type, ...], str] = {
    TEXT: "a str", PATH: "a str or a path", NUMBER: "a number", COUNT: "an int", FLAG: "True or False",
}  # fmt: skip


def check_argument(function: str, name: str, value: Any, kind: tuple[type, ...], *, optional: bool = False) -> None:
    """Raise TypeError unless a value has one of the allowed types, or is None and optional.

    Numbers of NumPy count as numbers; NaN and negative numbers pass.

    Args:
        function: name of the function as a user calls it, for the message.
        name: name of the parameter, for the message.
        value: its value; a bool does not count as a number.
        kind: TEXT (str), PATH (str or os.PathLike), NUMBER (real), COUNT (integer) or FLAG (bool).
        optional: None is allowed.
    """
    good = isinstance(value, kind) and (kind == FLAG or not isinstance(value, bool))
    if good or (optional and value is None):
        return
    expected = _TYPE_TEXTS[kind] + (" or None" if optional else "")
    shown = ascii(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise TypeError(f"{function}: {name} must be {expected}, got {type(value).__name__} {shown}")
