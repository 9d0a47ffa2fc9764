"""Stand-in for a CUDA graph on the CPU: operations recorded once, run again over the same memory with the same numbers.

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
        result = func(*args, **kwargs)
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [one if one.untyped_storage().data_ptr() not in inputs else None for one in outputs]
        self.entries.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        """Every operation once more; its results go where they first lay."""
        with torch.no_grad():
            for func, args, kwargs, outputs in self.entries:
                tensors = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for output, result in zip(outputs, tensors, strict=True):
                    if output is not None:
                        output.copy_(result)


def as_tapes(updated: list[Tensor]) -> Callable[[Mapping[str, Piece]], Mapping[str, Piece]]:
    """Captures pieces as tapes. `updated`: everything that lives from step to step, put back behind, since capturing does no work."""

    def capture(pieces: Mapping[str, Piece]) -> Mapping[str, Piece]:
        before = [tensor.detach().clone() for tensor in updated]
        tapes: dict[str, Piece] = {}
        try:
            for name, piece in pieces.items():
                with Tape() as tape:
                    piece()
                tapes[name] = tape.replay
        finally:
            with torch.no_grad():
                for tensor, value in zip(updated, before, strict=True):
                    tensor.copy_(value)
        return tapes

    return capture
