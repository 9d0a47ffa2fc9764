"""Base classes of mixers, block parts, memories and position schemes.

A part of your own is a subclass, registered under a name:

    @register_mixer("mean")
    class Mean(Mixer):
        def forward(self, q_BTHX, k_BTJX, v_BTJX, *, window):
            ...
            return y_BTHX

Letters of shapes: B batch, T length, H query heads, J KV heads (J divides H; head h uses KV head h // (H / J)), X head
size, D model width, R distractors; kernels/shapes.py lists all.
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
"""Function from a cache name to the entry stored for the previous token, [B, ...]; zeros where there is none."""
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


class BlockConfig(Config):
    """Settings of a block part; add fields with `knob`."""


class MemoryConfig(Config):
    """Settings of a memory; add fields with `knob`."""


class PositionConfig(Config):
    """Settings of a position scheme; add fields with `knob`."""


class Part(nn.Module):
    """Part of the network that a registry knows by name: a mixer, memory or position scheme.

    Its class methods are called before it is built, to plan; none of them may touch a tensor.
    """

    Config: ClassVar[type[Config]]
    config: Any

    def __init__(self, model: ModelConfig, config: Any) -> None:
        """Store the validated settings `config`; subclasses create their parameters for the network `model`."""
        super().__init__()
        self.config = config

    @classmethod
    def check(cls, model: ModelConfig, config: Any) -> None:
        """Raise ValueError if the part cannot work in that network; its text is shown to the user.

        The default accepts every network.

        Args:
            model: network.
            config: validated settings of the part.
        """

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return op name -> description of the implementation that `forward` uses on that device and dtype.

        For provenance. Descriptions read "backend (reason)", such as "triton (Triton 3.5.1)". The default, an empty
        dict, reports nothing.
        """
        return {}


def _no_forward(self: Mixer, *qkv: Tensor, window: int | None, **inputs: Tensor) -> MixerOutput:
    """Raise NotImplementedError: the default `Mixer.forward`."""
    raise NotImplementedError(f"{type(self).__name__} defines no forward")


def _evaluate_at_once(self: Mixer, *qkv: Tensor, window: int | None, chunk: int, **inputs: Tensor) -> MixerOutput:
    """Return `forward` of whole sequences, ignoring `chunk`: the default `Mixer.evaluate`."""
    mixed: MixerOutput = self.forward(*qkv, window=window, **inputs)
    return mixed


def _keys_and_values(self: Mixer, k_BTJX: Tensor, v_BTJX: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Return keys and values as "k" and "v", unchanged: the default `Mixer.keep`."""
    return {"k": k_BTJX, "v": v_BTJX}


def _no_gates(self: Mixer | Memory, **inputs: Tensor) -> Tensor | None:
    return None


class Mixer(Part):
    """Core of a global layer: mixes information across tokens, given q, k and v.

    q and k come RMS-normed per head (with `qk_norm`), and with `canon` q, k and v come convolved; none is rotated. Give
    own parameters their initial values in `__init__`: torch's global random functions are seeded there from the cell's
    seed. Parameters inside `Linear`, `CausalConv`, `RMSNorm` or embeddings are initialised later by
    `Backbone.init_weights`, which overwrites them.
    """

    Config: ClassVar[type[Config]] = MixerConfig
    is_block: ClassVar[bool] = False
    has_distractor: ClassVar[bool] = False
    """True if `distractor_loss` is defined."""
    reads_input: ClassVar[bool] = False
    """True if `forward`, `evaluate`, `step` and `keep` also take the block's normed input, as `x_BTD` (`step`: `x_BD`).

    Mixers with gates of their own need it.
    """

    layer: int = 0
    """Index of the mixer's block among all blocks, counted from 0; set after `__init__`."""

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float | None:
        """Return FLOPs per token of `forward` in one layer, two per multiply-add, at `keys` keys per query.

        Counts matrix products only, without elementwise work and without the q, k, v and output projections around
        every mixer. None, the default, means unknown, and the network's MFU (model FLOPs utilisation) is then unknown
        too. Subclasses do not inherit it: a class that does not define the method itself counts as unknown.

        Args:
            model: network.
            config: settings of the mixer.
            keys: keys that a query sees on average, causal mask and window considered.
        """
        return None

    @property
    def norm_distractor_keys(self) -> bool:
        """True if distractor keys are RMS-normed like real ones (where real ones are, with `qk_norm`)."""
        return True

    # Declared as attributes, like torch's own `forward`, because a mixer with `reads_input` takes one more argument.
    forward: Callable[..., MixerOutput] = _no_forward
    """`forward(q_BTHX, k_BTJX, v_BTJX, *, window) -> MixerOutput`; also takes `x_BTD` if `reads_input`.

    Query i may use keys i - window < j <= i, or all keys j <= i when `window` is None; never a later one.
    """
    evaluate: Callable[..., MixerOutput] = _evaluate_at_once
    """`evaluate(q_BTHX, k_BTJX, v_BTJX, *, window, chunk) -> MixerOutput`; also takes `x_BTD` if `reads_input`.

    Computes `forward` for whole sequences without gradients, with memory for about `chunk` tokens at a time. The
    default is `forward` itself. Define it for a mixer whose `forward` needs much more memory than its inputs, such as T
    x T scores.
    """

    log_gates: Callable[..., Tensor | None] = _no_gates
    """log_gates(k_BTJX=..., also x_BTD=... if `reads_input`) -> natural logarithm of each token's gate, for probes.

    A gate is the fraction that a token keeps of earlier ones. Shape [B, T, P], or [B, T, P, X] with one gate per
    channel; P heads have gates. None, the default: the mixer has no gates.
    """

    step: Callable[..., MixerOutput] | None = None
    """step(q_BHX, cache) -> output of `forward` at each sequence's last token: [B, H, X], or a tuple with [B, D].

    Also takes `x_BD` if `reads_input`. `q_BHX` are the new tokens' queries, normed and convolved like those of
    `forward`. `cache` is a `KVView` with what `keep` returned for every token, the new one included. None: the whole
    sequence is recomputed for each new token. A subclass that overrides `forward` does not inherit it.
    """
    is_capturable: ClassVar[bool] = True
    """True if `step` never copies from the device to the host, so that a CUDA graph can capture it.

    It is read for this package's own mixers only.
    """
    keep: Callable[..., dict[str, Tensor]] = _keys_and_values
    """`keep(k_BTJX, v_BTJX, *, places_BT, before)` -> name -> tensor [B, T, ...] to cache per token for `step`.

    Also takes `x_BTD` if `reads_input`. `places_BT` are positions, int64, counted from 0. `before` is a `PreviousToken`
    for the token before the first one, None at a sequence's start. Called for consecutive pieces of a sequence
    (prefill) and with T = 1 for each decoding step. Tensors are stored in their own type; of a name that `open` has a table for, only the last
    token's. The default caches keys and values as "k" and "v".
    """

    def entry_spans(self, dtype: torch.dtype) -> dict[str, int]:
        """Return name -> number of consecutive tokens, from a sequence's start on, with equal entries in the cache.

        The cache then stores one entry for them, or one for each part of them that lies in a page of its own. Names
        that are missing, all by default, have an entry per token.

        Args:
            dtype: type of activations, keys and values.
        """
        return {}

    def no_fp8_reason(self) -> str | None:
        """Return the reason why the mixer has no 8-bit cache (`quantize`); None if it has one. The default has none."""
        return "its keys and values are cached in the activations' type only"

    def quantize(
        self, entries: dict[str, Tensor], *, positions_BT: Tensor, before: PreviousToken | None
    ) -> dict[str, Tensor]:
        """Return the entries of an 8-bit cache, "k_shift" among them, from those of `keep`; defined where there is one.

        Args:
            entries: result of `keep`.
            positions_BT: positions of the tokens.
            before: cached entries of the token before the first one; None at a sequence's start.
        """
        raise NotImplementedError(f"{type(self).__name__} has no 8-bit cache")

    def open(self, capacity: CacheCapacity) -> dict[str, Tensor]:
        """Allocate the state that `step` keeps per sequence, by name: tables of `CacheCapacity.table`.

        The default has none: what a mixer caches per token suffices.
        """
        return {}

    def begin(self, k_BTJX: Tensor, v_BTJX: Tensor) -> dict[str, Tensor]:
        """Return the state after whole sequences, [B, ...] by name as in `open`, to be stored before the first `step`.

        Args:
            k_BTJX: keys of all tokens.
            v_BTJX: values of all tokens.
        """
        return {}

    def distractor_loss(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, k_r_BRJX: Tensor, v_r_BRJX: Tensor, y_BTHX: Tensor, *,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Return a scalar loss that measures how much attention random keys draw away from the real ones.

        Not weighted yet. Defined only if `has_distractor`. q, k and v are those that `forward` takes.

        Args:
            q_BTHX: queries.
            k_BTJX: real keys.
            v_BTJX: real values.
            k_r_BRJX: R random keys, detached, visible to every query.
            v_r_BRJX: R random values, detached.
            y_BTHX: first result of `forward` for the same q, k and v.
            window: number of most recent real keys that a query sees; None: all earlier ones.

        Raises:
            NotImplementedError: the mixer has no such loss (the default).
        """
        raise NotImplementedError(f"{type(self).__name__} defines no distractor loss")


class QueryBlockMixer(Mixer):
    """Mixer whose `forward` also takes `block`, the number of queries to score at a time; `evaluate` chooses it."""

    def evaluate(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, chunk: int, **inputs: Tensor
    ) -> MixerOutput:
        """Return the output of `forward`, with as many queries scored at a time as memory for `chunk` tokens allows.

        One call of `forward` over whole sequences; only its scores are limited.

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            chunk: tokens that the caller processes at a time; bounds the scores held in memory (`query_block`).
            **inputs: `x_BTD` if the mixer reads the block's input.
        """
        block = query_block(chunk, *q_BTHX.shape[:2])
        mixed: MixerOutput = self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, block=block, **inputs)
        return mixed


def attention_flops(model: ModelConfig, keys: float) -> float:
    """Return forward FLOPs per token of scoring `keys` keys and averaging their values, over all heads of one layer.

    Two FLOPs per multiply-add: 4 H X keys.
    """
    return 4.0 * model.n_heads * model.head_dim * keys


BlockState = dict[str, Tensor]
"""State of a block part after a token, by name: tensors [B, ...], one row per sequence."""


class BlockPart(Part):
    """Mixer of a global layer in one piece: hidden states in, hidden states out, with projections of its own.

    The second kind of mixer: registered by `register_mixer` too, and chosen by `attn_type`. It gets the normed residual
    stream, and its output is added to the stream. Initial values follow the rules of `Mixer`. The network's heads,
    `canon`, `qk_norm` and `output_gate` do not concern it; memory, window and distractor loss need a `Mixer`.
    """

    Config: ClassVar[type[Config]] = BlockConfig
    is_block: ClassVar[bool] = True
    """True for a block part, which reads and returns hidden states; False for a mixer of q, k and v."""
    has_distractor: ClassVar[bool] = False
    """False: a block part has no keys beside which random ones could be put."""
    layer: int = 0
    """Index of the part's block among all blocks, counted from 0; set after `__init__`."""
    is_compilable: ClassVar[bool] = True
    """True if torch.compile makes one graph of `forward`; the blocks of any other part run eagerly."""
    is_capturable: ClassVar[bool] = True
    """True if `step` never copies from the device to the host; read for this package's own parts only."""

    def __init__(self, model: ModelConfig, config: Any) -> None:
        """Store the validated settings and the width of the network; subclasses create their parameters."""
        super().__init__(model, config)
        self.width = model.d_model

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float | None:
        """Return FLOPs per token of `forward` in one layer, two per multiply-add, own projections included.

        None, the default, means unknown. Subclasses do not inherit it: a class that does not define the method itself
        counts as unknown.

        Args:
            model: network.
            config: settings of the part.
            keys: tokens up to the current one, its own included, on average over a row.
        """
        return None

    def refusal(self, device: torch.device) -> str | None:
        """Return a sentence that says why the part cannot run on that device, and what to do; None if it can."""
        return None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output [B, T, D] for whole sequences: that of token t depends on tokens 0 to t alone."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def evaluate(self, x_BTD: Tensor, *, chunk: int) -> Tensor:
        """Return the output of `forward` without gradients, with memory for about `chunk` tokens at a time.

        The default calls `forward` once.
        """
        return self.forward(x_BTD)

    step: Callable[..., tuple[Tensor, BlockState]] | None = None
    """`step(x_BD, state) -> (output [B, D] of each sequence's next token, state after it)`.

    `state` is that of `empty_state`, or of the last call, and must not be changed in place. None: the whole sequence is
    recomputed for each new token. A subclass that overrides `forward` does not inherit it.
    """

    def empty_state(self, x_BD: Tensor) -> BlockState:
        """Return the state before the first token, for as many sequences, and on the device, of `x_BD`.

        Its shapes do not depend on the sequences' lengths. Needed for `step`; the default raises NotImplementedError.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def prefill(self, x_1TD: Tensor, *, chunk: int) -> tuple[Tensor, BlockState]:
        """Return the output [1, T, D] of one new sequence and its state after the last token.

        The default takes one `step` per token; define it where `forward` is faster and leaves a state.
        """
        assert self.step is not None
        state, outputs = self.empty_state(x_1TD[:, 0]), []
        for x_1D in x_1TD.unbind(1):
            y_1D, state = _checked_step(self, self.step(x_1D, state), state)
            outputs.append(y_1D)
        return torch.stack(outputs, 1), state

    def open(self, capacity: CacheCapacity) -> Any:
        """Allocate empty states for every slot of a cache of that capacity: name -> [slots + 1, ...]."""
        rows = torch.zeros(capacity.rows, self.width, dtype=capacity.dtype, device=capacity.device)
        state = self.empty_state(rows)
        for name, table in state.items():
            if len(table) != len(rows) or table.device != rows.device:
                raise ValueError(
                    f"{type(self).__name__}.empty_state returned {name!r} of shape {tuple(table.shape)} on "
                    f"{table.device} for {len(rows)} sequences on {rows.device}; return a row per sequence, on x's device"
                )
        return {name: table.clone() for name, table in state.items()}

    def begin(self, x_1TD: Tensor, states: Any, slots_1: Tensor, *, chunk: int) -> Tensor:
        """Prefill: return the output [1, T, D] of one new sequence; store its state in `states` at its slot.

        Args:
            x_1TD: the block's normed input, from the first token on.
            states: from `open`.
            slots_1: int64 [1], slot of the sequence.
            chunk: tokens processed at a time.
        """
        y_1TD, state = self.prefill(x_1TD, chunk=chunk)
        _store_rows(states, slots_1, state)
        return y_1TD

    def decode(self, x_BD: Tensor, states: Any, slots_B: Tensor) -> Tensor:
        """Return the output [B, D] of each sequence's next token; updates `states` in place at the given slots."""
        assert self.step is not None
        before = {name: table[slots_B] for name, table in states.items()}
        y_BD, state = _checked_step(self, self.step(x_BD, before), before)
        _store_rows(states, slots_B, state)
        return y_BD


def _checked_step(part: BlockPart, result: Any, before: BlockState) -> tuple[Tensor, BlockState]:
    """Return the result of a block part's `step`, (output, state).

    Raises:
        ValueError: it is not a pair, or its state has other names or shapes than the state before it.
    """
    y_BD, state = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    shapes = {name: tuple(table.shape) for name, table in before.items()}
    returned = {name: tuple(table.shape) for name, table in state.items()} if isinstance(state, dict) else None
    if not isinstance(state, dict) or returned != shapes:
        raise ValueError(
            f"{type(part).__name__}.step returned {f'state {returned}' if returned else 'no state'}; return the output "
            f"and a dict like that of empty_state: {shapes}"
        )
    return y_BD, state


def _store_rows(tables: dict[str, Tensor], slots_B: Tensor, state: BlockState) -> None:
    """Write the state of each sequence to its slot's row of the tables, in place."""
    for name, table in tables.items():
        table.index_copy_(0, slots_B, state[name].to(table.dtype))


class Memory(Part):
    """Recurrent branch that reads the mixer's q, k and v causally; its output is added after the output projection.

    Its state starts empty with each sequence and knows no window.
    """

    Config: ClassVar[type[Config]] = MemoryConfig

    @classmethod
    def unfit(cls, config: Any, tokens: int) -> str | None:
        """Return a text that says why a memory's settings are useless for sequences of `tokens` tokens.

        It also says what to set, and is shown to the user. None, the default, means that they are fine.
        """
        return None

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any) -> float | None:
        """Return a memory's FLOPs per token of `forward` in one layer, two per multiply-add.

        Own projections are included, as only matrix products are. None, the default, means unknown. Subclasses do not
        inherit it: a class that does not define the method itself counts as unknown.
        """
        return None

    def forward(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> Tensor:
        """Return the term [B, T, D] to add to the attention layer's output, for whole sequences from an empty state.

        q, k and v are normed and convolved like the mixer's, without rotation.

        Args:
            x_BTD: the block's normed input.
            q_BTHX: the mixer's queries, before any rotation.
            k_BTJX: the mixer's keys, before any rotation; J may be smaller than H.
            v_BTJX: the mixer's values.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    log_gates: Callable[..., Tensor | None] = _no_gates
    """log_gates(x_BTD=...) -> natural logarithm of the fraction of the memory that each token keeps.

    Shapes are those of a mixer's `log_gates`.
    """

    def evaluate(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> Tensor:
        """Return the result of `forward`, computed `chunk` tokens at a time. The default calls `forward` once."""
        return self.forward(x_BTD, q_BTHX, k_BTJX, v_BTJX)

    is_capturable: ClassVar[bool] = True
    """True if `step` never copies from the device to the host, so that a CUDA graph can capture it.

    It is read for this package's own memories only.
    """
    step: Callable[..., Tensor] | None = None
    """step(x_BD, q_BHX, k_BJX, v_BJX, states, slots_B) -> output [B, D] of `forward` at each sequence's next token.

    Updates `states` in place at the given slots. None: the whole sequence is recomputed for each new token.
    """

    def open(self, capacity: CacheCapacity) -> Any:
        """Allocate empty states for a memory's `step`, for every slot of a cache of that capacity.

        The format is the memory's own. The default raises NotImplementedError.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def join(self) -> None:
        """Concatenate matrices that read the same input, so that `step` needs fewer products. The default does nothing.

        Every matrix must already be in the type that it is used in.
        """

    def begin(
        self, x_1TD: Tensor, q_1THX: Tensor, k_1TJX: Tensor, v_1TJX: Tensor, states: Any, slot: int, *, chunk: int
    ) -> Tensor:
        """Prefill: return the output of `evaluate` for one new sequence; store its final state in `states`.

        The default raises NotImplementedError.

        Args:
            x_1TD: the block's normed input, from the first token on.
            q_1THX: the mixer's queries.
            k_1TJX: the mixer's keys.
            v_1TJX: the mixer's values.
            states: from `open`; what they hold for the slot is replaced.
            slot: slot of the sequence.
            chunk: tokens processed at a time.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")


class EmbeddingTable(nn.Embedding):
    """Learned vectors for `rows` positions, [rows, width].

    Undefined until `Backbone.init_weights` draws them from a normal distribution with standard deviation `std`.
    """

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__(rows, width, _weight=torch.empty(rows, width))
        self.std = std


class Position(Part):
    """Position scheme: a vector per position, added to the embedding before the first block.

    Its matrices are learned like the embedding, in the embedding's type; put them in `EmbeddingTable`.
    """

    Config: ClassVar[type[Config]] = PositionConfig

    @classmethod
    def longest(cls, model: ModelConfig, config: Any) -> int | None:
        """Return the number of tokens of the longest sequence that the position scheme supports.

        None, the default: no limit.
        """
        return None

    def places(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Return the positions that `forward` takes, int64 [rows or 1, length], on the generator's device.

        All randomness belongs here, drawn from `generator`: a new draw per micro-batch in training, one fixed draw per
        length in evaluation (there with `rows` 1). The default is 0, 1, 2, ... with one row, without a draw.

        Args:
            rows: sequences of the batch.
            length: tokens per sequence.
            generator: random stream of the draw.
        """
        return torch.arange(length, device=generator.device)[None]

    @property
    def steady(self) -> bool:
        """True if a token keeps its position when its sequence grows, as decoding token by token requires.

        By default: if the class does not override `places`.
        """
        return type(self).places is Position.places

    def forward(self, positions_BT: Tensor) -> Tensor:
        """Return the vectors [B, T, D] of positions int64 [B, T]; B may be 1."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
