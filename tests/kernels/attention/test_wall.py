"""Wall attention: the formula against a loop over pairs, its identities, and the Triton kernels."""

from __future__ import annotations

import math

import pytest
import torch
from atma_sweep.kernels.attention.wall import op as wall
from atma_sweep.kernels.attention.wall.op import choose_backend, wall_attention
from atma_sweep.kernels.custom_ops import load_kernels
from graded import check, double, interpreted, run
from kernel_operations import wall_inputs as inputs
from tiers import every_nth
from torch import Tensor

D = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


@pytest.mark.parametrize("p", [4, 2])
def test_what_moves_all_sums_alike_moves_nothing(p: int) -> None:
    """The first gate has no gradient, and q dq and k dk of a channel add up to the same over all tokens."""
    q, k, v, f = double(inputs(37, 4, 2, p))
    _, dq, dk, _, df = run(wall_attention, [q, k, v, f], window=20)
    assert df[:, 0].abs().max() <= 1e-14
    assert (df[:, 1:].abs().amax((0, 2, 3)) > 1e-9).all()
    along_q = (q * dq).unflatten(2, (2, 2)).sum((0, 1, 3))
    assert (along_q - (k * dk).sum((0, 1))).abs().max() <= 1e-13
    assert along_q.abs().max() > 1e-2


@pytest.mark.thorough
def test_closing_gates_stay_finite_over_8192_tokens() -> None:
    """They sum up to -7,127, whose exponential no type holds; the last rows are worked out directly."""
    q, k, v, _ = inputs(8192, 2, 1, 1, d=4)
    f = torch.full((1, 8192, 1, 4), -0.87).requires_grad_()
    ours = run(wall_attention, [q, k, v, f])
    assert all(torch.isfinite(x).all() for x in ours)
    for i in (0, 31, 32, 1024, 8191):
        fade = torch.exp(-0.87 * (i - torch.arange(i + 1.0, dtype=torch.float64)))
        scores = torch.einsum("hx,sx,s->hs", q[0, i].double(), k[0, : i + 1, 0].double(), fade) / 2
        wanted = torch.einsum("hs,sx->hx", scores.softmax(-1), v[0, : i + 1, 0].double())
        assert (ours[0][0, i] - wanted).abs().max() <= 1e-5


# --- kernels ------------------------------------------------------------------------------------------------------


@interpreted
def test_the_kernels_hold_the_steepest_gates() -> None:
    """64 of them, where the exponent is largest; and none, which is softmax."""
    for fall in (-1.19, 0.0):
        q, k, v, _ = inputs(130, 2, 1, 1)
        args = [q, k, v, torch.full((1, 130, 1, D), fall).requires_grad_()]
        ours = run(wall_attention, args, backend="triton")
        assert all(torch.isfinite(x).all() for x in ours)
        check(ours, run(wall_attention, double(args), backend="torch"), 1, gradient=1e-4)


@interpreted
@pytest.mark.parametrize(("block", "factor"), every_nth([(64, 2.43), (32, 1.56), (128, 5.90)], 3))
def test_the_block_of_the_kernels_changes_nothing(block: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of -0.02 in log 2 make a block's decay the factor by which a diagonal tile is rescaled."""
    kernels = load_kernels(wall.__package__)
    monkeypatch.setattr(kernels, "BLOCK", block)
    monkeypatch.setattr(kernels, "CHANNELS", 8)  # of 16: two programs of each
    monkeypatch.setattr(kernels, "BLOCKS_PER_SCAN", 2)  # of 2 to 5 blocks
    args = inputs(150, 2, 1, 1)
    ours = run(kernels_alone, args)
    check(ours, run(wall_attention, double(args), scale=1 / wall.LOG2E, backend="torch"), 1, gradient=1e-4)
    q, k, v, f = (x.detach() for x in args)
    edges = kernels.forward(q, k, v, torch.full_like(f, -0.02 / wall.LOG2E), factor=1.0, window=None)[4].sum(0)
    assert (edges[:, :, 0] - edges[:, :, 1]).exp2() == pytest.approx(factor, abs=0.005)


def kernels_alone(*args: Tensor) -> Tensor:
    """The kernels without the op around them, whose shapes are those of one size of blocks."""
    return _Alone.apply(*args)


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        results = load_kernels(wall.__package__).forward(q, k, v, f, factor=1.0, window=None)
        ctx.save_for_backward(v, f, *results)
        return results[0]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> tuple[Tensor, ...]:
        v, f, o, lse, q_, k_, edges = ctx.saved_tensors
        return load_kernels(wall.__package__).backward(g, q_, k_, v, f, o, lse, edges, factor=1.0, window=None)


@pytest.mark.parametrize(("steepest", "reason"), [(None, "no limit"), (2.0, "the limit 2")])
def test_gates_that_the_kernels_do_not_hold_take_torch(steepest: float | None, reason: str) -> None:
    choice = choose_backend("cuda", torch.bfloat16, 128, steepest)
    assert choice.backend == "torch"
    assert choice.reason.endswith(reason)
    assert "by at most 1.19 per token" in choice.reason
    assert math.exp(-1.19 * 64) > 2.0**-110
    half = choose_backend("cuda", torch.float16, 128, 0.86)
    assert (half.backend, half.reason[-20:]) == ("torch", "the range of float16")
