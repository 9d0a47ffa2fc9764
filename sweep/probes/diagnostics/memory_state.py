"""Access to memories: the norm of their state while a network reads, and pairs that a memory recalls on its own.

For the probes state_norm ("Diagnostics" in docs/reference/mechanisms.md) and memory_recall ("Memory recall"). B documents or
draws, T tokens, K pairs, H heads, J KV heads, X head size, L layers with a memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ....kernels.gated_delta.op import NORM_FLOOR
from ....kernels.norms import statistics_dtype
from ....kernels.omega.op import unit
from ....kernels.shapes import expand_kv
from ....model.attention import Attention
from ....model.backbone import Backbone
from ....model.layers import chunk_bounds
from ....model.memory.gated_delta import DeltaMemory, DeltaRates
from ....model.memory.recurrent import Recurrent
from ..subject import CellSubject, observe_evaluations

STATE_METRICS = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")
"""Metrics of the probe `state_norm`: trained retention first, then retention 1 (`kept`), where only writes erase."""
OWN_WRITE_METRICS = ("delta_norm", "delta_norm_kept")
"""Metrics that every memory has, computed with its own writes."""


class MemoryInputs(NamedTuple):
    """Inputs of a memory: the normed input of the layer, and the mixer's q, k and v."""

    x_BTD: Tensor
    q_BTHX: Tensor
    k_BTJX: Tensor
    v_BTJX: Tensor


def memories_of(model: Backbone) -> dict[int, Any]:
    """Return the memories of a network by layer, in the order of its layers."""
    mixes = {layer: block.mix for layer, block in enumerate(model.blocks) if isinstance(block.mix, Attention)}
    return {layer: mix.memory for layer, mix in mixes.items() if mix.memory is not None}


def missing_methods_reason(model: Backbone, *methods: str) -> str | None:
    """Return why these methods of `Recurrent` cannot be used on the network, or None if its memories define them.

    The reason is that the network has no memory, or that its first memory inherits a method from `Recurrent` or lacks
    it.
    """
    memories = memories_of(model)
    if not memories:
        return "n/a: the network has no memory"
    memory = type(next(iter(memories.values())))
    absent = [name for name in methods if getattr(memory, name, None) in (None, getattr(Recurrent, name))]
    return f"n/a: memory {model.config.memory} defines no {' and no '.join(absent)}" if absent else None


@contextlib.contextmanager
def observe_memories(memories: Mapping[int, Any], observe: Callable[[int, MemoryInputs], None]) -> Iterator[None]:
    """Context manager that calls `observe` before every evaluation of a memory, whose results stay unchanged.

    Args:
        memories: Memories by layer.
        observe: Called with the layer and the inputs of the memory.
    """
    layers = list(memories)

    def observe_layer(index: int, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> None:
        observe(layers[index], MemoryInputs(x_BTD, q_BTHX, k_BTJX, v_BTJX))

    with observe_evaluations(list(memories.values()), observe_layer):
        yield


def without_forgetting(rates: Any) -> Any:
    """Return the rates with retention 1: the first field, a log retention, becomes 0."""
    return rates._replace(**{rates._fields[0]: torch.zeros_like(rates[0])})


def memory_state_norms(memory: Recurrent, inputs: MemoryInputs, chunk: int) -> dict[str, Tensor]:
    """Return the Frobenius norm of a memory's state after the last token, [B, H] by metric.

    The metrics are delta_norm, hebbian_norm, delta_norm_kept and hebbian_norm_kept; a memory without a delta rule has
    delta_norm and delta_norm_kept alone. The Hebbian control makes the same writes without erasing, S <- S gamma + beta
    v kᵀ, with keys of unit length. Metrics that end in "kept" have retention 1. The memory starts from an empty state
    and is not changed.

    Args:
        memory: The memory.
        inputs: Inputs of the memory.
        chunk: Tokens of all rows that are computed at a time, approximately.
    """
    b, t, h, _ = inputs.q_BTHX.shape
    metrics = STATE_METRICS if isinstance(memory, DeltaMemory) else OWN_WRITE_METRICS
    states: dict[str, Any] = dict.fromkeys(metrics)
    for start, stop in chunk_bounds(b, t, chunk, memory.together(inputs.x_BTD.device, inputs.x_BTD.dtype)):
        x, q, k, v = (part[:, start:stop] for part in inputs)
        trained = memory.read_rates(x)
        for metric in metrics:
            rates = without_forgetting(trained) if metric.endswith("kept") else trained
            if metric in OWN_WRITE_METRICS:
                states[metric] = memory.write(rates, q, k, v, states[metric])[1]
            else:
                states[metric] = _hebbian(expand_kv(k, h), expand_kv(v, h), rates, states[metric])
    return {metric: memory.norm(state) for metric, state in states.items()}


def _hebbian(k_BTHX: Tensor, v_BTHX: Tensor, rates: DeltaRates, state: Tensor | None) -> Tensor:
    """Return the Hebbian state [B, H, X_v, X_k] after these tokens: the sum of decayed v kᵀ times step size.

    With log retention g and step size b it is Σ_t exp(Σ_{s>t} g_s) b_t v_t k_tᵀ. A write decays by the retentions of
    the tokens after it, and the state before by those of all tokens.

    Args:
        k_BTHX: Keys, normalised here.
        v_BTHX: Values.
        rates: Log retention and step size of each token.
        state: State before these tokens; None: zero.
    """
    dtype = statistics_dtype(k_BTHX.dtype)
    k_BTHX = functional.normalize(k_BTHX.to(dtype), dim=-1, eps=NORM_FLOOR)
    log = rates.log_keep.to(dtype)
    # a retention per head applies to all its channels
    total_BTHX = (log if log.ndim == 4 else log[..., None]).cumsum(1)
    weight_BTHX = (total_BTHX[:, -1:] - total_BTHX).exp() * rates.step_BTH.to(dtype)[..., None]
    written = torch.einsum("bthv,bthk->bhvk", v_BTHX.to(dtype), weight_BTHX * k_BTHX)
    return written if state is None else written + total_BTHX[:, -1].exp()[..., None, :] * state


def memory_state_norms_after(subject: CellSubject, rows_BT: Tensor, chunk: int) -> dict[str, Tensor]:
    """Return the norms after these rows went through the network: [B, L, H] by metric, float64 on the CPU.

    L counts the layers with a memory. The network reads at full context and must have a memory. Batches of documents
    are divided over the ranks.

    Args:
        subject: Network to be measured.
        rows_BT: Tokens of each document, int64.
        chunk: Tokens that a memory computes at a time.
    """
    memories = memories_of(subject.model)

    def batch_norms(rows: slice) -> dict[int, dict[str, Tensor]]:
        """Return the norms of one batch of documents, [b, H] by metric and layer, on the CPU."""
        norms: dict[int, dict[str, Tensor]] = {}

        def record(layer: int, inputs: MemoryInputs) -> None:
            """Record the norms of a memory for the inputs of a call."""
            by_metric = memory_state_norms(memories[layer], inputs, chunk)
            norms[layer] = {name: norm.cpu() for name, norm in by_metric.items()}

        with observe_memories(memories, record):
            subject.features(rows_BT[rows])
        return norms

    batches = subject.ranks.map(batch_norms, subject.batches(*rows_BT.shape))
    return {
        metric: torch.stack([torch.cat([norms[layer][metric] for norms in batches]) for layer in memories], 1).double()
        for metric in batches[0][next(iter(memories))]
    }


MAX_COMPARISONS = 1 << 24
"""Maximum number of answer-value comparisons at a time, which bounds memory."""


class AverageRates(NamedTuple):
    """Average behaviour of a memory on a text."""

    rates: Any
    """Rates [H] or [H, X], each the mean over the text's tokens; retentions are averaged as logs."""
    scale_H: Tensor
    """Root mean square of the values that each head writes."""
    dtype: torch.dtype
    """Type of the memory's inputs."""


def average_rates(subject: CellSubject, inputs_BT: Tensor) -> dict[int, AverageRates]:
    """Return the average rates of every memory over the tokens of these rows, by layer.

    The network reads with the attention window of training.

    Args:
        subject: Network to be measured.
        inputs_BT: Tokens that it reads, int64.
    """
    memories = memories_of(subject.model)
    rates: dict[int, Any] = {}
    squares: dict[int, Tensor] = {}
    dtypes: dict[int, torch.dtype] = {}

    def record(layer: int, inputs: MemoryInputs) -> None:
        """Add the rates and values of a memory's call to the sums of its layer."""
        token_rates = memories[layer].read_rates(inputs.x_BTD)
        sums = type(token_rates)(*(None if rate is None else rate.double().sum((0, 1)) for rate in token_rates))
        before = rates.get(layer)
        rates[layer] = sums if before is None else type(token_rates)(*map(_plus, before, sums))
        values = expand_kv(inputs.v_BTJX, inputs.q_BTHX.size(2)).double().square().mean(-1).sum((0, 1))
        squares[layer] = squares[layer] + values if layer in squares else values
        dtypes[layer] = inputs.q_BTHX.dtype

    with observe_memories(memories, record):
        for rows in subject.batches(*inputs_BT.shape):
            subject.features(inputs_BT[rows], full_context=False)
    n = inputs_BT.numel()
    return {
        layer: AverageRates(
            type(sums)(*(None if rate is None else rate / n for rate in sums)),
            (squares[layer] / n).sqrt(),
            dtypes[layer],
        )
        for layer, sums in rates.items()
    }


def _plus(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum, or None if either is None."""
    return None if first is None or second is None else first + second


def recall_by_head(
    subject: CellSubject, rates_by_layer: dict[int, AverageRates], pairs: int, draws: int, seed: int
) -> dict[int, Tensor]:
    """Return the share of keys that each head of a memory answers with their own value, [H] on the CPU by layer.

    A key counts if the answer is nearer (by cosine) to its value than to those of all other pairs of its draw. Keys and
    values are normal random numbers, the same for every layer, and for every network with as many heads of that size.
    The values are scaled to the size that the layer writes on text.

    Args:
        subject: Network to be measured.
        rates_by_layer: Average rates of each memory, which every write uses.
        pairs: Number of pairs that are written into an empty state.
        draws: Number of random draws, over which the share is a mean.
        seed: Seed of the draws, combined with `pairs`.
    """
    memories = memories_of(subject.model)
    heads, size = subject.config.model.n_heads, subject.config.model.head_dim
    draw = torch.Generator().manual_seed((seed << 20) + pairs)
    keys, values = torch.randn(2, draws, pairs, heads, size, generator=draw)
    # no more tokens at a time than an evaluation reads
    draws_at_once = max(1, min(subject.config.eval.chunk_tokens // pairs, MAX_COMPARISONS // (heads * pairs**2)))
    shares = {}
    for layer, layer_rates in rates_by_layer.items():
        n_right = torch.zeros(heads)
        for start in range(0, draws, draws_at_once):
            subject.pause()
            part = slice(start, start + draws_at_once)
            scaled = values[part].to(subject.device) * layer_rates.scale_H.float()[:, None]
            pair_tensors = keys[part].to(subject.device, layer_rates.dtype), scaled.to(layer_rates.dtype)
            n_right += is_recalled(memories[layer], layer_rates.rates, *pair_tensors).float().sum((0, 1)).cpu()
        shares[layer] = n_right / (draws * pairs)
    return shares


def is_recalled(memory: Recurrent, rates: Any, keys_BKHX: Tensor, values_BKHX: Tensor) -> Tensor:
    """Return True for each key that a memory answers with its own value, bool [B, K, H].

    The pairs are written one after the other into an empty state, then every key is asked without writing. Its own
    value must be nearest to the answer (`is_nearest`).

    Args:
        memory: The memory.
        rates: Rates of every write, each [H], [H, X] or None.
        keys_BKHX: Keys.
        values_BKHX: Values.
    """
    b, k = keys_BKHX.shape[:2]
    dtype = statistics_dtype(keys_BKHX.dtype)
    pair_rates = type(rates)(*(None if rate is None else rate.to(dtype).expand(b, k, *rate.shape) for rate in rates))
    _, state = memory.write(pair_rates, keys_BKHX, keys_BKHX, values_BKHX, None)
    return is_nearest(memory.answer(state, keys_BKHX), values_BKHX)


def is_nearest(answers_BKHX: Tensor, values_BKHX: Tensor) -> Tensor:
    """Return True for each answer that is nearest to its own value among all values of its draw, bool [B, K, H].

    Nearness is measured by cosine, per head. Ties, and answers of zero, give False.
    """
    cosine_BHKK = torch.einsum("bkhx,bjhx->bhkj", unit(answers_BKHX), unit(values_BKHX).to(answers_BKHX.dtype))
    own_BHK = cosine_BHKK.diagonal(dim1=-2, dim2=-1)
    competing_BHKK = cosine_BHKK - torch.diag_embed(torch.full_like(own_BHK, torch.inf))
    return (own_BHK > competing_BHKK.amax(-1)).transpose(1, 2)
