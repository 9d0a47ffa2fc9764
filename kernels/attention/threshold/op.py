"""Threshold relative attention: only keys with a positive score take part, and distances count only these.

See docs/reference/mechanisms.md, "Threshold relative attention". B batch, T length, H query heads, J KV heads, X head size, M
queries of a block, S the keys in its reach.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from ...dispatch import (
    BackendChoice,
    attention_choice,
    checked_backend,
    compile_time_constant,
    max_relative_error,
    result_and_gradients,
)
from ...norms import statistics_dtype
from ...shapes import check_qkv, check_window, cut, expand_kv
from ..extra_input_ops import attention_ops
from ..scored import QueryBlock, dot_scores, scored_attention
from ..softmax.op import LOG2E, factor_in_log2

Empty = Literal["zero", "uniform"]


_forward, _backward = attention_ops("threshold")
"""Ops whose extra input is the decay [B, H, T], float32 in units of log 2; lse is -inf where no key survives."""


def threshold_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_decay_BTH: Tensor, *, scale: float | None = None,
    window: int | None = None, empty: Empty = "zero", query_block: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax of s + D log_decay over the keys with s = scale q·k > 0, times v: [B, T, H, X] of q's dtype.

    D counts the surviving keys, those with s > 0, from j to i, both included: the nearest survivor has D = 1. D and
    survival have no gradient. Causal.

    Args:
        q_BTHX: Queries; head h uses KV head h // (H / J).
        k_BTJX: Keys, of q's dtype.
        v_BTJX: Values, of q's dtype.
        log_decay_BTH: Natural log decay <= 0 of each query, of any float dtype.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        empty: Result of a query without a survivor: "zero", or "uniform" for the mean of the values that it sees.
        query_block: Queries that "torch" scores at a time; None: 1024.
        backend: "triton" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes disagree, or the window is below 1.
    """
    b, t, h, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    if log_decay_BTH.shape != (b, t, h):
        raise ValueError(f"q has shape {tuple(q_BTHX.shape)}, but log_decay {tuple(log_decay_BTH.shape)}")
    dtype = statistics_dtype(q_BTHX.dtype)
    decay = log_decay_BTH.to(dtype)
    backend = checked_backend(backend, "triton") or choose_backend(q_BTHX.device, q_BTHX.dtype, d).backend
    if backend == "triton":
        decay_BHT = decay.transpose(1, 2) * LOG2E
        y, lse_BHT = _forward(q_BTHX, k_BTJX, v_BTJX, decay_BHT, factor_in_log2(d, scale), cut(window, t))
        none_BTH1 = lse_BHT.isinf().transpose(1, 2)[..., None]
    else:
        y = scored_attention(
            v_BTJX, h, lambda span: _logits(q_BTHX, k_BTJX, decay, span, scale), window=window, query_block=query_block
        )
        none_BTH1 = None
    if empty == "zero":
        return y
    if none_BTH1 is None:
        none_BTH1 = _rows_without(q_BTHX, k_BTJX, scale, window, query_block)
    return torch.where(none_BTH1, expand_kv(_mean_seen(v_BTJX, window), h), y)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> BackendChoice:
    """Return the backend of `threshold_attention`, "triton" or "torch", with the reason, as `attention_choice` does."""
    return attention_choice("threshold attention", torch.device(device), dtype, head_dim, _error)


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of the result and of its gradients, against "torch" in float32.

    One row of 131 tokens with a window of 70. The inputs have no score near 0, where rounding would change which keys
    survive.
    """
    draw = torch.Generator().manual_seed(seed)
    t = 131
    # scores of one magnitude and random sign, so that rounding changes no survivor
    axis_X = 0.35 * torch.randn(head_dim, generator=draw)
    q, k = (torch.randn(1, t, heads, 1, generator=draw).sign() * axis_X for heads in (2, 1))
    k, v = k + 0.2 * torch.randn(k.shape, generator=draw), torch.randn(k.shape, generator=draw)
    gate = -torch.rand(1, t, 2, generator=draw)
    tensors = [x.to(device, dtype) for x in (q, k, v)]
    attention = functools.partial(threshold_attention, window=70)
    return max_relative_error(*result_and_gradients(attention, backend, dtype, tensors, [gate.to(device)]))


def survivors(q_BTHX: Tensor, k_BTJX: Tensor, span: QueryBlock, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return (scores scale q·k, bool survivors), each [B, H, M, S].

    A key survives when it is visible and its score is positive; the scores of other keys are not masked.

    Args:
        q_BTHX: All queries.
        k_BTJX: All keys.
        span: Block of M queries and its S keys.
        scale: Factor of q·k; None is 1/sqrt(X).
    """
    scores = dot_scores(q_BTHX, k_BTJX, span, scale)
    return scores, (scores > 0) & span.visible_MS


def distances(keep: Tensor) -> Tensor:
    """Return the number of survivors from each key to the end of the row, itself included: float32 [..., S]."""
    return keep.to(torch.float32).flip(-1).cumsum(-1).flip(-1)


def _logits(q_BTHX: Tensor, k_BTJX: Tensor, decay_BTH: Tensor, span: QueryBlock, scale: float | None) -> Tensor:
    scores, keep = survivors(q_BTHX, k_BTJX, span, scale)
    decay_BHM1 = decay_BTH[:, span.queries].transpose(1, 2)[..., None]
    return torch.where(keep, scores + distances(keep).to(scores.dtype) * decay_BHM1, -torch.inf)


def _rows_without(q_BTHX: Tensor, k_BTJX: Tensor, scale: float | None, window: int | None, block: int | None) -> Tensor:
    """Return bool [B, T, H, 1]: True for queries for which no key survives; no gradients.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Attention window in keys, or None.
        block: Queries scored at a time; None: 1024.
    """

    def survivor_logits(span: QueryBlock) -> Tensor:
        scores, keep = survivors(q_BTHX, k_BTJX, span, scale)
        return torch.where(keep, torch.zeros_like(scores), -torch.inf)

    with torch.no_grad():
        ones = torch.ones_like(k_BTJX[..., :1])
        return scored_attention(ones, q_BTHX.shape[2], survivor_logits, window=window, query_block=block) == 0


def _mean_seen(v_BTJX: Tensor, window: int | None) -> Tensor:
    """Return the mean of the values that each position sees, [B, T, J, X] in v's dtype.

    Args:
        v_BTJX: Values.
        window: Number of values that a position sees, its own included; None for all earlier ones.
    """
    t = v_BTJX.shape[1]
    total = v_BTJX.to(statistics_dtype(v_BTJX.dtype)).cumsum(1)
    if window is not None and window < t:
        total = torch.cat([total[:, :window], total[:, window:] - total[:, :-window]], 1)
    count = torch.arange(1, t + 1, device=v_BTJX.device).clamp(max=window or t)
    return (total / count[:, None, None]).to(v_BTJX.dtype)
