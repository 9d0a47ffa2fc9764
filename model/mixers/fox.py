"""Forgetting attention (FoX) as a mixer.

Source: docs/reference/mechanisms.md, "Forgetting attention".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size, S cached keys.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.attention.forgetting.op import choose_backend, forgetting_attention
from ...kernels.paged.single_query import row_scores
from ..bases import PreviousToken, QueryBlockMixer, ScaledConfig, attention_flops
from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, Real, knob
from ..kv_cache import KVView
from .gates import Gate, cumulative_log_gate, decayed_attention


class FoXConfig(ScaledConfig):
    """Settings of forgetting attention."""

    gate_bias: Real = knob(0.0, "Initial bias of the gates' logits: 0 is a gate of 0.5.", identity=0.0)
    gate_std: Float = knob(
        0.02, "Initial standard deviation of the gates' projection.", identity=0.02, ge=0, le=MAX_FLOAT
    )


class FoX(QueryBlockMixer):
    """Forgetting attention: softmax attention with data-dependent decay.

    Each token has a forget gate per query head. A score gets the sum of the natural logs (<= 0) of the gates of the
    tokens after the key, up to the query's own.
    """

    Config: ClassVar[type[Config]] = FoXConfig
    reads_input: ClassVar[bool] = True
    config: FoXConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: FoXConfig, keys: float) -> float:
        """Return FLOPs per token: those of attention plus the projection of the gates."""
        return attention_flops(model, keys) + 2.0 * model.d_model * model.n_heads

    def __init__(self, model: ModelConfig, config: FoXConfig) -> None:
        super().__init__(model, config)
        self.gate = Gate(model.d_model, model.n_heads, std=config.gate_std, offset=config.gate_bias)
        self.size, self.window = model.head_dim, model.window_size

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, x_BTD: Tensor,
        block: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return causal softmax attention whose scores decay by forget gates, [B, T, H, X].

        The logit of query i and key j is scale q_i k_j plus the sum of the log gates of tokens j + 1 ... i. Gates are
        projected from `x_BTD`, one per token and query head.

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            x_BTD: the block's normed input.
            block: queries that the torch backend scores at a time, memory and rounding only; None: 1024. Kernels ignore
                it.
        """
        return forgetting_attention(
            q_BTHX, k_BTJX, v_BTJX, self.gate(x_BTD), scale=self.config.scale, window=window, query_block=block
        )

    def keep(
        self, k_BTJX: Tensor, v_BTJX: Tensor, *, places_BT: Tensor, before: PreviousToken | None, x_BTD: Tensor
    ) -> dict[str, Tensor]:
        """Return the entries to cache: "k" and "v", [B, T, J, X], and "fall" [B, T, H].

        "fall" is the cumulative log gate, float64.

        Args:
            k_BTJX: keys.
            v_BTJX: values.
            places_BT: ignored.
            before: cached entries of the token before the first one, whose "fall" is continued; None: start from 0.
            x_BTD: the block's normed input, from which the gates are projected.
        """
        return {"k": k_BTJX, "v": v_BTJX, "fall": cumulative_log_gate(self.gate(x_BTD), before)}

    def step(self, q_BHX: Tensor, cache: KVView, x_BD: Tensor) -> Tensor:
        """Return forgetting attention at one new token per sequence, from the cache: [B, H, X] in q's type.

        Softmax of scale q k + (sum of the log gates of the tokens after the key, the new one included), times v. A
        padding row gives 0. Reads whole sequences from the cache, without a kernel.

        Args:
            q_BHX: queries of the new tokens.
            cache: cached "k", "v" and "fall" (cumulative log gate) of all tokens, the new ones included; its window
                applies.
            x_BD: ignored, because the new tokens' gates are in the cache already.
        """
        scores_BHS = row_scores(q_BHX, cache.gather("k"), self.config.scale)
        return decayed_attention(scores_BHS, cache).to(q_BHX.dtype)

    def log_gates(self, x_BTD: Tensor, k_BTJX: Tensor) -> Tensor:
        """Return the natural log of each token's forget gate, [B, T, H]; it applies to all earlier tokens."""
        log_gate_BTH: Tensor = self.gate(x_BTD)
        return log_gate_BTH

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.size, window) for window in (None, self.window))
        return {"forgetting": str(full), "forgetting_window": str(windowed)}
