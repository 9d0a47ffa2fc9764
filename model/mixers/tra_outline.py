"""What is known of threshold relative attention before it is built."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, knob
from ..specs import MixerConfig, MixerOutline, Shapes, attention_flops, gate


class TRAConfig(MixerConfig):
    """docs/mechanisms.md says which settings around it make the authors' network."""

    scale: Float | None = knob(
        None, "Factor of the scores; none is 1 / sqrt(head_dim).", identity=None, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    empty: Literal["zero", "uniform"] = knob(
        "zero",
        "What a query reads that no key survives for: nothing, or the mean of the values it sees.",
        identity="zero",
    )
    tie_gate: Literal["head", "shared"] = knob(
        "head", "A gate for each head, or one for all heads of a token.", identity="head"
    )
    gate_bias: Float | None = knob(
        None,
        "Initial bias of the gates' logits; none is drawn as that of any projection.",
        identity=None,
        ge=-MAX_FLOAT,
        le=MAX_FLOAT,
    )


class TRAOutline(MixerOutline):
    """The gates' projection."""

    Config: ClassVar[type[Config]] = TRAConfig

    @classmethod
    def check(cls, model: ModelConfig, config: TRAConfig) -> None:
        if config.scale == 0:
            raise ValueError("scale must not be 0: a key survives when its score is above 0, and none would be")

    @classmethod
    def gates(cls, model: ModelConfig, config: TRAConfig) -> int:
        """Gates of a token."""
        return model.n_heads if config.tie_gate == "head" else 1

    @classmethod
    def shapes(cls, model: ModelConfig, config: TRAConfig) -> Shapes:
        return gate("gate", model.d_model, cls.gates(model, config))

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: TRAConfig, keys: float) -> float:
        return attention_flops(model, keys) + 2.0 * model.d_model * cls.gates(model, config)
