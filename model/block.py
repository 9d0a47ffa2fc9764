"""Blocks of the network: a mixing branch and an MLP (docs/mechanisms.md, "Backbone").

B batch, T length, D model width, R distractors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.conv.op import gated_causal_conv
from ..kernels.conv_step.op import gated_conv_step, tail_of
from ..kernels.gated_delta.op import choose_backend
from ..kernels.row_linear.op import row_conv_step
from .attention import Attention
from .config import ModelConfig
from .kv_cache import CacheCapacity, DecodeStep
from .layers import MLP, CausalConv, Linear, RMSNorm, apply_dropout, map_chunks

DropoutMasks = tuple[Tensor, Tensor]
"""What dropout leaves of a block's two branches, bool [B, T, D] each."""


class GatedConv(nn.Module):
    """LFM2's mixer: [b | c | u] = in_proj(x); out = out_proj(c conv(b u)).

    Its methods take and give what those of `Attention` do.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, bias = model.d_model, model.bias
        self.in_proj = Linear(width, 3 * width, bias=bias, zero=model.init == "zero-ends-and-conv-in")
        self.conv = CausalConv(width, model.conv_taps)
        self.out_proj = Linear(width, width, bias=bias, zero=True)

    def forward(
        self, x_BTD: Tensor, *, window: int | None = None, distractors_BRD: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return self._convolve(x_BTD)[0], None

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        # a slice of several rows has gaps, and in 16 bits its products round otherwise than those of a copy
        return map_chunks(lambda x: self._convolve(x.contiguous()), (x_BTD,), chunk, self.conv.halo)[0]

    def projections(self) -> list[Linear]:
        return [self.in_proj, self.out_proj]

    def no_step_reason(self) -> str | None:
        return None

    def is_capturable(self) -> bool:
        return True

    def open(self, capacity: CacheCapacity) -> Tensor:
        return capacity.table(self.conv.halo, self.out_proj.weight.shape[1])

    def begin(self, x_1TD: Tensor, states: Tensor, step: DecodeStep, *, chunk: int) -> Tensor:
        b, _, u = self.in_proj(x_1TD[0, -self.conv.halo :] if self.conv.halo else x_1TD[0, :0]).chunk(3, -1)
        states.index_copy_(0, step.slots_B, tail_of(b * u, self.conv.taps)[None])
        return self.evaluate(x_1TD, window=step.window, chunk=chunk)

    def step(self, x_BD: Tensor, states: Tensor, step: DecodeStep) -> Tensor:
        y_BC = gated_conv_step(self.in_proj(x_BD), states, step.slots_B, self.conv.filters(x_BD.dtype))
        out_BD: Tensor = self.out_proj(y_BC)
        return out_BD

    def fused_step(self, x_BD: Tensor, norm: RMSNorm, residual_BD: Tensor, states: Tensor, step: DecodeStep) -> Tensor:
        y_BC = row_conv_step(
            x_BD, self.in_proj.weight, self.in_proj.bias, norm.weight, norm.eps, states, step.slots_B,
            self.conv.filters(x_BD.dtype),
        )  # fmt: skip
        return self.out_proj.forward_fused(y_BC, residual_BE=residual_BD)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"gated_conv": str(choose_backend(device, dtype, self.conv.taps))}

    def _convolve(self, x_BTD: Tensor) -> tuple[Tensor]:
        return (self.out_proj(gated_causal_conv(self.in_proj(x_BTD), self.conv.filters(x_BTD.dtype))),)


class Block(nn.Module):
    """x + mix(norm(x)), then x + mlp(norm(x)); `mix` is global attention or a gated convolution.

    With `residual: normed` n + mix(n) of n = norm(x), and the same with the MLP.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.d_model, config.norm_eps)
        self.mix: Attention | GatedConv = Attention(config, layer) if config.is_global(layer) else GatedConv(config)
        self.norm2 = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config.d_model, config.mlp_ratio, config.mlp, bias=config.bias)
        self.normed = config.residual == "normed"
        self.dropout = config.dropout

    def forward(
        self, x_BTD: Tensor, *, window: int | None, distractors_BRD: Tensor | None = None,
        dropout_masks: DropoutMasks | tuple[None, None] = (None, None),
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        normed_BTD = self.norm1(x_BTD)
        out_BTD, loss = self.mix(normed_BTD, window=window, distractors_BRD=distractors_BRD)
        x_BTD = self._residual(x_BTD, normed_BTD) + apply_dropout(out_BTD, dropout_masks[0], self.dropout)
        normed_BTD = self.norm2(x_BTD)
        return self._residual(x_BTD, normed_BTD) + apply_dropout(
            self.mlp(normed_BTD), dropout_masks[1], self.dropout
        ), loss

    def _fused_residual(self, x_BD: Tensor, norm: RMSNorm) -> Tensor:
        residual_BD: Tensor = norm(x_BD) if self.normed else x_BD
        return residual_BD

    def _residual(self, x_BTD: Tensor, normed_BTD: Tensor) -> Tensor:
        """What a branch is added to."""
        return normed_BTD if self.normed else x_BTD

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        """The first of what `forward` returns, worked out `chunk` tokens at a time."""
        return self._evaluate_with(x_BTD, lambda normed: self.mix.evaluate(normed, window=window, chunk=chunk), chunk)

    def _evaluate_with(self, x_BTD: Tensor, mix: Callable[[Tensor], Tensor], chunk: int) -> Tensor:
        (normed_BTD,) = map_chunks(lambda x: (self.norm1(x),), (x_BTD,), chunk)
        x_BTD = self._residual(x_BTD, normed_BTD) + mix(normed_BTD)
        (out_BTD,) = map_chunks(lambda x: (self.mlp(self.norm2(x)),), (x_BTD,), chunk)
        if self.normed:
            (x_BTD,) = map_chunks(lambda x: (self.norm2(x),), (x_BTD,), chunk)
        return x_BTD + out_BTD

    def begin(self, x_1TD: Tensor, states: Any, step: DecodeStep, *, chunk: int) -> Tensor:
        """`evaluate` of one text from its start, of which the states then hold what `step` needs."""
        return self._evaluate_with(x_1TD, lambda normed: self.mix.begin(normed, states, step, chunk=chunk), chunk)

    def step(
        self, x_BD: Tensor, branch_BD: Tensor | None, states: Any, step: DecodeStep
    ) -> tuple[Tensor, Tensor | None]:
        """What `forward` gives at the next token of some texts, as two numbers to add, [B, D] each; so is its input.

        The sum stands where the next norm can take it along. Of few texts the products take norms and sums along instead, and
        there is one number alone (`Backbone.forward_fused`).
        """
        if branch_BD is None:
            x_BD = self.mix.fused_step(x_BD, self.norm1, self._fused_residual(x_BD, self.norm1), states, step)
            return self.mlp.forward_fused(x_BD, self.norm2, self._fused_residual(x_BD, self.norm2)), None
        x_BD = x_BD + branch_BD
        normed_BD = self.norm1(x_BD)
        x_BD = self._residual(x_BD, normed_BD) + self.mix.step(normed_BD, states, step)
        normed_BD = self.norm2(x_BD)
        return self._residual(x_BD, normed_BD), self.mlp(normed_BD)
