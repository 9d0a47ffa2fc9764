"""What is known of the omega memory and of atlas before they are built."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ...kernels.omega.columns import columns
from ..bounds import MAX_FLOAT, MAX_LENGTH, MAX_RATIO, MAX_WIDTH
from ..config import Config, Flag, Float, Int, ModelConfig, knob
from ..specs import MemoryConfig, MemoryOutline, Shapes, linear

MOST_COLUMNS = 1 << 16
"""Columns of a feature beyond which no memory is built."""


class OmegaConfig(MemoryConfig):
    """Of a memory that takes gradient steps on the last pairs."""

    window: Int = knob(16, "Tokens whose pairs are in the loss of each step.", identity=16, ge=1, le=MAX_LENGTH)
    chunk: Int = knob(
        16, "Tokens after which gradients are taken at the memory as it is then; 1 takes each where it stands.",
        identity=16, ge=1, le=MAX_LENGTH,
    )  # fmt: skip
    features: Literal["identity", "poly2", "sketch"] = knob(
        "identity",
        "Of keys and queries: as they are, all products of up to two channels, or random sums of products.",
        identity="identity",
    )
    sketch: Int = knob(
        16, "Random sums a head of `features: sketch`; the feature has their square.", identity=16, ge=1, le=MAX_WIDTH
    )
    degree: Int = knob(2, "Channels that a column of a sketch multiplies, even.", identity=2, ge=2, le=MAX_WIDTH)
    normalise: Flag = knob(True, "Features have length 1.", identity=True)
    memory: Literal["matrix", "mlp2"] = knob(
        "matrix", "What learns the pairs: a matrix, or a network with one hidden layer.", identity="matrix"
    )
    hidden: Int = knob(4, "Units of that layer, in head sizes.", identity=4, ge=1, le=MAX_RATIO)
    keep_offset: Float = knob(
        3.9,
        "Initial logit of what a token keeps of the memory: 3.9 is 0.98.",
        identity=3.9,
        ge=-MAX_FLOAT,
        le=MAX_FLOAT,
    )
    step_offset: Float = knob(
        -1.0, "Initial logit of the step: -1 is 0.27.", identity=-1.0, ge=-MAX_FLOAT, le=MAX_FLOAT
    )


class AtlasConfig(OmegaConfig):
    """With a momentum, whose steps are made orthogonal."""

    chunk: Int = knob(
        64, "Tokens after which gradients are taken at the memory as it is then.", identity=64, ge=1, le=MAX_LENGTH
    )
    keep_offset: Float = knob(
        6.4,
        "Initial logit of what a token keeps of the memory: 6.4 keeps 0.9 in 64.",
        identity=6.4,
        ge=-MAX_FLOAT,
        le=MAX_FLOAT,
    )
    step_offset: Float = knob(
        -1.1, "Initial logit of the step: -1.1 is 0.25.", identity=-1.1, ge=-MAX_FLOAT, le=MAX_FLOAT
    )
    momentum_offset: Float = knob(
        2.94,
        "Initial logit of what a token keeps of the momentum: 2.94 is 0.95.",
        identity=2.94,
        ge=-MAX_FLOAT,
        le=MAX_FLOAT,
    )
    orthogonal: Literal["chunk", "token", "none"] = knob(
        "chunk",
        "Newton-Schulz on the momentum once a chunk, whose tokens then read the memory before it; at each token; or never.",
        identity="chunk",
    )


class OmegaOutline(MemoryOutline):
    """Three rates a head, one gate a channel, and the output projection."""

    Config: ClassVar[type[Config]] = OmegaConfig
    RATES: ClassVar[tuple[str, ...]] = ("keep", "step", "weight")

    @classmethod
    def columns(cls, model: ModelConfig, config: OmegaConfig) -> int:
        """Of the feature of a key."""
        return columns(config.features, model.head_dim, config.sketch)

    @classmethod
    def layers(cls, model: ModelConfig, config: OmegaConfig) -> list[tuple[int, int]]:
        """(outputs, inputs) of the memory's matrices."""
        found, size = cls.columns(model, config), model.head_dim
        if config.memory == "matrix":
            return [(size, found)]
        return [(config.hidden * size, found), (size, config.hidden * size)]

    @classmethod
    def check(cls, model: ModelConfig, config: OmegaConfig) -> None:
        if config.degree % 2:
            raise ValueError(f"degree ({config.degree}) must be even")
        found = cls.columns(model, config)
        if found > MOST_COLUMNS:
            state = 4 * sum(o * i for o, i in cls.layers(model, config)) * model.n_heads
            raise ValueError(
                f"features ({config.features}) of {model.head_dim} channels have {found:,} columns, and the memory of a "
                f"layer {state / 2**20:,.0f} MiB a row; make sketch or model.head_dim smaller"
            )

    @classmethod
    def unfit(cls, config: OmegaConfig, tokens: int) -> str | None:
        if config.window > tokens:
            return f"window ({config.window}) is more than the {tokens} tokens of a row, so none is ever full; set it to {tokens} at most"
        return None

    @classmethod
    def shapes(cls, model: ModelConfig, config: OmegaConfig) -> Shapes:
        d, inner, bias = model.d_model, model.n_heads * model.head_dim, model.bias
        found: Shapes = {}
        for name in cls.RATES:
            found |= linear(f"rates.{name}", d, model.n_heads, bias=bias)
        if config.memory == "mlp2":
            found |= {f"start.{index}": shape for index, shape in enumerate(cls.layers(model, config))}
        return found | linear("gate", d, inner, bias=bias) | linear("proj", inner, d, bias=bias)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: OmegaConfig) -> float:
        d, inner = model.d_model, model.n_heads * model.head_dim
        surround = 2.0 * (len(cls.RATES) * d * model.n_heads + 2 * d * inner)
        # keys of a chunk and of the window before it, for each token of the chunk
        seen = config.chunk + config.window - 1
        a_head = 0.0
        for outputs, inputs in cls.layers(model, config):
            # answers to the keys seen and to the query, what the chunk writes, and the masked products in it
            a_head += 2.0 * outputs * inputs * (2 * seen / config.chunk + 1) + 2.0 * seen * (inputs + outputs)
        return surround + model.n_heads * a_head


class AtlasOutline(OmegaOutline):
    """And a rate of the momentum."""

    Config: ClassVar[type[Config]] = AtlasConfig
    RATES: ClassVar[tuple[str, ...]] = (*OmegaOutline.RATES, "momentum")

    @classmethod
    def unfit(cls, config: Any, tokens: int) -> str | None:
        if config.orthogonal == "chunk" and config.chunk >= tokens:
            return (
                f"chunk ({config.chunk}) is not below the {tokens} tokens of a row, and what a chunk writes is read after it alone, "
                "so nothing would be read; set a smaller one, or orthogonal to token or none"
            )
        return super().unfit(config, tokens)

    @classmethod
    def shapes(cls, model: ModelConfig, config: Any) -> Shapes:
        return super().shapes(model, config)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any) -> float:
        found = super().forward_flops(model, config)
        if config.orthogonal == "none":
            return found
        often = 1.0 if config.orthogonal == "token" else 1 / config.chunk
        for outputs, inputs in cls.layers(model, config):
            short, long = sorted((outputs, inputs))
            # five steps of a Gram matrix, its square and a product
            found += model.n_heads * often * 5 * 2.0 * (2 * short * short * long + short**3)
        return found
