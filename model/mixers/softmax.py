"""Softmax attention without positions (NoPE), with rotary positions (RoPE), and scaled by ln n (SSMax).

Source: docs/reference/mechanisms.md, "Softmax attention" and "Scalable softmax".
Letters of shapes: B batch, T length, H query heads, J KV heads, X head size, R distractors.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...kernels.attention.softmax.op import choose_backend, softmax_attention, softmax_distractor_loss
from ...kernels.norms import statistics_dtype
from ...kernels.paged.op import paged_softmax
from ...kernels.rotary import check_rotary, rotate
from ..bases import PreviousToken, QueryBlockMixer, ScaledConfig, attention_flops
from ..bounds import MAX_FLOAT
from ..config import Config, Flag, Float, ModelConfig, Real, knob
from ..kv_cache import KVView


class SoftmaxConfig(ScaledConfig):
    """Settings of every softmax mixer."""

    distractor_norm: Flag = knob(True, "RMS-norm distractor keys like the keys of tokens.", identity=True)
    distractor_window: Flag = knob(True, "Apply the window in the distractor loss.", identity=True)


class RoPEConfig(SoftmaxConfig):
    """Settings of RoPE; the published network has rotary half-truncated, base 1024, scale 0.12 and canon off."""

    rotary: Literal["full", "half-truncated"] = knob(
        "full",
        "Channels to rotate: all (full), or half of them, with other frequencies (half-truncated).",
        identity="full",
    )
    base: Float = knob(10000.0, "Base of the rotary frequencies.", identity=10000.0, gt=1, le=MAX_FLOAT)


class NoPE(QueryBlockMixer):
    """Causal softmax attention without positions other than Canon's; scores are scale q k, by default q k / sqrt(X)."""

    Config: ClassVar[type[Config]] = SoftmaxConfig
    has_distractor: ClassVar[bool] = True
    config: SoftmaxConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float:
        return attention_flops(model, keys)

    def __init__(self, model: ModelConfig, config: SoftmaxConfig) -> None:
        super().__init__(model, config)
        self.head_dim = model.head_dim

    @property
    def norm_distractor_keys(self) -> bool:
        """Setting `distractor_norm`: True if distractor keys are RMS-normed like real ones."""
        return self.config.distractor_norm

    def apply_positions(self, x_BTHX: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Return queries or keys [B, T, H, X] with positions applied: unchanged in NoPE, rotated in RoPE.

        Args:
            x_BTHX: queries or keys.
            positions_BT: int64 positions; None: 0, 1, 2, ...
        """
        return x_BTHX

    def prepare_queries(self, q_BTHX: Tensor, window: int | None) -> Tensor:
        """Return the queries of whole sequences as they are multiplied with the keys: with positions applied.

        `window` is the number of most recent keys that a query sees (None: all); it is ignored here, and used by
        subclasses.
        """
        return self.apply_positions(q_BTHX)

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        """Return softmax of scale q k over visible keys, times v, with positions applied to q and k: [B, T, H, X].

        NoPE applies none; subclasses rotate or scale them.

        Args:
            q_BTHX: queries, without positions.
            k_BTJX: keys, without positions.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            block: queries that the torch backend scores at a time, memory and rounding only; fused kernels ignore it.
                None: 1024 with a window, all at once without.
        """
        q, k = self.prepare_queries(q_BTHX, window), self.apply_positions(k_BTJX)
        return softmax_attention(q, k, v_BTJX, scale=self.config.scale, window=window, query_block=block)

    def keep(
        self, k_BTJX: Tensor, v_BTJX: Tensor, *, places_BT: Tensor, before: PreviousToken | None
    ) -> dict[str, Tensor]:
        """Return the keys with positions applied as "k" and the values as "v", [B, T, J, X] each, to be cached."""
        return {"k": self.apply_positions(k_BTJX, places_BT), "v": v_BTJX}

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        """Return softmax attention at one new token per sequence, from the cache: [B, H, X].

        NoPE and RoPE: softmax of scale q k over the visible keys, times v. The new queries get their positions here
        (none in NoPE); cached keys have theirs.

        Args:
            q_BHX: queries of the new tokens, without positions.
            cache: cached "k" (with positions) and "v" of all tokens, the new ones included; its window applies.
        """
        q = self.apply_positions(q_BHX[:, None], cache.places[:, None])[:, 0]
        return paged_softmax(q, cache["k"], cache["v"], cache.texts, scale=self.config.scale, window=cache.window)

    def distractor_loss(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, k_r_BRJX: Tensor, v_r_BRJX: Tensor, y_BTHX: Tensor, *,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Return the mean squared difference between the outputs with and without the distractors (scalar).

        The mean runs over batch, tokens, heads and channels, before output gate and projection. Every query sees all R
        distractors in addition to its real keys. Nothing is detached here. The window is ignored with
        `distractor_window: false`.

        Args:
            q_BTHX: queries, without positions.
            k_BTJX: real keys, without positions.
            v_BTJX: real values.
            k_r_BRJX: R random keys, detached; they get no positions.
            v_r_BRJX: R random values, detached.
            y_BTHX: output of `forward`, without distractors.
            window: number of most recent real keys that a query sees; None: all earlier ones.
        """
        # Distractors have no position in the sequence, so their keys are not rotated.
        q, k = self.prepare_queries(q_BTHX, window), self.apply_positions(k_BTJX)
        window = window if self.config.distractor_window else None
        return softmax_distractor_loss(q, k, v_BTJX, k_r_BRJX, v_r_BRJX, y_BTHX, scale=self.config.scale, window=window)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.head_dim, windowed=w) for w in (False, True))
        return {"softmax": str(full), "softmax_window": str(windowed)}


class RoPE(NoPE):
    """Softmax attention with rotary positions on queries and keys ("full" or "half-truncated", `RoPEConfig`)."""

    Config: ClassVar[type[Config]] = RoPEConfig
    config: RoPEConfig

    @classmethod
    def check(cls, model: ModelConfig, config: Any) -> None:
        check_rotary(config.rotary, model.head_dim)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float:
        return attention_flops(model, keys)

    def apply_positions(self, x_BTHX: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Return queries or keys rotated by their positions, [B, T, H, X]; positions None: 0, 1, 2, ..."""
        return rotate(x_BTHX, self.config.rotary, self.config.base, positions_BT)


class SSMaxConfig(SoftmaxConfig):
    """Settings of scalable softmax, which has one factor per head."""

    sharpness: Real = knob(
        0.168, "Initial factor s of s ln n; 0.168 is 1 over the mean of ln n up to 1,024 keys.", identity=0.168
    )


class SSMax(NoPE):
    """Scalable softmax: scores times s ln n; n is the number of keys that the query sees, s is learned per head.

    n counts the query's own key, so a sequence's first query has scores of 0. The factor stands in addition to `scale`.
    """

    Config: ClassVar[type[Config]] = SSMaxConfig
    config: SSMaxConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: SSMaxConfig, keys: float) -> float:
        return attention_flops(model, keys)

    def __init__(self, model: ModelConfig, config: SSMaxConfig) -> None:
        super().__init__(model, config)
        self.sharpness = nn.Parameter(torch.full((model.n_heads,), config.sharpness))

    def prepare_queries(self, q_BTHX: Tensor, window: int | None) -> Tensor:
        """Return queries [B, T, H, X] of whole sequences multiplied by s ln n.

        n is the number of keys up to the query, at most `window` unless that is None.
        """
        t = q_BTHX.shape[1]
        return self._scale_by_keys(q_BTHX, torch.arange(1, t + 1, device=q_BTHX.device).clamp(max=window or t))

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        """Return scalable softmax attention at one new token per sequence, from the cache: [B, H, X].

        Softmax of s ln n scale q k over the visible keys, times v; n is the number of visible keys, s the head's
        learned factor.

        Args:
            q_BHX: queries of the new tokens.
            cache: cached "k" and "v" of all tokens, the new ones included; its window also bounds n.
        """
        q = self._scale_by_keys(q_BHX, cache.texts.visible_counts(cache.window).clamp(min=1))
        return paged_softmax(q, cache["k"], cache["v"], cache.texts, scale=self.config.scale, window=cache.window)

    def _scale_by_keys(self, q_THX: Tensor, num_keys_T: Tensor) -> Tensor:
        """Return queries [..., T, H, X] times s ln n in the queries' type, s being each head's learned factor.

        Computed in float32 (float64 for float64).

        Args:
            q_THX: queries.
            num_keys_T: number of keys n that each query sees, at least 1.
        """
        dtype = statistics_dtype(q_THX.dtype)
        factor_TH = num_keys_T.to(dtype).log()[:, None] * self.sharpness.to(dtype)
        return (q_THX.to(dtype) * factor_TH[..., None]).to(q_THX.dtype)
