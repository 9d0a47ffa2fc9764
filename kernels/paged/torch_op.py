"""The kernels of a step as torch ops, so that torch.compile keeps one graph (docs/decoding.md).

B texts, N pages, P pages of a text, H query heads, J KV heads, X head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_ops import load_kernels, torch_op


def _empty_results(q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, lengths: Tensor, null: list[Tensor],
                   *_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, h = q.shape[:2]
    return q.new_empty(q.shape), q.new_empty(b, h if null else 0, dtype=torch.float32)


@torch_op("paged_attend", _empty_results)
def attend(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor, null: list[Tensor],
    scale: float, window: int, floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y [B, H, X], magnitude [B, H] float32, empty without `null`); `window` 0 is none."""
    return load_kernels(__package__).attend(
        q_BHX, k_pool, v_pool, tables_BP, lengths_B, null, scale=scale, window=window, floor=floor
    )


@torch_op("paged_put", lambda *_: None, ("k_pool", "v_pool"))
def put(k_BJX: Tensor, v_BJX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor) -> None:
    """Keys and values of the new tokens into their pages."""
    load_kernels(__package__).put(k_BJX, v_BJX, k_pool, v_pool, tables_BP, lengths_B)
