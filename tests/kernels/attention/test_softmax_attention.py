"""Softmax attention and its distractor loss against one query at a time."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.attention.softmax import op as module
from atma_sweep.kernels.attention.softmax.op import (
    softmax_attention,
    softmax_attention_reference,
    softmax_distractor_loss,
)
from atma_sweep.kernels.shapes import expand_kv
from graded import double
from kernel_operations import softmax_inputs
from torch import Tensor

B, T, H, J, D, R = 2, 13, 4, 2, 5, 6


def inputs() -> list[Tensor]:
    return double(softmax_inputs(T, H, J, b=B, d=D))


def distractors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(B, R, J, D, generator=draw, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("query_block", [1, 5, 13])
def test_blocks_where_torch_has_no_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, window: int | None, query_block: int
) -> None:
    args = inputs()
    calls: list[tuple[int, ...]] = []
    attention = module.functional.scaled_dot_product_attention
    monkeypatch.setattr(module, "_is_fused", lambda q, k: False)
    monkeypatch.setattr(
        module.functional, "scaled_dot_product_attention",
        lambda q, *rest, **options: (calls.append(q.shape), attention(q, *rest, **options))[1],
    )  # fmt: skip
    ours = softmax_attention(*args, window=window, query_block=query_block)
    assert (ours - softmax_attention_reference(*args, window=window)).abs().max() <= 1e-13
    assert max(shape[2] for shape in calls) <= query_block
    assert sum(shape[2] for shape in calls) == T


def test_the_cpu_has_a_fused_kernel_for_every_type() -> None:
    """No T x T scores of grouped heads: torch's own op for them, and none of the matrix products of its plain path."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, k, v = (x.detach().to(dtype) for x in inputs())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            softmax_attention(q, k, v, query_block=1)
        names = {event.key for event in profile.key_averages()}
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
        assert not names & {"aten::matmul", "aten::bmm", "aten::_softmax"}


def naive_loss(q: Tensor, k: Tensor, v: Tensor, k_r: Tensor, v_r: Tensor, y: Tensor, window: int | None) -> Tensor:
    k, v, k_r, v_r = (expand_kv(x, H) for x in (k, v, k_r, v_r))
    rows = []
    for i in range(q.shape[1]):
        first = 0 if window is None else max(0, i + 1 - window)
        keys, values = torch.cat([k_r, k[:, first : i + 1]], 1), torch.cat([v_r, v[:, first : i + 1]], 1)
        weight = torch.softmax(torch.einsum("bhd,bshd->bhs", q[:, i], keys) * 0.3, -1)
        rows.append(torch.einsum("bhs,bshd->bhd", weight, values))
    return ((torch.stack(rows, 1) - y) ** 2).mean()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("query_block", [5, 1024])
def test_distractor_loss(window: int | None, query_block: int) -> None:
    args = inputs()
    y = softmax_attention(*args, scale=0.3, window=4)
    ours = softmax_distractor_loss(*args, *distractors(), y, scale=0.3, window=window, query_block=query_block)
    theirs = naive_loss(*args, *distractors(), y, window)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-13)
    ours_grad = torch.autograd.grad(ours, args, retain_graph=True)
    for a, b in zip(ours_grad, torch.autograd.grad(theirs, args), strict=True):
        assert (a - b).abs().max() <= 1e-13


def test_blind_queries_give_distractors_their_share() -> None:
    """With q = 0, v = 0 and v_r = 1 the output is the distractors' weight R / (R + n)."""
    q, v = torch.zeros(B, T, H, D, dtype=torch.float64), torch.zeros(B, T, J, D, dtype=torch.float64)
    k_r, _ = distractors()
    loss = softmax_distractor_loss(q, inputs()[1], v, k_r, torch.ones_like(k_r), torch.zeros_like(q))
    assert loss.item() == pytest.approx(sum((R / (R + n)) ** 2 for n in range(1, T + 1)) / T, abs=1e-14)
