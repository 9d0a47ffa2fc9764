"""What is known of differential attention before it is built."""

from __future__ import annotations

from typing import ClassVar, Literal

from ...kernels.rotary_kinds import check_rotary
from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, knob
from ..specs import MixerConfig, MixerOutline, Shapes


class DiffConfig(MixerConfig):
    """Of pairs of heads."""

    scale: Float | None = knob(
        None, "Factor of the scores; none is 1 / sqrt(head_dim).", identity=None, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    rotary: Literal["full", "half-truncated", "none"] = knob("full", "Rotary positions.", identity="full")
    base: Float = knob(10000.0, "Base of the rotary frequencies.", identity=10000.0, gt=1, le=MAX_FLOAT)
    norm_eps: Float = knob(1e-5, "Epsilon of the norm of what a pair reads.", identity=1e-5, gt=0, le=MAX_FLOAT)


class DiffOutline(MixerOutline):
    """Four vectors that lambda is made of, and the norm's weight."""

    Config: ClassVar[type[Config]] = DiffConfig

    @classmethod
    def check(cls, model: ModelConfig, config: DiffConfig) -> None:
        for name in ("n_heads", "n_kv_heads"):
            if getattr(model, name) % 2:
                raise ValueError(
                    f"mixer diff takes heads in pairs, but model.{name} is {getattr(model, name)}; make it even"
                )
        if config.rotary != "none":
            check_rotary(config.rotary, model.head_dim)

    @classmethod
    def shapes(cls, model: ModelConfig, config: DiffConfig) -> Shapes:
        vectors: Shapes = dict.fromkeys(("q1", "k1", "q2", "k2"), (model.head_dim,))
        return vectors | {"norm.weight": (2 * model.head_dim,)}

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: DiffConfig, keys: float) -> float:
        # H maps, each with the values of two heads
        return 6.0 * model.n_heads * model.head_dim * keys
