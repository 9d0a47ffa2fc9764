"""The whole network: embedding, blocks, final norm and head; training losses, decoding and initialisation.

Source: docs/reference/mechanisms.md, "Backbone".
Letters of shapes: B batch, T length, D model width, V vocabulary, R distractors, L layers, K sketch directions, N = B *
T; kernels/shapes.py lists all.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..kernels.cross_entropy import op as cross_entropy
from ..kernels.cross_entropy.op import CHUNK, linear_cross_entropy, linear_cross_entropy_sum, softcap
from ..kernels.dispatch import BackendChoice, version
from ..kernels.fp8 import op as fp8_linear
from ..kernels.fp8 import rows as fp8_rows
from ..kernels.row_linear.op import choose_backend
from ..kernels.sketch import op as sketch
from . import registry
from .attention import Attention, LayerState
from .bases import EmbeddingTable, Mixer, Position
from .block import Block, DropoutMasks
from .compilation import compile_full_graph
from .config import ModelConfig
from .kv_cache import CacheCapacity, DecodeStep, PageTables
from .layers import CausalConv, Linear, RMSNorm, RowDecoder, TiedHead, fused_rows, map_chunks
from .resolve import (
    NO_POSITIONS,
    NO_REGULARIZER,
    check_model_config,
    check_regularizer,
    has_distractor,
    longest_text,
    position_settings,
)
from .rng import derive_seed, rng_stream


class StepFunctions(NamedTuple):
    """The three functions of one decoding step, compiled one by one; `EAGER` holds the uncompiled ones."""

    first: Callable[..., tuple[Tensor, Tensor | None, DecodeStep]]
    """(model, tokens_B, page_tables, slots_B, window) -> (stream [B, D], second summand [B, D] or None, DecodeStep)."""
    block: Callable[..., tuple[Tensor, Tensor | None]]
    """Arguments and result of `Block.step`, the block first."""
    last: Callable[..., Tensor]
    """(model, stream [B, D], second summand or None) -> logits [B, V]."""


@dataclass(frozen=True)
class AuxiliaryTerms:
    """Auxiliary loss terms to compute in a training forward pass, and the keys of its random draws.

    The keys (seed, step, micro) also select random positions and dropout masks, which need no auxiliary loss.
    """

    regularizer: str
    """Name of a regularizer of the residual stream (model/regularizers.py), or "baseline" for none."""
    sketch: int
    """Number K of random directions that the regularizer projects the stream on; unused for "baseline"."""
    distractor: bool
    """True to compute the distractor loss: how far random keys change what queries read (`Mixer.distractor_loss`)."""
    distractor_count: int | None
    """Random keys R per sequence; None means as many as the sequence has tokens. Unused without `distractor`."""
    seed: int
    """Seed of the cell."""
    step: int
    """Optimizer step, counted from 0."""
    micro: int
    """Micro-batch within the step, counted from 0."""


@dataclass
class Features:
    """Hidden states and auxiliary losses of a forward pass; losses that were not requested are None."""

    hidden_BTD: Tensor
    """The residual stream after the final norm, in the activations' type."""
    regularizer: Tensor | None = None
    """Scalar, mean over all blocks, not yet weighted."""
    distractor: Tensor | None = None
    """Scalar, mean over global layers, not yet weighted."""


@dataclass
class RandomDraws:
    """Random tensors of one training forward pass, drawn by `Backbone.draw`; unused ones are None or empty."""

    regularizer: Callable[..., Tensor] | None = None
    """Regularizer function (streams, sketches) -> values [L] (model/regularizers.py); None for none."""
    sketches_LKD: Tensor | None = None
    """Directions of the regularizer's sketch, N(0, 1), float32, [layers, K, D]."""
    distractors: dict[int, Tensor] = field(default_factory=dict)
    """Distractor inputs [B, R, D], N(0, 1) in the activations' type, by 0-based index of a global layer."""
    dropout_masks: dict[int, DropoutMasks] = field(default_factory=dict)
    """Masks of a block's two branches (mixing, MLP) by 0-based block; empty without dropout."""
    positions_BT: Tensor | None = None
    """Positions of the tokens, int64 [B or 1, T]; None for a network without a position scheme."""

    def tensors(self) -> list[Tensor]:
        """Return all drawn tensors, not copies, in an order that depends only on the network and its auxiliary terms.

        Absent draws are left out. Order: sketches, positions, distractors by layer, then per block the mask of the
        mixing branch and that of the MLP.
        """
        optional = [tensor for tensor in (self.sketches_LKD, self.positions_BT) if tensor is not None]
        return [*optional, *self.distractors.values(), *(mask for pair in self.dropout_masks.values() for mask in pair)]

    def copy(self) -> RandomDraws:
        """Return a copy whose tensors are clones, so that drawing anew into the original leaves it unchanged.

        Sketches and positions become contiguous, also where the original is a broadcast view. The regularizer function
        is shared.
        """

        def clone_or_none(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)

        distractors = {layer: drawn.clone() for layer, drawn in self.distractors.items()}
        dropout_masks = {layer: (mix.clone(), mlp.clone()) for layer, (mix, mlp) in self.dropout_masks.items()}
        return RandomDraws(
            self.regularizer,
            clone_or_none(self.sketches_LKD),
            distractors,
            dropout_masks,
            clone_or_none(self.positions_BT),
        )


class Backbone(nn.Module):
    """The network: embedding, blocks, final norm and head.

    Activations have type `dtype`. So have the embedding and the position scheme's tables, unless the head is tied to
    the embedding (tables then still have it), or `embedding_dtype: float32` is set. All other weights are float32 and
    are cast at each use. With float64 everything is float64. With float16 embedding and tables stay float32, because
    squares of their gradients would leave the range of float16.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> None:
        """Build the network on the CPU with undefined weights; `init_weights` fills them (`build` does both).

        A mixer's or memory's own parameters get their values here, from torch's global random generator.

        Args:
            config: the network; settings of mixers, memories and position schemes that are not chosen are dropped.
            dtype: type of the activations.

        Raises:
            ModelConfigError: a part's name or setting is unknown or invalid, or the part rejects the network.
        """
        super().__init__()
        self.config = config = check_model_config(config)
        self.embedding = nn.Embedding(
            config.vocab_size, config.d_model, _weight=torch.empty(config.vocab_size, config.d_model)
        )
        blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.blocks = cast("list[Block]", blocks)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        tied, bias = config.tie_head, config.bias and config.head_bias
        self.head = (
            TiedHead(config.vocab_size, bias=bias)
            if tied
            else Linear(config.d_model, config.vocab_size, bias=bias, zero=True)
        )
        self.positions: Position | None = None
        if config.positions != NO_POSITIONS:
            self.positions = registry.POSITIONS.load(config.positions)(config, position_settings(config))
        self.row_decoder = (
            RowDecoder(config.d_model, bias=config.bias, eps=config.norm_eps) if config.decoder == "row" else None
        )
        self._max_tokens = longest_text(config)
        self._cap = math.inf if config.logit_cap == "none" else float(config.logit_cap)
        self._forward_blocks: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = self._blocks
        self._forward_block: Callable[..., tuple[Tensor, Tensor | None]] = _run_block
        self._forward_end: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = _finish_forward
        self._compiler: str | None = None
        self._recomputed: range = range(0)
        self._has_fused_weights = False
        self.to(torch.float64 if dtype == torch.float64 else torch.float32)
        self._fp8: BackendChoice | None = None
        self._float32_embedding = config.embedding_dtype == "float32" or dtype == torch.float16
        if not tied and not self._float32_embedding:  # a tied matrix stays float32, as a head's is
            self.embedding.to(dtype)
        if self.positions is not None and not self._float32_embedding:
            self.positions.to(dtype)
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the activations."""
        return self._dtype if self.config.tie_head or self._float32_embedding else self.embedding.weight.dtype

    @property
    def precision(self) -> str:
        """Data type of the activations: "bfloat16", "float16", "float32" or "float64".

        After `use_fp8` ", fp8 projections" follows.
        """
        name = str(self.dtype).removeprefix("torch.")
        return name if self._fp8 is None else f"{name}, fp8 projections"

    def use_fp8(self) -> BackendChoice:
        """Switch the projections of mixing branches and MLPs to 8-bit products, for training and evaluation.

        Switched are q, k, v and output projections, those of gated convolutions, and both of each MLP. Head, memory and
        the mixer's own parameters keep the activations' type. Call it once the network is on its device. On a device
        without 8-bit products they are emulated by torch; nothing is raised.

        Returns:
            (backend, reason): the implementation of these products, "scaled_mm" or "torch", and why it was chosen.
        """
        self._fp8 = fp8_linear.choose_backend(self.device)
        for block in self.blocks:
            for linear in (*block.mix.projections(), block.mlp.fc, block.mlp.proj):
                linear.fp8 = self._fp8.backend
        return self._fp8

    def recompute_blocks(self, every: int) -> None:
        """Store only the inputs of some blocks in training, and compute them a second time in the backward pass.

        Blocks 0, `every`, 2 `every`, ... (0-based) are recomputed; 1 stands for all. Random numbers are drawn outside,
        so gradients are the same bits. Call it before `compile_blocks`, which then compiles block by block, because a
        compiled graph is recomputed as a unit.
        """
        self._recomputed = range(0, len(self.blocks), every)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.embedding.weight.device

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialise every parameter of the known layers in place, each from a random stream of (seed, parameter name).

        Known are `Linear`, `CausalConv`, `RMSNorm`, `TiedHead` and embeddings, also where mixers, memories and position
        schemes contain them. Two networks therefore share the values of every such parameter whose name, shape and
        `init` they share. Other parameters, such as a mixer's scalars and gates, keep the values that their constructor
        gave them.
        """
        for path, module in self.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                _init_parameter(module, parameter, rng_stream(seed, "init", name), self.config)
        if self.config.init == "llama" and isinstance(self.head, Linear):
            self.head.weight.copy_(
                HEAD_STD * _standard_normal(self.head.weight, rng_stream(seed, "init", "head.weight"))
            )
            if self.head.bias is not None:
                self.head.bias.zero_()

    @torch.no_grad()
    def _evaluation_positions(self, length: int) -> Tensor | None:
        """Return the positions int64 [1, length] of an evaluation; None if the network has no position scheme.

        Random schemes use one fixed draw per length, the same for every row, seed and machine.
        """
        if self.positions is None:
            return None
        return self.positions.places(1, length, rng_stream(0, "places of an evaluation", length)).to(self.device)

    def features(
        self, tokens_BT: Tensor, *, full_context: bool = False, auxiliary: AuxiliaryTerms | RandomDraws | None = None,
        chunk: int | None = None,
    ) -> Features:  # fmt: skip
        """Run the network up to the final norm; return hidden states and the requested auxiliary losses.

        Args:
            tokens_BT: int64 [B, T].
            full_context: ignore the config's attention window, if it has one. By default the window applies in
                evaluation too.
            auxiliary: auxiliary losses to compute, with the keys of their random draws, or the draws themselves
                (`draw`). Dropout and random positions of training come with either. None: a forward pass without losses
                and dropout, even in training mode, with the fixed positions of evaluations.
            chunk: process about this many tokens (over all rows) at a time to save memory; for evaluation without
                gradients, never compiled. Results differ by rounding only. None: all at once.

        Raises:
            ValueError: tokens of another shape or beyond the position scheme's length, chunk below 1 or combined with
                `auxiliary`, a distractor loss that the network does not have, or a regularizer on fewer than 2 tokens.
            ModelConfigError: unknown regularizer.
        """
        if tokens_BT.ndim != 2:
            raise ValueError(f"tokens must be [B, T], got shape {tuple(tokens_BT.shape)}")
        rows, length = tokens_BT.shape
        if self._max_tokens is not None and length > self._max_tokens:
            raise ValueError(
                f"position scheme {self.config.positions} supports at most {self._max_tokens} tokens, got {length}"
            )
        window = self.config.window_size if self.config.window and not full_context else None
        if chunk is not None:
            if auxiliary is not None:
                raise ValueError("auxiliary terms cannot be computed in chunks; pass either chunk or auxiliary")
            embedded_BTD = self._embed(tokens_BT, self._evaluation_positions(length))
            return Features(self._decode_rows(self._evaluate(embedded_BTD, window, chunk)))
        if auxiliary is None:
            drawn = RandomDraws(positions_BT=self._evaluation_positions(length))
        else:
            drawn = auxiliary if isinstance(auxiliary, RandomDraws) else self.draw(auxiliary, rows, length)
        hidden_BTD, *losses = self._forward_blocks(
            tokens_BT,
            window,
            drawn.regularizer,
            drawn.sketches_LKD,
            drawn.distractors,
            drawn.dropout_masks,
            drawn.positions_BT,
        )
        return Features(self._decode_rows(hidden_BTD), *losses)

    def _decode_rows(self, hidden_BTD: Tensor) -> Tensor:
        """Return the hidden states [B, T, D] that the head reads: unchanged without a row decoder."""
        decoded_BTD: Tensor = hidden_BTD if self.row_decoder is None else self.row_decoder(hidden_BTD)
        return decoded_BTD

    def compile_blocks(self, backend: str = "inductor", *, regional: bool = False) -> None:
        """Enable torch.compile for `features` without `chunk`; nothing is compiled yet.

        Compilation happens at the first call per input shape, and for the backward at its first use. Random numbers are
        drawn outside, and nothing in the graph depends on the step's number, data or learning rate, so a shape is
        compiled once. The first call of `features` raises CompileError if the network does not become a single graph,
        for example because a mixer reads values of its tensors. Evaluation in chunks and decoding stay eager. Call it
        after `use_fp8`, on the final device: it chooses kernels, which runs their self-tests.

        Args:
            backend: backend of torch.compile, by its name there.
            regional: compile one graph per kind of block, shared by all blocks of the kind, and one for what follows
                the blocks: faster to compile, less fused. Raises torch's recompile limit for the whole process. False:
                one graph from the embedding to the final norm, unless blocks are recomputed or cannot be compiled
                (`BlockPart.is_compilable`), which then run eagerly.
        """
        eager = [block for block in self.blocks if not block.is_compilable]
        regional = regional or bool(self._recomputed) or bool(eager)
        self.kernel_paths()  # chooses kernels now, because their self-tests must not run inside a graph
        mixed = self._fp8 is None
        if regional:
            # the compiler's limit counts the graphs of all kinds of blocks and all shapes together
            compiler: Any = importlib.import_module("torch._dynamo.config")
            compiler.recompile_limit = max(compiler.recompile_limit, 8 * len(self.blocks))
            compiled = compile_full_graph(Block.forward, backend, allow_mixed_reductions=mixed)
            self._forward_block = lambda block, *args, **kwargs: (
                compiled(block, *args, **kwargs) if block.is_compilable else _run_block(block, *args, **kwargs)
            )
            self._forward_end = compile_full_graph(_finish_forward, backend, allow_mixed_reductions=mixed)
        else:
            self._forward_blocks = compile_full_graph(self._blocks, backend, allow_mixed_reductions=mixed)
        self._compiler = f"{backend}, block by block," if regional else backend
        if eager:
            self._compiler += f" {len(eager)} of {len(self.blocks)} blocks eager,"

    def _blocks(
        self, tokens_BT: Tensor, window: int | None, regularizer: Callable[..., Tensor] | None,
        sketches_LKD: Tensor | None, distractors: dict[int, Tensor], dropout_masks: dict[int, DropoutMasks],
        positions_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Run embedding, blocks and final norm on random tensors that are drawn already (see `RandomDraws`).

        Args:
            tokens_BT: int64 tokens.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            regularizer: regularizer function; None: no regularizer loss.
            sketches_LKD: directions of its sketch; None only without a regularizer.
            distractors: distractor inputs [B, R, D] by layer; empty: no distractor loss.
            dropout_masks: masks of a block's two branches by layer; empty: no dropout.
            positions_BT: positions of the tokens; None without a position scheme.

        Returns:
            (hidden states [B, T, D], regularizer loss or None, distractor loss or None), the fields of `Features`.
        """
        x_BTD = self._embed(tokens_BT, positions_BT)
        streams: list[Tensor] = []
        losses: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            options: dict[str, Any] = {
                "window": window,
                "distractors_BRD": distractors.get(layer),
                "dropout_masks": dropout_masks.get(layer, (None, None)),
            }
            if layer in self._recomputed:
                x_BTD, loss = checkpoint(
                    self._forward_block, block, x_BTD, use_reentrant=False, preserve_rng_state=False, **options
                )
            else:
                x_BTD, loss = self._forward_block(block, x_BTD, **options)
            if loss is not None:
                losses.append(loss)
            if regularizer is not None:
                streams.append(x_BTD.flatten(0, 1))
        return self._forward_end(self.norm, x_BTD, regularizer, streams, sketches_LKD, losses)

    def _embed(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Return the embedded tokens plus their position vectors, [B, T, D] in the activations' type.

        Args:
            tokens_BT: int64 tokens.
            positions_BT: positions of the tokens, int64 [B or 1, T]; ignored, and may be None, without a position
                scheme.
        """
        x_BTD: Tensor = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT).to(x_BTD.dtype)
        return x_BTD.to(self.dtype)

    def draw(self, auxiliary: AuxiliaryTerms, rows: int, length: int) -> RandomDraws:
        """Draw the random tensors that `features` needs for `rows` sequences of `length` tokens.

        They lie on the network's device. Each draw depends on (seed, step, micro-batch, purpose, shape, kind of device)
        alone, for distractors and dropout also on the layer. Sketches are drawn with a regularizer, and distractor
        inputs with `auxiliary.distractor`, for each global layer. Positions are drawn if the network has a position
        scheme, and dropout masks if its dropout is above 0.

        Args:
            auxiliary: auxiliary losses to draw for, and the keys of the draws.
            rows: sequences of the batch.
            length: tokens per sequence.

        Raises:
            ValueError: a distractor loss that the network does not have.
            ModelConfigError: unknown regularizer.
        """
        check_regularizer(auxiliary.regularizer)
        self._check_distractor(auxiliary)
        draws = RandomDraws()
        layers, width, device = self.config.n_layers, self.config.d_model, self.device
        key = f"{auxiliary.step}.{auxiliary.micro}"
        if auxiliary.regularizer != NO_REGULARIZER:
            draws.regularizer = registry.REGULARIZERS.load(auxiliary.regularizer)
            generator = rng_stream(auxiliary.seed, "sketch", key, device=device)
            draws.sketches_LKD = torch.randn(layers, auxiliary.sketch, width, generator=generator, device=device)
        for layer in filter(self.config.is_global, range(layers) if auxiliary.distractor else ()):
            count = length if auxiliary.distractor_count is None else auxiliary.distractor_count
            generator = rng_stream(auxiliary.seed, "distractor", f"{key}.{layer}", device=device)
            # CUDA draws the same numbers in both types, the CPU does not
            drawn = self.dtype if device.type == "cuda" else torch.float32
            normal = torch.randn(rows, count, width, generator=generator, device=device, dtype=drawn)
            draws.distractors[layer] = normal.to(self.dtype)
        if self.positions is not None:
            generator = rng_stream(auxiliary.seed, "places", key, device=device)
            draws.positions_BT = self.positions.places(rows, length, generator)
        if self.config.dropout:
            draws.dropout_masks = {
                layer: self._draw_dropout_masks(auxiliary, layer, rows, length) for layer in range(layers)
            }
        return draws

    def _draw_dropout_masks(self, auxiliary: AuxiliaryTerms, layer: int, rows: int, length: int) -> DropoutMasks:
        """Return the dropout masks of one block, bool [rows, length, D], (mixing branch, MLP); True keeps a value.

        True has probability 1 - dropout. Each mask comes from its own random stream of (seed, step, micro-batch, layer,
        branch).
        """

        def draw_mask(branch: str) -> Tensor:
            key = f"{auxiliary.step}.{auxiliary.micro}.{layer}.{branch}"
            mask = torch.empty(rows, length, self.config.d_model, dtype=torch.bool, device=self.device)
            generator = rng_stream(auxiliary.seed, "dropout", key, device=self.device)
            return mask.bernoulli_(1 - self.config.dropout, generator=generator)

        return draw_mask("mix"), draw_mask("mlp")

    def _evaluate(self, x_BTD: Tensor, window: int | None, chunk: int) -> Tensor:
        """Return the hidden states [B, T, D] of embedded tokens after blocks and final norm, computed in chunks.

        About `chunk` tokens are processed at a time.

        Memory that grows with T: a few copies of the residual stream and, in a global layer, q, gate, k, v and the
        mixer's float32 copies of them. Example: the 370M network in bf16, one row of T = 65,536, chunk 8192. A copy
        then takes 0.13 GB, a float32 one 0.27 GB. Live tensors peak at 4.7 GB: weights 1.4, a polar layer's copies 1.7,
        three tensors of its scores 0.5 each (see `query_block`). With softmax attention the peak is 2.9 GB or less;
        with cope, the largest, it is 9.4 GB, because torch transforms the scores of pairs. The head of 8192 tokens
        takes 0.8 GB of logits and three times 1.6 GB in float32: 7.3 GB in all.
        """
        for block in self.blocks:
            x_BTD = block.evaluate(x_BTD, window=window, chunk=chunk)
        (hidden_BTD,) = map_chunks(lambda x: (self.norm(x),), (x_BTD,), chunk)
        return hidden_BTD

    def no_step_reason(self) -> str | None:
        """Return the first part that prevents token-by-token decoding, such as "mixer PaTH"; None if there is none.

        "positions NAME" for a position scheme that moves tokens as their sequence grows, else "mixer CLASS" or "memory
        CLASS" of the first global layer that has no `step`.
        """
        if self.positions is not None and not self.positions.steady:
            return f"positions {self.config.positions}"
        if self.row_decoder is not None:
            return "a network with a row decoder"
        reasons = (block.mix.no_step_reason() for block in self.blocks)
        return next((reason for reason in reasons if reason is not None), None)

    def no_fp8_reason(self) -> str | None:
        """Return the reason why decoding has no 8-bit cache, such as "mixer NoPE has no 8-bit cache: ..."; None if it has.

        Every mixer must have one. A network without mixers of q, k and v has no keys to store.
        """
        mixers = [part for part in self.modules() if isinstance(part, Mixer)]
        if not mixers:
            return "the network caches no keys and values"
        reasons = ((type(part).__name__, part.no_fp8_reason()) for part in mixers)
        return next((f"mixer {name} has no 8-bit cache: {reason}" for name, reason in reasons if reason), None)

    def is_capturable(self) -> bool:
        """Return True if a CUDA graph can capture a decoding step: no block copies from device to host.

        Mixers and memories of plugins count as not capturable.
        """
        return all(block.mix.is_capturable() for block in self.blocks)

    def open(self, capacity: CacheCapacity) -> list[Any]:
        """Allocate empty decoding states for `begin` and `step`: a list with one entry per block, in order.

        An entry is a `LayerState` for a global layer, and for a gated convolution its last inputs, zeros [slots + 1,
        taps - 1, D].
        """
        return [block.mix.open(capacity) for block in self.blocks]

    def begin(self, tokens_T: Tensor, states: list[Any], step: DecodeStep, *, chunk: int) -> Tensor:
        """Prefill: return the logits [V] after the last token of one new sequence; store in `states` what `step` needs.

        Logits are soft-capped (z -> cap z / sqrt(z^2 + cap^2), if there is a cap), float32 (float64 in a float64
        network).

        Args:
            tokens_T: int64 [T], the whole sequence so far, one token or more, on the network's device.
            states: from `open`; those of the sequence's slot are overwritten.
            step: slot, page table, length and window of this one sequence; its pages must be reserved.
            chunk: tokens processed at a time.
        """
        x_1TD = self._embed(tokens_T[None], self._evaluation_positions(len(tokens_T)))
        for block, state in zip(self.blocks, states, strict=True):
            x_1TD = block.begin(x_1TD, state, step, chunk=chunk)
        return self.logits(self.norm(x_1TD[0, -1]))

    def step(
        self, tokens_B: Tensor, states: list[Any], page_tables: PageTables, slots_B: Tensor, window: int | None,
        functions: StepFunctions | None = None,
    ) -> Tensor:  # fmt: skip
        """Decode one token of each of B sequences; return the soft-capped logits [B, V] after it.

        The soft cap, if there is one, is z -> cap z / sqrt(z^2 + cap^2). Logits are float32 (float64 in a float64
        network).

        Rows with the padding slot give meaningless logits and change no sequence. Never waits for the device if
        `is_capturable`.

        Args:
            tokens_B: int64 [B], the token to append to each sequence.
            states: from `open`, filled by `begin`; updated in place.
            page_tables: page tables and lengths of all slots; the lengths of these slots are incremented in place.
                Pages for the new tokens must be reserved.
            slots_B: int64 [B], slot of each sequence.
            window: number of most recent keys that a query sees, its own included; None: all.
            functions: compiled functions to use for the step; None: the eager ones.
        """
        functions = functions or EAGER
        x_BD, branch_BD, step = functions.first(self, tokens_B, page_tables, slots_B, window)
        for block, state in zip(self.blocks, states, strict=True):
            x_BD, branch_BD = functions.block(
                block, x_BD, branch_BD, state.as_tuple if isinstance(state, LayerState) else state, step
            )
        return functions.last(self, x_BD, branch_BD)

    def token_losses(self, hidden_BTD: Tensor, targets_BT: Tensor, *, chunk: int = CHUNK) -> Tensor:
        """Return the cross-entropy of each token in nats, float32 [B, T] (float64 in a float64 network).

        Logits are soft-capped first: z -> cap z / sqrt(z^2 + cap^2), if there is a cap. Differentiable; with more than
        `chunk` tokens the backward computes the logits again.

        Args:
            hidden_BTD: hidden states from `features`.
            targets_BT: int64, the token that should follow each position; a negative target gives 0.
            chunk: tokens whose logits exist at a time; limits memory.

        Raises:
            ValueError: chunk below 1, or shapes that disagree.
        """
        h_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        losses_N = linear_cross_entropy(h_ND, *self._head, targets_N, cap=self._cap, chunk=chunk)
        return losses_N.view(targets_BT.shape)

    def total_loss(self, hidden_BTD: Tensor, targets_BT: Tensor, *, chunk: int = CHUNK) -> Tensor:
        """Return the sum over all tokens of the cross-entropy in nats, a float32 scalar, for training.

        Logits are soft-capped first: z -> cap z / sqrt(z^2 + cap^2), if there is a cap. The gradient is computed
        together with the loss, so logits are neither stored nor computed twice. float64 in a float64 network.

        Args:
            hidden_BTD: hidden states from `features`.
            targets_BT: int64, the token that should follow each position; a token with a negative target does not
                count.
            chunk: tokens whose logits exist at a time; limits memory.

        Raises:
            ValueError: chunk below 1, or shapes that disagree.
        """
        h_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        return linear_cross_entropy_sum(h_ND, *self._head, targets_N, cap=self._cap, chunk=chunk)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits [..., V], soft-capped if there is a cap: z -> cap z / sqrt(z^2 + cap^2), so |logit| < cap.

        The product runs in the type of the hidden states; logits are float32, or float64 in a float64 network.

        Args:
            hidden_BTD: hidden states [..., D] after the final norm.
        """
        weight_VD, bias_V = self._head
        dtype = hidden_BTD.dtype
        bias_V = None if bias_V is None else bias_V.to(dtype)
        return softcap(functional.linear(hidden_BTD, weight_VD.to(dtype), bias_V), self._cap)

    @torch.no_grad()
    def join(self) -> None:
        """Concatenate matrices that read the same input, for fewer products per decoding step; enables the fused steps.

        Affects global layers: q, k and v projections, Canon's filters and a memory's projections. Their parameters
        become views without gradients, so the network can decode and evaluate but not train. Every matrix must already
        be in the type that it is used in (`cast_for_decoding`). Does nothing if a projection uses 8-bit products.
        """
        for block in self.blocks:
            if any(linear.fp8 is not None for linear in (*block.mix.projections(), block.mlp.fc, block.mlp.proj)):
                return
        for block in self.blocks:
            if isinstance(block.mix, Attention):
                block.mix.join()
        self._has_fused_weights = True

    def uses_fused_rows(self, rows: int) -> bool:
        """Return True if a decoding step of so many rows uses products with fused norms, gates and sums.

        Needs `join` to have taken effect and the Triton kernel, which takes one row in 16 bits and runs on a GPU.
        """
        return self._has_fused_weights and choose_backend(self.device, self.dtype, rows).backend == "triton"

    def fused_logits(self, x_BD: Tensor) -> Tensor:
        """Return soft-capped logits [B, V] of the stream [B, D] before the final norm, which is fused into the product.

        The soft cap, if there is one, is z -> cap z / sqrt(z^2 + cap^2). Logits are float32.

        Where the head's matrix has another type than the stream, norm and product run separately, as in `logits`.
        """
        weight_VD, bias_V = self._head
        if weight_VD.dtype != x_BD.dtype:
            return self.logits(self.norm(x_BD))
        assert isinstance(self.norm, RMSNorm)
        return softcap(fused_rows(x_BD, weight_VD, bias_V, norm=self.norm), self._cap)

    @property
    def _head(self) -> tuple[Tensor, Tensor | None]:
        """Head matrix [V, D] and bias [V], or None without a bias."""
        weight_VD: Tensor = self.embedding.weight if isinstance(self.head, TiedHead) else self.head.weight
        return weight_VD, self.head.bias

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits [B, T, V] of int64 tokens [B, T], soft-capped, with the config's attention window.

        The soft cap, if there is one, is z -> cap z / sqrt(z^2 + cap^2); logits are float32 (float64 in a float64
        network). Without dropout and auxiliary losses, as `features` with `auxiliary` None. All logits exist at once.
        """
        return self.logits(self.features(tokens_BT).hidden_BTD)

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Return optimizer group -> list of (name, parameter); every parameter is in exactly one group.

        The four keys are always there, with lists in the network's order, possibly empty. "scalar": every parameter of
        fewer than two axes (biases, norm weights, scalars). Of the others, "muon": those inside blocks and the row
        decoder, conv filters [C, 1, W] included; "embedding": the embedding unless the head shares it, and tables of
        positions; "head": the head's matrix.
        Source: docs/reference/mechanisms.md, "Backbone".

        Raises:
            RuntimeError: a parameter fits no group.
        """
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {"muon": [], "embedding": [], "head": [], "scalar": []}
        for name, parameter in self.named_parameters():
            groups[_optimizer_group(name, parameter, self.config)].append((name, parameter))
        grouped = [id(parameter) for members in groups.values() for _, parameter in members]
        if sorted(grouped) != sorted(map(id, self.parameters())):
            raise RuntimeError("the optimizer groups do not hold every parameter exactly once")
        return groups

    def head_blocks(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Return the projections of attention with their blocks by head: matrix -> (blocks of rows, of columns).

        Those of queries, keys and values are cut by rows, head by head; with an output gate, so are its rows, which
        stand between those of the queries. The output projection is cut by columns.
        """
        return {
            matrix: blocks
            for block in self.blocks
            if isinstance(block.mix, Attention)
            for matrix, blocks in block.mix.head_blocks().items()
        }

    def kernel_paths(self) -> dict[str, str]:
        """Return op name -> description of the implementation that the network uses on its device, for provenance.

        Always has "blocks" ("eager", or the compiler), "sketch" and "cross_entropy". Each kind of block adds its ops
        ("gated_conv", "canon", the mixer's, "memory"), and 8-bit products add "projections" and "casts". Most texts
        read "backend (reason)", with "gluon", "triton", "fla", "cudnn" or "torch". "memory" may read "backend chunk N
        (reason)", and "projections" reads "fp8 by scaled_mm (reason)" or "fp8 by torch (reason)". Chooses kernels where
        none was chosen yet, which may run their self-tests.
        """
        paths = {"blocks": "eager" if self._compiler is None else f"{self._compiler} torch {version('torch')}"}
        if self._recomputed:
            paths["blocks"] += f"; {len(self._recomputed)} of {len(self.blocks)} recomputed"
        for block in self.blocks:
            paths |= block.mix.kernel_paths(self.device, self.dtype)
        if self._fp8 is not None:
            paths["projections"] = f"fp8 by {self._fp8}"
            paths["casts"] = str(fp8_rows.choose_backend(self.device, self.dtype))
        paths["sketch"] = str(sketch.choose_backend(self.device, self.dtype))
        paths["cross_entropy"] = str(cross_entropy.choose_backend(self.device, self.dtype, self._cap < math.inf))
        return paths

    def _check_distractor(self, auxiliary: AuxiliaryTerms) -> None:
        """Raise ValueError if a distractor loss is requested but the mixer defines none or no layer is global."""
        if not auxiliary.distractor:
            return
        if not has_distractor(self.config.attn_type):
            raise ValueError(f"mixer {self.config.attn_type!r} has no distractor loss; switch distractor off")
        if not self.config.n_global_layers:
            raise ValueError("the network has no global layer, which the distractor loss needs; switch distractor off")


def build(
    config: ModelConfig, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Backbone:
    """Return an initialised network on `device`; the same (config, seed) gives the same weights on every device.

    Values are drawn on the CPU; torch's global CPU generator is left as it was. The network is in training mode.

    Args:
        config: the network.
        seed: seed of all initial values.
        device: device to move the network to.
        dtype: type of the activations; see `Backbone` for that of the weights.

    Raises:
        ModelConfigError: the config cannot be built.
    """
    with torch.random.fork_rng(devices=[]):
        # A mixer's constructor may draw random numbers; fork_rng restores the global generator.
        torch.random.default_generator.manual_seed(derive_seed(seed, "init", "constructors"))
        model = Backbone(config, dtype=dtype)
    model.init_weights(seed)
    return model.to(device)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, vocabulary matrices included, without allocating them.

    A tied head's matrix counts once. Raises ModelConfigError if the network cannot be built.
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Backbone(config).parameters())


HEAD_STD, EMBEDDING_BOUND = 0.02, 0.01
"""Standard deviation of the head's initial matrix when tied or with `init: llama`, and bound of the llama embedding."""


def _standard_normal(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.empty(like.shape).normal_(generator=draw)


def _init_parameter(module: nn.Module, parameter: nn.Parameter, draw: torch.Generator, config: ModelConfig) -> None:
    """Fill one parameter in place with its initial values; leave it unchanged if its module's class is unknown.

    - `Linear`, weight and bias: uniform within 1/sqrt(inputs). Those that end a branch (`zero`) are 0, but not with
      `init: llama`.
    - Conv filters: uniform within 1/sqrt(taps). RMS norm: 1. Tied head's bias: 0.
    - Position tables: normal with their own standard deviation.
    - Embedding: N(0, 1); 0.02 N(0, 1) if tied; uniform within 0.01 for an untied `init: llama`.

    Values are drawn on the CPU in float32. Call it where autograd is off. Source: docs/reference/mechanisms.md,
    "Backbone".

    Args:
        module: layer that owns the parameter; its class selects the distribution.
        parameter: tensor to fill.
        draw: random stream of this parameter, on the CPU.
        config: network; `init` and `tie_head` select the distribution.
    """
    value = torch.empty(parameter.shape)
    llama = config.init == "llama"
    if isinstance(module, Linear):
        bound = 0.0 if module.zero and not llama else module.weight.shape[1] ** -0.5
        value.uniform_(-bound, bound, generator=draw)
    elif isinstance(module, CausalConv):
        value.uniform_(-(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5, generator=draw)
    elif isinstance(module, RMSNorm):
        value.fill_(1)
    elif isinstance(module, TiedHead):
        value.zero_()
    elif isinstance(module, EmbeddingTable):
        value.normal_(generator=draw).mul_(module.std)
    elif isinstance(module, nn.Embedding) and config.tie_head:
        value.normal_(generator=draw).mul_(HEAD_STD)
    elif isinstance(module, nn.Embedding) and llama:
        value.uniform_(-EMBEDDING_BOUND, EMBEDDING_BOUND, generator=draw)
    elif isinstance(module, nn.Embedding):
        value.normal_(generator=draw)
    else:
        return
    parameter.copy_(value)


def _optimizer_group(name: str, parameter: nn.Parameter, config: ModelConfig) -> str:
    """Return the optimizer group of a parameter: "muon", "embedding", "head" or "scalar".

    Fewer than two axes, or in a block part one axis of more than one entry, the last: "scalar", wherever it is.
    Otherwise the first part of the name decides: "blocks" and "row_decoder" are "muon", "positions" is "embedding". An
    embedding that is also the head's matrix belongs to "head", whose learning rate is the smaller one.

    Args:
        name: dotted name of the parameter in the network.
        parameter: the parameter; only its number of axes matters.
        config: network; only `tie_head` matters.

    Raises:
        RuntimeError: the parameter belongs to none.
    """
    is_vector = ".mix.part." in name and parameter.numel() == parameter.shape[-1]  # fla stores some as [1, 1, D]
    if parameter.ndim < 2 or is_vector:
        return "scalar"
    embedding = "head" if config.tie_head else "embedding"
    groups = {"blocks": "muon", "row_decoder": "muon", "head": "head", "embedding": embedding, "positions": "embedding"}
    group = groups.get(name.split(".", 1)[0])
    if group is None:
        raise RuntimeError(f"parameter {name} with shape {tuple(parameter.shape)} belongs to no optimizer group")
    return group


def _run_block(block: Block, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    output: tuple[Tensor, Tensor | None] = block(*args, **kwargs)
    return output


def _step_first(
    model: Backbone, tokens_B: Tensor, page_tables: PageTables, slots_B: Tensor, window: int | None
) -> tuple[Tensor, Tensor | None, DecodeStep]:
    """Advance the page tables by one token per sequence and embed the tokens.

    Args:
        model: network.
        tokens_B: int64, the next token of each sequence.
        page_tables: page tables and lengths; the lengths of these slots are incremented in place, except of padding
            rows.
        slots_B: int64, slot of each sequence.
        window: number of most recent keys that a query sees, its own included; None: all.

    Returns:
        (stream [B, D], its second summand, description of the step). The second summand is None if the step uses fused
        products (`Backbone.uses_fused_rows`), else zeros [B, D].
    """
    step = page_tables.advance(slots_B, window)
    positions_B1 = None if model.positions is None else step.positions[:, None]
    x_BD = model._embed(tokens_B[:, None], positions_B1)[:, 0]
    return x_BD, None if model.uses_fused_rows(len(x_BD)) else torch.zeros_like(x_BD), step


def _step_block(
    block: Block, x_BD: Tensor, branch_BD: Tensor | None, states: Any, step: DecodeStep
) -> tuple[Tensor, Tensor | None]:
    return block.step(x_BD, branch_BD, states, step)


def _step_last(model: Backbone, x_BD: Tensor, branch_BD: Tensor | None) -> Tensor:
    return model.fused_logits(x_BD) if branch_BD is None else model.logits(model.norm(x_BD + branch_BD))


EAGER = StepFunctions(_step_first, _step_block, _step_last)
"""Step functions without compilation."""


def _finish_forward(
    norm: nn.Module, x_BTD: Tensor, regularizer: Callable[..., Tensor] | None, streams: list[Tensor],
    sketches_LKD: Tensor | None, losses: list[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Apply the final norm and average the auxiliary losses of a forward pass.

    Args:
        norm: the final norm.
        x_BTD: stream after the last block, before the norm.
        regularizer: regularizer function; None for none.
        streams: stream after each block, [N, D]; empty without a regularizer.
        sketches_LKD: directions of the regularizer's sketch.
        losses: distractor loss of each global layer; empty without that loss.

    Returns:
        (hidden states [B, T, D], regularizer loss averaged over blocks or None, distractor loss averaged over global
        layers or None).
    """
    value = None if regularizer is None else regularizer(streams, sketches_LKD).mean()
    return norm(x_BTD), value, _mean_or_none(losses)


def _mean_or_none(values: list[Tensor]) -> Tensor | None:
    return torch.stack(values).mean() if values else None
