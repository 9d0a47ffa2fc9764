"""What a CUDA graph does, on the CPU: operations written down once, done again over the same memory with the same numbers.

Whatever a piece of work takes from Python while it is written down, a learning rate or a draw, stays in it for ever; so what a
graph would get wrong, a tape gets wrong too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Piece = Callable[[], None]


class Tape(TorchDispatchMode):
    """Writes down every operation that is done under it."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.nonzero.default:
            # the words of CUDA
            raise RuntimeError(f"operation not permitted when stream is capturing\n{func}")
        made = func(*args, **kwargs)
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        outputs = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        fresh = [one if one.untyped_storage().data_ptr() not in given else None for one in outputs]
        self.entries.append((func, args, kwargs, fresh))
        return made

    def replay(self) -> None:
        """Every operation once more; its results go where they first lay."""
        with torch.no_grad():
            for func, args, kwargs, places in self.entries:
                made = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
                for place, result in zip(places, made, strict=True):
                    if place is not None:
                        place.copy_(result)


def as_tapes(kept: list[Tensor]) -> Callable[[Mapping[str, Piece]], Mapping[str, Piece]]:
    """Captures pieces as tapes. `kept`: everything that lives from step to step, put back behind, since capturing does no work."""

    def capture(pieces: Mapping[str, Piece]) -> Mapping[str, Piece]:
        before = [one.detach().clone() for one in kept]
        made: dict[str, Piece] = {}
        try:
            for name, piece in pieces.items():
                with Tape() as tape:
                    piece()
                made[name] = tape.replay
        finally:
            with torch.no_grad():
                for one, value in zip(kept, before, strict=True):
                    one.copy_(value)
        return made

    return capture
