"""One query a text against keys in pages, split over ranges of keys (docs/decoding.md).

B texts, P pages of a text, H query heads, J KV heads, G = H / J, X head size, N keys of a block. A program reads the keys of one text,
one KV head and one range once for all G queries; a second kernel merges the ranges and, for polar attention, folds the null in,
once. Dao et al., "Flash-Decoding for long-context inference" (2023). Scores and sums are float32, in units of log 2.

Launches depend on shapes alone: lengths and tables are read on the device, so a graph of a step holds for any of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.polar import TINY
from ..attention.triton import LOG2E, log1p, tanh
from .pages import Texts

KEYS = 64
"""Keys of a block, at most; a block lies in one page."""
MOST_SPLITS = 32

_LOG2E, _TINY = tl.constexpr(LOG2E), tl.constexpr(TINY)


class Null(NamedTuple):
    """The parameters of polar attention, raw, float32 of [H], the last [H, X]."""

    base_H: Tensor
    slope_H: Tensor
    gain_H: Tensor
    beta_H: Tensor
    v_HX: Tensor
    floor: float


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _temperature(gain_ptr, head, inside, n):
    gain = tl.load(gain_ptr + head, mask=inside, other=0.0)
    return 1.0 + _softplus(gain) * tl.log(tl.maximum(n, 1).to(tl.float32))


@triton.jit
def _ranges(
    q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, gain_ptr, top_ptr, sum_ptr, square_ptr, part_ptr, scale, window, P,
    H: tl.constexpr, J: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, X: tl.constexpr, PAGE: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, POLAR: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    j = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + b)
    first = tl.maximum(length - window, 0)
    low = first // N
    high = tl.cdiv(length, N)
    share = tl.cdiv(high - low, SPLITS)
    start = low + split * share
    stop = tl.minimum(start + share, high)

    row = tl.arange(0, ROWS)
    x = tl.arange(0, X)
    head = j * G + row
    inside = row < G
    q = tl.load(q_ptr + (b * H + head)[:, None] * X + x[None, :], mask=inside[:, None], other=0.0)
    factor = tl.zeros([ROWS], tl.float32) + scale * _LOG2E
    if POLAR:
        factor *= _temperature(gain_ptr, head, inside, length - first)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    part = tl.zeros([ROWS, X], tl.float32)
    for block in range(start, stop):
        at = block * N
        page = tl.load(tables_ptr + b * P + at // PAGE).to(tl.int64)
        key = at + tl.arange(0, N)
        seen = (key < length) & (key >= first)
        place = ((page * PAGE + at % PAGE + tl.arange(0, N)) * J + j)[:, None] * X + x[None, :]
        k = tl.load(k_ptr + place, mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + place, mask=seen[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * factor[:, None]
        score = tl.where(seen[None, :], score, float("-inf"))
        # a block of a range has at least one key that is seen
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        alpha = tl.exp2(top - higher)
        total = total * alpha + tl.sum(p, 1)
        square = square * alpha * alpha + tl.sum(p * p, 1)
        part = part * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    to = (b * H + head) * SPLITS + split
    tl.store(top_ptr + to, top, mask=inside)
    tl.store(sum_ptr + to, total, mask=inside)
    tl.store(square_ptr + to, square, mask=inside)
    tl.store(part_ptr + to[:, None] * X + x[None, :], part, mask=inside[:, None])


@triton.jit
def _merge(
    top_ptr, sum_ptr, square_ptr, part_ptr, lengths_ptr, base_ptr, slope_ptr, gain_ptr, beta_ptr, v_null_ptr, y_ptr,
    mag_ptr, window, floor, H: tl.constexpr, X: tl.constexpr, SPLITS: tl.constexpr, POLAR: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    x = tl.arange(0, X)
    at = (b * H + h) * SPLITS + split
    top = tl.load(top_ptr + at)
    highest = tl.max(top, 0)
    # a range without a key has -inf, and so have all of a text of no token
    alpha = tl.where(top == float("-inf"), 0.0, tl.exp2(top - highest))
    total = tl.sum(tl.load(sum_ptr + at) * alpha, 0)
    part = tl.sum(tl.load(part_ptr + at[:, None] * X + x[None, :]) * alpha[:, None], 0)
    some = total > 0
    y = part / tl.where(some, total, 1.0)
    if POLAR:
        length = tl.load(lengths_ptr + b)
        n = tl.minimum(length, window)
        square = tl.sum(tl.load(square_ptr + at) * alpha * alpha, 0)
        steps = log1p(tl.maximum(n, 1).to(tl.float32))
        null = tl.load(base_ptr + h) + _softplus(tl.load(slope_ptr + h)) * tl.sqrt(steps)
        null *= _temperature(gain_ptr, h, h < H, n) * _LOG2E
        lse = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        real = 1.0 / (1.0 + tl.exp2(null - lse))
        none = 1.0 / (1.0 + tl.exp2(lse - null))
        n_eff = tl.where(some, total * total / tl.where(some, square, 1.0), 0.0)
        n_eff = tl.minimum(n_eff, tl.exp2(2.0 * (lse - null)) / floor)
        y = y * real + none * tl.load(v_null_ptr + h * X + x)
        y = y / tl.maximum(tl.sqrt(tl.sum(y * y, 0)), _TINY)
        tl.store(mag_ptr + b * H + h, tanh(_softplus(tl.load(beta_ptr + h)) * log1p(n_eff * real)))
    tl.store(y_ptr + (b * H + h) * X + x, y.to(y_ptr.dtype.element_ty))


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    texts: Texts,
    *,
    scale: float,
    window: int | None,
    null: Null | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [B, H, X] of q's type, magnitude float32 [B, H], empty without `null`); `splits`, a power of two, None: what fills the GPU."""
    (b, h, x), j = q.shape, k_pool.shape[2]
    wide = texts.tables_BP.shape[1]
    splits = splits or splits_for(q.device, b * j, wide * texts.page)
    count = torch.empty(3, b, h, splits, dtype=torch.float32, device=q.device)
    part = torch.empty(b, h, splits, x, dtype=torch.float32, device=q.device)
    seen = 2**30 if window is None else window
    raw = (count[0],) * 5 if null is None else null[:5]
    polar = null is not None
    tables, lengths = texts.tables_BP.contiguous(), texts.lengths_B
    _ranges[(b, j, splits)](
        q.contiguous(), k_pool, v_pool, tables, lengths, raw[2], count[0], count[1], count[2], part, scale, seen, wide,
        H=h, J=j, G=h // j, ROWS=max(16, triton.next_power_of_2(h // j)), X=x, PAGE=texts.page,
        N=min(KEYS, texts.page), SPLITS=splits, POLAR=polar, num_warps=4,
    )  # fmt: skip
    y = torch.empty_like(q)
    mag = torch.empty(b, h if polar else 0, dtype=torch.float32, device=q.device)
    _merge[(b, h)](
        count[0], count[1], count[2], part, lengths, *raw, y, mag, seen, 0.0 if null is None else null.floor, H=h, X=x,
        SPLITS=splits, POLAR=polar, num_warps=1 if splits * x <= 1024 else 4,
    )  # fmt: skip
    return y, mag


def splits_for(device: torch.device, programs: int, keys: int) -> int:
    """So many ranges that two programs a processor run, but no range of fewer than two blocks of keys."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = min(MOST_SPLITS, max(1, 2 * processors // programs), max(1, keys // (2 * KEYS)))
    return 1 << (wanted.bit_length() - 1)
