"""The kernels of threshold relative attention as torch ops (see `ops`). q is scaled so that weights are 2^(logit - lse)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def _kernels() -> Any:
    return importlib.import_module(".threshold_triton", __package__)


@torch.library.custom_op("atma::threshold_forward", mutates_args=())
def threshold_forward(q: Tensor, k: Tensor, v: Tensor, decay_BHT: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, X], lse [B, H, T] float32 in units of log 2, -inf where nothing survives); `window` 0 is none."""
    args = (x.contiguous() for x in (q, k, v, decay_BHT))
    found: tuple[Tensor, Tensor] = _kernels().forward(*args, window=window or None)
    return found


@threshold_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, decay_BHT: Tensor, window: int) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(b, h, t, dtype=torch.float32)


@torch.library.custom_op("atma::threshold_backward", mutates_args=())
def threshold_backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay_BHT: Tensor, o: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and decay."""
    args = (x.contiguous() for x in (g_o, q, k, v, decay_BHT, o, lse))
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _kernels().backward(*args, window=window or None)
    return found


@threshold_backward.register_fake
def _(g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay_BHT: Tensor, o: Tensor, lse: Tensor, window: int
      ) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (q, k, v, decay_BHT))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.window = window
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(True)


def _gradients(ctx: Any, g_o: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *threshold_backward(g_o, *ctx.saved_tensors, ctx.window), None


threshold_forward.register_autograd(_gradients, setup_context=_save)
