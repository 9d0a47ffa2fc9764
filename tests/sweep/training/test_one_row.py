"""Matrices of one row or column: Newton-Schulz in numbers against the same iteration in matrices."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.sweep.training.optimizers import COEFFICIENTS, Muon, orthogonalise
from tolerances import rounding_bound
from torch import Tensor, nn


def general(matrices_NRC: Tensor, iterations: int) -> Tensor:
    """X <- X / (|X| + 1e-7), then X <- a X + (b A + c A A) X with A = X X^T, whatever the shape (docs/mechanisms.md, "Training")."""
    a, b, c = COEFFICIENTS
    found = []
    for matrix in matrices_NRC:
        X = matrix / (matrix.square().sum().sqrt() + 1e-7)
        for _ in range(iterations):
            A = X @ X.mT
            X = a * X + (b * A + c * (A @ A)) @ X
        found.append(X)
    return torch.stack(found)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("scale", [1e-140, 1e-30, 1e-9, 1e-7, 1e-4, 1.0, 1e9, 1e100])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 3), (1, 129), (3, 1), (129, 1)])
def test_equals_the_iteration_in_matrices(rows: int, cols: int, scale: float) -> None:
    """Far below 1e-7 the norm's floor keeps a matrix small, and the iteration only doubles it."""
    matrices = gaussian(5, rows, cols) * scale
    for iterations in (0, 1, 5, 12):
        found = orthogonalise(matrices, iterations, torch.float64)
        expected = general(matrices, iterations)
        assert found.shape == matrices.shape
        assert ((found - expected).abs() <= 1e-12 * expected.abs().amax((1, 2), keepdim=True)).all()


@pytest.mark.parametrize(("dtype", "near"), [
    (torch.float32, rounding_bound(torch.float32, 257)), (torch.bfloat16, rounding_bound(torch.bfloat16, 2)),
])  # fmt: skip
@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (4, 1), (1, 257)])
def test_lower_precision_gives_unit_vectors(rows: int, cols: int, dtype: torch.dtype, near: float) -> None:
    """bfloat16 has two digits; its Frobenius norm is one all the same."""
    for scale in (1e-3, 1.0, 1e4, 1e15):
        matrices = gaussian(7, rows, cols) * scale
        found = orthogonalise(matrices, 12, dtype)
        assert found.dtype == dtype
        unit = matrices / matrices.square().sum((1, 2), keepdim=True).sqrt()
        assert (found.double() - unit).abs().max() <= near


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_stays_zero(dtype: torch.dtype) -> None:
    matrices = torch.stack([torch.zeros(1, 4), torch.ones(1, 4)]).double()
    found = orthogonalise(matrices, 12, dtype)
    assert found[0].tolist() == [[0.0] * 4]
    assert found[1].double().flatten().tolist() == pytest.approx([0.5] * 4, rel=1e-2)
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 1), 12, dtype), torch.zeros(2, 3, 1, dtype=dtype))


def test_muon_takes_a_filter_as_a_matrix_a_channel() -> None:
    """A [C, 1, W] parameter moves by lr times a unit vector for each channel, whatever its gradient's size."""
    p = nn.Parameter(torch.zeros(6, 1, 4))
    p.grad = gaussian(6, 1, 4, dtype=torch.float32) * torch.logspace(-3, 3, 6).view(6, 1, 1)
    Muon([p], lr=0.5, momentum=0.9, weight_decay=0.0, dtype=torch.float32).step()
    expected = -0.5 * p.grad / p.grad.square().sum(2, keepdim=True).sqrt()
    assert (p.detach() - expected).abs().max() < 1e-3
    assert p.detach().square().sum((1, 2)).sqrt().tolist() == pytest.approx([0.5] * 6, abs=1e-3)
