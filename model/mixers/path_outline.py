"""What is known of PaTH attention before it is built."""

from __future__ import annotations

from typing import ClassVar

from ..bounds import MAX_FLOAT, MAX_TAPS, MAX_WIDTH
from ..config import Config, Float, Int, ModelConfig, knob
from ..specs import MixerConfig, MixerOutline, Shapes, attention_flops, gate, linear

CHUNK = 64
"""Tokens whose maps are taken as one, where work is counted."""


class PaTHConfig(MixerConfig):
    """Of a map for each KV head and token."""

    scale: Float | None = knob(
        None, "Factor of the scores; none is 1 / sqrt(head_dim).", identity=None, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    rank: Int | None = knob(
        32,
        "Width between the two projections that w is made by; none is one projection alone.",
        identity=32,
        ge=1,
        le=MAX_WIDTH,
    )
    taps: Int = knob(3, "Taps of the convolution over w.", identity=3, ge=1, le=MAX_TAPS)
    gate_bias: Float = knob(
        0.0, "Initial bias of beta's logits: 0 makes beta 1.", identity=0.0, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    gate_std: Float = knob(0.02, "Initial deviation of beta's projection.", identity=0.02, ge=0, le=MAX_FLOAT)


class PaTHOutline(MixerOutline):
    """The projections of w, its filters, and beta's gate."""

    Config: ClassVar[type[Config]] = PaTHConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: PaTHConfig) -> Shapes:
        inner = model.n_kv_heads * model.head_dim
        width = model.d_model if config.rank is None else config.rank
        low = {} if config.rank is None else linear("low", model.d_model, width, bias=False)
        conv: Shapes = {"conv.weight": (inner, 1, config.taps)}
        return low | linear("w", width, inner, bias=False) | conv | gate("beta", model.d_model, model.n_kv_heads)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: PaTHConfig, keys: float) -> float:
        heads, inner, size = model.n_kv_heads, model.n_kv_heads * model.head_dim, model.head_dim
        width = model.d_model if config.rank is None else config.rank
        made = 2.0 * width * inner + (0.0 if config.rank is None else 2.0 * model.d_model * width)
        made += 2.0 * model.d_model * heads
        # in a chunk: w wᵀ and w kᵀ, the triangle solved for both, and what a query and a key then meet
        inside = heads * CHUNK * (6.0 * size + CHUNK) + model.n_heads * CHUNK * 2.0 * size
        # a query is multiplied by each chunk's w, u and what moves its keys
        turned = model.n_heads * keys * (4.0 * size + 2.0 * CHUNK)
        return attention_flops(model, keys) + made + inside + turned
