"""The network: its parts, and the base classes and registration decorators for parts of your own.

A part of your own needs its base class, its config class and its `register_...` decorator from here.
Imported by: sweep, and parts of your own; backbone.py builds the network, registry.py lists its parts.
Start at backbone.py.
"""

from importlib import import_module

from .registry import register_memory, register_mixer, register_position, register_regularizer

__all__ = [
    "BlockConfig",
    "BlockPart",
    "Memory",
    "MemoryConfig",
    "Mixer",
    "MixerConfig",
    "Position",
    "PositionConfig",
    "register_memory",
    "register_mixer",
    "register_position",
    "register_regularizer",
]


def __getattr__(name: str) -> object:
    # Imported lazily, so that reading a grid does not import torch.
    if name in __all__:
        return getattr(import_module(".bases", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
