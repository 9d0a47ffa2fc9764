"""Scalar products of rows, which the backward of every attention starts with."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.attention.launcher import row_products
from graded import interpreted
from torch import Tensor


def rows(b: int, t: int, h: int, d: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Contiguous numbers between NaN, on a GPU if there is one."""
    drawn = torch.randn(b, t, h, d, generator=torch.Generator().manual_seed(seed))
    buffer = torch.full((b + 2, t, h, d), torch.nan, dtype=dtype)
    buffer[1:-1] = drawn
    return buffer.cuda()[1:-1] if torch.cuda.is_available() else buffer[1:-1]


def check(b: int, t: int, h: int, d: int, dtype: torch.dtype) -> None:
    x, y = (rows(b, t, h, d, dtype, seed) for seed in (0, 1))
    products = row_products(x, y)
    assert (products.shape, products.dtype) == ((b, h, t), torch.float32)
    assert products.is_contiguous()
    exact = torch.einsum("bthx,bthx->bht", x.double(), y.double())
    # of the numbers that are added up, not of the sum, which may cancel
    size = torch.einsum("bthx,bthx->bht", x.double().abs(), y.double().abs())
    assert ((products - exact).abs() <= 1e-6 * size).all()
    assert torch.equal(products, row_products(x, y))


@interpreted
@pytest.mark.parametrize(("b", "t", "h", "d"), [(1, 1, 1, 16), (2, 13, 3, 16), (3, 22, 1, 64), (1, 32, 4, 128)])
def test_near_float64(b: int, t: int, h: int, d: int) -> None:
    """Sizes: a single row, rows that fill no tile, and tiles that end inside a text."""
    check(b, t, h, d, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_compiled_near_float64(d: int, dtype: torch.dtype) -> None:
    check(2, 397, 4, d, dtype)
