"""Mixers whose scores get a bias that depends on distance: ALiBi, learned relative bias, CoPE.

CoPE, contextual positions, measures distance by gates instead of tokens.
Source: docs/reference/mechanisms.md, "Other position schemes".
Letters of shapes: B batch, T length, H query heads, J KV heads, X head size, S cached keys, R distances.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...kernels.attention.contextual import op as contextual
from ...kernels.attention.contextual.op import contextual_attention, position_scores
from ...kernels.attention.forgetting.op import choose_backend, forgetting_attention
from ...kernels.attention.relative import op as relative
from ...kernels.attention.relative.op import relative_attention
from ...kernels.norms import statistics_dtype
from ...kernels.paged.single_query import row_attention, row_scores
from ..bases import QueryBlockMixer, ScaledConfig, attention_flops
from ..bounds import MAX_LENGTH
from ..config import Config, Int, ModelConfig, knob
from ..kv_cache import KVView


class ALiBiConfig(ScaledConfig):
    """Settings of ALiBi, whose slopes are fixed."""


class RelConfig(ALiBiConfig):
    """Settings of the learned bias per head and distance."""

    reach: Int = knob(512, "Distance from which all keys share the last bias.", identity=512, ge=1, le=MAX_LENGTH)
    buckets: Int | None = knob(
        None,
        "Biases per head: half for the first distances, half for ranges that grow up to reach. None: one per distance.",
        identity=None,
        ge=2,
        le=MAX_LENGTH,
    )


class CoPEConfig(ALiBiConfig):
    """Settings of contextual positions, which count gates instead of tokens."""

    positions: Int = knob(
        64, "Number of positions with a vector; farther keys share the last.", identity=64, ge=1, le=MAX_LENGTH
    )


class ALiBi(QueryBlockMixer):
    """ALiBi: softmax attention with a fixed slope per head times the distance subtracted from the scores.

    Computed as forgetting attention with constant gates. It has no parameters; slopes are those of `alibi_slopes`.
    """

    Config: ClassVar[type[Config]] = ALiBiConfig
    config: ALiBiConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: ALiBiConfig, keys: float) -> float:
        return attention_flops(model, keys)

    def __init__(self, model: ModelConfig, config: ALiBiConfig) -> None:
        super().__init__(model, config)
        self.size, self.window = model.head_dim, model.window_size
        self.slopes = alibi_slopes(model.n_heads)

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        """Return softmax of scale q k - slope (i - j) over visible keys, times v: [B, T, H, X].

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            block: queries that the torch backend scores at a time, memory and rounding only; None: 1024. Kernels ignore
                it.
        """
        slope_H = torch.tensor(self.slopes, dtype=torch.float64, device=q_BTHX.device)
        gate_1TH = -slope_H.expand(1, q_BTHX.shape[1], -1)
        return forgetting_attention(
            q_BTHX, k_BTJX, v_BTJX, gate_1TH, scale=self.config.scale, window=window, query_block=block
        )

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        """Return ALiBi attention at one new token per sequence, from the cache: [B, H, X] in q's type.

        Softmax of scale q k - slope (distance) over the visible keys, times v. A padding row gives 0. Reads whole
        sequences from the cache, without a kernel.

        Args:
            q_BHX: queries of the new tokens.
            cache: cached "k" and "v" of all tokens, the new ones included; its window applies.
        """
        scores_BHS = row_scores(q_BHX, cache.gather("k"), self.config.scale)
        fade_BHS = -_slope_tensor(len(self.slopes), q_BHX.device) * cache.texts.distance[:, None]
        return row_attention(scores_BHS + fade_BHS.to(scores_BHS.dtype), cache.gather("v"), cache.seen).to(q_BHX.dtype)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.size, window) for window in (None, self.window))
        return {"alibi": str(full), "alibi_window": str(windowed)}


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each of `heads` heads, positive; a score gets minus the slope times the distance.

    For a power of two H they are 2^(-8 h / H), h = 1 ... H. Otherwise they are those of the next lower power of two,
    followed by every other slope (the 1st, 3rd, ...) of twice that power, as many as are missing.
    Source: Press, Smith and Lewis, "Train short, test long" (2022).
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)][: heads - power]


@functools.cache
def _slope_tensor(heads: int, device: torch.device) -> Tensor:
    """Return the slopes of `heads` heads as a float64 tensor [H, 1] on the device.

    It is cached for the life of the process, because a CUDA graph of a step cannot copy from the host; do not change
    it.
    """
    return torch.tensor(alibi_slopes(heads), dtype=torch.float64, device=device)[:, None]


class Rel(QueryBlockMixer):
    """Relative bias: softmax attention with a learned number per head and distance added to the scores.

    Distances beyond `reach` share the last number. With `buckets`, ranges of distances share a number. The numbers are
    one flat parameter [H * entries], head after head, which starts at 0.
    """

    Config: ClassVar[type[Config]] = RelConfig
    config: RelConfig

    @classmethod
    def check(cls, model: ModelConfig, config: RelConfig) -> None:
        """Raise ValueError if there are more `buckets` than `reach`."""
        if config.buckets is not None and config.reach < config.buckets:
            raise ValueError(f"buckets ({config.buckets}) must be at most reach ({config.reach})")

    @classmethod
    def entries_per_head(cls, config: RelConfig) -> int:
        """Return the number of learned numbers per head: `reach` + 1, or `buckets` if set."""
        return config.reach + 1 if config.buckets is None else config.buckets

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: RelConfig, keys: float) -> float:
        return attention_flops(model, keys)

    def __init__(self, model: ModelConfig, config: RelConfig) -> None:
        super().__init__(model, config)
        self.table = nn.Parameter(torch.zeros(model.n_heads * self.entries_per_head(config)))
        self.size = model.head_dim

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        """Return softmax of scale q k + bias[h, min(i - j, reach)] over visible keys, times v: [B, T, H, X].

        The bias of a head has `reach` + 1 numbers, one per distance; with `buckets` it has that many, and a range of
        distances shares one (`bucket_of_distance`). A Triton kernel runs where it can.

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            block: queries that the torch backend scores at a time, memory and rounding only; None: 1024. Kernels ignore
                it.
        """
        bias_HR = self.table.view(q_BTHX.shape[2], -1)[:, self.bucket_of_distance()]
        return relative_attention(
            q_BTHX, k_BTJX, v_BTJX, bias_HR, scale=self.config.scale, window=window, query_block=block
        )

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        """Return attention with learned relative bias at one new token per sequence: [B, H, X] in q's type.

        Softmax of scale q k + bias[h, min(distance, reach)] over the visible keys, times v; with `buckets`, ranges of
        distances share a number. A padding row gives 0. Reads whole sequences from the cache, without a kernel.

        Args:
            q_BHX: queries of the new tokens.
            cache: cached "k" and "v" of all tokens, the new ones included; its window applies.
        """
        scores_BHS = row_scores(q_BHX, cache.gather("k"), self.config.scale)
        bias_HR = self.table.view(q_BHX.shape[1], -1)[:, self._buckets].to(scores_BHS.dtype)
        bias_HBS = bias_HR[:, cache.texts.distance.clamp(0, self.config.reach)]
        return row_attention(scores_BHS + bias_HBS.transpose(0, 1), cache.gather("v"), cache.seen).to(q_BHX.dtype)

    def bucket_of_distance(self) -> Tensor:
        """Return for each distance 0 ... reach the index of its number in a head's table, int64 [reach + 1].

        Without `buckets` that is the distance itself. The tensor is on the table's device.
        """
        device = self.table.device
        distance = torch.arange(self.config.reach + 1, device=device)
        if self.config.buckets is None:
            return distance
        first = torch.tensor(first_distances(self.config.reach, self.config.buckets), device=device)
        return torch.bucketize(distance, first, right=True) - 1

    @functools.cached_property
    def _buckets(self) -> Tensor:
        """Cached result of `bucket_of_distance`, for decoding steps."""
        return self.bucket_of_distance()

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"rel": str(relative.choose_backend(device, dtype, self.size))}


def first_distances(reach: int, buckets: int) -> list[int]:
    """Return the smallest distance of each bucket, ascending; the first is 0. Equal starts mean an empty bucket.

    The first half of the buckets (rounded down) holds one distance each: 0, 1, 2, ... Bucket s + m of the others, with
    s the size of the first half and n of the second, starts at the first whole number at or above s (reach / s)^(m /
    n). The last bucket serves `reach` and all greater distances.

    Args:
        reach: distance of the formula, which lies in the last bucket; at least `buckets`.
        buckets: number of buckets, 2 or more.
    """
    num_single = buckets // 2
    num_growing = buckets - num_single

    def is_at_least_start(distance: int, m: int) -> bool:
        """Return True if distance >= num_single (reach / num_single)^(m / num_growing), in exact integer arithmetic."""
        return distance**num_growing * num_single**m >= reach**m * num_single**num_growing

    return [
        *range(num_single),
        *(bisect_left(range(reach + 1), True, key=lambda d: is_at_least_start(d, m)) for m in range(num_growing)),
    ]


class CoPE(QueryBlockMixer):
    """Contextual positions: softmax attention whose scores get the product of the query with a position vector.

    A key's position is the sum of the gates of the visible keys from it to the query, both included; a gate is the
    sigmoid of the key's scaled score with that query. Positions are cut off at `positions` - 1, and the product is
    interpolated between the two nearest learned vectors, which are shared by all heads and start at 0.
    """

    Config: ClassVar[type[Config]] = CoPEConfig
    config: CoPEConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: CoPEConfig, keys: float) -> float:
        """Return FLOPs per token of contextual positions: attention plus products of queries with position vectors.

        That is 4 H X keys + 2 H X positions, where `keys` is the mean number of keys per query. The projections around
        the mixer are not counted.
        """
        return attention_flops(model, keys) + 2.0 * model.n_heads * model.head_dim * config.positions

    def __init__(self, model: ModelConfig, config: CoPEConfig) -> None:
        super().__init__(model, config)
        self.vectors = nn.Parameter(torch.zeros(config.positions, model.head_dim))
        self.size = model.head_dim

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        """Return softmax of scale q k + q e(p) over visible keys, times v: [B, T, H, X].

        The position p of a key is the sum of sigmoid(scale q k) over the visible keys from it to the query, both
        included, at most `positions` - 1. e(p) is interpolated between the learned vectors next to p.

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            block: queries that the torch backend scores at a time, memory and rounding only; None: 1024. Kernels ignore
                it.
        """
        vectors = self.vectors.to(statistics_dtype(q_BTHX.dtype))
        return contextual_attention(
            q_BTHX, k_BTJX, v_BTJX, vectors, scale=self.config.scale, window=window, query_block=block
        )

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        """Return attention with contextual positions at one new token per sequence: [B, H, X] in q's type.

        Softmax of scale q k + q e(p) over the visible keys, times v, with p the sum of sigmoid(scale q k) over the
        visible keys from a key to the new token, at most `positions` - 1. A padding row gives 0. Reads whole sequences
        from the cache, without a kernel.

        Args:
            q_BHX: queries of the new tokens.
            cache: cached "k" and "v" of all tokens, the new ones included; its window applies.
        """
        scores_BHS, seen_BS = row_scores(q_BHX, cache.gather("k"), self.config.scale), cache.seen
        q_B1HX, scores_BH1S = q_BHX[:, None].to(scores_BHS.dtype), scores_BHS[:, :, None]
        bias_BH1S = position_scores(q_B1HX, scores_BH1S, seen_BS[:, None, None], self.vectors.to(scores_BHS.dtype))
        return row_attention(scores_BHS + bias_BH1S[:, :, 0], cache.gather("v"), seen_BS).to(q_BHX.dtype)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        return {"cope": str(contextual.choose_backend(device, dtype, self.size, len(self.vectors)))}
