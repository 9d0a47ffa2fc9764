"""Chunk after chunk of a memory that cannot be taken all at once: a network of two matrices, orthogonal steps at each token, what is left of whole chunks.

B batch, H heads, T length, X head size, F columns of a feature, C tokens of a chunk, S these and the window's tokens before.

Each round is a hundred small operations or more. torch.compile meets one operation instead of all of them: it would work on a network of twelve such
layers for minutes. Its backward goes through the rounds anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..custom_ops import differentiate, keep_inputs, torch_op
from ..gated_delta.op import running_sum
from .newton_schulz import orthogonalised

OrthogonalMode = Literal["none", "chunk", "token"]
MOST_TRACED = 1
"""Rounds that the compiler sees as they are."""


class ChunkCoefficients:
    """How much of what a chunk's tokens feel: a function of the rates alone, [..., C], and of the weights, [..., S]."""

    def __init__(self, keep: Tensor, step: Tensor, slow: Tensor | None, weight: Tensor, window: int) -> None:
        c = keep.shape[-1]
        i_S = torch.arange(c + window - 1, device=keep.device)
        t_C = torch.arange(c, device=keep.device)[:, None]
        # token t of the chunk is token t + window - 1 of those seen
        self._inside = (i_S >= t_C) & (i_S < t_C + window)
        self._weight, self._slow, self._keep, self._step = weight, slow, keep, step
        self.old_momentum = torch.zeros_like(keep) if slow is None else running_sum(slow).exp()
        """What of the momentum before the chunk is in each token's, [..., C]."""
        self.kept = running_sum(keep).exp()
        """What of the memory before the chunk is left, [..., C]."""
        self.step = step.mean(-1)

    def momentum(self) -> Tensor:
        """What of each pair's gradient is in each token's momentum, [..., C, S];"""
        share = torch.where(self._inside, self._weight[..., None, :], 0.0)
        return share if self._slow is None else _ratios(self._slow) @ share

    def last_momentum(self) -> Tensor:
        """the last token's alone, [..., S]."""
        if self._slow is None:
            return self._inside[-1] * self._weight
        total = running_sum(self._slow)
        return ((total[..., -1:] - total).exp() @ self._inside.to(total.dtype)) * self._weight

    def moves(self) -> Tensor:
        """How far token t's memory has gone along token s's momentum, [..., C, C]."""
        return _ratios(self._keep) * self._step[..., None, :]

    def felt_and_carried(self) -> tuple[Tensor, Tensor]:
        """How far each token's memory has gone along each pair's gradient, [..., C, S], and along the momentum before the chunk, [..., C]."""
        moves = self.moves()
        return moves @ self.momentum(), (moves @ self.old_momentum[..., None]).squeeze(-1)


def _ratios(logs: Tensor) -> Tensor:
    """Product of the factors after s up to t, [..., C, C]; 0 for s > t."""
    total = running_sum(logs)
    c = total.shape[-1]
    later = torch.ones(c, c, dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


Pairs = list[tuple[Tensor, Tensor]]
"""A layer's gradient for each pair seen as left ⊗ right: [B, H, S, out] and [B, H, S, in]."""


def gradients(layers: tuple[Tensor, ...], keys: Tensor, values: Tensor) -> Pairs:
    if len(layers) == 1:
        return [(keys @ layers[0].mT - values, keys)]
    inner, outer = layers
    hidden = torch.sigmoid(keys @ inner.mT)
    error = hidden @ outer.mT - values
    return [((error @ outer) * hidden * (1 - hidden), keys), (error, hidden)]


def hidden_activation(x: Tensor, index: int, layers: Sequence[Tensor]) -> Tensor:
    """What the next layer reads of a layer's output."""
    return torch.sigmoid(x) if index + 1 < len(layers) else x


ChunkResult = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]


def readout(
    x: Tensor, layer: Tensor, momentum: Tensor | None, pair: tuple[Tensor, Tensor], kept: Tensor, felt: Tensor,
    carried: Tensor,
) -> Tensor:  # fmt: skip
    """Every token's own memory at its x: kept M - carried S - Σ felt left ⊗ right."""
    left, right = pair
    y = kept[..., None] * (x @ layer.mT) - (felt * (x @ right.mT)) @ left
    return y if momentum is None else y - carried[..., None] * (x @ momentum.mT)


def _plain(
    q: Tensor, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...], pairs: Pairs, plan: ChunkCoefficients
) -> ChunkResult:
    """Every token's own memory, without ever forming one: masked products of what they are sums of."""
    felt_BHCS, carried_BHC = plan.felt_and_carried()
    x, ends, slow = q, [], []
    for index, (layer, momentum, (left, right)) in enumerate(zip(layers, momenta, pairs, strict=True)):
        y = readout(x, layer, momentum, (left, right), plan.kept, felt_BHCS, carried_BHC)
        ends.append(
            plan.kept[..., -1, None, None] * layer - carried_BHC[..., -1, None, None] * momentum
            - (felt_BHCS[..., -1, :, None] * left).mT @ right
        )  # fmt: skip
        slow.append(_after(momentum, left, right, plan))
        x = hidden_activation(y, index, layers)
    return x, tuple(ends), tuple(slow)


def _each_token(
    q: Tensor, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...], pairs: Pairs, plan: ChunkCoefficients
) -> ChunkResult:
    """Every token's momentum is made orthogonal: a matrix a token."""
    x, ends, slow = q, [], []
    for index, (layer, momentum, (left, right)) in enumerate(zip(layers, momenta, pairs, strict=True)):
        all_momenta = torch.einsum("bhcs,bhso,bhsi->bhcoi", plan.momentum(), left, right)
        all_momenta = all_momenta + plan.old_momentum[..., None, None] * momentum[:, :, None]
        steps = orthogonalised(all_momenta)
        memories = plan.kept[..., None, None] * layer[:, :, None] - torch.einsum(
            "bhcs,bhsoi->bhcoi", plan.moves(), steps
        )
        x = hidden_activation(torch.einsum("bhcoi,bhci->bhco", memories, x), index, layers)
        ends.append(memories[:, :, -1])
        slow.append(all_momenta[:, :, -1])
    return x, tuple(ends), tuple(slow)


def _each_chunk(
    q: Tensor, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...], pairs: Pairs, plan: ChunkCoefficients
) -> ChunkResult:
    """One orthogonal step at the end, which no token of the chunk may read."""
    x, ends, slow = q, [], []
    for index, (layer, momentum, (left, right)) in enumerate(zip(layers, momenta, pairs, strict=True)):
        x = hidden_activation(x @ layer.mT, index, layers)
        after = _after(momentum, left, right, plan)
        ends.append(plan.kept[..., -1, None, None] * layer - plan.step[..., None, None] * orthogonalised(after))
        slow.append(after)
    return x, tuple(ends), tuple(slow)


def _after(momentum: Tensor, left: Tensor, right: Tensor, plan: ChunkCoefficients) -> Tensor:
    """The momentum after the chunk's last token."""
    new = (plan.last_momentum()[..., None] * left).mT @ right
    return plan.old_momentum[..., -1, None, None] * momentum + new


ROUNDS = {"none": _plain, "token": _each_token, "chunk": _each_chunk}

ChunkRates = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""ln alpha, eta and ln theta of each token, [B, H, T], and the weights of the pairs, [B, H, window - 1 + T]."""


def run_chunks(
    q: Tensor, keys: Tensor, values: Tensor, rated: ChunkRates, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...],
    *, window: int, chunk: int, orthogonal: OrthogonalMode,
) -> ChunkResult:  # fmt: skip
    """(readout [B, H, T, X], the layers and the momenta after the last token) of q [B, H, T, F] and the pairs, which begin with the window's."""
    if torch.compiler.is_compiling() and q.shape[2] > MOST_TRACED * chunk:
        second = (layers[1], momenta[1]) if len(layers) == 2 else (None, None)
        y, *ends = run_chunks_op(q, keys, values, *rated, layers[0], momenta[0], *second, window, chunk, orthogonal)
        return y, tuple(ends[0::2][: len(layers)]), tuple(ends[1::2][: len(layers)])
    keep, step, slow, weights = rated
    reads, t = [], q.shape[2]
    for start in range(0, t, chunk):
        stop = min(start + chunk, t)
        own, seen = slice(start, stop), slice(start, stop + window - 1)
        plan = ChunkCoefficients(
            keep[..., own], step[..., own], None if slow is None else slow[..., own], weights[..., seen], window
        )
        pairs = gradients(layers, keys[:, :, seen], values[:, :, seen])
        y, layers, momenta = ROUNDS[orthogonal](q[:, :, own], layers, momenta, pairs, plan)
        reads.append(y)
    return torch.cat(reads, 2), layers, momenta


FinalState = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The readout, the first layer and its momentum, the second and its; empty where there is none."""


def _empty_ends(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    squares = rest[4:8]
    y = q.new_empty(*q.shape[:3], values.shape[-1])
    return y, *(q.new_empty(0 if x is None else x.shape) for x in squares)


@torch_op("omega_rounds", _empty_ends)
def run_chunks_op(
    q: Tensor, keys: Tensor, values: Tensor, keep: Tensor, step: Tensor, slow: Tensor | None, weights: Tensor,
    layer: Tensor, momentum: Tensor, layer2: Tensor | None, momentum2: Tensor | None,
    window: int, chunk: int, orthogonal: str,
) -> FinalState:  # fmt: skip
    """`run_chunks`, as one operation."""
    given = (q, keys, values, keep, step, slow, weights, layer, momentum, layer2, momentum2)
    return _unrolled(given, window, chunk, orthogonal)


def _unrolled(given: Any, window: int, chunk: int, orthogonal: Any) -> FinalState:
    q, keys, values, keep, step, slow, weights, *squares = given
    layers, momenta = (tuple(x for x in squares[i::2] if x is not None) for i in (0, 1))
    rated = keep, step, slow, weights
    y, *ends = run_chunks(q, keys, values, rated, layers, momenta, window=window, chunk=chunk, orthogonal=orthogonal)
    found = [y, *(x for pair in zip(*ends, strict=True) for x in pair)]
    found += [q.new_empty(0)] * (5 - len(found))
    # nothing that comes out may be what went in
    return tuple(x.clone() for x in found)


@torch_op(
    "omega_rounds_backward", lambda *given: tuple(given[5].new_empty(0 if x is None else x.shape) for x in given[5:16])
)
def backward(
    g_y: Tensor, g_layer: Tensor, g_momentum: Tensor, g_layer2: Tensor, g_momentum2: Tensor,
    q: Tensor, keys: Tensor, values: Tensor, keep: Tensor, step: Tensor, slow: Tensor | None, weights: Tensor,
    layer: Tensor, momentum: Tensor, layer2: Tensor | None, momentum2: Tensor | None,
    window: int, chunk: int, orthogonal: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the tensors that `run_chunks_op` takes, in its order; empty for what is None."""
    given = [q, keys, values, keep, step, slow, weights, layer, momentum, layer2, momentum2]
    there = [i for i, x in enumerate(given) if x is not None]

    def of(*leaves: Tensor) -> FinalState:
        full: list[Tensor | None] = [None] * len(given)
        for i, x in zip(there, leaves, strict=True):
            full[i] = x
        return _unrolled(full, window, chunk, orthogonal)

    # autograd sees nothing inside of an operation; torch.func does
    _, back, *_ = torch.func.vjp(of, *(given[i] for i in there))
    found = [q.new_empty(0) for _ in given]
    grads = tuple(g.contiguous() for g in (g_y, g_layer, g_momentum, g_layer2, g_momentum2))
    for i, g in zip(there, back(grads), strict=True):
        found[i] = g.clone(memory_format=torch.contiguous_format)
    return tuple(found)  # type: ignore[return-value]


differentiate(run_chunks_op, backward, keep_inputs(11, 5), results=5)
