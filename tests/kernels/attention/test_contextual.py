"""Kernels of contextual positions against torch's operations in float64 (those: test_scored_attention.py)."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.attention.contextual import op as contextual
from atma_sweep.kernels.attention.contextual.op import choose_backend, contextual_attention
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from graded import check, double, interpreted, run
from kernel_operations import contextual_inputs as inputs
from tolerances import rounding_bound

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


@interpreted
def test_equal_vectors_are_no_positions() -> None:
    """A row's softmax does not feel them, and so gates learn nothing."""
    q, k, v, e = inputs(70, 2, 1, 9)
    e = e.detach()[:1].expand(9, -1).contiguous().requires_grad_()
    ours = run(contextual_attention, [q, k, v, e], backend="triton")
    exact = run(lambda q, k, v: softmax_attention_reference(q, k, v), double([q, k, v]))
    check(ours[:4], exact, 1, near=4e-6, gradient=1e-4)
    # 140 rows of 32 products of size 1 that cancel
    assert ours[4].sum(0).abs().max() <= rounding_bound(torch.float32, 140 * 32)


def test_more_positions_than_the_kernels_hold_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contextual, "attention_choice", lambda *_: contextual.BackendChoice("triton", "Triton 3"))
    assert choose_backend("cuda", torch.bfloat16, 64, 128) == ("triton", "Triton 3")
    assert choose_backend("cuda", torch.bfloat16, 64, 129) == (
        "torch",
        "the kernels support at most 128 positions, got 129",
    )
