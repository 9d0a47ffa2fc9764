"""PaTH attention as a mixer.

Source: docs/reference/mechanisms.md, "PaTH attention".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size, C channels.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.attention.path.op import choose_backend, path_attention
from ...kernels.conv.op import causal_conv
from ...kernels.norms import statistics_dtype
from ..bases import QueryBlockMixer, ScaledConfig, attention_flops
from ..bounds import MAX_FLOAT, MAX_TAPS, MAX_WIDTH
from ..config import Config, Float, Int, ModelConfig, Real, knob
from ..layers import CausalConv, Linear
from .gates import Gate

CHUNK = 64
"""Tokens per chunk of transitions that the FLOP count assumes."""


class PaTHConfig(ScaledConfig):
    """Settings of PaTH attention, which has a transition per KV head and token."""

    rank: Int | None = knob(
        32,
        "Width between the two projections that compute w; null: a single projection.",
        identity=32,
        ge=1,
        le=MAX_WIDTH,
    )
    taps: Int = knob(3, "Taps of the convolution over w.", identity=3, ge=1, le=MAX_TAPS)
    gate_bias: Real = knob(0.0, "Initial bias of beta's logits: 0 is a beta of 1.", identity=0.0)
    gate_std: Float = knob(0.02, "Initial standard deviation of beta's projection.", identity=0.02, ge=0, le=MAX_FLOAT)


class PaTH(QueryBlockMixer):
    """PaTH attention: keys are multiplied by Householder-like transitions I - beta w wᵀ of later tokens.

    The score of query i and key j is scale q_iᵀ A_i ... A_{j+1} k_j with A_t = I - beta_t w_t w_tᵀ, one per token and
    KV head. It has no `step`: each new token of a text recomputes the whole sequence.
    """

    Config: ClassVar[type[Config]] = PaTHConfig
    reads_input: ClassVar[bool] = True
    config: PaTHConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: PaTHConfig, keys: float) -> float:
        """Return FLOPs per token: attention, projections of w and beta, and transitions in chunks of CHUNK tokens (64).

        The chunk is that of this estimate; kernels may take another. Two FLOPs per multiply-add; `keys` is the mean
        number of keys per query, causal mask and window considered.
        """
        heads, inner, size = model.n_kv_heads, model.n_kv_heads * model.head_dim, model.head_dim
        width = model.d_model if config.rank is None else config.rank
        projections = 2.0 * width * inner + (0.0 if config.rank is None else 2.0 * model.d_model * width)
        projections += 2.0 * model.d_model * heads
        # within a chunk: w wᵀ, w kᵀ and the moved keys, and a triangular solve for w and w kᵀ
        inside = heads * (6.0 * size * CHUNK + (CHUNK - 1.0) * (size + CHUNK))
        # a query is multiplied with each chunk's w and u, and in its own chunk with the solution for w kᵀ
        turned = model.n_heads * (4.0 * size * keys + 2.0 * CHUNK * min(keys, (CHUNK + 1) / 2))
        return attention_flops(model, keys) + projections + inside + turned

    def __init__(self, model: ModelConfig, config: PaTHConfig) -> None:
        """Create the projections of w (through `rank` channels, unless None), its convolution, and the gate beta.

        Only beta's values are set here; the others come from `Backbone.init_weights`.
        """
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
        """Return softmax of scale q_iᵀ A_i ... A_{j+1} k_j over visible keys j, times v: [B, T, H, X].

        A_t = I - beta_t w_t w_tᵀ is the transition of token t, one per KV head.

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            x_BTD: the block's normed input, from which w and beta are projected.
            block: queries that the torch backend scores at a time, memory and rounding only; None: 1024. Kernels ignore
                it.
        """
        w_BTJX, beta_BTJ = self.maps(x_BTD)
        return path_attention(
            q_BTHX, k_BTJX, v_BTJX, w_BTJX, beta_BTJ, scale=self.config.scale, window=window, query_block=block
        )

    def maps(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transitions' directions and strengths for the block's normed input.

        w is silu of a causal convolution over the projected input, normalised per KV head; a zero vector stays zero.
        beta is twice a sigmoid.

        Returns:
            (w [B, T, J, X] of unit length, beta [B, T, J] in (0, 2)), in float32 (float64 for float64).
        """
        w_BTC = self.w(x_BTD if self.low is None else self.low(x_BTD))
        w_BTC = functional.silu(causal_conv(w_BTC, self.conv.filters(w_BTC.dtype)))
        w_BTJX = w_BTC.to(statistics_dtype(w_BTC.dtype)).unflatten(-1, (-1, self.size))
        return functional.normalize(w_BTJX, dim=-1), 2 * self.beta(x_BTD).exp()

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.size, windowed=w) for w in (False, True))
        return {"path": str(full), "path_window": str(windowed)}
