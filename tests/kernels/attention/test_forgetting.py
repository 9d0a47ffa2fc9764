"""Forgetting attention: the formula against a loop over pairs, its identities, and the Triton kernels."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from atma_sweep.kernels.attention import forgetting, softmax
from atma_sweep.kernels.attention.forgetting.op import forgetting_attention
from atma_sweep.kernels.attention.scored import sum_by_products
from atma_sweep.kernels.custom_ops import load_kernels
from graded import check, distance, double, interpreted, normal, run
from kernel_operations import forgetting_inputs as inputs
from tiers import every_nth

D = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


@pytest.mark.parametrize("t", [1, 3, 4, 5, 77])
def test_sums_by_products_are_sums(t: int) -> None:
    """The sums of deterministic runs on a GPU, in segments of 4 tokens, of 16 and of all."""
    x = normal(2, t, 3, seed=t).double().requires_grad_()
    ours, theirs = sum_by_products(x, 4), x.cumsum(1)
    weight = torch.cos(ours.detach())
    assert (ours - theirs).abs().max() <= 1e-12
    slopes = [torch.autograd.grad(total, x, weight)[0] for total in (ours, theirs)]
    assert (slopes[0] - slopes[1]).abs().max() <= 1e-12


def test_closed_gates_leave_the_token_itself() -> None:
    q, k, v, f = double(inputs(9, 4, 2))
    ours = forgetting_attention(q, k, v, 0 * f - 1e3)
    assert (ours - v.repeat_interleave(2, 2)).abs().max() <= 1e-12


def test_the_first_gate_says_nothing() -> None:
    """Nothing lies before it: its gradient is 0, and so is the sum of a row's gradients by its scores."""
    args = double(inputs(11, 4, 2))
    *_, df = run(forgetting_attention, args)
    assert df[:, 0].abs().max() <= 1e-14
    assert (df[:, 1:].abs().amax((0, 2)) > 1e-6).all()
    # F of all tokens together shifts nothing
    free = args[3].detach().requires_grad_()
    shifted = torch.cat([free[:, :1] - 1e4, free[:, 1:]], 1)
    assert torch.allclose(forgetting_attention(*args[:3], shifted), forgetting_attention(*args), atol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 6])
def test_the_naive_formula_of_fla_agrees(window: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU it says that it has none
        module = pytest.importorskip(
            "fla.ops.forgetting_attn.naive",
            reason="needs fla: pip install -e '.[train]', on Linux x86-64",
            exc_type=Exception,
        )
    args = [x.detach() for x in inputs(33, 4, 2, b=2)]
    theirs = module.naive_forgetting_attn(*args, window_size=window)
    assert (forgetting_attention(*args, window=window) - theirs).abs().max() <= 5e-6


# --- kernels ------------------------------------------------------------------------------------------------------


@interpreted
def test_the_kernels_lose_nothing_where_the_sums_are_large() -> None:
    """64K tokens of gates at a half sum up to -45,000, where float32 tells no two neighbours apart."""
    args = inputs(45, 2, 1)
    with torch.no_grad():
        args[3][:, 0] = -45_000.0
    check(run(forgetting_attention, args, backend="triton"), run(forgetting_attention, double(args)), 1)


@interpreted
def test_the_kernels_take_scores_that_count_for_nothing() -> None:
    args = inputs(9, 2, 1)
    ours = run(forgetting_attention, args, scale=0.0, backend="triton")
    check(ours, run(forgetting_attention, double(args), scale=0.0, backend="torch"), 1)


@interpreted
def test_sums_of_gates_go_on_from_block_to_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernels(forgetting.__package__)
    monkeypatch.setattr(kernels, "BLOCK", 16)
    args = inputs(45, 2, 1)
    check(run(forgetting_attention, args, backend="triton"), run(forgetting_attention, double(args)), 1)


@interpreted
@pytest.mark.parametrize("t", [1, 3, 127, 130, 1300])
def test_sums_in_tiles_say_what_a_key_lies_behind_its_tile(t: int) -> None:
    """Over two blocks of 1,024, one sum far below the others; each float32 is the float64 difference, rounded once."""
    gate = torch.nn.functional.logsigmoid(3 * normal(2, t, 3, seed=t))
    gate[:, t // 2] = -45_000.0
    exact = (gate.double() * math.log2(math.e)).cumsum(1).transpose(1, 2)
    hi, lo, fade = load_kernels(forgetting.__package__).sums_in_tiles(gate, 128)
    assert fade.shape == (2, 3, t + -t % 4)
    assert torch.isfinite(fade).all(), "what follows the last key is read too"
    assert (hi.double() + lo - exact).abs().max() <= 1e-9
    expected_decay = (exact[..., torch.arange(t) // 128 * 128] - exact).float()
    assert ((fade[..., :t] - expected_decay).abs() <= 1e-9 + 1.2e-7 * expected_decay.abs()).all()
    assert (fade[..., :t:128] == 0).all(), "the first key of the diagonal's tile is where its rows count from"


@interpreted
def test_hopper_forward_and_backward_share_the_row_anchor() -> None:
    """Its tile is the one that the backward of plain Triton adds to the log-sums; narrower windows are refused."""
    tile = load_kernels(forgetting.__package__, "gluon").TILE
    for dtype in (torch.bfloat16, torch.float16):
        for d in (64, 128):
            for keys in (1, 2048, 8192, 65536):
                assert load_kernels(softmax.__package__).tiles_for("forward", keys, d, dtype, True).rows == tile
    args = [x.detach().bfloat16() for x in inputs(200, 2, 1, d=64)]
    with pytest.raises(ValueError, match="window 127 is smaller than the 128-token tile"):
        forgetting_attention(*args, window=127, backend="gluon")


@interpreted
@pytest.mark.parametrize(("forward", "dq", "dkv"), every_nth([(64, 32, 16), (16, 64, 16)], 2))
def test_tiles_of_any_size_agree_on_what_a_row_counts_from(
    forward: int, dq: int, dkv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of keys takes rows from within one tile of the forward; a tile of queries may hold several, or be part of one."""
    rows, kernels = {"forward": forward, "dq": dq, "dkv": dkv}, load_kernels(softmax.__package__)
    monkeypatch.setattr(kernels, "tiles_for", lambda kernel, *_: kernels.Tiles(rows[kernel], 32, 4, 1))
    args = inputs(75, 2, 1)
    check(run(forgetting_attention, args, backend="triton"), run(forgetting_attention, double(args)), 1)


@interpreted
def test_gates_of_a_single_row_broadcast_over_a_batch() -> None:
    q, k, v, f = inputs(21, 2, 1, b=3)
    shared_gates = f.detach()[:1].requires_grad_()
    ours = run(forgetting_attention, [q, k, v, shared_gates], backend="triton")
    check(ours, run(forgetting_attention, double([q, k, v, shared_gates]), backend="torch"), 1)


@interpreted
def test_gate_gradients_are_exact_despite_16_bit_output() -> None:
    args = [x.detach() for x in inputs(197, 2, 1)]
    args = [(x.half() if x.ndim == 4 else x).requires_grad_() for x in args]
    ours = run(forgetting_attention, args, backend="triton")[-1]
    exact = run(forgetting_attention, double(args), backend="torch")[-1]
    # what a row of gradients sums to, were it left as it is: 4e-3
    assert distance(ours, exact) <= 5e-4
