"""Attention of q, k, v and a fourth tensor that is learned too, as torch ops, so that torch.compile keeps one graph (see `ops`).

Products of q and k are multiplied by `factor`, so that weights are 2^(logit - lse); what the fourth is, the module of the kernels says.
q itself is not scaled before: rounded a second time, it would shift what is counted along a row, and flip who survives a threshold.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def kernels(name: str) -> Any:
    """The module of kernels of NAME, imported when they first run: Triton is not installed everywhere."""
    return importlib.import_module(f".{name}.triton", __package__)


def attention_ops(name: str) -> tuple[Any, Any]:
    """The ops atma::NAME_forward and atma::NAME_backward of the kernels of that name.

    The first takes (q, k, v, fourth, factor, window) and gives (o [B, T, H, X], lse [B, H, T] float32 in units of log 2), of which o has a
    gradient; `window` 0 is none. The second takes (gradient of o, q, k, v, fourth, o, lse, factor, window).
    """

    @torch.library.custom_op(f"atma::{name}_forward", mutates_args=())
    def forward(q: Tensor, k: Tensor, v: Tensor, fourth: Tensor, factor: float, window: int) -> tuple[Tensor, Tensor]:
        args = (x.contiguous() for x in (q, k, v, fourth))
        found: tuple[Tensor, Tensor] = kernels(name).forward(*args, factor=factor, window=window or None)
        return found

    @forward.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, fourth: Tensor, factor: float, window: int) -> tuple[Tensor, Tensor]:
        b, t, h, _ = q.shape
        return q.new_empty(q.shape), q.new_empty(b, h, t, dtype=torch.float32)

    @torch.library.custom_op(f"atma::{name}_backward", mutates_args=())
    def backward(
        g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, fourth: Tensor, o: Tensor, lse: Tensor, factor: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        args = (x.contiguous() for x in (g_o, q, k, v, fourth, o, lse))
        found: tuple[Tensor, Tensor, Tensor, Tensor]
        found = kernels(name).backward(*args, factor=factor, window=window or None)
        return found

    @backward.register_fake
    def _(g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, fourth: Tensor, o: Tensor, lse: Tensor, factor: float,
          window: int) -> tuple[Tensor, ...]:  # fmt: skip
        return tuple(x.new_empty(x.shape) for x in (q, k, v, fourth))

    def gradients(ctx: Any, g_o: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return *backward(g_o, *ctx.saved_tensors, *ctx.numbers), None, None

    forward.register_autograd(gradients, setup_context=_save)
    return forward, backward


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, factor, window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = factor, window
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(True)
