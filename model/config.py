"""Configuration of the network, and the base class of every config in the project. Imports no torch."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from .bounds import (
    MAX_FLOAT,
    MAX_HEADS,
    MAX_INT64,
    MAX_LAYERS,
    MAX_LENGTH,
    MAX_RATIO,
    MAX_TAPS,
    MAX_VOCABULARY,
    MAX_WIDTH,
)

_BOOLEAN_TEXTS = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
MAX_SHOWN_BITS = 200
"""Bits of the largest whole number that a message shows in full, 60 digits."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?([eE][-+]?\d+)?")


def parse_flag(value: Any) -> Any:
    """Return the boolean that a text stands for; any other value or text unchanged.

    Texts, in any case: on, yes, true are True; off, no, false are False.
    """
    return _BOOLEAN_TEXTS.get(value.lower(), value) if isinstance(value, str) else value


def _parse_int(value: Any) -> Any:
    """Return a whole number written as 1e9, "1e9" or "1_000_000_000" as an int, other values unchanged.

    Whole floats become ints; fractions such as 1.5 and other texts pass unchanged, so that pydantic refuses them.

    Raises:
        ValueError: the value is a boolean.
    """
    if isinstance(value, bool):
        raise ValueError(f"must be a whole number, got {value!r}")
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        digits = value.strip().replace("_", "")
        # Python cannot parse an int of more than 4,300 digits; as a float it is infinite, which every field rejects
        value = float(digits) if len(digits) > 4000 or re.search(r"[.eE]", digits) else int(digits)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _parse_float(value: Any) -> Any:
    """Return a text such as "1e-3" or "1_000" as a float, other values unchanged.

    Texts that are no such number, and ints, pass unchanged, for pydantic to judge.

    Raises:
        ValueError: an infinite number or NaN, also from a text that is too large.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value.replace("_", ""))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {value}")
    return value


def _parse_positive_or_none(value: Any) -> Any:
    """Return a positive float, or "none" for None and the text "none" (in any case).

    A text that holds a number is parsed.

    Raises:
        ValueError: the value is neither, not above 0, above MAX_FLOAT, or not finite.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return "none"
    number = _parse_float(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise ValueError(f"must be a number above 0, or none, got {value!r}")
    if number > MAX_FLOAT:
        raise ValueError(f"must be at most {MAX_FLOAT:g}, or none, got {quoted(value)}")
    return float(number)


def quoted(value: Any) -> str:
    """Return a value as a message quotes it: its repr, or its size in bits for an int of more than MAX_SHOWN_BITS."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)


def _within_int64(value: int) -> int:
    if abs(value) > MAX_INT64:
        raise ValueError(f"must be from {-MAX_INT64} to {MAX_INT64}, got {quoted(value)}")
    return value


def _within_floats(value: float) -> float:
    if abs(value) > MAX_FLOAT:
        raise ValueError(f"must be from {-MAX_FLOAT:g} to {MAX_FLOAT:g}, got {value!r}")
    return value


Flag = Annotated[bool, BeforeValidator(parse_flag)]
"""A boolean that also understands on/off/yes/no."""
Int = Annotated[int, BeforeValidator(_parse_int), AfterValidator(_within_int64)]
"""An integer that also understands 1e9 and 1_000_000_000; `knob` bounds it further."""
Float = Annotated[float, BeforeValidator(_parse_float), AfterValidator(_within_floats)]
"""A float that also understands 1e-3 written as text; `knob` bounds it further."""
Real = Annotated[float, BeforeValidator(_parse_float), Field(ge=-MAX_FLOAT, le=MAX_FLOAT)]
"""A float of either sign."""
PositiveOrNone = Annotated[
    float | Literal["none"],
    BeforeValidator(_parse_positive_or_none),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_FLOAT},
                {"type": "null"},
                {"const": "none"},
            ]
        }
    ),
]
"""A float above zero, or "none", a word so that whoever reads the config sees that it was chosen."""


def knob(default: Any, doc: str, *, identity: Any = ..., **limits: Any) -> Any:
    """Return a config field with its one-sentence description and its identity default.

    A cell's id leaves out fields that stand at their identity default. A field that is added later must therefore
    declare the value that every older cell implicitly had, and must never change it, even when `default` changes.

    Args:
        default: default value of the field.
        doc: description, shown to users.
        identity: identity default; omitted: the field always enters the id.
        **limits: pydantic's `ge`, `gt`, `le` and `lt`; a number needs a lower and an upper one.
    """
    extra = {} if identity is ... else {"identity": identity}
    return Field(default, description=doc, json_schema_extra=extra, **limits)


class Config(BaseModel):
    """Frozen config section: unknown keys are errors, and all values can be stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", validate_default=True)


class ModelConfig(Config):
    """Network of one cell (docs/reference/mechanisms.md)."""

    d_model: Int = knob(1024, "Width of the residual stream.", ge=8, le=MAX_WIDTH)
    n_layers: Int = knob(16, "Number of blocks.", ge=1, le=MAX_LAYERS)
    n_heads: Int = knob(8, "Query heads of a global layer.", ge=1, le=MAX_HEADS)
    n_kv_heads: Int = knob(2, "Key and value heads; divides n_heads.", ge=1, le=MAX_HEADS)
    head_dim: Int = knob(128, "Size of one head.", ge=2, le=MAX_WIDTH)
    vocab_size: Int = knob(
        50304, "Rows of the embedding and of the head; at least the tokenizer's vocabulary.", ge=2, le=MAX_VOCABULARY
    )
    attn_every: Int = knob(
        4, "Block i is global if i mod attn_every equals attn_offset.", identity=4, ge=1, le=MAX_LAYERS
    )
    attn_offset: Int = knob(2, "Index of the first global block; see attn_every.", identity=2, ge=0, le=MAX_LAYERS)
    mlp: Literal["relu2", "swiglu"] = knob(
        "relu2",
        "Gate of the MLP for the two halves a and g of its hidden layer: relu2 is g relu(a)^2, swiglu is g silu(a).",
        identity="relu2",
    )
    mlp_ratio: Int = knob(4, "Hidden width of the gated MLP as a multiple of d_model.", identity=4, ge=1, le=MAX_RATIO)
    mlp_width: Int | None = knob(
        None, "Hidden width of the gated MLP; null: mlp_ratio times d_model.", identity=None, ge=1, le=MAX_WIDTH
    )
    match: Literal["none", "parameters"] = knob(
        "none",
        "With parameters, the MLPs of the global blocks get the hidden width with which a block has as many parameters, "
        "within 1 %, as one with mixer nope and mlp_ratio; none leaves them at mlp_ratio.",
        identity="none",
    )
    conv_taps: Int = knob(3, "Taps of the gated convolution.", identity=3, ge=1, le=MAX_TAPS)
    canon: Flag = knob(
        True,
        "Convolve q, k and v before mixing (Canon) if the mixer's own settings enable it; off disables it for every mixer.",
        identity=True,
    )
    canon_taps: Int = knob(4, "Taps of the Canon convolution on q, k and v.", identity=4, ge=1, le=MAX_TAPS)
    qk_norm: Flag = knob(True, "RMS-normalize queries and keys per head, without a weight.", identity=True)
    qk_norm_weight: Flag = knob(
        False,
        "Give the norms of queries and keys a weight per channel of a head, and norm_eps (as Qwen3); needs qk_norm and canon: off.",
        identity=False,
    )
    output_gate: Flag = knob(
        True,
        "Multiply each head's output by a gate computed from the token, before the output projection.",
        identity=True,
    )
    bias: Flag = knob(
        True,
        "Give all projections a bias, including those of mixer, memory and head; a mixer's gate keeps its own setting.",
        identity=True,
    )
    qkv_bias: Flag = knob(
        True, "With bias on, give the projections to queries, keys and values a bias too.", identity=True
    )
    head_bias: Flag = knob(True, "With bias on, give the head a bias too.", identity=True)
    norm_eps: Float = knob(1e-6, "Epsilon of the weighted RMS norms.", identity=1e-6, gt=0, le=MAX_FLOAT)
    residual: Literal["pre-norm", "normed"] = knob(
        "pre-norm",
        "Target of the residual addition: the stream x (pre-norm), or norm(x), which the branch reads (normed).",
        identity="pre-norm",
    )
    dropout: Float = knob(0.0, "Dropout probability of a branch's output during training.", identity=0.0, ge=0, lt=1)
    logit_cap: PositiveOrNone = knob(
        15.0, "Soft cap of the logits, z -> cap z / sqrt(z^2 + cap^2), or none.", identity=15.0
    )
    embedding_dtype: Literal["activations", "float32"] = knob(
        "activations",
        "Data type of the trained embedding and positions: that of the activations (bfloat16 on CUDA, too coarse for "
        "learning rates below about 0.001), or float32.",
        identity="activations",
    )
    tie_head: Flag = knob(False, "Use the embedding matrix for the head too.", identity=False)
    decoder: Literal["none", "row"] = knob(
        "none",
        "Network between the blocks and the head: none, or row, which predicts every token of a row from the hidden state of "
        "its last token alone (an autoencoder, for the task compression of MAD).",
        identity="none",
    )
    init: Literal["zero-ends", "zero-ends-and-conv-in", "llama"] = knob(
        "zero-ends",
        "Projections that start at zero: those that end a branch; also the gated convolution's in_proj (as in the "
        "published runs; its convolutions then never train); or none (llama, which also starts the embedding small).",
        identity="zero-ends",
    )
    attn_type: str = knob(
        "polar", "Mixer of the global layers; none: the memory alone, without gate and output projection."
    )
    mixers: dict[str, dict[str, Any]] = knob(
        {}, "Settings by mixer name; a cell stores only those of its own mixer.", identity={}
    )
    mixer_source: str | None = knob(None, "SHA-256 of the plugin file that defines the mixer.", identity=None)
    memory: str = knob("none", "Recurrent memory in parallel to the mixer, or none.", identity="none")
    memory_source: str | None = knob(None, "SHA-256 of the plugin file that defines the memory.", identity=None)
    memories: dict[str, dict[str, Any]] = knob({}, "Settings by memory name.", identity={})
    positions: str = knob(
        "none", "Position scheme whose vectors are added to the embeddings, or none.", identity="none"
    )
    position_source: str | None = knob(
        None, "SHA-256 of the plugin file that defines the position scheme.", identity=None
    )
    position_settings: dict[str, dict[str, Any]] = knob({}, "Settings by position scheme.", identity={})
    window: Flag = knob(False, "Train the global layers with a sliding window.", identity=False)
    window_size: Int = knob(1024, "Number of keys in the window, including the query's own.", ge=1, le=MAX_LENGTH)

    @model_validator(mode="after")
    def _shapes_agree(self) -> ModelConfig:
        """Raise ValueError for numbers of heads or layers that do not fit, and for norm weights that have no norm."""
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads ({self.n_kv_heads}) must divide n_heads ({self.n_heads})")
        if self.attn_offset >= self.attn_every:
            raise ValueError(f"attn_offset ({self.attn_offset}) must be below attn_every ({self.attn_every})")
        if self.qk_norm_weight and (self.canon or not self.qk_norm):
            raise ValueError("qk_norm_weight needs qk_norm: on and canon: off")
        return self

    @property
    def mlp_channels(self) -> int:
        """Hidden width of the gated MLP: `mlp_width`, or `mlp_ratio` times the width of the stream."""
        return self.mlp_ratio * self.d_model if self.mlp_width is None else self.mlp_width

    @property
    def n_global_layers(self) -> int:
        """Number of global attention layers (blocks i with i mod attn_every = attn_offset); 0 is possible."""
        return len(range(self.attn_offset, self.n_layers, self.attn_every))

    def is_global(self, layer: int) -> bool:
        """Return True if block `layer` (0-based) is a global attention layer; the others are gated convolutions."""
        return layer % self.attn_every == self.attn_offset


class ModelConfigError(ValueError):
    """Model setting that cannot be built.

    `path` is its dotted config path, `message` the problem, `allowed` the values it may have, or None.
    """

    def __init__(self, path: str, message: str, allowed: list[str] | None = None) -> None:
        self.path, self.message, self.allowed = path, message, allowed
        super().__init__(f"{path}: {message}" + (f"; allowed: {', '.join(allowed)}" if allowed else ""))
