"""Polar attention's three heavy kernels for Hopper (compute capability 9.0), in Triton's Gluon (docs/mechanisms.md, "Polar attention").

B batch, T length, H query heads, J KV heads, G = H / J, X head size, M rows of queries. Formulas, units and signs are
those of the plain Triton kernels: queries carry temp log2(e) / sqrt(X), null scores temp log2(e), P = 2^(q'k - lse);
negative n_eff marks a row bound by the floor, negative inverse one whose |s| is below TINY.
    s = r O + w_null v_null,  c = s / |s|
    da = P (g.v + add + twice P),  dq' = ln2 sum da k,  dk = ln2 sum da q',  dv = sum P g

Each kernel runs one program on each multiprocessor, over tiles of 128 positions, the longest first, forth and back. One
warp asks the copy engine for blocks, two warpgroups of 64 positions each multiply; mbarriers tell which stage is full
and which is empty. Queries take their keys from the diagonal down, so that a row's maximum is real from its first block
on, and only the diagonal and a window's lower edge are masked. Zeros follow the end of a sequence and add nothing.
No atomics, and no sum whose order depends on timing: every number repeats bit for bit.

Matrix products of n visible scores, 2 n X each: forward 2, dq 3, dkv 4. Shared memory at X = 128: 198, 230 and 167 KB.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import triton
from torch import Tensor

from ..gluon.backward import _dkv, _dq
from ..gluon.forward import _forward
from ..gluon.shared import DKV_STAGES, DQ_STAGES, FORWARD_STAGES, HALF, TILE, TensorDescriptor, _missing, gl
from ..softmax.triton import polar_rows


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds[dtype])


def _flat(x: Tensor, rows: int) -> Any:
    """[B, T, H, X] as [B, T, H * X], read and written in blocks of `rows` positions of one head."""
    bsz, t, heads, d = x.shape
    block = (1, rows, d)
    return TensorDescriptor(
        x, [bsz, t, heads * d], [t * heads * d, heads * d, 1], list(block), _layout(block, x.dtype))  # fmt: skip


def _columns(x: Tensor, columns: int = HALF) -> Any:
    """[B, H, T] as [B * H, T], read in blocks of `columns` positions; zeros follow the last."""
    bsz, h, t = x.shape
    if t % 4:
        # the copy engine steps by multiples of 16 bytes
        x = torch.nn.functional.pad(x, (0, -t % 4))
        t = x.shape[2]
    return TensorDescriptor(x, [bsz * h, t], [t, 1], [1, columns], _layout((1, columns), x.dtype))


def forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    *, window: int | None, floor: float, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(c [B, T, H, X], mag [B, T, H], lse, n_eff, inverse [B, H, T]); all contiguous, statistics float32.

    q [B, T, H, X], k and v [B, T, J, X], null_TH [T, H], beta_H [H], v_null_HX [H, X]; a row sees `window` keys.
    """
    bsz, t, h, _ = q.shape
    tiles = bsz * h * triton.cdiv(t, TILE)
    c = torch.empty_like(q)
    mag = torch.empty(bsz, t, h, device=q.device, dtype=torch.float32)
    lse, n_eff, inverse = (torch.empty(bsz, h, t, device=q.device, dtype=torch.float32) for _ in range(3))
    _forward[(min(tiles, _processors(q.device)),)](
        _flat(q, HALF), _flat(k, TILE), _flat(v, TILE), _flat(c, HALF),
        null_TH, v_null_HX, beta_H, mag, lse, n_eff, inverse, t, tiles, bsz * h, window or 0, _bits(floor),
        H=h, G=h // k.shape[2], STAGES=FORWARD_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return c, mag, lse, n_eff, inverse


@functools.cache
def _bits(x: float) -> int:
    """The bits of a float32 of value x."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def dq(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, add: Tensor, twice: Tensor, *, window: int | None
) -> Tensor:  # fmt: skip
    """Gradient of the scaled queries, [B, T, H, X]; g as q, statistics [B, H, T]."""
    return _run_dq([_flat(x, HALF) for x in (q, k, v, g)], q, k, lse, add, twice, window)


def dkv(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, add: Tensor, twice: Tensor, *, window: int | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of keys and values, [B, T, J, X]; g as q, statistics [B, H, T]."""
    return _run_dkv([_flat(x, HALF) for x in (q, k, v, g)], q, k, lse, add, twice, window)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, add: Tensor, twice: Tensor, *, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv): `dq` and `dkv` with the descriptors of their inputs made once."""
    blocks = [_flat(x, HALF) for x in (q, k, v, g)]
    dk, dv = _run_dkv(blocks, q, k, lse, add, twice, window)
    return _run_dq(blocks, q, k, lse, add, twice, window), dk, dv


def _run_dq(
    blocks: list[Any], q: Tensor, k: Tensor, lse: Tensor, add: Tensor, twice: Tensor, window: int | None
) -> Tensor:  # fmt: skip
    bsz, t, h, _ = q.shape
    tiles = bsz * h * triton.cdiv(t, TILE)
    out = torch.empty_like(q)
    _dq[(min(tiles, _processors(q.device)),)](
        *blocks, _flat(out, HALF), lse, add, twice, t, tiles, bsz * h, window or 0,
        H=h, G=h // k.shape[2], STAGES=DQ_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return out


def _run_dkv(
    blocks: list[Any], q: Tensor, k: Tensor, lse: Tensor, add: Tensor, twice: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    bsz, t, h, _ = q.shape
    heads_kv = k.shape[2]
    tiles = bsz * heads_kv * triton.cdiv(t, TILE)
    dk, dv = torch.empty_like(k), torch.empty_like(k)
    _dkv[(min(tiles, _processors(q.device)),)](
        *blocks, _columns(lse), _columns(add), _columns(twice), _flat(dk, HALF), _flat(dv, HALF),
        t, tiles, bsz * heads_kv, window or 0,
        H=h, G=h // heads_kv, STAGES=DKV_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return dk, dv


def polar_forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor, *,
    window: int | None, floor: float, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As in `..softmax.triton`. Raises ValueError for a key offset, which these kernels do not know."""
    _check(q, k, offset)
    return forward(q, k, v, null_TH, beta_H, v_null_HX, window=window, floor=floor)


def polar_backward(
    gc: Tensor, g_mag: Tensor, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    c: Tensor, lse: Tensor, n_eff: Tensor, inverse: Tensor, *, window: int | None, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As in `..softmax.triton`, whose pass over rows it shares."""
    _check(q, k, offset)
    g, add, twice, d_null, d_beta, d_v_null = polar_rows(gc, g_mag, null_TH, beta_H, v_null_HX, c, lse, n_eff, inverse)
    dq, dk, dv = gradients(q, k, v, g, lse, add, twice, window=window)
    return dq, dk, dv, d_null, d_beta, d_v_null


def _check(q: Tensor, k: Tensor, offset: int) -> None:
    if offset != 0 or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} queries at {offset} of {k.shape[1]} keys; these kernels want the same positions"
        )


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
    """None if these kernels can take such tensors, else why not."""
    if _missing:
        return _missing
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "not a GPU of compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}, neither bfloat16 nor float16"
    if head_dim not in (64, 128):
        return f"head size {head_dim}, not 64 or 128"
    if window is not None and window < TILE:
        return f"window {window} cuts inside the diagonal's tile of {TILE}"
    return None
