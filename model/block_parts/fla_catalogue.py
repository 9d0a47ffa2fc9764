"""Layer classes of the installed flash-linear-attention (fla), read from its source; neither fla nor torch is imported.

Costs and sizes are closed forms in the layer's arguments.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

PREFIX = "fla"
"""Part of a mixer's name before the colon."""
DISTRIBUTIONS = ("fla-core", "flash-linear-attention")
SCALARS: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_FROM_NETWORK = frozenset({"self", "hidden_size", "d_model", "layer_idx", "num_hidden_layers", "device", "dtype"})
"""Arguments that the network fills in."""
_CACHE_CALLS = frozenset({"update_layer_cache", "update"})
"""Functions that store a state in fla's cache."""
REFUSALS: Mapping[str, str] = {
    "YOCOSharedKVBuilder": "returns keys and values for other layers, not hidden states",
}
"""Layer classes that are no block parts although nothing in their arguments shows it -> the reason."""
NEEDS_MASK = frozenset({"ForgettingAttention", "PaTHAttention"})
"""Layer classes that decode only with a mask of the tokens read so far, all ones."""
NEEDS_FLASH_ATTN = frozenset({
    "Attention", "BitAttention", "DeltaFormerAttention", "MoBA", "MultiheadLatentAttention",
    "SlidingWindowSharedKeyAttention",
})  # fmt: skip
"""Layer classes that import flash-attn when they are built or run."""
LENGTH_LIMITS: Mapping[str, int] = {"LogLinearMamba2": 16384}
"""Most tokens of a sequence, where fla's source states them."""


class Argument(NamedTuple):
    """Argument of a layer's constructor that a grid may set."""

    kinds: tuple[type, ...]
    """Types of its values; empty for one that only takes None."""
    default: Any
    """Default of fla."""
    optional: bool
    """True if it may be None."""


class FlaLayer(NamedTuple):
    """Layer class of fla."""

    name: str
    module: str
    """Dotted name of its module."""
    arguments: Mapping[str, Argument]
    receives: frozenset[str]
    """Arguments of the constructor that the network fills in."""
    decodes: bool
    """True if its `forward` stores a state in fla's cache."""
    refusal: str | None
    """Reason why it cannot be a block part; None if it can."""


class LayerCost(NamedTuple):
    """Work and state of one layer beside its projections and convolutions, per sequence."""

    flops: float
    """FLOPs per token, two per multiply-add, one per decayed entry of the state."""
    flops_per_key: float = 0.0
    """FLOPs per token and key that it attends to."""
    state: int = 0
    """Entries of the recurrent state, float32."""
    token_entries: int = 0
    """Cached entries per token, 16 bits each."""
    conv_channels: int = 0
    """Channels of the short convolutions, whose last inputs are stored in 16 bits if the layer has them."""


def _linear(heads: int, key: float, value: float, rules: int = 0) -> LayerCost:
    """Return the cost of a matrix state of key by value size per head: decay, one write, one read, and `rules` delta rules.

    A delta rule reads the state before it writes; the first one replaces the plain write.
    """
    entries = heads * round(key) * round(value)
    writes = 2 if rules == 0 else 4 * rules
    channels = heads * round(key) * (1 + max(rules, 1)) + heads * round(value) * max(rules, 1)
    return LayerCost(entries * (1 + writes + 2), state=entries, conv_channels=channels)


def _attention(heads: int, size: float, kv_heads: int | None = None) -> LayerCost:
    return LayerCost(0.0, 4.0 * heads * size, token_entries=round(2 * (kv_heads or heads) * size))


def _expanded(a: Any, d: int, rules: int = 0) -> LayerCost:
    """Return the cost of a layer whose keys and values are `expand_k` and `expand_v` times as wide as the network."""
    return _linear(a.num_heads, a.expand_k * d / a.num_heads, a.expand_v * d / a.num_heads, rules)


def _head_dim(a: Any, d: int, rules: int = 1) -> LayerCost:
    """Return the cost of a delta rule with keys of `head_dim`, and values `expand_v` times as large."""
    heads = getattr(a, "num_v_heads", None) or a.num_heads
    cost = _linear(heads, a.head_dim, a.head_dim * a.expand_v, rules)
    return cost._replace(conv_channels=cost.conv_channels - (heads - a.num_heads) * a.head_dim * (1 + rules))


def _preconditioned(a: Any, d: int) -> LayerCost:
    """Return the cost of a delta rule with a diagonal preconditioner of the keys."""
    cost = _head_dim(a, d)
    return cost._replace(state=cost.state + (a.num_v_heads or a.num_heads) * a.head_dim)


def _slots(a: Any, d: int) -> LayerCost:
    """Return the cost of two states per head, key size by slots and slots by value size."""
    key, value = a.expand_k * d / a.num_heads, a.expand_v * d / a.num_heads
    slots = a.num_slots or round(key)
    parts = _linear(a.num_heads, key, slots), _linear(a.num_heads, slots, value)
    channels = a.num_heads * round(2 * key + value)
    return LayerCost(sum(part.flops for part in parts), state=sum(part.state for part in parts), conv_channels=channels)


def _full_heads(a: Any, d: int) -> LayerCost:
    return _attention(a.num_heads, d / a.num_heads, a.num_kv_heads)


def _gated_heads(a: Any, d: int, gates: int) -> LayerCost:
    """Return the cost of attention that caches gates too, as `gates` entries of 16 bits per token (float32 counts twice)."""
    cost = _full_heads(a, d)
    return cost._replace(token_entries=cost.token_entries + gates)


def _features(a: Any, d: int) -> LayerCost:
    heads = a.num_heads or d // a.expand_ratio
    return _linear(heads, a.expand_ratio, d / heads)


def _scan(inner: int, a: Any, groups: int) -> LayerCost:
    """Return the cost of a state-space layer: `inner` channels of `state_size` each, and its convolution.

    The convolution covers the channels, and B and C of each of the `groups` that are convolved with them.
    """
    return _linear(1, inner, a.state_size)._replace(conv_channels=inner + 2 * groups * a.state_size)


def _rwkv7(a: Any, d: int) -> LayerCost:
    heads = d // a.head_dim if a.head_dim else a.num_heads
    return _linear(heads, d / heads, (a.value_dim or d) / heads, 1)


COSTS: Mapping[str, Callable[[Any, int], LayerCost]] = {
    "ABCAttention": _slots,
    "Attention": _full_heads,
    "BitAttention": _full_heads,
    "Comba": _head_dim,
    "DeltaNet": functools.partial(_expanded, rules=1),
    "ForgettingAttention": lambda a, d: _gated_heads(a, d, 2 * a.num_heads),
    "GatedDeltaNet": _head_dim,
    "GatedDeltaNet2": _head_dim,
    "GatedDeltaProduct": lambda a, d: _head_dim(a, d, a.num_householder),
    "GatedLinearAttention": _expanded,
    "GatedSlotAttention": _slots,
    "HGRN2Attention": _features,
    "HGRNAttention": lambda a, d: LayerCost(3.0 * int(d * a.expand_ratio), state=int(d * a.expand_ratio)),
    "KimiDeltaAttention": _head_dim,
    "LightNetAttention": _features,
    "LinearAttention": _expanded,
    "Mamba": lambda a, d: _scan(a.intermediate_size, a, 0),
    "Mamba2": lambda a, d: _scan(a.expand * d, a, a.n_groups),
    "MultiScaleRetention": _expanded,
    "PrecondGatedDeltaNet": _preconditioned,
    "PrecondKDA": _preconditioned,
    "RWKV6Attention": _expanded,
    "RWKV7Attention": _rwkv7,
    "StickBreakingAttention": _full_heads,
    "WallAttention": lambda a, d: _gated_heads(a, d, 2 * d),
    "YOCOGatedRetention": lambda a, d: _linear(a.num_heads, d / a.num_heads, d / a.num_heads),
}
"""Layer class -> its cost, where a closed form is known; the states of the others are unknown."""


def cost_of(name: str, settings: Mapping[str, Any], width: int) -> LayerCost | None:
    """Return the cost of a layer with these arguments in a network of that width; None where no form is known."""
    form = COSTS.get(name)
    return None if form is None else form(SimpleNamespace(**settings), width)


class StateBytes(NamedTuple):
    """Bytes that decoding stores per sequence in one layer."""

    fixed: int
    """Bytes that do not depend on the sequence's length."""
    per_token: int
    """Bytes per token."""


def state_bytes(name: str, settings: Mapping[str, Any], width: int) -> StateBytes | None:
    """Return the bytes of a layer's recurrent state, short convolutions and cache; None where no form is known.

    The state is float32, everything else 16 bits. RWKV's shifted token counts as a convolution of one tap.
    """
    cost = cost_of(name, settings, width)
    if cost is None:
        return None
    taps = settings.get("conv_kernel") or (settings.get("conv_size", 0) if settings.get("use_short_conv") else 0)
    shifted = width if name.startswith("RWKV") else 0
    return StateBytes(4 * cost.state + 2 * (cost.conv_channels * taps + shifted), 2 * cost.token_entries)


@functools.cache
def fla_version() -> str | None:
    """Return the version of the installed fla; None if it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def fla_names() -> tuple[str, ...]:
    """Return the names of all layer classes of the installed fla, in its own order; empty without fla."""
    return tuple(_modules())


@functools.cache
def fla_layer(name: str) -> FlaLayer:
    """Return a layer class by name, from its source. KeyError for an unknown name."""
    module = _modules()[name]
    tree = _parse(Path(*module.split(".")[1:]).with_suffix(".py"))
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    signature = methods["__init__"].args
    every = {argument.arg for argument in signature.args}
    calls = (node.func for node in ast.walk(methods["forward"]) if isinstance(node, ast.Call))
    names = {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in calls}
    needs = sorted(set(_required(methods["forward"].args)) - {"self", "hidden_states", "attention_mask"})
    refusal = REFUSALS.get(name) or (f"its forward needs {' and '.join(needs)} of other layers" if needs else None)
    decodes = bool(names & _CACHE_CALLS) and refusal is None
    return FlaLayer(name, module, _arguments(signature), frozenset(every & _FROM_NETWORK), decodes, refusal)


def _required(signature: ast.arguments) -> list[str]:
    """Return the names of the positional arguments that have no default."""
    return [argument.arg for argument in signature.args[: len(signature.args) - len(signature.defaults)]]


def _arguments(signature: ast.arguments) -> dict[str, Argument]:
    """Return the arguments of a constructor that a grid may set, in order.

    Left out are those that the network fills in, and those whose values are no booleans, numbers or texts, such as
    pairs. One without a default gets None.
    """
    defaults = [None] * len(_required(signature)) + [ast.literal_eval(_plain(node)) for node in signature.defaults]
    arguments = {}
    for argument, default in zip(signature.args, defaults, strict=True):
        annotation = ast.unparse(argument.annotation) if argument.annotation else type(default).__name__
        kinds = tuple(kind for word, kind in SCALARS.items() if word in annotation.replace("|", " ").split())
        is_scalar = bool(kinds) and (default is None or isinstance(default, (*kinds, int)))
        if argument.arg not in _FROM_NETWORK and is_scalar:
            arguments[argument.arg] = Argument(kinds, default, default is None or "None" in annotation)
    return arguments


def _plain(node: ast.expr) -> ast.expr:
    """Return the expression of a default if it is a literal, else that of None."""
    try:
        ast.literal_eval(node)
    except ValueError:
        return ast.Constant(None)
    return node


@functools.cache
def _modules() -> dict[str, str]:
    """Return layer class -> dotted module, as `fla.layers` lists them; empty without fla."""
    tree = _parse(Path("layers", "__init__.py"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    listed = {
        alias.name: node.module if not node.level else f"{PREFIX}.layers.{node.module}"
        for node in imports
        for alias in node.names
    }
    return {name: str(module) for name, module in listed.items() if name[0].isupper()}


def _parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file of fla, by its path in the package; an empty one without fla."""
    spec = importlib.util.find_spec(PREFIX)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        file = Path(folder) / path
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return ast.parse("")
