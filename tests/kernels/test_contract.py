"""The contract of every operation with kernels: near float64 at odd sizes, repeatable, nothing read beyond its inputs, refusals, torch ops.

Kernels run in Triton's interpreter, in float32 and float16, or compiled on a GPU. torch.empty gives NaN, so an output that a
kernel leaves unwritten shows in every comparison. `kernel_operations.OPERATIONS` lists the operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.kernels.custom_ops import load_kernels
from atma_sweep.kernels.dispatch import CONDITION, ROUNDINGS
from graded import check, distance, double, in_type, interpreted, run, surrounded
from kernel_operations import ATTENTIONS, DIFFERENCES, LOOPS, OPERATIONS, Case, contextual_inputs, threshold_inputs
from tiers import every_nth
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),  # infinity is meant
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


def with_heads_first(x: Tensor) -> Tensor:
    """The same numbers with heads before tokens, or columns before rows."""
    first = min(1, x.ndim - 2)
    return x.detach().transpose(first, first + 1).contiguous().transpose(first, first + 1).requires_grad_()


@pytest.mark.parametrize(
    "at", range(len(LOOPS)), ids=[f"{function.__name__}-{options}" for function, *_, options in LOOPS]
)
def test_torch_path_is_the_loop_over_pairs(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result and gradients, whatever the block of queries."""
    function, exact, inputs, options = LOOPS[at]
    if "DIRECT" in function.__globals__:  # so that wall attention works out more than one part channel by channel
        monkeypatch.setitem(function.__globals__, "DIRECT", 4)
    args = double(inputs)
    theirs = run(exact, args, **{name: options[name] for name in ("scale", "window") if name in options})
    check(run(function, args, **options), theirs, 1, near=1e-13, gradient=1e-12)


@interpreted
@pytest.mark.parametrize(
    ("name", "case"), [param for name, op in OPERATIONS.items() for param in every_nth([(name, x) for x in op.cases], op.nth)]
)  # fmt: skip
def test_kernels_are_near_float64(name: str, case: Case) -> None:
    op, (sizes, options) = OPERATIONS[name], case
    args = op.inputs(**sizes)
    ours = run(op.function, args, **options, backend="triton")
    assert all(torch.isfinite(x).all() for x in ours)
    theirs = run(op.exact, double(args), **options)
    gradient = op.alone if op.alone is not None and options.get("window") == 1 else op.gradient
    check(ours, theirs, op.results, near=op.near, gradient=gradient)


@interpreted
@pytest.mark.parametrize(
    ("name", "changed"),
    [(name, {}) for name in OPERATIONS]
    + [pytest.param(name, {"window": None}, marks=pytest.mark.thorough) for name in ATTENTIONS],
)
def test_kernels_repeat_and_read_nothing_but_their_inputs(name: str, changed: dict[str, Any]) -> None:
    """The same bits again, with NaN before and behind every input, and with inputs in other strides."""
    op = OPERATIONS[name]
    sizes, options = op.neighbours[0], op.neighbours[1] | changed
    args = op.inputs(**sizes)
    poisoned = [surrounded(x) if index < op.batched else x for index, x in enumerate(args)]
    assert all(x.is_contiguous() for x in poisoned)
    strided = [with_heads_first(x) if index < op.strided else x for index, x in enumerate(args)]
    assert not strided[0].is_contiguous()
    results = [run(op.function, leaves, **options, backend="triton") for leaves in (args, args, poisoned, strided)]
    assert all(torch.isfinite(x).all() for x in results[0])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


@interpreted
@pytest.mark.parametrize("name", [name for name, op in OPERATIONS.items() if torch.float16 in op.dtypes])
def test_kernels_in_float16_are_near_float64(name: str) -> None:
    """Within the roundings that a self-test allows; the interpreter multiplies no bfloat16."""
    op = OPERATIONS[name]
    sizes, options = op.half or op.neighbours
    args = in_type(op.inputs(**sizes), torch.float16, op.narrow)
    ours = run(op.function, args, **options, backend="triton")
    theirs = run(op.exact, double(args), **options)
    assert [x.dtype for x in ours[1 : op.results]] == [torch.float32] * (op.results - 1), "magnitudes are wide"
    assert ours[0].dtype == torch.float16
    bound = CONDITION * math.sqrt(ROUNDINGS) * torch.finfo(torch.float16).eps / 2
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert distance(a, b) <= bound * (1.0 if index < op.results else op.condition), index


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


@interpreted
@pytest.mark.parametrize(
    ("name", "keys", "window"),
    [param for name in ("threshold", "contextual")
     for param in every_nth([(name, 64, None), (name, 32, 60), (name, 32, None), (name, 64, 33)], 4)],
)  # fmt: skip
def test_keys_beyond_a_stretch(name: str, keys: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders kept for a stretch of keys at a time: the same numbers to the bit."""
    op = OPERATIONS[name]
    args = threshold_inputs(70, 2, 1) if name == "threshold" else contextual_inputs(133, 2, 1, 30, shut=1.5)
    at_once = run(op.function, args, window=window, backend="triton")
    monkeypatch.setattr(load_kernels(op.function.__module__.rpartition(".")[0]), "STRETCH", keys)
    results = run(op.function, args, window=window, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(results, at_once, strict=True))
    check(results, run(op.exact, double(args), window=window), 1, near=op.near, gradient=op.gradient)


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
        pytest.skip(f"this GPU does not take gluon: {chosen}")
    args = in_type(op.inputs(**sizes, d=d), torch.bfloat16, 3, "cuda")
    ours, again = (run(op.function, args, **options, backend=backend) for _ in range(2))
    exact = run(op.exact, double(args), **options)
    for index, (a, same, b) in enumerate(zip(ours, again, exact, strict=True)):
        assert torch.equal(a, same), index
        print(f"{name} {index}: {distance(a, b):.2e}")
        assert distance(a, b) <= op.gpu_near, index
