"""Names of mixers, memories, position schemes and regularizers. A new one is one file and one line here. Imports no torch until asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from .bases import Memory, Mixer, Position

Part = TypeVar("Part")
Registered = TypeVar("Registered")

_plugin: ContextVar[str | None] = ContextVar("plugin", default=None)


@contextmanager
def registering_for(module: str) -> Iterator[None]:
    """Within it, whatever is registered belongs to that plugin, even a class that the plugin only imports."""
    token = _plugin.set(module)
    try:
        yield
    finally:
        _plugin.reset(token)


class Registry(Mapping[str, "str | Part"], Generic[Part]):
    """Name -> part of one kind: the "module:attribute" of one of the package's own, or what a plugin registered.

    Nothing is imported before `load` asks for it. A part of the network imports torch, so only what plans, launches or
    runs cells may load one.
    """

    def __init__(self, kind: str, package: str, entries: Mapping[str, str], *, reserved: Iterable[str] = ()) -> None:
        """`entries`: "module:attribute" relative to `package`.

        `kind` is the word for messages, `reserved` are names that a plugin cannot take because they mean something else.
        """
        self.kind, self._package, self._reserved = kind, package, frozenset(reserved)
        self._targets: dict[str, str | Part] = dict(entries)
        self._owners: dict[str, str] = {}

    def __getitem__(self, name: str) -> str | Part:
        return self._targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def load(self, name: str) -> Part:
        """The part itself; KeyError when there is none of that name."""
        target = self._targets[name]
        if not isinstance(target, str):
            return target
        module, attribute = target.split(":")
        part: Part = getattr(importlib.import_module(f".{module}", self._package), attribute)
        return part

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Decorator for plugins: makes a class or function known by that name.

        Raises ValueError when the name is reserved or belongs to another module's part. A module may register its own
        name anew.
        """

        if name in self._reserved:
            raise ValueError(f"no {self.kind} can be named {name!r}, which means something else; choose another name")

        def register(part: Any) -> Any:
            owner = _plugin.get() or str(getattr(part, "__module__", ""))
            if name in self._targets and self._owners.get(name) != owner:
                raise ValueError(f"a {self.kind} named {name!r} exists already; choose another name")
            self._targets[name], self._owners[name] = part, owner
            return part

        return register

    def owner(self, name: str) -> str | None:
        """The module that registered the part, for a plugin file the one that it was loaded as; None: the package."""
        return self._owners.get(name)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget at the end whatever is registered within, as tests of plugins need it."""
        before = dict(self._targets), dict(self._owners)
        try:
            yield
        finally:
            self._targets, self._owners = before


def call_if_defined(part: type, method: str, *arguments: Any) -> Any:
    """Return the answer of a class method that the part defines itself; None where it only inherits one.

    A part may have more parameters, and do more work, than the class above it.
    """
    return getattr(part, method)(*arguments) if method in vars(part) else None


_PACKAGE = __name__.rpartition(".")[0]

MIXERS: Registry[type[Mixer]] = Registry("mixer", _PACKAGE, {
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
})  # fmt: skip
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
