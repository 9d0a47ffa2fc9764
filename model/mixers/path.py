"""PaTH attention as a mixer (docs/mechanisms.md, "PaTH attention")."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.attention.path.op import choose_backend, path_attention
from ...kernels.conv.op import causal_conv
from ...kernels.norms import statistics_dtype
from ..config import ModelConfig
from ..layers import CausalConv, Linear
from .gates import Gate
from .path_outline import PaTHConfig, PaTHOutline
from .query_blocks import InBlocks


class PaTH(PaTHOutline, InBlocks):
    """Every token reflects, in part, what passes it along a direction of its own."""

    reads_input: ClassVar[bool] = True
    config: PaTHConfig

    def __init__(self, model: ModelConfig, config: PaTHConfig) -> None:
        super().__init__(model, config)
        inner = model.n_kv_heads * model.head_dim
        width = model.d_model if config.rank is None else config.rank
        self.low = None if config.rank is None else Linear(model.d_model, width, bias=False)
        self.w = Linear(width, inner, bias=False)
        self.conv = CausalConv(inner, config.taps)
        self.beta = Gate(model.d_model, model.n_kv_heads, std=config.gate_std, offset=config.gate_bias)
        self.size = model.head_dim

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, x_BTD: Tensor,
        block: int | None = None,
    ) -> Tensor:  # fmt: skip
        w_BTJX, beta_BTJ = self.maps(x_BTD)
        return path_attention(
            q_BTHX, k_BTJX, v_BTJX, w_BTJX, beta_BTJ, scale=self.config.scale, window=window, query_block=block
        )

    def maps(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(w [B, T, J, X] of unit length, beta [B, T, J] in (0, 2)), in the statistics' type."""
        made = self.w(x_BTD if self.low is None else self.low(x_BTD))
        made = functional.silu(causal_conv(made, self.conv.filters(made.dtype)))
        w_BTJX = made.to(statistics_dtype(made.dtype)).unflatten(-1, (-1, self.size))
        return functional.normalize(w_BTJX, dim=-1), 2 * self.beta(x_BTD).exp()

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.size, windowed=w) for w in (False, True))
        return {"path": str(full), "path_window": str(windowed)}
