"""The kernels of forgetting attention as torch ops: what goes in, what comes out, the gradient.

B batch, T length, H query heads, X head size. `window` 0 is none. `path`, "triton" or "gluon", is that of the forward;
the backward is plain Triton's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...custom_ops import differentiate, empty_like, keep_inputs, load_kernels, torch_op


def _empty_results(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    b, t, h = q.shape[:3]
    return q.new_empty(q.shape), *(q.new_empty(b, h, t, dtype=torch.float32) for _ in range(3))


@torch_op("forgetting_forward", _empty_results)
def forgetting_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, factor: float, window: int, path: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o [B, T, H, X], lse, and F as two numbers, [B, H, T] float32) of scores factor qk + F_i - F_j in units of log 2.

    F are the sums of log_gate [B, T, H], float32 or float64, over log 2; q is not scaled, factor not 0. Only o has a gradient.
    """
    return load_kernels(__package__, path).forward(
        *(x.contiguous() for x in (q, k, v, log_gate)), factor=factor, window=window or None
    )


@torch_op("forgetting_backward", lambda g_o, *tensors: empty_like(*tensors[:4]))
def forgetting_backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, o: Tensor, lse: Tensor, high: Tensor, low: Tensor,
    factor: float, window: int, path: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and log_gate, of their types."""
    args = (x.contiguous() for x in (g_o, q, k, v, o))
    *grads, d_gate = load_kernels(__package__).backward(*args, lse, (high, low), factor=factor, window=window or None)
    return *grads, d_gate.to(log_gate.dtype)


differentiate(forgetting_forward, forgetting_backward, keep_inputs(4))
