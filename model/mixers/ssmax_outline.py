"""What is known of scalable softmax before it is built."""

from __future__ import annotations

from typing import ClassVar

from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, knob
from ..specs import Shapes, attention_flops
from .softmax_outline import NoPEOutline, SoftmaxConfig


class SSMaxConfig(SoftmaxConfig):
    """Of one factor a head."""

    sharpness: Float = knob(
        0.168,
        "Initial factor s of s ln n; 0.168 is 1 over the mean of ln n up to 1,024 keys.",
        identity=0.168,
        ge=-MAX_FLOAT,
        le=MAX_FLOAT,
    )


class SSMaxOutline(NoPEOutline):
    """One scalar a head."""

    Config: ClassVar[type[Config]] = SSMaxConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: SSMaxConfig) -> Shapes:
        return {"sharpness": (model.n_heads,)}

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: SSMaxConfig, keys: float) -> float:
        return attention_flops(model, keys)
