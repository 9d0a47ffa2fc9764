"""What is known of wall attention before it is built."""

from __future__ import annotations

from typing import ClassVar, Literal

from ...kernels.rotary_kinds import check_rotary
from ..bounds import MAX_FLOAT, MAX_WIDTH
from ..config import Config, Float, Int, ModelConfig, PositiveOrNone, knob
from ..specs import MixerConfig, MixerOutline, Shapes, attention_flops, gate


class WallConfig(MixerConfig):
    """Of a gate for each channel and token."""

    scale: Float | None = knob(
        None, "Factor of the scores; none is 1 / sqrt(head_dim).", identity=None, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    tie: Literal["head", "kv"] = knob(
        "head", "Gates of their own for each query head, or for each KV head.", identity="head"
    )
    subdim: Int | None = knob(
        None,
        "Channels of a head that have gates, the first ones; none is all of them.",
        identity=None,
        ge=0,
        le=MAX_WIDTH,
    )
    g_max: PositiveOrNone = knob(
        0.86, "How far a token can let a channel fall at most, in nats, or none: without limit.", identity=0.86
    )
    gate_bias: Float = knob(
        6.0, "Initial bias of the gates' logits: 6 keeps 0.9975 of a token.", identity=6.0, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    gate_std: Float = knob(0.02, "Initial deviation of the gates' projection.", identity=0.02, ge=0, le=MAX_FLOAT)
    gate_source: Literal["input", "keys"] = knob(
        "input", "What gates are projected from: the block's input, or the key of their KV head.", identity="input"
    )
    rotary: Literal["none", "full", "half-truncated"] = knob(
        "none", "Rotary positions beside the gates.", identity="none"
    )
    base: Float = knob(10000.0, "Base of the rotary frequencies.", identity=10000.0, gt=1, le=MAX_FLOAT)


class WallOutline(MixerOutline):
    """The gates' projection."""

    Config: ClassVar[type[Config]] = WallConfig

    @classmethod
    def check(cls, model: ModelConfig, config: WallConfig) -> None:
        if config.subdim is not None and config.subdim > model.head_dim:
            raise ValueError(f"subdim ({config.subdim}) must be at most model.head_dim ({model.head_dim})")
        if config.rotary != "none":
            check_rotary(config.rotary, model.head_dim)

    @classmethod
    def gates(cls, model: ModelConfig, config: WallConfig) -> tuple[int, int]:
        """(heads that have gates of their own, gates of each)."""
        heads = model.n_heads if config.tie == "head" else model.n_kv_heads
        return heads, model.head_dim if config.subdim is None else config.subdim

    @classmethod
    def inputs(cls, model: ModelConfig, config: WallConfig) -> int:
        """Numbers that a gate is projected from."""
        return model.d_model if config.gate_source == "input" else model.head_dim

    @classmethod
    def shapes(cls, model: ModelConfig, config: WallConfig) -> Shapes:
        heads, size = cls.gates(model, config)
        return gate("gate", cls.inputs(model, config), heads * size) if size else {}

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: WallConfig, keys: float) -> float:
        heads, size = cls.gates(model, config)
        return attention_flops(model, keys) + 2.0 * cls.inputs(model, config) * heads * size
