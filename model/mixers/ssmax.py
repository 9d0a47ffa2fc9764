"""Scalable softmax as a mixer (docs/mechanisms.md, "Scalable softmax")."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ...kernels.norms import statistics_dtype
from ...kernels.paged.op import paged_softmax
from ..bases import attention_flops
from ..config import Config, ModelConfig, Real, knob
from ..kv_cache import Kept
from .softmax import NoPE, SoftmaxConfig


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

    def query(self, q_BTHX: Tensor, window: int | None) -> Tensor:
        t = q_BTHX.shape[1]
        return self._by_keys(q_BTHX, torch.arange(1, t + 1, device=q_BTHX.device).clamp(max=window or t))

    def step(self, q_BHX: Tensor, kept: Kept) -> Tensor:
        q = self._by_keys(q_BHX, kept.texts.counts(kept.window).clamp(min=1))
        return paged_softmax(q, kept["k"], kept["v"], kept.texts, scale=self.config.scale, window=kept.window)

    def _by_keys(self, q_THX: Tensor, seen_T: Tensor) -> Tensor:
        """Queries [..., T, H, X] that see so many keys."""
        dtype = statistics_dtype(q_THX.dtype)
        factor_TH = seen_T.to(dtype).log()[:, None] * self.sharpness.to(dtype)
        return (q_THX.to(dtype) * factor_TH[..., None]).to(q_THX.dtype)
