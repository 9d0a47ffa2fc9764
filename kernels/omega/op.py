"""Omega memory: at each token one gradient step on the loss of the last `window` pairs.

B batch, T length, H heads, X head size, F columns of a feature, C tokens of a chunk, S these and the window's tokens
before, N chunks, G rows times heads. See docs/reference/mechanisms.md, "Omega memory".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..dispatch import (
    BackendChoice,
    checked_backend,
    compile_time_constant,
    max_relative_error,
    self_test_failure,
    triton_or_torch,
    why_no_triton,
)
from ..norms import statistics_dtype
from . import torch_op
from .chunk_loop import ChunkCoefficients, ChunkRates, OrthogonalMode, gradients, hidden_activation, readout, run_chunks
from .scan import scan
from .tiles import CHANNELS, MAX_CHUNK_TOKENS, MAX_PAIRS


class State(NamedTuple):
    """Memory of a sequence between two calls."""

    layers: tuple[Tensor, ...]
    """One matrix, or the two of a network: [B, H, out, in]."""
    momenta: tuple[Tensor, ...]
    """Momentum of each matrix, of the same shapes."""
    keys_BHSF: Tensor
    """Features of the keys of the last window - 1 tokens."""
    values_BHSX: Tensor
    """Values of the last window - 1 tokens."""
    weights_BHS: Tensor
    """Weights of these tokens in the loss, 0 where there was no token."""


class Rates(NamedTuple):
    """Coefficients of the update at each token, all [B, T, H]."""

    log_keep_BTH: Tensor
    """ln alpha <= 0: natural logarithm of the memory's decay."""
    step_BTH: Tensor
    """eta: step size of the memory along the momentum."""
    weight_BTH: Tensor
    """gamma: the pair's weight in the loss of every window that holds it."""
    log_momentum_BTH: Tensor | None = None
    """ln theta <= 0: natural logarithm of the momentum's decay; None: the momentum is the gradient alone."""


def first_state(
    layers: Sequence[Tensor], batch: int, heads: int, feature_columns: int, head_dim: int, window: int
) -> State:
    """Return the state before the first token: the initial matrices, momenta of 0, earlier pairs of 0 with weight 0.

    Its matrices are expanded views of `layers`, so they must not be written in place. Everything has the dtype and
    device of the first layer.

    Args:
        layers: Initial matrices [out, in], one or the two of a network, the same for every row and head.
        batch: Rows B.
        heads: Heads H.
        feature_columns: Columns F of a key's feature.
        head_dim: Head size X.
        window: Number of pairs in the loss of a token, its own included; the state holds window - 1 earlier ones.
    """
    start = tuple(layer.expand(batch, heads, *layer.shape) for layer in layers)
    layer = start[0]
    return State(
        start,
        tuple(torch.zeros_like(layer) for layer in start),
        layer.new_zeros(batch, heads, window - 1, feature_columns),
        layer.new_zeros(batch, heads, window - 1, head_dim),
        layer.new_zeros(batch, heads, window - 1),
    )


def omega(
    q_BTHF: Tensor, k_BTHF: Tensor, v_BTHX: Tensor, rates: Rates, state: State, *,
    window: int, chunk: int, orthogonal: OrthogonalMode = "none", backend: str | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """Return the readout of the omega memory, [B, T, H, X] in v's dtype, and the state after the last token.

    With f the memory and its gradient g_t = Σ over t - window < i <= t of gamma_i d ½‖f(k_i) − v_i‖², taken at the
    memory before the token's chunk:

        S_t = theta_t S_{t−1} + g_t        M_t = alpha_t M_{t−1} − eta_t N(S_t)        r_t = M_t(q_t)

    Chunks count from the first token of this call, and the last one may be shorter. So a sequence may be given in
    pieces that end where chunks end. State and sums are float32 (float64 for float64); the given state is left
    unchanged. Differentiable. Only whole chunks of a memory of one matrix reach the kernels; all else runs in torch.

    Args:
        q_BTHF: Features of the queries; T is at least 1.
        k_BTHF: Features of the keys.
        v_BTHX: Values.
        rates: Coefficients of each token.
        state: State before the first token, of this window.
        window: Number of pairs in the loss of a token, its own included.
        chunk: Tokens whose gradients are taken at the same memory.
        orthogonal: "none": N is the identity. "token": N orthogonalises S_t (`newton_schulz`). "chunk": N is applied
            once per chunk, at its end, with the mean of its etas; readouts in a chunk are then those of the memory
            before it, without the decay.
        backend: "triton" (whole chunks of a memory [X, X], features no longer than about 1) or "torch"; None:
            `choose_backend`.

    Raises:
        ValueError: q, k, v and the state do not fit each other, or `chunk` or `window` is below 1.
    """
    _check(q_BTHF, k_BTHF, v_BTHX, state, window, chunk)
    t, f = k_BTHF.shape[1], k_BTHF.shape[3]
    dtype = statistics_dtype(v_BTHX.dtype)
    if checked_backend(backend, "triton") is None:
        size = v_BTHX.shape[-1] if f == v_BTHX.shape[-1] and len(state.layers) == 1 else 0
        case = size, window, chunk, orthogonal, rates.log_momentum_BTH is not None
        backend = choose_backend(v_BTHX.device, v_BTHX.dtype, *case).backend

    def heads_first(x: Tensor) -> Tensor:
        return x.to(dtype).transpose(1, 2)

    def window_first(earlier_BHSX: Tensor, x: Tensor) -> Tensor:
        """Return the window's earlier tokens, then x, heads first: [B, H, window - 1 + T, ...].

        In the statistics' dtype.

        Args:
            earlier_BHSX: Features or values of the window - 1 tokens before, from the state.
            x: Those of the T tokens of this call, [B, T, H, ...].
        """
        return torch.cat([earlier_BHSX.to(dtype).transpose(1, 2), x.to(dtype)], 1).transpose(1, 2)

    q, keys = heads_first(q_BTHF), window_first(state.keys_BHSF, k_BTHF)
    values = window_first(state.values_BHSX, v_BTHX)
    keep, step, weight = (heads_first(x) for x in rates[:3])
    log_momentum = None if rates.log_momentum_BTH is None else heads_first(rates.log_momentum_BTH)
    weights = torch.cat([state.weights_BHS.to(dtype), weight], 2)
    layers = tuple(layer.to(dtype) for layer in state.layers)
    momenta = tuple(momentum.to(dtype) for momentum in state.momenta)

    def rates_of(tokens: slice, pairs: slice) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        momentum = None if log_momentum is None else log_momentum[..., tokens]
        return keep[..., tokens], step[..., tokens], momentum, weights[..., pairs]

    readouts, first = [], 0
    if len(layers) == 1 and orthogonal != "token" and t >= chunk:
        first = t // chunk * chunk
        own, seen = slice(first), slice(first + window - 1)
        chunk_rates = rates_of(own, seen)
        pairs_seen = keys[:, :, seen], values[:, :, seen].to(v_BTHX.dtype if backend == "triton" else dtype)
        run_full_chunks = _run_kernels if backend == "triton" else _scan_chunks
        y, layers, momenta = run_full_chunks(
            q[:, :, own], *pairs_seen, chunk_rates, layers[0], momenta[0], window, chunk, orthogonal
        )
        readouts.append(y)
    if first < t:
        rest = slice(first, t)
        chunk_rates = rates_of(rest, slice(first, None))
        pairs = keys[:, :, first:], values[:, :, first:]
        y, layers, momenta = run_chunks(
            q[:, :, rest], *pairs, chunk_rates, layers, momenta, window=window, chunk=chunk, orthogonal=orthogonal
        )
        readouts.append(y)
    window_tail = slice(t, t + window - 1)
    state = State(layers, momenta, keys[:, :, window_tail], values[:, :, window_tail], weights[..., window_tail])
    return torch.cat(readouts, 2).transpose(1, 2).to(v_BTHX.dtype), state


def _check(q_BTHF: Tensor, k_BTHF: Tensor, v_BTHX: Tensor, state: State, window: int, chunk: int) -> None:
    """Raise ValueError when queries, keys, values and state do not belong together, or a size is below 1.

    q and k must be equal in shape, v agree in B, T and H, and the state fit B, H, F and the window. The rates and the
    number of values' channels are not checked.
    """
    b, t, h, f = k_BTHF.shape
    if q_BTHF.shape != k_BTHF.shape or v_BTHX.shape[:3] != (b, t, h):
        raise ValueError(f"k has shape {tuple(k_BTHF.shape)}, but q {tuple(q_BTHF.shape)} and v {tuple(v_BTHX.shape)}")
    if chunk < 1 or window < 1:
        raise ValueError(f"chunk and window must be at least 1, got {chunk} and {window}")
    if state.weights_BHS.shape != (b, h, window - 1) or state.layers[0].shape[-1] != f:
        raise ValueError(f"the state must be for {b} rows, {h} heads, a window of {window} and {f} feature columns")


@compile_time_constant
def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    size: int,
    window: int,
    chunk: int,
    orthogonal: OrthogonalMode,
    has_momentum: bool,
) -> BackendChoice:
    """Return the backend of `omega`, "triton" or "torch", with the reason.

    The kernels must pass a self-test of exactly this case, which the first call runs. They need CUDA with compute
    capability 8.0 or higher and 16-bit activations. They take one square matrix of 16, 32, 64 or 128 rows, no
    orthogonal steps per token, chunks of at most 64, and at most 128 pairs seen by a chunk.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the activations.
        size: Rows and columns of a memory that is one square matrix; 0 for any other memory.
        window: Number of pairs in the loss of a token.
        chunk: Tokens of a chunk.
        orthogonal: Orthogonalisation of the momentum: "none", "chunk" or "token", as in `omega`.
        has_momentum: True when the momentum has a decay of its own.
    """
    device = torch.device(device)
    why = why_no_triton(device, dtype)
    if why is None and size not in CHANNELS:
        why = "the kernels need a memory of one square matrix with 16, 32, 64 or 128 rows"
    if why is None and orthogonal == "token":
        why = "the kernels do not support orthogonal: token"
    if why is None and (chunk > MAX_CHUNK_TOKENS or chunk + window - 1 > MAX_PAIRS):
        why = f"the kernels support chunks of at most {MAX_CHUNK_TOKENS} tokens, {MAX_PAIRS} with the window's earlier tokens; got chunk {chunk}, window {window}"
    return triton_or_torch(
        why or self_test_failure("omega", _error, device, dtype, size, window, chunk, orthogonal, has_momentum)
    )


def _error(
    device: torch.device, dtype: torch.dtype, size: int, window: int, chunk: int, orthogonal: OrthogonalMode, has_momentum: bool, *,
    seed: int,
) -> float:  # fmt: skip
    """Return the largest relative error of the kernels' readout and gradients, against "torch" in float32.

    The gradients are those of queries, keys, values and the logits of all rates. One row of two heads, 4 chunks and 3
    tokens but at least 131; keys and queries have unit length, and the memory starts at zeros.

    Args:
        device: Device under test.
        dtype: Dtype of the activations under test.
        size: Rows and columns of the memory.
        window: Number of pairs in the loss of a token.
        chunk: Tokens of a chunk.
        orthogonal: Orthogonalisation of the momentum: "none" or "chunk".
        has_momentum: True for a momentum with a decay.
        seed: Seed of the random inputs.
    """
    draw = torch.Generator().manual_seed(seed)
    t = max(131, 4 * chunk + 3)
    tensors = [
        torch.randn(1, t, 2, *more, generator=draw).to(device) for more in [(size,)] * 4 + [()] * (3 + has_momentum)
    ]
    weight, *inputs = tensors
    results = []
    for backend, kind in (("triton", dtype), ("torch", torch.float32)):
        args = [x.to(dtype).to(kind) if x.ndim == 4 else x.clone() for x in inputs]
        q, k, v, *logits = (x.requires_grad_() for x in args)
        start = first_state([torch.zeros(size, size, device=device)], 1, 2, size, size, window)
        with torch.enable_grad():
            keep, step, pair = (
                functional.logsigmoid(logits[0] + 4),
                (logits[1] - 1).sigmoid(),
                logits[2].sigmoid() / window,
            )
            rates = Rates(keep, step, pair, functional.logsigmoid(logits[3] + 3) if has_momentum else None)
            y, _ = omega(
                unit(q), unit(k), v, rates, start,
                window=window, chunk=chunk, orthogonal=orthogonal, backend=backend,
            )  # fmt: skip
            results.append([y, *torch.autograd.grad((y.float() * weight).sum(), (q, k, v, *logits))])
    return max_relative_error(*results)


def _chunks(x: Tensor, size: int, chunk: int) -> Tensor:
    """Return x [B, H, T, ...] as contiguous chunks [N, G, size, ...] that start `chunk` tokens apart, G = B H.

    A `size` above `chunk` makes them overlap. Tokens at the end that fill no further chunk are dropped.
    """
    chunks = x.unfold(2, size, chunk)
    return (chunks.mT if x.ndim == 4 else chunks).movedim(2, 0).flatten(1, 2).contiguous()


def _chunk_coefficients(chunk_rates: ChunkRates, window: int, chunk: int) -> ChunkCoefficients:
    """Return the coefficients of whole chunks, with leading axes [N, G] in place of [B, H].

    Args:
        chunk_rates: (ln alpha, eta, ln theta or None) of the tokens, [B, H, N chunk], and the weights of the pairs that
            they see, [B, H, window - 1 + N chunk].
        window: Number of pairs in the loss of a token.
        chunk: Tokens of a chunk.
    """
    keep, step, log_momentum, weights = chunk_rates
    log_momentum = None if log_momentum is None else _chunks(log_momentum, chunk, chunk)
    seen = _chunks(weights, chunk + window - 1, chunk)
    return ChunkCoefficients(_chunks(keep, chunk, chunk), _chunks(step, chunk, chunk), log_momentum, seen, window)


def _scan_chunks(
    q: Tensor, keys: Tensor, values: Tensor, chunk_rates: ChunkRates, layer: Tensor,
    momentum: Tensor, window: int, chunk: int, orthogonal: OrthogonalMode,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """Run whole chunks of a memory that is one matrix in plain torch.

    A scan gives the memories before all chunks; everything else is batched products.

    Args:
        q: Features of the queries [B, H, T, F]; `chunk` divides T.
        keys: Features of the keys [B, H, window - 1 + T, F], those of the window before first.
        values: Values [B, H, window - 1 + T, X].
        chunk_rates: Coefficients of the tokens.
        layer: Memory before the first token [B, H, X, F].
        momentum: Its momentum.
        window: Number of pairs in the loss of a token.
        chunk: Tokens of a chunk.
        orthogonal: "none" or "chunk".

    Returns:
        (readout [B, H, T, X], (last memory [B, H, X, F],), (last momentum,)). Without a momentum's decay and orthogonal
        steps, the momentum is returned as it was given.
    """
    b, h = q.shape[:2]
    seen = chunk + window - 1
    coefficients = _chunk_coefficients(chunk_rates, window, chunk)
    q_NGCF, keys_NGSF, values_NGSX = _chunks(q, chunk, chunk), _chunks(keys, seen, chunk), _chunks(values, seen, chunk)
    plain = orthogonal == "none"
    pair_weights_NGCS, momentum_weight_NGC = coefficients.memory_weights() if plain else (None, None)
    has_momentum = chunk_rates[2] is not None or not plain
    memories, momenta = scan(
        keys_NGSF, values_NGSX,
        None if pair_weights_NGCS is None else pair_weights_NGCS[..., -1, :].contiguous(),
        coefficients.last_momentum_shares() if has_momentum else None,
        coefficients.memory_decay[..., -1].contiguous(),
        (coefficients.step if momentum_weight_NGC is None else momentum_weight_NGC[..., -1]).contiguous(),
        coefficients.momentum_decay[..., -1].contiguous(),
        layer.flatten(0, 1).contiguous(), momentum.flatten(0, 1).contiguous(),
    )  # fmt: skip
    if pair_weights_NGCS is None or momentum_weight_NGC is None:
        y = q_NGCF @ memories[:-1].mT
    else:
        (pair,) = gradients((memories[:-1],), keys_NGSF, values_NGSX)
        before = momenta[:-1] if has_momentum else None
        y = readout(
            q_NGCF, memories[:-1], before, pair, coefficients.memory_decay, pair_weights_NGCS, momentum_weight_NGC
        )
    y = y.unflatten(1, (b, h)).movedim(0, 2).flatten(2, 3)
    last = memories[-1].unflatten(0, (b, h))
    return y, (last,), (momenta[-1].unflatten(0, (b, h)) if has_momentum else momentum,)


def _run_kernels(
    q: Tensor, keys: Tensor, values: Tensor, chunk_rates: ChunkRates, layer: Tensor,
    momentum: Tensor, window: int, chunk: int, orthogonal: OrthogonalMode,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """Run whole chunks of a memory that is one matrix by our kernels; values are in the activations' dtype.

    q are the features of the queries [B, H, T, X] of whole chunks; keys and values [B, H, window - 1 + T, X] start with
    those of the window before. layer and momentum [B, H, X, X] are the state before the first token. All but the values
    are float32.

    Returns:
        (readout [B, H, T, X], (last memory [B, H, X, X],), (last momentum,)). Without a momentum's decay and orthogonal
        steps, the momentum is returned as it was given.
    """
    b, h = q.shape[:2]
    coefficients = _chunk_coefficients(chunk_rates, window, chunk)
    plain = orthogonal == "none"
    pair_weights, momentum_weight = coefficients.memory_weights() if plain else (None, None)
    has_momentum = chunk_rates[2] is not None or not plain
    y, last, last_momentum, *_ = torch_op.forward(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), coefficients.memory_decay,
        pair_weights, momentum_weight if has_momentum else None,
        coefficients.last_momentum_shares() if has_momentum else None,
        coefficients.momentum_decay[..., -1] if has_momentum else None,
        None if plain else coefficients.step,
        layer.flatten(0, 1), momentum.flatten(0, 1),
    )  # fmt: skip
    ended = last_momentum.unflatten(0, (b, h)) if has_momentum else momentum
    return y.transpose(1, 2), (last.unflatten(0, (b, h)),), (ended,)


def answer(state: State, q_BTHF: Tensor) -> Tensor:
    """Return the memory's readout f(q) of features of queries, [B, T, H, X] in the state's dtype, without an update.

    Args:
        state: State whose matrices [B, H, out, in] are read; a network has a sigmoid between its two.
        q_BTHF: Features of the queries.
    """
    x = q_BTHF.to(state.layers[0].dtype).transpose(1, 2)
    for index, layer in enumerate(state.layers):
        x = hidden_activation(x @ layer.mT, index, state.layers)
    return x.transpose(1, 2)


def unit(x: Tensor) -> Tensor:
    """Return keys or queries over their length in the last axis, in float32 (float64 for float64).

    A zero vector stays zero.
    """
    return functional.normalize(x.to(statistics_dtype(x.dtype)), dim=-1, eps=1e-12)
