"""Depthwise causal convolution (MECHANISMS A: LFM2 and Canon).

B batch, T length, C channels, K taps.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def causal_conv(x_BTC: Tensor, w_CK: Tensor, residual: bool = False) -> Tensor:
    """y_t = sum_j w[:, j] x_{t-K+1+j} with zeros before the start; w[:, -1] multiplies the current token.

    With `residual`, x_t is added. x [B, T, C] and w [C, K] of one type; returns [B, T, C] of that type.
    Raises ValueError when the channels or the types disagree.
    """
    _check(x_BTC, w_CK)
    t, taps = x_BTC.shape[1], w_CK.shape[1]
    w_KC = w_CK.t()
    y_BTC = x_BTC * (w_KC[-1] + 1 if residual else w_KC[-1])
    for back in range(1, min(taps, t)):
        y_BTC[:, back:].addcmul_(x_BTC[:, : t - back], w_KC[taps - 1 - back])
    return y_BTC


def causal_conv_reference(x_BTC: Tensor, w_CK: Tensor, residual: bool = False) -> Tensor:
    """The same with torch's grouped convolution."""
    _check(x_BTC, w_CK)
    padded_BCT = functional.pad(x_BTC.transpose(1, 2), (w_CK.shape[1] - 1, 0))
    y_BTC = functional.conv1d(padded_BCT, w_CK.unsqueeze(1), groups=x_BTC.shape[2]).transpose(1, 2)
    return y_BTC + x_BTC if residual else y_BTC


def _check(x_BTC: Tensor, w_CK: Tensor) -> None:
    if x_BTC.ndim != 3 or w_CK.ndim != 2 or x_BTC.shape[2] != w_CK.shape[0]:
        raise ValueError(f"x must be [B, T, C] and w [C, K], got {tuple(x_BTC.shape)} and {tuple(w_CK.shape)}")
    if x_BTC.dtype != w_CK.dtype:
        raise ValueError(f"x has type {x_BTC.dtype}, but w has type {w_CK.dtype}")
