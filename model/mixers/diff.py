"""Differential attention as a mixer.

Source: docs/reference/mechanisms.md, "Other position schemes".
Letters of shapes: B batch, T length, H query heads, J KV heads, X head size.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ...kernels.attention.softmax.op import choose_backend, softmax_attention
from ...kernels.norms import statistics_dtype
from ...kernels.paged.op import paged_softmax
from ...kernels.rotary import check_rotary, rotate
from ..bases import PreviousToken, QueryBlockMixer, ScaledConfig
from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, knob
from ..kv_cache import KVView
from ..layers import RMSNorm


class DiffConfig(ScaledConfig):
    """Settings of differential attention."""

    rotary: Literal["full", "half-truncated", "none"] = knob(
        "full", "Channels to rotate: all (full), half of them (half-truncated), or none.", identity="full"
    )
    base: Float = knob(10000.0, "Base of the rotary frequencies.", identity=10000.0, gt=1, le=MAX_FLOAT)
    norm_eps: Float = knob(
        1e-5, "Epsilon of the norm of the output of a pair of heads.", identity=1e-5, gt=0, le=MAX_FLOAT
    )


class Diff(QueryBlockMixer):
    """Differential attention over pairs of heads.

    Heads 2 p and 2 p + 1 form a pair, among queries as among keys and values. A pair's output is the first head's
    attention minus lambda times the second head's, both over the concatenated values of the two heads, then RMS-normed
    with a weight and scaled by 1 - lambda_init. lambda is one learned number per layer.
    """

    Config: ClassVar[type[Config]] = DiffConfig
    config: DiffConfig

    @classmethod
    def check(cls, model: ModelConfig, config: DiffConfig) -> None:
        """Raise ValueError if a number of heads (query or KV) is odd or `rotary` does not fit the head size."""
        for name in ("n_heads", "n_kv_heads"):
            if getattr(model, name) % 2:
                raise ValueError(
                    f"mixer diff takes heads in pairs, but model.{name} is {getattr(model, name)}; make it even"
                )
        check_rotary(config.rotary, model.head_dim)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: DiffConfig, keys: float) -> float:
        """Return FLOPs per token: H attention maps of `keys` keys, each applied to the values of two heads."""
        # H attention maps, each applied to the values of two heads
        return 6.0 * model.n_heads * model.head_dim * keys

    def __init__(self, model: ModelConfig, config: DiffConfig) -> None:
        super().__init__(model, config)
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.randn(model.head_dim).mul_(0.1)) for _ in range(4))
        self.norm = RMSNorm(2 * model.head_dim, config.norm_eps)
        self.size = model.head_dim

    @property
    def lambda_init(self) -> float:
        """Constant part of lambda, 0.8 - 0.6 exp(-0.3 layer); `layer` is the 0-based index among all blocks."""
        return 0.8 - 0.6 * math.exp(-0.3 * self.layer)

    def lambda_value(self) -> Tensor:
        """Return lambda, a scalar tensor: exp(q1 . k1) - exp(q2 . k2) + lambda_init."""
        dtype = statistics_dtype(self.q1.dtype)
        q1, k1, q2, k2 = (x.to(dtype) for x in (self.q1, self.k1, self.q2, self.k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int | None = None
    ) -> Tensor:
        """Return the normed difference of the two attention maps of each pair of heads, [B, T, H, X] in q's type.

        (1 - lambda_init) rmsnorm(A_1 V - lambda A_2 V) for heads 2 p and 2 p + 1, where V is the values of both,
        concatenated. The 2 X channels of a pair stand in its two heads. q and k are rotated here (`rotary`).

        Args:
            q_BTHX: queries, not rotated.
            k_BTJX: keys, not rotated.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            block: queries that the torch backend scores at a time, memory and rounding only; fused kernels ignore it.
                None: 1024 with a window, all at once without.
        """
        q, k = self._rotated(q_BTHX), self._rotated(k_BTJX)

        def read(which: int) -> Tensor:
            """Return each pair's attention by its first (0) or second (1) head, [B, T, H / 2, 2 X].

            The first X channels read the values of the pair's first head, the others those of its second.
            """
            halves = [
                softmax_attention(
                    q[:, :, which::2], k[:, :, which::2], v_BTJX[:, :, side::2], scale=self.config.scale, window=window,
                    query_block=block,
                )
                for side in (0, 1)
            ]  # fmt: skip
            return torch.cat(halves, -1)

        return self._difference(read(0), read(1)).to(q_BTHX.dtype)

    def keep(
        self, k_BTJX: Tensor, v_BTJX: Tensor, *, places_BT: Tensor, before: PreviousToken | None
    ) -> dict[str, Tensor]:
        """Return the rotated keys as "k" and the values as "v", [B, T, J, X] each, to be cached."""
        return {"k": self._rotated(k_BTJX, places_BT), "v": v_BTJX}

    def step(self, q_BHX: Tensor, cache: KVView) -> Tensor:
        """Return differential attention at one new token per sequence, from the cache: [B, H, X] in q's type.

        As in `forward`: per pair of heads (1 - lambda_init) rmsnorm(A_1 V - lambda A_2 V).

        Args:
            q_BHX: queries of the new tokens, not rotated.
            cache: cached "k" (rotated) and "v" of all tokens, the new ones included; its window applies.
        """
        q = self._rotated(q_BHX[:, None], cache.places[:, None])[:, 0]

        def read(which: int) -> Tensor:
            """Return each pair's attention by its first (0) or second (1) head, [B, H / 2, 2 X].

            The first X channels read the values of the pair's first head, the others those of its second.
            """
            halves = [
                paged_softmax(
                    q[:, which::2], cache["k"][:, :, which::2], cache["v"][:, :, side::2], cache.texts,
                    scale=self.config.scale, window=cache.window,
                )
                for side in (0, 1)
            ]  # fmt: skip
            return torch.cat(halves, -1)

        return self._difference(read(0), read(1)).to(q_BHX.dtype)

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        """Combine the two attention maps' outputs [..., H / 2, 2 X] to [..., H, X] in float32 (float64 for float64).

        (1 - lambda_init) rmsnorm(first - lambda second), with the norm's weight over the 2 X channels of a pair.
        """
        dtype = statistics_dtype(first.dtype)
        y = self.norm(first.to(dtype) - self.lambda_value() * second.to(dtype)) * (1 - self.lambda_init)
        return y.unflatten(-1, (2, -1)).flatten(-3, -2)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        full, windowed = (choose_backend(device, dtype, self.size, windowed=w) for w in (False, True))
        return {"softmax": str(full), "softmax_window": str(windowed)}

    def _rotated(self, x_BTHX: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        return rotate(x_BTHX, self.config.rotary, self.config.base, positions_BT)
