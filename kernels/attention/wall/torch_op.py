"""The kernels of wall attention as torch ops: what goes in, what comes out, the gradient.

`window` 0 is none. `path`, "triton" or "gluon", is that of the forward; the backward is plain Triton's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...custom_ops import differentiate, empty_like, load_kernels, torch_op

BLOCK = 64
"""Tokens whose gates one exponent sums at most."""


def _empty_results(q: Tensor, k: Tensor, v: Tensor, f: Tensor, *_: Any) -> tuple[Tensor, ...]:
    (b, t, h, d), y = q.shape, f.shape[2]
    blocks = -(-t // BLOCK)
    return (
        q.new_empty(q.shape), q.new_empty(b, h, t, dtype=torch.float32), q.new_empty(q.shape), k.new_empty(b, t, y, d),
        q.new_empty(2, b, y, blocks + 1, d, dtype=torch.float32),
    )  # fmt: skip


@torch_op("wall_forward", _empty_results)
def wall_forward(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, factor: float, window: int, path: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o, lse, q', k', E) of triton.forward; only o has a gradient."""
    return load_kernels(__package__, path).forward(
        *(x.contiguous() for x in (q, k, v, f)), factor=factor, window=window or None
    )


@torch_op("wall_backward", lambda g_o, q_, k_, v, f, *_: empty_like(q_, v, v, f))
def wall_backward(
    g_o: Tensor, q_: Tensor, k_: Tensor, v: Tensor, f: Tensor, o: Tensor, lse: Tensor, edges: Tensor, factor: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and f, of their types."""
    return load_kernels(__package__).backward(
        g_o.contiguous(), q_, k_, v.contiguous(), f.contiguous(), o, lse, edges, factor=factor, window=window or None
    )


def _kept(inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    _, _, v, f, factor, window, _ = inputs
    o, lse, q_, k_, edges = results
    return (q_, k_, v, f, o, lse, edges), (factor, window)


differentiate(wall_forward, wall_backward, _kept)
