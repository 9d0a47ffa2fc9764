"""Attention of q, k, v and a fourth tensor that is learned too, as torch ops.

Products of q and k are multiplied by `factor`, so that weights are 2^(logit - lse); what the fourth is, the module of the kernels says.
q itself is not scaled before: rounded a second time, it would shift what is counted along a row, and flip who survives a threshold.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..custom_ops import differentiate, empty_like, keep_inputs, load_kernels, rows_like, torch_op


def attention_ops(name: str) -> tuple[Any, Any]:
    """The ops atma::NAME_forward and atma::NAME_backward of the kernels of that name.

    The first takes (q, k, v, fourth, factor, window) and gives (o [B, T, H, X], lse [B, H, T] float32 in units of log 2), of which o has a
    gradient; `window` 0 is none. The second takes (gradient of o, q, k, v, fourth, o, lse, factor, window).
    """
    package = f"{__package__}.{name}"

    @torch_op(f"{name}_forward", lambda q, *_: (q.new_empty(q.shape), rows_like(q)))
    def forward(
        q: Tensor, k: Tensor, v: Tensor, extra_input: Tensor, factor: float, window: int
    ) -> tuple[Tensor, Tensor]:
        args = (x.contiguous() for x in (q, k, v, extra_input))
        return load_kernels(package).forward(*args, factor=factor, window=window or None)

    @torch_op(f"{name}_backward", lambda g_o, *tensors: empty_like(*tensors[:4]))
    def backward(
        g_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extra_input: Tensor,
        o: Tensor,
        lse: Tensor,
        factor: float,
        window: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        args = (x.contiguous() for x in (g_o, q, k, v, extra_input, o, lse))
        gradients: tuple[Tensor, Tensor, Tensor, Tensor]
        gradients = load_kernels(package).backward(*args, factor=factor, window=window or None)
        return gradients

    differentiate(forward, backward, keep_inputs(4))
    return forward, backward
