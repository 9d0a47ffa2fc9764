"""8-bit cache of Wall attention: keys with their decay and values in e4m3, scaled by powers of two.

A cached key is k exp(R - P_j), whose factor reaches 2^78; e4m3 holds 2^-9 to 448. So c consecutive tokens share, per
channel, a whole power of two near the factor of the first of them, and the rest of the factor stays below 2^5. A value
has a power of two per token and head. Rounding is then the only error (`shift_tokens`).

B texts, T tokens, J KV heads, P gate heads, X head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
MAX_E4M3 = 448.0
MAX_LOG2_SPREAD = 4.0
"""Largest binary logarithm by which the factors of tokens that share a power of two may differ."""
KEY_HEADROOM = 2
"""Bits by which keys are scaled down, so that larger ones than 1 have a place."""


def shift_tokens(steepest: float) -> int:
    """Return how many consecutive tokens share a power of two, from 1 to 64: c - 1 gates fall by at most 2^-4.

    With the mixer's default, `g_max: 0.86`, these are 4 tokens. The power of two of a channel is rounded down and two
    bits are added, so stored keys are k times 2^-2 to 2^3. With q the query, k the key and d the decay, each in one
    channel, the error of a score's term q k d is then

    - at most 2^-4 |q k| d, half a unit of three bits of mantissa, where |k| is at least 2^-4;
    - at most 2^-8 |q| d where it is smaller, half the distance 2^-9 of the smallest numbers, scaled back;
    - none by overflow, as long as |k| stays below 448 / 2^3 = 56; larger keys are cut off there.

    Args:
        steepest: No natural log gate lies below -steepest.
    """
    longest = min(1 + MAX_LOG2_SPREAD * math.log(2) / steepest, 64)
    return 1 << (int(longest).bit_length() - 1)


def key_shifts(fall_BTPX: Tensor, anchor_BTPX: Tensor) -> Tensor:
    """Return the power of two of each token's own factor exp(R - P), int8 [B, T, P, X].

    Args:
        fall_BTPX: Running sum P of the natural log gates, float64.
        anchor_BTPX: Running sum R at the first token of each token's chunk, float64.
    """
    return (((anchor_BTPX - fall_BTPX) / math.log(2)).floor() + KEY_HEADROOM).to(torch.int8)


def value_shifts(v_BTJX: Tensor) -> Tensor:
    """Return the power of two of each token and head that brings its largest value to 2^7 .. 2^8, int8 [B, T, J]."""
    return (torch.frexp(v_BTJX.float().abs().amax(-1)).exponent - 8).clamp(-126, 127).to(torch.int8)


def quantize(x: Tensor, shift: Tensor) -> Tensor:
    """Return x 2^-shift in e4m3, as uint8 in x's shape; larger numbers than 448 become 448.

    `shift` is int8, broadcast to x. Bytes serve where torch has no operation for 8-bit floats.
    """
    return torch.ldexp(x.float(), -shift.int()).clamp(-MAX_E4M3, MAX_E4M3).to(E4M3).view(torch.uint8)


def dequantize(stored: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that `quantize` stored, in `dtype`: exactly, for bfloat16 and wider ones."""
    return torch.ldexp(stored.view(E4M3).float(), shift.int()).to(dtype)
