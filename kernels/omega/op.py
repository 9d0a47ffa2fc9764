"""A memory that takes a gradient step on the loss of the last `window` pairs at each token (docs/mechanisms.md, "Omega memory").

B batch, T length, H heads, X head size, F columns of a feature, C tokens of a chunk, S these and the window's tokens before, N chunks,
G rows times heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..dispatch import BackendChoice, compile_time_constant, failure, triton_or_torch, why_no_triton, worst
from ..norms import statistics_dtype
from . import torch_op
from .chunk_loop import ChunkCoefficients, ChunkRates, OrthogonalMode, gradients, hidden_activation, readout, run_chunks
from .scan import scan
from .tiles import CHANNELS, MOST_SEEN, MOST_TOKENS


class State(NamedTuple):
    """What a memory carries from one token to the next."""

    layers: tuple[Tensor, ...]
    """One matrix, or the two of a network: [B, H, out, in]."""
    momenta: tuple[Tensor, ...]
    """Of the same shapes."""
    keys_BHSF: Tensor
    """The last window - 1 tokens: features of their keys,"""
    values_BHSX: Tensor
    """their values,"""
    weights_BHS: Tensor
    """and their weights in the loss, 0 where there was no token."""


class Rates(NamedTuple):
    """What each token says of the update at it: all [B, T, H]."""

    log_keep_BTH: Tensor
    """ln alpha <= 0: how much of the memory stays."""
    step_BTH: Tensor
    """eta: how far the memory goes along the momentum."""
    weight_BTH: Tensor
    """gamma: the pair's weight in the loss of every window that holds it."""
    log_momentum_BTH: Tensor | None = None
    """ln theta <= 0: how much of the momentum stays; None: it is the gradient alone."""


def first_state(layers: Sequence[Tensor], batch: int, heads: int, columns: int, size: int, window: int) -> State:
    """Before the first token. `layers`: the memory's matrices [out, in], the same for every row and head."""
    start = tuple(layer.expand(batch, heads, *layer.shape) for layer in layers)
    some = start[0]
    return State(
        start,
        tuple(torch.zeros_like(layer) for layer in start),
        some.new_zeros(batch, heads, window - 1, columns),
        some.new_zeros(batch, heads, window - 1, size),
        some.new_zeros(batch, heads, window - 1),
    )


def omega(
    q_BTHF: Tensor, k_BTHF: Tensor, v_BTHX: Tensor, rates: Rates, state: State, *,
    window: int, chunk: int, orthogonal: OrthogonalMode = "none", backend: str | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """(readout [B, T, H, X] in v's type, the state after the last token).

    With f the memory and its gradient g_t = Σ over t - window < i <= t of gamma_i d ½‖f(k_i) − v_i‖² taken where the memory
    stood before the token's chunk:

        S_t = theta_t S_{t−1} + g_t        M_t = alpha_t M_{t−1} − eta_t N(S_t)        r_t = M_t(q_t)

    `orthogonal` "none": N is the identity. "token": N makes S_t orthogonal. "chunk": once a chunk, at its end, with the mean of its etas;
    the readouts in a chunk are then those of the memory before it. q and k are features; state and sums are float32 (float64 for
    float64). A sequence may be given in pieces that end where chunks end. `backend` None is what `choose_backend` says: "triton", for
    the whole chunks of a memory [X, X] and features no longer than about 1, or "torch". Raises ValueError when shapes do not fit.
    """
    _check(q_BTHF, k_BTHF, v_BTHX, state, window, chunk)
    t, f = k_BTHF.shape[1], k_BTHF.shape[3]
    dtype = statistics_dtype(v_BTHX.dtype)
    if backend is None:
        size = v_BTHX.shape[-1] if f == v_BTHX.shape[-1] and len(state.layers) == 1 else 0
        given = size, window, chunk, orthogonal, rates.log_momentum_BTH is not None
        backend = choose_backend(v_BTHX.device, v_BTHX.dtype, *given).backend

    def heads_first(x: Tensor) -> Tensor:
        return x.to(dtype).transpose(1, 2)

    def seen_first(old_BHSX: Tensor, x: Tensor) -> Tensor:
        """Behind those of the window before, [B, H, S, X]."""
        return torch.cat([old_BHSX.to(dtype).transpose(1, 2), x.to(dtype)], 1).transpose(1, 2)

    q, keys, values = heads_first(q_BTHF), seen_first(state.keys_BHSF, k_BTHF), seen_first(state.values_BHSX, v_BTHX)
    keep, step, weight = (heads_first(x) for x in rates[:3])
    slow = None if rates.log_momentum_BTH is None else heads_first(rates.log_momentum_BTH)
    weights = torch.cat([state.weights_BHS.to(dtype), weight], 2)
    layers = tuple(layer.to(dtype) for layer in state.layers)
    momenta = tuple(momentum.to(dtype) for momentum in state.momenta)
    reads, first = [], 0
    if len(layers) == 1 and orthogonal != "token" and t >= chunk:
        first = t // chunk * chunk
        own, seen = slice(first), slice(first + window - 1)
        rated = (keep[..., own], step[..., own], None if slow is None else slow[..., own], weights[..., seen])
        pairs_seen = keys[:, :, seen], values[:, :, seen].to(v_BTHX.dtype if backend == "triton" else dtype)
        at_once = _by_kernels if backend == "triton" else _all_at_once
        y, layers, momenta = at_once(q[:, :, own], *pairs_seen, rated, layers[0], momenta[0], window, chunk, orthogonal)
        reads.append(y)
    if first < t:
        left = slice(first, t)
        rated = (keep[..., left], step[..., left], None if slow is None else slow[..., left], weights[..., first:])
        pairs = keys[:, :, first:], values[:, :, first:]
        y, layers, momenta = run_chunks(
            q[:, :, left], *pairs, rated, layers, momenta, window=window, chunk=chunk, orthogonal=orthogonal
        )
        reads.append(y)
    tail = slice(t, t + window - 1)
    state = State(layers, momenta, keys[:, :, tail], values[:, :, tail], weights[..., tail])
    return torch.cat(reads, 2).transpose(1, 2).to(v_BTHX.dtype), state


def _check(q_BTHF: Tensor, k_BTHF: Tensor, v_BTHX: Tensor, state: State, window: int, chunk: int) -> None:
    """Raise ValueError when queries, pairs and state do not belong together."""
    b, t, h, f = k_BTHF.shape
    if q_BTHF.shape != k_BTHF.shape or v_BTHX.shape[:3] != (b, t, h):
        raise ValueError(f"k has shape {tuple(k_BTHF.shape)}, but q {tuple(q_BTHF.shape)} and v {tuple(v_BTHX.shape)}")
    if chunk < 1 or window < 1:
        raise ValueError(f"chunk and window must be at least 1, got {chunk} and {window}")
    if state.weights_BHS.shape != (b, h, window - 1) or state.layers[0].shape[-1] != f:
        raise ValueError(f"the state does not fit {b} rows, {h} heads, a window of {window} and {f} columns")


@compile_time_constant
def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    size: int,
    window: int,
    chunk: int,
    orthogonal: OrthogonalMode,
    slow: bool,
) -> BackendChoice:
    """What `omega` takes for activations of that type, a memory [size, size], 0 for any other; `slow`: with a momentum."""
    device = torch.device(device)
    why = why_no_triton(device, dtype)
    if why is None and size not in CHANNELS:
        why = "the kernels need one matrix of 16, 32, 64 or 128 rows and as many columns"
    if why is None and orthogonal == "token":
        why = "the kernels take no orthogonal step at each token"
    if why is None and (chunk > MOST_TOKENS or chunk + window - 1 > MOST_SEEN):
        why = f"the kernels take chunks to {MOST_TOKENS}, to {MOST_SEEN} with the window's tokens before, got {chunk} and {window}"
    return triton_or_torch(why or failure("omega", _error, device, dtype, size, window, chunk, orthogonal, slow))


def _error(
    device: torch.device, dtype: torch.dtype, size: int, window: int, chunk: int, orthogonal: OrthogonalMode, slow: bool, *,
    seed: int,
) -> float:  # fmt: skip
    """Largest relative error of the kernels' readout and gradients, against "torch" in float32."""
    draw = torch.Generator().manual_seed(seed)
    t = max(131, 4 * chunk + 3)
    made = [torch.randn(1, t, 2, *more, generator=draw).to(device) for more in [(size,)] * 4 + [()] * (3 + slow)]
    weight, *given = made
    found = []
    for backend, kind in (("triton", dtype), ("torch", torch.float32)):
        args = [x.to(dtype).to(kind) if x.ndim == 4 else x.clone() for x in given]
        q, k, v, *logits = (x.requires_grad_() for x in args)
        start = first_state([torch.zeros(size, size, device=device)], 1, 2, size, size, window)
        with torch.enable_grad():
            keep, step, pair = (
                functional.logsigmoid(logits[0] + 4),
                (logits[1] - 1).sigmoid(),
                logits[2].sigmoid() / window,
            )
            rates = Rates(keep, step, pair, functional.logsigmoid(logits[3] + 3) if slow else None)
            y, _ = omega(
                unit(q), unit(k), v, rates, start,
                window=window, chunk=chunk, orthogonal=orthogonal, backend=backend,
            )  # fmt: skip
            found.append([y, *torch.autograd.grad((y.float() * weight).sum(), (q, k, v, *logits))])
    return worst(*found)


def _chunks(x: Tensor, size: int, chunk: int) -> Tensor:
    """[B, H, T, ...] -> [N, G, size, ...], each `chunk` after the last."""
    cut = x.unfold(2, size, chunk)
    return (cut.mT if x.ndim == 4 else cut).movedim(2, 0).flatten(1, 2).contiguous()


def _planned(rated: ChunkRates, window: int, chunk: int) -> ChunkCoefficients:
    """Of whole chunks, [N, G, ...]; `rated`: keep, step and momentum of their tokens, and the weights of the pairs that they see."""
    keep, step, slow, weights = rated
    slow = None if slow is None else _chunks(slow, chunk, chunk)
    seen = _chunks(weights, chunk + window - 1, chunk)
    return ChunkCoefficients(_chunks(keep, chunk, chunk), _chunks(step, chunk, chunk), slow, seen, window)


def _all_at_once(
    q: Tensor, keys: Tensor, values: Tensor, rated: ChunkRates, layer: Tensor,
    momentum: Tensor, window: int, chunk: int, orthogonal: OrthogonalMode,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """Whole chunks of a memory that is one matrix: a scan gives the memories before all of them, and the rest is products."""
    b, h = q.shape[:2]
    seen = chunk + window - 1
    plan = _planned(rated, window, chunk)
    q_NGCF, keys_NGSF, values_NGSX = _chunks(q, chunk, chunk), _chunks(keys, seen, chunk), _chunks(values, seen, chunk)
    plain = orthogonal == "none"
    felt_NGCS, carried_NGC = plan.felt_and_carried() if plain else (None, None)
    has_momentum = rated[2] is not None or not plain
    memories, momenta = scan(
        keys_NGSF, values_NGSX,
        None if felt_NGCS is None else felt_NGCS[..., -1, :].contiguous(),
        plan.last_momentum() if has_momentum else None,
        plan.kept[..., -1].contiguous(),
        (plan.step if carried_NGC is None else carried_NGC[..., -1]).contiguous(),
        plan.old_momentum[..., -1].contiguous(),
        layer.flatten(0, 1).contiguous(), momentum.flatten(0, 1).contiguous(),
    )  # fmt: skip
    if felt_NGCS is None or carried_NGC is None:
        y = q_NGCF @ memories[:-1].mT
    else:
        (pair,) = gradients((memories[:-1],), keys_NGSF, values_NGSX)
        before = momenta[:-1] if has_momentum else None
        y = readout(q_NGCF, memories[:-1], before, pair, plan.kept, felt_NGCS, carried_NGC)
    y = y.unflatten(1, (b, h)).movedim(0, 2).flatten(2, 3)
    last = memories[-1].unflatten(0, (b, h))
    return y, (last,), (momenta[-1].unflatten(0, (b, h)) if has_momentum else momentum,)


def _by_kernels(
    q: Tensor, keys: Tensor, values: Tensor, rated: ChunkRates, layer: Tensor,
    momentum: Tensor, window: int, chunk: int, orthogonal: OrthogonalMode,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """The same by our kernels; values are in the activations' type."""
    b, h = q.shape[:2]
    plan = _planned(rated, window, chunk)
    plain = orthogonal == "none"
    felt, carried = plan.felt_and_carried() if plain else (None, None)
    has_momentum = rated[2] is not None or not plain
    y, last, last_momentum, *_ = torch_op.forward(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), plan.kept,
        felt, carried if has_momentum else None,
        plan.last_momentum() if has_momentum else None,
        plan.old_momentum[..., -1] if has_momentum else None,
        None if plain else plan.step,
        layer.flatten(0, 1), momentum.flatten(0, 1),
    )  # fmt: skip
    ended = last_momentum.unflatten(0, (b, h)) if has_momentum else momentum
    return y.transpose(1, 2), (last.unflatten(0, (b, h)),), (ended,)


def answer(state: State, q_BTHF: Tensor) -> Tensor:
    """What the memory as it is says to features of queries: [B, T, H, X] in the state's type."""
    x = q_BTHF.to(state.layers[0].dtype).transpose(1, 2)
    for index, layer in enumerate(state.layers):
        x = hidden_activation(x @ layer.mT, index, state.layers)
    return x.transpose(1, 2)


def unit(x: Tensor) -> Tensor:
    """Keys and queries of length 1, in the statistics' type; a zero one stays zero."""
    return functional.normalize(x.to(statistics_dtype(x.dtype)), dim=-1, eps=1e-12)
