"""The whole network: embedding, blocks, final norm, head (docs/mechanisms.md, "Backbone").

B batch, T length, D model width, V vocabulary, R distractors, N = B * T: kernels/shapes.py has all letters.
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

from ..kernels.cross_entropy import op as cross_entropy
from ..kernels.cross_entropy.op import CHUNK, linear_cross_entropy, linear_cross_entropy_sum, softcap
from ..kernels.dispatch import BackendChoice, version
from ..kernels.fp8 import op as fp8_linear
from ..kernels.fp8 import rows as fp8_rows
from ..kernels.row_linear.op import choose_backend
from ..kernels.sketch import op as sketch
from . import registry
from .attention import Attention, LayerState
from .bases import EmbeddingTable, Position
from .block import Block, DropoutMasks
from .compilation import compile_full_graph
from .config import ModelConfig
from .kv_cache import CacheCapacity, DecodeStep, PageTables
from .layers import CausalConv, Linear, RMSNorm, TiedHead, fused_rows, map_chunks
from .resolve import (
    NO_POSITIONS,
    NO_REGULARIZER,
    check_model_config,
    check_regularizer,
    longest_text,
    position_settings,
)
from .rng import derive_seed, rng_stream


class StepFunctions(NamedTuple):
    """What a step of one token a text is made of, so that each part can be compiled by itself. See `EAGER`."""

    first: Callable[..., tuple[Tensor, Tensor | None, DecodeStep]]
    block: Callable[..., tuple[Tensor, Tensor | None]]
    last: Callable[..., Tensor]


@dataclass(frozen=True)
class AuxiliaryTerms:
    """That a forward pass is one of training: the auxiliary terms, and what its random draws depend on."""

    regularizer: str
    """A name from the registry, or "baseline" for none."""
    sketch: int
    """Directions of the regularizer's sketch."""
    distractor: bool
    """Whether the distractor loss is computed."""
    distractor_count: int | None
    """Random keys per sequence; None means as many as the sequence has tokens."""
    seed: int
    step: int
    micro: int


@dataclass
class Features:
    """What `Backbone.features` returns; the terms that were not asked for are None."""

    hidden_BTD: Tensor
    """The residual stream after the final norm, in the activations' type."""
    regularizer: Tensor | None = None
    """Scalar, mean over blocks."""
    distractor: Tensor | None = None
    """Scalar, mean over global layers."""


@dataclass
class RandomDraws:
    """The random parts of a forward pass of training, made by `Backbone.generator`."""

    regularizer: Callable[..., Tensor] | None = None
    sketches_LKD: Tensor | None = None
    distractors: dict[int, Tensor] = field(default_factory=dict)
    dropout_masks: dict[int, DropoutMasks] = field(default_factory=dict)
    positions_BT: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Everything that was drawn, in an order that a network and its terms decide."""
        optional = [one for one in (self.sketches_LKD, self.positions_BT) if one is not None]
        return [*optional, *self.distractors.values(), *(one for pair in self.dropout_masks.values() for one in pair)]

    def copy(self) -> RandomDraws:
        """The same in memory of its own."""

        def clone(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)

        distractors = {layer: drawn.clone() for layer, drawn in self.distractors.items()}
        dropout_masks = {layer: (mix.clone(), mlp.clone()) for layer, (mix, mlp) in self.dropout_masks.items()}
        return RandomDraws(
            self.regularizer, clone(self.sketches_LKD), distractors, dropout_masks, clone(self.positions_BT)
        )


class Backbone(nn.Module):
    """The network. `dtype` is the type of activations and, unless the config says otherwise, of the embedding; other weights are float32.

    With dtype float64 everything is float64. With float16 the embedding is float32, as the others: squares of its
    gradients would leave the range. Raises ModelConfigError for a config that cannot be built.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> None:
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
        self._max_tokens = longest_text(config)
        self._cap = math.inf if config.logit_cap == "none" else float(config.logit_cap)
        self._forward_blocks: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = self._blocks
        self._forward_block: Callable[..., tuple[Tensor, Tensor | None]] = _run_block
        self._forward_end: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = _finish_forward
        self._compiler: str | None = None
        self._has_fused_weights = False
        self.to(torch.float64 if dtype == torch.float64 else torch.float32)
        self._fp8: BackendChoice | None = None
        self._float32_embedding = config.embedding_dtype == "float32" or dtype == torch.float16
        if not tied and not self._float32_embedding:  # a head's matrix is float32
            self.embedding.to(dtype)
        if self.positions is not None and not self._float32_embedding:
            self.positions.to(dtype)
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        return self._dtype if self.config.tie_head or self._float32_embedding else self.embedding.weight.dtype

    @property
    def precision(self) -> str:
        """Type of the activations and, if it is another one, of the projections' products, in words."""
        name = str(self.dtype).removeprefix("torch.")
        return name if self._fp8 is None else f"{name}, fp8 projections"

    def use_fp8(self) -> BackendChoice:
        """Lets the projections around mixers, in convolutions and in MLPs multiply in 8 bits, in training and evaluation.

        Head, memory and a mixer's own parameters stay in the activations' type. Call it on the network's device; it
        returns what multiplies there.
        """
        self._fp8 = fp8_linear.choose_backend(self.device)
        for block in self.blocks:
            for linear in (*block.mix.projections(), block.mlp.fc, block.mlp.proj):
                linear.fp8 = self._fp8.backend
        return self._fp8

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Every parameter of a known layer from its own draw, a function of (seed, its name) alone.

        So two networks share every parameter whose name and shape they share. A mixer's own parameters keep the values
        that its constructor gave them.
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
        """Where tokens stand when nothing is drawn for a step: one draw for all texts of a length, on every machine."""
        if self.positions is None:
            return None
        return self.positions.places(1, length, rng_stream(0, "places of an evaluation", length)).to(self.device)

    def features(
        self, tokens_BT: Tensor, *, full_context: bool = False, auxiliary: AuxiliaryTerms | RandomDraws | None = None,
        chunk: int | None = None,
    ) -> Features:  # fmt: skip
        """Hidden states of int64 tokens [B, T], and the auxiliary terms asked for, with what they draw or have drawn.

        The window, if the config has one, is left out with `full_context`. With `chunk`, which is for evaluation
        without gradients, about that many tokens are worked through at a time, see `_evaluate`; the states are the
        same but for rounding. Raises ValueError for tokens of another shape, for a chunk below 1 or beside auxiliary
        terms, and for a distractor loss that the network does not have, ModelConfigError for an unknown regularizer.
        """
        if tokens_BT.ndim != 2:
            raise ValueError(f"tokens must be [B, T], got shape {tuple(tokens_BT.shape)}")
        rows, length = tokens_BT.shape
        if self._max_tokens is not None and length > self._max_tokens:
            raise ValueError(f"positions {self.config.positions} has {self._max_tokens} places, got {length} tokens")
        window = self.config.window_size if self.config.window and not full_context else None
        if chunk is not None:
            if auxiliary is not None:
                raise ValueError("auxiliary terms are not computed in chunks; leave out one of the two")
            embedded_BTD = self._embed(tokens_BT, self._evaluation_positions(length))
            return Features(self._evaluate(embedded_BTD, window, chunk))
        if auxiliary is None:
            drawn = RandomDraws(positions_BT=self._evaluation_positions(length))
        else:
            drawn = auxiliary if isinstance(auxiliary, RandomDraws) else self.draw(auxiliary, rows, length)
        return Features(
            *self._forward_blocks(
                tokens_BT,
                window,
                drawn.regularizer,
                drawn.sketches_LKD,
                drawn.distractors,
                drawn.dropout_masks,
                drawn.positions_BT,
            )
        )

    def compile_blocks(self, backend: str = "inductor", *, regional: bool = False) -> None:
        """Lets torch.compile turn `features` without `chunk` into one graph for each shape, whose backward is one too.

        Random numbers are drawn outside it and nothing of a step's number, data or learning rate is in it, so it is
        compiled once. A network that does not become one graph, such as one with a mixer that asks its tensors for
        values, makes the first call raise CompileError rather than go on without it. With `regional` there is one graph for
        each kind of block instead, which all of its kind share, and one for what follows them: sooner compiled, less fused.
        """
        self.kernel_paths()  # decides between kernels now: a self-test does not belong into a graph
        mixed = self._fp8 is None
        if regional:
            # the compiler counts the graphs of all kinds of blocks and of all shapes together
            compiler: Any = importlib.import_module("torch._dynamo.config")
            compiler.recompile_limit = max(compiler.recompile_limit, 8 * len(self.blocks))
            self._forward_block = compile_full_graph(Block.forward, backend, allow_mixed_reductions=mixed)
            self._forward_end = compile_full_graph(_finish_forward, backend, allow_mixed_reductions=mixed)
        else:
            self._forward_blocks = compile_full_graph(self._blocks, backend, allow_mixed_reductions=mixed)
        self._compiler = f"{backend}, block by block," if regional else backend

    def _blocks(
        self, tokens_BT: Tensor, window: int | None, regularizer: Callable[..., Tensor] | None,
        sketches_LKD: Tensor | None, distractors: dict[int, Tensor], dropout_masks: dict[int, DropoutMasks], positions_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """What `Features` holds, from draws that are made: sketches of K directions, one a layer, distractors [B, R, D] by layer."""
        x_BTD = self._embed(tokens_BT, positions_BT)
        streams: list[Tensor] = []
        losses: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            x_BTD, loss = self._forward_block(
                block,
                x_BTD,
                window=window,
                distractors_BRD=distractors.get(layer),
                kept=dropout_masks.get(layer, (None, None)),
            )
            if loss is not None:
                losses.append(loss)
            if regularizer is not None:
                streams.append(x_BTD.flatten(0, 1))
        return self._forward_end(self.norm, x_BTD, regularizer, streams, sketches_LKD, losses)

    def _embed(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        x_BTD: Tensor = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT).to(x_BTD.dtype)
        return x_BTD.to(self.dtype)

    def draw(self, auxiliary: AuxiliaryTerms, rows: int, length: int) -> RandomDraws:
        """What `features` needs for [rows, length] tokens and draws itself otherwise. Raises as it does."""
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
            # CUDA draws the same numbers in either type, the CPU others
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
        def draw_mask(branch: str) -> Tensor:
            key = f"{auxiliary.step}.{auxiliary.micro}.{layer}.{branch}"
            mask = torch.empty(rows, length, self.config.d_model, dtype=torch.bool, device=self.device)
            generator = rng_stream(auxiliary.seed, "dropout", key, device=self.device)
            return mask.bernoulli_(1 - self.config.dropout, generator=generator)

        return draw_mask("mix"), draw_mask("mlp")

    def _evaluate(self, x_BTD: Tensor, window: int | None, chunk: int) -> Tensor:
        """The blocks and the final norm, `chunk` tokens at a time.

        What grows with T are a few copies of the residual stream and, in a global layer, q, gate, k, v and the mixer's
        float32 copies of them. For the 370M network in bf16, one row of T = 65,536 and chunk 8192, where a copy takes
        0.13 GB and a float32 one 0.27 GB, the sum of all live tensors peaks at 4.7 GB: weights 1.4, a polar layer's
        copies 1.7, three tensors of its scores 0.5 each (see `query_block`); 2.9 GB or less with softmax attention, at most
        9.4 GB, cope's, where torch bends the scores of pairs. The head of 8192 tokens takes 0.8 GB of logits and three
        times 1.6 GB in float32: 7.3 GB in all.
        """
        for block in self.blocks:
            x_BTD = block.evaluate(x_BTD, window=window, chunk=chunk)
        (hidden_BTD,) = map_chunks(lambda x: (self.norm(x),), (x_BTD,), chunk)
        return hidden_BTD

    def why_no_step(self) -> str | None:
        """The part that has no form for one token at a time, in words; None when the network can go on token by token."""
        if self.positions is not None and not self.positions.steady:
            return f"positions {self.config.positions}"
        found = (block.mix.no_step_reason() for block in self.blocks)
        return next((why for why in found if why is not None), None)

    def is_capturable(self) -> bool:
        """Whether a step asks the device for no number, so that it can be captured as a CUDA graph."""
        return all(block.mix.is_capturable() for block in self.blocks)

    def open(self, capacity: CacheCapacity) -> list[Any]:
        """Empty states of every block, for `begin` and `step`."""
        return [block.mix.open(capacity) for block in self.blocks]

    def begin(self, tokens_T: Tensor, states: list[Any], step: DecodeStep, *, chunk: int) -> Tensor:
        """Logits [V] behind one text, int64 [T], worked out `chunk` tokens at a time; the states then hold what `step` needs."""
        x_1TD = self._embed(tokens_T[None], self._evaluation_positions(len(tokens_T)))
        for block, state in zip(self.blocks, states, strict=True):
            x_1TD = block.begin(x_1TD, state, step, chunk=chunk)
        return self.logits(self.norm(x_1TD[0, -1]))

    def step(
        self, tokens_B: Tensor, states: list[Any], page_tables: PageTables, slots_B: Tensor, window: int | None,
        functions: StepFunctions | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [B, V] behind the next token of some texts, int64 [B]; states and ledger are changed in place.

        `functions` None works everything out as it comes.
        """
        functions = functions or EAGER
        x_BD, branch_BD, step = functions.first(self, tokens_B, page_tables, slots_B, window)
        for block, state in zip(self.blocks, states, strict=True):
            x_BD, branch_BD = functions.block(
                block, x_BD, branch_BD, state.as_tuple if isinstance(state, LayerState) else state, step
            )
        return functions.last(self, x_BD, branch_BD)

    def token_losses(self, hidden_BTD: Tensor, targets_BT: Tensor, *, chunk: int = CHUNK) -> Tensor:
        """Nats per token, float32 [B, T] (float64 in a float64 network), from the logits of `chunk` tokens at a time.

        Raises ValueError for a chunk below 1.
        """
        h_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        losses_N = linear_cross_entropy(h_ND, *self._head, targets_N, cap=self._cap, chunk=chunk)
        return losses_N.view(targets_BT.shape)

    def total_loss(self, hidden_BTD: Tensor, targets_BT: Tensor, *, chunk: int = CHUNK) -> Tensor:
        """Sum of `token_losses`, for training: its gradient is worked out with it, so no logits are kept or made twice."""
        h_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        return linear_cross_entropy_sum(h_ND, *self._head, targets_N, cap=self._cap, chunk=chunk)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits, float32 [..., V] (float64 in a float64 network), soft-capped: |logit| < logit_cap, if there is one."""
        weight_VD, bias_V = self._head
        dtype = hidden_BTD.dtype
        bias_V = None if bias_V is None else bias_V.to(dtype)
        return softcap(functional.linear(hidden_BTD, weight_VD.to(dtype), bias_V), self._cap)

    @torch.no_grad()
    def join(self) -> None:
        """Lays matrices that read the same one below the other, for `step`; every matrix is in the type that it is used in."""
        for block in self.blocks:
            if any(linear.fp8 is not None for linear in (*block.mix.projections(), block.mlp.fc, block.mlp.proj)):
                return
        for block in self.blocks:
            if isinstance(block.mix, Attention):
                block.mix.join()
        self._has_fused_weights = True

    def uses_fused_rows(self, rows: int) -> bool:
        """Whether a step of so many texts takes its products with norms, gates and sums in them."""
        return self._has_fused_weights and choose_backend(self.device, self.dtype, rows).backend == "triton"

    def fused_logits(self, x_BD: Tensor) -> Tensor:
        """`logits` of the stream of a few texts, [B, V], its norm still to be taken."""
        weight_VD, bias_V = self._head
        if weight_VD.dtype != x_BD.dtype:
            return self.logits(self.norm(x_BD))
        assert isinstance(self.norm, RMSNorm)
        return softcap(fused_rows(x_BD, weight_VD, bias_V, norm=self.norm), self._cap)

    @property
    def _head(self) -> tuple[Tensor, Tensor | None]:
        """Matrix [V, D] and bias [V], if it has one."""
        weight_VD: Tensor = self.embedding.weight if isinstance(self.head, TiedHead) else self.head.weight
        return weight_VD, self.head.bias

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V] as the network was trained, window included."""
        return self.logits(self.features(tokens_BT).hidden_BTD)

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """(name, parameter) by optimizer group (docs/mechanisms.md, "Backbone"): every parameter in exactly one.

        "muon": matrices inside blocks, conv filters [C, 1, W] among them; "embedding": its matrix, unless that is the
        head's, and those of positions; "head": its matrix; "scalar": everything of fewer than two axes. Raises
        RuntimeError for a parameter that fits no group.
        """
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {"muon": [], "embedding": [], "head": [], "scalar": []}
        for name, parameter in self.named_parameters():
            groups[_optimizer_group(name, parameter, self.config)].append((name, parameter))
        grouped = [id(parameter) for members in groups.values() for _, parameter in members]
        if sorted(grouped) != sorted(map(id, self.parameters())):
            raise RuntimeError("the optimizer groups do not hold every parameter exactly once")
        return groups

    def kernel_paths(self) -> dict[str, str]:
        """Op -> implementation that this network takes on its device, for the record of a run."""
        paths = {"blocks": "eager" if self._compiler is None else f"{self._compiler} torch {version('torch')}"}
        for block in self.blocks:
            paths |= block.mix.kernel_paths(self.device, self.dtype)
        if self._fp8 is not None:
            paths["projections"] = f"fp8 by {self._fp8}"
            paths["casts"] = str(fp8_rows.choose_backend(self.device, self.dtype))
        paths["sketch"] = str(sketch.choose_backend(self.device, self.dtype))
        paths["cross_entropy"] = str(cross_entropy.choose_backend(self.device, self.dtype, self._cap < math.inf))
        return paths

    def _check_distractor(self, auxiliary: AuxiliaryTerms) -> None:
        if not auxiliary.distractor:
            return
        if not registry.MIXERS.load(self.config.attn_type).has_distractor:
            raise ValueError(f"mixer {self.config.attn_type!r} has no distractor loss; switch distractor off")
        if not self.config.n_global_layers:
            raise ValueError("the network has no global layer, so no distractor loss; switch distractor off")


def build(
    config: ModelConfig, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Backbone:
    """An initialised network on `device`: the same weights for the same (config, seed) on every device."""
    with torch.random.fork_rng(devices=[]):
        # A mixer may draw in its constructor; the global generator is left as it was.
        torch.random.default_generator.manual_seed(derive_seed(seed, "init", "constructors"))
        model = Backbone(config, dtype=dtype)
    model.init_weights(seed)
    return model.to(device)


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, vocabulary matrices included; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Backbone(config).parameters())


HEAD_STD, EMBEDDING_BOUND = 0.02, 0.01
"""Initial values of the head's matrix, normal, tied or with `init: llama`, and of that one's embedding, uniform."""


def _standard_normal(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.empty(like.shape).normal_(generator=draw)


def _init_parameter(module: nn.Module, parameter: nn.Parameter, draw: torch.Generator, config: ModelConfig) -> None:
    """Initial values (docs/mechanisms.md, "Backbone"), drawn on the CPU in float32."""
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
    """The optimizer group of a parameter. An embedding that is the head's matrix too learns at its rate, the smaller one."""
    if parameter.ndim < 2:
        return "scalar"
    embedding = "head" if config.tie_head else "embedding"
    groups = {"blocks": "muon", "head": "head", "embedding": embedding, "positions": "embedding"}
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
"""The parts of a step as they come."""


def _finish_forward(
    norm: nn.Module, x_BTD: Tensor, regularizer: Callable[..., Tensor] | None, streams: list[Tensor],
    sketches_LKD: Tensor | None, losses: list[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """What `Features` holds, from the stream behind the last block and what the blocks gave beside it."""
    value = None if regularizer is None else regularizer(streams, sketches_LKD).mean()
    return norm(x_BTD), value, _mean_or_none(losses)


def _mean_or_none(values: list[Tensor]) -> Tensor | None:
    return torch.stack(values).mean() if values else None
