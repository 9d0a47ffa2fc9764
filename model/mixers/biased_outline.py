"""What is known of mixers that add to their scores what distance says, before they are built."""

from __future__ import annotations

from typing import ClassVar

from ..bounds import MAX_FLOAT, MAX_LENGTH
from ..config import Config, Float, Int, ModelConfig, knob
from ..specs import MixerConfig, MixerOutline, Shapes, attention_flops


class ALiBiConfig(MixerConfig):
    """Slopes are fixed."""

    scale: Float | None = knob(
        None, "Factor of the scores; none is 1 / sqrt(head_dim).", identity=None, ge=-MAX_FLOAT, le=MAX_FLOAT
    )


class RelConfig(ALiBiConfig):
    """Of a learned number for each head and distance."""

    reach: Int = knob(512, "Distance from which on all have the last number.", identity=512, ge=1, le=MAX_LENGTH)
    buckets: Int | None = knob(
        None,
        "Numbers a head: half for the first distances, half for ranges that grow up to reach. None: one a distance.",
        identity=None,
        ge=2,
        le=MAX_LENGTH,
    )


class CoPEConfig(ALiBiConfig):
    """Of positions that count gates instead of tokens."""

    positions: Int = knob(
        64, "Positions that have a vector; farther keys have the last.", identity=64, ge=1, le=MAX_LENGTH
    )


class ALiBiOutline(MixerOutline):
    """It has no parameters."""

    Config: ClassVar[type[Config]] = ALiBiConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: ALiBiConfig) -> Shapes:
        return {}

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: ALiBiConfig, keys: float) -> float:
        return attention_flops(model, keys)


class RelOutline(MixerOutline):
    """The numbers, one row of them, so that they are learned as scalars are."""

    Config: ClassVar[type[Config]] = RelConfig

    @classmethod
    def check(cls, model: ModelConfig, config: RelConfig) -> None:
        if config.buckets is not None and config.reach < config.buckets:
            raise ValueError(f"buckets ({config.buckets}) must be at most reach ({config.reach})")

    @classmethod
    def numbers(cls, config: RelConfig) -> int:
        """Of a head."""
        return config.reach + 1 if config.buckets is None else config.buckets

    @classmethod
    def shapes(cls, model: ModelConfig, config: RelConfig) -> Shapes:
        return {"table": (model.n_heads * cls.numbers(config),)}

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: RelConfig, keys: float) -> float:
        return attention_flops(model, keys)


class CoPEOutline(MixerOutline):
    """A vector for each position, shared by the heads."""

    Config: ClassVar[type[Config]] = CoPEConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: CoPEConfig) -> Shapes:
        return {"vectors": (config.positions, model.head_dim)}

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: CoPEConfig, keys: float) -> float:
        return attention_flops(model, keys) + 2.0 * model.n_heads * model.head_dim * config.positions
