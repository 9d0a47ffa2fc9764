"""Sizes of the omega memory's kernels and of what they keep, known without Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHANNELS = (16, 32, 64, 128)
"""Of a head that the kernels take."""
MAX_PAIRS = 128
"""Pairs of a chunk and the window before it that they take."""
MAX_CHUNK_TOKENS = 64
"""Of a chunk."""


class Sizes(NamedTuple):
    """B, T, H, X, N, C and S as in `triton.py`."""

    b: int
    t: int
    h: int
    x: int
    n: int
    c: int
    s: int

    @property
    def heads(self) -> int:
        """G, of all rows."""
        return self.b * self.h

    @property
    def pair_tile(self) -> int:
        """Of a tile: 79 are three of 32, not two of 64."""
        return 16 if self.s <= 16 else 32

    @property
    def padded_pairs(self) -> int:
        """S in whole tiles."""
        return -(-self.s // self.pair_tile) * self.pair_tile

    @property
    def token_tile(self) -> int:
        """Rows of a chunk's tile: a power of two."""
        return max(16, 1 << (self.c - 1).bit_length())


def sizes(q_BTHX: Tensor, k_BSHX: Tensor, memory_decay: Tensor) -> Sizes:
    """Of queries, pairs (those of the window before among them) and a rate [N, G, C]."""
    b, t, h, x = q_BTHX.shape
    n, _, c = memory_decay.shape
    return Sizes(b, t, h, x, n, c, k_BSHX.shape[1] - t + c)


def operands(dtype: torch.dtype, orthogonal: bool) -> torch.dtype:
    """What the tensor cores are given for activations of that type."""
    if dtype == torch.float32:
        return dtype
    return torch.float16 if orthogonal else torch.bfloat16
