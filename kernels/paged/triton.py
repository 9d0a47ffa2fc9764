"""Triton kernels of attention of one query per text over keys in pages, split over ranges of keys (docs/explanation/decoding.md).

B texts, P pages of a text, H query heads, J KV heads, G = H / J, X head size, N keys of a block. A program reads the
keys of one text, one KV head and one range once for all G queries. A second kernel merges the ranges where there are
several. Polar attention's null key is folded in once, at the end. Dao et al., "Flash-Decoding for long-context
inference" (2023). Scores and sums are float32, in units of log 2.

Launches depend on shapes alone: lengths and tables are read on the device, so a captured CUDA graph of a step stays
valid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.device import LOG2E, log1p, tanh
from ..attention.polar.op import TINY

KEYS = 64
"""Largest number of keys of a block; a block lies in one page."""
PROGRAMS = 4
"""Programs per multiprocessor.

With two, keys arrive at 0.9 of this speed on an H200, those of a single text at 0.7.
"""
MAX_MERGED = 2**15
"""Largest number of values of one head that a program merges: ranges times head size."""

_LOG2E, _TINY = tl.constexpr(LOG2E), tl.constexpr(TINY)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _temperature(gain_ptr, head, inside, n):
    """Return polar attention's temperature 1 + softplus(gain) ln(max(n, 1)) of some heads, for n visible keys."""
    gain = tl.load(gain_ptr + head, mask=inside, other=0.0)
    return 1.0 + _softplus(gain) * tl.log(tl.maximum(n, 1).to(tl.float32))


@triton.jit
def store_means(row_sum, part, b, head, inside, y_ptr, H: tl.constexpr, X: tl.constexpr):
    """Store the mean of the values of some heads of one text, from sums over all of its keys; 0 for a text without keys.

    Args:
        row_sum: float32 [rows], sum of the weights.
        part: float32 [rows, X], sum of weights times values.
        b: Index of the text.
        head: Indices of the heads [rows].
        inside: Mask of the heads that exist.
        y_ptr: [B, H, X], written in its own dtype.
        H: constexpr, query heads.
        X: constexpr, head size.
    """
    y = part / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    at = (b * H + head)[:, None] * X + tl.arange(0, X)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def store_outputs(
    row_max, row_sum, square, part, b, head, inside, length, base_ptr, slope_ptr, gain_ptr, beta_ptr, v_null_ptr, y_ptr, mag_ptr,
    window, floor, H: tl.constexpr, X: tl.constexpr, POLAR: tl.constexpr,
):  # fmt: skip
    """Normalise and store the outputs of some heads of one text, from sums over all of its keys.

    Without POLAR y is the mean of the values, 0 for a text without keys. With POLAR y is s / max(|s|, 1e-6) for the
    softmax mean s of the values, null key included, and the magnitude is tanh(softplus(beta) ln(1 + n_eff r)), with r
    the weight of all real keys; a text without keys gives the direction of v_null and magnitude 0.

    Args:
        row_max: float32 [rows], largest score, in units of log 2.
        row_sum: float32 [rows], sum of the weights relative to 2^row_max.
        square: float32 [rows], sum of their squares; read only with POLAR.
        part: float32 [rows, X], sum of weights times values.
        b: Index of the text.
        head: Indices of the heads [rows].
        inside: Mask of the heads that exist.
        length: Tokens of the text.
        base_ptr: Raw parameter of polar attention, float32 [H], like slope, gain and beta.
        slope_ptr: float32 [H].
        gain_ptr: float32 [H].
        beta_ptr: float32 [H].
        v_null_ptr: float32 [H, X], value of the null key.
        y_ptr: [B, H, X], written in its own dtype.
        mag_ptr: float32 [B, H], written with POLAR.
        window: Largest number of visible keys; 2^30 for no window.
        floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1.
        H: constexpr, query heads.
        X: constexpr, head size.
        POLAR: constexpr bool, True for polar attention.
    """
    if POLAR:
        x = tl.arange(0, X)
        has_keys = row_sum > 0
        n = tl.minimum(length, window)
        steps = log1p(tl.maximum(n, 1).to(tl.float32))
        slope = _softplus(tl.load(slope_ptr + head, mask=inside, other=0.0))
        null = tl.load(base_ptr + head, mask=inside, other=0.0) + slope * tl.sqrt(steps)
        null *= _temperature(gain_ptr, head, inside, n) * _LOG2E
        lse = tl.where(has_keys, row_max + tl.log2(tl.where(has_keys, row_sum, 1.0)), float("-inf"))
        real = 1.0 / (1.0 + tl.exp2(null - lse))
        none = 1.0 / (1.0 + tl.exp2(lse - null))
        n_eff = tl.where(has_keys, row_sum * row_sum / tl.where(has_keys, square, 1.0), 0.0)
        n_eff = tl.minimum(n_eff, tl.exp2(2.0 * (lse - null)) / floor)
        v_null = tl.load(v_null_ptr + head[:, None] * X + x[None, :], mask=inside[:, None], other=0.0)
        mean = part / tl.where(has_keys, row_sum, 1.0)[:, None]
        y = mean * real[:, None] + none[:, None] * v_null
        store_means(tl.maximum(tl.sqrt(tl.sum(y * y, 1)), _TINY), y, b, head, inside, y_ptr, H, X)
        beta = _softplus(tl.load(beta_ptr + head, mask=inside, other=0.0))
        tl.store(mag_ptr + b * H + head, tanh(beta * log1p(n_eff * real)), mask=inside)
    else:
        store_means(row_sum, part, b, head, inside, y_ptr, H, X)


@triton.jit
def block_range(length, window, split, N: tl.constexpr, SPLITS: tl.constexpr):
    """Return (first visible key, first block, block after the last one) of one range of a text."""
    first = tl.maximum(length - window, 0)
    low = first // N
    high = tl.cdiv(length, N)
    share = tl.cdiv(high - low, SPLITS)
    start = low + split * share
    return first, start, tl.minimum(start + share, high)


@triton.jit
def store_range(
    row_max, row_sum, square, part, b, head, inside, split, top_ptr, sum_ptr, square_ptr, part_ptr,
    H: tl.constexpr, X: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the partial sums of one range of a text for some heads, which `merge_ranges` reads.

    Args:
        row_max: float32 [rows], largest score in units of log 2, -inf without keys.
        row_sum: float32 [rows], sum of the weights relative to 2^row_max.
        square: float32 [rows], sum of their squares; any numbers without polar attention.
        part: float32 [rows, X], sum of weights times values.
        b: Index of the text.
        head: Indices of the heads [rows].
        inside: Mask of the heads that exist.
        split: Index of the range.
        top_ptr: float32 [B, H, SPLITS], written, like the next two.
        sum_ptr: float32 [B, H, SPLITS].
        square_ptr: float32 [B, H, SPLITS].
        part_ptr: float32 [B, H, SPLITS, X], written.
        H: constexpr, query heads.
        X: constexpr, head size.
        SPLITS: constexpr, number of ranges.
    """
    x = tl.arange(0, X)
    to = (b * H + head) * SPLITS + split
    tl.store(top_ptr + to, row_max, mask=inside)
    tl.store(sum_ptr + to, row_sum, mask=inside)
    tl.store(square_ptr + to, square, mask=inside)
    tl.store(part_ptr + to[:, None] * X + x[None, :], part, mask=inside[:, None])


@triton.jit
def _attend_range(
    q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, base_ptr, slope_ptr, gain_ptr, beta_ptr, v_null_ptr, top_ptr, sum_ptr,
    square_ptr, part_ptr, y_ptr, mag_ptr, scale, window, floor, P, q_text, q_head, k_token, k_head, v_token, v_head,
    H: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, X: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
    SPLITS: tl.constexpr, POLAR: tl.constexpr,
):  # fmt: skip
    """Attend from the G queries of one KV head of one text to one range of its keys.

    Grid: (B, J, SPLITS). With SPLITS 1 the outputs are stored, else the partial sums of the range.

    Args:
        q_ptr: Queries [B, H, X] with unit stride in X.
        k_ptr: Pool of keys [pages, PAGE, J, X] with unit stride in X.
        v_ptr: Pool of values, like k_ptr.
        tables_ptr: Contiguous int32 page tables [B, P].
        lengths_ptr: int32 [B], tokens of each text.
        base_ptr: Raw parameter of polar attention, float32 [H], like slope, gain and beta.
        slope_ptr: float32 [H].
        gain_ptr: float32 [H].
        beta_ptr: float32 [H].
        v_null_ptr: float32 [H, X], value of the null key.
        top_ptr: float32 [B, H, SPLITS], largest score of the range in units of log 2, -inf without keys; written, as
            the next three, unless SPLITS is 1.
        sum_ptr: float32 [B, H, SPLITS], sum of weights, written.
        square_ptr: float32 [B, H, SPLITS], sum of squared weights, written.
        part_ptr: float32 [B, H, SPLITS, X], sum of weights times values, written.
        y_ptr: [B, H, X], written when SPLITS is 1.
        mag_ptr: float32 [B, H], written when SPLITS is 1 with POLAR.
        scale: Factor of q·k in natural units.
        window: Largest number of visible keys; 2^30 for no window.
        floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1.
        P: Pages of a table.
        q_text: Elements from one text of q to the next.
        q_head: Elements from one head of q to the next.
        k_token: Elements from one token of the key pool to the next.
        k_head: Elements from one head of the key pool to the next.
        v_token: Elements from one token of the value pool to the next.
        v_head: Elements from one head of the value pool to the next.
        H: constexpr, query heads.
        G: constexpr, query heads per KV head.
        ROWS: constexpr, G rounded up to a power of two of at least 16.
        X: constexpr, head size.
        PAGE: constexpr, tokens of a page.
        N: constexpr, keys of a block; N divides PAGE.
        SPLITS: constexpr, number of ranges.
        POLAR: constexpr bool, True for polar attention.
    """
    b = tl.program_id(0)
    j = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + b)
    first, start, stop = block_range(length, window, split, N, SPLITS)

    row = tl.arange(0, ROWS)
    x = tl.arange(0, X)
    head = j * G + row
    inside = row < G
    q = tl.load(q_ptr + b * q_text + head[:, None] * q_head + x[None, :], mask=inside[:, None], other=0.0)
    factor = tl.zeros([ROWS], tl.float32) + scale * _LOG2E
    if POLAR:
        factor *= _temperature(gain_ptr, head, inside, length - first)

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    part = tl.zeros([ROWS, X], tl.float32)
    for block in range(start, stop):
        at = block * N
        page = tl.load(tables_ptr + b * P + at // PAGE).to(tl.int64)
        key = at + tl.arange(0, N)
        seen = (key < length) & (key >= first)
        token = page * PAGE + at % PAGE + tl.arange(0, N)
        k = tl.load(k_ptr + (token * k_token + j * k_head)[:, None] + x[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + (token * v_token + j * v_head)[:, None] + x[None, :], mask=seen[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * factor[:, None]
        score = tl.where(seen[None, :], score, float("-inf"))
        # a block of a range has at least one key that is seen
        higher = tl.maximum(row_max, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        alpha = tl.exp2(row_max - higher)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        square = square * alpha * alpha + tl.sum(p * p, 1)
        part = part * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        row_max = higher
    if SPLITS == 1:
        store_outputs(
            row_max, row_sum, square, part, b, head, inside, length, base_ptr, slope_ptr, gain_ptr, beta_ptr, v_null_ptr, y_ptr,
            mag_ptr, window, floor, H, X, POLAR,
        )  # fmt: skip
    else:
        store_range(
            row_max, row_sum, square, part, b, head, inside, split, top_ptr, sum_ptr, square_ptr, part_ptr, H, X, SPLITS,
        )  # fmt: skip


@triton.jit
def merge_ranges(
    top_ptr, sum_ptr, square_ptr, part_ptr, lengths_ptr, base_ptr, slope_ptr, gain_ptr, beta_ptr, v_null_ptr, y_ptr,
    mag_ptr, window, floor, H: tl.constexpr, X: tl.constexpr, SPLITS: tl.constexpr, POLAR: tl.constexpr,
):  # fmt: skip
    """Merge the partial sums of all ranges of one text and head, and store the outputs.

    Grid: (B, H).

    Args:
        top_ptr: float32 [B, H, SPLITS], largest score of each range in units of log 2, -inf for one without keys.
        sum_ptr: float32 [B, H, SPLITS], sum of weights.
        square_ptr: float32 [B, H, SPLITS], sum of squared weights.
        part_ptr: float32 [B, H, SPLITS, X], sum of weights times values.
        lengths_ptr: int32 [B], tokens of each text.
        base_ptr: Raw parameter of polar attention, float32 [H], like slope, gain and beta.
        slope_ptr: float32 [H].
        gain_ptr: float32 [H].
        beta_ptr: float32 [H].
        v_null_ptr: float32 [H, X], value of the null key.
        y_ptr: [B, H, X], written in its own dtype.
        mag_ptr: float32 [B, H], written with POLAR.
        window: Largest number of visible keys; 2^30 for no window.
        floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1.
        H: constexpr, query heads.
        X: constexpr, head size.
        SPLITS: constexpr, number of ranges, a power of two.
        POLAR: constexpr bool, True for polar attention.
    """
    b = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    x = tl.arange(0, X)
    at = (b * H + h) * SPLITS + split
    top = tl.load(top_ptr + at)
    highest = tl.max(top, 0)
    # a range without keys has -inf; in an empty text all ranges do
    alpha = tl.where(top == float("-inf"), 0.0, tl.exp2(top - highest))
    total = tl.sum(tl.load(sum_ptr + at) * alpha, 0)
    square = tl.sum(tl.load(square_ptr + at) * alpha * alpha, 0)
    part = tl.sum(tl.load(part_ptr + at[:, None] * X + x[None, :]) * alpha[:, None], 0)
    ones = tl.zeros([1], tl.float32)
    head = h + tl.arange(0, 1)
    store_outputs(
        ones + highest, ones + total, ones + square, part[None, :], b, head, head < H, tl.load(lengths_ptr + b), base_ptr,
        slope_ptr, gain_ptr, beta_ptr, v_null_ptr, y_ptr, mag_ptr, window, floor, H, X, POLAR,
    )  # fmt: skip


def range_sums(b: int, h: int, x: int, splits: int, unread: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return uninitialised sums of ranges, which kernels fill by `store_range`: top, sum, square and part.

    The first three are float32 [B, H, splits], the last one [B, H, splits, X]. For a single range all four are
    `unread`, a tensor on the GPU that is neither read nor written.
    """
    if splits == 1:
        return (unread,) * 4
    top, total, square = torch.empty(3, b, h, splits, dtype=torch.float32, device=unread.device)
    return top, total, square, torch.empty(b, h, splits, x, dtype=torch.float32, device=unread.device)


def merge(
    sums: tuple[Tensor, Tensor, Tensor, Tensor], lengths: Tensor, y: Tensor, mag: Tensor | None = None,
    null: list[Tensor] | None = None, *, window: int = 0, floor: float = 0.0,
) -> None:  # fmt: skip
    """Store the outputs of a step whose ranges are stored; without effect for a single range.

    Args:
        sums: From `range_sums`.
        lengths: int32 [B], tokens of each text.
        y: Contiguous [B, H, X], overwritten.
        mag: float32 [B, H], overwritten with `null`.
        null: As in `attend`; None or empty: softmax attention.
        window: As in `attend`; read with `null` alone.
        floor: As in `attend`.
    """
    (b, h, x), splits = y.shape, sums[-1].shape[2] if sums[-1].ndim == 4 else 1
    if splits == 1:
        return
    merge_ranges[(b, h)](
        *sums, lengths, *(null or [lengths] * 5), y, y if mag is None else mag, window or 2**30, floor, H=h, X=x,
        SPLITS=splits, POLAR=bool(null), num_warps=1 if splits * x <= 1024 else 4 if splits * x <= 4096 else 8,
    )  # fmt: skip


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, lengths: Tensor, null: list[Tensor], *, scale: float,
    window: int, floor: float = 0.0, splits: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (y [B, H, X] of q's dtype, magnitude float32 [B, H], [B, 0] without `null`).

    Args:
        q: Queries [B, H, X] of the new tokens, on a GPU.
        k_pool: Keys [pages, page, J, X]; a page is a power of two.
        v_pool: Values, like `k_pool`.
        tables: int32 page tables [B, P].
        lengths: int32 [B], tokens of each text, the new one included.
        null: Empty for softmax attention; for polar attention float32 raw base, slope, gain, beta [H] and v_null [H,
            X].
        scale: Factor of q·k in natural units.
        window: Attention window in keys, 0 for none.
        floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1; for
            polar attention.
        splits: Number of ranges of keys, a power of two; None: as many as fill the GPU.
    """
    (b, h, x), j, page = q.shape, k_pool.shape[2], k_pool.shape[1]
    max_pages = tables.shape[1]
    splits = splits or splits_for(q.device, b * j, max_pages * page, x)
    polar = bool(null)
    q, k_pool, v_pool = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k_pool, v_pool))
    tables = tables.contiguous()
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    mag = torch.empty(b, h if polar else 0, dtype=torch.float32, device=q.device)
    sums = range_sums(b, h, x, splits, lengths)
    _attend_range[(b, j, splits)](
        q, k_pool, v_pool, tables, lengths, *(null or [lengths] * 5), *sums, y, mag, scale, window or 2**30, floor, max_pages,
        q.stride(0), q.stride(1), k_pool.stride(1), k_pool.stride(2), v_pool.stride(1), v_pool.stride(2),
        H=h, G=h // j, ROWS=max(16, triton.next_power_of_2(h // j)), X=x, PAGE=page, N=min(KEYS, page),
        SPLITS=splits, POLAR=polar, num_warps=4,
    )  # fmt: skip
    merge(sums, lengths, y, mag, null, window=window, floor=floor)
    return y, mag


@triton.jit
def _put(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, tables_ptr, lengths_ptr, P, C, k_text, v_text, PAGE: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Copy key and value of one text's new token into its page; a padding row of length 0 is skipped.

    Grid: (B,).

    Args:
        k_ptr: Keys [B, C], contiguous within a text.
        v_ptr: Values [B, C], contiguous within a text.
        k_pool_ptr: Contiguous pool [pages, PAGE, C], written.
        v_pool_ptr: Contiguous pool [pages, PAGE, C], written.
        tables_ptr: Contiguous int32 page tables [B, P].
        lengths_ptr: int32 [B], tokens, the new one included.
        P: Pages of a table.
        C: Numbers of a token, J X.
        k_text: Elements from one text of k to the next.
        v_text: Elements from one text of v to the next.
        PAGE: constexpr, tokens of a page.
        BC: constexpr, C rounded up to a power of two.
    """
    b = tl.program_id(0)
    c = tl.arange(0, BC)
    at = tl.load(lengths_ptr + b) - 1
    inside = (c < C) & (at >= 0)
    at = tl.maximum(at, 0)
    token = tl.load(tables_ptr + b * P + at // PAGE).to(tl.int64) * PAGE + at % PAGE
    tl.store(k_pool_ptr + token * C + c, tl.load(k_ptr + b * k_text + c, mask=inside), mask=inside)
    tl.store(v_pool_ptr + token * C + c, tl.load(v_ptr + b * v_text + c, mask=inside), mask=inside)


def put(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, lengths: Tensor) -> None:
    """Write the new tokens' keys and values [B, J, X] into their pages of the pools in place.

    Padding rows, of length 0, are skipped.

    Args:
        k: Keys.
        v: Values.
        k_pool: Contiguous pool of keys [pages, page, J, X], changed in place.
        v_pool: Contiguous pool of values, changed in place.
        tables: int32 page tables [B, P].
        lengths: int32 [B], tokens of each text, the new one included.
    """
    k, v = (part if part[0].is_contiguous() else part.contiguous() for part in (k, v))
    tables, channels = tables.contiguous(), k[0].numel()
    _put[(len(k),)](
        k, v, k_pool, v_pool, tables, lengths, tables.shape[1], channels, k.stride(0), v.stride(0), PAGE=k_pool.shape[1],
        BC=triton.next_power_of_2(channels), num_warps=2,
    )  # fmt: skip


def splits_for(device: torch.device, programs: int, keys: int, size: int) -> int:
    """Return the number of ranges of keys, a power of two, at least 1.

    It gives `PROGRAMS` (4) programs per multiprocessor, rounded down, but no range below one block of 64 keys, and no
    more ranges than one program can merge, 2^15 / size. A device other than CUDA counts as four multiprocessors.

    Args:
        device: Device of the launch.
        programs: Programs of one range, texts times KV heads.
        keys: Keys that a page table can hold, whatever the lengths of the texts.
        size: Head size.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    num_splits = max(1, min(MAX_MERGED // size, PROGRAMS * processors // programs, keys // KEYS))
    return 1 << (num_splits.bit_length() - 1)
