"""The Triton kernels of the gated delta rule against float64: in the interpreter (float32), and on a GPU (bf16).

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted cases run in a process of their own. Inputs lie
before NaN in memory, and whatever the kernels allocate starts as NaN.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from atma_sweep.kernels.gated_delta.op import _chunked, gated_delta_reference
from tiers import every_nth
from tolerances import rounding_bound
from torch import Tensor

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ("readout", "last state", "q", "k", "v", "log_gamma", "beta", "initial state")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 from the start of the process")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU and compiled kernels")]


def before_nan(x: Tensor) -> Tensor:
    """x in the front of an allocation that goes on with a chunk of NaN rows and more."""
    whole = torch.full((x.numel() + 64 * x[0, 0].numel() + 64,), torch.nan, dtype=x.dtype, device=x.device)
    whole[: x.numel()] = x.flatten()
    return whole[: x.numel()].view(x.shape)


def inputs(b: int, t: int, h: int, j: int, d: int, dtype: torch.dtype, kind: str = "plain") -> list[Tensor]:
    """q, k, v, log_gamma, beta, initial state, and gradients of the readout and of the last state."""
    draw = torch.Generator().manual_seed(1000 * t + h)
    shapes = [(b, t, h, d), (b, t, j, d), (b, t, j, d), (b, t, h), (b, t, h), (b, h, d, d), (b, t, h, d), (b, h, d, d)]
    q, k, v, gate, beta, first, g_r, g_last = (torch.randn(shape, generator=draw) for shape in shapes)
    log_gamma = torch.nn.functional.logsigmoid(gate + 3.9)
    if kind == "fast":
        log_gamma = torch.where(gate > 0, -60.0, log_gamma)
    if kind == "kept":
        log_gamma = log_gamma * 1e-7
    if kind == "zeros":
        k[:, 3:9], q[:, 5], k[:, -1] = 0, 0, 0
    return [q.to(dtype), k.to(dtype), v.to(dtype), log_gamma, beta.sigmoid(), first, g_r.to(dtype), g_last]


def exact(made: list[Tensor], first: bool, last: bool, chunked: bool) -> list[Tensor]:
    """Readout, last state and the gradients of every input in float64."""
    *given, g_r, g_last = (x.double() for x in made)
    leaves = [x.requires_grad_() for x in (given if first else given[:-1])]
    state = leaves[5] if first else None
    if chunked:
        r, end = _chunked(*leaves[:5], 64, state)
    else:
        r, end = gated_delta_reference(*leaves[:5], initial_state=state)
    loss = (r * g_r).sum() + ((end * g_last).sum() if last else 0.0)
    return [r.detach(), end.detach(), *torch.autograd.grad(loss, leaves)]


def ours(made: list[Tensor], first: bool, last: bool) -> list[Tensor]:
    from atma_sweep.kernels.gated_delta.triton import backward, forward

    given: list[Any]
    *given, g_r, g_last = (before_nan(x) for x in made)
    given = given if first else [*given[:5], None]
    r, end, saved = forward(*given)
    grads = backward(g_r, g_last if last else None, *given, *saved)
    assert (grads[-1] is None) == (not first)
    return [r, end, *(x for x in grads if x is not None)]


@interpreted
@pytest.mark.parametrize(
    ("t", "heads", "first", "last", "kind"),
    every_nth(
        [
            (1, (4, 2), True, True, "plain"),
            (17, (3, 1), False, True, "plain"),
            (64, (2, 2), True, False, "plain"),
            (65, (4, 2), False, False, "plain"),
            (127, (3, 1), True, True, "plain"),
            (200, (2, 2), True, True, "plain"),
            (130, (2, 1), True, True, "fast"),
            (100, (2, 1), True, True, "kept"),
            (70, (2, 1), True, True, "zeros"),
        ],
        3,
    ),
)
def test_interpreter_gives_the_reference(
    t: int, heads: tuple[int, int], first: bool, last: bool, kind: str, unwritten_memory_is_nan: None
) -> None:
    made = inputs(2 if t < 100 else 1, t, *heads, 16, torch.float32, kind)
    for name, got, want in zip(NAMES, ours(made, first, last), exact(made, first, last, False), strict=False):
        assert got.shape == want.shape, name
        # running sums of -60 reach -2000, and exp makes an absolute error of them a relative one
        near = (
            rounding_bound(torch.float32, 200, condition=4)
            if kind != "fast"
            else rounding_bound(torch.float32, 4, 2000)
        )
        assert (got - want).abs().max() <= near * want.abs().max(), name


@pytest.mark.parametrize("case", [pytest.param(case, marks=on_gpu) for case in (
    (1, 8, 2, True, True), (17, 3, 1, False, False), (127, 4, 4, False, True), (257, 8, 2, True, False),
    (1000, 3, 1, True, True), (1000, 8, 2, False, True),
)])  # fmt: skip
def test_bf16_is_near_float64_and_repeats_bit_for_bit(
    case: tuple[int, int, int, bool, bool], unwritten_memory_is_nan: None
) -> None:
    t, h, j, first, last = case
    made = [x.cuda() for x in inputs(2, t, h, j, 128, torch.bfloat16)]
    got, again, want = ours(made, first, last), ours(made, first, last), exact(made, first, last, True)
    for index, (a, b, c) in enumerate(zip(got, again, want, strict=True)):
        assert torch.equal(a, b), NAMES[index]
        error = (a.double() - c).norm() / c.norm()
        assert error < (4e-3 if index == 0 else 1e-2), f"{NAMES[index]} {float(error):.2e}"


@pytest.mark.parametrize("case", [pytest.param(case, marks=on_gpu) for case in (
    (64, torch.bfloat16, "fast"), (32, torch.bfloat16, "kept"), (16, torch.bfloat16, "zeros"),
    (64, torch.float16, "zeros"), (128, torch.float32, "plain"),
)])  # fmt: skip
def test_other_sizes_types_and_gates_on_a_gpu(
    case: tuple[int, torch.dtype, str], unwritten_memory_is_nan: None
) -> None:
    d, dtype, kind = case
    made = [x.cuda() for x in inputs(2, 130, 4, 2, d, dtype, kind)]
    bound = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    for name, got, want in zip(NAMES, ours(made, True, True), exact(made, True, True, True), strict=True):
        if dtype == torch.float16 and not want.abs().max() < 6e4:
            # a zero key's gradient is 1e12 times that of its direction, beyond float16
            got, want = got[want.abs() < 6e4].nan_to_num(), want[want.abs() < 6e4]
        assert (got.double() - want).norm() <= bound * want.norm(), name
