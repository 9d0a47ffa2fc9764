"""Layers that blocks are made of, and helpers that evaluate them in chunks of tokens.

Source: docs/reference/mechanisms.md, "Backbone".
Letters of shapes: B batch, T length, D input width, E output width, C channels, W taps, H query heads, J KV heads, X
head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.conv.op import canon
from ..kernels.conv_step.op import canon_step, last_inputs
from ..kernels.fp8.op import fp8_gated_linear, fp8_linear
from ..kernels.gates import squared_relu_gate, swish_gate
from ..kernels.norms import rms_norm
from ..kernels.row_linear.op import row_linear
from .kv_cache import CacheCapacity


class RowDecoder(nn.Module):
    """Decoder of complete rows from their last hidden state: MLP(h_T + position t), for every position t.

    Positions are sines and cosines of wavelengths 2 pi to 20,000 pi. The MLP has two layers of the network's width with
    GELU, each after an RMS norm; another norm ends it.
    """

    def __init__(self, width: int, *, bias: bool, eps: float) -> None:
        super().__init__()
        self.first, self.second = Linear(width, width, bias=bias), Linear(width, width, bias=bias)
        self.norms = nn.ModuleList(RMSNorm(width, eps) for _ in range(3))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return [B, T, D]: the decoded hidden state of each position, all from the last one of the row."""
        _, length, width = hidden_BTD.shape
        powers = torch.arange(width, device=hidden_BTD.device) // 2 * 2 / width
        angles_TD = torch.arange(length, device=hidden_BTD.device)[:, None] * 10000.0**-powers
        is_even = torch.arange(width, device=hidden_BTD.device) % 2 == 0
        positions_TD = torch.where(is_even, angles_TD.sin(), angles_TD.cos()).to(hidden_BTD.dtype)
        x_BTD = hidden_BTD[:, -1:] + positions_TD
        x_BTD = functional.gelu(self.first(self.norms[0](x_BTD)))
        x_BTD = functional.gelu(self.second(self.norms[1](x_BTD)))
        decoded_BTD: Tensor = self.norms[2](x_BTD)
        return decoded_BTD


class Linear(nn.Module):
    """y = x Wᵀ + b with W and b cast to x's type at each use. `zero` marks a projection that starts at zero.

    Values are undefined until `Backbone.init_weights`, which also reads the mark.
    """

    bias: nn.Parameter | None
    fp8: str | None = None
    """Implementation of 8-bit products to use, "scaled_mm" or "torch"; None: multiply in x's own type."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
        self.zero = zero

    def forward_fused(
        self, x_BD: Tensor, *, norm: RMSNorm | None = None, gate: str = "none", residual_BE: Tensor | None = None
    ) -> Tensor:
        """Return residual + gate(norm(x) Wᵀ + b) in one fused operation, [B, outputs], or half as wide with a gate.

        Weights must have x's type; 8-bit products are not used. Several rows are computed in several operations.

        Args:
            x_BD: input rows, few.
            norm: RMS norm to apply to x first; None: no norm.
            gate: "none", or of outputs [a | g] "relu2", g relu(a)^2, or "swiglu", g silu(a), half as wide.
            residual_BE: tensor to add, of the result's shape; None: nothing is added.
        """
        return fused_rows(x_BD, self.weight, self.bias, norm=norm, gate=gate, residual_BE=residual_BE)

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, [..., outputs] in x's type, multiplied in 8 bits if `fp8` names an implementation."""
        if self.fp8 is not None:
            return fp8_linear(x, self.weight, self.bias, backend=self.fp8)
        return functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def fuse_weights(parts: Sequence[Linear | CausalConv]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights of layers along their output axis; the layers' parameters become views of the result.

    Nothing is stored twice. The layers' parameters are replaced by new ones without gradients; values and type stay.

    Args:
        parts: layers with the same input size and type, in the order of the result.

    Returns:
        (weight [sum of outputs, ...], bias [sum of outputs]). Bias is None, and biases stay as they are, if a part has
        none (a `CausalConv` never has).
    """
    weight = torch.cat([part.weight.detach() for part in parts])
    rows = [len(part.weight) for part in parts]
    for part, rows_ED in zip(parts, weight.split(rows), strict=True):
        part.weight = nn.Parameter(rows_ED, requires_grad=False)
    linear = [part for part in parts if isinstance(part, Linear) and part.bias is not None]
    if len(linear) < len(parts):
        return weight, None
    bias = torch.cat([part.bias.detach() for part in linear if part.bias is not None])
    for part, rows_ED in zip(linear, bias.split(rows), strict=True):
        part.bias = nn.Parameter(rows_ED, requires_grad=False)
    return weight, bias


def fused_rows(
    x_BD: Tensor, w_ED: Tensor, bias_E: Tensor | None, *, norm: RMSNorm | None = None, gate: str = "none",
    residual_BE: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return residual + gate(norm(x) Wᵀ + b) in one fused operation, for few rows.

    With more than one row, or without the Triton kernel, torch computes the same in several operations.

    Args:
        x_BD: input rows; weight, bias and residual have the same type.
        w_ED: weight.
        bias_E: bias; None: no bias.
        norm: RMS norm to apply to x first; None: no norm.
        gate: "none", or of outputs [a | g] "relu2", g relu(a)^2, or "swiglu", g silu(a), half as wide.
        residual_BE: tensor to add, of the result's shape; None: nothing is added.

    Returns:
        [B, E], or [B, E / 2] with a gate.
    """
    norm_arguments: dict[str, Any] = {} if norm is None else {"norm_D": norm.weight, "eps": norm.eps}
    return row_linear(x_BD, w_ED, bias_E, gate=gate, under_BE=residual_BE, **norm_arguments)


class TiedHead(nn.Module):
    """Bias [vocabulary] of a head whose matrix is the embedding's, zeros at first; `bias` is None without one."""

    bias: nn.Parameter | None

    def __init__(self, vocabulary: int, *, bias: bool = True) -> None:
        super().__init__()
        self.register_parameter("bias", nn.Parameter(torch.zeros(vocabulary)) if bias else None)


def apply_dropout(x_BTD: Tensor, mask_BTD: Tensor | None, rate: float) -> Tensor:
    """Return x / (1 - rate) where the mask is True and 0 elsewhere, so that the mean stays; x itself without a mask."""
    return x_BTD if mask_BTD is None else x_BTD * mask_BTD * (1 / (1 - rate))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis: x / sqrt(mean(x^2) + eps), times a weight that starts at one.

    Computed in float32 (float64 for float64); the result has x's type.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class CausalConv(nn.Module):
    """Filters of a depthwise causal convolution, [C, 1, W]: to the optimizer, one 1 x W matrix per channel.

    Holds the filters alone; kernels apply them. The last tap multiplies the current token.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    @property
    def taps(self) -> int:
        """Number of taps W."""
        return self.weight.shape[-1]

    @property
    def halo(self) -> int:
        """Number of earlier tokens that an output depends on."""
        return self.taps - 1

    def filters(self, dtype: torch.dtype) -> Tensor:
        """Return the filters as [C, W] in that type."""
        return self.weight.squeeze(1).to(dtype)


GATES: dict[str, Callable[[Tensor], Tensor]] = {"relu2": squared_relu_gate, "swiglu": swish_gate}
"""Gate function of the MLP by name; it maps [a | g] of width 2 C to width C."""


class MLP(nn.Module):
    """Gated MLP: [a | g] = fc(x); out = proj(gate(a, g)); gate is g relu(a)^2 ("relu2") or g silu(a) ("swiglu")."""

    def __init__(self, width: int, channels: int, gate: str, *, bias: bool = True) -> None:
        """Build an MLP from `width` to `channels` hidden channels and back; `gate` is "relu2" or "swiglu".

        `fc` gives twice the hidden channels: a first, then g. `proj` is marked to start at zero.
        """
        super().__init__()
        self.fc = Linear(width, 2 * channels, bias=bias)
        self.gate, self.kind = GATES[gate], gate
        self.proj = Linear(channels, width, bias=bias, zero=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the MLP's output [B, T, D] in x's type, without the residual: proj(gate(a, g)) with [a | g] = fc(x).

        gate is g relu(a)^2 ("relu2") or g silu(a) ("swiglu"). With 8-bit products and "relu2", gate and first product
        are one operation.
        """
        fc = self.fc
        if fc.fp8 is not None and self.kind == "relu2":
            return self.proj(fp8_gated_linear(x_BTD, fc.weight, fc.bias, backend=fc.fp8))
        return self.proj(self.gate(fc(x_BTD)))

    def forward_fused(self, x_BD: Tensor, norm: RMSNorm, residual_BD: Tensor) -> Tensor:
        """Return residual + the output of `forward` at norm(x), [B, D], fused into two products.

        For few rows; weights must have x's type.
        """
        return self.proj.forward_fused(self.fc.forward_fused(x_BD, norm=norm, gate=self.kind), residual_BE=residual_BD)


class Canon(nn.Module):
    """Canon convolution: n_t + conv(n)_t, depthwise over the flattened heads, separate filters for q, k and v.

    n is v as it is, and q and k RMS-normed per head without weight (unless `norm` is False). The convolution is causal,
    with zeros before the first token.
    """

    def __init__(self, q_channels: int, kv_channels: int, taps: int, *, norm: bool = True) -> None:
        """Create filters with `taps` taps, separate for q, k and v; values come from `Backbone.init_weights`.

        Args:
            q_channels: channels of all query heads, H X.
            kv_channels: channels of all KV heads, J X, for k and for v.
            taps: taps W of each filter, the current token included.
            norm: RMS-norm q and k per head before the convolution; False: neither is normed.
        """
        super().__init__()
        self.norm = norm
        self.q = CausalConv(q_channels, taps)
        self.k = CausalConv(kv_channels, taps)
        self.v = CausalConv(kv_channels, taps)
        self.fused_filters_CW: Tensor | None = None

    @property
    def halo(self) -> int:
        """Number of earlier tokens that an output depends on."""
        return self.q.halo

    @property
    def taps(self) -> int:
        """Number of taps W."""
        return self.q.taps

    def open(self, capacity: CacheCapacity) -> list[Tensor]:
        """Allocate the last inputs of the convolutions for every slot: [one zero tensor [slots + 1, taps - 1, C]].

        Channels are those of q, k and v, concatenated.
        """
        return [capacity.table(self.halo, sum(conv.weight.shape[0] for conv in (self.q, self.k, self.v)))]

    def begin(self, tails: list[Tensor], slots_B: Tensor, *qkv_1THX: Tensor) -> None:
        """Store Canon's last W - 1 inputs of one new sequence in its slot's row of `tails`, in place.

        Inputs are q and k after the norm and v, concatenated by channel, oldest token first; zeros stand before the
        sequence's start.

        Args:
            tails: from `open`.
            slots_B: int64 [1], the slot.
            qkv_1THX: projected q, k and v (before norms) of the sequence's last W - 1 tokens, or of all if it has
                fewer.
        """
        x_TC = torch.cat([part[0].flatten(1) for part in self._normed(*qkv_1THX)], -1)
        tails[0].index_copy_(0, slots_B, last_inputs(x_TC, self.taps)[None])

    def join(self) -> None:
        """Concatenate the filters of q, k and v into one tensor for `step`; values and type stay the same."""
        self.fused_filters_CW = fuse_weights([self.q, self.k, self.v])[0].squeeze(1)

    def step(self, tails: list[Tensor], slots_B: Tensor, x_BE: Tensor, heads: tuple[int, int, int]) -> Tensor:
        """Return Canon's output for one new token per sequence: q, k and v concatenated, [B, (H + 2 J) X].

        Each is n_t + conv(n)_t with n the RMS-normed q or k (if `norm`), and v as it is; earlier inputs are in `tails`.

        Args:
            tails: from `open`, one tensor for q, k and v together; the rows of these slots are updated in place.
            slots_B: slots of the sequences.
            x_BE: outputs of the q (with gate), k and v projections, concatenated; the gate's channels are skipped.
            heads: (query heads H, KV heads J, channels from one query head to the next in x).
        """
        w_CW = self.fused_filters_CW
        if w_CW is None:
            w_CW = torch.cat([conv.filters(x_BE.dtype) for conv in (self.q, self.k, self.v)])
        return canon_step(x_BE, tails[0], slots_B, w_CW, heads, norm=self.norm)

    def _normed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (rms_norm(q), rms_norm(k), v) if self.norm else (q, k, v)

    def forward(self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Canon's (q, k, v) of whole sequences, in the shapes and type of the arguments.

        Each is n_t + conv(n)_t with n the RMS-normed q or k (if `norm`), and v as it is. Convolutions are depthwise and
        causal.
        """
        dtype = q_BTHX.dtype
        return (
            canon(q_BTHX, self.q.filters(dtype), norm=self.norm),
            canon(k_BTJX, self.k.filters(dtype), norm=self.norm),
            canon(v_BTJX, self.v.filters(dtype), norm=False),
        )


def chunk_bounds(rows: int, length: int, chunk: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (first token, token after the last) of consecutive chunks of sequences of `length` tokens.

    A chunk has chunk // rows tokens per row, at least 1, rounded up to `multiple`; the last may be shorter. Nothing is
    yielded for length 0.

    Args:
        rows: sequences in the batch.
        length: tokens of each sequence.
        chunk: tokens to process at a time, over all rows.
        multiple: every chunk but the last has a length divisible by this.

    Raises:
        ValueError: chunk below 1 (at the first item, since this is a generator).
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    step = -(-max(1, chunk // rows) // multiple) * multiple
    for start in range(0, length, step):
        yield start, min(start + step, length)


def map_chunks(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], chunk: int, halo: int = 0
) -> tuple[Tensor, ...]:
    """Apply `function` to sequences about `chunk` tokens at a time and concatenate its results along the tokens.

    Results are copied into new tensors in place, so it is for use without gradients.

    Args:
        function: maps tensors [B, t, ...] to a tuple of tensors [B, t, ...]; its result at a token may depend on that
            token and the `halo` tokens before it. Near a sequence's start it gets fewer.
        inputs: tensors [B, T, ...], one or more.
        chunk: tokens to process at a time, over all rows of the batch; each call has at least one new token per row.
        halo: earlier tokens that each call gets in addition; its results at these are dropped.

    Returns:
        The function's results [B, T, ...]. If one chunk holds everything, the function's own tensors. An empty tuple if
        T is 0.

    Raises:
        ValueError: chunk below 1.
    """
    b, t = inputs[0].shape[:2]
    outputs: tuple[Tensor, ...] = ()
    for start, stop in chunk_bounds(b, t, chunk):
        first = max(0, start - halo)
        parts = function(*(x[:, first:stop] for x in inputs))
        if stop - start == t:
            return parts
        if not outputs:
            outputs = tuple(part.new_empty(b, t, *part.shape[2:]) for part in parts)
        for output, part in zip(outputs, parts, strict=True):
            output[:, start:stop] = part[:, start - first :]
    return outputs
