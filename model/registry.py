"""Registries of mixers, memories, position schemes and regularizers by name.

Torch is imported only when a part is loaded. A new part is one file and one line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from .block_parts.fla_catalogue import PREFIX, fla_names

if TYPE_CHECKING:
    from .bases import BlockPart, Memory, Mixer, Position

Part = TypeVar("Part")
Registered = TypeVar("Registered")

_plugin: ContextVar[str | None] = ContextVar("plugin", default=None)


@contextmanager
def registering_for(module: str) -> Iterator[None]:
    """Attribute every registration in the `with` block to that plugin module, even of classes it only imports.

    Applies to the current context (thread or task) only; blocks may be nested.
    """
    token = _plugin.set(module)
    try:
        yield
    finally:
        _plugin.reset(token)


class Family(NamedTuple):
    """Parts of an installed library, which are found by reading the library."""

    module: str
    """Module of this package whose attributes they are."""
    names: Callable[[], tuple[str, ...]]
    """Returns their names; empty if the library is not installed."""


class Registry(Mapping[str, "str | Part"], Generic[Part]):
    """Mapping from name to part of one kind: "module:attribute" for the package's own, the object for plugins'.

    Names iterate in order of registration, the package's own first. Nothing is imported before `load` is called. A part
    of the network imports torch, so only code that plans, launches or runs cells may load one.
    """

    def __init__(
        self, kind: str, package: str, entries: Mapping[str, str], *, reserved: Iterable[str] = (),
        families: Mapping[str, Family] | None = None,
    ) -> None:  # fmt: skip
        """Create a registry with the package's own parts.

        Args:
            kind: noun for messages, such as "mixer".
            package: package that targets are relative to.
            entries: name -> "module:attribute".
            reserved: names with another meaning in the config (such as "none"), which a plugin cannot register.
            families: prefix -> parts named PREFIX:NAME, which an installed library offers. They can be looked up and
                loaded, but are not iterated over.
        """
        self._families = dict(families or {})
        self.kind, self._package, self._reserved = kind, package, frozenset(reserved)
        self._targets: dict[str, str | Part] = dict(entries)
        self._owners: dict[str, str] = {}

    def __getitem__(self, name: str) -> str | Part:
        """Return the target of a part, also of one of a family. KeyError if there is none."""
        prefix, colon, member = name.partition(":")
        if colon and prefix in self._families and member in self._families[prefix].names():
            return f"{self._families[prefix].module}:{member}"
        return self._targets[name]

    def every_name(self) -> list[str]:
        """Return the names of all parts, those of families last."""
        members = (f"{prefix}:{name}" for prefix, family in self._families.items() for name in family.names())
        return [*self, *members]

    def choices(self, word: str) -> list[str]:
        """Return the names that a misspelled word may mean: those of its family if it has a colon, else the others."""
        return [name for name in self.every_name() if (":" in name) == (":" in word)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def load(self, name: str) -> Part:
        """Import and return the part of that name: a class, for regularizers a function. KeyError if there is none."""
        target = self[name]
        if not isinstance(target, str):
            return target
        module, attribute = target.split(":")
        part: Part = getattr(importlib.import_module(f".{module}", self._package), attribute)
        return part

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Return a decorator that registers a class or function under that name, and returns it unchanged.

        A module may register its own name again, which replaces the part. Names of the package's own parts cannot be
        replaced.

        Raises:
            ValueError: the name is reserved, or (when decorating) belongs to another module's part.
        """
        if name in self._reserved or name.partition(":")[0] in self._families:
            raise ValueError(f"the {self.kind} name {name!r} is reserved; choose another name")

        def register(part: Any) -> Any:
            """Register `part`, for the plugin that is being loaded or else for its defining module, and return it.

            Raises:
                ValueError: the name belongs to another module's part.
            """
            owner = _plugin.get() or str(getattr(part, "__module__", ""))
            if name in self._targets and self._owners.get(name) != owner:
                raise ValueError(f"a {self.kind} named {name!r} exists already; choose another name")
            self._targets[name], self._owners[name] = part, owner
            return part

        return register

    def owner(self, name: str) -> str | None:
        """Return the name of the module that registered the part; None for the package's own and unknown names."""
        return self._owners.get(name)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Undo at its end every registration and replacement made inside the `with` block; for tests of plugins."""
        before = dict(self._targets), dict(self._owners)
        try:
            yield
        finally:
            self._targets, self._owners = before


def call_if_defined(part: type, method: str, *arguments: Any) -> Any:
    """Return the result of a class method that the part itself defines; None if it only inherits the method.

    An inherited method would answer for the class above, which may have fewer parameters and do less work. None is also
    returned if no class defines it.

    Args:
        part: class of the part.
        method: name of the class method.
        *arguments: arguments of the call.
    """
    return getattr(part, method)(*arguments) if method in vars(part) else None


_PACKAGE = __name__.rpartition(".")[0]

MIXERS: Registry[type[Mixer | BlockPart]] = Registry("mixer", _PACKAGE, {
    "polar": "mixers.polar:Polar",
    "nope": "mixers.softmax:NoPE",
    "rope": "mixers.softmax:RoPE",
    "tra": "mixers.tra:TRA",
    "alibi": "mixers.biased:ALiBi",
    "rel": "mixers.biased:Rel",
    "cope": "mixers.biased:CoPE",
    "diff": "mixers.diff:Diff",
    "ssmax": "mixers.softmax:SSMax",
    "fox": "mixers.fox:FoX",
    "wall": "mixers.wall:Wall",
    "path": "mixers.path:PaTH",
    "polysketch": "mixers.polysketch:PolySketch",
}, reserved=("none",), families={PREFIX: Family("block_parts.fla_part", fla_names)})  # fmt: skip
MEMORIES: Registry[type[Memory]] = Registry("memory", _PACKAGE, {
    "gated_delta": "memory.gated_delta:GatedDelta",
    "deltanet": "memory.gated_delta:DeltaNet",
    "kda": "memory.gated_delta:KDA",
    "omega": "memory.omega:Omega",
    "atlas": "memory.omega:Atlas",
}, reserved=("none", "on", "off"))  # fmt: skip
POSITIONS: Registry[type[Position]] = Registry("position scheme", _PACKAGE, {
    "ape": "positions.ape:APE",
    "label": "positions.ape:Label",
}, reserved=("none",))  # fmt: skip
REGULARIZERS: Registry[Callable[..., Any]] = Registry("regularizer", _PACKAGE, {
    "weak": "regularizers:weak",
    "strong": "regularizers:strong",
    "discrete": "regularizers:discrete",
    "zipfian": "regularizers:zipfian",
}, reserved=("baseline",))  # fmt: skip

SETTINGS: Mapping[str, Registry[Any]] = {"mixers": MIXERS, "memories": MEMORIES, "position_settings": POSITIONS}
"""Field of the model's config that holds settings by the name of a part -> the parts."""

register_mixer = MIXERS.register
register_memory = MEMORIES.register
register_position = POSITIONS.register
register_regularizer = REGULARIZERS.register
