"""Attention with a learned bias per head and distance (docs/reference/mechanisms.md, "Other position schemes").

B batch, T length, H query heads, J KV heads, X head size, R reach, M queries of a block, S the keys in its reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import BackendChoice, attention_choice, checked_backend, compile_time_constant, self_test
from ...norms import statistics_dtype
from ...shapes import check_qkv, check_window, cut
from ..extra_input_ops import attention_ops
from ..scored import QueryBlock, dot_scores, scored_attention
from ..softmax.op import LOG2E, factor_in_log2

_forward, _backward = attention_ops("relative")
"""Ops whose extra input is the bias [H, R + 1], float32 in units of log 2."""


def relative_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, bias_HR: Tensor, *, scale: float | None = None,
    window: int | None = None, query_block: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax of scale q·k + bias[h, min(i - j, R)], times v: [B, T, H, X] of q's dtype.

    Causal and differentiable, the bias included.

    Args:
        q_BTHX: Queries; head h uses KV head h // (H / J).
        k_BTJX: Keys, of q's dtype.
        v_BTJX: Values, of q's dtype.
        bias_HR: Biases [H, R + 1] in natural units by distance in tokens; the last one serves all distances from R on.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries that "torch" scores at a time; None: 1024.
        backend: "triton" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes disagree, or the window is below 1.
    """
    _, t, heads, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    if bias_HR.ndim != 2 or len(bias_HR) != heads:
        raise ValueError(f"q has shape {tuple(q_BTHX.shape)}, but bias {tuple(bias_HR.shape)}")
    bias_HR = bias_HR.to(statistics_dtype(q_BTHX.dtype))
    backend = checked_backend(backend, "triton") or choose_backend(q_BTHX.device, q_BTHX.dtype, d).backend
    if backend == "triton":
        return _forward(q_BTHX, k_BTJX, v_BTJX, bias_HR * LOG2E, factor_in_log2(d, scale), cut(window, t))[0]
    reach = bias_HR.shape[1] - 1

    def logits(span: QueryBlock) -> Tensor:
        """Return the logits [B, H, M, S] of a block; the bias is gathered once per diagonal."""
        scores = dot_scores(q_BTHX, k_BTJX, span, scale)
        m, s = span.visible_MS.shape
        # one number per diagonal, so that its gradient is a sum along it; starts with the last key of the first query
        diagonals = torch.arange(m + s - 1, device=scores.device) + (span.start - span.stop + 1)
        along = bias_HR[:, diagonals.clamp(0, reach)]
        return scores + along.unfold(-1, s, 1).flip(-1)

    return scored_attention(v_BTJX, heads, logits, window=window, query_block=query_block)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> BackendChoice:
    """Return the backend of `relative_attention`, "triton" or "torch", with the reason, as `attention_choice` does."""
    return attention_choice("relative attention", torch.device(device), dtype, head_dim, _error)


# odd, longer than three tiles, a window that ends inside one, and a reach that ends in the second
_error = self_test(relative_attention, 197, lambda _, draw: [torch.randn(2, 101, generator=draw)], window=150)
