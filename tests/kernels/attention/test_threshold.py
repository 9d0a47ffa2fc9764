"""Threshold relative attention: one query at a time in float64, the identities of its formula, and its Triton kernels.

Survival is a sign, so what is compared across roundings has no score near 0: `apart` draws such inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from atma_sweep.kernels.attention.threshold.op import distances, threshold_attention
from graded import interpreted, normal, run
from kernel_operations import drawn_threshold as inputs
from kernel_operations import threshold_inputs as apart
from torch.nn import functional

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
"""No score of `apart` is nearer to 0."""


# --- the formula --------------------------------------------------------------------------------------------------


def test_survivors_and_distances_as_the_paper_prints_them() -> None:
    met = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]], dtype=torch.float64)
    printed = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 2, 1, 0], [2, 0, 1, 0]], dtype=torch.float64)
    assert torch.equal(distances(met > 0) * met, printed)
    # the same through the attention: survivors have one score, so ln weight tells the distance but for a constant
    ones = torch.eye(4, dtype=torch.float64)[None, :, None]
    decay = torch.full((1, 4, 1), -0.7, dtype=torch.float64)
    weight = threshold_attention((met * 2 - 1)[None, :, None], ones, ones, decay)[0, :, 0]
    assert torch.equal(weight > 0, met > 0)
    ahead = torch.where(met > 0, weight.clamp(min=1e-300).log() / -0.7, torch.inf)
    actual = torch.where(met > 0, ahead - ahead.amin(-1, keepdim=True) + 1, 0.0)
    assert (actual - printed).abs().max() <= 1e-12


def test_keys_without_positive_score_change_nothing() -> None:
    q, k, v, decay = inputs(12, 2, 1)
    # a last channel that is 1 in every query scores the strangers alone
    q, k = (functional.pad(x.detach(), (0, 1), value=value) for x, value in ((q, 1.0), (k, 0.0)))
    v = functional.pad(v.detach(), (0, 1))
    draw = torch.Generator().manual_seed(4)
    positions = torch.rand(40, generator=draw).argsort()[:12].sort().values
    k2, v2 = torch.zeros(1, 40, 1, 9, dtype=torch.float64), 1e3 * normal(1, 40, 1, 9, seed=5).double()
    k2[..., ::2, :, -1] = -5.0  # every other one scores below 0, the rest exactly 0
    q2, decay2 = normal(1, 40, 2, 9, seed=6).double(), -torch.ones(1, 40, 2, dtype=torch.float64)
    q2[..., -1] = 1.0
    for wide, own in ((q2, q), (k2, k), (v2, v), (decay2, decay)):
        wide[:, positions] = own.detach()
    spread_output = threshold_attention(q2, k2, v2, decay2)[:, positions]
    assert (spread_output - threshold_attention(q, k, v, decay)).abs().max() <= 1e-13


@pytest.mark.parametrize("window", [None, 6])
def test_the_ends_of_decay(window: int | None) -> None:
    """Without decay softmax over the survivors; with all of it the nearest survivor, whatever the scores."""
    q, k, v, decay = (x.detach() for x in inputs(25, 4, 2))
    v_BHTX = v.repeat_interleave(2, 2).transpose(1, 2)
    scores = torch.einsum("bthx,bshx->bhts", q, k.repeat_interleave(2, 2)) * 8**-0.5
    seen = torch.ones(25, 25, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(1 - window)
    keep = seen & (scores > 0)
    assert not keep.any(-1).all()
    softmax = torch.softmax(scores.masked_fill(~keep, -torch.inf), -1).nan_to_num(0.0)
    ours = threshold_attention(q, k, v, 0 * decay, window=window).transpose(1, 2)
    assert (ours - softmax @ v_BHTX).abs().max() <= 1e-13
    nearest = torch.where(keep, torch.arange(25), -1).amax(-1)
    expected = torch.where(
        nearest[..., None] < 0, 0.0, v_BHTX.gather(2, nearest.clamp(min=0)[..., None].expand(v_BHTX.shape))
    )
    assert torch.equal(threshold_attention(q, k, v, 0 * decay - 1e4, window=window).transpose(1, 2), expected)


@pytest.mark.parametrize(("backend", "empty"), [
    ("torch", "zero"), ("torch", "uniform"), pytest.param("triton", "uniform", marks=interpreted),
    pytest.param("triton", "zero", marks=[interpreted, pytest.mark.thorough]),
])  # fmt: skip
def test_queries_without_survivors_learn_nothing(backend: str, empty: Any) -> None:
    q, k, v, decay = apart(27, 2, 1)
    with torch.no_grad():
        q[..., :] = q.abs()
        k[..., :] = k.abs()
        q[:, 20:23] *= -1
    y, dq, dk, dv, d_decay = run(threshold_attention, [q, k, v, decay], backend=backend, empty=empty)
    mean = torch.stack([v[:, : i + 1].mean(1) for i in range(20, 23)], 1).expand(-1, -1, 2, -1)
    assert (y[:, 20:23] - (mean if empty == "uniform" else 0.0)).abs().max() <= (1e-6 if empty == "uniform" else 0.0)
    for x in (dq, d_decay):
        assert torch.equal(x[:, 20:23], torch.zeros_like(x[:, 20:23]))
        assert x[:, 19].abs().min() > 0
    # nor do keys from them: a weight on these rows alone leaves keys as they are
    weight = torch.zeros_like(q)
    weight[:, 20:23] = 1.0
    again = threshold_attention(q, k, v, decay, backend=backend, empty=empty)
    dk, dv = torch.autograd.grad(again, (k, v), weight)
    assert torch.equal(dk, torch.zeros_like(dk))
    assert dv.any() == (empty == "uniform")
