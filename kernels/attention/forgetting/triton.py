"""Triton kernels of forgetting attention: sums of its gates; the rest is softmax attention's kernels.

See docs/explanation/kernels.md, "Forgetting attention". B batch, T length, H query heads, J KV heads, X head size. F is the running
sum of the gates in units of log 2. It is summed in float64, block by block, and stored as two float32 numbers, high and
low part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launcher
from ..device import LOG2E
from ..softmax.triton import HighLow, softmax_forward, weights_backward

BLOCK = 1024
"""Tokens whose gates are summed at once."""

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _prefix_sums(
    gate_ptr, hi_ptr, lo_ptr, fade_ptr, T, FADES, H: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Store the running sums F of one head's log gates, as high and low float32 parts in units of log 2.

    Grid: (B H,).

    Args:
        gate_ptr: Contiguous natural log gates [B, T, H].
        hi_ptr: float32 [B, H, T], written.
        lo_ptr: float32 [B, H, T], written.
        fade_ptr: float32 [B, H, FADES], F of the first token of a token's tile less F of its own; written with TILE.
        T: Tokens.
        FADES: Length of a row of `fade_ptr`.
        H: constexpr, heads.
        BLOCK: constexpr, tokens summed at once.
        TILE: constexpr, tokens of a tile for `fade_ptr`, 0 for none.
    """
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    before = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        gate = tl.load(gate_ptr + (b * T + t) * H + h, mask=t < T, other=0.0).to(tl.float64)
        gate = gate * tl.full([BLOCK], _LOG2E, tl.float64)
        f = before + tl.cumsum(gate, 0)
        hi = f.to(tl.float32)
        at = (b * H + h) * T + t
        tl.store(hi_ptr + at, hi, mask=t < T)
        tl.store(lo_ptr + at, (f - hi.to(tl.float64)).to(tl.float32), mask=t < T)
        if TILE:
            # beyond the last token F stays constant
            tiles = tl.reshape(f, [BLOCK // TILE, TILE])
            first = tl.sum(tl.where(tl.arange(0, TILE)[None, :] == 0, tiles, 0.0), 1)
            fade = tl.reshape((first[:, None] - tiles).to(tl.float32), [BLOCK])
            tl.store(fade_ptr + (b * H + h) * FADES + t, fade, mask=t < FADES)
        before += tl.sum(gate, 0)


@triton.jit
def _suffix_sums(df_ptr, d_gate_ptr, T, N, H: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradient of one head's log gates: the sums of dF over each token and all later ones, in float64.

    Grid: (B H,). df_ptr is float32 [B, H, T], d_gate_ptr float32 [B, T, H], written. N is the number of blocks of BLOCK
    tokens.
    """
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    behind = tl.zeros([BLOCK], tl.float64)
    for n in tl.range(0, N):
        t = (N - 1 - n) * BLOCK + tl.arange(0, BLOCK)
        df = tl.load(df_ptr + (b * H + h) * T + t, mask=t < T, other=0.0).to(tl.float64)
        total = tl.sum(df, 0)
        later = behind + total - tl.cumsum(df, 0) + df
        tl.store(d_gate_ptr + (b * T + t) * H + h, later.to(tl.float32), mask=t < T)
        behind += total


def sums(log_gate_BTH: Tensor) -> HighLow:
    """Return the running sums F of natural log gates in units of log 2, as high and low float32 parts [B, H, T].

    A token's sum includes its own gate; F = high + low is summed in float64.

    Args:
        log_gate_BTH: Contiguous natural log gates.
    """
    b, t, h = log_gate_BTH.shape
    hi, lo = (torch.empty(b, h, t, device=log_gate_BTH.device, dtype=torch.float32) for _ in range(2))
    _prefix_sums[(b * h,)](log_gate_BTH, hi, lo, lo, t, 0, H=h, BLOCK=BLOCK, TILE=0, num_warps=4)
    return hi, lo


def sums_in_tiles(log_gate_BTH: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (high part, low part, fade) of the running sums F in units of log 2.

    The parts are float32 [B, H, T]. fade is F of the first token of a token's tile less F of its own, float32 [B, H, T
    up to a multiple of 4].

    Args:
        log_gate_BTH: Contiguous natural log gates.
        tile: Tokens of a tile, a divisor of 1024.
    """
    b, t, h = log_gate_BTH.shape
    device = log_gate_BTH.device
    hi, lo = (torch.empty(b, h, t, device=device, dtype=torch.float32) for _ in range(2))
    fade = torch.empty(b, h, t + -t % 4, device=device, dtype=torch.float32)
    _prefix_sums[(b * h,)](log_gate_BTH, hi, lo, fade, t, fade.shape[2], H=h, BLOCK=BLOCK, TILE=tile, num_warps=4)
    return hi, lo, fade


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate_BTH: Tensor, *, factor: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (o [B, T, H, X], lse [B, H, T], high and low part of F [B, H, T]) of scores factor q·k + F_i - F_j.

    o is in q's dtype, the others are float32. lse is in units of log 2, relative to F, and serves `backward` alone.

    Args:
        q: Queries [B, T, H, X], not scaled, contiguous like all inputs.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        log_gate_BTH: Natural log gates, float32 or float64.
        factor: Factor of q·k that gives units of log 2, not 0.
        window: Attention window in keys, or None.
    """
    log_decay = sums(log_gate_BTH)
    return *softmax_forward(q, k, v, window=window, log_decay=log_decay, factor=factor), *log_decay


def backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, log_decay: HighLow, *, factor: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v in their dtypes, and of the natural log gates, float32 [B, T, H].

    Args:
        g_o: Gradient of the output, contiguous like all inputs.
        q: Queries [B, T, H, X].
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        o: Output of `forward`.
        lse: Log-sum-exp of `forward`.
        log_decay: High and low part of F of `forward`.
        factor: Factor of q·k that gives units of log 2.
        window: Attention window in keys, or None.
    """
    b, t, h, _ = q.shape
    dq, dk, dv, df = weights_backward(
        q, k, v, g_o, lse, -launcher.row_products(g_o, o), None, window=window, log_decay=log_decay, factor=factor
    )  # fmt: skip
    d_gate = torch.empty(b, t, h, device=q.device, dtype=torch.float32)
    _suffix_sums[(b * h,)](df, d_gate, t, triton.cdiv(t, BLOCK), H=h, BLOCK=BLOCK, num_warps=4)
    return dq, dk, dv, d_gate
