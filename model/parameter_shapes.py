"""The shapes of a network's parameters before it is built. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from . import registry
from .config import ModelConfig
from .specs import Outline, Shapes, linear, own

NO_MEMORY = "none"
NO_POSITIONS = "none"


def network_shapes(config: ModelConfig) -> Shapes | None:
    """Every parameter of the network by the name it will have; None when a part of it says nothing.

    `config` is complete, as `check_model_config` returns it.
    """
    mixing, places = _attention(config), _positions(config)
    if mixing is None or places is None:
        return None
    d = config.d_model
    found: Shapes = {"embedding.weight": (config.vocab_size, d), **places}
    for layer in range(config.n_layers):
        mix = mixing if config.is_global(layer) else _gated_conv(config)
        found |= {f"blocks.{layer}.{name}": shape for name, shape in (mix | _around(config)).items()}
    head = linear("head", d, config.vocab_size, bias=config.bias and config.head_bias)
    if config.tie_head:
        del head["head.weight"]
    return found | {"norm.weight": (d,)} | head


def longest_text(config: ModelConfig) -> int | None:
    """Tokens of the longest text that the network has places for; None for any. `config` as for `network_shapes`."""
    if config.positions == NO_POSITIONS:
        return None
    scheme = registry.POSITIONS.outline(config.positions)
    found: int | None = scheme.longest(config, scheme.Config(**config.position_settings[config.positions]))
    return found


def _positions(config: ModelConfig) -> Shapes | None:
    if config.positions == NO_POSITIONS:
        return {}
    scheme = registry.POSITIONS.outline(config.positions)
    shapes = _shapes(scheme, config, config.position_settings[config.positions])
    return None if shapes is None else {f"positions.{name}": shape for name, shape in shapes.items()}


def _around(config: ModelConfig) -> Shapes:
    d, hidden = config.d_model, config.mlp_ratio * config.d_model
    norms = {"norm1.weight": (d,), "norm2.weight": (d,)}
    mlp = linear("mlp.fc", d, 2 * hidden, bias=config.bias) | linear("mlp.proj", hidden, d, bias=config.bias)
    return norms | mlp


def _gated_conv(config: ModelConfig) -> Shapes:
    d, bias = config.d_model, config.bias
    filters = {"mix.conv.weight": (d, 1, config.conv_taps)}
    return linear("mix.in_proj", d, 3 * d, bias=bias) | filters | linear("mix.out_proj", d, d, bias=bias)


def _attention(config: ModelConfig) -> Shapes | None:
    d, inner, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    settings = config.mixers[config.attn_type]
    parts = {"mixer": _shapes(registry.MIXERS.outline(config.attn_type), config, settings)}
    if config.memory != NO_MEMORY:
        parts["memory"] = _shapes(registry.MEMORIES.outline(config.memory), config, config.memories[config.memory])
    bias, queries = config.bias and config.qkv_bias, 2 * inner if config.output_gate else inner
    found = linear("mix.w_q", d, queries, bias=bias) | linear("mix.proj", inner, d, bias=config.bias)
    found |= linear("mix.w_k", d, kv, bias=bias) | linear("mix.w_v", d, kv, bias=bias)
    if config.canon and settings["canon"]:
        for name, channels in (("q", inner), ("k", kv), ("v", kv)):
            found[f"mix.canon.{name}.weight"] = (channels, 1, config.canon_taps)
    for part, shapes in parts.items():
        if shapes is None:
            return None
        found |= {f"mix.{part}.{name}": shape for name, shape in shapes.items()}
    return found


def _shapes(part: type[Outline], config: ModelConfig, settings: dict[str, Any]) -> Shapes | None:
    found: Shapes | None = own(part, "shapes", config, part.Config(**settings))
    return found


def group_of(name: str, axes: int, *, tied: bool) -> str | None:
    """The optimizer group of a parameter with that many axes (see `Backbone.parameter_groups`); None for none.

    An embedding that is the head's matrix too (`tied`) is learned at the head's rate, the smaller one.
    """
    if axes < 2:
        return "scalar"
    tables = {"embedding": "head" if tied else "embedding", "positions": "embedding"}
    groups = {"blocks": "muon", "head": "head"} | tables
    return groups.get(name.split(".", 1)[0])


def parameters(config: ModelConfig) -> Iterator[tuple[str, str, int]] | None:
    """(name, optimizer group, number of values) of every parameter; None as for `network_shapes`."""
    shapes = network_shapes(config)
    if shapes is None:
        return None
    tied = config.tie_head
    return ((name, group_of(name, len(shape), tied=tied) or "", math.prod(shape)) for name, shape in shapes.items())
