"""The softmax kernels as torch ops: what goes in, what comes out, the gradient.

B batch, T length, H query heads, J KV heads, X head size. Units as in `triton`: q scaled so that weights are
2^(qk - lse). `window` 0 is none. `path` is "triton".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...custom_ops import differentiate, empty_like, keep_inputs, load_kernels, torch_op


def _log_sums(q: Tensor) -> Tensor:
    b, t, h, _ = q.shape
    return q.new_empty(b, h, t, dtype=torch.float32)


@torch_op("softmax_forward", lambda q, *_: (q.new_empty(q.shape), _log_sums(q)))
def softmax_forward(q: Tensor, k: Tensor, v: Tensor, window: int, offset: int, path: str) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, X], lse [B, H, T] float32 in units of log 2); both have gradients."""
    args = (q.contiguous(), k.contiguous(), v.contiguous())
    return load_kernels(__package__, path).softmax_forward(*args, window=window or None, offset=offset)


@torch_op("softmax_backward", lambda g_o, g_lse, q, k, v, *_: empty_like(q, k, v))
def softmax_backward(
    g_o: Tensor, g_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, offset: int,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    args = (x.contiguous() for x in (g_o, g_lse, q, k, v, o, lse))
    return load_kernels(__package__, path).softmax_backward(*args, window=window or None, offset=offset)


differentiate(softmax_forward, softmax_backward, keep_inputs(3), results=2)


@torch_op("log_sum", lambda q, *_: (_log_sums(q), q.new_empty(q.shape)))
def log_sum(q: Tensor, k: Tensor, path: str) -> tuple[Tensor, Tensor]:
    """(lse [B, H, T] of every query over every key, in units of log 2, and sum_j 2^(qk_j - lse) k_j [B, T, H, X]).

    The second is the gradient of the first by q, so the backward needs no product at all. k gets no gradient.
    """
    k = k.contiguous()
    o, lse = load_kernels(__package__, path).softmax_forward(q.contiguous(), k, k, window=None, offset=k.shape[1])
    return lse, o


def _save_log_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if ctx.needs_input_grad[1]:
        raise ValueError("log_sum has no gradient for its keys; detach them")
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _log_sum_gradients(ctx: Any, g_lse: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (mean,) = ctx.saved_tensors
    return (g_lse.transpose(1, 2).unsqueeze(-1) * mean).to(mean.dtype), None, None


log_sum.register_autograd(_log_sum_gradients, setup_context=_save_log_sum)
