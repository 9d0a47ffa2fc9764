"""Triton kernel of a Wall attention step: one query per text over keys with their decay, split over ranges of keys.

B texts, H query heads, P gate heads, J KV heads, G = H / P, X head size, N keys of a block. A program reads the keys of
one text, one gate head and one range once for all G queries. All keys of a block share an anchor, so a block costs one
scaling of the queries more than softmax attention. The merge of ranges is that of kernels/paged. Scores and sums are
float32, in units of log 2.

Launches depend on shapes alone, so a captured CUDA graph of a step stays valid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.device import LOG2E
from ..paged.triton import KEYS, block_range, merge, range_sums, splits_for, store_means, store_range

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _decay_factor(log_decay):
    """Return exp(x) in float32 for float64 x <= 0, 0 below 2^-126; exact but for the roundings of a value near 1.

    The whole number of powers of two is split off in float64, so that the argument's rounding to float32 is relative to
    a number below 1.
    """
    log2_decay = log_decay * _LOG2E
    power = tl.floor(log2_decay)
    fraction = tl.exp2((log2_decay - power).to(tl.float32))
    return tl.where(power < -126.0, 0.0, fraction * tl.exp2(tl.maximum(power, -126.0).to(tl.float32)))


@triton.jit
def _attend_range(
    q_ptr, k_ptr, v_ptr, anchor_ptr, fall_ptr, k_shift_ptr, v_shift_ptr, tables_ptr, lengths_ptr, top_ptr, sum_ptr, square_ptr, part_ptr, y_ptr,
    scale, window, TABLE, q_text, q_head, k_token, k_head, v_token, v_head, a_row, a_head,
    H: tl.constexpr, P: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, X: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Attend from the G queries of one gate head of one text to one range of its keys.

    Grid: (B, P, SPLITS). With SPLITS 1 the output is stored, else the partial sums of the range.

    Args:
        q_ptr: Queries [B, H, X] with unit stride in X.
        k_ptr: Pool of keys with their decay [pages, PAGE, P, X] with unit stride in X.
        v_ptr: Pool of values [pages, PAGE, J, X] with unit stride in X.
        anchor_ptr: Pool of sums R of natural log gates, float64 [pages, PAGE / CHUNK, P, X], with unit stride in X.
        fall_ptr: Contiguous float64 [B, P, X], sums up to the new tokens.
        k_shift_ptr: Contiguous int8 powers of two of the keys [pages, PAGE / SHARED, P, X]; read only with FP8.
        v_shift_ptr: Contiguous int8 powers of two of the values [pages, PAGE, J]; read only with FP8.
        tables_ptr: Contiguous int32 page tables [B, TABLE].
        lengths_ptr: int32 [B], tokens of each text.
        top_ptr: float32 [B, H, SPLITS], largest score of the range in units of log 2, -inf without keys; written, as
            the next three, unless SPLITS is 1.
        sum_ptr: float32 [B, H, SPLITS], sum of weights, written.
        square_ptr: float32 [B, H, SPLITS], 0, written, because the merge reads it.
        part_ptr: float32 [B, H, SPLITS, X], sum of weights times values, written.
        y_ptr: Contiguous [B, H, X], written when SPLITS is 1.
        scale: Factor of q·k in natural units.
        window: Largest number of visible keys; 2^30 for no window.
        TABLE: Pages of a table.
        q_text: Elements from one text of q to the next.
        q_head: Elements from one head of q to the next.
        k_token: Elements from one token of the key pool to the next.
        k_head: Elements from one head of the key pool to the next.
        v_token: Elements from one token of the value pool to the next.
        v_head: Elements from one head of the value pool to the next.
        a_row: Elements from one row of the anchor pool to the next.
        a_head: Elements from one head of the anchor pool to the next.
        H: constexpr, query heads.
        P: constexpr, gate heads.
        J: constexpr, KV heads.
        ROWS: constexpr, G rounded up to a power of two of at least 16.
        X: constexpr, head size.
        PAGE: constexpr, tokens of a page.
        CHUNK: constexpr, tokens per anchor; divides PAGE.
        N: constexpr, keys of a block; divides CHUNK.
        SPLITS: constexpr, number of ranges.
        FP8: constexpr bool, True for keys and values in e4m3.
        SHARED: constexpr, tokens that share a power of two; divides PAGE.
    """
    b = tl.program_id(0)
    p = tl.program_id(1)
    split = tl.program_id(2)
    j = p // (P // J)
    length = tl.load(lengths_ptr + b)
    first, start, stop = block_range(length, window, split, N, SPLITS)

    row = tl.arange(0, ROWS)
    x = tl.arange(0, X)
    head = p * (H // P) + row
    inside = row < H // P
    q = tl.load(q_ptr + b * q_text + head[:, None] * q_head + x[None, :], mask=inside[:, None], other=0.0)
    q = q.to(tl.float32) * (scale * _LOG2E)
    fall = tl.load(fall_ptr + (b * P + p) * X + x)

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    part = tl.zeros([ROWS, X], tl.float32)
    for block in range(start, stop):
        at = block * N
        page = tl.load(tables_ptr + b * TABLE + at // PAGE).to(tl.int64)
        key = at + tl.arange(0, N)
        seen = (key < length) & (key >= first)
        token = page * PAGE + at % PAGE + tl.arange(0, N)
        anchor_row = page * (PAGE // CHUNK) + at % PAGE // CHUNK
        anchor = tl.load(anchor_ptr + anchor_row * a_row + p * a_head + x)
        k = tl.load(k_ptr + (token * k_token + p * k_head)[:, None] + x[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + (token * v_token + j * v_head)[:, None] + x[None, :], mask=seen[:, None], other=0.0)
        if FP8:
            shared_row = (page * (PAGE // SHARED) + (at % PAGE + tl.arange(0, N)) // SHARED) * P + p
            k_shift = tl.load(k_shift_ptr + shared_row[:, None] * X + x[None, :], mask=seen[:, None], other=0)
            v_shift = tl.load(v_shift_ptr + token * J + j, mask=seen, other=0)
            # exact: bf16 holds the three bits of mantissa and the exponents
            k = (k.to(tl.float32) * tl.exp2(k_shift.to(tl.float32))).to(q_ptr.dtype.element_ty)
            v = (v.to(tl.float32) * tl.exp2(v_shift.to(tl.float32))[:, None]).to(q_ptr.dtype.element_ty)
        scaled = (q * _decay_factor(fall - anchor)[None, :]).to(k.dtype)
        score = tl.dot(scaled, tl.trans(k), input_precision="ieee")
        score = tl.where(seen[None, :], score, float("-inf"))
        # a block of a range has at least one key that is seen
        higher = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        alpha = tl.exp2(row_max - higher)
        row_sum = row_sum * alpha + tl.sum(weight, 1)
        part = part * alpha[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        row_max = higher
    if SPLITS == 1:
        store_means(row_sum, part, b, head, inside, y_ptr, H, X)
    else:
        store_range(
            row_max, row_sum, tl.zeros([ROWS], tl.float32), part, b, head, inside, split, top_ptr, sum_ptr, square_ptr, part_ptr, H, X, SPLITS,
        )  # fmt: skip


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, anchor_pool: Tensor, fall: Tensor, shifts: list[Tensor], tables: Tensor,
    lengths: Tensor, *, scale: float, window: int, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Return y [B, H, X] of q's dtype.

    Args:
        q: Queries [B, H, X] of the new tokens, on a GPU.
        k_pool: Keys with their decay [pages, page, P, X]; a page is a power of two.
        v_pool: Values [pages, page, J, X].
        anchor_pool: float64 [pages, page / C, P, X], with C a power of two of at least 16.
        fall: float64 [B, P, X].
        shifts: int8 powers of two of keys [pages, page / c, P, X] and of values [pages, page, J], for pools in e4m3;
            else empty.
        tables: int32 page tables [B, pages of a text].
        lengths: int32 [B], tokens of each text, the new one included.
        scale: Factor of q·k in natural units.
        window: Attention window in keys, 0 for none.
        splits: Number of ranges of keys, a power of two; None: as many as fill the GPU.
    """
    (b, h, x), p, j, page = q.shape, k_pool.shape[2], v_pool.shape[2], k_pool.shape[1]
    max_pages, chunk = tables.shape[1], page // anchor_pool.shape[1]
    splits = splits or splits_for(q.device, b * p, max_pages * page, x)
    pools = [part if part.stride(-1) == 1 else part.contiguous() for part in (q, k_pool, v_pool, anchor_pool)]
    q, k_pool, v_pool, anchor_pool = pools
    tables, fall = tables.contiguous(), fall.contiguous()
    k_shift, v_shift = [part.contiguous() for part in shifts] or (fall, fall)
    y = torch.empty(b, h, x, dtype=q.dtype, device=q.device)
    sums = range_sums(b, h, x, splits, lengths)
    _attend_range[(b, p, splits)](
        q, k_pool, v_pool, anchor_pool, fall, k_shift, v_shift, tables, lengths, *sums, y, scale, window or 2**30, max_pages,
        q.stride(0), q.stride(1), k_pool.stride(1), k_pool.stride(2), v_pool.stride(1), v_pool.stride(2),
        anchor_pool.stride(1), anchor_pool.stride(2),
        H=h, P=p, J=j, ROWS=max(16, triton.next_power_of_2(h // p)), X=x, PAGE=page, CHUNK=chunk, N=min(KEYS, chunk),
        SPLITS=splits, FP8=bool(shifts), SHARED=page // k_shift.shape[1] if shifts else 1, num_warps=4,
    )  # fmt: skip
    merge(sums, lengths, y)
    return y
