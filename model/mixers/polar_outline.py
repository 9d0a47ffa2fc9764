"""What is known of the polar mixer before it is built."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, knob
from ..specs import MixerConfig, MixerOutline, Shapes, attention_flops, linear


class PolarConfig(MixerConfig):
    """Initial values are raw: softplus turns -1, 0.5 and -1.5 into 0.313, 0.974 and 0.201."""

    null_base_init: Float = knob(2.0, "Initial null score.", identity=2.0, ge=-MAX_FLOAT, le=MAX_FLOAT)
    null_slope_init: Float = knob(
        0.5, "Initial raw growth of the null score with sqrt(ln(n + 1)).", identity=0.5, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    len_gain_init: Float = knob(
        -1.0, "Initial raw growth of the temperature with ln n.", identity=-1.0, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    mag_beta_init: Float = knob(
        -1.5, "Initial raw slope of the magnitude over ln(1 + m).", identity=-1.5, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    n_eff_floor: Float = knob(
        1e-30,
        "Lower bound of the sum of squared weights in n_eff; the published runs had 1e-6.",
        identity=1e-30,
        gt=0,
        le=MAX_FLOAT,
    )
    n_eff_floor_gradient: Literal["exact", "unbound"] = knob(
        "exact",
        "Gradient where that bound holds: of the bounded n_eff, or as if it did not, as in the published runs.",
        identity="exact",
    )


class PolarOutline(MixerOutline):
    """Four scalars and a null value a head, and the projection of the magnitudes."""

    Config: ClassVar[type[Config]] = PolarConfig
    has_distractor: ClassVar[bool] = True

    @classmethod
    def shapes(cls, model: ModelConfig, config: PolarConfig) -> Shapes:
        heads = model.n_heads
        scalars: Shapes = dict.fromkeys(("null_base", "null_slope", "len_gain", "mag_beta"), (heads,))
        return scalars | {"v_null": (heads, model.head_dim)} | linear("mu_proj", heads, model.d_model, bias=model.bias)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: PolarConfig, keys: float) -> float:
        return attention_flops(model, keys)
