"""Sizes and dtypes of the omega memory's kernels, known without Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHANNELS = (16, 32, 64, 128)
"""Head sizes that the kernels take."""
MAX_PAIRS = 128
"""Largest number of pairs, a chunk and the window before it, that the kernels take."""
MAX_CHUNK_TOKENS = 64
"""Largest number of tokens of a chunk that the kernels take."""


class Sizes(NamedTuple):
    """Sizes of a launch.

    b rows, t queries of a row, h heads, x head size, n chunks, c tokens of a chunk, s pairs that a chunk sees.
    """

    b: int
    t: int
    h: int
    x: int
    n: int
    c: int
    s: int

    @property
    def heads(self) -> int:
        """G, heads of all rows."""
        return self.b * self.h

    @property
    def pair_tile(self) -> int:
        """Pairs of a tile: 32 and not 64, since 79 pairs take three tiles of 32 but two of 64."""
        return 16 if self.s <= 16 else 32

    @property
    def padded_pairs(self) -> int:
        """S rounded up to whole tiles."""
        return -(-self.s // self.pair_tile) * self.pair_tile

    @property
    def token_tile(self) -> int:
        """Rows of a chunk's tile, a power of two of at least 16."""
        return max(16, 1 << (self.c - 1).bit_length())


def sizes(q_BTHX: Tensor, k_BSHX: Tensor, memory_decay: Tensor) -> Sizes:
    """Return the sizes of a launch; S, the pairs that a chunk sees, is its tokens and those before the first query.

    Args:
        q_BTHX: Queries.
        k_BSHX: Keys, those of the window before included: window - 1 more tokens than q.
        memory_decay: A coefficient [N, G, C], which gives the numbers of chunks and of their tokens.
    """
    b, t, h, x = q_BTHX.shape
    n, _, c = memory_decay.shape
    return Sizes(b, t, h, x, n, c, k_BSHX.shape[1] - t + c)


def operands(dtype: torch.dtype, orthogonal: bool) -> torch.dtype:
    """Return the dtype of the tensor cores' operands for activations of a dtype.

    float32 stays; 16-bit activations take float16 with orthogonal steps, else bfloat16.
    """
    if dtype == torch.float32:
        return dtype
    return torch.float16 if orthogonal else torch.bfloat16
