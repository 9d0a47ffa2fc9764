"""Gated delta memory with a gated readout (docs/mechanisms.md, "Gated delta memory")."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.gated_delta.gated_delta import choose_backend, gated_delta
from ...kernels.norms import rms_norm, statistics_dtype
from ..bases import Memory
from ..config import ModelConfig
from ..layers import Linear
from ..pieces import spans
from .gated_delta_outline import GatedDeltaConfig, GatedDeltaOutline

GAMMA_OFFSET = 3.9
"""Added to the retention logit, so that gamma starts near sigmoid(3.9) = 0.98. Not a parameter."""


class GatedDelta(GatedDeltaOutline, Memory):
    """out = proj(rmsnorm(readout) sigmoid(gate(x))); gamma and beta are read from x, one of each per head."""

    config: GatedDeltaConfig

    def __init__(self, model: ModelConfig, config: GatedDeltaConfig) -> None:
        super().__init__(model, config)
        self.head_dim = model.head_dim
        inner = model.n_heads * model.head_dim
        self.w_gamma = Linear(model.d_model, model.n_heads, bias=model.bias)
        self.w_beta = Linear(model.d_model, model.n_heads, bias=model.bias)
        self.gate = Linear(model.d_model, inner, bias=model.bias)
        self.proj = Linear(inner, model.d_model, bias=model.bias, zero=True)

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(log gamma, beta), both [B, T, H]: how much of the state each token keeps, in logs, and how far it writes."""
        dtype = statistics_dtype(x_BTD.dtype)
        log_gamma_BTH = functional.logsigmoid(self.w_gamma(x_BTD).to(dtype) + GAMMA_OFFSET)
        return log_gamma_BTH, torch.sigmoid(self.w_beta(x_BTD).to(dtype))

    def log_gates(self, x_BTD: Tensor) -> Tensor:
        """log gamma [B, T, H]."""
        return self.gates(x_BTD)[0]

    def forward(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> Tensor:
        return self._step(x_BTD, q_BTHX, k_BTJX, v_BTJX, None)[0]

    def evaluate(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> Tensor:
        """The state is carried from piece to piece; pieces end where the tokens solved together end."""
        b, t, _ = x_BTD.shape
        out_BTD, state = torch.empty_like(x_BTD), None
        solved = self._backend(x_BTD.device, x_BTD.dtype)[1]
        for start, stop in spans(b, t, chunk, solved):
            x, q, k, v = (part[:, start:stop] for part in (x_BTD, q_BTHX, k_BTJX, v_BTJX))
            out_BTD[:, start:stop], state = self._step(x, q, k, v, state)
        return out_BTD

    def _step(
        self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(what to add [B, T, D], the state after the last token) from the state before the first, None for zero."""
        log_gamma_BTH, beta_BTH = self.gates(x_BTD)
        backend, chunk, _ = self._backend(x_BTD.device, x_BTD.dtype)
        args = q_BTHX, k_BTJX, v_BTJX, log_gamma_BTH, beta_BTH
        read = gated_delta(*args, chunk=chunk, backend=backend, initial_state=state, return_state=True)
        assert isinstance(read, tuple)
        r_BTHX, state = read
        return self.proj(rms_norm(r_BTHX).flatten(2) * torch.sigmoid(self.gate(x_BTD))), state

    def _backend(self, device: torch.device, dtype: torch.dtype) -> tuple[str, int, str]:
        """(backend, tokens that it solves together, why that backend)."""
        choice = choose_backend(device, dtype, self.head_dim)
        # attribute by attribute: what the compiler takes for a constant cannot be unpacked
        return choice.backend, self.config.chunk if choice.backend == "torch" else 64, choice.reason

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        backend, chunk, reason = self._backend(device, dtype)
        return {"memory": f"{backend} chunk {chunk} ({reason})"}
