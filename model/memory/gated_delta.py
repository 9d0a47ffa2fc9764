"""Gated delta memory with a gated readout (MECHANISMS D)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.gated_delta import choose_backend, gated_delta
from ...kernels.norms import rms_norm, statistics_dtype
from ..config import Int, ModelConfig, knob
from ..layers import Linear
from .base import Memory, MemoryConfig

GAMMA_OFFSET = 3.9
"""Added to the retention logit, so that gamma starts near sigmoid(3.9) = 0.98. Not a parameter."""


class GatedDeltaConfig(MemoryConfig):
    """Settings of the gated delta memory."""

    chunk: Int = knob(64, "Tokens solved together; changes rounding and speed only.", identity=64, ge=1)


class GatedDelta(Memory):
    """out = proj(rmsnorm(readout) sigmoid(gate(x))); gamma and beta are read from x, one of each per head."""

    Config: ClassVar[type[MemoryConfig]] = GatedDeltaConfig
    config: GatedDeltaConfig

    def __init__(self, model: ModelConfig, config: GatedDeltaConfig) -> None:
        super().__init__(model, config)
        inner = model.n_heads * model.head_dim
        self.w_gamma = Linear(model.d_model, model.n_heads)
        self.w_beta = Linear(model.d_model, model.n_heads)
        self.gate = Linear(model.d_model, inner)
        self.proj = Linear(inner, model.d_model, zero=True)

    def forward(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> Tensor:
        dtype = statistics_dtype(x_BTD.dtype)
        log_gamma_BTH = functional.logsigmoid(self.w_gamma(x_BTD).to(dtype) + GAMMA_OFFSET)
        beta_BTH = torch.sigmoid(self.w_beta(x_BTD).to(dtype))
        backend, _ = choose_backend(x_BTD.device, x_BTD.dtype)
        chunk = self.config.chunk if backend == "torch" else 64
        r_BTHX = gated_delta(q_BTHX, k_BTJX, v_BTJX, log_gamma_BTH, beta_BTH, chunk=chunk, backend=backend)
        assert isinstance(r_BTHX, Tensor)
        return self.proj(rms_norm(r_BTHX).flatten(2) * torch.sigmoid(self.gate(x_BTD)))

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        backend, reason = choose_backend(device, dtype)
        chunk = self.config.chunk if backend == "torch" else 64
        return {"memory": f"{backend} chunk {chunk} ({reason})"}
