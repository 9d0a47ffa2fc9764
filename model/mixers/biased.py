"""Mixers that add to their scores what distance says: ALiBi, learned relative bias, contextual positions
(docs/mechanisms.md, "Other position schemes").
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...kernels.attention.contextual import contextual_attention
from ...kernels.attention.forgetting import choose_backend, forgetting_attention
from ...kernels.attention.scored import Span, dot_scores, scored_attention
from ...kernels.norms import statistics_dtype
from ...kernels.shapes import query_block
from ..bases import Mixer
from ..config import ModelConfig
from .biased_outline import ALiBiConfig, ALiBiOutline, CoPEConfig, CoPEOutline, RelConfig, RelOutline


class _InBlocks(Mixer):
    """A mixer whose `forward` takes the queries that it scores at a time."""

    def evaluate(self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, chunk: int) -> Tensor:
        block = query_block(chunk, *q_BTHX.shape[:2])
        mixed = self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, block=block)
        assert isinstance(mixed, Tensor)
        return mixed


class ALiBi(ALiBiOutline, _InBlocks):
    """A fixed slope a head over the distance: forgetting attention with constant gates."""

    config: ALiBiConfig

    def __init__(self, model: ModelConfig, config: ALiBiConfig) -> None:
        super().__init__(model, config)
        self.size = model.head_dim
        self.slopes = slopes(model.n_heads)

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        slope_H = torch.tensor(self.slopes, dtype=torch.float64, device=q_BTHX.device)
        gate_1TH = -slope_H.expand(1, q_BTHX.shape[1], -1)
        return forgetting_attention(
            q_BTHX, k_BTJX, v_BTJX, gate_1TH, scale=self.config.scale, window=window, query_block=block
        )

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"alibi": str(choose_backend(device, dtype, self.size))}


def slopes(heads: int) -> list[float]:
    """2^(-8 h / H) for h = 1 to H a power of two; else those of the next lower power, then every other one of twice it.

    Press, Smith and Lewis, "Train short, test long" (2022).
    """
    whole = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * h / whole) for h in range(1, whole + 1)]
    return first + [2.0 ** (-8 * h / (2 * whole)) for h in range(1, 2 * whole, 2)][: heads - whole]


class Rel(RelOutline, _InBlocks):
    """A learned number for each head and distance; far distances share the last one."""

    config: RelConfig

    def __init__(self, model: ModelConfig, config: RelConfig) -> None:
        super().__init__(model, config)
        self.table = nn.Parameter(torch.zeros(model.n_heads * self.numbers(config)))

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        heads = q_BTHX.shape[2]
        bias_HR = self.table.view(heads, -1)

        def logits(span: Span) -> Tensor:
            scores = dot_scores(q_BTHX, k_BTJX, span, self.config.scale)
            return scores + bias_HR.to(scores.dtype)[:, self._number(span.distance)]

        return scored_attention(v_BTJX, heads, logits, window=window, query_block=block)

    def _number(self, distance_MS: Tensor) -> Tensor:
        """Which number a distance has."""
        reach, count = self.config.reach, self.config.buckets
        distance = distance_MS.clamp(0, reach)
        if count is None:
            return distance
        own = count // 2
        grow = (distance.clamp(min=1).double() / own).log() / math.log(reach / own) * (count - own)
        return torch.where(distance < own, distance, (own + grow.long()).clamp(max=count - 1))


class CoPE(CoPEOutline, _InBlocks):
    """Positions that count the gates between key and query, each with a vector that the query is multiplied with."""

    config: CoPEConfig

    def __init__(self, model: ModelConfig, config: CoPEConfig) -> None:
        super().__init__(model, config)
        self.vectors = nn.Parameter(torch.zeros(config.positions, model.head_dim))

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        vectors = self.vectors.to(statistics_dtype(q_BTHX.dtype))
        return contextual_attention(
            q_BTHX, k_BTJX, v_BTJX, vectors, scale=self.config.scale, window=window, query_block=block
        )
