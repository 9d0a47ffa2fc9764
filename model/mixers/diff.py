"""Differential attention as a mixer (docs/mechanisms.md, "Other position schemes")."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...kernels.attention.softmax import choose_backend, softmax_attention
from ...kernels.norms import statistics_dtype
from ...kernels.rotary import apply_rotary, rotary_tables
from ...kernels.shapes import query_block
from ..bases import Mixer
from ..config import ModelConfig
from ..layers import RMSNorm
from .diff_outline import DiffConfig, DiffOutline


class Diff(DiffOutline, Mixer):
    """Heads in pairs: what one map reads less lambda times what the other reads, of both heads' values, normed."""

    config: DiffConfig

    def __init__(self, model: ModelConfig, config: DiffConfig) -> None:
        super().__init__(model, config)
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(0.1 * torch.randn(model.head_dim)) for _ in range(4))
        self.norm = RMSNorm(2 * model.head_dim, config.norm_eps)
        self.size = model.head_dim

    @property
    def first_share(self) -> float:
        """Lambda's constant part, which grows with the layer."""
        return 0.8 - 0.6 * math.exp(-0.3 * self.layer)

    def share(self) -> Tensor:
        """Lambda, a scalar."""
        dtype = statistics_dtype(self.q1.dtype)
        q1, k1, q2, k2 = (x.to(dtype) for x in (self.q1, self.k1, self.q2, self.k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.first_share

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        q, k = self._rotated(q_BTHX, k_BTJX)

        def read(which: int) -> Tensor:
            """What the first or the second map of each pair reads of both heads' values: [B, T, H / 2, 2 X]."""
            halves = [
                softmax_attention(
                    q[:, :, which::2], k[:, :, which::2], v_BTJX[:, :, side::2], scale=self.config.scale, window=window,
                    query_block=block,
                )
                for side in (0, 1)
            ]  # fmt: skip
            return torch.cat(halves, -1)

        one, two = read(0), read(1)
        dtype = statistics_dtype(one.dtype)
        y = self.norm(one.to(dtype) - self.share() * two.to(dtype)) * (1 - self.first_share)
        return y.to(q_BTHX.dtype).unflatten(-1, (2, -1)).flatten(2, 3)

    def evaluate(self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, chunk: int) -> Tensor:
        return self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, block=query_block(chunk, *q_BTHX.shape[:2]))

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.size, windowed=w) for w in (False, True))
        return {"softmax": str(full), "softmax_window": str(windowed)}

    def _rotated(self, q_BTHX: Tensor, k_BTJX: Tensor) -> tuple[Tensor, Tensor]:
        kind = self.config.rotary
        if kind == "none":
            return q_BTHX, k_BTJX
        _, length, _, size = q_BTHX.shape
        dtype = statistics_dtype(q_BTHX.dtype)
        cos, sin = rotary_tables(kind, length, size, self.config.base, dtype=dtype, device=q_BTHX.device)
        return apply_rotary(q_BTHX, cos, sin), apply_rotary(k_BTJX, cos, sin)
