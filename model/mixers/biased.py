"""Mixers that add to their scores what distance says: ALiBi, learned relative bias, contextual positions
(docs/mechanisms.md, "Other position schemes").
"""

from __future__ import annotations

from bisect import bisect_left

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
        heads, reach = q_BTHX.shape[2], self.config.reach
        bias_HR = self.table.view(heads, -1)[:, self.number_of_distance()]

        def logits(span: Span) -> Tensor:
            scores = dot_scores(q_BTHX, k_BTJX, span, self.config.scale)
            m, s = span.seen_MS.shape
            # one number a diagonal, so that its gradient is a sum along it: from the last key at the first query on
            diagonals = torch.arange(m + s - 1, device=scores.device) + (span.start - span.stop + 1)
            along = bias_HR.to(scores.dtype)[:, diagonals.clamp(0, reach)]
            return scores + along.unfold(-1, s, 1).flip(-1)

        return scored_attention(v_BTJX, heads, logits, window=window, query_block=block)

    def number_of_distance(self) -> Tensor:
        """Which of a head's numbers the distances 0, 1, ... reach have, int64."""
        device = self.table.device
        distance = torch.arange(self.config.reach + 1, device=device)
        if self.config.buckets is None:
            return distance
        first = torch.tensor(first_distances(self.config.reach, self.config.buckets), device=device)
        return torch.bucketize(distance, first, right=True) - 1


def first_distances(reach: int, buckets: int) -> list[int]:
    """The least distance of each bucket: half of them hold one each, the rest grow by one ratio up to `reach`."""
    own = buckets // 2
    grow = buckets - own

    def starts(distance: int, m: int) -> bool:
        """Whether distance >= own (reach / own)^(m / grow), in whole numbers, which no rounding moves."""
        return distance**grow * own**m >= reach**m * own**grow

    return [*range(own), *(bisect_left(range(reach + 1), True, key=lambda d: starts(d, m)) for m in range(grow))]


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
