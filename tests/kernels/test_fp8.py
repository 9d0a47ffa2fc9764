"""Products in 8 bits against their definition in float64, number by number, and against torch's own 8-bit product."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from atma_sweep.kernels.dispatch import SELF_TEST
from atma_sweep.kernels.fp8 import op, rows
from atma_sweep.kernels.fp8.op import fp8_gated_linear, fp8_linear, fp8_linear_reference, round_to_type
from atma_sweep.kernels.fp8.rows import E4M3, E5M2, MAX_EXPONENTS, quantise
from atma_sweep.kernels.gates import squared_relu_gate, squared_relu_gate_backward
from atma_sweep.kernels.norms import rms_norm
from graded import interpreted
from torch._inductor.utils import run_and_get_code

BACKENDS = ["torch", "scaled_mm"]


def normal_numbers(*shape: int, seed: int = 0, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many sizes, so that some are below the smallest normal one of the type."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.exp2(8 * torch.randn(shape, generator=draw))
    return (torch.randn(shape, generator=draw) * size).to(kind)


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_a_cast_takes_the_nearest_number_of_each_row(kind: torch.dtype, source: torch.dtype) -> None:
    x = normal_numbers(57, 131, seed=1, kind=source)
    x[3] = 0
    x[5] *= 2.0**-60
    x[7] *= 2.0**40
    q, scale = quantise(x, kind)
    assert q.dtype == kind
    assert q.is_contiguous()
    assert scale.shape == (57, 1)
    assert torch.equal(torch.log2(scale), torch.log2(scale).round()), "a scale is a power of two"
    assert torch.equal(q.double() * scale, round_to_type(x.double(), kind))
    largest = q.float().abs().amax(-1)
    top = MAX_EXPONENTS[kind]
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
        x = torch.cat(
            [
                normal_numbers(1, 300, seed=2).double() % 2.0 ** MAX_EXPONENTS[kind],
                torch.tensor([[2.0 ** MAX_EXPONENTS[kind]]]),
            ],
            1,
        )
        best = (x.flatten()[:, None] - values).abs().amin(1)
        assert torch.equal((round_to_type(x, kind) - x).abs().flatten(), best)


def test_a_row_that_is_not_finite_becomes_nan() -> None:
    x = normal_numbers(3, 16)
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
    x, w = (
        normal_numbers(*rows, inputs, kind=kind).requires_grad_(),
        normal_numbers(outputs, inputs, seed=1).requires_grad_(),
    )
    b = normal_numbers(outputs, seed=2).requires_grad_() if bias else None
    y = fp8_linear(x, w, b, backend=backend)
    assert (y.dtype, y.shape) == (kind, (*rows, outputs))
    g = normal_numbers(*rows, outputs, seed=3, kind=kind)
    leaves = [x, w] if b is None else [x, w, b]
    grads = torch.autograd.grad(y, leaves, g)
    assert [tensor.dtype for tensor in grads] == [tensor.dtype for tensor in leaves]
    if not y.numel():
        assert not any(gradient.any() for gradient in grads[1:])
        return
    close = 1e-5 if kind == torch.float32 else 5e-3
    assert relative(y.detach(), fp8_linear_reference(x, w, b).detach()) < close
    flat_g, flat_x = g.double().flatten(0, -2), x.detach().double().flatten(0, -2)
    wanted = [
        round_to_type(flat_g, E5M2) @ round_to_type(w.detach().double().t(), E4M3).t(),
        flat_g.t() @ flat_x,
        flat_g.sum(0),
    ]
    for actual, expected in zip(grads, wanted, strict=False):
        assert relative(actual.flatten(0, -2) if actual.ndim > 2 else actual, expected) < close


def test_rounding_error_of_eight_bits_is_bounded() -> None:
    """Normal numbers: three bits of mantissa forward, two for the gradient of x, none lost in that of the weight."""
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=draw).requires_grad_() for shape in ((96, 256), (128, 256)))
    g = torch.randn(96, 128, generator=draw)
    y = fp8_linear(x, w, backend="torch")
    dx, dw = torch.autograd.grad(y, (x, w), g)
    assert 0.02 < relative(y.detach(), (x @ w.t()).detach()) < 0.04
    assert 0.04 < relative(dx, (g @ w).detach()) < 0.07
    assert relative(dw, (g.t() @ x).detach()) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("function", [fp8_linear, fp8_gated_linear])
@pytest.mark.parametrize("outputs", [48, rows.MIN_ROW_WIDTH + 16])
def test_forward_and_backward_compile_to_a_graph_each(function: Any, outputs: int) -> None:
    x, w, b = (
        normal_numbers(*shape, seed=n).requires_grad_() for n, shape in enumerate(((5, 32), (outputs, 32), (outputs,)))
    )

    def numbers(function: Any) -> list[torch.Tensor]:
        y = function(x, w, b, backend="torch")
        return [y, *torch.autograd.grad(y, (x, w, b), torch.ones_like(y))]

    graph = torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
    assert all(torch.equal(*pair) for pair in zip(numbers(graph), numbers(function), strict=True))


# --- the gate behind it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "outputs"), [((2, 7), 80), ((1,), 32), ((0,), 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_layer_is_the_layer_and_the_gate(
    backend: str, shape: tuple[int, ...], outputs: int, bias: bool
) -> None:
    kind = torch.float32 if backend == "torch" else torch.bfloat16
    x, w = normal_numbers(*shape, 48, kind=kind).requires_grad_(), normal_numbers(outputs, 48, seed=1).requires_grad_()
    b = normal_numbers(outputs, seed=2).requires_grad_() if bias else None
    g = normal_numbers(*shape, outputs // 2, seed=3, kind=kind)
    leaves = [x, w] if b is None else [x, w, b]
    results = []
    for y in (fp8_gated_linear(x, w, b, backend=backend), squared_relu_gate(fp8_linear(x, w, b, backend=backend))):
        assert (y.dtype, y.shape) == (kind, (*shape, outputs // 2))
        results.append([y.detach(), *torch.autograd.grad(y, leaves, g)])
    for gated, composed in zip(*results, strict=True):
        assert gated.dtype == composed.dtype
        # sums over rows of 16 bits are added up in float32 by one, and as torch likes by the other
        assert torch.equal(gated, composed) or relative(gated, composed) < 4e-3
    assert all(torch.equal(*pair) for pair in zip(results[0][:3], results[1][:3], strict=True))


def differently(q: torch.Tensor, expected: torch.Tensor) -> int:
    """Numbers of 8 bits that are not the same."""
    return int((q.float() != expected.float()).sum())


def exact(kind: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal numbers with two bits of mantissa, of either sign."""
    draw = torch.Generator().manual_seed(shape[0])
    sign = torch.randint(0, 2, shape, generator=draw) * 2 - 1
    size = torch.exp2(torch.randint(-6, 7, shape, generator=draw).float())
    return (sign * size * (1 + torch.randint(0, 4, shape, generator=draw) / 4)).to(kind)


# Triton's interpreter cuts where hardware rounds to the nearest, so there all numbers are of the type already
CASTS = [(1, 2), (3, 17), (57, 130), (5, 2048), (2, 3072)]
GATES = [(1, 1), (3, 17), (67, 65), (300, 8), (2, 1536)]
KINDS = [torch.float32, torch.bfloat16]


def check_cast(x: torch.Tensor) -> None:
    """Against torch's operations, also with rows of zeros and with what is no number."""
    count = len(x)
    x[0] *= 2.0**-60
    if count > 2:
        x[1], x[2, 0] = 0, float("nan")
    (q, s), (wanted, unit) = rows.cast_rows(x), quantise(x, E5M2)
    good = [row for row in range(count) if not (count > 2 and row == 2)]
    assert torch.equal(s[good], unit[good])
    assert differently(q[good], wanted[good]) == 0
    if count > 2:
        assert bool(q[2].float().isnan().any()), "so the products of that row are no numbers either"


def check_gate(ag: torch.Tensor, dy: torch.Tensor) -> None:
    """Against float64 and `quantise`."""
    d, q, s, sums = rows.gate_rows(ag, dy)
    a, g = ag.double().chunk(2, -1)
    exact = torch.cat([2 * a.clamp(min=0) * g * dy.double(), a.clamp(min=0).square() * dy.double()], -1)
    # one rounding each, where torch's operations round after every product
    off = (d.double() - exact).abs() / exact.abs().clamp(min=1e-30)
    assert float(off.max()) <= (3e-7 if ag.dtype == torch.float32 else 2.0**-8)
    wanted, unit = quantise(d, E5M2)
    assert torch.equal(s, unit)
    assert differently(q, wanted) == 0
    assert float((sums.double() - d.double().sum(0)).abs().max()) <= 1e-5 * float(d.double().abs().sum(0).max())


@interpreted
@pytest.mark.parametrize(("count", "width"), CASTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_casts_as_torch_does(
    count: int, width: int, kind: torch.dtype, unwritten_memory_is_nan: None
) -> None:
    check_cast(exact(kind, count, width))


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize(("count", "half"), GATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gates_kernel_is_gate_cast_and_sum(
    count: int, half: int, kind: torch.dtype, unwritten_memory_is_nan: None
) -> None:
    # powers of two, of which products are some
    ag, dy = (exact(kind, count, size).float() for size in (2 * half, half))
    ag, dy = ((tensor.sign() * torch.exp2(torch.log2(tensor.abs()).div(3).floor())).to(kind) for tensor in (ag, dy))
    check_gate(ag, dy)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_any_numbers_are_cast_to_the_same_bits(kind: torch.dtype) -> None:
    for count, width in [*CASTS, (1000, 8192)]:
        check_cast(normal_numbers(count, width, seed=4, kind=kind).cuda())
    for count, half in [*GATES, (3000, 4096)]:
        ag, dy = (normal_numbers(count, size, seed=5).clamp(-1e3, 1e3).to(kind).cuda() for size in (2 * half, half))
        check_gate(ag, dy)


@interpreted
def test_wide_gradients_take_the_kernel_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "choose_backend", lambda device, dtype: rows.BackendChoice("triton", "asked for"))
    widths: list[int] = []
    cast = rows.cast_rows
    monkeypatch.setattr(rows, "cast_rows", lambda g: (widths.append(g.shape[1]), cast(g))[1])
    for width in (rows.MIN_ROW_WIDTH - 1, rows.MIN_ROW_WIDTH, rows.MAX_ROW_WIDTH + 1):
        g = exact(torch.bfloat16, 2, width)
        for actual, expected in zip(rows.quantise_gradient(g), quantise(g, E5M2), strict=True):
            assert torch.equal(actual.float(), expected.float())
    assert widths == [rows.MIN_ROW_WIDTH]


def test_the_self_test_of_casts_takes_another_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient rounded once, as the kernel's, and not after each operation: single rows then have another power of two as s."""
    changed_scales = []

    def rounded_once(ag: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        d = squared_relu_gate_backward(ag.float(), dy.float()).bfloat16()
        q, s = quantise(d, E5M2)
        changed_scales.append(int((s != rows._gate_backward(ag, dy)[2]).sum()))
        return d, q, s, d.sum(0, dtype=torch.float32)

    monkeypatch.setattr(rows, "cast_rows", lambda g: quantise(g, E5M2))
    monkeypatch.setattr(rows, "gate_rows", rounded_once)
    case = torch.device("cpu"), torch.bfloat16
    errors = [rows._error(*case, seed=seed) for seed in range(6)]
    assert 0.01 < max(errors) <= SELF_TEST
    assert max(changed_scales) > 0


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: apt-get install g++")
def test_a_cast_is_in_the_kernel_of_the_norm_before_it() -> None:
    """Maximum, scale and cast are no passes of their own, with the compiler's code for the CPU."""
    x, w = normal_numbers(64, 256, kind=torch.bfloat16), normal_numbers(256, seed=1)
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
    monkeypatch.setattr(op, "_error", lambda device, *, seed: wrong)
    chosen = op.choose_backend("cpu" if capability is None else "cuda")
    assert chosen.backend == backend
    assert why in chosen.reason
