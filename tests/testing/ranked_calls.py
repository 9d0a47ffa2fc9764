"""Calls of every method of a group, for a test that runs them on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from atma_sweep.sweep.ranks.group import Ranks


class Unpicklable(Exception):
    """An error that cannot be read back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def every_call(ranks: Ranks) -> dict[str, Any]:
    """Call every method of the group once or more and return what each gave."""

    def tensor() -> torch.Tensor:
        return torch.tensor([1.0, 10.0], dtype=torch.float64) * (ranks.rank + 1)

    mine: list[int] = []

    def square(item: int) -> int:
        mine.append(item)
        return item**2

    def fail(item: int) -> int:
        if item in (4, 5):
            raise ValueError(f"item {item}")
        return item

    def fail_oddly(item: int) -> int:
        if item == 1:
            raise Unpicklable("cannot", "travel")
        return item

    def error_of(function: Any, items: int) -> str:
        try:
            ranks.map(function, range(items))
        except Exception as error:  # noqa: BLE001 - its name is the result
            name = type(error).__name__
            return f"{name}: {error}" if name != "Unpicklable" else f"RankFailed: {name} on rank {ranks.rank}: {error}"
        return "no error"

    reduced, sent = tensor(), tensor()
    works = [ranks.reduce_async(reduced, 2), ranks.broadcast_async(sent, 1)]
    for work in works:
        assert work is not None
        work.wait()
    return {
        "agree": ranks.agree({"rank": ranks.rank}),
        "number": ranks.agree_number(2**40 + ranks.rank),
        "sum": ranks.sum_(tensor()).tolist(),
        "max": ranks.max_(tensor()).tolist(),
        "reduce": reduced.tolist(),
        "broadcast": sent.tolist(),
        "gathered": ranks.gather_objects(ranks.rank),
        "map": ranks.map(square, range(8)),
        "mine": mine,
        "few": ranks.map(str, "a"),
        "first": ranks.first(lambda: (ranks.rank, "only rank 0")),
        "error": error_of(fail, 8),
        "odd": error_of(fail_oddly, 3),
        "afterwards": ranks.map(int, range(3)),
    }
