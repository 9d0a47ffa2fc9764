"""Attention with a learned number for each head and distance: identities of its formula."""

from __future__ import annotations

from atma_sweep.kernels.attention.relative.op import relative_attention
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from graded import double
from kernel_operations import relative_inputs


def test_numbers_alike_at_all_distances_are_softmax() -> None:
    q, k, v, bias = double(relative_inputs(23, 4, 2, 7))
    ours = relative_attention(q, k, v, bias[:, :1].expand(-1, 8), window=9)
    assert (ours - softmax_attention_reference(q, k, v, window=9)).abs().max() <= 1e-13
