"""Wall attention as a mixer (docs/mechanisms.md, "Wall attention")."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.attention.wall import choose_backend, wall_attention
from ...kernels.norms import statistics_dtype
from ...kernels.rotary import apply_rotary, rotary_tables
from ...kernels.shapes import query_block
from ..bases import Mixer
from ..config import ModelConfig
from .gates import Gate
from .wall_outline import WallConfig, WallOutline


class Wall(WallOutline, Mixer):
    """Every token gives each channel of a head a share of what lies before it that is kept."""

    reads_input: ClassVar[bool] = True
    config: WallConfig

    def __init__(self, model: ModelConfig, config: WallConfig) -> None:
        super().__init__(model, config)
        self.gate_heads, self.gated = self.gates(model, config)
        self.kv_heads, self.size = model.n_kv_heads, model.head_dim
        self.fall = None if config.g_max == "none" else config.g_max
        if self.gated:
            outputs = self.gate_heads * self.gated
            inputs = self.inputs(model, config)
            groups = 1 if config.gate_source == "input" else self.kv_heads
            self.gate = Gate(inputs, outputs, std=config.gate_std, offset=config.gate_bias, groups=groups)

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, x_BTD: Tensor,
        block: int | None = None,
    ) -> Tensor:  # fmt: skip
        log_gate_BTPX = self.log_gates(x_BTD, k_BTJX)
        if self.config.rotary != "none":
            cos_TF, sin_TF = rotary_tables(
                self.config.rotary, q_BTHX.shape[1], self.size, self.config.base,
                dtype=statistics_dtype(q_BTHX.dtype), device=q_BTHX.device,
            )  # fmt: skip
            q_BTHX, k_BTJX = (apply_rotary(x, cos_TF, sin_TF) for x in (q_BTHX, k_BTJX))
        return wall_attention(
            q_BTHX, k_BTJX, v_BTJX, log_gate_BTPX, scale=self.config.scale, window=window, query_block=block,
            steepest=self.fall,
        )  # fmt: skip

    def log_gates(self, x_BTD: Tensor, k_BTJX: Tensor) -> Tensor:
        """[B, T, P, X] at most 0, in the statistics' type: by how much each token lets each channel fall."""
        b, t, _, size = k_BTJX.shape
        if not self.gated:
            return k_BTJX.new_zeros(b, t, self.gate_heads, size, dtype=statistics_dtype(k_BTJX.dtype))
        log_gate = self.gate(x_BTD if self.config.gate_source == "input" else k_BTJX.flatten(2))
        if self.fall is not None:
            log_gate = soft_clamp(log_gate, self.fall)
        return functional.pad(log_gate.view(b, t, self.gate_heads, self.gated), (0, size - self.gated))

    def evaluate(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, chunk: int, x_BTD: Tensor
    ) -> Tensor:
        block = query_block(chunk, *q_BTHX.shape[:2])
        return self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, x_BTD=x_BTD, block=block)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"wall": str(choose_backend(device, dtype, self.size, self.fall))}


def soft_clamp(log_gate: Tensor, fall: float) -> Tensor:
    """Numbers <= 0 into (-fall, 0]: slope 1 at 0, -fall at minus infinity."""
    return fall * torch.expm1(log_gate / fall)
