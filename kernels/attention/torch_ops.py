"""The attention kernels as torch ops, so that torch.compile keeps one graph: what goes in, what comes out, the gradient.

B batch, T length, H query heads, J KV heads, X head size. Units as in `triton`: q scaled so that weights are
2^(qk - lse), null scores in units of log 2. `window` 0 is none. `path` is "triton" or "gluon".
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def kernels(path: str) -> Any:
    """The module of that path, imported when it first runs: Triton is not installed everywhere."""
    return importlib.import_module({"triton": ".softmax.triton", "gluon": ".polar.gluon"}[path], __package__)


def why_not_gluon(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
    """Why the kernels for Hopper cannot take such tensors; None when they can."""
    why: str | None = kernels("gluon").why_not(device, dtype, head_dim, window)
    return why


def cut(window: int | None, length: int) -> int:
    """The window as the ops take it: one that reaches the first key of `length` hides nothing, and is none."""
    return 0 if window is None or window >= length else window


@torch.library.custom_op("atma::polar_forward", mutates_args=())
def polar_forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    window: int, floor: float, exact_floor: bool, offset: int, path: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(c [B, T, H, X], mag [B, T, H], lse, n_eff, inverse [B, H, T]).

    `exact_floor` is of the gradient alone: False takes a floored n_eff for one that the floor does not bind.
    """
    args = (q.contiguous(), k.contiguous(), v.contiguous(), null_TH.contiguous(), beta_H, v_null_HX.contiguous())
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = kernels(path).polar_forward(
        *args, window=window or None, floor=floor, offset=offset
    )
    return found


@polar_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
      window: int, floor: float, exact_floor: bool, offset: int, path: str) -> tuple[Tensor, ...]:  # fmt: skip
    b, t, h, _ = q.shape
    row = [q.new_empty(b, h, t, dtype=torch.float32) for _ in range(3)]
    return q.new_empty(q.shape), q.new_empty(b, t, h, dtype=torch.float32), *row


@torch.library.custom_op("atma::polar_backward", mutates_args=())
def polar_backward(
    gc: Tensor, g_mag: Tensor, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    c: Tensor, lse: Tensor, n_eff: Tensor, inverse: Tensor, window: int, offset: int, path: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, null_TH, beta_H and v_null_HX."""
    args = (gc, g_mag, q, k, v, null_TH, beta_H, v_null_HX, c, lse, n_eff, inverse)
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = kernels(path).polar_backward(
        *(x.contiguous() for x in args), window=window or None, offset=offset
    )
    return found


@polar_backward.register_fake
def _(gc: Tensor, g_mag: Tensor, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
      c: Tensor, lse: Tensor, n_eff: Tensor, inverse: Tensor, window: int, offset: int, path: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (q, k, v, null_TH, beta_H, v_null_HX))


def _save_polar(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, null_TH, beta_H, v_null_HX, window, _, exact_floor, offset, path = inputs
    c, _, lse, n_eff, inverse = output
    ctx.save_for_backward(q, k, v, null_TH, beta_H, v_null_HX, c, lse, n_eff, inverse)
    ctx.exact_floor, ctx.options = exact_floor, (window, offset, path)
    ctx.set_materialize_grads(True)
    ctx.mark_non_differentiable(lse, n_eff, inverse)


def _polar_gradients(ctx: Any, gc: Tensor, g_mag: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *kept, n_eff, inverse = ctx.saved_tensors
    if not ctx.exact_floor:
        # the sign is what tells the kernels that the floor binds
        n_eff = n_eff.abs()
    grads = polar_backward(gc, g_mag, *kept, n_eff, inverse, *ctx.options)
    return *grads, None, None, None, None, None


polar_forward.register_autograd(_polar_gradients, setup_context=_save_polar)


@torch.library.custom_op("atma::softmax_forward", mutates_args=())
def softmax_forward(q: Tensor, k: Tensor, v: Tensor, window: int, offset: int, path: str) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, X], lse [B, H, T] float32 in units of log 2); both have gradients."""
    args = (q.contiguous(), k.contiguous(), v.contiguous())
    found: tuple[Tensor, Tensor] = kernels(path).softmax_forward(*args, window=window or None, offset=offset)
    return found


@softmax_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int, offset: int, path: str) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(b, h, t, dtype=torch.float32)


@torch.library.custom_op("atma::softmax_backward", mutates_args=())
def softmax_backward(
    g_o: Tensor, g_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, offset: int,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    args = (g_o, g_lse, q, k, v, o, lse)
    found: tuple[Tensor, Tensor, Tensor] = kernels(path).softmax_backward(
        *(x.contiguous() for x in args), window=window or None, offset=offset
    )
    return found


@softmax_backward.register_fake
def _(g_o: Tensor, g_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, offset: int,
      path: str) -> tuple[Tensor, ...]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options
    ctx.set_materialize_grads(True)


def _softmax_gradients(ctx: Any, g_o: Tensor, g_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *softmax_backward(g_o, g_lse, *ctx.saved_tensors, *ctx.options), None, None, None


softmax_forward.register_autograd(_softmax_gradients, setup_context=_save_softmax)


@torch.library.custom_op("atma::log_sum", mutates_args=())
def log_sum(q: Tensor, k: Tensor, path: str) -> tuple[Tensor, Tensor]:
    """(lse [B, H, T] of every query over every key, in units of log 2, and sum_j 2^(qk_j - lse) k_j [B, T, H, X]).

    The second is the gradient of the first by q, so the backward needs no product at all. k gets no gradient.
    """
    k = k.contiguous()
    o, lse = kernels(path).softmax_forward(q.contiguous(), k, k, window=None, offset=k.shape[1])
    return lse, o


@log_sum.register_fake
def _(q: Tensor, k: Tensor, path: str) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    return q.new_empty(b, h, t, dtype=torch.float32), q.new_empty(q.shape)


def _save_log_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if ctx.needs_input_grad[1]:
        raise ValueError("log_sum has no gradient for its keys; detach them")
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _log_sum_gradients(ctx: Any, g_lse: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (mean,) = ctx.saved_tensors
    return (g_lse.transpose(1, 2).unsqueeze(-1) * mean).to(mean.dtype), None, None


log_sum.register_autograd(_log_sum_gradients, setup_context=_save_log_sum)


def _forgetting(path: str = "triton") -> Any:
    """The forward of that path; the backward is plain Triton's."""
    return importlib.import_module(f".forgetting.{path}", __package__)


@torch.library.custom_op("atma::forgetting_forward", mutates_args=())
def forgetting_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, factor: float, window: int, path: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o [B, T, H, X], lse, and F as two numbers, [B, H, T] float32) of scores factor qk + F_i - F_j in units of log 2.

    F are the sums of log_gate [B, T, H], float32 or float64, over log 2; q is not scaled, factor not 0. Only o has a gradient.
    """
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _forgetting(path).forward(
        *(x.contiguous() for x in (q, k, v, log_gate)), factor=factor, window=window or None
    )
    return found


@forgetting_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, factor: float, window: int, path: str
) -> tuple[Tensor, ...]:  # fmt: skip
    b, t, h, _ = q.shape
    return q.new_empty(q.shape), *(q.new_empty(b, h, t, dtype=torch.float32) for _ in range(3))


@torch.library.custom_op("atma::forgetting_backward", mutates_args=())
def forgetting_backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, high: Tensor, low: Tensor, factor: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and log_gate, the last float32."""
    g_o, q, k, v, o = (x.contiguous() for x in (g_o, q, k, v, o))
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _forgetting().backward(
        g_o, q, k, v, o, lse, (high, low), factor=factor, window=window or None
    )
    return found


@forgetting_backward.register_fake
def _(g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, high: Tensor, low: Tensor, factor: float,
      window: int) -> tuple[Tensor, ...]:  # fmt: skip
    b, t, h, _ = q.shape
    return *(x.new_empty(x.shape) for x in (q, k, v)), lse.new_empty(b, t, h)


def _save_forgetting(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_gate, ctx.factor, ctx.window, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.gate_dtype = log_gate.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(True)


def _forgetting_gradients(ctx: Any, g_o: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *grads, d_gate = forgetting_backward(g_o, *ctx.saved_tensors, ctx.factor, ctx.window)
    return *grads, d_gate.to(ctx.gate_dtype), None, None, None


forgetting_forward.register_autograd(_forgetting_gradients, setup_context=_save_forgetting)
