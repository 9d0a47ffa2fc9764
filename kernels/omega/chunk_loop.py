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
from .newton_schulz import newton_schulz

OrthogonalMode = Literal["none", "chunk", "token"]
MAX_TRACED_CHUNKS = 1
"""Rounds that the compiler sees as they are."""


class ChunkCoefficients:
    """How much of what a chunk's tokens feel: a function of the rates alone, [..., C], and of the weights, [..., S]."""

    def __init__(
        self, log_keep: Tensor, step: Tensor, log_momentum: Tensor | None, weight: Tensor, window: int
    ) -> None:
        c = log_keep.shape[-1]
        i_S = torch.arange(c + window - 1, device=log_keep.device)
        t_C = torch.arange(c, device=log_keep.device)[:, None]
        # token t of the chunk is token t + window - 1 of those seen
        self._inside = (i_S >= t_C) & (i_S < t_C + window)
        self._weight, self._slow, self._keep, self._step = weight, log_momentum, log_keep, step
        self.momentum_decay = torch.zeros_like(log_keep) if log_momentum is None else running_sum(log_momentum).exp()
        """What of the momentum before the chunk is in each token's, [..., C]."""
        self.memory_decay = running_sum(log_keep).exp()
        """What of the memory before the chunk is left, [..., C]."""
        self.step = step.mean(-1)

    def momentum_shares(self) -> Tensor:
        """What of each pair's gradient is in each token's momentum, [..., C, S];"""
        share = torch.where(self._inside, self._weight[..., None, :], 0.0)
        return share if self._slow is None else _decay_ratios(self._slow) @ share

    def last_momentum_shares(self) -> Tensor:
        """the last token's alone, [..., S]."""
        if self._slow is None:
            return self._inside[-1] * self._weight
        total = running_sum(self._slow)
        return ((total[..., -1:] - total).exp() @ self._inside.to(total.dtype)) * self._weight

    def step_weights(self) -> Tensor:
        """How far token t's memory has gone along token s's momentum, [..., C, C]."""
        return _decay_ratios(self._keep) * self._step[..., None, :]

    def memory_weights(self) -> tuple[Tensor, Tensor]:
        """How far each token's memory has gone along each pair's gradient, [..., C, S], and along the momentum before the chunk, [..., C]."""
        moves = self.step_weights()
        return moves @ self.momentum_shares(), (moves @ self.momentum_decay[..., None]).squeeze(-1)


def _decay_ratios(logs: Tensor) -> Tensor:
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
    x: Tensor, layer: Tensor, momentum: Tensor | None, factors: tuple[Tensor, Tensor], memory_decay: Tensor, pair_weights: Tensor,
    momentum_weight: Tensor,
) -> Tensor:  # fmt: skip
    """Every token's own memory at its x: kept M - carried S - Σ felt left ⊗ right."""
    output_factor, input_factor = factors
    y = memory_decay[..., None] * (x @ layer.mT) - (pair_weights * (x @ input_factor.mT)) @ output_factor
    return y if momentum is None else y - momentum_weight[..., None] * (x @ momentum.mT)


def _run_plain_chunk(
    q: Tensor, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...], pairs: Pairs, coefficients: ChunkCoefficients
) -> ChunkResult:
    """Every token's own memory, without ever forming one: masked products of what they are sums of."""
    pair_weights_BHCS, momentum_weight_BHC = coefficients.memory_weights()
    x, new_layers, new_momenta = q, [], []
    for index, (layer, momentum, (output_factor, input_factor)) in enumerate(zip(layers, momenta, pairs, strict=True)):
        y = readout(
            x,
            layer,
            momentum,
            (output_factor, input_factor),
            coefficients.memory_decay,
            pair_weights_BHCS,
            momentum_weight_BHC,
        )
        new_layers.append(
            coefficients.memory_decay[..., -1, None, None] * layer - momentum_weight_BHC[..., -1, None, None] * momentum
            - (pair_weights_BHCS[..., -1, :, None] * output_factor).mT @ input_factor
        )  # fmt: skip
        new_momenta.append(_momentum_after(momentum, output_factor, input_factor, coefficients))
        x = hidden_activation(y, index, layers)
    return x, tuple(new_layers), tuple(new_momenta)


def _run_chunk_orthogonal_per_token(
    q: Tensor, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...], pairs: Pairs, coefficients: ChunkCoefficients
) -> ChunkResult:
    """Every token's momentum is made orthogonal: a matrix a token."""
    x, new_layers, new_momenta = q, [], []
    for index, (layer, momentum, (output_factor, input_factor)) in enumerate(zip(layers, momenta, pairs, strict=True)):
        all_momenta = torch.einsum("bhcs,bhso,bhsi->bhcoi", coefficients.momentum_shares(), output_factor, input_factor)
        all_momenta = all_momenta + coefficients.momentum_decay[..., None, None] * momentum[:, :, None]
        steps = newton_schulz(all_momenta)
        memories = coefficients.memory_decay[..., None, None] * layer[:, :, None] - torch.einsum(
            "bhcs,bhsoi->bhcoi", coefficients.step_weights(), steps
        )
        x = hidden_activation(torch.einsum("bhcoi,bhci->bhco", memories, x), index, layers)
        new_layers.append(memories[:, :, -1])
        new_momenta.append(all_momenta[:, :, -1])
    return x, tuple(new_layers), tuple(new_momenta)


def _run_chunk_orthogonal_at_end(
    q: Tensor, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...], pairs: Pairs, coefficients: ChunkCoefficients
) -> ChunkResult:
    """One orthogonal step at the end, which no token of the chunk may read."""
    x, new_layers, new_momenta = q, [], []
    for index, (layer, momentum, (output_factor, input_factor)) in enumerate(zip(layers, momenta, pairs, strict=True)):
        x = hidden_activation(x @ layer.mT, index, layers)
        new_momentum = _momentum_after(momentum, output_factor, input_factor, coefficients)
        new_layers.append(
            coefficients.memory_decay[..., -1, None, None] * layer
            - coefficients.step[..., None, None] * newton_schulz(new_momentum)
        )
        new_momenta.append(new_momentum)
    return x, tuple(new_layers), tuple(new_momenta)


def _momentum_after(
    momentum: Tensor, output_factor: Tensor, input_factor: Tensor, coefficients: ChunkCoefficients
) -> Tensor:
    """The momentum after the chunk's last token."""
    new = (coefficients.last_momentum_shares()[..., None] * output_factor).mT @ input_factor
    return coefficients.momentum_decay[..., -1, None, None] * momentum + new


CHUNK_FUNCTIONS = {
    "none": _run_plain_chunk,
    "token": _run_chunk_orthogonal_per_token,
    "chunk": _run_chunk_orthogonal_at_end,
}

ChunkRates = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""ln alpha, eta and ln theta of each token, [B, H, T], and the weights of the pairs, [B, H, window - 1 + T]."""


def run_chunks(
    q: Tensor, keys: Tensor, values: Tensor, chunk_rates: ChunkRates, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...],
    *, window: int, chunk: int, orthogonal: OrthogonalMode,
) -> ChunkResult:  # fmt: skip
    """(readout [B, H, T, X], the layers and the momenta after the last token) of q [B, H, T, F] and the pairs, which begin with the window's."""
    if torch.compiler.is_compiling() and q.shape[2] > MAX_TRACED_CHUNKS * chunk:
        second = (layers[1], momenta[1]) if len(layers) == 2 else (None, None)
        y, *ends = run_chunks_op(
            q, keys, values, *chunk_rates, layers[0], momenta[0], *second, window, chunk, orthogonal
        )
        return y, tuple(ends[0::2][: len(layers)]), tuple(ends[1::2][: len(layers)])
    keep, step, log_momentum, weights = chunk_rates
    readouts, t = [], q.shape[2]
    for start in range(0, t, chunk):
        stop = min(start + chunk, t)
        own, seen = slice(start, stop), slice(start, stop + window - 1)
        coefficients = ChunkCoefficients(
            keep[..., own],
            step[..., own],
            None if log_momentum is None else log_momentum[..., own],
            weights[..., seen],
            window,
        )
        pairs = gradients(layers, keys[:, :, seen], values[:, :, seen])
        y, layers, momenta = CHUNK_FUNCTIONS[orthogonal](q[:, :, own], layers, momenta, pairs, coefficients)
        readouts.append(y)
    return torch.cat(readouts, 2), layers, momenta


FinalState = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The readout, the first layer and its momentum, the second and its; empty where there is none."""


def _empty_ends(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    squares = rest[4:8]
    y = q.new_empty(*q.shape[:3], values.shape[-1])
    return y, *(q.new_empty(0 if x is None else x.shape) for x in squares)


@torch_op("omega_rounds", _empty_ends)
def run_chunks_op(
    q: Tensor, keys: Tensor, values: Tensor, keep: Tensor, step: Tensor, log_momentum: Tensor | None, weights: Tensor,
    layer: Tensor, momentum: Tensor, layer2: Tensor | None, momentum2: Tensor | None,
    window: int, chunk: int, orthogonal: str,
) -> FinalState:  # fmt: skip
    """`run_chunks`, as one operation."""
    inputs = (q, keys, values, keep, step, log_momentum, weights, layer, momentum, layer2, momentum2)
    return _run_eagerly(inputs, window, chunk, orthogonal)


def _run_eagerly(inputs: Any, window: int, chunk: int, orthogonal: Any) -> FinalState:
    q, keys, values, keep, step, log_momentum, weights, *squares = inputs
    layers, momenta = (tuple(x for x in squares[i::2] if x is not None) for i in (0, 1))
    chunk_rates = keep, step, log_momentum, weights
    y, *ends = run_chunks(
        q, keys, values, chunk_rates, layers, momenta, window=window, chunk=chunk, orthogonal=orthogonal
    )
    outputs = [y, *(x for pair in zip(*ends, strict=True) for x in pair)]
    outputs += [q.new_empty(0)] * (5 - len(outputs))
    # nothing that comes out may be what went in
    return tuple(x.clone() for x in outputs)


@torch_op(
    "omega_rounds_backward",
    lambda *inputs: tuple(inputs[5].new_empty(0 if x is None else x.shape) for x in inputs[5:16]),
)
def backward(
    g_y: Tensor, g_layer: Tensor, g_momentum: Tensor, g_layer2: Tensor, g_momentum2: Tensor,
    q: Tensor, keys: Tensor, values: Tensor, keep: Tensor, step: Tensor, log_momentum: Tensor | None, weights: Tensor,
    layer: Tensor, momentum: Tensor, layer2: Tensor | None, momentum2: Tensor | None,
    window: int, chunk: int, orthogonal: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the tensors that `run_chunks_op` takes, in its order; empty for what is None."""
    inputs = [q, keys, values, keep, step, log_momentum, weights, layer, momentum, layer2, momentum2]
    present = [i for i, x in enumerate(inputs) if x is not None]

    def of(*leaves: Tensor) -> FinalState:
        full: list[Tensor | None] = [None] * len(inputs)
        for i, x in zip(present, leaves, strict=True):
            full[i] = x
        return _run_eagerly(full, window, chunk, orthogonal)

    # autograd sees nothing inside of an operation; torch.func does
    _, back, *_ = torch.func.vjp(of, *(inputs[i] for i in present))
    gradients_in = [q.new_empty(0) for _ in inputs]
    grads = tuple(g.contiguous() for g in (g_y, g_layer, g_momentum, g_layer2, g_momentum2))
    for i, g in zip(present, back(grads), strict=True):
        gradients_in[i] = g.clone(memory_format=torch.contiguous_format)
    return tuple(gradients_in)  # type: ignore[return-value]


differentiate(run_chunks_op, backward, keep_inputs(11, 5), results=5)
