"""Mixers whose plain path scores some queries at a time."""

from __future__ import annotations

from torch import Tensor

from ...kernels.shapes import query_block
from ..bases import Mixed, Mixer


class InBlocks(Mixer):
    """A mixer whose `forward` also takes `block`, the number of queries that it scores at a time."""

    def evaluate(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, chunk: int, **read: Tensor
    ) -> Mixed:
        """`forward` with as many queries at a time as keep the scores within what a chunk may hold."""
        block = query_block(chunk, *q_BTHX.shape[:2])
        mixed: Mixed = self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, block=block, **read)
        return mixed
