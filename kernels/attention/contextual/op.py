"""Attention with contextual positions, CoPE (docs/reference/mechanisms.md, "Other position schemes").

B batch, T length, H query heads, J KV heads, X head size, P positions, M queries of a block, S the keys in its reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import BackendChoice, attention_choice, checked_backend, compile_time_constant, self_test
from ...shapes import check_qkv, check_window, cut
from ..extra_input_ops import attention_ops
from ..scored import QueryBlock, dot_scores, scored_attention
from ..softmax.op import LOG2E, factor_in_log2

MAX_POSITIONS = 128
"""Largest number of positions that the kernels' pass for queries can hold."""

_forward, _backward = attention_ops("contextual")
"""Ops whose extra input is z = q·vectors, float32 [B, H, T, P] in units of log 2."""


def contextual_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, vectors_PX: Tensor, *, scale: float | None = None,
    window: int | None = None, query_block: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax of s + q·e(p), times v, with contextual positions p: [B, T, H, X] of q's dtype.

    s = scale q·k; p sums sigmoid(s) over the visible keys from j to i, both included. e is linear between the `vectors`
    of whole positions, and constant from position P - 1 on. q in q·e(p) is not scaled. Gradients flow through the gates
    sigmoid(s). Causal.

    Args:
        q_BTHX: Queries; head h uses KV head h // (H / J).
        k_BTJX: Keys, of q's dtype.
        v_BTJX: Values, of q's dtype.
        vectors_PX: Position vectors of the positions 0 to P - 1, for all heads, in the statistics' dtype.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries that "torch" scores at a time; None: 1024.
        backend: "triton" (P at most 128) or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes of q, k and v disagree, or the window is below 1.
    """
    _, t, heads, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    backend = (
        checked_backend(backend, "triton") or choose_backend(q_BTHX.device, q_BTHX.dtype, d, len(vectors_PX)).backend
    )
    if backend == "triton":
        z_BHTP = torch.einsum("bthx,px->bhtp", q_BTHX.to(vectors_PX.dtype), vectors_PX) * LOG2E
        return _forward(q_BTHX, k_BTJX, v_BTJX, z_BHTP, factor_in_log2(d, scale), cut(window, t))[0]

    def logits(span: QueryBlock) -> Tensor:
        scores = dot_scores(q_BTHX, k_BTJX, span, scale)
        return scores + position_scores(q_BTHX[:, span.queries].to(scores.dtype), scores, span.visible_MS, vectors_PX)

    return scored_attention(v_BTJX, heads, logits, window=window, query_block=query_block)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int, positions: int) -> BackendChoice:
    """Return the backend of `contextual_attention`, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher, 16 bits, heads of 16, 32, 64, 128 or 256 and at most 128
    positions. The kernels must pass a self-test, which the first call for a case runs.
    """
    if positions > MAX_POSITIONS:
        return BackendChoice("torch", f"the kernels support at most {MAX_POSITIONS} positions, got {positions}")
    return attention_choice("contextual attention", torch.device(device), dtype, head_dim, _error)


# odd, longer than three tiles, a window that ends inside one, and positions that end in the second
_error = self_test(contextual_attention, 197, lambda d, draw: [torch.randn(40, d, generator=draw) / 8], window=150)


def position_scores(q_BMHX: Tensor, scores_BHMS: Tensor, visible_MS: Tensor, vectors_PX: Tensor) -> Tensor:
    """Return the position term q·e(p) of each pair, [B, H, M, S] in natural units.

    Args:
        q_BMHX: Queries of a block, unscaled.
        scores_BHMS: scale q·k, whose sigmoids are summed from a key to the end of the row.
        visible_MS: bool, True for visible keys, whose sigmoids count; it may also be [B, 1, M, S].
        vectors_PX: Position vectors.
    """
    gates = torch.where(visible_MS, scores_BHMS.sigmoid(), 0.0)
    position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(vectors_PX) - 1)
    below = position.detach().floor()
    along = torch.einsum("bmhx,px->bhmp", q_BMHX, vectors_PX.to(q_BMHX.dtype))
    low, high = along.gather(-1, below.long()), along.gather(-1, position.detach().ceil().long())
    return low + (position - below) * (high - low)
