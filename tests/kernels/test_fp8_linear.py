"""Products in 8 bits against their definition in float64, number by number, and against torch's own 8-bit product."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from atma_sweep.kernels import fp8_linear as op
from atma_sweep.kernels.fp8_linear import E4M3, E5M2, fp8_linear, fp8_linear_reference, nearest, quantise
from atma_sweep.kernels.norms import rms_norm
from torch._inductor.utils import run_and_get_code

BACKENDS = ["torch", "scaled_mm"]


def made(*shape: int, seed: int = 0, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many sizes, so that some are below the smallest normal one of the type."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.exp2(8 * torch.randn(shape, generator=draw))
    return (torch.randn(shape, generator=draw) * size).to(kind)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_a_cast_takes_the_nearest_number_of_each_row(kind: torch.dtype, source: torch.dtype) -> None:
    x = made(57, 131, seed=1, kind=source)
    x[3] = 0
    x[5] *= 2.0**-60
    x[7] *= 2.0**40
    q, scale = quantise(x, kind)
    assert q.dtype == kind
    assert q.is_contiguous()
    assert scale.shape == (57, 1)
    assert torch.equal(torch.log2(scale), torch.log2(scale).round()), "a scale is a power of two"
    assert torch.equal(q.double() * scale, nearest(x.double(), kind))
    largest = q.float().abs().amax(-1)
    top = op.TOP[kind]
    awake = torch.arange(57) != 3
    assert float(largest[awake].min()) >= 2.0**top
    assert float(largest.max()) <= 2.0 ** (top + 1) <= torch.finfo(kind).max * 8 / 7
    assert bool((q[3].float() == 0).all())


def test_nearest_against_every_number_of_the_type() -> None:
    """The oracle itself: no number of the type is nearer than the one that it takes."""
    every = torch.arange(256, dtype=torch.uint8)
    for kind in (E4M3, E5M2):
        values = every.view(kind).double()
        values = values[values.isfinite()]
        x = torch.cat([made(1, 300, seed=2).double() % 2.0 ** op.TOP[kind], torch.tensor([[2.0 ** op.TOP[kind]]])], 1)
        best = (x.flatten()[:, None] - values).abs().amin(1)
        assert torch.equal((nearest(x, kind) - x).abs().flatten(), best)


def test_a_row_that_is_not_finite_is_told() -> None:
    x = made(3, 16)
    x[0, 4], x[1, 2] = float("inf"), float("nan")
    q, scale = quantise(x, E4M3)
    assert bool((q.float() * scale)[:2].isnan().all())
    assert bool(q[2].float().isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [((2, 7), 48, 80), ((1,), 16, 16), ((0,), 32, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_backward_are_the_definition(
    backend: str, rows: tuple[int, ...], inputs: int, outputs: int, bias: bool
) -> None:
    kind = torch.float32 if backend == "torch" else torch.bfloat16
    x, w = made(*rows, inputs, kind=kind).requires_grad_(), made(outputs, inputs, seed=1).requires_grad_()
    b = made(outputs, seed=2).requires_grad_() if bias else None
    y = fp8_linear(x, w, b, backend=backend)
    assert (y.dtype, y.shape) == (kind, (*rows, outputs))
    g = made(*rows, outputs, seed=3, kind=kind)
    asked = [x, w] if b is None else [x, w, b]
    grads = torch.autograd.grad(y, asked, g)
    assert [one.dtype for one in grads] == [one.dtype for one in asked]
    if not y.numel():
        assert not any(one.any() for one in grads[1:])
        return
    close = 1e-5 if kind == torch.float32 else 5e-3
    assert relative(y.detach(), fp8_linear_reference(x, w, b).detach()) < close
    flat_g, flat_x = g.double().flatten(0, -2), x.detach().double().flatten(0, -2)
    wanted = [nearest(flat_g, E5M2) @ nearest(w.detach().double().t(), E4M3).t(), flat_g.t() @ flat_x, flat_g.sum(0)]
    for found, one in zip(grads, wanted, strict=False):
        assert relative(found.flatten(0, -2) if found.ndim > 2 else found, one) < close


def test_eight_bits_cost_this_much() -> None:
    """Normal numbers: three bits of mantissa forward, two for the gradient of x, none lost in that of the weight."""
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=draw).requires_grad_() for shape in ((96, 256), (128, 256)))
    g = torch.randn(96, 128, generator=draw)
    y = fp8_linear(x, w, backend="torch")
    dx, dw = torch.autograd.grad(y, (x, w), g)
    assert 0.02 < relative(y.detach(), (x @ w.t()).detach()) < 0.04
    assert 0.04 < relative(dx, (g @ w).detach()) < 0.07
    assert relative(dw, (g.t() @ x).detach()) < 1e-6


@pytest.mark.parametrize("wrong", [((3, 16), (16,)), ((3, 16), (32, 17)), ((3, 24), (32, 24)), ((3, 16), (24, 16))])
def test_shapes_that_do_not_fit_are_refused(wrong: Any) -> None:
    x, w = (torch.zeros(shape) for shape in wrong)
    with pytest.raises(ValueError, match=r"but w has shape|multiples of 16"):
        fp8_linear(x, w, backend="scaled_mm")


@pytest.mark.thorough
def test_the_compiler_takes_forward_and_backward_as_one_graph_each() -> None:
    x, w, b = (made(*shape, seed=n).requires_grad_() for n, shape in enumerate(((5, 32), (48, 32), (48,))))

    def numbers(function: Any) -> list[torch.Tensor]:
        y = function(x, w, b, backend="torch")
        return [y, *torch.autograd.grad(y, (x, w, b), torch.ones_like(y))]

    graph = torch.compile(fp8_linear, fullgraph=True, dynamic=False, backend="aot_eager")
    assert all(torch.equal(*pair) for pair in zip(numbers(graph), numbers(fp8_linear), strict=True))


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++")
def test_a_cast_is_in_the_kernel_of_the_norm_before_it() -> None:
    """Maximum, scale and cast are no passes of their own, with the compiler's code for the CPU."""
    x, w = made(64, 256, kind=torch.bfloat16), made(256, seed=1)
    both = torch.compile(lambda x, w: quantise(rms_norm(x, w, 1e-6), E4M3), fullgraph=True, dynamic=False)
    (q, scale), (code,) = run_and_get_code(both, x, w)
    assert code.count('extern "C"') == 1
    wanted, unit = quantise(rms_norm(x, w, 1e-6), E4M3)
    assert torch.equal(scale, unit)
    # the compiler does not round to bfloat16 in between
    assert relative(q.float() * scale, wanted.float() * unit) < 0.02


@pytest.mark.parametrize(("capability", "wrong", "backend", "why"), [
    (None, 0.0, "torch", "8-bit products need CUDA, the device is cpu"),
    ((8, 0), 0.0, "torch", "compute capability 8.0 is below 8.9"),
    ((8, 9), 0.001, "scaled_mm", "torch "), ((9, 0), 0.2, "torch", "relative error of 0.2"),
])  # fmt: skip
def test_who_multiplies(
    capability: tuple[int, int] | None, wrong: float, backend: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(op, "_error", lambda device: wrong)
    chosen = op.choose_backend("cpu" if capability is None else "cuda")
    assert chosen.backend == backend
    assert why in chosen.reason
