"""Layers that every block is made of, and their evaluation in pieces (docs/mechanisms.md, "Backbone").

B batch, T length, D model width, C channels, W taps, H query heads, J KV heads, X head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.conv.op import canon
from ..kernels.conv_step.op import canon_step, tail_of
from ..kernels.fp8.op import fp8_gated_linear, fp8_linear
from ..kernels.gates import squared_relu_gate, swish_gate
from ..kernels.norms import rms_norm
from ..kernels.row_linear.op import row_linear
from .kv_cache import CacheCapacity


class Linear(nn.Module):
    """y = x Wᵀ + b with W and b cast to x's type at each use. `zero` marks a projection that starts at zero."""

    bias: nn.Parameter | None
    fp8: str | None = None
    """The backend of `fp8_linear` that takes the products instead; None for x's own type."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, zero: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
        self.zero = zero

    def forward_fused(
        self, x_BD: Tensor, *, norm: RMSNorm | None = None, gate: str = "none", residual_BE: Tensor | None = None
    ) -> Tensor:
        """under + gate(norm(x) Wᵀ + b) of a few rows, see `row_linear`; W and b are in x's type."""
        return fused_rows(x_BD, self.weight, self.bias, norm=norm, gate=gate, residual_BE=residual_BE)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8 is not None:
            return fp8_linear(x, self.weight, self.bias, backend=self.fp8)
        return functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def fuse_weights(parts: Sequence[Linear | CausalConv]) -> tuple[Tensor, Tensor | None]:
    """(matrices one below the other, their biases or None); the parts then are views of these, so nothing is kept twice."""
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
    """`row_linear` behind one of our norms."""
    norm_arguments: dict[str, Any] = {} if norm is None else {"norm_D": norm.weight, "eps": norm.eps}
    return row_linear(x_BD, w_ED, bias_E, gate=gate, under_BE=residual_BE, **norm_arguments)


class TiedHead(nn.Module):
    """What a head has of its own when its matrix is the embedding's: its bias, if any."""

    bias: nn.Parameter | None

    def __init__(self, vocabulary: int, *, bias: bool = True) -> None:
        super().__init__()
        self.register_parameter("bias", nn.Parameter(torch.zeros(vocabulary)) if bias else None)


def apply_dropout(x_BTD: Tensor, mask_BTD: Tensor | None, rate: float) -> Tensor:
    """Zero where `kept` (bool) is false, and x/(1 - share) elsewhere, so that the mean stays; None keeps x as it is."""
    return x_BTD if mask_BTD is None else x_BTD * mask_BTD * (1 / (1 - rate))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight that starts at one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class CausalConv(nn.Module):
    """Filters of a depthwise causal convolution; [C, 1, W] are one 1 x W matrix a channel to the optimizer."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    @property
    def taps(self) -> int:
        return self.weight.shape[-1]

    @property
    def halo(self) -> int:
        """Earlier tokens that an output depends on."""
        return self.taps - 1

    def filters(self, dtype: torch.dtype) -> Tensor:
        """[C, W] in that type."""
        return self.weight.squeeze(1).to(dtype)


GATES: dict[str, Callable[[Tensor], Tensor]] = {"relu2": squared_relu_gate, "swiglu": swish_gate}
"""Gate of the MLP by its name."""


class MLP(nn.Module):
    """[a | g] = fc(x); out = proj(gate(a, g)), where gate is g relu(a)^2 or g silu(a)."""

    def __init__(self, width: int, ratio: int, gate: str, *, bias: bool = True) -> None:
        super().__init__()
        self.fc = Linear(width, 2 * ratio * width, bias=bias)
        self.gate, self.kind = GATES[gate], gate
        self.proj = Linear(ratio * width, width, bias=bias, zero=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        fc = self.fc
        if fc.fp8 is not None and self.kind == "relu2":
            return self.proj(fp8_gated_linear(x_BTD, fc.weight, fc.bias, backend=fc.fp8))
        return self.proj(self.gate(fc(x_BTD)))

    def forward_fused(self, x_BD: Tensor, norm: RMSNorm, residual_BD: Tensor) -> Tensor:
        """under + what `forward` gives at norm(x), a few rows."""
        return self.proj.forward_fused(self.fc.forward_fused(x_BD, norm=norm, gate=self.kind), residual_BE=residual_BD)


class Canon(nn.Module):
    """n_t + conv(n)_t over flattened heads, one set of filters for each of q, k and v; n is plain v, and q and k normed."""

    def __init__(self, q_channels: int, kv_channels: int, taps: int, *, norm: bool = True) -> None:
        """`norm` False leaves q and k as they are too."""
        super().__init__()
        self.norm = norm
        self.q = CausalConv(q_channels, taps)
        self.k = CausalConv(kv_channels, taps)
        self.v = CausalConv(kv_channels, taps)
        self.fused_filters_CW: Tensor | None = None

    @property
    def halo(self) -> int:
        """Earlier tokens that an output depends on."""
        return self.q.halo

    @property
    def taps(self) -> int:
        return self.q.taps

    def open(self, capacity: CacheCapacity) -> list[Tensor]:
        """Tails of q, k and v side by side, a row for each text."""
        return [capacity.table(self.halo, sum(conv.weight.shape[0] for conv in (self.q, self.k, self.v)))]

    def begin(self, tails: list[Tensor], slots_B: Tensor, *qkv_1THX: Tensor) -> None:
        """Keeps the tails of one text's q, k and v, of which the last W - 1 tokens are given, or all there are."""
        x_TC = torch.cat([part[0].flatten(1) for part in self._normed(*qkv_1THX)], -1)
        tails[0].index_copy_(0, slots_B, tail_of(x_TC, self.taps)[None])

    def join(self) -> None:
        """Lays the filters side by side for `step`, the same numbers in the same type."""
        self.fused_filters_CW = fuse_weights([self.q, self.k, self.v])[0].squeeze(1)

    def step(self, tails: list[Tensor], slots_B: Tensor, x_BE: Tensor, heads: tuple[int, int, int]) -> Tensor:
        """q, k and v of one new token, [B, C], from what stands side by side in x, see `canon_step`."""
        w_CW = self.fused_filters_CW
        if w_CW is None:
            w_CW = torch.cat([conv.filters(x_BE.dtype) for conv in (self.q, self.k, self.v)])
        return canon_step(x_BE, tails[0], slots_B, w_CW, heads, norm=self.norm)

    def _normed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (rms_norm(q), rms_norm(k), v) if self.norm else (q, k, v)

    def forward(self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = q_BTHX.dtype
        return (
            canon(q_BTHX, self.q.filters(dtype), norm=self.norm),
            canon(k_BTJX, self.k.filters(dtype), norm=self.norm),
            canon(v_BTJX, self.v.filters(dtype), norm=False),
        )


def chunk_bounds(rows: int, length: int, chunk: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """(first token, end) of pieces of `length` tokens; `rows` times a piece is about `chunk` tokens, and at least `rows`.

    Every piece but the last is a multiple of `multiple` tokens long. Raises ValueError for a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    step = -(-max(1, chunk // rows) // multiple) * multiple
    for start in range(0, length, step):
        yield start, min(start + step, length)


def map_chunks(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], chunk: int, halo: int = 0
) -> tuple[Tensor, ...]:
    """`function` of inputs [B, T, ...], called with about `chunk` tokens at a time; its results are [B, T, ...] too.

    The result at a token may depend on that token and the `halo` tokens before it. One piece is the plain call.
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
