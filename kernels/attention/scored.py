"""Causal attention whose logits are any function of the pair: the plain torch path that several mixers share.

B batch, T length, H query heads, J KV heads, G = H / J, X head size, M queries of a block, S the keys in its reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...renamed import old_names
from ..norms import statistics_dtype
from ..shapes import QUERY_BLOCK, check_qkv, check_window, visible_mask


class QueryBlock(NamedTuple):
    """Block of queries, and the keys that at least one of them may see."""

    start: int
    stop: int
    """The block's queries are start <= i < stop."""
    first: int
    """The block's keys are first <= j < stop."""
    visible_MS: Tensor
    """bool [M, S]: True where the key is not after the query, and within the window."""

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        return slice(self.first, self.stop)

    @property
    def distance(self) -> Tensor:
        """Distances i - j in tokens, int64 [M, S]; negative for keys after the query."""
        device = self.visible_MS.device
        i_M = torch.arange(self.start, self.stop, device=device)
        return i_M[:, None] - torch.arange(self.first, self.stop, device=device)


LogitsFn = Callable[[QueryBlock], Tensor]
"""Function QueryBlock -> logits [B, H, M, S] in natural units, of the statistics' dtype.

It may hide further keys by -inf; those that `visible_MS` hides are masked by the caller.
"""


def scored_attention(
    v_BTJX: Tensor, heads: int, logits: LogitsFn, *, window: int | None = None, query_block: int | None = None
) -> Tensor:
    """Return softmax of `logits` over the visible keys, times v: [B, T, H, X] of v's dtype.

    A query without any visible key gives 0. Head h uses the values of KV head h // (H / J). With gradients enabled and
    more than one block, blocks are computed again in the backward, so no T x T matrix is saved. Softmax and sums are
    float32 (float64 for float64).

    Args:
        v_BTJX: Values.
        heads: Query heads H, a multiple of J.
        logits: Function of a block of queries that returns natural logits [B, H, M, S]; it runs twice with gradients.
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries of a block; None: 1024.

    Raises:
        ValueError: The window is below 1.
    """
    check_window(window)
    t, block = v_BTJX.shape[1], query_block or QUERY_BLOCK
    dtype = statistics_dtype(v_BTJX.dtype)
    v_BJTX = v_BTJX.to(dtype).transpose(1, 2)

    def rows(block_of_queries: QueryBlock) -> Tensor:
        """Return the attention output of one block of queries, [B, H, M, X] in the statistics' dtype."""
        return _weighted(
            logits(block_of_queries).masked_fill(~block_of_queries.visible_MS, -torch.inf),
            v_BJTX[:, :, block_of_queries.keys],
            heads,
        )

    spans = [query_block_at(start, min(start + block, t), window, v_BTJX.device) for start in range(0, t, block)]
    if len(spans) == 1 or not torch.is_grad_enabled():
        outputs = [rows(span) for span in spans]
    else:
        outputs = [checkpoint(rows, span, use_reentrant=False) for span in spans]
    return torch.cat(outputs, 2).transpose(1, 2).to(v_BTJX.dtype)


def query_block_at(start: int, stop: int, window: int | None, device: torch.device) -> QueryBlock:
    """Return the block of the queries start <= i < stop with the keys in their reach."""
    first = 0 if window is None else max(0, start - window + 1)
    return QueryBlock(start, stop, first, visible_mask(start, stop, first, window, device))


def dot_scores(q_BTHX: Tensor, k_BTJX: Tensor, span: QueryBlock, scale: float | None = None) -> Tensor:
    """Return scale q·k [B, H, M, S] of a block, float32 (float64 for float64); hidden keys are not masked.

    Query head h uses KV head h // (H / J).

    Args:
        q_BTHX: All queries.
        k_BTJX: All keys.
        span: Block of M queries and its S keys.
        scale: Factor of q·k; None is 1/sqrt(X).
    """
    dtype = statistics_dtype(q_BTHX.dtype)
    scale = q_BTHX.shape[-1] ** -0.5 if scale is None else scale
    q = q_BTHX[:, span.queries].to(dtype).unflatten(2, (k_BTJX.shape[2], -1))
    k = k_BTJX[:, span.keys].to(dtype)
    return torch.einsum("bmjgx,bsjx->bjgms", q, k).flatten(1, 2) * scale


def running_sum(x: Tensor) -> Tensor:
    """Return the cumulative sums over the tokens of x [B, T, ...], each token's own included, in float64.

    torch's own cumsum on CUDA adds in an order that may change, and raises where runs must repeat bit for bit; matrix
    products replace it there.
    """
    x = x.double()
    if x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return sum_by_products(x)
    return x.cumsum(1)


def sum_by_products(x: Tensor, segment_tokens: int = 64) -> Tensor:
    """Return the inclusive cumulative sums over the tokens of x [B, T, ...], as products with a triangle of ones.

    In x's shape and dtype; differentiable.

    Args:
        x: Float tensor.
        segment_tokens: Tokens of a segment; sums within segments come first, then recursively those over the segments.
    """
    t = x.shape[1]
    if t <= segment_tokens:
        return torch.einsum("ts,bs...->bt...", torch.ones(t, t, dtype=x.dtype, device=x.device).tril(), x)
    padded = torch.cat([x, x.new_zeros(len(x), -t % segment_tokens, *x.shape[2:])], 1).unflatten(
        1, (-1, segment_tokens)
    )
    within = sum_by_products(padded.flatten(0, 1), segment_tokens).unflatten(0, padded.shape[:2])
    segment_sums = within[:, :, -1]
    return (within + (sum_by_products(segment_sums, segment_tokens) - segment_sums)[:, :, None]).flatten(1, 2)[:, :t]


def scored_reference(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, pair: Callable[[int, int], Tensor], *, window: int | None = None
) -> Tensor:
    """Return causal softmax attention computed one query and one key at a time: [B, T, H, X] of v's dtype.

    A query whose keys are all hidden gives 0. Slow, for tests.

    Args:
        q_BTHX: Queries; only their shape is used.
        k_BTJX: Keys; only their shape is used.
        v_BTJX: Values.
        pair: Function (i, j) -> logit [B, H] of query i and key j in natural units; -inf hides the key.
        window: Number of keys that a query sees, its own included; None for all earlier keys.
    """
    _, t, h, j, _ = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    v_BTHX = v_BTJX.repeat_interleave(h // j, 2)
    rows = []
    for i in range(t):
        first = 0 if window is None else max(0, i + 1 - window)
        logit_SBH = torch.stack([pair(i, s) for s in range(first, i + 1)])
        weight_SBH = torch.exp(logit_SBH - logit_SBH.amax(0).clamp(min=-1e300))
        total_BH = weight_SBH.sum(0)
        y_BHX = torch.einsum("sbh,bshx->bhx", weight_SBH, v_BTHX[:, first : i + 1])
        rows.append(y_BHX / torch.where(total_BH > 0, total_BH, 1.0)[..., None])
    return torch.stack(rows, 1)


def _weighted(logits_BHMS: Tensor, v_BJSX: Tensor, heads: int) -> Tensor:
    """Return softmax of the logits times v, [B, H, M, X]; rows of -inf only give 0, and no gradient.

    Args:
        logits_BHMS: Natural logits, -inf for hidden keys.
        v_BJSX: Values, in the logits' dtype.
        heads: Query heads; not read, H comes from the logits.
    """
    top_BHM1 = logits_BHMS.detach().amax(-1, keepdim=True)
    top_BHM1 = torch.where(top_BHM1.isinf(), 0.0, top_BHM1)
    weight_BHMS = torch.exp(logits_BHMS - top_BHM1)
    total_BHM1 = weight_BHMS.sum(-1, keepdim=True)
    share = weight_BHMS / torch.where(total_BHM1 > 0, total_BHM1, 1.0)
    groups = share.unflatten(1, (v_BJSX.shape[1], -1))
    return torch.einsum("bjgms,bjsx->bjgmx", groups, v_BJSX).flatten(1, 2)


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
