"""The contract of every operation: near float64 at odd sizes and in 16 bits, repeatable, nothing read beyond its inputs, refusals, torch ops.

Kernels run in Triton's interpreter, in float32 and float16, or compiled on a GPU. torch.empty gives NaN, so an output that a
kernel leaves unwritten shows in every comparison. `kernel_operations.OPERATIONS` lists the operations.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.kernels.attention.path.op import path_attention
from atma_sweep.kernels.attention.polar.op import polar_distractor_loss
from atma_sweep.kernels.attention.polysketch.op import polysketch_attention
from atma_sweep.kernels.attention.softmax.op import softmax_distractor_loss
from atma_sweep.kernels.channelwise_delta.op import channelwise_delta
from atma_sweep.kernels.conv.op import canon, causal_conv, gated_causal_conv
from atma_sweep.kernels.conv_step.op import canon_step, conv_step
from atma_sweep.kernels.cross_entropy.op import linear_cross_entropy, linear_cross_entropy_sum
from atma_sweep.kernels.custom_ops import load_kernels
from atma_sweep.kernels.delta_step.op import delta_step
from atma_sweep.kernels.dispatch import CONDITION, ROUNDINGS
from atma_sweep.kernels.fp8.op import fp8_gated_linear, fp8_linear
from atma_sweep.kernels.gated_delta.op import gated_delta
from atma_sweep.kernels.gates import squared_relu_gate, swish_gate
from atma_sweep.kernels.key_gated_step.op import KeyGates, paged_wall_from_keys
from atma_sweep.kernels.norms import rms_norm
from atma_sweep.kernels.paged.op import paged_softmax
from atma_sweep.kernels.paged.page_tables import Texts
from atma_sweep.kernels.rotary import frequencies
from atma_sweep.kernels.row_linear.op import row_linear
from atma_sweep.kernels.sketch.op import sketch
from atma_sweep.kernels.wall_step.op import paged_wall
from graded import check, distance, double, in_type, interpreted, run, surrounded
from kernel_operations import (
    ATTENTIONS,
    DIFFERENCES,
    FORMULAS,
    OPERATIONS,
    Case,
    Formula,
    Operation,
    contextual_inputs,
    threshold_inputs,
)
from tolerances import rounding_bound
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),  # infinity is meant
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


def with_heads_first(x: Tensor) -> Tensor:
    """The same numbers with heads before tokens, or columns before rows."""
    first = min(1, x.ndim - 2)
    return x.detach().transpose(first, first + 1).contiguous().transpose(first, first + 1).requires_grad_()


def exactly(of: Operation | Formula, args: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The oracle's results and gradients in float64, with those of the options that it has."""
    named = inspect.signature(of.exact).parameters
    every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in named.values())
    return run(of.exact, double(args), **{name: value for name, value in options.items() if every or name in named})


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: f"{formula.function.__name__}-{formula.options}")
def test_torch_path_is_the_naive_formula(formula: Formula, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result and gradients, whatever the window, the block of queries and the chunk."""
    if (
        "DIRECT" in formula.function.__globals__
    ):  # so that wall attention works out more than one part channel by channel
        monkeypatch.setitem(formula.function.__globals__, "DIRECT", 4)
    ours = run(formula.function, double(formula.inputs), **formula.options)
    theirs = exactly(formula, formula.inputs, formula.options)
    check(ours, theirs, len(ours) - len(formula.inputs), near=formula.near, gradient=formula.gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_torch_path_in_16_bits_is_near_float64(name: str, dtype: torch.dtype) -> None:
    """Weights, values, their mean and the result are rounded; a magnitude stays in float32."""
    op = ATTENTIONS[name]
    sizes, options = op.neighbours
    args = in_type(op.inputs(**sizes), dtype, 3)
    ours, theirs = run(op.function, args, **options, backend="torch"), exactly(op, args, options)
    assert [x.dtype for x in ours[: len(ours) - len(args)]] == [dtype, torch.float32][: len(ours) - len(args)]
    assert (ours[0].double() - theirs[0]).abs().max() <= rounding_bound(dtype, 4) * theirs[0].abs().max()


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, op in OPERATIONS.items() for case in op.cases]
)  # fmt: skip
def test_kernels_are_near_float64(name: str, case: Case) -> None:
    op, (sizes, options) = OPERATIONS[name], case
    args = op.inputs(**sizes)
    ours = run(op.function, args, **options, backend="triton")
    assert all(torch.isfinite(x).all() for x in ours)
    gradient = op.alone if op.alone is not None and options.get("window") == 1 else op.gradient
    steep = op.steepness(sizes)
    theirs = exactly(op, args, options)
    check(ours, theirs, len(ours) - len(args), near=op.near * steep, gradient=gradient * steep)


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize(
    ("name", "changed"),
    [(name, {}) for name in OPERATIONS] + [(name, {"window": None}) for name in ATTENTIONS],
)
def test_kernels_repeat_and_read_nothing_but_their_inputs(name: str, changed: dict[str, Any]) -> None:
    """The same bits again, with NaN before and behind every input, and with inputs in other strides."""
    op = OPERATIONS[name]
    sizes, options = op.neighbours[0], op.neighbours[1] | changed
    args = op.inputs(**sizes)
    poisoned = [surrounded(x) if index < op.batched else x for index, x in enumerate(args)]
    assert all(x.is_contiguous() for x in poisoned)
    strided = [with_heads_first(x) if index < op.strided else x for index, x in enumerate(args)]
    assert not op.strided or not strided[0].is_contiguous()
    before = [x.detach().clone() for x in args]
    results = [run(op.function, leaves, **options, backend="triton") for leaves in (args, args, poisoned, strided)]
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True)), "inputs are left as they were"
    assert all(torch.isfinite(x).all() for x in results[0])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("name", [name for name, op in OPERATIONS.items() if torch.float16 in op.dtypes])
def test_kernels_in_float16_are_near_float64(name: str) -> None:
    """Within the roundings that a self-test allows; the interpreter multiplies no bfloat16."""
    op = OPERATIONS[name]
    sizes, options = op.half or op.neighbours
    args = in_type(op.inputs(**sizes), torch.float16, op.narrow)
    ours = run(op.function, args, **options, backend="triton")
    theirs, results = exactly(op, args, options), len(ours) - len(args)
    assert [x.dtype for x in ours[1:results]] == [torch.float32] * (results - 1), "magnitudes and states are wide"
    assert ours[0].dtype == torch.float16
    bound = CONDITION * math.sqrt(ROUNDINGS) * torch.finfo(torch.float16).eps / 2
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert distance(a, b) <= bound * (1.0 if index < results else op.condition), index


@pytest.mark.parametrize(
    ("name", "change", "options", "message"), [(name, *wrong) for name, op in OPERATIONS.items() for wrong in op.wrong]
)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_inputs_are_refused(
    name: str, change: Callable[[list[Tensor]], list[Tensor]], options: dict[str, Any], message: str, backend: str
) -> None:
    """By a message with both sizes, whatever the backend."""
    op = OPERATIONS[name]
    more = {"wall": {"p": 4}, "contextual": {"positions": 3}, "relative": {"reach": 3}}.get(name, {})
    args = op.inputs(13, 4, 2, **more) if name in ATTENTIONS else []
    with pytest.raises(ValueError, match=message):
        op.function(*change(args), **options, backend=backend)


@pytest.mark.parametrize("at", range(len(DIFFERENCES)))
def test_gradients_of_torch_path_are_those_of_differences(at: int) -> None:
    function, inputs, options = DIFFERENCES[at]
    attention = functools.partial(function, **options)
    assert torch.autograd.gradcheck(attention, double(inputs), eps=1e-6, atol=1e-8, fast_mode=True)


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize(
    ("name", "keys", "window"),
    [param for name in ("threshold", "contextual")
     for param in ((name, 64, None), (name, 32, 60), (name, 32, None), (name, 64, 33))],
)  # fmt: skip
def test_keys_beyond_a_stretch(name: str, keys: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders kept for a stretch of keys at a time: the same numbers to the bit."""
    op = OPERATIONS[name]
    args = threshold_inputs(70, 2, 1) if name == "threshold" else contextual_inputs(133, 2, 1, 30, shut=1.5)
    at_once = run(op.function, args, window=window, backend="triton")
    monkeypatch.setattr(load_kernels(op.function.__module__.rpartition(".")[0]), "SEGMENT_TOKENS", keys)
    results = run(op.function, args, window=window, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(results, at_once, strict=True))
    check(results, exactly(op, args, {"window": window}), 1, near=op.near, gradient=op.gradient)


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize("name", OPERATIONS)
def test_ops_keep_the_rules_of_torch(name: str) -> None:
    """Nothing changed in place, shapes and types without data, gradients, and the same in a compiled graph."""
    for which, (op, args) in OPERATIONS[name].ops().items():
        results = torch.library.opcheck(op, args)
        assert set(results.values()) == {"SUCCESS"}, (which, results)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, op in OPERATIONS.items() for case in op.gpu])
def test_in_bf16_compiled_kernels_are_near_float64_and_repeat(name: str, case: Case, d: int, backend: str) -> None:
    op, (sizes, options) = OPERATIONS[name], case
    assert op.choose is not None
    chosen = op.choose(torch.bfloat16, d, options)
    assert chosen.backend != "torch", chosen
    if backend == "gluon" != chosen.backend:
        pytest.skip(f"needs an NVIDIA GPU that takes gluon: {chosen}")
    args = in_type(op.inputs(**sizes, d=d), torch.bfloat16, 3, "cuda")
    ours, again = (run(op.function, args, **options, backend=backend) for _ in range(2))
    exact = exactly(op, args, options)
    for index, (a, same, b) in enumerate(zip(ours, again, exact, strict=True)):
        assert torch.equal(a, same), index
        print(f"{name} {index}: {distance(a, b):.2e}")
        assert distance(a, b) <= (op.gpu_near if index or op.gpu_result is None else op.gpu_result), index


# --- other inputs that are refused -----------------------------------------------------------------------------------

QKV = [torch.zeros(2, 5, heads, 4) for heads in (4, 2, 2)]
GATES = torch.zeros(2, 5, 4)
POOL, WIDE_POOL, TEXTS = (
    torch.zeros(3, 4, 2, 6), torch.zeros(3, 4, 3, 6),
    Texts(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32), 4),
)  # fmt: skip
REFUSED: list[tuple[str, Callable[..., object], tuple[Any, ...], dict[str, Any]]] = [
    (message, function, tuple(torch.zeros(x) if type(x) is tuple else x for x in args), options)
    for message, function, args, options in (
        (r"\(1, 13, 4, 16\).*\(2, 5, 2, 16\)", polar_distractor_loss, ((1, 13, 4, 16), (2, 5, 2, 16), (4,), (4,), (4,)), {}),
        (r"but the distractors are", softmax_distractor_loss, (*QKV, (2, 3, 2, 4), (2, 2, 2, 4), QKV[0]), {}),
        (r"\(2, 5, 2, 4\).*\(2, 5, 2, 3\)", softmax_distractor_loss, (*QKV, *((2, 5, 2, 3),) * 2, QKV[0]), {"backend": "triton"}),
        (r"\(2, 5, 2, 4\), but w \(2, 4, 2, 4\), beta \(2, 5, 2\)", path_attention, (*QKV, (2, 4, 2, 4), (2, 5, 2)), {}),
        (r"backend fla does not support a window", path_attention, (*QKV, (2, 5, 2, 4), (2, 5, 2)), {"window": 3, "backend": "fla"}),
        (r"backend triton does not support a window; use backend torch", polysketch_attention,
         (*QKV, (2, 2, 4, 3)), {"block": 2, "window": 3, "backend": "triton"}),
        (r"backend triton does not support learned draws", polysketch_attention,
         (*QKV, torch.zeros(2, 2, 4, 3).requires_grad_()), {"block": 2, "backend": "triton"}),
        (r"draws have shape \(2, 4, 4, 3\), but k needs \[degree / 2, 2, 4, r\]", polysketch_attention,
         (*QKV, (2, 4, 4, 3)), {"block": 2}),
        (r"needs 16-bit CUDA tensors", gated_delta, (*QKV, GATES, GATES), {"backend": "fla"}),
        (r"unknown backend 'cuda'", gated_delta, (*QKV, GATES, GATES), {"backend": "cuda"}),
        (r"beta has shape \(2, 4, 4\), but q needs \[2, 5, 4\]", gated_delta, (*QKV, GATES, (2, 4, 4)), {}),
        (r"initial_state has shape", gated_delta, (*QKV, GATES, GATES), {"initial_state": torch.zeros(2, 4, 4, 5)}),
        (r"log_gamma", channelwise_delta, (*QKV, (2, 5, 4, 1), GATES), {}),
        (r"\(1, 5, 3\) and \(4, 4\)", causal_conv, ((1, 5, 3), (4, 4)), {}),
        (r"at most 4 taps, got 5; use backend torch", gated_causal_conv, ((2, 9, 12), (4, 5)), {"backend": "triton"}),
        (r"at most 4 taps, got 5; use backend torch", canon, ((2, 9, 2, 2), (4, 5)), {"norm": True, "backend": "triton"}),
        *((rf"got {size}", frequencies, (kind, size, 1024.0), {})
          for kind, size in (("full", 5), ("half-truncated", 6), ("half-truncated", 4))),
        (r"\(7,\).*8", rms_norm, ((1, 8), (7,)), {}),
        *((r"got 7", gate, ((3, 5, 7),), {}) for gate in (squared_relu_gate, swish_gate)),
        *((message, losses, args, {"cap": 15.0} | options)
          for losses in (linear_cross_entropy, linear_cross_entropy_sum) for message, args, options in (
            (r"\(3, 4\).*\(5, 3\)", ((3, 4), (5, 3), (5,), (3,)), {}), (r"3 rows.*\(2,\)", ((3, 4), (5, 4), (5,), (2,)), {}),
            (r"chunk must be at least 1, got 0", ((3, 4), (5, 4), (5,), (3,)), {"chunk": 0}))),
        (r"\(2, 5\).*\(1, 3, 4\)", sketch, ([torch.zeros(2, 5)], (1, 3, 4)), {}),
        (r"\(5,\).*\(1, 3, 5\)", sketch, ([torch.zeros(5)], (1, 3, 5)), {}),
        (r"\(2, 5\), \(3, 5\) and \(2, 3, 5\)", sketch, ([torch.zeros(2, 5), torch.zeros(3, 5)], (2, 3, 5)), {}),
        (r"but the pools \(3, 4, 2, 6\) and \(3, 4, 3, 6\) in pages of 4", paged_softmax, ((2, 4, 6), POOL, WIDE_POOL, TEXTS), {}),
        (r"3 KV heads must divide 4 query heads", paged_softmax, ((2, 4, 6), WIDE_POOL, WIDE_POOL, TEXTS), {}),
        (r"q has 1 rows, but the tables 2", paged_softmax, ((1, 4, 6), POOL, POOL, TEXTS), {}),
        (r"q must be \[B, H, X\] and a pool", paged_softmax, ((4, 6), POOL, POOL, TEXTS), {}),
        (r"k has shape \(3, 4, 2, 6\), expected \(3, 5, 2, 6\)", paged_wall, ((2, 4, 6), POOL, POOL, (3, 2, 2, 6), (2, 2, 6), Texts(TEXTS.tables_BP, TEXTS.lengths_B, 5)), {}),
        (r"fall has shape \(2, 4, 6\), expected \(2, 2, 6\)", paged_wall, ((2, 4, 6), POOL, POOL, (3, 2, 2, 6), (2, 4, 6), TEXTS), {}),
        (r"3 anchors must divide a page of 4", paged_wall, ((2, 4, 6), POOL, POOL, (3, 3, 2, 6), (2, 2, 6), TEXTS), {}),
        (r"gates have shapes \(2, 3, 6\) and \(2, 6\), expected \(2, 6, 6\) and \(2, 6\)", paged_wall_from_keys,
         ((2, 4, 6), POOL, POOL, KeyGates(torch.zeros(2, 3, 6), torch.zeros(2, 6), None), TEXTS), {}),
        (r"the tails", conv_step, ((2, 5), (4, 3, 2), torch.arange(2), (5, 4)), {}),
        (r"but the states", delta_step, ((2, 4, 8), (2, 2, 8), (2, 2, 8), (2, 4), (2, 4), (5, 2, 8, 8), torch.arange(2)), {}),
        (r"do not fit 4 query heads", canon_step, ((3, 100), (5, 3, 96), torch.arange(3), (96, 4), [4, 2, 24]), {"norm": True}),
        (r"x must be \[B, D\] and w \[E, D\] of one type, got \(2, 4\) torch.float32 and", row_linear,
         ((2, 4), torch.zeros(6, 4).double()), {}),
        (r"x must be \[B, D\]", row_linear, ((2, 4), (6, 3)), {}),
        (r"the kernel supports a single row, got 2", row_linear, ((2, 4), (6, 4)), {"backend": "triton"}),
        *((message, linear, ((3, inputs), w), {"backend": "scaled_mm"})
          for linear in (fp8_linear, fp8_gated_linear) for inputs, w, message in (
            (16, (16,), "but w has shape"), (16, (32, 17), "but w has shape"), (24, (32, 24), "multiples of 16"))),
        (r"multiples of 16", fp8_linear, ((3, 16), (24, 16)), {"backend": "scaled_mm"}),
        (r"two halves", fp8_gated_linear, ((3, 16), (31, 16)), {"backend": "torch"}),
    )
]  # fmt: skip
"""What the ValueError says, the operation, and its arguments, of which those without numbers are shapes."""


@pytest.mark.parametrize(("message", "function", "args", "options"), REFUSED)
def test_further_wrong_inputs_are_refused(
    message: str, function: Callable[..., object], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        function(*args, **options)
