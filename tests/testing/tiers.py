"""Parameters of a test of which the first tier takes some, and the second the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def _later(parameters: Any) -> Any:
    return pytest.param(*(parameters if isinstance(parameters, tuple) else (parameters,)), marks=pytest.mark.thorough)


def shared_out(every: Iterable[Any], first: Callable[[Any], bool]) -> list[Any]:
    """Return all parameters, those marked thorough that `first` refuses."""
    return [parameters if first(parameters) else _later(parameters) for parameters in every]


def every_nth(every: Iterable[Any], n: int) -> list[Any]:
    """Return all parameters; the first tier takes one of `n`."""
    return [_later(parameters) if index % n else parameters for index, parameters in enumerate(every)]


def long_form(*more: Any) -> tuple[Any, ...]:
    """Parameters of the long form alone, ATMA_LONG=1: what repeats a path of another parameter and takes a minute or two."""
    return more if os.environ.get("ATMA_LONG") else ()


def only_long(test: Any) -> Any:
    """A test of the long form alone: what takes a minute or two and ends in what shorter tests hold one by one. Outermost decorator."""
    return test if os.environ.get("ATMA_LONG") else None
