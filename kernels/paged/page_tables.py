"""Texts whose keys and values lie in pages of a common pool, so that texts of any length share it (docs/decoding.md).

Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (2023).

B texts, N pages of the pool, P pages that a text may have, S = P page tokens, J KV heads, X head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 256
"""Tokens of a page."""
DUMMY = 0
"""The page that belongs to no text: rows that only fill a batch up write there, and tables say it where a text has no page."""


@dataclass(frozen=True)
class Texts:
    """Which pages each text of a batch has, and how long it is. Tensors on the pool's device; no question to them waits for it."""

    tables_BP: Tensor
    """int32: page of the tokens 0 to page - 1, of the next ones, ...; what is not needed any more may be DUMMY."""
    lengths_B: Tensor
    """int32: tokens, the new one included; 0 for a row that only fills the batch up."""
    page: int = PAGE

    @property
    def last(self) -> Tensor:
        """int64: row of the flat pool [N page, ...] where the new token belongs."""
        at_B = (self.lengths_B.long() - 1).clamp(min=0)
        pages_B = self.tables_BP.long().gather(1, (at_B // self.page)[:, None])[:, 0]
        return pages_B * self.page + at_B % self.page

    def write(self, pool: Tensor, rows: Tensor) -> None:
        """Puts `rows` [B, ...], of the new tokens, into the pool [N, page, ...]."""
        pool.flatten(0, 1).index_copy_(0, self.last, rows.to(pool.dtype))

    def gather(self, pool: Tensor) -> Tensor:
        """[B, S, ...] of a pool [N, page, ...]: a copy; what lies beyond a text, or in no page of it, is any number."""
        return pool[self.tables_BP.long()].flatten(1, 2)

    def seen(self, window: int | None) -> Tensor:
        """bool [B, S]: the keys that the new token sees."""
        tokens = self.tables_BP.shape[1] * self.page
        at_S = torch.arange(tokens, device=self.lengths_B.device)
        seen_BS = at_S < self.lengths_B[:, None]
        return seen_BS if window is None else seen_BS & (at_S >= self.lengths_B[:, None] - window)

    @property
    def distance(self) -> Tensor:
        """int64: tokens from each key to the new one; below 0 beyond the text."""
        at_S = torch.arange(self.tables_BP.shape[1] * self.page, device=self.lengths_B.device)
        return self.lengths_B.long()[:, None] - 1 - at_S

    def counts(self, window: int | None) -> Tensor:
        """int32 [B]: keys that the new token sees; 0 in a row that only fills the batch up."""
        return self.lengths_B if window is None else self.lengths_B.clamp(max=window)


def check_step(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, texts: Texts) -> tuple[int, int, int, int]:
    """(B, H, J, X); raises ValueError when query, pools and tables do not belong together."""
    if q_BHX.ndim != 3 or k_pool.ndim != 4:
        raise ValueError(
            f"q must be [B, H, X] and a pool [N, page, J, X], got {tuple(q_BHX.shape)}, {tuple(k_pool.shape)}"
        )
    b, h, x = q_BHX.shape
    if k_pool.shape != v_pool.shape or k_pool.shape[1] != texts.page or k_pool.shape[3] != x:
        raise ValueError(
            f"q has shape {tuple(q_BHX.shape)}, but the pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)} in pages of {texts.page}"
        )
    if len(texts.tables_BP) != b or texts.lengths_B.shape != (b,):
        raise ValueError(
            f"q has {b} rows, but the tables {len(texts.tables_BP)} and the lengths {len(texts.lengths_B)}"
        )
    if h % k_pool.shape[2]:
        raise ValueError(f"{k_pool.shape[2]} KV heads must divide {h} query heads")
    return b, h, k_pool.shape[2], x
