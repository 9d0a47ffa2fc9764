"""Wall attention as a mixer.

Source: docs/reference/mechanisms.md, "Wall attention".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size, S cached keys, P heads that
have gates.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.attention.wall.op import choose_backend, soft_clamp, wall_attention
from ...kernels.key_gated_step.op import KeyGates, key_log_gates, paged_wall_from_keys
from ...kernels.norms import statistics_dtype
from ...kernels.rotary import check_rotary, rotate
from ...kernels.wall_step import fp8
from ...kernels.wall_step import op as wall_step
from ..bases import PreviousToken, QueryBlockMixer, ScaledConfig, attention_flops
from ..bounds import MAX_FLOAT, MAX_WIDTH
from ..config import Config, Float, Int, ModelConfig, PositiveOrNone, Real, knob
from ..kv_cache import CacheCapacity, KVView
from .gates import Gate, cumulative_log_gate


class WallConfig(ScaledConfig):
    """Settings of wall attention, which has a gate per channel and token."""

    tie: Literal["head", "kv"] = knob("head", "Separate gates per query head, or per KV head.", identity="head")
    gates: Literal["channel", "scalar"] = knob(
        "channel",
        "Gates of a head: one per channel, or a single one (scalar), which multiplies the whole score.",
        identity="channel",
    )
    subdim: Int | None = knob(
        None,
        "Number of channels of each head, from the first on, that have gates; null: all.",
        identity=None,
        ge=0,
        le=MAX_WIDTH,
    )
    g_max: PositiveOrNone = knob(0.86, "Largest decay of a channel per token, in nats; none: no limit.", identity=0.86)
    gate_bias: Real = knob(6.0, "Initial bias of the gates' logits: 6 is a gate of 0.9975.", identity=6.0)
    gate_std: Float = knob(
        0.02, "Initial standard deviation of the gates' projection.", identity=0.02, ge=0, le=MAX_FLOAT
    )
    gate_source: Literal["input", "keys"] = knob(
        "input", "Input of the gates' projection: that of the block, or the key of the KV head.", identity="input"
    )
    rotary: Literal["none", "full", "half-truncated"] = knob(
        "none",
        "Channels to rotate, in addition to the gates: none, all (full), or half of them (half-truncated).",
        identity="none",
    )
    base: Float = knob(10000.0, "Base of the rotary frequencies.", identity=10000.0, gt=1, le=MAX_FLOAT)


class Wall(QueryBlockMixer):
    """Wall attention: softmax attention with a forget gate per channel of the heads.

    Each channel's contribution to a score decays by the product of its gates of the tokens after the key, up to the
    query's own. Values have no gates.
    """

    Config: ClassVar[type[Config]] = WallConfig
    reads_input: ClassVar[bool] = True
    config: WallConfig

    @classmethod
    def check(cls, model: ModelConfig, config: WallConfig) -> None:
        """Raise ValueError if `subdim` exceeds the head size or comes with `gates: scalar`, or `rotary` does not fit."""
        if config.subdim is not None and config.gates == "scalar":
            raise ValueError(f"subdim ({config.subdim}) selects channels, but gates is scalar; set one of them")
        if config.subdim is not None and config.subdim > model.head_dim:
            raise ValueError(f"subdim ({config.subdim}) must be at most model.head_dim ({model.head_dim})")
        check_rotary(config.rotary, model.head_dim)

    @classmethod
    def gate_shape(cls, model: ModelConfig, config: WallConfig) -> tuple[int, int]:
        """Return (number of heads P with gates of their own, gates per head).

        P is the number of query heads, or with `tie: kv` of KV heads.
        """
        heads = model.n_heads if config.tie == "head" else model.n_kv_heads
        if config.gates == "scalar":
            return heads, 1
        return heads, model.head_dim if config.subdim is None else config.subdim

    @classmethod
    def gate_inputs(cls, model: ModelConfig, config: WallConfig) -> int:
        """Return the number of channels that a gate is projected from: D, or the head size with `gate_source: keys`."""
        return model.d_model if config.gate_source == "input" else model.head_dim

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: WallConfig, keys: float) -> float:
        heads, size = cls.gate_shape(model, config)
        return attention_flops(model, keys) + 2.0 * cls.gate_inputs(model, config) * heads * size

    def __init__(self, model: ModelConfig, config: WallConfig) -> None:
        """Create the gate's projection; with `subdim: 0` no channel is gated, and there is none.

        Its matrix is drawn from torch's global generator, normal with deviation `gate_std`; its bias starts at
        `gate_bias`.
        """
        super().__init__(model, config)
        self.gate_heads, self.gated_channels = self.gate_shape(model, config)
        self.kv_heads, self.size, self.window = model.n_kv_heads, model.head_dim, model.window_size
        self.g_max = None if config.g_max == "none" else config.g_max
        if self.gated_channels:
            outputs = self.gate_heads * self.gated_channels
            inputs = self.gate_inputs(model, config)
            self.gate = Gate(inputs, outputs, std=config.gate_std, offset=config.gate_bias)
        self.caches_plain_keys = config.gate_source == "keys" and self.gated_channels > 0

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, x_BTD: Tensor,
        block: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return softmax attention whose scores decay per channel by gates, [B, T, H, X].

        The score of query i and key j is scale times the sum over channels of q_i k_j and the product of the channel's
        gates of tokens j + 1 ... i.

        Args:
            q_BTHX: queries, not rotated; rotated here if `rotary` says so.
            k_BTJX: keys, not rotated; likewise. Gates from keys read them unrotated.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            x_BTD: the block's normed input, from which gates are projected with `gate_source: input`.
            block: queries that the torch backend scores at a time, memory and rounding only; None: 1024. Kernels ignore
                it.
        """
        log_gate_BTPX = self.log_gates(x_BTD, k_BTJX)
        return wall_attention(
            self._rotated(q_BTHX), self._rotated(k_BTJX), v_BTJX, log_gate_BTPX, scale=self.config.scale, window=window,
            query_block=block, steepest=self.g_max,
        )  # fmt: skip

    def entry_spans(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the number of tokens that share an entry of "anchor" (`wall_step.chunk_tokens`), if there are any.

        In an 8-bit cache also of those that share one of "k_shift" (`fp8.shift_tokens`).
        """
        if self.caches_plain_keys:
            return {}
        spans = {"anchor": wall_step.chunk_tokens(dtype, self.g_max)}
        return spans if self.g_max is None else spans | {"k_shift": fp8.shift_tokens(self.g_max)}

    def no_fp8_reason(self) -> str | None:
        """Return the reason why there is no 8-bit cache: gates read keys, or may fall without a limit."""
        if self.caches_plain_keys:
            return "gates are projected from the cached keys, which must be exact (gate_source: keys)"
        return None if self.g_max is not None else "gates have no limit (g_max: none)"

    def open(self, capacity: CacheCapacity) -> dict[str, Tensor]:
        """Allocate "fall", the sum of each sequence's natural log gates so far, float64 [slots + 1, P, X].

        With gates from keys there is none.
        """
        if self.caches_plain_keys:
            return {}
        return {"fall": capacity.table(self.gate_heads, self.size, dtype=torch.float64)}

    def keep(
        self, k_BTJX: Tensor, v_BTJX: Tensor, *, places_BT: Tensor, before: PreviousToken | None, x_BTD: Tensor
    ) -> dict[str, Tensor]:
        """Return the entries to cache: "k", "v", "anchor" and "fall".

        "fall" is the cumulative natural log P of the gates, float64 [B, T, P, X]; P is H, or with `tie: kv` J. "anchor"
        is its value R at the first token of each token's chunk. "k" is the rotated key times exp(R - P), [B, T, P, X]
        (`wall_step.absorb_decay`); "v" are the values [B, T, J, X]. With gates from keys there are "k" and "v" alone,
        the keys as they are.

        Args:
            k_BTJX: keys, not rotated.
            v_BTJX: values.
            places_BT: positions of the tokens, for the rotation and for the chunks.
            before: cached entries of the token before the first one, whose "fall" and "anchor" are continued; None:
                start from 0.
            x_BTD: the block's normed input, from which gates are projected with `gate_source: input`.
        """
        if self.caches_plain_keys:
            return {"k": k_BTJX, "v": v_BTJX}
        fall_BTPX = cumulative_log_gate(self.log_gates(x_BTD, k_BTJX), before)
        anchor_BTPX = _at_span_start("anchor", fall_BTPX, self.entry_spans(k_BTJX.dtype), places_BT, before)
        k_BTPX = wall_step.absorb_decay(self._rotated(k_BTJX, places_BT), fall_BTPX, anchor_BTPX)
        return {"k": k_BTPX, "v": v_BTJX, "anchor": anchor_BTPX, "fall": fall_BTPX}

    def quantize(
        self, entries: dict[str, Tensor], *, positions_BT: Tensor, before: PreviousToken | None
    ) -> dict[str, Tensor]:
        """Return the entries of `keep` with "k" and "v" as bytes, and their powers of two "k_shift" and "v_shift".

        They are int8 [B, T, P, X] and [B, T, J]; see kernels/wall_step/fp8.py.

        Args:
            entries: result of `keep`.
            positions_BT: positions of the tokens.
            before: cached entries of the token before the first one; None at a sequence's start.
        """
        own_shift = fp8.key_shifts(entries["fall"], entries["anchor"])
        spans = self.entry_spans(entries["k"].dtype)
        k_shift, v_shift = (
            _at_span_start("k_shift", own_shift, spans, positions_BT, before),
            fp8.value_shifts(entries["v"]),
        )
        packed = {"k": fp8.quantize(entries["k"], k_shift), "v": fp8.quantize(entries["v"], v_shift[..., None])}
        return entries | packed | {"k_shift": k_shift, "v_shift": v_shift}

    def step(self, q_BHX: Tensor, cache: KVView, x_BD: Tensor) -> Tensor:
        """Return wall attention at one new token per sequence, from the cache: [B, H, X] in q's type.

        Each channel of a cached key is multiplied by the product of its gates of the tokens after it, the new one
        included. Then follows softmax of scale q k over the visible keys, times v. A padding row gives 0.

        Args:
            q_BHX: queries of the new tokens, not rotated.
            cache: what `keep` returned for all tokens, the new ones included; its window applies.
            x_BD: ignored, because the new tokens' gates follow from the cache.
        """
        q_BHX = self._rotated(q_BHX[:, None], cache.places[:, None])[:, 0]
        if self.caches_plain_keys:
            return paged_wall_from_keys(
                q_BHX, cache["k"], cache["v"], self._key_gates(per_channel=True), cache.texts, scale=self.config.scale,
                window=cache.window,
            )  # fmt: skip
        shifts = [cache[name] for name in ("k_shift", "v_shift") if name in cache.pools]
        return wall_step.paged_wall(
            q_BHX, cache["k"], cache["v"], cache["anchor"], cache.row("fall"), cache.texts, shifts=shifts,
            scale=self.config.scale, window=cache.window,
        )  # fmt: skip

    def _rotated(self, x_BTHX: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        return rotate(x_BTHX, self.config.rotary, self.config.base, positions_BT)

    def log_gates(self, x_BTD: Tensor, k_BTJX: Tensor) -> Tensor:
        """Return the natural log of each channel's gate, [B, T, P, X] <= 0 in float32 (float64 for float64).

        P is the number of heads with gates of their own: the query heads H, or with `tie: kv` the KV heads J. The first
        `subdim` channels of a head have gates; the others have 0. With `gates: scalar` all channels of a head have the
        same. With `g_max` values are soft-clamped to above -g_max.

        Args:
            x_BTD: the block's normed input; read with `gate_source: input`.
            k_BTJX: keys, not rotated; read with `gate_source: keys`, otherwise only for their shape and type.
        """
        b, t, _, size = k_BTJX.shape
        if not self.gated_channels:
            return k_BTJX.new_zeros(b, t, self.gate_heads, size, dtype=statistics_dtype(k_BTJX.dtype))
        if self.config.gate_source == "keys":
            log_gate = key_log_gates(k_BTJX, self._key_gates())
        else:
            log_gate = self.gate(x_BTD).unflatten(-1, (self.gate_heads, self.gated_channels))
            log_gate = log_gate if self.g_max is None else soft_clamp(log_gate, self.g_max)
        if self.config.gates == "scalar":
            return log_gate.expand(b, t, self.gate_heads, size).contiguous()
        return functional.pad(log_gate, (0, size - self.gated_channels))

    def _key_gates(self, *, per_channel: bool = False) -> KeyGates:
        """Return the projection of keys to gates: those that exist, or `per_channel` one for every channel of a head."""
        shape = self.gate_heads, self.gated_channels
        weight_PNX, offset_PN = self.gate.weight.unflatten(0, shape), self.gate.offset.unflatten(0, shape)
        if per_channel and self.config.gates == "scalar":
            weight_PNX, offset_PN = weight_PNX.expand(-1, self.size, -1), offset_PN.expand(-1, self.size)
        elif per_channel and self.gated_channels < self.size:
            more = self.size - self.gated_channels
            weight_PNX = functional.pad(weight_PNX, (0, 0, 0, more))
            offset_PN = functional.pad(offset_PN, (0, more), value=torch.inf)
        return KeyGates(weight_PNX, offset_PN, self.g_max, self.config.rotary, self.config.base)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.size, self.g_max, w) for w in (None, self.window))
        return {"wall": str(full), "wall_window": str(windowed)}


def _at_span_start(
    name: str, rows_BTPX: Tensor, spans: dict[str, int], positions_BT: Tensor, before: PreviousToken | None
) -> Tensor:
    """Return for each token the row of the first token of its span, [B, T, P, X]: a cached one if that lies before.

    Args:
        name: name of the entry, whose span begins at positions that `spans[name]` divides.
        rows_BTPX: rows of the tokens themselves.
        spans: tokens of a span by name.
        positions_BT: positions of the tokens.
        before: cached entries of the token before the first one; None at a sequence's start.
    """
    at_T = torch.arange(rows_BTPX.shape[1], device=rows_BTPX.device)
    first_BTPX = (at_T - positions_BT % spans[name])[..., None, None].expand(rows_BTPX.shape)
    start_BTPX = rows_BTPX.gather(1, first_BTPX.clamp(min=0))
    return start_BTPX if before is None else torch.where(first_BTPX >= 0, start_BTPX, before(name)[:, None])
