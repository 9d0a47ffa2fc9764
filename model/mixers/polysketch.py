"""PolySketch attention as a mixer.

Source: docs/reference/mechanisms.md, "PolySketch attention".
Letters of shapes: B batch, T length, H query heads, J KV heads, X head size, S cached keys.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...kernels.attention.polysketch.op import (
    choose_backend,
    divided,
    feature_sums,
    half_sketches,
    pair_weights,
    polysketch_attention,
    read_sums,
    weigh,
    with_ones,
)
from ...kernels.norms import statistics_dtype
from ...kernels.paged.single_query import row_scores
from ..bases import PreviousToken, QueryBlockMixer, ScaledConfig, attention_flops
from ..bounds import MAX_LENGTH, MAX_WIDTH
from ..config import Config, Int, ModelConfig, knob
from ..kv_cache import CacheCapacity, KVView

MAX_SKETCH = 256
"""Most columns of a half sketch; a feature has their square."""


class PolySketchConfig(ScaledConfig):
    """Settings of PolySketch attention."""

    degree: Int = knob(4, "Degree of the polynomial, an even number.", identity=4, ge=2, le=MAX_WIDTH)
    sketch: Int = knob(
        32,
        "Columns of a half sketch; features of earlier blocks have the square of this number.",
        identity=32,
        ge=1,
        le=MAX_SKETCH,
    )
    block: Int = knob(256, "Tokens of a block, within which weights are exact.", identity=256, ge=1, le=MAX_LENGTH)


class PolySketch(QueryBlockMixer):
    """PolySketch attention: weights (scale q k)^degree, exact within blocks, by random features across them.

    Each weight is divided by 1 + the sum of a query's weights. Earlier blocks are a state of constant size per KV head,
    from which `step` decodes; a network with a window also caches keys and values.
    """

    Config: ClassVar[type[Config]] = PolySketchConfig
    config: PolySketchConfig
    draws: Tensor
    """Fixed random directions [degree / 2, J, X, sketch], shared by queries and keys; a buffer."""

    @classmethod
    def check(cls, model: ModelConfig, config: PolySketchConfig) -> None:
        """Raise ValueError for an odd `degree`."""
        if config.degree % 2:
            raise ValueError(f"degree ({config.degree}) must be even")

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: PolySketchConfig, keys: float) -> float:
        """Return FLOPs per token: attention to half a block, half sketches, and sums of features written and read.

        Up to a block of keys nothing is sketched.
        """
        near = (config.block + 1) / 2
        if keys <= near:
            return attention_flops(model, keys)
        heads, kv, size = model.n_heads, model.n_kv_heads, model.head_dim
        sketches = (heads + kv) * config.degree * size * config.sketch
        return attention_flops(model, near) + sketches + 2.0 * (heads + kv) * config.sketch**2 * (size + 1)

    def __init__(self, model: ModelConfig, config: PolySketchConfig) -> None:
        """Draw the directions from torch's global generator, which is seeded from the cell's seed."""
        super().__init__(model, config)
        self.kv_heads, self.size, self.windowed = model.n_kv_heads, model.head_dim, model.window
        self.register_buffer("draws", torch.randn(config.degree // 2, self.kv_heads, self.size, config.sketch))

    @property
    def scale(self) -> float:
        """Factor of q·k."""
        return self.size**-0.5 if self.config.scale is None else self.config.scale

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        """Return the sums of w v over 1 + the sums of w, over the visible keys: [B, T, H, X].

        w is (scale q k)^degree for a key of the query's block, and the product of their features for an earlier one.

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            block: queries that torch processes at a time, memory and rounding only; None: those of a block of the mixer.
        """
        return polysketch_attention(
            q_BTHX, k_BTJX, v_BTJX, self.draws, block=self.config.block, scale=self.scale, window=window,
            query_block=block,
        )  # fmt: skip

    def keep(
        self, k_BTJX: Tensor, v_BTJX: Tensor, *, places_BT: Tensor, before: PreviousToken | None
    ) -> dict[str, Tensor]:
        """Return keys and values to cache per token in a network with a window; nothing in others."""
        return {"k": k_BTJX, "v": v_BTJX} if self.windowed else {}

    def open(self, capacity: CacheCapacity) -> dict[str, Tensor]:
        """Return the empty state of every slot: sums over earlier blocks, and sums, keys and values of the last one."""
        shape = self.kv_heads, self.config.sketch**2, self.size + 1
        dtype = statistics_dtype(capacity.dtype)
        tokens = self.config.block, self.kv_heads, self.size
        return {
            "sums": capacity.table(*shape, dtype=dtype),
            "block_sums": capacity.table(*shape, dtype=dtype),
            "block_k": capacity.table(*tokens),
            "block_v": capacity.table(*tokens),
        }

    def begin(self, k_BTJX: Tensor, v_BTJX: Tensor) -> dict[str, Tensor]:
        """Return the state after whole sequences of one or more tokens, [B, ...] by name as in `open`."""
        block, dtype = self.config.block, k_BTJX.dtype
        start = (k_BTJX.shape[1] - 1) // block * block
        sums = None
        for first in range(0, k_BTJX.shape[1], block):
            k, v = (part[:, first : first + block] for part in (k_BTJX, v_BTJX))
            added = feature_sums(half_sketches(k, self.draws, self.scale), with_ones(v), dtype)
            if first < start:
                sums = added if sums is None else sums + added
        last = {"block_k": k, "block_v": v}
        padding = (0, 0, 0, 0, 0, block - k.shape[1])
        padded = {name: torch.nn.functional.pad(part, padding) for name, part in last.items()}
        return {"sums": torch.zeros_like(added) if sums is None else sums, "block_sums": added, **padded}

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        """Return PolySketch attention at one new token per sequence: [B, H, X] in q's type.

        Without a window from the state, which is updated in place; with one from cached keys and values.

        Args:
            q_BHX: queries of the new tokens.
            cache: state of each sequence, and the new token's key and value; its window applies.
        """
        block, m_BHR = self.config.block, half_sketches(q_BHX[:, None], self.draws, self.scale)[:, 0]
        positions_B = cache.places
        rows = self._advance(cache, positions_B % block)
        if cache.window is None:
            seen_BS = torch.arange(block, device=q_BHX.device) <= (positions_B % block)[:, None]
            exact_BHS = row_scores(q_BHX, rows["block_k"], self.scale)
            weight_BHS = exact_BHS**self.config.degree * seen_BS[:, None]
            total = weigh(weight_BHS[:, :, None], with_ones(rows["block_v"]))
            total = total + read_sums(m_BHR[:, None], rows["sums"], q_BHX.dtype)
            return divided(total)[:, 0].to(q_BHX.dtype)
        k, seen_BS = cache.gather("k"), cache.seen
        in_block_BS = torch.arange(k.shape[1], device=k.device) // block == (positions_B // block)[:, None]
        # entries that no query sees are arbitrary, even NaN
        k, v = (part.masked_fill(~seen_BS[..., None, None], 0) for part in (k, cache.gather("v")))
        weight_BHS = pair_weights(
            row_scores(q_BHX, k, self.scale), row_scores(m_BHR, half_sketches(k, self.draws, self.scale), 1.0),
            self.config.degree, in_block_BS[:, None], seen_BS[:, None],
        )  # fmt: skip
        return divided(weigh(weight_BHS[:, :, None], with_ones(v)))[:, 0].to(q_BHX.dtype)

    def _advance(self, cache: KVView, offset_B: Tensor) -> dict[str, Tensor]:
        """Add the new tokens to the state of their sequences, in place; return its rows by name.

        Args:
            cache: state, and the new tokens' keys and values.
            offset_B: offset of each new token in its block; 0 begins a block and adds the last one's sums to `sums`.
        """
        rows = {name: cache.row(name) for name in ("sums", "block_sums", "block_k", "block_v")}
        k_BJX, v_BJX = cache.new["k"], cache.new["v"]
        begins = (offset_B == 0).view(-1, 1, 1, 1)
        added = feature_sums(
            half_sketches(k_BJX[:, None], self.draws, self.scale), with_ones(v_BJX[:, None]), k_BJX.dtype
        )
        rows["sums"] = torch.where(begins, rows["sums"] + rows["block_sums"], rows["sums"])
        rows["block_sums"] = torch.where(begins, added, rows["block_sums"] + added)
        at = torch.arange(self.config.block, device=offset_B.device) == offset_B[:, None]
        for name, new in (("block_k", k_BJX), ("block_v", v_BJX)):
            rows[name] = torch.where(at[..., None, None], new[:, None].to(rows[name].dtype), rows[name])
        cache.set_rows(rows)
        return rows

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return {"polysketch": implementation}, and "polysketch_window" in a network with a window."""
        config = self.config
        full = choose_backend(device, dtype, self.size, config.degree, config.sketch, config.block)
        windowed = {"polysketch_window": "torch (no kernel supports a window)"} if self.windowed else {}
        return {"polysketch": str(full)} | windowed
