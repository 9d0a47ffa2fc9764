"""Names of mixers, memories and regularizers. A new one is one file and one line here. Imports no torch until asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .memory.base import Memory
    from .mixers.base import Mixer
    from .outline import MemoryOutline, MixerOutline

MIXERS: dict[str, str | type[Mixer]] = {
    "polar": "mixers.polar:Polar",
    "nope": "mixers.softmax:NoPE",
    "rope": "mixers.softmax:RoPE",
}
MEMORIES: dict[str, str | type[Memory]] = {"gated_delta": "memory.gated_delta:GatedDelta"}
OUTLINES: dict[str, str] = {
    "mixers.polar:Polar": "mixers.polar_outline:PolarOutline",
    "mixers.softmax:NoPE": "mixers.softmax_outline:NoPEOutline",
    "mixers.softmax:RoPE": "mixers.softmax_outline:RoPEOutline",
    "memory.gated_delta:GatedDelta": "memory.gated_delta_outline:GatedDeltaOutline",
}
"""What is known of a part without torch. One that is not listed is its own outline, for which torch is imported."""
REGULARIZERS: dict[str, str] = {
    "weak": "regularizers:weak",
    "strong": "regularizers:strong",
    "discrete": "regularizers:discrete",
    "zipfian": "regularizers:zipfian",
}


def _load(table: dict[str, Any], name: str) -> Any:
    return _import(table[name])


def _import(target: Any) -> Any:
    if isinstance(target, str):
        module, attribute = target.split(":")
        target = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return target


def _outline(table: dict[str, Any], name: str) -> Any:
    target = table[name]
    return _import(OUTLINES.get(target, target) if isinstance(target, str) else target)


def mixer(name: str) -> type[Mixer]:
    """The mixer class of that name; KeyError when there is none."""
    cls: type[Mixer] = _load(MIXERS, name)
    return cls


def memory(name: str) -> type[Memory]:
    """The memory class of that name; KeyError when there is none."""
    cls: type[Memory] = _load(MEMORIES, name)
    return cls


def mixer_outline(name: str) -> type[MixerOutline]:
    """What is known of the mixer of that name before it is built; KeyError when there is none."""
    cls: type[MixerOutline] = _outline(MIXERS, name)
    return cls


def memory_outline(name: str) -> type[MemoryOutline]:
    """What is known of the memory of that name before it is built; KeyError when there is none."""
    cls: type[MemoryOutline] = _outline(MEMORIES, name)
    return cls


def regularizer(name: str) -> Callable[..., Any]:
    """The regularizer function of that name; KeyError when there is none ("baseline" is the absence of one)."""
    function: Callable[..., Any] = _load(REGULARIZERS, name)
    return function


def register_mixer(name: str) -> Callable[[type[Mixer]], type[Mixer]]:
    """Class decorator for plugins: makes the class available as `attn_type: name`.

    Raises ValueError when the name already belongs to another class.
    """

    def register(cls: type[Mixer]) -> type[Mixer]:
        known = MIXERS.get(name)
        if known is not None and (isinstance(known, str) or known.__module__ != cls.__module__):
            raise ValueError(f"a mixer named {name!r} exists already; choose another name")
        MIXERS[name] = cls
        return cls

    return register
