"""Softmax attention without positions, with rotary ones, and scaled by the number of keys (docs/mechanisms.md, "Softmax attention" and "Scalable softmax")."""

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
    """Settings of every softmax core."""

    distractor_norm: Flag = knob(True, "RMS-norm distractor keys like real ones.", identity=True)
    distractor_window: Flag = knob(True, "Keep the window in the distractor loss.", identity=True)


class RoPEConfig(SoftmaxConfig):
    """The published core: rotary half-truncated, base 1024, scale 0.12, canon off."""

    rotary: Literal["full", "half-truncated"] = knob(
        "full", "Rotate all pairs, or a quarter of the head size with the rest left still.", identity="full"
    )
    base: Float = knob(10000.0, "Base of the rotary frequencies.", identity=10000.0, gt=1, le=MAX_FLOAT)


class NoPE(QueryBlockMixer):
    """Causal softmax attention that knows no positions but Canon's."""

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
        return self.config.distractor_norm

    def apply_positions(self, x_BTHX: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Queries or keys with their positions, by default 0, 1, 2, ...; here they have none."""
        return x_BTHX

    def prepare_queries(self, q_BTHX: Tensor, window: int | None) -> Tensor:
        """Queries of a whole text as they meet the keys."""
        return self.apply_positions(q_BTHX)

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        q, k = self.prepare_queries(q_BTHX, window), self.apply_positions(k_BTJX)
        return softmax_attention(q, k, v_BTJX, scale=self.config.scale, window=window, query_block=block)

    def keep(
        self, k_BTJX: Tensor, v_BTJX: Tensor, *, places_BT: Tensor, before: PreviousToken | None
    ) -> dict[str, Tensor]:
        return {"k": self.apply_positions(k_BTJX, places_BT), "v": v_BTJX}

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        q = self.apply_positions(q_BHX[:, None], cache.places[:, None])[:, 0]
        return paged_softmax(q, cache["k"], cache["v"], cache.texts, scale=self.config.scale, window=cache.window)

    def distractor_loss(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, k_r_BRJX: Tensor, v_r_BRJX: Tensor, y_BTHX: Tensor, *,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        # Distractors have no place in the sequence, so their keys are not rotated.
        q, k = self.prepare_queries(q_BTHX, window), self.apply_positions(k_BTJX)
        window = window if self.config.distractor_window else None
        return softmax_distractor_loss(q, k, v_BTJX, k_r_BRJX, v_r_BRJX, y_BTHX, scale=self.config.scale, window=window)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.head_dim, windowed=w) for w in (False, True))
        return {"softmax": str(full), "softmax_window": str(windowed)}


class RoPE(NoPE):
    """The same with rotary positions."""

    Config: ClassVar[type[Config]] = RoPEConfig
    config: RoPEConfig

    @classmethod
    def check(cls, model: ModelConfig, config: Any) -> None:
        check_rotary(config.rotary, model.head_dim)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float:
        return attention_flops(model, keys)

    def apply_positions(self, x_BTHX: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        return rotate(x_BTHX, self.config.rotary, self.config.base, positions_BT)


class SSMaxConfig(SoftmaxConfig):
    """Of one factor a head."""

    sharpness: Real = knob(
        0.168, "Initial factor s of s ln n; 0.168 is 1 over the mean of ln n up to 1,024 keys.", identity=0.168
    )


class SSMax(NoPE):
    """Scores times s ln n, n being the keys that the query sees: the more keys, the sharper."""

    Config: ClassVar[type[Config]] = SSMaxConfig
    config: SSMaxConfig

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: SSMaxConfig, keys: float) -> float:
        return attention_flops(model, keys)

    def __init__(self, model: ModelConfig, config: SSMaxConfig) -> None:
        super().__init__(model, config)
        self.sharpness = nn.Parameter(torch.full((model.n_heads,), config.sharpness))

    def prepare_queries(self, q_BTHX: Tensor, window: int | None) -> Tensor:
        t = q_BTHX.shape[1]
        return self._scale_by_keys(q_BTHX, torch.arange(1, t + 1, device=q_BTHX.device).clamp(max=window or t))

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        q = self._scale_by_keys(q_BHX, cache.texts.counts(cache.window).clamp(min=1))
        return paged_softmax(q, cache["k"], cache["v"], cache.texts, scale=self.config.scale, window=cache.window)

    def _scale_by_keys(self, q_THX: Tensor, num_keys_T: Tensor) -> Tensor:
        """Queries [..., T, H, X] that see so many keys."""
        dtype = statistics_dtype(q_THX.dtype)
        factor_TH = num_keys_T.to(dtype).log()[:, None] * self.sharpness.to(dtype)
        return (q_THX.to(dtype) * factor_TH[..., None]).to(q_THX.dtype)
