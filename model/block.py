"""Blocks of the network: a mixing branch (attention, block part or gated convolution) followed by an MLP.

Source: docs/reference/mechanisms.md, "Backbone".
Letters of shapes: B batch, T length, D model width, R distractors, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.conv.op import choose_backend, gated_causal_conv
from ..kernels.conv_step.op import gated_conv_step, last_inputs
from ..kernels.row_linear.op import row_conv_step
from .attention import Attention
from .bases import BlockPart
from .config import ModelConfig, ModelConfigError
from .kv_cache import CacheCapacity, DecodeStep, can_capture, has_step
from .layers import MLP, CausalConv, Linear, RMSNorm, apply_dropout, map_chunks
from .registry import MIXERS
from .resolve import NO_MEMORY, NO_MIXER, mixer_settings, uses_block_part

DropoutMasks = tuple[Tensor, Tensor]
"""Dropout masks of a block's two branches (mixing, MLP), bool [B, T, D] each; True where a value is kept."""
REFERENCE = "nope"
"""Mixer whose blocks have the number of parameters that others are matched to."""
TOLERANCE = 0.01
"""Largest relative difference of a matched block's parameters."""
MULTIPLE = 16
"""Preferred divisor of a matched width, which 8-bit products need."""


class GatedConv(nn.Module):
    """Gated short convolution of LFM2: [b | c | u] = in_proj(x); out = out_proj(c conv(b u)).

    The convolution is depthwise and causal, with `conv_taps` taps and zeros before the first token. Implements the same
    methods as `Attention`, so that a block can hold either.
    """

    def __init__(self, model: ModelConfig) -> None:
        """Create the projections (D to 3 D, D to D) and the convolution for the network `model`.

        Values come from `Backbone.init_weights`. Only marks the projections that start at zero: out_proj, and in_proj
        with `init: zero-ends-and-conv-in`.
        """
        super().__init__()
        width, bias = model.d_model, model.bias
        self.in_proj = Linear(width, 3 * width, bias=bias, zero=model.init == "zero-ends-and-conv-in")
        self.conv = CausalConv(width, model.conv_taps)
        self.out_proj = Linear(width, width, bias=bias, zero=True)

    def forward(
        self, x_BTD: Tensor, *, window: int | None = None, distractors_BRD: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return (output [B, T, D] of the normed stream `x_BTD`, None); the other arguments are ignored.

        out = out_proj(c conv(b u)) with [b | c | u] = in_proj(x); the convolution is depthwise and causal.
        """
        return self._convolve(x_BTD)[0], None

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        """Return the output [B, T, D] of `forward`, computed about `chunk` tokens at a time; `window` is ignored.

        `chunk` counts the tokens of all rows. Raises ValueError if it is below 1.
        """
        # a slice of several rows is not contiguous, and in 16 bits its products round differently from a copy's
        return map_chunks(lambda x: self._convolve(x.contiguous()), (x_BTD,), chunk, self.conv.halo)[0]

    def projections(self) -> list[Linear]:
        """Return the projections that may multiply in 8 bits."""
        return [self.in_proj, self.out_proj]

    def no_step_reason(self) -> str | None:
        """Return None: a gated convolution can always decode token by token."""
        return None

    def is_capturable(self) -> bool:
        """Return True: `step` never copies from the device to the host."""
        return True

    def open(self, capacity: CacheCapacity) -> Tensor:
        """Allocate the last inputs of the convolution for every sequence slot, zeros [slots + 1, taps - 1, D]."""
        return capacity.table(self.conv.halo, self.out_proj.weight.shape[1])

    def begin(self, x_1TD: Tensor, states: Tensor, step: DecodeStep, *, chunk: int) -> Tensor:
        """Prefill of a gated convolution: return the output [1, T, D] of one new sequence; store its last inputs.

        Args:
            x_1TD: the normed residual stream of the sequence from its first token on.
            states: from `open`; the row of the sequence's slot gets the last taps - 1 products b u, oldest first, with
                zeros before the sequence's start.
            step: slot of this one sequence; nothing else of it is used.
            chunk: tokens processed at a time.
        """
        b, _, u = self.in_proj(x_1TD[0, -self.conv.halo :] if self.conv.halo else x_1TD[0, :0]).chunk(3, -1)
        states.index_copy_(0, step.slots_B, last_inputs(b * u, self.conv.taps)[None])
        return self.evaluate(x_1TD, window=step.window, chunk=chunk)

    def step(self, x_BD: Tensor, states: Tensor, step: DecodeStep) -> Tensor:
        """Return a gated convolution's output [B, D] for one new token of each sequence.

        out_proj(c conv(b u)) with [b | c | u] = in_proj(x), where the earlier inputs b u of conv come from `states`.
        Updates the sequences' rows of `states` in place.

        Args:
            x_BD: the normed residual stream of the new tokens.
            states: from `open`, filled by `begin`.
            step: slots of the sequences; nothing else of it is used.
        """
        y_BC = gated_conv_step(self.in_proj(x_BD), states, step.slots_B, self.conv.filters(x_BD.dtype))
        out_BD: Tensor = self.out_proj(y_BC)
        return out_BD

    def fused_step(self, x_BD: Tensor, norm: RMSNorm, residual_BD: Tensor, states: Tensor, step: DecodeStep) -> Tensor:
        """Return residual + a gated convolution's output at norm(x), [B, D], for one new token per sequence.

        The same as `step`, with norm and sum fused into the matrix products. For batches of very few sequences; weights
        must have x's type. Updates their rows of `states` in place.

        Args:
            x_BD: residual stream of the new tokens, before the norm.
            norm: the block's first norm.
            residual_BD: tensor that the output is added to.
            states: last inputs of the convolution, one row per slot.
            step: slots of the sequences; nothing else of it is used.
        """
        y_BC = row_conv_step(
            x_BD, self.in_proj.weight, self.in_proj.bias, norm.weight, norm.eps, states, step.slots_B,
            self.conv.filters(x_BD.dtype),
        )  # fmt: skip
        return self.out_proj.forward_fused(y_BC, residual_BE=residual_BD)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"gated_conv": str(choose_backend(device, dtype, self.conv.taps))}

    def _convolve(self, x_BTD: Tensor) -> tuple[Tensor]:
        return (self.out_proj(gated_causal_conv(self.in_proj(x_BTD), self.conv.filters(x_BTD.dtype))),)


class BlockLayer(nn.Module):
    """Global layer of a network whose `attn_type` names a block part: out = part(x).

    Implements the same methods as `Attention`, so that a block can hold either.
    """

    def __init__(self, model: ModelConfig, layer: int) -> None:
        """Build the part of block `layer` (0-based) that `model` names; ModelConfigError for invalid settings."""
        super().__init__()
        part = MIXERS.load(model.attn_type)(model, mixer_settings(model))
        assert isinstance(part, BlockPart)
        part.layer = layer
        self.part = part

    def forward(
        self, x_BTD: Tensor, *, window: int | None = None, distractors_BRD: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return (output [B, T, D] of the normed stream `x_BTD`, None); the other arguments are ignored."""
        return self.part(x_BTD), None

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        """Return the output [B, T, D] of `forward`, computed about `chunk` tokens at a time; `window` is ignored."""
        return self.part.evaluate(x_BTD, chunk=chunk)

    def projections(self) -> list[Linear]:
        """Return no projections: those of the part never multiply in 8 bits."""
        return []

    def no_step_reason(self) -> str | None:
        """Return "mixer CLASS" if the part cannot decode token by token; None if it can."""
        return None if has_step(self.part) else f"mixer {type(self.part).__name__}"

    def is_capturable(self) -> bool:
        """Return True if a CUDA graph can capture `step` (`can_capture`)."""
        return can_capture(self.part)

    def open(self, capacity: CacheCapacity) -> Any:
        """Allocate empty states of the part for every slot of a cache of that capacity."""
        return self.part.open(capacity)

    def begin(self, x_1TD: Tensor, states: Any, step: DecodeStep, *, chunk: int) -> Tensor:
        """Prefill: return the part's output [1, T, D] for one new sequence; store its state in `states`."""
        return self.part.begin(x_1TD, states, step.slots_B, chunk=chunk)

    def step(self, x_BD: Tensor, states: Any, step: DecodeStep) -> Tensor:
        """Return the part's output [B, D] for one new token per sequence; updates `states` in place."""
        return self.part.decode(x_BD, states, step.slots_B)

    def fused_step(self, x_BD: Tensor, norm: RMSNorm, residual_BD: Tensor, states: Any, step: DecodeStep) -> Tensor:
        """Return residual + the output of `step` at norm(x), [B, D]; nothing is fused."""
        return residual_BD + self.step(norm(x_BD), states, step)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return op name -> description of the part's implementation on that device and dtype."""
        return self.part.kernel_paths(device, dtype)


class Block(nn.Module):
    """Two residual branches: x + mix(norm1(x)), then x + mlp(norm2(x)).

    `mix` is global attention, a block part or a gated convolution. With `residual: normed` each branch is added to its normed input n
    instead: n + mix(n), and the same for the MLP.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Build block `layer` (0-based); the config decides if it is a global attention layer.

        Block i is global attention if i mod attn_every = attn_offset, else a gated convolution. Weights are undefined
        until `Backbone.init_weights`.
        """
        super().__init__()
        self.norm1 = RMSNorm(config.d_model, config.norm_eps)
        self.mix: Attention | BlockLayer | GatedConv
        if not config.is_global(layer):
            self.mix = GatedConv(config)
        else:
            self.mix = BlockLayer(config, layer) if uses_block_part(config) else Attention(config, layer)
        self.norm2 = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config.d_model, block_mlp_channels(config, layer), config.mlp, bias=config.bias)
        self.normed = config.residual == "normed"
        self.dropout = config.dropout

    def forward(
        self, x_BTD: Tensor, *, window: int | None, distractors_BRD: Tensor | None = None,
        dropout_masks: DropoutMasks | tuple[None, None] = (None, None),
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Compute the residual stream after this block, and the distractor loss of its attention layer.

        x <- x + mix(norm1(x)), then x <- x + mlp(norm2(x)); with `residual: normed` each branch is added to its normed
        input instead of x.

        Args:
            x_BTD: residual stream before the block, [B, T, D].
            window: number of most recent keys that a query sees, its own included; None: all earlier keys. Gated
                convolutions ignore it.
            distractors_BRD: random inputs for the distractor loss; None: no loss. Gated convolutions ignore them.
            dropout_masks: bool [B, T, D] for the mixing branch and for the MLP, True where a value is kept; kept values
                are divided by 1 - dropout. (None, None): no dropout.

        Returns:
            (stream [B, T, D], scalar distractor loss or None).
        """
        normed_BTD = self.norm1(x_BTD)
        out_BTD, loss = self.mix(normed_BTD, window=window, distractors_BRD=distractors_BRD)
        x_BTD = self._residual(x_BTD, normed_BTD) + apply_dropout(out_BTD, dropout_masks[0], self.dropout)
        normed_BTD = self.norm2(x_BTD)
        return self._residual(x_BTD, normed_BTD) + apply_dropout(
            self.mlp(normed_BTD), dropout_masks[1], self.dropout
        ), loss

    @property
    def is_compilable(self) -> bool:
        """True unless the block part says that torch.compile cannot make one graph of it."""
        return not isinstance(self.mix, BlockLayer) or self.mix.part.is_compilable

    def refusal(self, device: torch.device) -> str | None:
        """Return why the block part cannot run on that device, and what to do; None if it can, or there is none."""
        return self.mix.part.refusal(device) if isinstance(self.mix, BlockLayer) else None

    def _fused_residual(self, x_BD: Tensor, norm: RMSNorm) -> Tensor:
        residual_BD: Tensor = norm(x_BD) if self.normed else x_BD
        return residual_BD

    def _residual(self, x_BTD: Tensor, normed_BTD: Tensor) -> Tensor:
        """Return the tensor that a branch's output is added to: the stream, or its norm with `residual: normed`."""
        return normed_BTD if self.normed else x_BTD

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        """Return the stream [B, T, D] after this block as `forward` does, computed about `chunk` tokens at a time.

        Without dropout and distractor loss. `x_BTD` is the stream before the block; `window` the number of most recent
        keys that a query sees (None: all); `chunk` counts the tokens of all rows.
        """
        return self._evaluate_with(x_BTD, lambda normed: self.mix.evaluate(normed, window=window, chunk=chunk), chunk)

    def _evaluate_with(self, x_BTD: Tensor, mix: Callable[[Tensor], Tensor], chunk: int) -> Tensor:
        """Return the stream after this block, with `mix` as its first branch, computed about `chunk` tokens at a time.

        Args:
            x_BTD: residual stream before the block.
            mix: function from the normed stream [B, T, D] of whole sequences to the mixing branch's output [B, T, D];
                called once, so it must split its own work.
            chunk: tokens (over all rows) processed at a time by norms and MLP.
        """
        (normed_BTD,) = map_chunks(lambda x: (self.norm1(x),), (x_BTD,), chunk)
        x_BTD = self._residual(x_BTD, normed_BTD) + mix(normed_BTD)
        (out_BTD,) = map_chunks(lambda x: (self.mlp(self.norm2(x)),), (x_BTD,), chunk)
        if self.normed:
            (x_BTD,) = map_chunks(lambda x: (self.norm2(x),), (x_BTD,), chunk)
        return x_BTD + out_BTD

    def begin(self, x_1TD: Tensor, states: Any, step: DecodeStep, *, chunk: int) -> Tensor:
        """Prefill: return the stream [1, T, D] of one new sequence after this block; store its states for `step`.

        Args:
            x_1TD: residual stream of the sequence from its first token on, before the block.
            states: the block's states for all slots, as `mix.open` returned them; those of the sequence's slot are
                overwritten.
            step: slot, page table and window of this one sequence.
            chunk: tokens processed at a time.
        """
        return self._evaluate_with(x_1TD, lambda normed: self.mix.begin(normed, states, step, chunk=chunk), chunk)

    def step(
        self, x_BD: Tensor, branch_BD: Tensor | None, states: Any, step: DecodeStep
    ) -> tuple[Tensor, Tensor | None]:
        """Advance the residual stream of one new token per sequence through this block; updates `states` in place.

        The stream is the sum of two tensors, passed on as two so that the compiler fuses their sum into the next
        block's norm. If the first block gets no second summand (`Backbone.uses_fused_rows`), every product fuses its
        norm and its sum, and no block returns one.

        Args:
            x_BD: first summand of the stream.
            branch_BD: second summand of the stream; None selects the fused products.
            states: the block's states: of global attention a tuple (pools, Canon's tails, memory state), of a block
                part its own format, of a gated convolution the table of its last inputs.
            step: slots, page tables and lengths of the sequences, the new token included.

        Returns:
            (first summand [B, D], second summand [B, D], or None if `branch_BD` is None). The second is the MLP's
            output.
        """
        if branch_BD is None:
            x_BD = self.mix.fused_step(x_BD, self.norm1, self._fused_residual(x_BD, self.norm1), states, step)
            return self.mlp.forward_fused(x_BD, self.norm2, self._fused_residual(x_BD, self.norm2)), None
        x_BD = x_BD + branch_BD
        normed_BD = self.norm1(x_BD)
        x_BD = self._residual(x_BD, normed_BD) + self.mix.step(normed_BD, states, step)
        normed_BD = self.norm2(x_BD)
        return self._residual(x_BD, normed_BD), self.mlp(normed_BD)


def block_mlp_channels(config: ModelConfig, layer: int) -> int:
    """Return the hidden width of the MLP in block `layer` (0-based).

    It is `config.mlp_channels`, unless `match` is "parameters" and the layer is global: then a block of
    this mixer and this MLP has as many parameters, within 1 %, as one of mixer nope and an MLP of that width. A
    memory counts in neither. Builds both mixers on torch's meta device.

    Raises:
        ModelConfigError: the mixer alone has too many parameters.
    """
    plain = config.mlp_channels
    if config.match == "none" or not config.is_global(layer):
        return plain
    alone = config.model_copy(update={"memory": NO_MEMORY, "memories": {}})
    own = _mixing_parameters(alone)
    target = _mixing_parameters(alone.model_copy(update={"attn_type": REFERENCE, "mixers": {}}))
    channel = 3 * config.d_model + 2 * config.bias  # parameters per hidden channel: two in fc, one in proj
    exact = plain + (target - own) / channel
    reference_size = target + plain * channel
    for multiple in (MULTIPLE, 1):
        width = round(exact / multiple) * multiple
        if width > 0 and abs(own + width * channel - reference_size) <= TOLERANCE * reference_size:
            return width
    raise ModelConfigError(
        "model.match",
        f"mixer {config.attn_type} alone has {own:,} parameters per block, and a block of mixer {REFERENCE} with its MLP "
        f"{reference_size:,}; make the mixer smaller (model.mixers), or the MLP wider (model.mlp_ratio or model.mlp_width)",
    )


def _mixing_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of one global layer of the network, without its MLP and norms."""
    part: Any = None if config.attn_type == NO_MIXER else MIXERS.load(config.attn_type)
    return _count_mixing_parameters(config.model_dump_json(), part)


@functools.lru_cache(maxsize=256)
def _count_mixing_parameters(config_json: str, part: type | None) -> int:
    """Return `_mixing_parameters` of a network as JSON, once per process; `part` is its mixer, which a plugin may change."""
    config = ModelConfig.model_validate_json(config_json)
    with torch.device("meta"):
        mix: nn.Module = BlockLayer(config, 0) if uses_block_part(config) else Attention(config)
    return sum(parameter.numel() for parameter in mix.parameters())
