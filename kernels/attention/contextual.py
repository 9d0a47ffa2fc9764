"""Attention with contextual positions, CoPE (docs/mechanisms.md, "Other position schemes").

B batch, T length, H query heads, J KV heads, X head size, P positions, M queries of a block, S the keys in its reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..shapes import check_qkv
from .scored import Span, dot_scores, scored_attention


def contextual_attention(
    q_BTHX: Tensor,
    k_BTJX: Tensor,
    v_BTJX: Tensor,
    vectors_PX: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    query_block: int | None = None,
) -> Tensor:
    """softmax of s + q·e(p), times v, where s = scale q·k and p sums sigmoid(s) over the keys from j to i, both included.

    e is linear between the `vectors` of whole positions, and the last one's from P - 1 on. q [B, T, H, X], k and v
    [B, T, J, X] of one type, `vectors` [P, X]; returns [B, T, H, X] of q's type. Gradients flow through the gates.
    """
    _, _, heads, _, _ = check_qkv(q_BTHX, k_BTJX, v_BTJX)

    def logits(span: Span) -> Tensor:
        scores = dot_scores(q_BTHX, k_BTJX, span, scale)
        return scores + of_positions(q_BTHX[:, span.queries].to(scores.dtype), scores, span.seen_MS, vectors_PX)

    return scored_attention(v_BTJX, heads, logits, window=window, query_block=query_block)


def of_positions(q_BMHX: Tensor, scores_BHMS: Tensor, seen_MS: Tensor, vectors_PX: Tensor) -> Tensor:
    """q·e(p), [B, H, M, S]; `seen` may also be that of each text, [B, 1, M, S]."""
    gates = torch.where(seen_MS, scores_BHMS.sigmoid(), 0.0)
    position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(vectors_PX) - 1)
    below = position.detach().floor()
    along = torch.einsum("bmhx,px->bhmp", q_BMHX, vectors_PX.to(q_BMHX.dtype))
    low, high = along.gather(-1, below.long()), along.gather(-1, position.detach().ceil().long())
    return low + (position - below) * (high - low)
