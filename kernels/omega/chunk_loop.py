"""Sequential loop over chunks, for memories that a scan cannot handle.

These are networks of two matrices, orthogonal steps at each token, and the rest after the last whole chunk.

B batch, H heads, T length, X head size, F columns of a feature, C tokens of a chunk, S these and the window's tokens
before.

A chunk takes a hundred small operations or more. torch.compile gets them as one operation, because compiling a network
of twelve such layers would take minutes. The backward runs the forward again.
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
"""Largest number of chunks whose operations torch.compile sees directly."""


class ChunkCoefficients:
    """Coefficients of a chunk's recurrence, computed from the rates [..., C] and the pairs' weights [..., S] only.

    The leading axes are any, such as [B, H] or [N, G]. Pair s of the S = window - 1 + C that the chunk sees is its
    token s - (window - 1), so the first window - 1 lie before the chunk.
    """

    def __init__(
        self, log_keep: Tensor, step: Tensor, log_momentum: Tensor | None, weight: Tensor, window: int
    ) -> None:
        """Compute the decays and steps of a chunk.

        `momentum_decay` is 0 without a momentum's decay, and `step` is the mean of eta over the chunk.

        Args:
            log_keep: ln alpha [..., C].
            step: eta [..., C].
            log_momentum: ln theta [..., C], or None for a momentum that is the gradient alone.
            weight: Weights of the pairs that the chunk sees [..., S], S = window - 1 + C.
            window: Number of pairs in the loss of a token.
        """
        c = log_keep.shape[-1]
        i_S = torch.arange(c + window - 1, device=log_keep.device)
        t_C = torch.arange(c, device=log_keep.device)[:, None]
        # token t of the chunk is token t + window - 1 of those seen
        self._inside = (i_S >= t_C) & (i_S < t_C + window)
        self._weight, self._slow, self._keep, self._step = weight, log_momentum, log_keep, step
        self.momentum_decay = torch.zeros_like(log_keep) if log_momentum is None else running_sum(log_momentum).exp()
        """Decay of the momentum from before the chunk to each token, [..., C]."""
        self.memory_decay = running_sum(log_keep).exp()
        """Decay of the memory from before the chunk to each token, [..., C]."""
        self.step = step.mean(-1)

    def momentum_shares(self) -> Tensor:
        """Return the share of each pair's gradient in each token's momentum, [..., C, S].

        It sums the pair's weight over the tokens up to this one whose window holds it, each with the momentum's decay
        since. Without such a decay only the token's own window counts.
        """
        share = torch.where(self._inside, self._weight[..., None, :], 0.0)
        return share if self._slow is None else _decay_ratios(self._slow) @ share

    def last_momentum_shares(self) -> Tensor:
        """Return the share of each pair's gradient in the last token's momentum, [..., S].

        It sums the pair's weight over the chunk's tokens whose window holds it, each with the momentum's decay since.
        Without such a decay only the last token's own window counts.
        """
        if self._slow is None:
            return self._inside[-1] * self._weight
        total = running_sum(self._slow)
        return ((total[..., -1:] - total).exp() @ self._inside.to(total.dtype)) * self._weight

    def step_weights(self) -> Tensor:
        """Return the size of token t's step along token s's momentum, [..., t, s], as it remains in t's memory.

        That is eta_s times the memory's decay after s up to t; 0 for s > t. It is subtracted from the memory.
        """
        return _decay_ratios(self._keep) * self._step[..., None, :]

    def memory_weights(self) -> tuple[Tensor, Tensor]:
        """Return the memory's total steps: along each pair's gradient, and along the momentum before the chunk.

        Both are subtracted from the decayed memory of before the chunk to give each token's memory.

        Returns:
            (pair_weights [..., C, S], momentum_weight [..., C]).
        """
        moves = self.step_weights()
        return moves @ self.momentum_shares(), (moves @ self.momentum_decay[..., None]).squeeze(-1)


def _decay_ratios(logs: Tensor) -> Tensor:
    """Return the product of the factors after s up to t, [..., t, s], from their logarithms [..., C].

    It is 1 for s = t and 0 for s > t.
    """
    total = running_sum(logs)
    c = total.shape[-1]
    later = torch.ones(c, c, dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


Pairs = list[tuple[Tensor, Tensor]]
"""Gradient of each layer for each pair as an outer product: factors [B, H, S, out] and [B, H, S, in]."""


def gradients(layers: tuple[Tensor, ...], keys: Tensor, values: Tensor) -> Pairs:
    """Return, per layer, the gradient of ½‖f(k) − v‖² for each pair as two factors of an outer product.

    Element i is (output factor [..., S, out], input factor [..., S, in]) of layer i: the gradient of pair s is the
    first factor of s times the second, transposed. Weights of the pairs are not included.

    Args:
        layers: One matrix [..., out, in], or the two (inner, outer) of a network outer sigmoid(inner k).
        keys: Features of the keys [..., S, F].
        values: Values [..., S, X].
    """
    if len(layers) == 1:
        return [(keys @ layers[0].mT - values, keys)]
    inner, outer = layers
    hidden = torch.sigmoid(keys @ inner.mT)
    error = hidden @ outer.mT - values
    return [((error @ outer) * hidden * (1 - hidden), keys), (error, hidden)]


def hidden_activation(x: Tensor, index: int, layers: Sequence[Tensor]) -> Tensor:
    """Return the input of the next layer: the sigmoid of x, or x itself for the last layer."""
    return torch.sigmoid(x) if index + 1 < len(layers) else x


ChunkResult = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]


def readout(
    x: Tensor, layer: Tensor, momentum: Tensor | None, factors: tuple[Tensor, Tensor], memory_decay: Tensor, pair_weights: Tensor,
    momentum_weight: Tensor,
) -> Tensor:  # fmt: skip
    """Return every token's own memory applied to its x, [..., C, out], without forming the memories.

    memory_decay M x - momentum_weight S x - Σ pair_weights (input_factor·x) output_factor, the sum over the pairs.

    Args:
        x: Input of the layer [..., C, in].
        layer: M before the chunk [..., out, in].
        momentum: S before the chunk, like `layer`, or None for 0.
        factors: (output_factor [..., S, out], input_factor [..., S, in]) of the pairs' gradients.
        memory_decay: [..., C], decay from before the chunk to each token.
        pair_weights: [..., C, S] of `ChunkCoefficients.memory_weights`.
        momentum_weight: [..., C] of the same.
    """
    output_factor, input_factor = factors
    y = memory_decay[..., None] * (x @ layer.mT) - (pair_weights * (x @ input_factor.mT)) @ output_factor
    return y if momentum is None else y - momentum_weight[..., None] * (x @ momentum.mT)


def _run_plain_chunk(
    q: Tensor, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...], pairs: Pairs, coefficients: ChunkCoefficients
) -> ChunkResult:
    """Run one chunk without orthogonalisation, all tokens at once instead of one memory matrix per token.

    The memory W after token c is decay_c W - momentum_weight_c M - sum_s pair_weight_cs grad_s, with M the momentum
    before the chunk and grad_s the outer product of a pair's factors; only its products with the queries are formed.

    Args:
        q: Features of the queries [B, H, C, F].
        layers: Matrices before the chunk [B, H, out, in].
        momenta: Their momenta.
        pairs: Factors of the pairs' gradients for each layer, taken at `layers`.
        coefficients: Coefficients of this chunk.

    Returns:
        (readout [B, H, C, X], layers and momenta after the chunk, two tuples of new tensors).
    """
    pair_weights_BHCS, momentum_weight_BHC = coefficients.memory_weights()
    x, new_layers, new_momenta = q, [], []
    for index, (layer, momentum, factors) in enumerate(zip(layers, momenta, pairs, strict=True)):
        output_factor, input_factor = factors
        y = readout(x, layer, momentum, factors, coefficients.memory_decay, pair_weights_BHCS, momentum_weight_BHC)
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
    """Run one chunk whose momentum is orthogonalised at every token, with one matrix per token.

    q are the features of the queries [B, H, C, F], layers and momenta the matrices before the chunk, pairs the factors
    of the pairs' gradients per layer, coefficients those of the chunk. Memory: C matrices per layer, row and head.

    Returns:
        (readout [B, H, C, X], layers and momenta after the chunk; momenta are those before orthogonalisation).
    """
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
    """Run one chunk with a single orthogonal step at its end, which no token of the chunk reads.

    All tokens read the memory before the chunk, without its decay. The step is the mean of the chunk's etas. q are the
    features of the queries [B, H, C, F], layers and momenta the matrices before the chunk, pairs the factors of the
    pairs' gradients per layer, coefficients those of the chunk.

    Returns:
        (readout [B, H, C, X], layers and momenta after the chunk; momenta are those before orthogonalisation).
    """
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
    """Return a layer's momentum after the chunk's last token, [B, H, out, in].

    Args:
        momentum: Momentum before the chunk.
        output_factor: Output factors of the pairs' gradients of this layer, [B, H, S, out].
        input_factor: Their input factors, [B, H, S, in].
        coefficients: Coefficients of the chunk.
    """
    new = (coefficients.last_momentum_shares()[..., None] * output_factor).mT @ input_factor
    return coefficients.momentum_decay[..., -1, None, None] * momentum + new


CHUNK_FUNCTIONS = {
    "none": _run_plain_chunk,
    "token": _run_chunk_orthogonal_per_token,
    "chunk": _run_chunk_orthogonal_at_end,
}

ChunkRates = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""ln alpha, eta and ln theta (or None) of each token, [B, H, T]; the pairs' weights, [B, H, window - 1 + T]."""


def run_chunks(
    q: Tensor, keys: Tensor, values: Tensor, chunk_rates: ChunkRates, layers: tuple[Tensor, ...], momenta: tuple[Tensor, ...],
    *, window: int, chunk: int, orthogonal: OrthogonalMode,
) -> ChunkResult:  # fmt: skip
    """Run the memory over T tokens, chunk by chunk.

    Under torch.compile, more than one chunk becomes a single op (`run_chunks_op`).

    Args:
        q: Features of the queries [B, H, T, F]; T is at least 1.
        keys: Features of the keys [B, H, window - 1 + T, F], those of the window before first.
        values: Values [B, H, window - 1 + T, X].
        chunk_rates: (ln alpha, eta, ln theta or None) of the tokens, and the weights of the pairs.
        layers: Matrices before the first token [B, H, out, in], one or two.
        momenta: Their momenta.
        window: Number of pairs in the loss of a token.
        chunk: Tokens of a chunk; the last one may be shorter.
        orthogonal: Orthogonalisation of the momentum: "none", at each "token", or once at the end of each "chunk".

    Returns:
        (readout [B, H, T, X], layers and momenta after the last token).
    """
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
"""Readout, first layer and its momentum, second layer and its momentum; empty where there is no second layer."""


def _empty_ends(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return uninitialised results of `run_chunks_op`, for torch.compile; only shapes, dtypes and device count.

    They are the readout [B, H, T, X], then tensors like layer, momentum, layer2 and momentum2, empty where there is no
    second layer; all in q's dtype.
    """
    squares = rest[4:8]
    y = q.new_empty(*q.shape[:3], values.shape[-1])
    return y, *(q.new_empty(0 if x is None else x.shape) for x in squares)


@torch_op("omega_rounds", _empty_ends)
def run_chunks_op(
    q: Tensor, keys: Tensor, values: Tensor, keep: Tensor, step: Tensor, log_momentum: Tensor | None, weights: Tensor,
    layer: Tensor, momentum: Tensor, layer2: Tensor | None, momentum2: Tensor | None,
    window: int, chunk: int, orthogonal: str,
) -> FinalState:  # fmt: skip
    """Run `run_chunks` as one torch op, with optional tensors in place of tuples.

    keep is ln alpha, step eta, log_momentum ln theta or None. layer2 and momentum2 are the second matrix of a network
    and its momentum, or None. q [B, H, T, F] are the features of the queries; keys and values start with the window - 1
    tokens before; weights are those of the pairs; chunk is the tokens of a chunk, and orthogonal "none", "token" or
    "chunk". The results are the readout [B, H, T, X], then layer, momentum, layer2 and momentum2 after the last token:
    copies, and those of a missing second layer are empty.
    """
    inputs = (q, keys, values, keep, step, log_momentum, weights, layer, momentum, layer2, momentum2)
    return _run_eagerly(inputs, window, chunk, orthogonal)


def _run_eagerly(inputs: Any, window: int, chunk: int, orthogonal: Any) -> FinalState:
    """Run `run_chunks` on the flat inputs of the op, and return copies of its results as a `FinalState`.

    Args:
        inputs: The eleven tensors that `run_chunks_op` takes, in its order; None where there is none.
        window: Number of pairs in the loss of a token.
        chunk: Tokens of a chunk.
        orthogonal: Orthogonalisation mode.
    """
    q, keys, values, keep, step, log_momentum, weights, *squares = inputs
    layers, momenta = (tuple(x for x in squares[i::2] if x is not None) for i in (0, 1))
    chunk_rates = keep, step, log_momentum, weights
    y, *ends = run_chunks(
        q, keys, values, chunk_rates, layers, momenta, window=window, chunk=chunk, orthogonal=orthogonal
    )
    outputs = [y, *(x for pair in zip(*ends, strict=True) for x in pair)]
    outputs += [q.new_empty(0)] * (5 - len(outputs))
    # an op must not return its inputs
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
    """Return the gradients of the eleven tensors of `run_chunks_op`, in its order; empty for inputs that are None.

    Runs the forward again under torch.func.vjp. The first five arguments are the gradients of the op's five results
    (g_layer and g_momentum of the first matrix and its momentum after the last token), the others are its inputs.
    """
    inputs = [q, keys, values, keep, step, log_momentum, weights, layer, momentum, layer2, momentum2]
    present = [i for i, x in enumerate(inputs) if x is not None]

    def of(*leaves: Tensor) -> FinalState:
        full: list[Tensor | None] = [None] * len(inputs)
        for i, x in zip(present, leaves, strict=True):
            full[i] = x
        return _run_eagerly(full, window, chunk, orthogonal)

    # autograd does not record inside an op; torch.func does
    _, back, *_ = torch.func.vjp(of, *(inputs[i] for i in present))
    gradients_in = [q.new_empty(0) for _ in inputs]
    grads = tuple(g.contiguous() for g in (g_y, g_layer, g_momentum, g_layer2, g_momentum2))
    for i, g in zip(present, back(grads), strict=True):
        gradients_in[i] = g.clone(memory_format=torch.contiguous_format)
    return tuple(gradients_in)  # type: ignore[return-value]


differentiate(run_chunks_op, backward, keep_inputs(11, 5), results=5)
