"""What is known of forgetting attention before it is built."""

from __future__ import annotations

from typing import ClassVar

from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, knob
from ..specs import MixerConfig, MixerOutline, Shapes, attention_flops, gate


class FoXConfig(MixerConfig):
    """Of a gate for each head and token."""

    scale: Float | None = knob(
        None, "Factor of the scores; none is 1 / sqrt(head_dim).", identity=None, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    gate_bias: Float = knob(
        0.0, "Initial bias of the gates' logits: 0 keeps a half.", identity=0.0, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    gate_std: Float = knob(0.02, "Initial deviation of the gates' projection.", identity=0.02, ge=0, le=MAX_FLOAT)


class FoXOutline(MixerOutline):
    """The gates' projection."""

    Config: ClassVar[type[Config]] = FoXConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: FoXConfig) -> Shapes:
        return gate("gate", model.d_model, model.n_heads)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: FoXConfig, keys: float) -> float:
        return attention_flops(model, keys) + 2.0 * model.d_model * model.n_heads
