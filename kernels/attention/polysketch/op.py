"""PolySketch attention (docs/reference/mechanisms.md, "PolySketch attention"), in time linear in the text's length.

B batch, T length, H query heads, J KV heads, G = H / J, X head size, r columns of a half sketch, F = r² columns of a
feature, M queries, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...features import half_sketch, square
from ...norms import statistics_dtype
from ...shapes import QUERY_BLOCK, check_qkv, check_window, visible_mask
from ..scored import QueryBlock, dot_scores, query_block_at


def polysketch_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, draws_KJXR: Tensor, *, block: int, scale: float | None = None,
    window: int | None = None, query_block: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of w_ij v_j over 1 + the sum of w_ij, over the keys j that query i sees: [B, T, H, X].

    Tokens are divided into blocks from the row's start. With p = 2 K, w_ij is (scale q_i·k_j)^p within a block, and
    (m(q_i)·m(k_j))² for a key of an earlier block; m of `features.half_sketch` estimates powers of p / 2. Causal and
    differentiable; of q's dtype. Without a window earlier blocks are read as one sum of features; with one, every pair
    in it is scored.

    Args:
        q_BTHX: Queries; head h uses KV head h // (H / J).
        k_BTJX: Keys, of q's dtype.
        v_BTJX: Values, of q's dtype.
        draws_KJXR: Directions of the sketch, one set per KV head; K is half the degree p.
        block: Tokens of a block.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries processed at a time, for memory only; None: a block, with a window 1024.

    Raises:
        ValueError: Shapes or dtypes disagree, or the window is below 1.
    """
    t = check_qkv(q_BTHX, k_BTJX, v_BTJX)[1]
    check_window(window)
    scale = q_BTHX.shape[-1] ** -0.5 if scale is None else scale
    halves = half_sketches(q_BTHX, draws_KJXR, scale), half_sketches(k_BTJX, draws_KJXR, scale)
    degree = 2 * len(draws_KJXR)
    values = with_ones(v_BTJX)
    if window is not None and window < t:
        return _by_pairs(
            q_BTHX, k_BTJX, values, halves, degree, block, scale, window, query_block or QUERY_BLOCK
        ).to(v_BTJX.dtype)  # fmt: skip
    sums, rows = None, []
    for start in range(0, t, block):
        stop = min(start + block, t)
        for first in range(start, stop, query_block or block):
            last = min(first + (query_block or block), stop)
            span = QueryBlock(first, last, start, visible_mask(first, last, start, None, q_BTHX.device))
            scores_BHMS = dot_scores(q_BTHX, k_BTJX, span, scale).masked_fill(~span.visible_MS, 0)
            weight_BHMS = scores_BHMS**degree
            total_BMHY = weigh(weight_BHMS, values[:, span.keys])
            if sums is not None:
                total_BMHY = total_BMHY + read_sums(halves[0][:, span.queries], sums, q_BTHX.dtype)
            rows.append(divided(total_BMHY))
        if stop < t:
            for first in range(start, stop, query_block or block):
                piece = slice(first, min(first + (query_block or block), stop))
                added = feature_sums(halves[1][:, piece], values[:, piece], q_BTHX.dtype)
                sums = added if sums is None else sums + added
    return torch.cat(rows, 1).to(v_BTJX.dtype)


def half_sketches(x_BTPX: Tensor, draws_KJXR: Tensor, scale: float) -> Tensor:
    """Return m(sqrt(scale) x) of queries or keys, [B, T, P, r] in the statistics' dtype; P = H or J.

    Args:
        x_BTPX: Queries or keys.
        draws_KJXR: Directions per KV head; query heads use those of their KV head.
        scale: Factor of q·k; its sign does not matter, because the degree is even.
    """
    draws = draws_KJXR.repeat_interleave(x_BTPX.shape[2] // draws_KJXR.shape[1], 1)
    return half_sketch(x_BTPX.to(statistics_dtype(x_BTPX.dtype)) * abs(scale) ** 0.5, draws)


def with_ones(v_BTJX: Tensor) -> Tensor:
    """Return values with a last channel of ones, [B, T, J, X + 1], so that one product sums weights too."""
    return torch.cat([v_BTJX, torch.ones_like(v_BTJX[..., :1])], -1)


def divided(total_BMHY: Tensor) -> Tensor:
    """Return the weighted sums over 1 + the sum of the weights, the last channel: [B, M, H, X + 1] -> [B, M, H, X]."""
    return total_BMHY[..., :-1] / (1 + total_BMHY[..., -1:])


def weigh(weight_BHMS: Tensor, values_BSJY: Tensor) -> Tensor:
    """Return the sums of weights times values, [B, M, H, Y] in the weights' dtype; head h uses KV head h // (H / J)."""
    groups = weight_BHMS.unflatten(1, (values_BSJY.shape[2], -1))
    return torch.einsum("bjgms,bsjy->bmjgy", groups, values_BSJY.to(weight_BHMS.dtype)).flatten(2, 3)


def feature_sums(m_BSJR: Tensor, values_BSJY: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the keys of feature times value, [B, J, F, Y] in m's dtype, multiplied in `dtype`.

    Args:
        m_BSJR: Half sketches of the keys.
        values_BSJY: Values with a channel of ones.
        dtype: Type of the factors.
    """
    features = square(m_BSJR).to(dtype)
    return torch.einsum("bsjf,bsjy->bjfy", features, values_BSJY.to(dtype)).to(m_BSJR.dtype)


def read_sums(m_BMHR: Tensor, sums_BJFY: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of w v over the keys in `sums`, for queries: [B, M, H, Y] in m's dtype, multiplied in `dtype`.

    Args:
        m_BMHR: Half sketches of the queries.
        sums_BJFY: From `feature_sums`.
        dtype: Type of the factors.
    """
    features = square(m_BMHR).to(dtype).unflatten(2, (sums_BJFY.shape[1], -1))
    return torch.einsum("bmjgf,bjfy->bmjgy", features, sums_BJFY.to(dtype)).flatten(2, 3).to(m_BMHR.dtype)


def pair_weights(exact_BHMS: Tensor, sketched_BHMS: Tensor, degree: int, in_block: Tensor, visible: Tensor) -> Tensor:
    """Return the weights of pairs: score^degree within a block, the square of the half sketches' product across.

    Args:
        exact_BHMS: Scores scale q·k.
        sketched_BHMS: Products m(q)·m(k).
        degree: Degree of the polynomial.
        in_block: True where query and key are in one block; broadcasts to [B, H, M, S].
        visible: True where the query sees the key; others weigh 0.
    """
    return torch.where(in_block, exact_BHMS**degree, sketched_BHMS.square()).masked_fill(~visible, 0)


def _by_pairs(
    q_BTHX: Tensor, k_BTJX: Tensor, values_BTJY: Tensor, halves: tuple[Tensor, Tensor], degree: int, block: int,
    scale: float, window: int, query_block: int,
) -> Tensor:  # fmt: skip
    """Return the attention with every visible pair scored, [B, T, H, X] in the statistics' dtype.

    Arguments as in `polysketch_attention`; `halves` are the half sketches of queries and keys. With gradients and
    several blocks of queries, scores are computed again in the backward pass.
    """

    def rows(span: QueryBlock) -> Tensor:
        """Return the output of one block of queries, [B, M, H, X]."""
        blocks_S = torch.arange(span.first, span.stop, device=q_BTHX.device) // block
        weight_BHMS = pair_weights(
            dot_scores(q_BTHX, k_BTJX, span, scale), dot_scores(*halves, span, 1.0), degree,
            blocks_S[span.start - span.first :, None] == blocks_S, span.visible_MS,
        )  # fmt: skip
        return divided(weigh(weight_BHMS, values_BTJY[:, span.keys]))

    t = q_BTHX.shape[1]
    spans = [
        query_block_at(start, min(start + query_block, t), window, q_BTHX.device) for start in range(0, t, query_block)
    ]
    if len(spans) == 1 or not torch.is_grad_enabled():
        return torch.cat([rows(span) for span in spans], 1)
    return torch.cat([checkpoint(rows, span, use_reentrant=False) for span in spans], 1)
