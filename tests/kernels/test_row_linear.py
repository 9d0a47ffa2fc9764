"""Products of one row with what stands before and behind them, against float64; on a GPU in bf16."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from atma_sweep.kernels.gates import squared_relu_gate_reference, swish_gate_reference
from atma_sweep.kernels.norms import rms_norm_reference
from atma_sweep.kernels.row_linear import op as module
from atma_sweep.kernels.row_linear.op import choose_backend, row_conv_step, row_linear
from graded import interpreted
from torch import Tensor

TRUE = "test_schema", "test_faketensor", "test_aot_dispatch_static"
WAYS = [*product(("none", "relu2", "swiglu"), (False, True), (False, True), (False, True))]
"""gate, norm, bias, under"""


def case(rows: int, inputs: int, outputs: int, way: tuple[str, bool, bool, bool]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in float64: x, w, bias, then those by name."""
    gate, norm, bias, under = way
    draw = torch.Generator().manual_seed(0)
    shapes = (rows, inputs), (outputs, inputs), (outputs,), (inputs,), (rows, outputs // (1 if gate == "none" else 2))
    x, w, b, n, u = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    args = [x, w * inputs**-0.5, b if bias else None]
    return args, {"norm_D": n if norm else None, "eps": 1e-3, "gate": gate, "under_BE": u if under else None}


def expected(args: list[Any], named: dict[str, Any]) -> Tensor:
    x, w, bias = args
    x = x if named["norm_D"] is None else rms_norm_reference(x, named["norm_D"], named["eps"])
    y = torch.einsum("bd,ed->be", x, w) + (0 if bias is None else bias)
    if named["gate"] != "none":
        y = squared_relu_gate_reference(y) if named["gate"] == "relu2" else swish_gate_reference(y)
    return y if named["under_BE"] is None else y + named["under_BE"]


def to(
    dtype: torch.dtype, args: list[Any], named: dict[str, Any], device: str = "cpu"
) -> tuple[list[Any], dict[str, Any]]:
    def cast(argument: Any) -> Any:
        return argument.to(device, dtype) if isinstance(argument, Tensor) else argument

    return [cast(argument) for argument in args], {name: cast(argument) for name, argument in named.items()}


@pytest.mark.parametrize("way", WAYS[::3])
def test_the_formula(way: tuple[str, bool, bool, bool]) -> None:
    args, named = case(3, 20, 14, way)
    torch.testing.assert_close(row_linear(*args, **named), expected(args, named))


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize(("inputs", "outputs"), [(33, 22), (1100, 40), (300, 38), (70, 70)])
def test_the_kernels_in_the_interpreter(inputs: int, outputs: int) -> None:
    for way in WAYS:
        args, named = case(1, inputs, outputs, way)
        y = row_linear(*to(torch.float32, args, named)[0], **to(torch.float32, args, named)[1], backend="triton")
        torch.testing.assert_close(y.double(), expected(args, named), rtol=1e-5, atol=1e-5)


def conv_case(rows: int, bias: bool, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Arguments of `row_conv_step`: 70 inputs, 22 channels, 4 taps."""
    draw = torch.Generator().manual_seed(1)
    shapes = (rows, 70), (66, 70), (66,), (70,), (20, 3, 22), (22, 4)
    x, w, b, norm, tails, filters = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
    slots = torch.randperm(20, generator=draw)[:rows].to(device)
    return [x, w / 8, b if bias else None, norm, 1e-3, tails, slots, filters]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_convolution_behind_its_product(rows: int, bias: bool) -> None:
    args = conv_case(rows, bias, torch.float64)
    x, w, b, norm, eps, tails, slots, filters = args
    before = tails.clone()
    first, gate, last = (rms_norm_reference(x, norm, eps) @ w.T + (b if bias else 0)).chunk(3, -1)
    seen = torch.cat([before[slots], (first * last)[:, None]], 1)
    wanted = gate * torch.einsum("bwc,cw->bc", seen, filters)
    torch.testing.assert_close(row_conv_step(*args), wanted)
    torch.testing.assert_close(tails[slots], seen[:, 1:])
    if torch.cuda.is_available() or rows > 1:
        return  # the kernels are compiled there, see below, and for one row
    short = conv_case(rows, bias, torch.float32)
    torch.testing.assert_close(row_conv_step(*short, backend="triton").double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(short[5].double(), tails, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_the_compiled_kernel_of_a_convolution_behind_its_product() -> None:
    case, exact = conv_case(1, True, torch.bfloat16, "cuda"), conv_case(1, True, torch.bfloat16)
    exact = [
        argument.double() if isinstance(argument, Tensor) and argument.is_floating_point() else argument
        for argument in exact
    ]
    y, wanted = row_conv_step(*case, backend="triton"), row_conv_step(*exact, backend="torch")
    assert float((y.double().cpu() - wanted).norm() / wanted.norm()) < 0.02
    assert float((case[5].double().cpu() - exact[5]).norm() / exact[5].norm()) < 0.02


@interpreted
@pytest.mark.thorough
def test_the_op_says_truly_what_it_returns() -> None:
    for way in (WAYS[0], WAYS[-1], WAYS[9]):
        (x, w, bias), named = to(torch.float32, *case(1, 33, 22, way))
        args = x, w, bias, named["norm_D"], 1e-3, module.GATES[way[0]], named["under_BE"]
        torch.library.opcheck(module.fused, args, test_utils=TRUE)
    torch.library.opcheck(module.fused_conv, tuple(conv_case(1, True, torch.float32)), test_utils=TRUE)


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 8192), (4096, 1024), (1000, 50), (33, 22)])
def test_the_compiled_kernels(inputs: int, outputs: int) -> None:
    assert choose_backend("cuda", torch.bfloat16, 1).backend == "triton"
    for way in WAYS:
        args, named = to(torch.bfloat16, *case(1, inputs, outputs, way))
        wanted = expected(*to(torch.float64, args, named))
        args, named = to(torch.bfloat16, args, named, "cuda")
        y = row_linear(*args, **named, backend="triton").double().cpu()
        assert float((y - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.gpu
def test_kernels_that_start_early_wait_for_what_they_read() -> None:
    """A chain of products, each of what the one before has written, as they come and as a CUDA graph: the same bits as one by one."""
    draw = torch.Generator().manual_seed(5)
    weights = [(torch.randn(1024, 1024, generator=draw) / 32).cuda().bfloat16() for _ in range(40)]
    x, norm = torch.randn(1, 1024, generator=draw).cuda().bfloat16(), torch.ones(1024, device="cuda")

    def chain(alone: bool) -> Tensor:
        y = x
        for w in weights:
            y = row_linear(y, w, norm_D=norm, eps=1e-6, under_BE=y, backend="triton")
            if alone:
                torch.cuda.synchronize()
        return y

    wanted = chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = chain(False)
    for _ in range(50):
        assert torch.equal(chain(False), wanted)
        graph.replay()
        assert torch.equal(actual, wanted)


def test_several_rows_choose_torch() -> None:
    assert choose_backend("cuda", torch.bfloat16, 17) == ("torch", "the kernel supports a single row, got 17")
    assert choose_backend("cpu", torch.bfloat16, 1).backend == "torch"
