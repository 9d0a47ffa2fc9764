"""What is known of the memories of the delta rule before they are built."""

from __future__ import annotations

from typing import ClassVar

from ..bounds import MAX_LENGTH
from ..config import Config, Int, ModelConfig, knob
from ..specs import MemoryConfig, MemoryOutline, Shapes, linear


class GatedDeltaConfig(MemoryConfig):
    """Settings of the gated delta memory."""

    chunk: Int = knob(64, "Tokens solved together; changes rounding and speed only.", identity=64, ge=1, le=MAX_LENGTH)


class GatedDeltaOutline(MemoryOutline):
    """Two gates a head, one a channel, and the output projection."""

    Config: ClassVar[type[Config]] = GatedDeltaConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: GatedDeltaConfig) -> Shapes:
        d, inner, bias = model.d_model, model.n_heads * model.head_dim, model.bias
        gates = linear("w_gamma", d, model.n_heads, bias=bias) | linear("w_beta", d, model.n_heads, bias=bias)
        return gates | linear("gate", d, inner, bias=bias) | linear("proj", inner, d, bias=bias)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: GatedDeltaConfig) -> float:
        d, heads, size = model.d_model, model.n_heads, model.head_dim
        gates_and_output = 2 * (2 * d * heads + 2 * d * heads * size)
        return gates_and_output + 7.0 * heads * size * size


class DeltaNetOutline(MemoryOutline):
    """A gate a head, one a channel, and the output projection."""

    Config: ClassVar[type[Config]] = GatedDeltaConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: GatedDeltaConfig) -> Shapes:
        d, inner, bias = model.d_model, model.n_heads * model.head_dim, model.bias
        gates = linear("w_beta", d, model.n_heads, bias=bias) | linear("gate", d, inner, bias=bias)
        return gates | linear("proj", inner, d, bias=bias)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: GatedDeltaConfig) -> float:
        d, heads, size = model.d_model, model.n_heads, model.head_dim
        return 2 * (d * heads + 2 * d * heads * size) + 7.0 * heads * size * size


class KDAConfig(MemoryConfig):
    """Settings of the memory with a retention a channel."""

    chunk: Int = knob(
        16, "Tokens solved together without a GPU; changes rounding and speed only.", identity=16, ge=1, le=MAX_LENGTH
    )


class KDAOutline(MemoryOutline):
    """A gate a channel through a bottleneck of a head's size, one a head, one a channel of the output, and its projection."""

    Config: ClassVar[type[Config]] = KDAConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: KDAConfig) -> Shapes:
        d, inner, bias = model.d_model, model.n_heads * model.head_dim, model.bias
        keeps = linear("w_down", d, model.head_dim, bias=False) | linear("w_gamma", model.head_dim, inner, bias=bias)
        rest = linear("w_beta", d, model.n_heads, bias=bias) | linear("gate", d, inner, bias=bias)
        return keeps | rest | linear("proj", inner, d, bias=bias)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: KDAConfig) -> float:
        d, heads, size = model.d_model, model.n_heads, model.head_dim
        gates = d * size + size * heads * size + d * heads
        return 2 * (gates + 2 * d * heads * size) + 7.0 * heads * size * size
