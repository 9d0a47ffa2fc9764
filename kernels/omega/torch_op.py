"""The kernels of the omega memory as torch ops, so that torch.compile keeps one graph. Shapes and names as in `triton.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_ops import load_kernels, torch_op
from .tiles import operands, sizes


def _empty_results(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, felt: Tensor | None, carried: Tensor | None, share: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    size, orthogonal, memory = sizes(q, k, kept), felt is None, rest[2]
    kind = operands(v.dtype, orthogonal)
    square = memory.shape
    if orthogonal:
        memories, momenta = (memory.new_empty(size.n + 1, *square) for _ in range(2))
        p = q.new_empty(0, dtype=kind)
    else:
        memories = q.new_empty(size.n, *square, dtype=kind)
        momenta = q.new_empty(0 if share is None else size.n, *square, dtype=kind)
        p = q.new_empty(size.n, size.heads, size.tokens, size.whole, dtype=kind)
    return (
        v.new_empty(q.shape), memory.new_empty(square), memory.new_empty(0 if share is None else square),
        q.new_empty(q.shape, dtype=kind), k.new_empty(k.shape, dtype=kind), memories, momenta, p,
    )  # fmt: skip


def _empty_gradients(
    g_y: Tensor, g_last: Tensor | None, g_last_momentum: Tensor | None, q: Tensor, k: Tensor, v: Tensor, kept: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *given, memories, _, _ = rest
    wide = [x.new_empty(x.shape, dtype=torch.float32) for x in (q, k)]
    rates = [kept.new_empty(0 if x is None else x.shape) for x in given]
    square, share = memories.shape[1:], given[2]
    first = [kept.new_empty(square), kept.new_empty(0 if share is None else square)]
    return *wide, v.new_empty(v.shape), kept.new_empty(kept.shape), *rates, *first


@torch_op("omega_forward", _empty_results)
def forward(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, felt: Tensor | None, carried: Tensor | None, share: Tensor | None,
    old: Tensor | None, to: Tensor | None, memory: Tensor, momentum: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(readout, last memory, last momentum, and the five tensors that `backward` needs).

    q and k are float32, so that their gradients are; the kernels round them.
    """
    kind = operands(v.dtype, felt is None)
    few_q, few_k = (x.to(kind, copy=True).contiguous() for x in (q, k))
    rest = (None if x is None else x.contiguous() for x in (v, kept, felt, carried, share, old, to, memory, momentum))
    y, last, last_momentum, *kept_back = load_kernels(__package__).forward(few_q, few_k, *rest)
    return y, last, last_momentum, few_q, few_k, *kept_back


@torch_op("omega_backward", _empty_gradients)
def backward(
    g_y: Tensor, g_last: Tensor | None, g_last_momentum: Tensor | None, q: Tensor, k: Tensor, v: Tensor, kept: Tensor,
    felt: Tensor | None, carried: Tensor | None, share: Tensor | None, old: Tensor | None, to: Tensor | None,
    memories: Tensor, momenta: Tensor, p: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what `forward` takes, in its order; empty for what is None."""
    given = (g_y, g_last, g_last_momentum, q, k, v, kept, felt, carried, share, old, to)
    flat = (None if x is None else x.contiguous() for x in given)
    return load_kernels(__package__).backward(*flat, memories, momenta, p)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    few_q, few_k, *kept_back = output[3:]
    ctx.save_for_backward(few_q, few_k, *inputs[2:9], *kept_back)
    ctx.mark_non_differentiable(*output[3:])
    # the last state is seldom part of the loss, and a gradient of zeros would cost a pass over it
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, g_y: Tensor | None, g_last: Tensor | None, g_last_momentum: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    q, v, given = ctx.saved_tensors[0], ctx.saved_tensors[2], ctx.saved_tensors[2:9]
    slow = given[4] is not None
    g_y = v.new_zeros(q.shape) if g_y is None else g_y
    *grads, d_momentum = backward(g_y, g_last, g_last_momentum if slow else None, *ctx.saved_tensors)
    d_q, d_k, d_v, *rates, d_memory = grads
    rates = [None if x is None else g for x, g in zip(given[1:], rates, strict=True)]
    return d_q, d_k, d_v, *rates, d_memory, d_momentum if slow else None


forward.register_autograd(_gradients, setup_context=_save)
