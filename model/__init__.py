"""The network. A mixer of your own needs `Mixer`, `MixerConfig` and `register_mixer` from here."""

from .registry import register_mixer

__all__ = ["Mixer", "MixerConfig", "register_mixer"]


def __getattr__(name: str) -> object:
    # Lazy, so that reading a grid does not import torch.
    if name == "MixerConfig":
        from .outline import MixerConfig

        return MixerConfig
    if name == "Mixer":
        from .mixers.base import Mixer

        return Mixer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
