"""Torch ops of attention of q, k, v and an extra tensor with a gradient, such as position biases.

Products of q and k are multiplied by `factor`, so that weights are 2^(logit - lse). The module of the kernels says what
the extra tensor is.
q itself is not scaled in advance: rounded a second time, it would shift sums of gates along a row and change which keys
pass a threshold.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..custom_ops import differentiate, empty_like, keep_inputs, load_kernels, rows_like, torch_op


def attention_ops(name: str) -> tuple[Any, Any]:
    """Register the ops atma::NAME_forward and atma::NAME_backward of an attention with an extra input; return both.

    The forward takes (q, k, v, extra_input, factor, window) and returns (o [B, T, H, X] in q's dtype, lse [B, H, T]
    float32 in units of log 2). Only o has a gradient, and by all four tensors. The backward takes (gradient of o, q, k,
    v, extra_input, o, lse, factor, window) and returns the gradients of q, k, v and extra_input. `factor` multiplies
    q·k and is scale times log2(e), so that scores, like lse, are in units of log 2; both ops take the same one. A
    `window` is a number of keys, the query's own included; 0 means full attention. Inputs need not be contiguous.
    Kernels are imported at the first run.

    Args:
        name: Package in kernels/attention whose triton.py has `forward` and `backward`: "contextual", "relative" or
            "threshold". A name can be registered once per process.
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
        """Return the gradients of q, k, v and the extra input, in their dtypes, by the package's Triton kernels.

        `o` and `lse` are the forward's results, `g_o` the gradient of o; `factor` and `window` those of the forward.
        """
        args = (x.contiguous() for x in (g_o, q, k, v, extra_input, o, lse))
        gradients: tuple[Tensor, Tensor, Tensor, Tensor]
        gradients = load_kernels(package).backward(*args, factor=factor, window=window or None)
        return gradients

    differentiate(forward, backward, keep_inputs(4))
    return forward, backward
