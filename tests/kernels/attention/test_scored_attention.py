"""Attention whose logits are any function of the pair, and contextual positions, against one query and one key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.kernels.attention.contextual.op import contextual_attention
from atma_sweep.kernels.attention.scored import (
    QueryBlock,
    dot_scores,
    query_block_at,
    scored_attention,
    scored_reference,
)
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from graded import double
from kernel_operations import softmax_inputs
from torch import Tensor

B, T, H, J, X, P = 2, 9, 4, 2, 3, 4
WINDOWS = [None, 1, 4, 32]
Pair = Callable[[int, int, int, int], float]


def inputs(t: int = T) -> list[Tensor]:
    """q, k, v."""
    return double(softmax_inputs(t, H, J, b=B, d=X))


def vectors(count: int = P) -> Tensor:
    return torch.randn(count, X, generator=torch.Generator().manual_seed(9), dtype=torch.float64).requires_grad_()


def attend_per_pair(v: Tensor, pair: Pair, window: int | None) -> Tensor:
    """Return softmax attention in plain Python; `pair(b, h, i, j)` is a logit."""
    y = torch.zeros(B, v.shape[1], H, X, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(v.shape[1]):
                keys = range(0 if window is None else max(0, i + 1 - window), i + 1)
                weights = {j: math.exp(pair(b, h, i, j)) for j in keys}
                total = sum(weights.values())
                for j, weight in weights.items() if total else ():
                    y[b, i, h] += weight / total * v[b, j, h // (H // J)].detach()
    return y


def bent(q: Tensor, k: Tensor) -> Callable[[QueryBlock], Tensor]:
    """Logits that know place and distance, and hide every third distance, the query's own key among them."""

    def logits(span: QueryBlock) -> Tensor:
        distance = span.distance
        position = torch.arange(span.first, span.stop, dtype=torch.float64)
        scores = dot_scores(q, k, span, 0.7) + torch.sin(distance.double()) - 0.1 * position
        return scores.masked_fill(distance % 3 == 0, -torch.inf)

    return logits


def bent_pair(q: Tensor, k: Tensor) -> Pair:
    def pair(b: int, h: int, i: int, j: int) -> float:
        if (i - j) % 3 == 0:
            return -math.inf
        return 0.7 * float(q[b, i, h] @ k[b, j, h // (H // J)]) + math.sin(i - j) - 0.1 * j

    return pair


@pytest.mark.parametrize("window", WINDOWS)
def test_any_logits_in_any_blocks(window: int | None) -> None:
    """The first query sees its own key alone, which is hidden: it reads 0."""
    q, k, v = inputs()
    expected = attend_per_pair(v, bent_pair(q.detach(), k.detach()), window)
    weight = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view_as(expected)
    gradients = []
    for block in (None, 1, 4):
        y = scored_attention(v, H, bent(q, k), window=window, query_block=block)
        assert (y - expected).abs().max() <= 1e-13
        assert not y[:, 0].any()
        gradients.append(torch.autograd.grad(y, (q, k, v), weight))
    for block_gradients in gradients[1:]:
        assert all((a - b).abs().max() <= 1e-13 for a, b in zip(gradients[0], block_gradients, strict=True))


def test_gradients_of_logits_with_empty_rows() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scored_attention(v, H, bent(q, k), window=4, query_block=3)

    args = [x[:1, :6].detach().requires_grad_() for x in inputs()]
    assert torch.autograd.gradcheck(attend, args, fast_mode=True)


@pytest.mark.parametrize("window", [None, 4])
def test_the_reference_of_pairs_is_the_same(window: int | None) -> None:
    q, k, v = inputs()
    k_BTHX = k.repeat_interleave(H // J, 2)

    def pair(i: int, j: int) -> Tensor:
        logit = 0.7 * (q[:, i] * k_BTHX[:, j]).sum(-1) + math.sin(i - j) - 0.1 * j
        return logit - torch.inf if (i - j) % 3 == 0 else logit

    ours = scored_reference(q, k, v, pair, window=window)
    assert (ours - attend_per_pair(v, bent_pair(q.detach(), k.detach()), window)).abs().max() <= 1e-13


def test_a_span_says_what_its_queries_see() -> None:
    span = query_block_at(5, 8, 3, torch.device("cpu"))
    assert (span.first, span.queries, span.keys) == (3, slice(5, 8), slice(3, 8))
    assert span.distance.tolist() == [[2, 1, 0, -1, -2], [3, 2, 1, 0, -1], [4, 3, 2, 1, 0]]
    assert span.visible_MS.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


# --- contextual positions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, P])
def test_without_vectors_that_differ_there_are_no_positions(count: int) -> None:
    """Vectors of zero, or one vector for all keys, which a row's softmax does not feel."""
    args = inputs()
    e = vectors(1) if count == 1 else torch.zeros(P, X, dtype=torch.float64)
    for window in WINDOWS:
        ours = contextual_attention(*args, e, window=window)
        assert (ours - softmax_attention_reference(*args, window=window)).abs().max() <= 1e-13


def shares(k: Tensor, e: Tensor, first: float) -> Tensor:
    """Weights [T, T] of one head whose queries are (first, 1), over T keys."""
    t = k.shape[1]
    q = torch.tensor([first, 1.0], dtype=torch.float64).expand(1, t, 1, 2)
    # each call reads two of the values, so as many calls as there are keys
    eye = torch.eye(t, dtype=torch.float64).view(1, t, 1, t)
    return torch.cat([contextual_attention(q, k, eye[..., [s, s]], e, scale=1)[0, :, 0, :1] for s in range(t)], -1)


@pytest.mark.parametrize(("key", "step"), [(0.0, 0.5), (40.0, 1.0)])
def test_positions_count_open_gates(key: float, step: float) -> None:
    """Scores of 0 open every gate by half, large ones wholly: positions (i - j + 1) step, none beyond the last."""
    t = 11
    k = torch.tensor([key, 0.0], dtype=torch.float64).expand(1, t, 1, 2)
    rising = torch.tensor([[0.0, 0.3 * p] for p in range(P)], dtype=torch.float64)
    rising_shares = shares(k, rising, 1.0)
    for i in range(t):
        logits = torch.tensor([0.3 * min((i - j + 1) * step, P - 1) for j in range(i + 1)], dtype=torch.float64)
        assert (rising_shares[i, : i + 1] - torch.softmax(logits, 0)).abs().max() <= 1e-12


def test_gradients_of_contextual_positions() -> None:
    """Away from whole positions, where the vectors' mixture has a corner; some positions are past the last vector."""
    args: list[Any] = [x[:1, :6].detach().requires_grad_() for x in inputs()]
    e = vectors(3)
    q, k = (x.detach() for x in args[:2])
    gate = torch.sigmoid(torch.einsum("bthx,bshx->bhts", q, k.repeat_interleave(H // J, 2)) * X**-0.5).tril()
    position = gate.flip(-1).cumsum(-1).flip(-1)[..., torch.ones(6, 6).tril().bool()]
    assert (position - position.round()).abs().min() > 1e-4
    assert (position > 2).any()
    assert torch.autograd.gradcheck(contextual_attention, (*args, e), fast_mode=True)
