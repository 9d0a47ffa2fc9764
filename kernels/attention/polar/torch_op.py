"""The polar kernels as torch ops: what goes in, what comes out, the gradient.

B batch, T length, H query heads, J KV heads, X head size. Units as in `triton`: q scaled so that weights are
2^(qk - lse), null scores in units of log 2. `window` 0 is none. `path` is "triton" or "gluon".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...custom_ops import differentiate, empty_like, load_kernels, torch_op


def _empty_results(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    b, t, h = q.shape[:3]
    rows = [q.new_empty(b, h, t, dtype=torch.float32) for _ in range(3)]
    return q.new_empty(q.shape), q.new_empty(b, t, h, dtype=torch.float32), *rows


@torch_op("polar_forward", _empty_results)
def polar_forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    window: int, floor: float, exact_floor: bool, offset: int, path: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(c [B, T, H, X], mag [B, T, H], lse, n_eff, inverse [B, H, T]).

    `exact_floor` is of the gradient alone: False takes a floored n_eff for one that the floor does not bind.
    """
    args = (q.contiguous(), k.contiguous(), v.contiguous(), null_TH.contiguous(), beta_H, v_null_HX.contiguous())
    return load_kernels(__package__, path).polar_forward(*args, window=window or None, floor=floor, offset=offset)


@torch_op("polar_backward", lambda gc, g_mag, *tensors: empty_like(*tensors[:6]))
def polar_backward(
    gc: Tensor, g_mag: Tensor, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    c: Tensor, lse: Tensor, n_eff: Tensor, inverse: Tensor, window: int, offset: int, path: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, null_TH, beta_H and v_null_HX."""
    args = (gc, g_mag, q, k, v, null_TH, beta_H, v_null_HX, c, lse, n_eff, inverse)
    return load_kernels(__package__, path).polar_backward(
        *(x.contiguous() for x in args), window=window or None, offset=offset
    )


def _kept(inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    *tensors, window, _, exact_floor, offset, path = inputs
    c, _, lse, n_eff, inverse = results
    # the sign is what tells the kernels that the floor binds
    return (*tensors, c, lse, n_eff if exact_floor else n_eff.abs(), inverse), (window, offset, path)


differentiate(polar_forward, polar_backward, _kept, results=2)
