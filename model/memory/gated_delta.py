"""Memories that write by the delta rule: gated delta, delta net, and KDA with one retention gate per channel.

Source: docs/reference/mechanisms.md, "Gated delta memory".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.channelwise_delta import op as channelwise
from ...kernels.delta_step.op import delta_step
from ...kernels.gated_delta.op import NORM_FLOOR, choose_backend, gated_delta
from ...kernels.norms import statistics_dtype
from ..bases import MemoryConfig
from ..bounds import MAX_LENGTH
from ..config import Config, Int, ModelConfig, knob
from ..kv_cache import CacheCapacity
from ..layers import Linear, fuse_weights, fused_rows
from .recurrent import Recurrent


class GatedDeltaConfig(MemoryConfig):
    """Settings of the gated delta memory."""

    chunk: Int = knob(64, "Tokens per chunk; affects rounding and speed only.", identity=64, ge=1, le=MAX_LENGTH)


class KDAConfig(MemoryConfig):
    """Settings of the memory with a retention a channel."""

    chunk: Int = knob(
        16, "Tokens per chunk without a GPU; affects rounding and speed only.", identity=16, ge=1, le=MAX_LENGTH
    )


GAMMA_OFFSET = 3.9
"""Constant added to the logit of the retention gamma, which therefore starts near sigmoid(3.9) = 0.98. Not a parameter.

"""


class DeltaRates(NamedTuple):
    """Update rates of the delta rule per token."""

    log_keep: Tensor
    """ln gamma <= 0, log of the fraction of the state that is kept: [B, T, H], or [B, T, H, X] per channel of the keys.

    """
    step_BTH: Tensor
    """Write strength beta, in (0, 1)."""


class DeltaMemory(Recurrent):
    """Memory that writes by the delta rule; its state is one matrix per head, [B, H, X_v, X_k], zero at the start.

    Per token, with k and q scaled to unit length: M <- gamma M, then M <- M + beta (v - M k) kᵀ, then the readout r = M
    q. Subclasses define gamma and beta.
    """

    fused_weights: tuple[Tensor, Tensor | None] | None = None
    """Concatenated weight and bias (or None) of rate projections and readout gate for `step`; None before `join`."""

    def rate_projections(self) -> list[Linear]:
        """Return the projections of the block's input whose outputs `rates_from_logits` takes, in order."""
        raise NotImplementedError(f"{type(self).__name__} defines no rate_projections")

    def rates_from_logits(self, *logits_TC: Tensor) -> DeltaRates:
        """Convert the outputs of `rate_projections`, [..., C] each, to update rates of the same leading axes."""
        raise NotImplementedError(f"{type(self).__name__} defines no rates_from_logits")

    def read_rates(self, x_BTD: Tensor) -> DeltaRates:
        """Return the update rates of each token, computed from the block's input [B, T, D]."""
        return self.rates_from_logits(*(linear(x_BTD) for linear in self.rate_projections()))

    def join(self) -> None:
        """Concatenate the weights of rate projections and readout gate for `step`.

        The parameters become views of the result, without gradients. Does nothing if some have a bias and others do
        not.
        """
        projections = [*self.rate_projections(), self.gate]
        # matrices with and without a bias cannot be concatenated
        if len({linear.bias is None for linear in projections}) == 1:
            self.fused_weights = fuse_weights(projections)

    def open(self, capacity: CacheCapacity) -> Tensor:
        """Allocate zero states [slots + 1, H, X, X], float32 (float64 for a float64 cache)."""
        return capacity.table(self.heads, self.head_dim, self.head_dim, dtype=statistics_dtype(capacity.dtype))

    def begin(
        self, x_1TD: Tensor, q_1THX: Tensor, k_1TJX: Tensor, v_1TJX: Tensor, states: Tensor, slot: int, *, chunk: int
    ) -> Tensor:
        """Prefill of a delta memory: return the output [1, T, D] for a new sequence; store its final state.

        Args:
            x_1TD: the block's normed input, from the first token on.
            q_1THX: the mixer's queries, not rotated.
            k_1TJX: the mixer's keys, not rotated.
            v_1TJX: the mixer's values.
            states: from `open`, for all slots; row `slot` is overwritten.
            slot: slot of the sequence.
            chunk: tokens processed at a time.
        """
        out_1TD, state = self._run_chunks(x_1TD, q_1THX, k_1TJX, v_1TJX, state=None, chunk=chunk)
        states[slot] = state[0]
        return out_1TD

    def step(
        self, x_BD: Tensor, q_BHX: Tensor, k_BJX: Tensor, v_BJX: Tensor, states: Tensor, slots_B: Tensor
    ) -> Tensor:
        """Return the output [B, D] for one new token of each sequence; updates rows `slots_B` of `states` in place.

        Per sequence M <- gamma M, then M <- M + beta (v - M k) kᵀ, then the readout r = M q; the output is
        proj(rmsnorm(r) sigmoid(gate(x))), normed per head without weight. Never waits for the device.

        Args:
            x_BD: the block's normed input.
            q_BHX: the mixer's queries, not rotated; scaled to unit length here.
            k_BJX: the mixer's keys, not rotated; scaled to unit length here.
            v_BJX: the mixer's values.
            states: from `open`, for all slots.
            slots_B: int64, slot of each sequence.
        """
        projections = [*self.rate_projections(), self.gate]
        if self.fused_weights is None:
            *logits, gate_BC = (linear(x_BD) for linear in projections)
        else:
            *logits, gate_BC = fused_rows(x_BD, *self.fused_weights).split(
                [len(linear.weight) for linear in projections], -1
            )
        rates = self.rates_from_logits(*logits)
        r_BHX = delta_step(q_BHX, k_BJX, v_BJX, rates.log_keep, rates.step_BTH, states, slots_B)
        return self.gated(r_BHX, gate_BC)

    def norm(self, state: Tensor) -> Tensor:
        """Return the Frobenius norm of each state matrix, [B, H]."""
        return torch.linalg.matrix_norm(state)

    def answer(self, state: Tensor, q_BTHX: Tensor) -> Tensor:
        """Return the states' readouts for queries, [B, T, H, X] in the state's type, without writing.

        Queries are L2-normalised here; every query reads the same state. The readouts are not yet normed and gated.
        """
        q = functional.normalize(q_BTHX.to(state.dtype), dim=-1, eps=NORM_FLOOR)
        return torch.einsum("bhvk,bthk->bthv", state, q)


def delta_flops(model: ModelConfig, rate_weights: int) -> float:
    """Return forward FLOPs per token and layer of a delta memory: rates, gate and output projection, recurrence.

    The recurrence counts 7 H X^2, of which 6 are its products M k, u kᵀ and M q.

    Args:
        model: network.
        rate_weights: number of weights of the rate projections, without biases.
    """
    inner = model.n_heads * model.head_dim
    return 2 * (rate_weights + 2 * model.d_model * inner) + 7.0 * inner * model.head_dim


class _HeadGatedDelta(DeltaMemory):
    """Delta memory with at most one retention gate per head."""

    config: GatedDeltaConfig

    def write(
        self, rates: DeltaRates, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write a sequence into the state by the gated delta rule and read it back with the queries.

        Per token M <- gamma M, then M <- M + beta (v - M k) kᵀ, then the readout M q; k and q are scaled to unit length
        here.

        Args:
            rates: from `read_rates`.
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            state: state before the first token, [B, H, X_v, X_k]; None (zeros) at a sequence's start.

        Returns:
            (readout [B, T, H, X] in q's type, the state after the last token, float32, or float64 for float64).
        """
        backend, chunk, _ = self._backend(q_BTHX.device, q_BTHX.dtype)
        args = q_BTHX, k_BTJX, v_BTJX, rates.log_keep, rates.step_BTH
        result = gated_delta(*args, chunk=chunk, backend=backend, initial_state=state, return_state=True)
        assert isinstance(result, tuple)
        return result

    def together(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return the number of tokens solved together; chunks of a multiple of it give the same result.

        It is the config's `chunk` with the torch backend and 64 with the others.
        """
        return self._backend(device, dtype)[1]

    def _backend(self, device: torch.device, dtype: torch.dtype) -> tuple[str, int, str]:
        """Return (backend, tokens that it solves together, reason for the choice)."""
        choice = choose_backend(device, dtype, self.head_dim)
        # read attribute by attribute, because the compiler cannot unpack what it treats as a constant
        return choice.backend, self.config.chunk if choice.backend == "torch" else 64, choice.reason

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return {"memory": backend, chunk and reason} for tensors of that device and dtype."""
        backend, chunk, reason = self._backend(device, dtype)
        return {"memory": f"{backend} chunk {chunk} ({reason})"}


class GatedDelta(_HeadGatedDelta):
    """Gated delta memory: retention gamma and write strength beta are projected from x, one of each per head."""

    Config: ClassVar[type[Config]] = GatedDeltaConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: GatedDeltaConfig) -> float:
        return delta_flops(model, 2 * model.d_model * model.n_heads)

    def add_rates(self, model: ModelConfig) -> None:
        """Create the projections of gamma and beta."""
        self.w_gamma = Linear(model.d_model, model.n_heads, bias=model.bias)
        self.w_beta = Linear(model.d_model, model.n_heads, bias=model.bias)

    def rate_projections(self) -> list[Linear]:
        return [self.w_gamma, self.w_beta]

    def rates_from_logits(self, *logits_TC: Tensor) -> DeltaRates:
        """Return the gated delta memory's rates: ln gamma = logsigmoid(logit + GAMMA_OFFSET), beta = sigmoid(logit).

        A `DeltaRates` in float32 (float64 for float64).

        Args:
            *logits_TC: the logits of gamma and of beta, [..., H] each.
        """
        gamma, beta = (logit.to(statistics_dtype(logit.dtype)) for logit in logits_TC)
        return DeltaRates(functional.logsigmoid(gamma + GAMMA_OFFSET), torch.sigmoid(beta))

    def log_gates(self, x_BTD: Tensor) -> Tensor:
        """Return ln gamma, [B, T, H]."""
        return self.read_rates(x_BTD).log_keep


class DeltaNet(_HeadGatedDelta):
    """Delta memory without decay: gamma is 1, and only overwriting removes content."""

    Config: ClassVar[type[Config]] = GatedDeltaConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: GatedDeltaConfig) -> float:
        return delta_flops(model, model.d_model * model.n_heads)

    def add_rates(self, model: ModelConfig) -> None:
        self.w_beta = Linear(model.d_model, model.n_heads, bias=model.bias)

    def rate_projections(self) -> list[Linear]:
        return [self.w_beta]

    def rates_from_logits(self, *logits_TC: Tensor) -> DeltaRates:
        """Return the delta net's rates: ln gamma = 0 (nothing decays) and beta = sigmoid(logit).

        A `DeltaRates` in float32 (float64 for float64). There is one logit, [..., H].
        """
        (beta,) = (torch.sigmoid(logit.to(statistics_dtype(logit.dtype))) for logit in logits_TC)
        return DeltaRates(torch.zeros_like(beta), beta)


class KDA(DeltaMemory):
    """Delta memory with one retention gate per channel of the keys, projected from x through a bottleneck."""

    Config: ClassVar[type[Config]] = KDAConfig
    config: KDAConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: KDAConfig) -> float:
        """Return KDA's FLOPs per token and layer: gate, output projection, recurrence, and projections of the rates.

        The rates' are the bottleneck D to X, from it to H X gates, and beta. `config` is ignored.
        """
        d, heads, size = model.d_model, model.n_heads, model.head_dim
        return delta_flops(model, d * size + size * heads * size + d * heads)

    def add_rates(self, model: ModelConfig) -> None:
        """Create KDA's bottleneck (D to X, no bias) and the projections of gamma (X to H X) and beta (D to H)."""
        self.w_down = Linear(model.d_model, model.head_dim, bias=False)
        self.w_gamma = Linear(model.head_dim, model.n_heads * model.head_dim, bias=model.bias)
        self.w_beta = Linear(model.d_model, model.n_heads, bias=model.bias)

    def log_gates(self, x_BTD: Tensor) -> Tensor:
        """Return ln gamma, [B, T, H, X]."""
        return self.read_rates(x_BTD).log_keep

    def rate_projections(self) -> list[Linear]:
        return [self.w_down, self.w_beta]

    def rates_from_logits(self, *logits_TC: Tensor) -> DeltaRates:
        """Return KDA's rates: ln gamma [..., H, X], projected from the bottleneck, and beta [..., H].

        ln gamma = logsigmoid(w_gamma(bottleneck) + GAMMA_OFFSET), beta = sigmoid(logit). A `DeltaRates` in float32
        (float64 for float64).

        Args:
            *logits_TC: outputs of the bottleneck [..., X] and of the projection of beta [..., H].
        """
        down, beta = logits_TC
        dtype = statistics_dtype(down.dtype)
        logit = self.w_gamma(down).to(dtype).unflatten(-1, (self.heads, self.head_dim))
        return DeltaRates(functional.logsigmoid(logit + GAMMA_OFFSET), torch.sigmoid(beta.to(dtype)))

    def write(
        self, rates: DeltaRates, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write a sequence into the state by the delta rule with channelwise decay and read it back with the queries.

        Per token M <- M diag(gamma), then M <- M + beta (v - M k) kᵀ, then the readout M q; k and q are scaled to unit
        length here.

        Args:
            rates: from `read_rates`.
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            state: state before the first token, [B, H, X_v, X_k]; None (zeros) at a sequence's start.

        Returns:
            (readout [B, T, H, X] in q's type, the state after the last token, float32, or float64 for float64).
        """
        args = q_BTHX, k_BTJX, v_BTJX, rates.log_keep, rates.step_BTH
        return channelwise.channelwise_delta(*args, chunk=self.config.chunk, initial_state=state)

    def together(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return the number of tokens that KDA's kernel solves together: 64 with FLA, else the config's `chunk`.

        FLA (flash-linear-attention) is used where it can run on that device and dtype and passes its self-test, which
        the first call may run. Chunks of a multiple of the result give the same result.
        """
        fla = channelwise.choose_backend(device, dtype, self.head_dim).backend == "fla"
        return 64 if fla else self.config.chunk

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"memory": str(channelwise.choose_backend(device, dtype, self.head_dim))}
