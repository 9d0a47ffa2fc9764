"""One query a text against keys of its own, in plain torch: what mixers without a kernel for it decode with.

B texts, S keys, H query heads, J KV heads, X head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..norms import statistics_dtype


def row_scores(q_BHX: Tensor, k_BSJX: Tensor, scale: float | None = None) -> Tensor:
    """scale q·k, [B, H, S] in the statistics' type; `scale` None is 1/sqrt(X)."""
    dtype = statistics_dtype(q_BHX.dtype)
    scale = q_BHX.shape[-1] ** -0.5 if scale is None else scale
    q_BJGX = q_BHX.to(dtype).unflatten(1, (k_BSJX.shape[2], -1))
    return torch.einsum("bjgx,bsjx->bjgs", q_BJGX, k_BSJX.to(dtype)).flatten(1, 2) * scale


def row_weights(logits_BHS: Tensor, seen_BS: Tensor) -> Tensor:
    """softmax over the keys that are seen, and 0 for all in a row that sees none."""
    logits_BHS = logits_BHS.masked_fill(~seen_BS[:, None], -torch.inf)
    top_BH1 = logits_BHS.amax(-1, keepdim=True)
    weight_BHS = torch.exp(logits_BHS - torch.where(top_BH1.isinf(), 0.0, top_BH1))
    total_BH1 = weight_BHS.sum(-1, keepdim=True)
    return weight_BHS / torch.where(total_BH1 > 0, total_BH1, 1.0)


def row_sums(weight_BHS: Tensor, v_BSJX: Tensor, seen_BS: Tensor) -> Tensor:
    """Values times weights, [B, H, X] in the weights' type; what is not seen may be any number, also none."""
    v_BSJX = v_BSJX.to(weight_BHS.dtype).masked_fill(~seen_BS[..., None, None], 0.0)
    groups = weight_BHS.unflatten(1, (v_BSJX.shape[2], -1))
    return torch.einsum("bjgs,bsjx->bjgx", groups, v_BSJX).flatten(1, 2)


def row_attention(logits_BHS: Tensor, v_BSJX: Tensor, seen_BS: Tensor) -> Tensor:
    """softmax of the logits over the keys that are seen, times v: [B, H, X] of v's type. A row that sees none gives 0."""
    return row_sums(row_weights(logits_BHS, seen_BS), v_BSJX, seen_BS).to(v_BSJX.dtype)
