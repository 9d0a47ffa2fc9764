"""Softmax attention without positions and with rotary ones (docs/mechanisms.md, "Softmax attention")."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.attention.softmax import choose_backend, softmax_attention, softmax_distractor_loss
from ...kernels.norms import statistics_dtype
from ...kernels.rotary import apply_rotary, rotary_tables
from ...kernels.shapes import query_block
from ..bases import Mixer
from ..config import ModelConfig
from .softmax_outline import NoPEOutline, RoPEConfig, RoPEOutline, SoftmaxConfig


class NoPE(NoPEOutline, Mixer):
    """Causal softmax attention that knows no positions but Canon's."""

    config: SoftmaxConfig

    def __init__(self, model: ModelConfig, config: SoftmaxConfig) -> None:
        super().__init__(model, config)
        self.head_dim = model.head_dim

    @property
    def norm_distractor_keys(self) -> bool:
        return self.config.distractor_norm

    def rotate(self, q_BTHX: Tensor, k_BTJX: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with their positions; here they have none."""
        return q_BTHX, k_BTJX

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        q, k = self.rotate(q_BTHX, k_BTJX)
        return softmax_attention(q, k, v_BTJX, scale=self.config.scale, window=window, query_block=block)

    def evaluate(self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, chunk: int) -> Tensor:
        return self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, block=query_block(chunk, *q_BTHX.shape[:2]))

    def distractor_loss(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, k_r_BRJX: Tensor, v_r_BRJX: Tensor, y_BTHX: Tensor, *,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        # Distractors have no place in the sequence, so their keys are not rotated.
        q, k = self.rotate(q_BTHX, k_BTJX)
        window = window if self.config.distractor_window else None
        return softmax_distractor_loss(q, k, v_BTJX, k_r_BRJX, v_r_BRJX, y_BTHX, scale=self.config.scale, window=window)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.head_dim, windowed=w) for w in (False, True))
        return {"softmax": str(full), "softmax_window": str(windowed)}


class RoPE(RoPEOutline, NoPE):
    """The same with rotary positions."""

    config: RoPEConfig

    def rotate(self, q_BTHX: Tensor, k_BTJX: Tensor) -> tuple[Tensor, Tensor]:
        _, length, _, size = q_BTHX.shape
        dtype = statistics_dtype(q_BTHX.dtype)
        cos, sin = rotary_tables(self.config.rotary, length, size, self.config.base, dtype=dtype, device=q_BTHX.device)
        return apply_rotary(q_BTHX, cos, sin), apply_rotary(k_BTJX, cos, sin)
