"""Memories that write by the delta rule: gated delta, delta net, and Kimi's with a retention a channel (docs/mechanisms.md, "Gated delta memory")."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.gated_delta import channelwise
from ...kernels.gated_delta.gated_delta import NORM_FLOOR, choose_backend, gated_delta
from ...kernels.gated_delta.step import delta_step
from ...kernels.norms import statistics_dtype
from ..cache import Room
from ..config import ModelConfig
from ..layers import Linear
from .gated_delta_outline import DeltaNetOutline, GatedDeltaConfig, GatedDeltaOutline, KDAConfig, KDAOutline
from .recurrent import Recurrent

GAMMA_OFFSET = 3.9
"""Added to the retention logit, so that gamma starts near sigmoid(3.9) = 0.98. Not a parameter."""


class DeltaRates(NamedTuple):
    """What each token says of the update at it."""

    log_keep: Tensor
    """ln gamma <= 0, [B, T, H] or, a channel of the keys each, [B, T, H, X]: how much of the state stays."""
    step_BTH: Tensor
    """beta: how far the token writes."""


class Delta(Recurrent):
    """The state is one matrix [B, H, X_v, X_k]."""

    def read_rates(self, x_BTD: Tensor) -> DeltaRates:
        raise NotImplementedError(f"{type(self).__name__} reads no rates")

    def open(self, room: Room) -> Tensor:
        return room.table(self.heads, self.head_dim, self.head_dim, dtype=statistics_dtype(room.dtype))

    def begin(
        self, x_1TD: Tensor, q_1THX: Tensor, k_1TJX: Tensor, v_1TJX: Tensor, states: Tensor, slot: int, *, chunk: int
    ) -> Tensor:
        out_1TD, state = self._carried(x_1TD, q_1THX, k_1TJX, v_1TJX, state=None, chunk=chunk)
        states[slot] = state[0]
        return out_1TD

    def step(
        self, x_BD: Tensor, q_BHX: Tensor, k_BJX: Tensor, v_BJX: Tensor, states: Tensor, slots_B: Tensor
    ) -> Tensor:
        x_B1D = x_BD[:, None]
        rates = self.read_rates(x_B1D)
        r_BHX = delta_step(q_BHX, k_BJX, v_BJX, rates.log_keep[:, 0], rates.step_BTH[:, 0], states, slots_B)
        return self._out(x_B1D, r_BHX[:, None])[:, 0]

    def norm(self, state: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(state)

    def answer(self, state: Tensor, q_BTHX: Tensor) -> Tensor:
        q = functional.normalize(q_BTHX.to(state.dtype), dim=-1, eps=NORM_FLOOR)
        return torch.einsum("bhvk,bthk->bthv", state, q)


class _OneGate(Delta):
    """What forgets as a whole, if at all."""

    config: GatedDeltaConfig

    def write(
        self, rates: DeltaRates, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        backend, chunk, _ = self._backend(q_BTHX.device, q_BTHX.dtype)
        args = q_BTHX, k_BTJX, v_BTJX, rates.log_keep, rates.step_BTH
        found = gated_delta(*args, chunk=chunk, backend=backend, initial_state=state, return_state=True)
        assert isinstance(found, tuple)
        return found

    def together(self, device: torch.device, dtype: torch.dtype) -> int:
        return self._backend(device, dtype)[1]

    def _backend(self, device: torch.device, dtype: torch.dtype) -> tuple[str, int, str]:
        """(backend, tokens that it solves together, why that backend)."""
        choice = choose_backend(device, dtype, self.head_dim)
        # attribute by attribute: what the compiler takes for a constant cannot be unpacked
        return choice.backend, self.config.chunk if choice.backend == "torch" else 64, choice.reason

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        backend, chunk, reason = self._backend(device, dtype)
        return {"memory": f"{backend} chunk {chunk} ({reason})"}


class GatedDelta(GatedDeltaOutline, _OneGate):
    """gamma and beta are read from x, one of each a head."""

    def add_rates(self, model: ModelConfig) -> None:
        self.w_gamma = Linear(model.d_model, model.n_heads, bias=model.bias)
        self.w_beta = Linear(model.d_model, model.n_heads, bias=model.bias)

    def read_rates(self, x_BTD: Tensor) -> DeltaRates:
        dtype = statistics_dtype(x_BTD.dtype)
        log_gamma_BTH = functional.logsigmoid(self.w_gamma(x_BTD).to(dtype) + GAMMA_OFFSET)
        return DeltaRates(log_gamma_BTH, torch.sigmoid(self.w_beta(x_BTD).to(dtype)))

    def log_gates(self, x_BTD: Tensor) -> Tensor:
        """log gamma [B, T, H]."""
        return self.read_rates(x_BTD).log_keep


class DeltaNet(DeltaNetOutline, _OneGate):
    """Nothing is forgotten but what a write replaces: gamma is 1."""

    def add_rates(self, model: ModelConfig) -> None:
        self.w_beta = Linear(model.d_model, model.n_heads, bias=model.bias)

    def read_rates(self, x_BTD: Tensor) -> DeltaRates:
        beta_BTH = torch.sigmoid(self.w_beta(x_BTD).to(statistics_dtype(x_BTD.dtype)))
        return DeltaRates(torch.zeros_like(beta_BTH), beta_BTH)


class KDA(KDAOutline, Delta):
    """Every channel of the keys has a retention of its own, read from x through a bottleneck."""

    config: KDAConfig

    def add_rates(self, model: ModelConfig) -> None:
        self.w_down = Linear(model.d_model, model.head_dim, bias=False)
        self.w_gamma = Linear(model.head_dim, model.n_heads * model.head_dim, bias=model.bias)
        self.w_beta = Linear(model.d_model, model.n_heads, bias=model.bias)

    def log_gates(self, x_BTD: Tensor) -> Tensor:
        """log gamma [B, T, H, X]."""
        logit = self.w_gamma(self.w_down(x_BTD)).to(statistics_dtype(x_BTD.dtype))
        return functional.logsigmoid(logit.unflatten(-1, (self.heads, self.head_dim)) + GAMMA_OFFSET)

    def read_rates(self, x_BTD: Tensor) -> DeltaRates:
        beta_BTH = torch.sigmoid(self.w_beta(x_BTD).to(statistics_dtype(x_BTD.dtype)))
        return DeltaRates(self.log_gates(x_BTD), beta_BTH)

    def write(
        self, rates: DeltaRates, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        args = q_BTHX, k_BTJX, v_BTJX, rates.log_keep, rates.step_BTH
        return channelwise.channelwise_delta(*args, chunk=self.config.chunk, initial_state=state)

    def together(self, device: torch.device, dtype: torch.dtype) -> int:
        fla = channelwise.choose_backend(device, dtype, self.head_dim).backend == "fla"
        return 64 if fla else self.config.chunk

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"memory": str(channelwise.choose_backend(device, dtype, self.head_dim))}
