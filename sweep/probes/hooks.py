"""What parts of a network read and write while it evaluates, without changing it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn


@contextlib.contextmanager
def evaluations(parts: Sequence[nn.Module], look: Callable[..., None]) -> Iterator[None]:
    """Inside, `look` is told of every call of a part's `evaluate`: its place in the list, then the arguments of the call.

    The part's own answer stays as it is.
    """

    def watch(place: int, part: Any) -> None:
        plain = part.evaluate

        def evaluate(*args: Any, **options: Any) -> Any:
            look(place, *args, **options)
            return plain(*args, **options)

        vars(part)["evaluate"] = evaluate

    try:
        for place, part in enumerate(parts):
            watch(place, part)
        yield
    finally:
        for part in parts:
            vars(part).pop("evaluate", None)
