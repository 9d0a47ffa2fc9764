"""Polar attention (PoLAR) as a mixer.

Source: docs/reference/mechanisms.md, "Polar attention".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size, R distractors.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ...kernels.attention.polar.op import choose_backend, polar_attention, polar_distractor_loss
from ...kernels.paged.op import paged_polar
from ...kernels.shapes import QUERY_BLOCK
from ..bases import MixerConfig, QueryBlockMixer, attention_flops
from ..bounds import MAX_FLOAT
from ..config import Config, Float, ModelConfig, Real, knob
from ..kv_cache import KVView
from ..layers import Linear


class PolarConfig(MixerConfig):
    """Initial values are raw: softplus turns -1, 0.5 and -1.5 into 0.313, 0.974 and 0.201."""

    null_base_init: Real = knob(2.0, "Initial null score.", identity=2.0)
    null_slope_init: Real = knob(0.5, "Initial raw growth of the null score with sqrt(ln(n + 1)).", identity=0.5)
    len_gain_init: Real = knob(-1.0, "Initial raw growth of the temperature with ln n.", identity=-1.0)
    mag_beta_init: Real = knob(-1.5, "Initial raw slope of the magnitude over ln(1 + m).", identity=-1.5)
    n_eff_floor: Float = knob(
        1e-30,
        "Lower bound of the sum of squared weights in n_eff; the published runs had 1e-6.",
        identity=1e-30,
        gt=0,
        le=MAX_FLOAT,
    )
    n_eff_floor_gradient: Literal["exact", "unbound"] = knob(
        "exact",
        "Gradient where the bound applies: of the bounded n_eff, or of the unbounded one, as in the published runs.",
        identity="exact",
    )


class Polar(QueryBlockMixer):
    """Polar attention: the direction and the magnitude of what a query reads are separate outputs.

    A learned null key takes the attention that no real key deserves. With n the number of visible keys, real scores are
    t q k / sqrt(X) and the null key's t (null_base + sp(null_slope) sqrt(ln(n + 1))), where t = 1 + sp(len_gain) ln n
    and sp is softplus. The softmax over both weights the values (v_null for the null key). Output: the unit vector of
    that sum, and a projection of the magnitude tanh(sp(mag_beta) ln(1 + m)). Here m = (1 - null weight) / (sum of
    squared real weights, scaled to sum 1), an effective number of attended keys.
    """

    Config: ClassVar[type[Config]] = PolarConfig
    has_distractor: ClassVar[bool] = True

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: PolarConfig, keys: float) -> float:
        return attention_flops(model, keys)

    def __init__(self, model: ModelConfig, config: PolarConfig) -> None:
        """Create the parameters of null key, temperature and magnitude, one of each per head.

        The scalars start at the config's raw values, the null key's value `v_null` [H, X] at 0. The projection of the
        magnitudes, H to D, is marked to start at 0.
        """
        super().__init__(model, config)
        heads = model.n_heads
        self.window = model.window_size
        self.null_base = nn.Parameter(torch.full((heads,), config.null_base_init))
        self.null_slope = nn.Parameter(torch.full((heads,), config.null_slope_init))
        self.len_gain = nn.Parameter(torch.full((heads,), config.len_gain_init))
        self.mag_beta = nn.Parameter(torch.full((heads,), config.mag_beta_init))
        self.v_null = nn.Parameter(torch.zeros(heads, model.head_dim))
        self.mu_proj = Linear(heads, model.d_model, bias=model.bias, zero=True)
        self.n_eff_floor, self.exact_floor = config.n_eff_floor, config.n_eff_floor_gradient == "exact"

    def forward(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, block: int = QUERY_BLOCK
    ) -> tuple[Tensor, Tensor]:
        """Return polar attention: (unit directions [B, T, H, X], projected magnitudes [B, T, D]).

        Softmax runs over the visible keys, with a temperature that grows with ln n, and a null key. The direction is
        the weighted sum of the values divided by its length (by 1e-6 if that is shorter). The magnitude is
        tanh(softplus(mag_beta) ln(1 + m)), with m an effective number of attended keys; its projection is added after
        the output projection. Both have q's type.

        Args:
            q_BTHX: queries.
            k_BTJX: keys.
            v_BTJX: values.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys. It also
                bounds n, the number of visible keys.
            block: queries that the torch backend scores at a time, memory and rounding only; kernels ignore it.
        """
        scalars = (self.null_base, self.null_slope, self.len_gain, self.mag_beta, self.v_null)
        c_BTHX, mag_BTH = polar_attention(
            q_BTHX, k_BTJX, v_BTJX, *scalars, window=window, n_eff_floor=self.n_eff_floor, exact_floor=self.exact_floor,
            query_block=block,
        )  # fmt: skip
        return c_BTHX, self.mu_proj(mag_BTH.to(q_BTHX.dtype))

    def step(self, q_BHX: Tensor, cache: KVView) -> tuple[Tensor, Tensor]:
        """Return polar attention at one new token per sequence, from the cache.

        Args:
            q_BHX: queries of the new tokens.
            cache: cached "k" and "v" of all tokens, the new ones included; its window applies, and bounds the number of
                keys n.

        Returns:
            (unit directions [B, H, X], projected magnitudes [B, D]), the two outputs of `forward`.
        """
        scalars = (self.null_base, self.null_slope, self.len_gain, self.mag_beta, self.v_null)
        c_BHX, mag_BH = paged_polar(
            q_BHX, cache["k"], cache["v"], *scalars, cache.texts, window=cache.window, n_eff_floor=self.n_eff_floor
        )
        return c_BHX, self.mu_proj(mag_BH.to(q_BHX.dtype))

    def distractor_loss(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, k_r_BRJX: Tensor, v_r_BRJX: Tensor, y_BTHX: Tensor, *,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Return the mean total attention weight of the distractor keys against the null key (scalar).

        Only the R distractors and the null key compete; real keys take no part. The mean runs over batch, heads and
        tokens. Uses the queries, the distractor keys and the number of all earlier keys, even with a window; other
        arguments are ignored.
        """
        return polar_distractor_loss(q_BTHX, k_r_BRJX, self.len_gain, self.null_base, self.null_slope)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return {"polar": ..., "polar_window": ...}: implementation without and with the window.

        Each text reads "gluon (reason)", the usual one on Hopper, "triton (reason)" or "torch (reason)". Kernels are
        chosen here if they were not yet, which may run their self-tests.
        """
        size = self.v_null.shape[1]
        return {
            "polar": str(choose_backend(device, dtype, size)),
            "polar_window": str(choose_backend(device, dtype, size, self.window)),
        }
