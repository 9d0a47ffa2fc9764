"""Triton kernels of the product of one row with a matrix, as one pass over the matrix (docs/explanation/decoding.md).

K inputs, N outputs. A program computes BN outputs and their gates. On Hopper a kernel starts while the one before it
still runs (programmatic dependent launch). It requests its part of the matrix, which no kernel of a step writes, and
only then waits for what the earlier kernel writes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BN, MAX_INPUTS = 4, 1024
"""Outputs of a program, and inputs that it reads at a time."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    """Load a block of a matrix; EVEN skips the mask, which keeps more loads in flight.

    Args:
        at: Pointers to the elements.
        inside: Mask; elements outside read as 0.
        EVEN: constexpr bool, True when all elements exist.
    """
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _epilogue(y, gates, bias_ptr, under, y_ptr, n, N, BIAS: tl.constexpr, GATE: tl.constexpr, UNDER: tl.constexpr):
    """Apply bias, gate and residual to BN sums and store them in y's dtype, rounded where torch rounds.

    The gate's nonlinearity is applied to y: relu(y)^2 gates (squared ReLU) or silu(y) gates (SwiGLU).

    Args:
        y: float32 [BN], products of the first N outputs.
        gates: float32 [BN], products of the second N outputs; read only when GATE > 0.
        bias_ptr: [N], or [2 N] with a gate.
        under: [BN], residual that is added last.
        y_ptr: [N], written.
        n: Indices of the outputs.
        N: Outputs, after the gate.
        BIAS: constexpr bool, True to add the bias.
        GATE: constexpr, 0 none, 1 squared ReLU, 2 SwiGLU.
        UNDER: constexpr bool, True to add `under`.
    """
    dtype = y_ptr.dtype.element_ty
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if GATE > 0:
            gates += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
    # rounded where torch rounds
    y = y.to(dtype).to(tl.float32)
    if GATE > 0:
        gates = gates.to(dtype).to(tl.float32)
    if GATE == 1:
        y = tl.maximum(y, 0.0)
        y = y * gates * y
    if GATE == 2:
        y = y * _sigmoid(y) * gates
    if UNDER:
        y = y.to(dtype).to(tl.float32) + under.to(tl.float32)
    tl.store(y_ptr + n, y.to(dtype), mask=n < N)


@triton.jit
def _row_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, under_ptr, y_ptr, eps, N, K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, UNDER: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Store BN outputs of under + gate(rms_norm(x) wᵀ + bias) of one row.

    With a gate, the first N products a and the second N products g give g relu(a)^2 or g silu(a). Grid: (cdiv(N, BN),).
    Sums are float32; the norm's scale is applied after the product.

    Args:
        x_ptr: The row [K].
        w_ptr: Contiguous weight [N, K], or [2 N, K] with a gate.
        bias_ptr: [N] or [2 N]; read only with BIAS.
        norm_ptr: Weight of the RMS norm [K]; read only with NORM.
        under_ptr: Residual [N]; read only with UNDER.
        y_ptr: [N], written.
        eps: Epsilon of the norm.
        N: Outputs, after the gate.
        K: constexpr, inputs.
        NORM: constexpr bool, True to norm x.
        BIAS: constexpr bool, True to add the bias.
        GATE: constexpr, 0 none, 1 squared ReLU, 2 SwiGLU.
        UNDER: constexpr bool, True to add the residual.
        BN: constexpr, outputs of a program.
        BK: constexpr, inputs read at a time.
        EVEN: constexpr bool, True when BN divides N and BK divides K.
        EARLY: constexpr bool, True for a dependent launch: weights are read before the previous kernel has ended.
    """
    if EARLY:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = n.to(tl.int64)[:, None] * K
    y = tl.zeros([BN, BK], tl.float32)
    gates = tl.zeros([BN, BK], tl.float32)
    square = tl.zeros([BK], tl.float32)
    under = tl.zeros([BN], y_ptr.dtype.element_ty)
    for start in tl.static_range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (n < N)[:, None] & (k < K)[None, :]
        w = _load(w_ptr + rows + k[None, :], inside, EVEN)
        if GATE > 0:
            g = _load(w_ptr + rows + N * K + k[None, :], inside, EVEN)
        # all loads of the matrix are issued before anything waits
        tl.debug_barrier()
        if EARLY and start == 0:
            gdc_wait()
        if UNDER and start == 0:
            # loaded here, while the matrix arrives, and not at the end
            under = tl.load(under_ptr + n, mask=n < N, other=0.0)
        x = _load(x_ptr + k, k < K, EVEN).to(tl.float32)
        if NORM:
            square += x * x
            x *= _load(norm_ptr + k, k < K, EVEN).to(tl.float32)
        y += w.to(tl.float32) * x[None, :]
        if GATE > 0:
            gates += g.to(tl.float32) * x[None, :]
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
    _epilogue(tl.sum(y, 1) * scale, tl.sum(gates, 1) * scale, bias_ptr, under, y_ptr, n, N, BIAS, GATE, UNDER)


@triton.jit
def _conv_epilogue(
    b, c, u, bias_ptr, tails_ptr, tail, filters_ptr, y_ptr, n, C, BIAS: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Store c conv(b u) of one token for BN channels, and append b u to their tails in place.

    Args:
        b: float32 [BN], products of the first C outputs; c and u: those of the second and third C.
        c: float32 [BN].
        u: float32 [BN].
        bias_ptr: [3 C]; read only with BIAS.
        tails_ptr: Table [R, W - 1, C], changed in place.
        tail: Offsets of these channels' oldest input in the table.
        filters_ptr: Filters [C, W].
        y_ptr: [C], written.
        n: Indices of the channels.
        C: Channels.
        BIAS: constexpr bool, True to add the bias.
        W: constexpr, taps.
    """
    dtype = y_ptr.dtype.element_ty
    if BIAS:
        b += tl.load(bias_ptr + n, mask=n < C, other=0.0).to(tl.float32)
        c += tl.load(bias_ptr + C + n, mask=n < C, other=0.0).to(tl.float32)
        u += tl.load(bias_ptr + 2 * C + n, mask=n < C, other=0.0).to(tl.float32)
    # rounded where torch rounds
    x = (b.to(dtype).to(tl.float32) * u.to(dtype).to(tl.float32)).to(dtype)
    y = x.to(tl.float32) * tl.load(filters_ptr + n * W + (W - 1), mask=n < C, other=0.0).to(tl.float32)
    for tap in tl.static_range(W - 1):
        earlier = tl.load(tails_ptr + tail + tap * C, mask=n < C, other=0.0)
        y += earlier.to(tl.float32) * tl.load(filters_ptr + n * W + tap, mask=n < C, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(tails_ptr + tail + (tap - 1) * C, earlier, mask=n < C)
    if W > 1:
        tl.store(tails_ptr + tail + (W - 2) * C, x, mask=n < C)
    y = y.to(dtype).to(tl.float32) * c.to(dtype).to(tl.float32)
    tl.store(y_ptr + n, y.to(dtype), mask=n < C)


@triton.jit
def _row_conv_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, tails_ptr, slots_ptr, filters_ptr, y_ptr, eps, C, K: tl.constexpr,
    BIAS: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Store BN channels of c conv(b u) of one row, where [b | c | u] is rms_norm(x) wᵀ + bias.

    conv has W taps, whose earlier inputs are the row's tail in the table; the tail moves on by one token.

    Grid: (cdiv(C, BN),).

    Args:
        x_ptr: The row [K].
        w_ptr: Contiguous weight [3 C, K], rows of b, c and u.
        bias_ptr: [3 C]; read only with BIAS.
        norm_ptr: Weight of the RMS norm [K].
        tails_ptr: Table [R, W - 1, C], changed in place.
        slots_ptr: int64 [1], row of the table.
        filters_ptr: Contiguous filters [C, W].
        y_ptr: [C], written.
        eps: Epsilon of the norm.
        C: Channels.
        K: constexpr, inputs.
        BIAS: constexpr bool, True to add the bias.
        W: constexpr, taps.
        BN: constexpr, channels of a program.
        BK: constexpr, inputs read at a time.
        EVEN: constexpr bool, True when BN divides C and BK divides K.
        EARLY: constexpr bool, True for a dependent launch: weights are read before the previous kernel has ended.
    """
    if EARLY:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = n.to(tl.int64)[:, None] * K
    b = tl.zeros([BN, BK], tl.float32)
    c = tl.zeros([BN, BK], tl.float32)
    u = tl.zeros([BN, BK], tl.float32)
    square = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (n < C)[:, None] & (k < K)[None, :]
        w_b = _load(w_ptr + rows + k[None, :], inside, EVEN)
        w_c = _load(w_ptr + rows + C * K + k[None, :], inside, EVEN)
        w_u = _load(w_ptr + rows + 2 * C * K + k[None, :], inside, EVEN)
        # all loads of the matrix are issued before anything waits
        tl.debug_barrier()
        if EARLY and start == 0:
            gdc_wait()
        if start == 0:
            tail = tl.load(slots_ptr) * ((W - 1) * C) + n
        x = _load(x_ptr + k, k < K, EVEN).to(tl.float32)
        square += x * x
        x *= _load(norm_ptr + k, k < K, EVEN).to(tl.float32)
        b += w_b.to(tl.float32) * x[None, :]
        c += w_c.to(tl.float32) * x[None, :]
        u += w_u.to(tl.float32) * x[None, :]
    scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
    _conv_epilogue(
        tl.sum(b, 1) * scale, tl.sum(c, 1) * scale, tl.sum(u, 1) * scale, bias_ptr, tails_ptr, tail, filters_ptr, y_ptr, n,
        C, BIAS, W,
    )  # fmt: skip


def conv_step(
    x: Tensor, w: Tensor, bias: Tensor | None, norm: Tensor, eps: float, tails: Tensor, slots: Tensor, filters: Tensor
) -> Tensor:
    """Return c conv(b u) of one row, [1, C] of x's dtype, with [b | c | u] = rms_norm(x) wᵀ + bias.

    b u is appended to the text's row of `tails` in place, and the oldest input dropped.

    Args:
        x: [1, K].
        w: [3 C, K].
        bias: [3 C], or None.
        norm: Weight of the RMS norm [K].
        eps: Epsilon of the norm.
        tails: [R, W - 1, C].
        slots: int64 [1], row of `tails`.
        filters: [C, W].
    """
    (c, taps), k = filters.shape, x.shape[1]
    y = torch.empty(1, c, dtype=x.dtype, device=x.device)
    _row_conv_kernel[(triton.cdiv(c, BN),)](
        x.contiguous(), w.contiguous(), y if bias is None else bias, norm, tails, slots, filters.contiguous(), y, eps, c, K=k,
        BIAS=bias is not None, W=taps, **_constexprs(c, k, x.device),
    )  # fmt: skip
    return y


def product(
    x: Tensor, w: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, gate: int, under: Tensor | None
) -> Tensor:
    """Return under + gate(rms_norm(x) wᵀ + bias) of one row, [1, N] of x's dtype; parts that are None are left out.

    Args:
        x: [1, K].
        w: [N, K], or [2 N, K] with a gate.
        bias: [N] or [2 N], or None.
        norm: Weight of the RMS norm [K], or None.
        eps: Epsilon of the norm.
        gate: 0 none, 1 squared ReLU, 2 SwiGLU.
        under: Residual [1, N], or None.
    """
    n, k = w.shape[0] // (2 if gate else 1), x.shape[1]
    under = None if under is None else under.contiguous()
    y = torch.empty(1, n, dtype=x.dtype, device=x.device)
    optional_tensors = [y if part is None else part for part in (bias, norm, under)]
    _row_kernel[(triton.cdiv(n, BN),)](
        x.contiguous(), w.contiguous(), *optional_tensors, y, eps, n, K=k, NORM=norm is not None, BIAS=bias is not None, GATE=gate,
        UNDER=under is not None, **_constexprs(n, k, x.device),
    )  # fmt: skip
    return y


def _constexprs(n: int, k: int, device: torch.device) -> dict[str, Any]:
    """Return the constexprs and launch options that both kernels share, by name.

    Keys: BN outputs of a program (4), BK inputs read at a time (a power of two from 16 to 1024), EVEN, EARLY, num_warps
    (4) and launch_pdl, which equals EARLY: True on Hopper and later.

    Args:
        n: Outputs, or channels of the convolution.
        k: Inputs.
        device: Device of the launch.
    """
    bk, early = min(MAX_INPUTS, max(16, triton.next_power_of_2(k))), _starts_early(device)
    return {
        "BN": BN, "BK": bk, "EVEN": n % BN == 0 and k % bk == 0, "EARLY": early, "num_warps": 4, "launch_pdl": early
    }  # fmt: skip


@functools.cache
def _starts_early(device: torch.device) -> bool:
    """Return True on Hopper and later, where a kernel may start before the one ahead has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
