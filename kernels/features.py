"""Feature maps of keys and queries, so that a matrix holds more pairs than its keys have channels.

X head size, H heads, F columns of a feature, r columns of a sketch. See docs/reference/mechanisms.md, "Omega memory" and "PolySketch attention".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def poly2(x: Tensor) -> Tensor:
    """Return all monomials of degree 0 to 2, [..., X] -> [..., 1 + X + X (X + 1)/2].

    The order is 1, the x_i, then the x_i x_j for i <= j. They are weighted so that the product of two features is 1 + s
    + s²/2, the first terms of exp(s), where s is the product of the two arguments.
    """
    size = x.shape[-1]
    i, j = torch.triu_indices(size, size, device=x.device)
    # the square of a channel stands once in s², a product of two channels twice
    weight = 1 - (1 - math.sqrt(0.5)) * (i == j).to(x.dtype)
    return torch.cat([torch.ones_like(x[..., :1]), x, x[..., i] * x[..., j] * weight], -1)


def sketch_draws(heads: int, size: int, columns: int, degree: int, draw: torch.Generator) -> Tensor:
    """Return the Gaussian directions of a sketch, [degree / 2, H, X, r], in the order that `sketch` takes them.

    Args:
        heads: Heads H.
        size: Head size X.
        columns: Columns r of a half sketch.
        degree: Degree of the sketched power of q·k, even.
        draw: Generator, which is advanced; the directions are standard normal float32 on its device.
    """
    return torch.randn(degree // 2, heads, size, columns, generator=draw)


def half_sketch(x_BTHX: Tensor, draws_KHXR: Tensor) -> Tensor:
    """Return features m [B, T, H, r] whose product m(q)·m(k) has the mean (q·k)^K over the draws, K = degree / 2.

    Each of the r columns is the product of K random projections, over sqrt(r). In x's dtype.

    Args:
        x_BTHX: Queries or keys.
        draws_KHXR: Directions of `sketch_draws`, the same for queries and keys.
    """
    projected = torch.einsum("bthx,khxr->kbthr", x_BTHX, draws_KHXR.to(x_BTHX.dtype))
    return projected.prod(0) * draws_KHXR.shape[-1] ** -0.5


def sketch(x_BTHX: Tensor, draws_KHXR: Tensor) -> Tensor:
    """Return features m ⊗ m [B, T, H, r²] whose product is (m(q)·m(k))², with m of `half_sketch`.

    The product is never negative. Its mean over the draws is (q·k)^degree plus the variance of m(q)·m(k), which falls as
    1/r.
    """
    return square(half_sketch(x_BTHX, draws_KHXR))


def square(m: Tensor) -> Tensor:
    """Return m ⊗ m, [..., r] -> [..., r²], whose product with another is the square of the product of the two m."""
    return (m.unsqueeze(-1) * m.unsqueeze(-2)).flatten(-2)


def columns(kind: str, size: int, sketch: int) -> int:
    """Return the number of columns F of a feature.

    Args:
        kind: "poly2", "sketch", or any other name for the identity.
        size: Head size X.
        sketch: Columns r of a half sketch; a sketch has r².
    """
    if kind == "poly2":
        return 1 + size + size * (size + 1) // 2
    return sketch * sketch if kind == "sketch" else size
