"""Threshold relative attention (TRA) as a mixer.

Source: docs/reference/mechanisms.md, "Threshold relative attention".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size, S cached keys, P gates of a
token.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...kernels.attention.threshold.op import choose_backend, distances, threshold_attention
from ...kernels.paged.single_query import row_attention, row_scores
from ..bases import QueryBlockMixer, ScaledConfig, attention_flops
from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, knob
from ..kv_cache import KVView
from .gates import Gate


class TRAConfig(ScaledConfig):
    """Settings of threshold relative attention; docs/reference/mechanisms.md lists the other settings of the authors' network."""

    empty: Literal["zero", "uniform"] = knob(
        "zero",
        "Output of a query for which no key survives: zero, or the mean of its visible values.",
        identity="zero",
    )
    tie_gate: Literal["head", "shared"] = knob(
        "head", "One gate per head and token, or one per token for all heads.", identity="head"
    )
    gate_bias: Float | None = knob(
        None,
        "Initial bias of the gates' logits; null: drawn like that of other projections.",
        identity=None,
        ge=-MAX_FLOAT,
        le=MAX_FLOAT,
    )


class TRA(QueryBlockMixer):
    """Threshold relative attention: only keys with a positive score survive.

    A surviving key's score, scale q k, gets the query's log gate times the number of survivors between key and query,
    both included, so that the nearest survivor counts 1. Survival and count have no gradient.
    """

    Config: ClassVar[type[Config]] = TRAConfig
    reads_input: ClassVar[bool] = True
    config: TRAConfig

    @classmethod
    def check(cls, model: ModelConfig, config: TRAConfig) -> None:
        """Raise ValueError for `scale: 0`, with which no key would survive."""
        if config.scale == 0:
            raise ValueError("scale must not be 0: a key survives only with a score above 0, so none would")

    @classmethod
    def num_gates(cls, model: ModelConfig, config: TRAConfig) -> int:
        """Return the number of gates per token: one per head, or 1 if shared."""
        return model.n_heads if config.tie_gate == "head" else 1

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: TRAConfig, keys: float) -> float:
        return attention_flops(model, keys) + 2.0 * model.d_model * cls.num_gates(model, config)

    def __init__(self, model: ModelConfig, config: TRAConfig) -> None:
        """Create the gate's projection, uniform in +-1/sqrt(D) like torch's Linear.

        Values are drawn from torch's global generator. Its bias is initialised likewise, or to `gate_bias` if that is
        set.
        """
        super().__init__(model, config)
        gates = self.num_gates(model, config)
        # the initial values of torch's own Linear
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
        """Return softmax of s + n log gate over the keys with s = scale q k > 0, times v: [B, T, H, X].

        n counts such keys from this one to the query, both included, and the gate is the query's. A query without such
        a key reads 0, or with `empty: uniform` the mean of the values that it sees.

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            x_BTD: the block's normed input, from which the gates are projected.
            block: queries that the torch backend scores at a time, memory and rounding only; None: 1024. Kernels ignore
                it.
        """
        decay_BTH = self.gate(x_BTD).expand(*q_BTHX.shape[:3])
        return threshold_attention(
            q_BTHX, k_BTJX, v_BTJX, decay_BTH, scale=self.config.scale, window=window, empty=self.config.empty,
            query_block=block,
        )  # fmt: skip

    def step(self, q_BHX: Tensor, cache: KVView, x_BD: Tensor) -> Tensor:
        """Return threshold relative attention at one new token per sequence, from the cache: [B, H, X] in q's type.

        Softmax of s + n ln(gate) over the visible keys with s = scale q k > 0 (the survivors), times v. The gate is the
        new token's, and n counts the survivors from the key to the new token, both included. Without a survivor the
        result is 0, or with `empty: uniform` the mean of the visible values. A padding row gives 0. Reads whole
        sequences from the cache, without a kernel.

        Args:
            q_BHX: queries of the new tokens.
            cache: cached "k" and "v" of all tokens, the new ones included; its window applies.
            x_BD: the block's normed input at the new tokens, from which their gates are projected.
        """
        v, seen_BS = cache.gather("v"), cache.seen
        scores_BHS = row_scores(q_BHX, cache.gather("k"), self.config.scale)
        survives = (scores_BHS > 0) & seen_BS[:, None]
        decay_BH1 = self.gate(x_BD[:, None]).transpose(1, 2).expand(*q_BHX.shape[:2], 1)
        logits_BHS = torch.where(
            survives, scores_BHS + distances(survives).to(scores_BHS.dtype) * decay_BH1, -torch.inf
        )
        if self.config.empty == "uniform":
            logits_BHS = torch.where(survives.any(-1, keepdim=True), logits_BHS, 0.0)
        return row_attention(logits_BHS, v, seen_BS).to(q_BHX.dtype)

    def log_gates(self, x_BTD: Tensor, k_BTJX: Tensor) -> Tensor:
        """Return the natural log of each query's gate, [B, T, P], <= 0, float32 (float64 for float64).

        Times n, the number of survivors from the key to the query, both included, it is added to the key's score: the
        softmax weight, not the score, is multiplied by gate^n. P is the number of heads, or 1 with `tie_gate: shared`.
        `k_BTJX` is ignored.
        """
        log_gate_BTP: Tensor = self.gate(x_BTD)
        return log_gate_BTP

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"threshold": str(choose_backend(device, dtype, self.size))}
