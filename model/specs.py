"""What is known of a part of the network before it is built: its settings, its limits, the shapes of its parameters.

Imports no torch, so that a plan of ten thousand cells need not wait for it. Every mixer, memory and position scheme is an outline of its
own; one of the package has its outline in a file beside it, named in the registry.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .config import Config, Flag, ModelConfig, knob

Shapes = dict[str, tuple[int, ...]]
"""Parameter name -> shape."""


class MixerConfig(Config):
    """Settings that every mixer has; add fields with `knob`."""

    canon: Flag = knob(True, "Convolve q, k and v (Canon) before mixing.", identity=True)


class MemoryConfig(Config):
    """Settings of a memory; add fields with `knob`."""


class PositionConfig(Config):
    """Settings of a position scheme; add fields with `knob`."""


class Outline:
    """A part's settings and what it accepts."""

    Config: ClassVar[type[Config]]

    @classmethod
    def check(cls, model: ModelConfig, config: Any) -> None:
        """Raises ValueError when the part cannot work in that network. The default accepts every network."""

    @classmethod
    def shapes(cls, model: ModelConfig, config: Any) -> Shapes | None:
        """The part's own parameters; None, the default: they are known when it is built. No answer is inherited."""
        return None


class MixerOutline(Outline):
    """That of a mixer."""

    Config: ClassVar[type[Config]] = MixerConfig
    has_distractor: ClassVar[bool] = False
    """Whether `distractor_loss` is defined."""

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float | None:
        """FLOPs that `forward` does for a token, two a multiply-add, when a query sees `keys` keys on average.

        Matrix products only, elementwise work left out, and nothing of q, k, v and the output projection, which surround
        every mixer. None, the default: unknown, and so is the network's MFU. No answer is inherited.
        """
        return None


class MemoryOutline(Outline):
    """That of a memory."""

    Config: ClassVar[type[Config]] = MemoryConfig

    @classmethod
    def unfit(cls, config: Any, tokens: int) -> str | None:
        """Why these settings make no sense in rows of so many tokens, with what to set; None, the default: they do."""
        return None

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any) -> float | None:
        """FLOPs that `forward` does for a token, its own projections included; the rest as for a mixer."""
        return None


def own(part: type[Outline], method: str, *arguments: Any) -> Any:
    """What the part itself answers; None when only a class above it does, which may have less than the part.

    `method`: the name of a class method of its own.
    """
    return getattr(part, method)(*arguments) if method in vars(part) else None


def attention_flops(model: ModelConfig, keys: float) -> float:
    """FLOPs a token of the scores of `keys` keys and of the values that they weigh, in every head."""
    return 4.0 * model.n_heads * model.head_dim * keys


class PositionOutline(Outline):
    """That of a position scheme."""

    Config: ClassVar[type[Config]] = PositionConfig

    @classmethod
    def longest(cls, model: ModelConfig, config: Any) -> int | None:
        """Tokens of the longest text that it has places for; None, the default: any text."""
        return None


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    """A projection, with its bias if it has one."""
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def gate(name: str, inputs: int, outputs: int) -> Shapes:
    """Gates that a mixer reads from its block's input."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.offset": (outputs,)}
