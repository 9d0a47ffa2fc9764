"""The projection on float32 directions against float64, its operator, and what is refused."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.sketch import choose_backend, gram, sketch, sketch_reference
from torch import Tensor

SIZES = [(2, 8, 1), (17, 129, 5), (257, 1024, 64), (1000, 96, 200)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def errors(x: Tensor, s: Tensor) -> tuple[float, float]:
    """Of the result and of its gradient. x takes one."""
    weight = normal(len(x), len(s), seed=2).to(x.device)
    z = sketch(x, s, backend="triton")
    (found,) = torch.autograd.grad((z * weight).sum(), x)
    assert (z.dtype, found.dtype) == (torch.float32, x.dtype)
    assert torch.equal(z, sketch(x, s, backend="triton"))
    return distance(z, x.detach().double() @ s.double().t()), distance(found, weight.double() @ s.double())


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is for the interpreter, bf16 for GPUs")
@pytest.mark.parametrize(("n", "c", "k"), SIZES)
def test_float32_under_the_interpreter(n: int, c: int, k: int) -> None:
    result, gradient = errors(normal(n, c).requires_grad_(), normal(k, c, seed=1))
    assert result < 1e-6
    assert gradient < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("n", "c", "k"), SIZES)
def test_bf16_on_a_gpu(n: int, c: int, k: int) -> None:
    """Directions of one piece would be 1.7e-3 off; a gradient carries one rounding to bf16, which is as much."""
    result, gradient = errors(normal(n, c).cuda().bfloat16().requires_grad_(), normal(k, c, seed=1).cuda())
    assert result < 1e-5
    assert gradient < 2.2e-3
    assert choose_backend("cuda", torch.bfloat16).backend == "triton"


def test_the_operator_says_what_it_does() -> None:
    x, s = normal(9, 12).requires_grad_(), normal(4, 12, seed=1)
    if torch.cuda.is_available():
        x, s = x.detach().cuda().bfloat16().requires_grad_(), s.cuda()
    found = torch.library.opcheck(torch.ops.atma.sketch_forward.default, (x, s))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_elsewhere_it_is_a_product_in_the_statistics_type(dtype: torch.dtype) -> None:
    x, s = normal(5, 7).to(dtype), normal(3, 7, seed=1)
    found = sketch(x, s)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found, sketch_reference(x, s))
    assert distance(found, x.double() @ s.double().t()) < 1e-6


def test_gram_and_its_gradient() -> None:
    z = normal(7, 3).double().requires_grad_()
    assert torch.equal(gram(z), z.t() @ z)
    assert torch.autograd.gradcheck(gram, (z,), rtol=1e-9)


def test_channels_that_disagree() -> None:
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(3, 4\)"):
        sketch(torch.zeros(2, 5), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"\(5,\).*\(3, 5\)"):
        sketch(torch.zeros(5), torch.zeros(3, 5))
