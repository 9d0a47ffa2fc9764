"""Attention of one query per text over its keys in plain torch, for mixers that have no decoding kernel.

B texts, S keys, H query heads, J KV heads, X head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..norms import statistics_dtype


def row_scores(q_BHX: Tensor, k_BSJX: Tensor, scale: float | None = None) -> Tensor:
    """Return scale q·k, [B, H, S], float32 (float64 for float64); head h uses KV head h // (H / J).

    Hidden keys are not masked.

    Args:
        q_BHX: Queries.
        k_BSJX: Keys of each text.
        scale: Factor of q·k; None is 1/sqrt(X).
    """
    dtype = statistics_dtype(q_BHX.dtype)
    scale = q_BHX.shape[-1] ** -0.5 if scale is None else scale
    q_BJGX = q_BHX.to(dtype).unflatten(1, (k_BSJX.shape[2], -1))
    return torch.einsum("bjgx,bsjx->bjgs", q_BJGX, k_BSJX.to(dtype)).flatten(1, 2) * scale


def row_weights(logits_BHS: Tensor, seen_BS: Tensor) -> Tensor:
    """Return the softmax of logits (natural units) over the visible keys, [B, H, S]; all 0 in a row that sees none.

    Args:
        logits_BHS: Logits, in the dtype of the result; those of hidden keys may be anything.
        seen_BS: bool, True for visible keys.
    """
    logits_BHS = logits_BHS.masked_fill(~seen_BS[:, None], -torch.inf)
    top_BH1 = logits_BHS.amax(-1, keepdim=True)
    weight_BHS = torch.exp(logits_BHS - torch.where(top_BH1.isinf(), 0.0, top_BH1))
    total_BH1 = weight_BHS.sum(-1, keepdim=True)
    return weight_BHS / torch.where(total_BH1 > 0, total_BH1, 1.0)


def row_sums(weight_BHS: Tensor, v_BSJX: Tensor, seen_BS: Tensor) -> Tensor:
    """Return the sum of weights times values, [B, H, X] in the weights' dtype; values of hidden keys may be NaN.

    Args:
        weight_BHS: Weights, 0 for hidden keys.
        v_BSJX: Values; head h uses KV head h // (H / J).
        seen_BS: bool, True for visible keys.
    """
    v_BSJX = v_BSJX.to(weight_BHS.dtype).masked_fill(~seen_BS[..., None, None], 0.0)
    groups = weight_BHS.unflatten(1, (v_BSJX.shape[2], -1))
    return torch.einsum("bjgs,bsjx->bjgx", groups, v_BSJX).flatten(1, 2)


def row_attention(logits_BHS: Tensor, v_BSJX: Tensor, seen_BS: Tensor) -> Tensor:
    """Return softmax of the logits over the visible keys, times v: [B, H, X] of v's dtype.

    A text that sees no key gives 0. Logits are in natural units, those of hidden keys may be anything; `seen_BS` is
    bool, True for visible keys; head h uses the values of KV head h // (H / J).
    """
    return row_sums(row_weights(logits_BHS, seen_BS), v_BSJX, seen_BS).to(v_BSJX.dtype)
