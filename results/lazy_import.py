"""A module that is imported when something of it is first asked for: NumPy takes a command a tenth of a second."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Stands for the module of that name; where types are checked, the module itself is imported in its place."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        found = getattr(importlib.import_module(self._name), key)
        setattr(self, key, found)  # the next time without this call
        return found
