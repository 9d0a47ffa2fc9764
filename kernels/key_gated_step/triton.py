"""Triton kernels of a Wall attention step over plain keys, from which gates are projected; split over ranges of keys.

B texts, H query heads, P gate heads, J KV heads, X head size, N keys of a block. The decay of a key is the sum of log
gates of all tokens after it, so with several ranges a first kernel adds up the log gates of each range. The second
kernel reads the keys and values of one text, one gate head and one range, newest block first, for all queries that
share the gates. All decay factors are at most 1, and sums over blocks are float64. The merge of ranges is that of
kernels/paged. Scores and sums of weights are float32, in units of log 2.

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
def _log_sigmoid(x):
    """Return ln sigmoid(x) in float32, accurate also where the sigmoid is close to 1; 0 for inf."""
    small = tl.exp(-tl.abs(x))
    # ln(1 + e) = 2 artanh(e / (2 + e)), because the GPU's logarithm has few digits near 1
    s = small / (2.0 + small)
    square = s * s
    series = 1.0 / 13.0 + square * (1.0 / 15.0)
    series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * series)
    series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * series)
    return tl.minimum(x, 0.0) - 2.0 * s * (1.0 + square * (1.0 / 3.0 + square * series))


@triton.jit
def _expm1(x):
    """Return exp(x) - 1 in float32 for x <= 0, accurate also for small x."""
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0))))))
    return tl.where(x > -0.25, series, tl.exp(x) - 1.0)


@triton.jit
def _block_log_gates(k, weight, offset, seen, g_max, CLAMPED: tl.constexpr):
    """Return the natural log gates of a block of keys, float32 [N, X]; 0 for keys that are not seen.

    Args:
        k: Keys [N, X], not rotated.
        weight: Transposed projection [X, gates], in the keys' dtype.
        offset: Bias of the logits, float32 [gates].
        seen: bool [N].
        g_max: Limit of the soft clamp, in nats; read only when CLAMPED.
        CLAMPED: constexpr bool, True with a soft clamp.
    """
    logit = tl.dot(k, weight, input_precision="ieee").to(k.dtype).to(tl.float32)
    log_gate = _log_sigmoid(logit + offset[None, :])
    if CLAMPED:
        log_gate = g_max * _expm1(log_gate / g_max)
    # a lower one would cost the sums digits; a factor below exp(-104) is 0 in any case
    return tl.where(seen[:, None], tl.maximum(log_gate, -104.0), 0.0)


@triton.jit
def _sum_range(
    k_ptr, weight_ptr, offset_ptr, tables_ptr, lengths_ptr, total_ptr, g_max, window, TABLE, k_token, k_head,
    P: tl.constexpr, J: tl.constexpr, X: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """Add up the natural log gates of one gate head of one text over one range of its visible keys.

    Grid: (B, P, SPLITS).

    Args:
        k_ptr: Pool of keys [pages, PAGE, J, X] with unit stride in X.
        weight_ptr: Contiguous projection [P, gates, X], in the keys' dtype.
        offset_ptr: Contiguous float32 [P, gates].
        tables_ptr: Contiguous int32 page tables [B, TABLE].
        lengths_ptr: int32 [B], tokens of each text.
        total_ptr: Contiguous float64 [B, P, SPLITS, X], written.
        g_max: Limit of the soft clamp, in nats.
        window: Largest number of visible keys; 2^30 for no window.
        TABLE: Pages of a table.
        k_token: Elements from one token of the key pool to the next.
        k_head: Elements from one head of the key pool to the next.
        P: constexpr, gate heads.
        J: constexpr, KV heads.
        X: constexpr, head size.
        PAGE: constexpr, tokens of a page.
        N: constexpr, keys of a block; divides PAGE.
        SPLITS: constexpr, number of ranges.
        CLAMPED: constexpr bool, True with a soft clamp.
    """
    b = tl.program_id(0)
    p = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + b)
    first, start, stop = block_range(length, window, split, N, SPLITS)
    x = tl.arange(0, X)
    weight = tl.load(weight_ptr + (p * X + x[None, :]) * X + x[:, None])
    offset = tl.load(offset_ptr + p * X + x)
    total = tl.zeros([X], tl.float64)
    for block in range(start, stop):
        at = block * N
        page = tl.load(tables_ptr + b * TABLE + at // PAGE).to(tl.int64)
        key = at + tl.arange(0, N)
        seen = (key < length) & (key >= first)
        token = page * PAGE + at % PAGE + tl.arange(0, N)
        row = token * k_token + p // (P // J) * k_head
        k = tl.load(k_ptr + row[:, None] + x[None, :], mask=seen[:, None], other=0.0)
        total += tl.sum(_block_log_gates(k, weight, offset, seen, g_max, CLAMPED), 0).to(tl.float64)
    tl.store(total_ptr + ((b * P + p) * SPLITS + split) * X + x, total)


@triton.jit
def _attend_range(
    q_ptr, k_ptr, v_ptr, weight_ptr, offset_ptr, frequency_ptr, tables_ptr, lengths_ptr, later_ptr, top_ptr, sum_ptr,
    square_ptr, part_ptr, y_ptr, g_max, scale, window, TABLE, q_text, q_head, k_token, k_head, v_token, v_head,
    H: tl.constexpr, P: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, X: tl.constexpr, PAGE: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, CLAMPED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Attend from the queries of one gate head of one text to one range of its keys.

    Grid: (B, P, SPLITS). With SPLITS 1 the output is stored, else the partial sums of the range.

    Args:
        q_ptr: Queries [B, H, X] with unit stride in X.
        k_ptr: Pool of keys [pages, PAGE, J, X] with unit stride in X.
        v_ptr: Pool of values, like the keys.
        weight_ptr: Contiguous projection [P, gates, X], in the keys' dtype.
        offset_ptr: Contiguous float32 [P, gates].
        frequency_ptr: float32 [X / 2], angle of each pair per position; read only when ROTATED.
        tables_ptr: Contiguous int32 page tables [B, TABLE].
        lengths_ptr: int32 [B], tokens of each text.
        later_ptr: Contiguous float64 [B, P, SPLITS, X], sum of the log gates of all later ranges; read unless SPLITS is
            1.
        top_ptr: float32 [B, H, SPLITS], largest score of the range in units of log 2, -inf without keys; written, as
            the next three, unless SPLITS is 1.
        sum_ptr: float32 [B, H, SPLITS], sum of weights, written.
        square_ptr: float32 [B, H, SPLITS], 0, written, because the merge reads it.
        part_ptr: float32 [B, H, SPLITS, X], sum of weights times values, written.
        y_ptr: Contiguous [B, H, X], written when SPLITS is 1.
        g_max: Limit of the soft clamp, in nats.
        scale: Factor of q·k in natural units.
        window: Largest number of visible keys; 2^30 for no window.
        TABLE: Pages of a table.
        q_text: Elements from one text of q to the next.
        q_head: Elements from one head of q to the next.
        k_token: Elements from one token of the key pool to the next.
        k_head: Elements from one head of the key pool to the next.
        v_token: Elements from one token of the value pool to the next.
        v_head: Elements from one head of the value pool to the next.
        H: constexpr, query heads.
        P: constexpr, gate heads.
        J: constexpr, KV heads.
        ROWS: constexpr, H / P rounded up to a power of two of at least 16.
        X: constexpr, head size.
        PAGE: constexpr, tokens of a page.
        N: constexpr, keys of a block; divides PAGE.
        SPLITS: constexpr, number of ranges.
        CLAMPED: constexpr bool, True with a soft clamp.
        ROTATED: constexpr bool, True if keys are rotated to their positions before they are scored.
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
    weight = tl.load(weight_ptr + (p * X + x[None, :]) * X + x[:, None])
    offset = tl.load(offset_ptr + p * X + x)
    later = tl.zeros([X], tl.float64)
    if SPLITS > 1:
        later += tl.load(later_ptr + ((b * P + p) * SPLITS + split) * X + x)
    if ROTATED:
        frequency = tl.load(frequency_ptr + x % (X // 2))
        partner = (x + X // 2) % X
        sign = tl.where(x < X // 2, 1.0, -1.0)

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    part = tl.zeros([ROWS, X], tl.float32)
    for step in range(start, stop):
        at = (start + stop - 1 - step) * N
        page = tl.load(tables_ptr + b * TABLE + at // PAGE).to(tl.int64)
        key = at + tl.arange(0, N)
        seen = (key < length) & (key >= first)
        token = page * PAGE + at % PAGE + tl.arange(0, N)
        k_row = (token * k_token + j * k_head)[:, None]
        k = tl.load(k_ptr + k_row + x[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + (token * v_token + j * v_head)[:, None] + x[None, :], mask=seen[:, None], other=0.0)
        log_gate = _block_log_gates(k, weight, offset, seen, g_max, CLAMPED)
        fade = tl.cumsum(log_gate, 0, reverse=True) - log_gate
        scored = k.to(tl.float32)
        if ROTATED:
            paired = tl.load(k_ptr + k_row + partner[None, :], mask=seen[:, None], other=0.0).to(tl.float32)
            angle = key.to(tl.float32)[:, None] * frequency[None, :]
            scored = (scored * tl.cos(angle) + sign[None, :] * paired * tl.sin(angle)).to(k.dtype).to(tl.float32)
        scored *= tl.exp(fade) * tl.exp(tl.maximum(later, -200.0).to(tl.float32))[None, :]
        score = tl.dot(q, tl.trans(scored.to(q.dtype)), input_precision="ieee") * (scale * _LOG2E)
        score = tl.where(seen[None, :], score, float("-inf"))
        later += tl.sum(log_gate, 0).to(tl.float64)
        # a block of a range has at least one key that is seen
        higher = tl.maximum(row_max, tl.max(score, 1))
        weights = tl.exp2(score - higher[:, None])
        alpha = tl.exp2(row_max - higher)
        row_sum = row_sum * alpha + tl.sum(weights, 1)
        part = part * alpha[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = higher
    if SPLITS == 1:
        store_means(row_sum, part, b, head, inside, y_ptr, H, X)
    else:
        store_range(
            row_max, row_sum, tl.zeros([ROWS], tl.float32), part, b, head, inside, split, top_ptr, sum_ptr, square_ptr, part_ptr, H, X, SPLITS,
        )  # fmt: skip


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, weight: Tensor, offset: Tensor, frequency: list[Tensor], tables: Tensor,
    lengths: Tensor, *, g_max: float, scale: float, window: int, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Return y [B, H, X] of q's dtype.

    Args:
        q: Queries [B, H, X] of the new tokens, on a GPU; rotated if keys are to be.
        k_pool: Keys [pages, page, J, X], not rotated; a page is a power of two.
        v_pool: Values, like `k_pool`.
        weight: Projection of keys to the gates' logits [P, X, X], in the keys' dtype.
        offset: Bias of the logits, float32 [P, X].
        frequency: Angle of each rotated pair per position, float32 [X / 2], in a list; empty: no rotation.
        tables: int32 page tables [B, pages of a text].
        lengths: int32 [B], tokens of each text, the new one included.
        g_max: Limit of the soft clamp, in nats; 0 for none.
        scale: Factor of q·k in natural units.
        window: Attention window in keys, 0 for none.
        splits: Number of ranges of keys, a power of two; None: as many as fill the GPU.
    """
    (b, h, x), j, page, p = q.shape, k_pool.shape[2], k_pool.shape[1], len(weight)
    max_pages, keys = tables.shape[1], min(KEYS, page)
    splits = splits or splits_for(q.device, b * p, max_pages * page, x)
    q, k_pool, v_pool = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k_pool, v_pool))
    tables, weight, offset = tables.contiguous(), weight.contiguous(), offset.contiguous()
    y = torch.empty(b, h, x, dtype=q.dtype, device=q.device)
    visible_window = window or 2**30
    sums, later = range_sums(b, h, x, splits, lengths), lengths  # not read with one range
    sizes = {"P": p, "J": j, "X": x, "PAGE": page, "N": keys, "SPLITS": splits, "CLAMPED": g_max > 0}
    if splits > 1:
        ranges = torch.empty(b, p, splits, x, dtype=torch.float64, device=q.device)
        _sum_range[(b, p, splits)](
            k_pool, weight, offset, tables, lengths, ranges, g_max, visible_window, max_pages, k_pool.stride(1),
            k_pool.stride(2), **sizes, num_warps=4,
        )  # fmt: skip
        # a product, because torch's cumsum raises where runs must repeat bit for bit
        later = torch.ones(splits, splits, dtype=torch.float64, device=q.device).triu(1) @ ranges
    _attend_range[(b, p, splits)](
        q, k_pool, v_pool, weight, offset, frequency[0] if frequency else offset, tables, lengths, later, *sums,
        y, g_max, scale, visible_window, max_pages, q.stride(0), q.stride(1), k_pool.stride(1),
        k_pool.stride(2), v_pool.stride(1), v_pool.stride(2), **sizes, H=h,
        ROWS=max(16, triton.next_power_of_2(h // p)), ROTATED=bool(frequency), num_warps=4,
    )  # fmt: skip
    merge(sums, lengths, y)
    return y
