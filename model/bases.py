"""Base classes of mixers, memories and position schemes. One of your own is a subclass, registered under a name:

    @register_mixer("mean")
    class Mean(Mixer):
        def forward(self, q_BTHX, k_BTJX, v_BTJX, *, window):
            ...
            return y_BTHX

B batch, T length, H query heads, J KV heads (J divides H; head h uses KV head h // (H / J)), X head size, D model
width, R distractors: kernels/shapes.py has all letters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.shapes import query_block
from ..renamed import old_names
from .bounds import MAX_FLOAT
from .config import Config, Flag, Float, ModelConfig, knob
from .kv_cache import CacheCapacity

PreviousToken = Callable[[str], Tensor]
"""Name -> what was kept of the token before, [B, ...], zeros where there is none."""
MixerOutput = Tensor | tuple[Tensor, Tensor]
"""y [B, T, H, X], or (y, extra [B, T, D]) with a term that is added after the output projection."""


class MixerConfig(Config):
    """Settings that every mixer has; add fields with `knob`."""

    canon: Flag = knob(True, "Convolve q, k and v (Canon) before mixing.", identity=True)


class ScaledConfig(MixerConfig):
    """Settings of a mixer whose scores have a factor."""

    scale: Float | None = knob(
        None, "Factor of the scores; none is 1 / sqrt(head_dim).", identity=None, ge=-MAX_FLOAT, le=MAX_FLOAT
    )


class MemoryConfig(Config):
    """Settings of a memory; add fields with `knob`."""


class PositionConfig(Config):
    """Settings of a position scheme; add fields with `knob`."""


class Part(nn.Module):
    """A part of the network that a registry has by name.

    Its class methods say what is known before it is built; none of them may touch a tensor.
    """

    Config: ClassVar[type[Config]]
    config: Any

    def __init__(self, model: ModelConfig, config: Any) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def check(cls, model: ModelConfig, config: Any) -> None:
        """Raises ValueError when the part cannot work in that network. The default accepts every network."""

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Op -> implementation that `forward` takes for such tensors, for the record of a run."""
        return {}


def _no_forward(self: Mixer, *qkv: Tensor, window: int | None, **inputs: Tensor) -> MixerOutput:
    raise NotImplementedError(f"{type(self).__name__} defines no forward")


def _evaluate_at_once(self: Mixer, *qkv: Tensor, window: int | None, chunk: int, **inputs: Tensor) -> MixerOutput:
    mixed: MixerOutput = self.forward(*qkv, window=window, **inputs)
    return mixed


def _keys_and_values(self: Mixer, k_BTJX: Tensor, v_BTJX: Tensor, **inputs: Any) -> dict[str, Tensor]:
    return {"k": k_BTJX, "v": v_BTJX}


def _no_gates(self: Mixer | Memory, **inputs: Tensor) -> Tensor | None:
    return None


class Mixer(Part):
    """Core of a global layer, which mixes tokens. q, k, v come normed (q, k) and, with `canon`, convolved.

    Give own parameters their values in `__init__`: torch's random functions are seeded there from the cell's seed.
    """

    Config: ClassVar[type[Config]] = MixerConfig
    has_distractor: ClassVar[bool] = False
    """Whether `distractor_loss` is defined."""
    reads_input: ClassVar[bool] = False
    """Whether `forward` and `evaluate` also take `x_BTD`, the block's normed input, as a memory does: for gates of one's own."""

    layer: int = 0
    """The block it stands in, counted from 0; set after `__init__`."""

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float | None:
        """FLOPs that `forward` does for a token, two a multiply-add, when a query sees `keys` keys on average.

        Matrix products only, elementwise work left out, and nothing of q, k, v and the output projection, which surround
        every mixer. None, the default: unknown, and so is the network's MFU. No answer is inherited.
        """
        return None

    @property
    def norm_distractor_keys(self) -> bool:
        """Return true if distractor keys are RMS-normed like real ones, where these are (`qk_norm`)."""
        return True

    # These two are attributes, as torch's own `forward` is, because a mixer that reads its input takes one more argument.
    forward: Callable[..., MixerOutput] = _no_forward
    """forward(q_BTHX, k_BTJX, v_BTJX, *, window) -> Mixed, with `x_BTD` as well if `reads_input`.

    Query i may see the keys i - window < j <= i, all up to i when `window` is None; never a later one.
    """
    evaluate: Callable[..., MixerOutput] = _evaluate_at_once
    """evaluate(q_BTHX, k_BTJX, v_BTJX, *, window, chunk) -> Mixed, with `x_BTD` as well if `reads_input`: `forward` for
    evaluation, which works through `chunk` tokens at a time. The default is `forward` itself.

    Define it for a mixer whose `forward` needs much more memory than its inputs, such as T x T scores.
    """

    log_gates: Callable[..., Tensor | None] = _no_gates
    """log_gates(k_BTJX=..., with `x_BTD` as well if `reads_input`) -> what each token keeps of what lies before it, in natural
    logs: [B, T, P], or [B, T, P, X] where every channel of a head has its own. None, as by default: no gates. For probes."""

    step: Callable[..., MixerOutput] | None = None
    """step(q_BHX, kept) -> what `forward` gives at the last token of each text, [B, H, X] or with [B, D]; with `x_BD` as well if
    `reads_input`. `kept` (kv_cache.py) has what `keep` returned for every token. None: texts are worked out anew for each token
    that is written. The answer of a class above is not taken for that of a class below it."""
    is_capturable: ClassVar[bool] = True
    """Whether `step` asks the device for no number, so that it can be captured as a CUDA graph; only asked of the package's own."""
    keep: Callable[..., dict[str, Tensor]] = _keys_and_values
    """keep(k_BTJX, v_BTJX, *, places_BT, before) -> name -> what `step` needs of these tokens, [B, T, ...]; with `x_BTD` as well if
    `reads_input`. `places` int64 counts from 0; `before`, None at a text's start, says what was kept of the token before the
    first. The default are keys and values."""

    def distractor_loss(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, k_r_BRJX: Tensor, v_r_BRJX: Tensor, y_BTHX: Tensor, *,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Scalar: how much R detached random keys and values draw attention away. `y` is what `forward` returned."""
        raise NotImplementedError(f"{type(self).__name__} defines no distractor loss")


class QueryBlockMixer(Mixer):
    """A mixer whose `forward` also takes `block`, the number of queries that it scores at a time."""

    def evaluate(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, chunk: int, **inputs: Tensor
    ) -> MixerOutput:
        """`forward` with as many queries at a time as keep the scores within what a chunk may hold."""
        block = query_block(chunk, *q_BTHX.shape[:2])
        mixed: MixerOutput = self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, block=block, **inputs)
        return mixed


def attention_flops(model: ModelConfig, keys: float) -> float:
    """FLOPs a token of the scores of `keys` keys and of the values that they weigh, in every head."""
    return 4.0 * model.n_heads * model.head_dim * keys


class Memory(Part):
    """A causal branch over the mixer's q, k and v whose output is added after the output projection."""

    Config: ClassVar[type[Config]] = MemoryConfig

    @classmethod
    def unfit(cls, config: Any, tokens: int) -> str | None:
        """Say why these settings make no sense in rows of so many tokens, and what to set; None, the default: they do."""
        return None

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any) -> float | None:
        """FLOPs that `forward` does for a token, its own projections included; the rest as for a mixer."""
        return None

    def forward(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> Tensor:
        """[B, T, D] to add. x is the block's normed input; q, k, v are the mixer's, before any rotation."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    log_gates: Callable[..., Tensor | None] = _no_gates
    """log_gates(x_BTD=...) -> what each token keeps of the memory, in natural logs, as a mixer's."""

    def evaluate(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> Tensor:
        """`forward` for evaluation, which works through `chunk` tokens at a time. The default is `forward` itself."""
        return self.forward(x_BTD, q_BTHX, k_BTJX, v_BTJX)

    is_capturable: ClassVar[bool] = True
    """Whether `step` asks the device for no number, so that it can be captured as a CUDA graph."""
    step: Callable[..., Tensor] | None = None
    """step(x_BD, q_BHX, k_BJX, v_BJX, states, slots_B) -> [B, D], what `forward` gives at the next token of the texts in these
    slots, whose states it changes in place. None: texts are worked out anew for each token that is written."""

    def open(self, capacity: CacheCapacity) -> Any:
        """Empty states for `step`."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def join(self) -> None:
        """Lays matrices that read the same one below the other, for `step`, where that spares products; by default none.

        Every matrix is in the type that it is used in.
        """

    def begin(
        self, x_1TD: Tensor, q_1THX: Tensor, k_1TJX: Tensor, v_1TJX: Tensor, states: Any, slot: int, *, chunk: int
    ) -> Tensor:
        """`evaluate` of one text from its start, whose last state is put into its slot."""
        raise NotImplementedError(f"{type(self).__name__} has no step")


class EmbeddingTable(nn.Embedding):
    """Learned vectors, one for each of `rows` places, that start normal with the deviation `std`."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__(rows, width, _weight=torch.empty(rows, width))
        self.std = std


class Position(Part):
    """A vector for each place of a text, added to the embedding before the first block.

    Its matrices are learned as the embedding is, in the embedding's type.
    """

    Config: ClassVar[type[Config]] = PositionConfig

    @classmethod
    def longest(cls, model: ModelConfig, config: Any) -> int | None:
        """Tokens of the longest text that it has places for; None, the default: any text."""
        return None

    def places(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Return the argument of `forward`, int64 [rows or 1, length], on the generator's device.

        All chance belongs here, drawn from `generator`: in training anew at each micro-batch, in evaluation the same for all
        texts of one length. The default are 0, 1, 2, ...
        """
        return torch.arange(length, device=generator.device)[None]

    @property
    def steady(self) -> bool:
        """Return true if a token keeps its place however long its text becomes, so that a text can be written token by token."""
        return type(self).places is Position.places

    def forward(self, positions_BT: Tensor) -> Tensor:
        """[B, T, D] to add; B may be 1."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
