"""The delta rule with a retention for each channel, against a loop and against the rule with one retention a head."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.gated_delta.channelwise import channelwise_delta, channelwise_delta_reference
from atma_sweep.kernels.gated_delta.gated_delta import gated_delta_reference
from torch import Tensor
from torch.nn import functional

B, H, J, X = 2, 4, 2, 8


def drawn(t: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(t)
    shapes = [(B, t, H, X), (B, t, J, X), (B, t, J, X), (B, t, H, X), (B, t, H)]
    q, k, v, gamma, beta = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return [q, k, v, functional.logsigmoid(gamma + 1), beta.sigmoid()]


@pytest.mark.parametrize(("t", "chunk"), [(1, 16), (23, 5), (16, 16), (9, 64)])
def test_chunks_are_the_loop(t: int, chunk: int) -> None:
    args = drawn(t)
    ours, state = channelwise_delta(*args, chunk=chunk)
    theirs, last = channelwise_delta_reference(*args)
    assert (ours - theirs).abs().max() <= 1e-12
    assert (state - last).abs().max() <= 1e-12


def test_in_pieces_it_is_the_whole() -> None:
    args = drawn(21)
    whole, last = channelwise_delta(*args, chunk=4)
    one, state = channelwise_delta(*(x[:, :13] for x in args), chunk=4)
    two, state = channelwise_delta(*(x[:, 13:] for x in args), chunk=4, initial_state=state)
    assert (torch.cat([one, two], 1) - whole).abs().max() <= 1e-12
    assert (state - last).abs().max() <= 1e-12


def test_channels_that_agree_are_one_gate_a_head() -> None:
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


def test_gradients_are_those_of_differences() -> None:
    args = [x[:1, :, :2].clone().requires_grad_() for x in drawn(5)]
    assert torch.autograd.gradcheck(lambda *a: channelwise_delta(*a, chunk=3), args, fast_mode=True)


def test_shapes_that_do_not_fit_are_told() -> None:
    q, k, v, gamma, beta = drawn(5)
    with pytest.raises(ValueError, match="log_gamma"):
        channelwise_delta(q, k, v, gamma[..., :1], beta)
