"""Threshold relative attention as a mixer (docs/mechanisms.md, "Threshold relative attention")."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.attention.threshold import choose_backend, threshold_attention
from ...kernels.shapes import query_block
from ..bases import Mixer
from ..config import ModelConfig
from .gates import Gate
from .tra_outline import TRAConfig, TRAOutline


class TRA(TRAOutline, Mixer):
    """Keys with a positive score survive, and the query's own gate fades them by how many survivors lie between."""

    reads_input: ClassVar[bool] = True
    config: TRAConfig

    def __init__(self, model: ModelConfig, config: TRAConfig) -> None:
        super().__init__(model, config)
        gates = self.gates(model, config)
        # uniform(-1/sqrt(D), 1/sqrt(D)) for both, as torch's own Linear starts
        bound = model.d_model**-0.5
        self.gate = Gate(model.d_model, gates, std=0.0, offset=0.0 if config.gate_bias is None else config.gate_bias)
        with torch.no_grad():
            self.gate.weight.uniform_(-bound, bound)
            if config.gate_bias is None:
                self.gate.offset.uniform_(-bound, bound)
        self.size = model.head_dim

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, x_BTD: Tensor,
        block: int | None = None,
    ) -> Tensor:  # fmt: skip
        decay_BTH = self.gate(x_BTD).expand(*q_BTHX.shape[:3])
        return threshold_attention(
            q_BTHX, k_BTJX, v_BTJX, decay_BTH, scale=self.config.scale, window=window, empty=self.config.empty,
            query_block=block,
        )  # fmt: skip

    def log_gates(self, x_BTD: Tensor, k_BTJX: Tensor) -> Tensor:
        """[B, T, P]: a key fades by this for each survivor between it and the query t."""
        log_gate_BTP: Tensor = self.gate(x_BTD)
        return log_gate_BTP

    def evaluate(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, chunk: int, x_BTD: Tensor
    ) -> Tensor:
        block = query_block(chunk, *q_BTHX.shape[:2])
        return self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, x_BTD=x_BTD, block=block)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"threshold": str(choose_backend(device, dtype, self.size))}
