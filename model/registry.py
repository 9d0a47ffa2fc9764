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

    Nothing is imported before `load` or `outline` asks for it.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        entries: Mapping[str, str | tuple[str, str]],
        *,
        reserved: Iterable[str] = (),
    ) -> None:
        """`entries`: "module:attribute" relative to `package`, or a pair with that of its outline, which needs no torch.

        `kind` is the word for messages, `reserved` are names that a plugin cannot take because they mean something else.
        """
        self.kind, self._package, self._reserved = kind, package, frozenset(reserved)
        pairs = {name: (said, said) if isinstance(said, str) else said for name, said in entries.items()}
        self._targets: dict[str, str | Part] = {name: whole for name, (whole, _) in pairs.items()}
        self._outlines = {name: outline for name, (_, outline) in pairs.items()}
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
        return self._imported(target) if isinstance(target, str) else target

    def outline(self, name: str) -> Any:
        """What is known of the part without torch: its outline, else the part itself; KeyError when there is none."""
        return self._imported(self._outlines[name]) if name in self._outlines else self.load(name)

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
        """What is registered within is forgotten at the end, as tests of plugins need it."""
        before = dict(self._targets), dict(self._owners)
        try:
            yield
        finally:
            self._targets, self._owners = before

    def _imported(self, target: str) -> Any:
        module, attribute = target.split(":")
        return getattr(importlib.import_module(f".{module}", self._package), attribute)


_HERE = __name__.rpartition(".")[0]

MIXERS: Registry[type[Mixer]] = Registry("mixer", _HERE, {
    "polar": ("mixers.polar:Polar", "mixers.polar_outline:PolarOutline"),
    "nope": ("mixers.softmax:NoPE", "mixers.softmax_outline:NoPEOutline"),
    "rope": ("mixers.softmax:RoPE", "mixers.softmax_outline:RoPEOutline"),
    "tra": ("mixers.tra:TRA", "mixers.tra_outline:TRAOutline"),
    "alibi": ("mixers.biased:ALiBi", "mixers.biased_outline:ALiBiOutline"),
    "rel": ("mixers.biased:Rel", "mixers.biased_outline:RelOutline"),
    "cope": ("mixers.biased:CoPE", "mixers.biased_outline:CoPEOutline"),
    "diff": ("mixers.diff:Diff", "mixers.diff_outline:DiffOutline"),
    "ssmax": ("mixers.ssmax:SSMax", "mixers.ssmax_outline:SSMaxOutline"),
    "fox": ("mixers.fox:FoX", "mixers.fox_outline:FoXOutline"),
    "wall": ("mixers.wall:Wall", "mixers.wall_outline:WallOutline"),
    "path": ("mixers.path:PaTH", "mixers.path_outline:PaTHOutline"),
})  # fmt: skip
MEMORIES: Registry[type[Memory]] = Registry("memory", _HERE, {
    "gated_delta": ("memory.gated_delta:GatedDelta", "memory.gated_delta_outline:GatedDeltaOutline"),
    "deltanet": ("memory.gated_delta:DeltaNet", "memory.gated_delta_outline:DeltaNetOutline"),
    "kda": ("memory.gated_delta:KDA", "memory.gated_delta_outline:KDAOutline"),
    "omega": ("memory.omega:Omega", "memory.omega_outline:OmegaOutline"),
    "atlas": ("memory.omega:Atlas", "memory.omega_outline:AtlasOutline"),
}, reserved=("none", "on", "off"))  # fmt: skip
POSITIONS: Registry[type[Position]] = Registry("position scheme", _HERE, {
    "ape": ("positions.ape:APE", "positions.table_outline:TableOutline"),
    "label": ("positions.label:Label", "positions.table_outline:TableOutline"),
}, reserved=("none",))  # fmt: skip
REGULARIZERS: Registry[Callable[..., Any]] = Registry("regularizer", _HERE, {
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
