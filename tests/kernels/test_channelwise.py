"""The delta rule with a retention for each channel, against a loop and against the rule with one retention a head."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.channelwise_delta.op import (
    channelwise_delta,
    channelwise_delta_reference,
    choose_backend,
    fla_forward,
)
from atma_sweep.kernels.gated_delta.op import gated_delta, gated_delta_reference
from graded import double, in_type, run
from kernel_operations import delta_inputs
from torch import Tensor
from torch.nn import functional

X = 8


def drawn(t: int) -> list[Tensor]:
    return [x.detach() for x in double(delta_inputs(t, d=X, channels=True))]


def test_a_sequence_in_pieces_equals_a_single_call() -> None:
    args = drawn(21)
    full_readout, last = channelwise_delta(*args, chunk=4)
    first_readout, state = channelwise_delta(*(x[:, :13] for x in args), chunk=4)
    two, state = channelwise_delta(*(x[:, 13:] for x in args), chunk=4, initial_state=state)
    assert (torch.cat([first_readout, two], 1) - full_readout).abs().max() <= 1e-12
    assert (state - last).abs().max() <= 1e-12


def test_equal_channel_gates_are_a_single_gate_per_head() -> None:
    q, k, v, gamma, beta = drawn(19)
    gamma = gamma[..., :1]
    ours, state = channelwise_delta(q, k, v, gamma.expand(-1, -1, -1, X), beta)
    theirs, last = gated_delta_reference(q, k, v, gamma[..., 0], beta)
    assert (ours - theirs).abs().max() <= 1e-12
    assert (state - last).abs().max() <= 1e-12


def test_gates_that_close_for_long_stay_finite() -> None:
    q, k, v, gamma, beta = drawn(40)
    args = [x.float().requires_grad_() for x in (q, k, v, gamma * 0 - 50, beta)]
    r, _ = channelwise_delta(*args)
    gradients = torch.autograd.grad(r.square().sum(), args)
    assert all(torch.isfinite(x).all() for x in (r, *gradients))
    # each token reads its own value alone
    k1, q1 = functional.normalize(k, dim=-1).repeat_interleave(2, 2), functional.normalize(q, dim=-1)
    alone = (beta * (k1 * q1).sum(-1))[..., None] * v.repeat_interleave(2, 2)
    assert (r - alone).abs().max() <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("t", "size"), [(131, 128), (64, 64), (1, 128), (200, 64)])
def test_on_a_gpu_fla_gives_the_loop_and_the_same_bits_again(t: int, size: int) -> None:
    choice = choose_backend("cuda", torch.bfloat16, size)
    if choice.reason.startswith("fla gives wrong gradients"):
        pytest.skip(f"needs an NVIDIA GPU that takes fla: {choice.reason}")
    assert choice.backend == "fla", choice
    args = in_type(delta_inputs(t, d=size, channels=True), torch.bfloat16, 3, "cuda")
    ours, again = (run(channelwise_delta, args, backend="fla") for _ in range(2))
    for actual, same, exact in zip(ours, again, run(channelwise_delta_reference, double(args)), strict=True):
        assert torch.equal(actual, same)
        # of one token the gates have no gradient, and rounding leaves 1e-8
        assert (actual.double() - exact).norm() <= 0.02 * exact.norm() + 1e-6


@pytest.mark.gpu
def test_fake_shapes_of_fla_results_match_on_a_gpu() -> None:
    tensors = [torch.randn(2, 70, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    rates = [-torch.rand(2, 70, 2, 64, device="cuda"), torch.rand(2, 70, 2, device="cuda")]
    state = torch.zeros(2, 2, 64, 64, device="cuda")
    torch.library.opcheck(fla_forward, (*tensors, *rates, state), test_utils=("test_schema", "test_faketensor"))


def test_delta_rules_refuse_a_sequence_of_no_token() -> None:
    q, k, v, gamma, beta = (x[:, :0] for x in drawn(3))
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        channelwise_delta(q, k, v, gamma, beta)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        gated_delta(q, k, v, gamma[..., 0], beta)
