"""docs/reference/mechanisms.md, "Regularizers": the reference values on Gaussian data, and the invariances."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from atma_sweep.model import registry, regularizers
from torch import Tensor

N, C, K = 8192, 1024, 64


def single_layer(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x_NC, normal_KC: function([x_NC], normal_KC.unsqueeze(0)).squeeze(0)


weak, discrete, strong, zipfian = (
    single_layer(function)
    for function in (regularizers.weak, regularizers.discrete, regularizers.strong, regularizers.zipfian)
)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(k: int, c: int, seed: int = 0) -> Tensor:
    """Directions, [K, C]."""
    return torch.randn(k, c, generator=draw(seed))


@pytest.fixture(scope="module")
def gaussian() -> Tensor:
    return torch.randn(N, C, generator=draw(9))


@pytest.mark.parametrize(("function", "expected", "tolerance"), [
    (weak, 2.10, 0.05), (zipfian, 0.165, 0.008), (discrete, 2.10, 0.05),
])  # fmt: skip
def test_values_on_gaussian_data(
    gaussian: Tensor, function: Callable[..., Tensor], expected: float, tolerance: float
) -> None:
    value = sum(function(gaussian, normal(K, C, seed)).item() for seed in range(2)) / 2
    assert value == pytest.approx(expected, abs=tolerance)


def test_strong_at_zero_is_proportional_to_n() -> None:
    """With all mass at 0, the trapezoid sum of (1 - phi)^2 phi is 0.4089 per token."""
    for n in (7, 100):
        assert strong(torch.zeros(n, 32), normal(5, 32)).item() / n == pytest.approx(0.4089, abs=5e-5)


def test_strong_equals_the_formula() -> None:
    x = torch.randn(50, 6, generator=draw(1), dtype=torch.float64)
    a = normal(3, 6, 2).double().t()
    projected = x @ (a / (torch.linalg.vector_norm(a, dim=0) + 1e-6))
    t = torch.linspace(-5, 5, 17, dtype=torch.float64)
    phi = torch.exp(-(t**2) / 2)
    angle = projected[None] * t[:, None, None]
    gap = (angle.cos().mean(1) - phi[:, None]) ** 2 + angle.sin().mean(1) ** 2
    expected = torch.trapezoid(gap * phi[:, None], t, dim=0).mean() * 50
    assert strong(x, normal(3, 6, 2)).item() == pytest.approx(expected.item(), abs=1e-12)


def test_strong_on_gaussian_data_does_not_grow_with_n() -> None:
    """1.06 for every N; a direction's value scatters by about as much, so 1,500 directions are averaged."""
    expected = math.sqrt(2 * math.pi) * (1 - 1 / math.sqrt(3))
    assert expected == pytest.approx(1.06, abs=0.005)
    for n in (256, 2048):
        values = [strong(torch.randn(n, 512, generator=draw(s)), normal(500, 512, s + 50)).item() for s in range(3)]
        assert sum(values) / 3 == pytest.approx(expected, abs=0.1)


def test_discrete_ignores_scale(gaussian: Tensor) -> None:
    x = gaussian[:100].double()
    assert discrete(x, normal(K, C)).item() == pytest.approx(discrete(17 * x, normal(K, C)).item(), rel=1e-12)
    assert discrete(x, normal(K, C)).item() == pytest.approx(
        weak(x / x.norm(dim=1, keepdim=True) * math.sqrt(C), normal(K, C)).item(), rel=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_discrete_leaves_a_zero_row_alone(dtype: torch.dtype) -> None:
    x = torch.randn(12, 6, generator=draw(2)).to(dtype)
    x[4] = 0
    x.requires_grad_()
    value = discrete(x, normal(3, 6))
    (gradient,) = torch.autograd.grad(value, x)
    directions = torch.nn.functional.normalize(x.detach().double(), dim=1) * math.sqrt(6)
    z = directions @ (normal(3, 6).double() / math.sqrt(6)).t()
    assert value.item() == pytest.approx((z.t().cov() - torch.eye(3)).norm().item(), rel=1e-5)
    assert torch.isfinite(gradient).all()
    assert gradient[4].abs().max() == 0


def test_identical_rows() -> None:
    x = torch.ones(40, 32, dtype=torch.float64)
    assert weak(x, normal(K, 32)).item() == pytest.approx(8, abs=1e-12)
    assert torch.isfinite(zipfian(x, normal(K, 32)))


def test_zipfian_equals_the_formula() -> None:
    x = torch.randn(20, 6, generator=draw(1), dtype=torch.float64)
    s = normal(3, 6, 2).double() / math.sqrt(6)
    z = x @ s.t() - (x @ s.t()).mean(0)
    lengths = z.norm(dim=1)
    moment = sum(torch.outer(row / rho, row / rho) for row, rho in zip(z, lengths, strict=True)) / 19
    angular = math.sqrt(sum(moment[i, j].item() ** 2 for i in range(3) for j in range(3) if i != j))
    shares = sorted((lengths / lengths.sum()).tolist(), reverse=True)
    harmonic = sum(1 / r for r in range(1, 21))
    magnitude = math.sqrt(sum((share - 1 / r / harmonic) ** 2 for r, share in enumerate(shares, 1)))
    assert zipfian(x, normal(3, 6, 2)).item() == pytest.approx(angular + magnitude, abs=1e-12)


def test_gradient_falls_with_n_for_weak_and_not_for_strong() -> None:
    """Total gradient against the count of tokens: weak's mean over N dilutes, strong's factor N undoes that."""

    def per_token(function: Callable[..., Tensor], n: int) -> float:
        x = (2 * torch.randn(n, 32, generator=draw(3), dtype=torch.float64)).requires_grad_()
        (gradient,) = torch.autograd.grad(function(x, normal(16, 32)), x)
        return gradient.norm(dim=1).mean().item()

    assert per_token(weak, 4000) / per_token(weak, 500) == pytest.approx(1 / 8, rel=0.1)
    assert per_token(strong, 4000) / per_token(strong, 500) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("name", sorted(registry.REGULARIZERS))
def test_types_and_gradients(name: str) -> None:
    function = single_layer(registry.REGULARIZERS.load(name))
    x = torch.randn(11, 7, generator=draw(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: function(y, normal(3, 7, 1)), x)
    half = function(x.detach().bfloat16(), normal(3, 7, 1))
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(function(x, normal(3, 7, 1)).item(), rel=0.05)
    with pytest.raises(ValueError, match="at least 2 rows"):
        function(x[:1], normal(3, 7, 1))


@pytest.mark.parametrize("name", sorted(registry.REGULARIZERS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_share_nothing(name: str, dtype: torch.dtype) -> None:
    """Values and gradients of three layers at once, of lengths that differ by a factor, are those of each alone."""
    function = registry.REGULARIZERS.load(name)
    layers = [(3.0**i * torch.randn(23, 9, generator=draw(i))).to(dtype).requires_grad_() for i in range(3)]
    directions = torch.randn(3, 4, 9, generator=draw(7))
    together = function(layers, directions)
    assert together.shape == (3,)
    gradients = torch.autograd.grad(together.sum(), layers)
    for layer, x in enumerate(layers):
        alone = single_layer(function)(x, directions[layer])
        (gradient,) = torch.autograd.grad(alone, x)
        near = 1e-12 if dtype == torch.float64 else 1e-5
        assert together[layer].item() == pytest.approx(alone.item(), rel=near)
        assert (gradients[layer] - gradient).norm() <= near * gradient.norm()


def test_zipfian_in_float32_ranks_as_float64_does() -> None:
    x = torch.randn(1000, 12, generator=draw(5))
    directions = normal(6, 12, 2)
    assert zipfian(x, directions).item() == pytest.approx(zipfian(x.double(), directions).item(), rel=1e-5)
