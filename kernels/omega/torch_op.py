"""Torch ops of the omega memory's kernels, so that torch.compile keeps one graph.

Shapes and names as in `triton.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_ops import load_kernels, torch_op
from .tiles import operands, sizes


def _empty_results(
    q: Tensor, k: Tensor, v: Tensor, memory_decay: Tensor, pair_weights: Tensor | None, momentum_weight: Tensor | None, share: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return uninitialised results of `forward`, for torch.compile; only shapes, dtypes and device count.

    They are the readout in v's dtype, last memory and momentum [G, X, X] in memory's dtype, q, k, memories, momenta and
    P in the operands' dtype. With orthogonal steps memories and momenta hold N + 1 chunks in memory's dtype, and P is
    empty; momenta are empty without `share`.
    """
    size, orthogonal, memory = sizes(q, k, memory_decay), pair_weights is None, rest[2]
    kind = operands(v.dtype, orthogonal)
    square = memory.shape
    if orthogonal:
        memories, momenta = (memory.new_empty(size.n + 1, *square) for _ in range(2))
        p = q.new_empty(0, dtype=kind)
    else:
        memories = q.new_empty(size.n, *square, dtype=kind)
        momenta = q.new_empty(0 if share is None else size.n, *square, dtype=kind)
        p = q.new_empty(size.n, size.heads, size.token_tile, size.padded_pairs, dtype=kind)
    return (
        v.new_empty(q.shape), memory.new_empty(square), memory.new_empty(0 if share is None else square),
        q.new_empty(q.shape, dtype=kind), k.new_empty(k.shape, dtype=kind), memories, momenta, p,
    )  # fmt: skip


def _empty_gradients(
    g_y: Tensor, g_last: Tensor | None, g_last_momentum: Tensor | None, q: Tensor, k: Tensor, v: Tensor, memory_decay: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return uninitialised results of `backward`, for torch.compile; only shapes, dtypes and device count.

    They have the shapes of the eleven inputs, empty for those that are None (the first momentum's without `share`); v's
    has v's dtype, those of q and k are float32, the others like memory_decay.
    """
    *optional_rates, memories, _, _ = rest
    wide = [x.new_empty(x.shape, dtype=torch.float32) for x in (q, k)]
    rates = [memory_decay.new_empty(0 if x is None else x.shape) for x in optional_rates]
    square, share = memories.shape[1:], optional_rates[2]
    first = [memory_decay.new_empty(square), memory_decay.new_empty(0 if share is None else square)]
    return *wide, v.new_empty(v.shape), memory_decay.new_empty(memory_decay.shape), *rates, *first


@torch_op("omega_forward", _empty_results)
def forward(
    q: Tensor, k: Tensor, v: Tensor, memory_decay: Tensor, pair_weights: Tensor | None, momentum_weight: Tensor | None, share: Tensor | None,
    momentum_decay: Tensor | None, step: Tensor | None, memory: Tensor, momentum: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (readout, last memory, last momentum, then the five tensors that `backward` reads) by our kernels.

    The readout is [B, T, H, X] in v's dtype. Last memory and momentum are float32 [G, X, X], G = B H, the momentum
    empty without `share`. The five are q and k as the kernels' operands, memories, momenta and P. Only the first three
    results have gradients.

    Args:
        q: Queries, float32 [B, T, H, X], so that their gradients are; rounded here to the kernels' operands.
        k: Keys, float32 [B, L, H, X], those of the window before first.
        v: Values [B, L, H, X] in the activations' dtype.
        memory_decay: float32 [N, G, C].
        pair_weights: float32 [N, G, C, S]; None: steps are orthogonal, at the end of each chunk.
        momentum_weight: float32 [N, G, C], or None.
        share: float32 [N, G, S]; None: no momentum.
        momentum_decay: float32 [N, G], or None.
        step: float32 [N, G], for orthogonal steps, or None.
        memory: First memory, float32 [G, X, X].
        momentum: First momentum, float32 [G, X, X].
    """
    kind = operands(v.dtype, pair_weights is None)
    few_q, few_k = (x.to(kind, copy=True).contiguous() for x in (q, k))
    rest = (
        None if x is None else x.contiguous()
        for x in (v, memory_decay, pair_weights, momentum_weight, share, momentum_decay, step, memory, momentum)
    )
    y, last, last_momentum, *saved = load_kernels(__package__).forward(few_q, few_k, *rest)
    return y, last, last_momentum, few_q, few_k, *saved


@torch_op("omega_backward", _empty_gradients)
def backward(
    g_y: Tensor, g_last: Tensor | None, g_last_momentum: Tensor | None, q: Tensor, k: Tensor, v: Tensor, memory_decay: Tensor,
    pair_weights: Tensor | None, momentum_weight: Tensor | None, share: Tensor | None, momentum_decay: Tensor | None, step: Tensor | None,
    memories: Tensor, momenta: Tensor, p: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the eleven inputs of `forward` in its order; empty for inputs that are None.

    g_y, g_last and g_last_momentum are the gradients of readout, last memory and last momentum, the last two None for
    zeros. q and k are the kernels' operands that `forward` returned; memories, momenta and p are its last three
    results; the others are its inputs. The gradient of v has v's dtype, the others are float32.
    """
    inputs = (
        g_y,
        g_last,
        g_last_momentum,
        q,
        k,
        v,
        memory_decay,
        pair_weights,
        momentum_weight,
        share,
        momentum_decay,
        step,
    )
    flat = (None if x is None else x.contiguous() for x in inputs)
    return load_kernels(__package__).backward(*flat, memories, momenta, p)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save operands, coefficients and the kernels' tensors; only readout and last state have gradients."""
    few_q, few_k, *saved = output[3:]
    ctx.save_for_backward(few_q, few_k, *inputs[2:9], *saved)
    ctx.mark_non_differentiable(*output[3:])
    # the last state is rarely part of the loss, and a gradient of zeros would cost a pass over it
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, g_y: Tensor | None, g_last: Tensor | None, g_last_momentum: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs of `forward`, None for inputs that are None.

    g_y, g_last and g_last_momentum are those of readout, last memory and last momentum. None counts as zeros. The
    gradient of the first momentum is None without a momentum.
    """
    q, v, saved_inputs = ctx.saved_tensors[0], ctx.saved_tensors[2], ctx.saved_tensors[2:9]
    has_momentum = saved_inputs[4] is not None
    g_y = v.new_zeros(q.shape) if g_y is None else g_y
    *grads, d_momentum = backward(g_y, g_last, g_last_momentum if has_momentum else None, *ctx.saved_tensors)
    d_q, d_k, d_v, *rates, d_memory = grads
    rates = [None if x is None else g for x, g in zip(saved_inputs[1:], rates, strict=True)]
    return d_q, d_k, d_v, *rates, d_memory, d_momentum if has_momentum else None


forward.register_autograd(_gradients, setup_context=_save)
