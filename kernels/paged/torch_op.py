"""The kernels of a step as torch ops, so that torch.compile keeps one graph (docs/decoding.md).

B texts, N pages, P pages of a text, H query heads, J KV heads, X head size.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def _kernels() -> Any:
    """The module with the Triton kernels, which is imported where it is used alone."""
    return importlib.import_module(".triton", __package__)


@torch.library.custom_op("atma::paged_attend", mutates_args=())
def attend(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor, null: list[Tensor],
    scale: float, window: int, floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y [B, H, X], magnitude [B, H] float32, empty without `null`); `window` 0 is none."""
    found: tuple[Tensor, Tensor] = _kernels().attend(
        q_BHX, k_pool, v_pool, tables_BP, lengths_B, null, scale=scale, window=window, floor=floor
    )
    return found


@attend.register_fake
def _(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor, null: list[Tensor],
      scale: float, window: int, floor: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, h, _ = q_BHX.shape
    return q_BHX.new_empty(q_BHX.shape), q_BHX.new_empty(b, h if null else 0, dtype=torch.float32)


@torch.library.custom_op("atma::paged_put", mutates_args=("k_pool", "v_pool"))
def put(k_BJX: Tensor, v_BJX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor) -> None:
    """Keys and values of the new tokens into their pages."""
    _kernels().put(k_BJX, v_BJX, k_pool, v_pool, tables_BP, lengths_B)


@put.register_fake
def _(k_BJX: Tensor, v_BJX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor) -> None:
    return None
