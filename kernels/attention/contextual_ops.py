"""The kernels of contextual positions as torch ops (see `ops`). q is scaled so that weights are 2^(logit - lse)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def kernels() -> Any:
    """Imported when they first run: Triton is not installed everywhere."""
    return importlib.import_module(".contextual_triton", __package__)


@torch.library.custom_op("atma::contextual_forward", mutates_args=())
def contextual_forward(q: Tensor, k: Tensor, v: Tensor, z_BHTP: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, X], lse [B, H, T] float32 in units of log 2); `window` 0 is none. Only o has a gradient."""
    args = (x.contiguous() for x in (q, k, v, z_BHTP))
    found: tuple[Tensor, Tensor] = kernels().forward(*args, window=window or None)
    return found


@contextual_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, z_BHTP: Tensor, window: int) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(b, h, t, dtype=torch.float32)


@torch.library.custom_op("atma::contextual_backward", mutates_args=())
def contextual_backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, z_BHTP: Tensor, o: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and z."""
    args = (x.contiguous() for x in (g_o, q, k, v, z_BHTP, o, lse))
    found: tuple[Tensor, Tensor, Tensor, Tensor] = kernels().backward(*args, window=window or None)
    return found


@contextual_backward.register_fake
def _(g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, z_BHTP: Tensor, o: Tensor, lse: Tensor, window: int
      ) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (q, k, v, z_BHTP))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.window = window
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(True)


def _gradients(ctx: Any, g_o: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *contextual_backward(g_o, *ctx.saved_tensors, ctx.window), None


contextual_forward.register_autograd(_gradients, setup_context=_save)
