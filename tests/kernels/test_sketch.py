"""The projection on float32 directions against float64, its operator, and what is refused."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.sketch.op import choose_backend, gram, sketch, sketch_reference, split_precision
from graded import distance, interpreted, normal
from tolerances import rounding_bound
from torch import Tensor

SIZES = [(2, 8, 1), (17, 129, 5), (130, 1030, 64), (257, 96, 70)]


def errors(x: Tensor, s: Tensor, squares: bool) -> tuple[float, float]:
    """Return the relative errors of results and of their gradient, over all layers of x [L, N, C] in x's dtype."""
    g, h = normal(*x.shape[:2], s.shape[1], seed=2).to(x.device), normal(*x.shape[:2], seed=3).to(x.device)
    rows, exact = [layer.clone().requires_grad_() for layer in x], x.double().requires_grad_()
    outputs = sketch(rows, s, squares=squares, backend="triton")
    wanted = [exact @ s.double().mT, exact.square().sum(2)[:, : None if squares else 0]]
    gradients = torch.autograd.grad(outputs, rows, (g, h[:, : None if squares else 0]))
    assert {output.dtype for output in outputs} == {torch.float32}
    assert {gradient.dtype for gradient in gradients} == {x.dtype}
    assert all(map(torch.equal, outputs, sketch(rows, s, squares=squares, backend="triton")))
    (right,) = torch.autograd.grad((wanted[0] * g).sum() + (wanted[1] * h[:, : wanted[1].shape[1]]).sum(), exact)
    return max(distance(*pair) for pair in zip(outputs, wanted, strict=True) if pair[0].numel()), distance(
        torch.stack(gradients), right
    )


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize(("n", "c", "k"), SIZES)
def test_float32_under_the_interpreter(n: int, c: int, k: int, squares: bool) -> None:
    result, gradient = errors(normal(2, n, c), normal(2, k, c, seed=1), squares)
    assert max(result, gradient) < rounding_bound(torch.float32, max(c, k))


@pytest.mark.gpu
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize(("n", "c", "k"), SIZES)
def test_bf16_on_a_gpu(n: int, c: int, k: int, squares: bool) -> None:
    """Directions of one piece would be 1.7e-3 off; a gradient carries one rounding to bf16, which is as much."""
    result, gradient = errors(normal(3, n, c).cuda().bfloat16(), normal(3, k, c, seed=1).cuda(), squares)
    assert result < 1e-5
    assert gradient < 2.2e-3
    assert choose_backend("cuda", torch.bfloat16).backend == "triton"


@pytest.mark.thorough
@pytest.mark.parametrize("squares", [False, True])
def test_the_operator_says_what_it_does(squares: bool) -> None:
    x, s = normal(2, 9, 12), normal(2, 4, 12, seed=1)
    if torch.cuda.is_available():
        x, s = x.cuda().bfloat16(), s.cuda()
    rows = [layer.clone().requires_grad_() for layer in x]
    outcome = torch.library.opcheck(torch.ops.atma.sketch_forward.default, (rows, split_precision(s, x.dtype), squares))
    assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_elsewhere_it_is_a_product_in_the_statistics_type(dtype: torch.dtype) -> None:
    x, s = normal(2, 5, 7).to(dtype), normal(2, 3, 7, seed=1)
    outputs = sketch(list(x), s, squares=True)
    assert {output.dtype for output in outputs} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert all(map(torch.equal, outputs, sketch_reference(list(x), s, squares=True)))
    assert distance(outputs[0], x.double() @ s.double().mT) < 1e-6
    assert distance(outputs[1], x.double().square().sum(2)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_pieces_hold_sixteen_bits_of_the_mantissa(dtype: torch.dtype) -> None:
    s = normal(2, 3, 50)
    parts = split_precision(s, dtype)
    assert (parts.shape, parts.dtype) == ((2, 2, 3, 50), dtype)
    # numbers below 2^-14 have less of it in float16
    allowed = 2.0**-16 * s.double().abs() + (2.0**-25 if dtype == torch.float16 else 0)
    assert ((parts.double().sum(0) - s.double()).abs() <= allowed).all()


@pytest.mark.parametrize("n", [7, 1536])
def test_gram_and_its_gradient(n: int) -> None:
    """Both few rows and numbers of rows that are split into blocks."""
    z, g = normal(2, n, 3).double().requires_grad_(), normal(2, 3, 3, seed=1).double()
    gram_matrix = gram(z)
    assert distance(gram_matrix, z.mT @ z) < rounding_bound(torch.float64, n + 10)
    (gradient,) = torch.autograd.grad(gram_matrix, z, g)
    (wanted,) = torch.autograd.grad(z.mT @ z, z, g)
    assert distance(gradient, wanted) < rounding_bound(torch.float64, n + 10)
