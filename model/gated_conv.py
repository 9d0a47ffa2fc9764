"""The mixing of layers that are not global: a short gated convolution (docs/mechanisms.md, "Backbone").

B batch, T length, D model width, R distractors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.conv.op import choose_backend, gated_causal_conv
from ..kernels.conv_step.op import gated_conv_step, tail_of
from ..kernels.row_linear.op import row_conv_step
from .branch import Mix
from .chunking import in_pieces
from .config import ModelConfig
from .inference.kv_cache import Room, Step
from .layers import CausalConv, Linear, RMSNorm


class GatedConv(Mix):
    """LFM2's mixer: [b | c | u] = in_proj(x); out = out_proj(c conv(b u))."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, bias = model.d_model, model.bias
        self.in_proj = Linear(width, 3 * width, bias=bias, zero=model.init == "zero-ends-and-conv-in")
        self.conv = CausalConv(width, model.conv_taps)
        self.out_proj = Linear(width, width, bias=bias, zero=True)

    def forward(
        self, x_BTD: Tensor, *, window: int | None = None, distractors_BRD: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return self._out(x_BTD)[0], None

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        # a slice of several rows has gaps, and in 16 bits its products round otherwise than those of a copy
        return in_pieces(lambda x: self._out(x.contiguous()), (x_BTD,), chunk, self.conv.halo)[0]

    def projections(self) -> list[Linear]:
        return [self.in_proj, self.out_proj]

    def why_no_step(self) -> str | None:
        return None

    def open(self, room: Room) -> Tensor:
        return room.table(self.conv.halo, self.out_proj.weight.shape[1])

    def begin(self, x_1TD: Tensor, states: Tensor, step: Step, *, chunk: int) -> Tensor:
        b, _, u = self.in_proj(x_1TD[0, -self.conv.halo :] if self.conv.halo else x_1TD[0, :0]).chunk(3, -1)
        states.index_copy_(0, step.slots_B, tail_of(b * u, self.conv.taps)[None])
        return self.evaluate(x_1TD, window=step.window, chunk=chunk)

    def step(self, x_BD: Tensor, states: Tensor, step: Step) -> Tensor:
        y_BC = gated_conv_step(self.in_proj(x_BD), states, step.slots_B, self.conv.filters(x_BD.dtype))
        out_BD: Tensor = self.out_proj(y_BC)
        return out_BD

    def few_step(self, x_BD: Tensor, norm: RMSNorm, under_BD: Tensor, states: Tensor, step: Step) -> Tensor:
        y_BC = row_conv_step(
            x_BD, self.in_proj.weight, self.in_proj.bias, norm.weight, norm.eps, states, step.slots_B,
            self.conv.filters(x_BD.dtype),
        )  # fmt: skip
        return self.out_proj.few(y_BC, under_BE=under_BD)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"gated_conv": str(choose_backend(device, dtype, self.conv.taps))}

    def _out(self, x_BTD: Tensor) -> tuple[Tensor]:
        return (self.out_proj(gated_causal_conv(self.in_proj(x_BTD), self.conv.filters(x_BTD.dtype))),)
