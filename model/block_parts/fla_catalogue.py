"""Layer classes of the installed flash-linear-attention (fla), read from its source; neither fla nor torch is imported.

Costs and sizes are closed forms in the layer's arguments.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
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
WRONG_CACHES: Mapping[str, str] = {
    "ABCAttention": "its state is relative to the normalizer of one call, which the next call does not know",
}
"""Layer classes whose cache gives other outputs than their forward pass -> the reason; they recompute instead."""
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
    decodes = bool(names & _CACHE_CALLS) and refusal is None and name not in WRONG_CACHES
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
