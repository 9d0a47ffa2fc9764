"""Work and state of the layers of flash-linear-attention (fla), as closed forms in their arguments; imports neither fla nor torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from .fla_catalogue import LENGTH_LIMITS

PATH_CHUNK = 64
"""Tokens per chunk of transitions that the FLOP count of PaTH assumes; kernels may take another."""
LOG_LINEAR_CHUNK = 64
"""Tokens per chunk of fla's log-linear attention."""


class KeySpan(NamedTuple):
    """Tokens that a token attends to: those up to itself, or the last of them."""

    flops: float
    """FLOPs per token and key."""
    most: float = math.inf
    """Most keys."""
    block: int = 1
    """Tokens per block, for keys in blocks of which the last one ends with the token itself; `most` counts it as full."""

    def mean_keys(self, keys: float) -> float:
        """Return the keys per token on average over a row in which a token has `keys` tokens up to itself on average.

        With blocks, the row has a whole number of them.
        """
        length = 2 * keys - 1
        full = min(self.most, length)
        return (full * (full + 1) / 2 + (length - full) * (full - (self.block - 1) / 2)) / length


class BlockSpan(NamedTuple):
    """Blocks of tokens, one key each, that are complete when a token attends to them."""

    flops: float
    """FLOPs per token and block."""
    block: int
    """Tokens per block."""

    def mean_keys(self, keys: float) -> float:
        """Return the blocks per token on average over a row in which a token has `keys` tokens up to itself on average."""
        length = 2 * keys - 1
        blocks, rest = divmod(length, self.block)
        return blocks * (self.block * (blocks - 1) / 2 + rest + 1) / length


class LevelSpan(NamedTuple):
    """States of a hierarchy of chunks that a token reads: one per binary digit 1 of the chunks before its own."""

    flops: float
    """FLOPs per token and state."""
    chunk: int
    """Tokens per chunk."""

    def mean_keys(self, keys: float) -> float:
        """Return the states per token on average over a row in which a token has `keys` tokens up to itself on average."""
        chunks, rest = divmod(round(2 * keys - 1), self.chunk)
        read = self.chunk * sum(map(int.bit_count, range(chunks))) + rest * chunks.bit_count()
        return read / (2 * keys - 1)


class LayerCost(NamedTuple):
    """Work and state of one layer beside its projections and convolutions, per sequence."""

    flops: float
    """FLOPs per token, two per multiply-add, one per decayed entry of the state."""
    spans: tuple[KeySpan | BlockSpan | LevelSpan, ...] = ()
    """Keys that a token attends to, and states whose number depends on the length."""
    state: int = 0
    """Entries of the recurrent state, float32."""
    token_entries: int = 0
    """Cached entries per token, 16 bits each."""
    conv_channels: int = 0
    """Channels of the short convolutions, whose last inputs are stored in 16 bits if the layer has them."""
    half_entries: int = 0
    """Further entries of a fixed number, 16 bits each."""
    window: int | None = None
    """Most tokens that the cache holds; None for all."""

    def total_flops(self, keys: float) -> float:
        """Return FLOPs per token for rows in which a token has `keys` tokens up to itself on average."""
        return self.flops + sum(span.flops * span.mean_keys(keys) for span in self.spans)


def _linear(heads: int, key: float, value: float, rules: int = 0) -> LayerCost:
    """Return the cost of a matrix state of key by value size per head: decay, one write, one read, and `rules` delta rules.

    A delta rule reads the state before it writes; the first one replaces the plain write.
    """
    entries = heads * round(key) * round(value)
    writes = 2 if rules == 0 else 4 * rules
    channels = heads * round(key) * (1 + max(rules, 1)) + heads * round(value) * max(rules, 1)
    return LayerCost(entries * (1 + writes + 2), state=entries, conv_channels=channels)


def _attention(heads: int, size: float, kv_heads: int | None = None, window: int | None = None) -> LayerCost:
    """Return the cost of softmax attention, to the last `window` tokens or to all, which caches as many."""
    span = KeySpan(4.0 * heads * size, math.inf if window is None else window)
    return LayerCost(0.0, (span,), token_entries=round(2 * (kv_heads or heads) * size), window=window)


def _expanded(a: Any, d: int, rules: int = 0) -> LayerCost:
    """Return the cost of a layer whose keys and values are `expand_k` and `expand_v` times as wide as the network."""
    return _linear(a.num_heads, a.expand_k * d / a.num_heads, a.expand_v * d / a.num_heads, rules)


def _head_dim(a: Any, d: int, rules: int = 1) -> LayerCost:
    """Return the cost of a delta rule with keys of `head_dim`, and values `expand_v` times as large."""
    heads = getattr(a, "num_v_heads", None) or a.num_heads
    cost = _linear(heads, a.head_dim, a.head_dim * a.expand_v, rules)
    return cost._replace(conv_channels=cost.conv_channels - (heads - a.num_heads) * a.head_dim * (1 + rules))


def _preconditioned(a: Any, d: int) -> LayerCost:
    """Return the cost of a delta rule with a diagonal preconditioner of the keys."""
    cost = _head_dim(a, d)
    return cost._replace(state=cost.state + (a.num_v_heads or a.num_heads) * a.head_dim)


def _slots(a: Any, d: int) -> LayerCost:
    """Return the cost of two states per head, key size by slots and slots by value size."""
    key, value = a.expand_k * d / a.num_heads, a.expand_v * d / a.num_heads
    slots = a.num_slots or round(key)
    parts = _linear(a.num_heads, key, slots), _linear(a.num_heads, slots, value)
    channels = a.num_heads * round(2 * key + value)
    return LayerCost(sum(part.flops for part in parts), state=sum(part.state for part in parts), conv_channels=channels)


def _full_heads(a: Any, d: int) -> LayerCost:
    return _attention(a.num_heads, d / a.num_heads, a.num_kv_heads, getattr(a, "window_size", None))


def _gated_heads(a: Any, d: int, gates: int) -> LayerCost:
    """Return the cost of attention that caches gates too, as `gates` entries of 16 bits per token (float32 counts twice)."""
    cost = _full_heads(a, d)
    return cost._replace(token_entries=cost.token_entries + gates)


def _features(a: Any, d: int) -> LayerCost:
    heads = a.num_heads or d // a.expand_ratio
    return _linear(heads, a.expand_ratio, d / heads)


def _scan(inner: int, a: Any, groups: int) -> LayerCost:
    """Return the cost of a state-space layer: `inner` channels of `state_size` each, and its convolution.

    The convolution covers the channels, and B and C of each of the `groups` that are convolved with them.
    """
    return _linear(1, inner, a.state_size)._replace(conv_channels=inner + 2 * groups * a.state_size)


def _rwkv7(a: Any, d: int) -> LayerCost:
    heads = d // a.head_dim if a.head_dim else a.num_heads
    return _linear(heads, d / heads, (a.value_dim or d) / heads, 1)._replace(half_entries=d)


def _feature_map(a: Any, d: int, features: int) -> LayerCost:
    """Return the cost of linear attention with a polynomial feature map, by all pairs of tokens or in chunks by its state.

    Args:
        a: arguments of the layer.
        d: width of the network.
        features: entries of a mapped key.
    """
    size = d / a.num_heads
    if a.mode == "parallel":
        return LayerCost(0.0, (KeySpan(2.0 * a.num_heads * (a.feature_dim + size)),))
    return _linear(a.num_heads, features, size)


def _cyclic(a: Any, d: int) -> LayerCost:
    """Return the cost of two states over slots, keys and values, and a readout between slots before and after a softmax."""
    key, value = int(a.head_dim * a.expand_k), int(a.head_dim * a.expand_v)
    cost = _linear(a.num_heads, key + value, a.num_slots)
    readout = 4.0 * a.num_heads * a.num_slots * (a.num_slots - 1)
    channels = a.num_heads * (2 * key + value)
    return LayerCost(cost.flops + readout, state=cost.state + a.num_heads, conv_channels=channels)


def _log_linear(a: Any, d: int) -> LayerCost:
    """Return the cost of attention in the own chunk, and to a matrix per level of the chunks before it.

    Each chunk is written to a matrix, and all that are stored decay. The state is that after the longest text: a matrix
    per level and head, and the last chunk's inputs.
    """
    inner = int(a.expand * d)
    heads = a.num_heads or inner // a.head_dim
    chunks = LENGTH_LIMITS["LogLinearMamba2"] // LOG_LINEAR_CHUNK
    entries = heads * a.state_size * a.head_dim
    own = KeySpan(2.0 * heads * (a.state_size + a.head_dim), LOG_LINEAR_CHUNK, LOG_LINEAR_CHUNK)
    earlier = LevelSpan(entries * (2 + 1 / LOG_LINEAR_CHUNK), LOG_LINEAR_CHUNK)
    scalars = heads * (1 + LENGTH_LIMITS["LogLinearMamba2"].bit_length())  # decay, and a scale per level of the tokens
    inputs = 2 * a.n_groups * a.state_size + heads * a.head_dim
    return LayerCost(
        2.0 * entries, (own, earlier), state=(chunks.bit_length() + 1) * entries + 1 + LOG_LINEAR_CHUNK * scalars,
        conv_channels=inner + 2 * a.n_groups * a.state_size, half_entries=LOG_LINEAR_CHUNK * inputs,
    )  # fmt: skip


def _mamba3(a: Any, d: int) -> LayerCost:
    """Return the cost of a decay, two writes (trapezoidal rule) and a read, each of the rank of the inputs."""
    inner, rank = int(a.expand * d), a.mimo_rank if a.is_mimo else 1
    heads, angles = inner // a.head_dim, int(a.state_size * a.rope_fraction) // 2
    work = inner * a.state_size * (1 + 6 * rank) + (6 * rank * inner if a.is_mimo else 0)
    return LayerCost(
        work, state=inner * a.state_size + heads * angles, half_entries=rank * heads * a.state_size + inner
    )


def _mesa(a: Any, d: int) -> LayerCost:
    """Return the cost of two decayed and written states, a read, and a product with the first per conjugate-gradient step.

    The layer convolves queries and keys whatever `use_short_conv` says.
    """
    entries = a.num_heads * a.head_dim**2
    work = entries * (2 * 3 + 2 + 2 * a.max_cg_step_training)
    return LayerCost(work, state=2 * entries, half_entries=2 * a.num_heads * a.head_dim * a.conv_size)


def _latent(a: Any, d: int) -> LayerCost:
    """Return the cost of attention over latents; fla caches the full keys and values of all tokens."""
    size = a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim
    most = math.inf if a.window_size is None else a.window_size
    return LayerCost(0.0, (KeySpan(2.0 * a.num_heads * size, most),), token_entries=a.num_heads * size)


def _selected(a: Any, d: int) -> LayerCost:
    """Return the cost of scoring the mean key of each chunk, and attention to the best ones and the token's own.

    With one chunk per token, fla attends to all tokens instead.
    """
    size = a.moba_chunk_size
    selected = BlockSpan(2.0 * d, size), KeySpan(4.0 * d, a.moba_topk * size, size)
    return _full_heads(a, d)._replace(spans=selected if a.moba_topk > 1 else (KeySpan(4.0 * d),))


def _sparse(a: Any, d: int) -> LayerCost:
    """Return the cost of attention to the means of blocks, to selected blocks, and to a window if there is one."""
    work, size, heads = 4.0 * a.num_heads * a.head_dim, a.block_size, a.num_kv_heads or a.num_heads
    window = (KeySpan(work, a.window_size),) if a.window_size else ()
    spans = (BlockSpan(work, size), KeySpan(work, a.block_counts * size, size), *window)
    return LayerCost(0.0, spans, token_entries=2 * heads * a.head_dim)


def _mixture(a: Any, d: int) -> LayerCost:
    """Return the cost of a delta rule in each memory that a token is sent to; all memories are stored.

    Projections and convolutions run once per memory of a token; those of all memories, which the layer's modules show,
    are taken off.
    """
    delta, shared = _head_dim(a, d), int(a.shared_mem)
    used, stored = a.topk + shared, a.num_memories + shared
    key, value = a.num_heads * a.head_dim, round(a.num_heads * a.head_dim * a.expand_v)
    per_memory = 2.0 * d * (key + value + 2 * a.num_heads)
    for_all = 2.0 * d * key + 2.0 * a.conv_size * (2 * key + value)
    shown = per_memory * (1 if a.single_kv_proj else stored) + for_all
    work = used * (delta.flops + per_memory + for_all) - shown
    return LayerCost(work, state=stored * delta.state, conv_channels=stored * delta.conv_channels)


def _momentum(a: Any, d: int) -> LayerCost:
    """Return the cost of a delta rule that is written to a second state, the momentum, which is added to the first."""
    heads, key, value = a.num_v_heads or a.num_heads, int(a.head_dim * a.expand_k), int(a.head_dim * a.expand_v)
    entries = heads * key * value
    return LayerCost(10 * entries, state=2 * entries, conv_channels=2 * a.num_heads * key + heads * value)


def _parallax(a: Any, d: int) -> LayerCost:
    """Return the cost of attention with two queries per head, whose scores both weigh the values."""
    cost = _full_heads(a, d)
    return cost._replace(spans=tuple(span._replace(flops=2 * span.flops) for span in cost.spans))


def _path(a: Any, d: int) -> LayerCost:
    """Return the cost of attention whose keys a transition per token moves, in chunks of PATH_CHUNK tokens."""
    heads, kv_heads, size = a.num_heads, a.num_kv_heads or a.num_heads, d // a.num_heads
    # in a chunk, per KV head: w wᵀ, w kᵀ and moved keys, and a triangular solve of their width; then the queries' scores
    inside = kv_heads * (6.0 * size * PATH_CHUNK + (PATH_CHUNK - 1) * (size + PATH_CHUNK))
    own = KeySpan(2.0 * heads * PATH_CHUNK, PATH_CHUNK, PATH_CHUNK)
    gates = 2 * heads if a.use_forget_gate else 0
    taps = a.conv_size if a.use_w_shortconv else 0
    entries = 2 * kv_heads * size + gates
    return LayerCost(
        inside, (KeySpan(8.0 * heads * size), own), token_entries=entries, half_entries=kv_heads * size * taps
    )


def _rodimus(a: Any, d: int) -> LayerCost:
    inner = -(-2 * d // 8) * 8
    return _linear(1, a.expand_ratio, inner)._replace(conv_channels=inner)


def _shared_key(a: Any, d: int) -> LayerCost:
    """Return the cost of attention to a window, with one key head for all."""
    cost = _attention(a.num_heads, d // a.num_heads, window=a.window_size)
    return cost._replace(token_entries=d // a.num_heads + d)


COSTS: Mapping[str, Callable[[Any, int], LayerCost]] = {
    "ABCAttention": _slots,
    "Attention": _full_heads,
    "BasedLinearAttention": lambda a, d: _feature_map(a, d, 1 + a.feature_dim * (a.feature_dim + 3) // 2),
    "BitAttention": _full_heads,
    "Comba": _head_dim,
    "CyclicFlowAttention": _cyclic,
    "DeltaFormerAttention": lambda a, d: LayerCost(0.0, (KeySpan(8.0 * d),)),
    "DeltaNet": functools.partial(_expanded, rules=1),
    "ForgettingAttention": lambda a, d: _gated_heads(a, d, 2 * a.num_heads),
    "GatedDeltaNet": _head_dim,
    "GatedDeltaNet2": _head_dim,
    "GatedDeltaProduct": lambda a, d: _head_dim(a, d, a.num_householder),
    "GatedLinearAttention": _expanded,
    "GatedSlotAttention": _slots,
    "HGRN2Attention": _features,
    "HGRNAttention": lambda a, d: LayerCost(3.0 * int(d * a.expand_ratio), state=int(d * a.expand_ratio)),
    "KimiDeltaAttention": _head_dim,
    "LightNetAttention": _features,
    "LinearAttention": _expanded,
    "LogLinearMamba2": _log_linear,
    "Mamba": lambda a, d: _scan(a.intermediate_size, a, 0),
    "Mamba2": lambda a, d: _scan(a.expand * d, a, a.n_groups),
    "Mamba3": _mamba3,
    "MesaNet": _mesa,
    "MoBA": _selected,
    "MomAttention": _mixture,
    "MomentumDeltaNet": _momentum,
    "MultiheadLatentAttention": _latent,
    "MultiScaleRetention": _expanded,
    "NativeSparseAttention": _sparse,
    "PaTHAttention": _path,
    "Parallax": _parallax,
    "PrecondGatedDeltaNet": _preconditioned,
    "PrecondKDA": _preconditioned,
    "RWKV6Attention": lambda a, d: _expanded(a, d)._replace(half_entries=d),
    "RWKV7Attention": _rwkv7,
    "Raven": _slots,
    "ReBasedLinearAttention": lambda a, d: _feature_map(a, d, a.feature_dim * (a.feature_dim + 1) // 2),
    "RodimusAttention": _rodimus,
    "SlidingWindowSharedKeyAttention": _shared_key,
    "StickBreakingAttention": _full_heads,
    "WallAttention": lambda a, d: _gated_heads(a, d, 2 * d),
    "YOCOGatedRetention": lambda a, d: _linear(a.num_heads, d / a.num_heads, d / a.num_heads),
}
"""Layer class -> its cost, where a closed form is known; the states of the others are unknown."""


def cost_of(name: str, settings: Mapping[str, Any], width: int) -> LayerCost | None:
    """Return the cost of a layer with these arguments in a network of that width; None where no form is known."""
    form = COSTS.get(name)
    return None if form is None else form(SimpleNamespace(**settings), width)


class StateBytes(NamedTuple):
    """Bytes that decoding stores per sequence in one layer."""

    fixed: int
    """Bytes that do not depend on the sequence's length."""
    per_token: int
    """Bytes per token."""


def state_bytes(name: str, settings: Mapping[str, Any], width: int) -> StateBytes | None:
    """Return the bytes of a layer's recurrent state, short convolutions and cache; None where no form is known.

    The state is float32, everything else 16 bits. A cache with a window counts as full, and does not grow.
    """
    cost = cost_of(name, settings, width)
    if cost is None:
        return None
    taps = settings.get("conv_kernel") or (settings.get("conv_size", 0) if settings.get("use_short_conv") else 0)
    fixed = 4 * cost.state + 2 * (cost.conv_channels * taps + cost.half_entries)
    if cost.window is not None:
        return StateBytes(fixed + 2 * cost.token_entries * cost.window, 0)
    return StateBytes(fixed, 2 * cost.token_entries)
