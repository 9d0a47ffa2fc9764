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
from atma_sweep.kernels.gated_delta.op import gated_delta_reference
from torch import Tensor
from torch.nn import functional

B, H, J, X = 2, 4, 2, 8


def drawn(t: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(t)
    shapes = [(B, t, H, X), (B, t, J, X), (B, t, J, X), (B, t, H, X), (B, t, H)]
    q, k, v, gamma, beta = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return [q, k, v, functional.logsigmoid(gamma + 1), beta.sigmoid()]


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


@pytest.mark.gpu
@pytest.mark.parametrize(("t", "size"), [(131, 128), (64, 64), (1, 128)])
def test_on_a_gpu_fla_gives_the_loop_and_its_gradients(t: int, size: int) -> None:
    choice = choose_backend("cuda", torch.bfloat16, size)
    if choice.reason.startswith("fla gives wrong gradients"):
        pytest.skip(choice.reason)
    assert choice.backend == "fla", choice
    draw = torch.Generator().manual_seed(t)
    shapes = [(B, t, H, size), (B, t, J, size), (B, t, J, size), (B, t, H, size), (B, t, H)]
    made = [torch.randn(shape, generator=draw).cuda() for shape in shapes]
    weight = torch.randn(B, t, H, size, generator=draw).cuda()
    found = []
    for kind, rule in ((torch.bfloat16, channelwise_delta), (torch.float64, channelwise_delta_reference)):
        q, k, v = (x.bfloat16().to(kind).requires_grad_() for x in made[:3])
        gamma, beta = (x.to(torch.promote_types(kind, torch.float32)).requires_grad_() for x in made[3:])
        r, state = rule(q, k, v, functional.logsigmoid(gamma + 3.9), beta.sigmoid())
        found.append([r, state, *torch.autograd.grad((r.to(weight.dtype) * weight).sum(), (q, k, v, gamma, beta))])
    for ours, theirs in zip(*found, strict=True):
        # of one token the gates have no gradient, and rounding leaves 1e-8
        assert (ours.double() - theirs).norm() <= 0.02 * theirs.norm() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("t", "size"), [(131, 128), (200, 64)])
def test_on_a_gpu_two_calls_have_the_same_bits(t: int, size: int) -> None:
    choice = choose_backend("cuda", torch.bfloat16, size)
    if choice.reason.startswith("fla gives wrong gradients"):
        pytest.skip(choice.reason)
    draw = torch.Generator().manual_seed(t)
    shapes = [(B, t, H, size), (B, t, J, size), (B, t, J, size), (B, t, H, size), (B, t, H)]
    q, k, v, gamma, beta = (torch.randn(shape, generator=draw).cuda().requires_grad_() for shape in shapes)
    weight = torch.randn(B, t, H, size, generator=draw).cuda()
    found = []
    for _ in range(2):
        rows = (x.bfloat16() for x in (q, k, v))
        r, state = channelwise_delta(*rows, functional.logsigmoid(gamma + 3.9), beta.sigmoid(), backend="fla")
        loss = (r * weight).sum() + state.square().sum()
        found.append([r, state, *torch.autograd.grad(loss, (q, k, v, gamma, beta))])
    for once, again in zip(*found, strict=True):
        assert torch.equal(once, again)


@pytest.mark.gpu
def test_on_a_gpu_the_compiler_is_told_fla_s_shapes() -> None:
    made = [torch.randn(2, 70, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    rates = [-torch.rand(2, 70, 2, 64, device="cuda"), torch.rand(2, 70, 2, device="cuda")]
    state = torch.zeros(2, 2, 64, 64, device="cuda")
    torch.library.opcheck(fla_forward, (*made, *rates, state), test_utils=("test_schema", "test_faketensor"))
