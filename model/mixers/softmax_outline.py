"""What is known of the softmax mixers before they are built."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ...kernels.rotary_kinds import check_rotary
from ..bounds import MAX_FLOAT
from ..config import Config, Flag, Float, ModelConfig, knob
from ..specs import MixerConfig, MixerOutline, Shapes, attention_flops


class SoftmaxConfig(MixerConfig):
    """Settings of every softmax core."""

    scale: Float | None = knob(
        None, "Factor of the scores; none is 1 / sqrt(head_dim).", identity=None, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    distractor_norm: Flag = knob(True, "RMS-norm distractor keys like real ones.", identity=True)
    distractor_window: Flag = knob(True, "Keep the window in the distractor loss.", identity=True)


class RoPEConfig(SoftmaxConfig):
    """The published core: rotary half-truncated, base 1024, scale 0.12, canon off."""

    rotary: Literal["full", "half-truncated"] = knob(
        "full", "Rotate all pairs, or a quarter of the head size with the rest left still.", identity="full"
    )
    base: Float = knob(10000.0, "Base of the rotary frequencies.", identity=10000.0, gt=1, le=MAX_FLOAT)


class NoPEOutline(MixerOutline):
    """It has no parameters."""

    Config: ClassVar[type[Config]] = SoftmaxConfig
    has_distractor: ClassVar[bool] = True

    @classmethod
    def shapes(cls, model: ModelConfig, config: Any) -> Shapes:
        return {}

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float:
        return attention_flops(model, keys)


class RoPEOutline(NoPEOutline):
    """Neither has this one."""

    Config: ClassVar[type[Config]] = RoPEConfig

    @classmethod
    def check(cls, model: ModelConfig, config: Any) -> None:
        check_rotary(config.rotary, model.head_dim)

    @classmethod
    def shapes(cls, model: ModelConfig, config: Any) -> Shapes:
        return {}

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float:
        return attention_flops(model, keys)
