"""Parameters of a test of which the first tier takes some, and the second the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def shared_out(every: Iterable[Any], first: Callable[[Any], bool]) -> list[Any]:
    """All of them, those marked thorough that `first` refuses."""
    return [
        one if first(one) else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.thorough)
        for one in every
    ]
