"""Page tables of texts whose keys and values lie in pages of a common pool (docs/explanation/decoding.md).

Texts of any length share the pool. Kwon et al., "Efficient memory management for large language model serving with
PagedAttention" (2023).

B texts, N pages of the pool, P pages that a text may have, S = P page tokens, J KV heads, X head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 256
"""Tokens of a page by default."""
DUMMY = 0
"""Page that belongs to no text.

Padding rows of a batch write there, and tables hold it where a text has no page.
"""


@dataclass(frozen=True)
class Texts:
    """Page tables and lengths of the texts of a decode batch.

    Token t of text b lies in row t % page of pool page tables_BP[b, t // page]. The tensors lie on the pool's device;
    no accessor waits for the device.
    """

    tables_BP: Tensor
    """int32: pages of the tokens 0 to page - 1, of the next ones and so on; DUMMY where a page is not needed any more.
    """
    lengths_B: Tensor
    """int32: tokens, the new one included; 0 for a padding row of the batch."""
    page: int = PAGE

    def write_rows(self, rows_per_page: int | None = None) -> Tensor:
        """Return the index of the new token's row in the flat pool [N rows_per_page, ...], int64 [B].

        For length 0 it is that of the first row of the table's first page.

        Args:
            rows_per_page: Rows of a page of the pool, a divisor of `page`: page / rows_per_page tokens share a row.
                None: a row per token.
        """
        rows_per_page = rows_per_page or self.page
        at_B = (self.lengths_B.long() - 1).clamp(min=0)
        pages_B = self.tables_BP.long().gather(1, (at_B // self.page)[:, None])[:, 0]
        return pages_B * rows_per_page + at_B % self.page // (self.page // rows_per_page)

    def write(self, pool: Tensor, rows: Tensor) -> None:
        """Write `rows` [B, ...], of the new tokens, into the pool [N, rows, ...] in place, in the pool's dtype.

        A page of the pool has a row per token, or fewer, which consecutive tokens share. A padding row of length 0 is
        written to the first row of its table's first page.
        """
        pool.flatten(0, 1).index_copy_(0, self.write_rows(pool.shape[1]), rows.to(pool.dtype))

    def gather(self, pool: Tensor) -> Tensor:
        """Return a copy of each text's rows of a pool, [B, S, ...]; values beyond a text's length are arbitrary.

        A pool with fewer rows per page than tokens gives as many fewer rows.
        """
        return pool[self.tables_BP.long()].flatten(1, 2)

    def visible_keys(self, window: int | None) -> Tensor:
        """Return bool [B, S]: True for the keys that the new token sees, its own included.

        Args:
            window: Number of keys that it sees at most; None for all of the text.
        """
        tokens = self.tables_BP.shape[1] * self.page
        at_S = torch.arange(tokens, device=self.lengths_B.device)
        seen_BS = at_S < self.lengths_B[:, None]
        return seen_BS if window is None else seen_BS & (at_S >= self.lengths_B[:, None] - window)

    @property
    def distance(self) -> Tensor:
        """int64 [B, S]: tokens from each key to the new one; negative beyond the text."""
        at_S = torch.arange(self.tables_BP.shape[1] * self.page, device=self.lengths_B.device)
        return self.lengths_B.long()[:, None] - 1 - at_S

    def visible_counts(self, window: int | None) -> Tensor:
        """Return int32 [B]: number of keys that the new token sees, 0 in a padding row."""
        return self.lengths_B if window is None else self.lengths_B.clamp(max=window)


def check_step(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, texts: Texts) -> tuple[int, int, int, int]:
    """Return (B, H, J, X) of a decoding step, after a check of all shapes; contents are not read.

    Args:
        q_BHX: Queries of the new tokens.
        k_pool: Keys [N, page, J, X].
        v_pool: Values, like `k_pool`.
        texts: Page tables and lengths of the texts.

    Raises:
        ValueError: Query, pools and tables do not belong together, or J does not divide H.
    """
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
