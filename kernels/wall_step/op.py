"""Wall attention of one new token per text, over cached keys that have their decay multiplied in.

See docs/explanation/decoding.md, "Wall attention". With P_t the running sum of a channel's natural log gates and R the
sum at the first token of a key's chunk, a cached key is k_j exp(R - P_j), and a step scales its query by exp(P_t - R),
once per chunk. Their product has the decay exp(P_t - P_j).

B texts, T tokens, N pages of a pool, H query heads, J KV heads, P gate heads (H or J), X head size, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..custom_ops import load_kernels, torch_op
from ..dispatch import BackendChoice, attention_choice, checked_backend, compile_time_constant, max_relative_error
from ..norms import statistics_dtype
from ..paged.op import MIN_PAGE_TOKENS
from ..paged.page_tables import PAGE, Texts
from ..paged.single_query import row_attention
from ..shapes import expand_kv
from .fp8 import E4M3, dequantize, key_shifts, quantize, value_shifts

MAX_CHUNK = 64
"""Largest number of tokens that share an anchor."""
MIN_KERNEL_CHUNK = 16
"""Smallest number of tokens that share an anchor for which there is a kernel: a block of keys has one anchor."""
MAX_LOG2_FACTOR = {torch.float16: 10.0}
"""Largest binary logarithm of a key's factor by dtype; `WIDE_LOG2_FACTOR` for the dtypes that are missing."""
WIDE_LOG2_FACTOR = 80.0


def chunk_tokens(dtype: torch.dtype, steepest: float | None) -> int:
    """Return how many consecutive tokens share an anchor, a power of two from 1 to 64.

    It is the largest for which the factor of a cached key, exp(R - P_j), stays below 2^E: R is the sum at the chunk's
    first token, so at most C - 1 gates lie between, and (C - 1) steepest / ln 2 <= E. E is 80 with the 8 bits of
    exponent of bfloat16 and float32, and 10 for float16. With the mixer's default, `g_max: 0.86`, C is 64 (78.2 bits);
    in float16 it is 8. Without a limit every token is its own anchor: keys are cached as they are.

    The factor costs no accuracy. Floating-point numbers are rounded relative to their size: a cached key k exp(R - P_j)
    has the relative error of a rounding u of its dtype, and the scaled query that of its own, whatever the factors. So
    a channel's product errs by at most (2u + u^2) |q k| exp(P_t - P_j), as much as two plain bf16 factors, plus the
    few roundings of the exponentials, whose arguments are float64. Neither end of the range is reached:

    - overflow: |k| 2^80 < 2^127 for keys up to 2^47 in size;
    - underflow: a query's factor below 2^-126 is flushed to 0, which loses at most 2^-126 2^80 |q k| = 2^-46 |q k| per
      channel, less than a rounding of float32.

    Args:
        dtype: Dtype of the cached keys.
        steepest: No natural log gate lies below -steepest; None: no limit is known.
    """
    if steepest is None:
        return 1
    longest = 1 + MAX_LOG2_FACTOR.get(dtype, WIDE_LOG2_FACTOR) * math.log(2) / steepest
    return min(MAX_CHUNK, 1 << (int(min(longest, MAX_CHUNK)).bit_length() - 1))


def absorb_decay(k_BTJX: Tensor, fall_BTPX: Tensor, anchor_BTPX: Tensor) -> Tensor:
    """Return the keys to cache, k exp(R - P), [B, T, P, X] in k's dtype, one per gate head.

    Args:
        k_BTJX: Keys.
        fall_BTPX: Running sum P of the natural log gates up to each token, its own included, float64.
        anchor_BTPX: Running sum R at the first token of each token's chunk, float64.
    """
    factor = torch.exp(anchor_BTPX - fall_BTPX)
    return (expand_kv(k_BTJX, fall_BTPX.shape[2]) * factor).to(k_BTJX.dtype)


def paged_wall(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, anchor_pool: Tensor, fall_BPX: Tensor, texts: Texts, *,
    shifts: Sequence[Tensor] = (), scale: float | None = None, window: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return `wall_attention` at the last token of each text, [B, H, X] of q's dtype; an empty text gives 0.

    Query head h uses gate head h // (H / P) and KV head h // (H / J). Softmax and sums are float32 (float64 for float64
    in torch). No gradients.

    Args:
        q_BHX: Queries of the new tokens.
        k_pool: Keys with their decay, [N, page, P, X] (`absorb_decay`); those of the new tokens are already written.
        v_pool: Values [N, page, J, X].
        anchor_pool: Sums R of the natural log gates, float64 [N, page / C, P, X]: C tokens share one.
        fall_BPX: Sums of the natural log gates up to the new tokens, their own included, float64.
        texts: Page tables and lengths of the texts, the new tokens counted.
        shifts: Powers of two of an 8-bit cache, whose pools `k_pool` and `v_pool` are uint8 (`fp8.quantize`): those of
            the keys, int8 [N, page / c, P, X], c tokens share one, and of the values, int8 [N, page, J].
        scale: Factor of the products; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all.
        backend: "triton" or "torch", which copies every text's pages; None: `choose_backend`.

    Raises:
        ValueError: Shapes disagree.
    """
    x, chunk = _check_shapes(q_BHX, k_pool, v_pool, anchor_pool, fall_BPX, texts, shifts)
    scale = x**-0.5 if scale is None else scale
    choice = checked_backend(backend, "triton")
    chosen = choice or choose_backend(q_BHX.device, q_BHX.dtype, x, texts.page, chunk, fp8=bool(shifts)).backend
    if chosen == "triton":
        return attend(
            q_BHX, k_pool, v_pool, anchor_pool, fall_BPX, list(shifts), texts.tables_BP, texts.lengths_B, scale, window or 0
        )  # fmt: skip
    dtype, seen_BS, heads = statistics_dtype(q_BHX.dtype), texts.visible_keys(window), k_pool.shape[2]
    # entries of hidden keys are arbitrary, so are anchors of chunks without visible keys
    seen_chunks = seen_BS.unflatten(1, (-1, chunk)).any(-1)
    grown = torch.where(seen_chunks[..., None, None], fall_BPX[:, None] - texts.gather(anchor_pool), 0.0).exp()
    scaled = q_BHX.to(dtype).unflatten(1, (heads, -1))[:, None] * grown.to(dtype)[:, :, :, None]
    k_BSPX, v_BSJX = (texts.gather(pool) for pool in (k_pool, v_pool))
    if shifts:
        k_shift, v_shift = (texts.gather(pool) for pool in shifts)
        k_BSPX = dequantize(k_BSPX, k_shift.repeat_interleave(k_BSPX.shape[1] // k_shift.shape[1], 1), dtype)
        v_BSJX = dequantize(v_BSJX, v_shift[..., None], dtype)
    chunked = k_BSPX.to(dtype).unflatten(1, (-1, chunk))
    logits = torch.einsum("bapgx,bacpx->bpgac", scaled, chunked)
    return row_attention(logits.flatten(3).flatten(1, 2) * scale, v_BSJX, seen_BS).to(q_BHX.dtype)


def _check_shapes(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, anchor_pool: Tensor, fall_BPX: Tensor, texts: Texts,
    shifts: Sequence[Tensor] = (),
) -> tuple[int, int]:  # fmt: skip
    """Return (head size, tokens per anchor) after a check of all shapes; contents are not read.

    Raises:
        ValueError: Query, pools, sums and tables do not belong together, or a number of heads does not divide another.
    """
    if q_BHX.ndim != 3 or k_pool.ndim != 4 or v_pool.ndim != 4 or anchor_pool.ndim != 4:
        raise ValueError(f"q must be [B, H, X] and pools [N, page, heads, X], got {q_BHX.ndim} and {k_pool.ndim} axes")
    b, h, x = q_BHX.shape
    (n, page, p, _), j, rows = k_pool.shape, v_pool.shape[2], anchor_pool.shape[1]
    shapes = {
        "k": (k_pool, (n, texts.page, p, x)),
        "v": (v_pool, (n, texts.page, j, x)),
        "anchor": (anchor_pool, (n, rows, p, x)),
        "fall": (fall_BPX, (b, p, x)),
        "lengths": (texts.lengths_B, (b,)),
    }
    if shifts:
        shapes["powers of two of k"] = shifts[0], (n, shifts[0].shape[1], p, x)
        shapes["powers of two of v"] = shifts[1], (n, page, j)
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if len(texts.tables_BP) != b:
        raise ValueError(f"q has {b} rows, but there are {len(texts.tables_BP)} page tables")
    if h % p or p % j or page % rows:
        raise ValueError(
            f"{j} KV heads must divide {p} gate heads, and these {h} query heads; {rows} anchors must divide a page of {page}"
        )
    return x, page // rows


@compile_time_constant
def choose_backend(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, page: int = PAGE, chunk: int = MAX_CHUNK,
    fp8: bool = False,
) -> BackendChoice:  # fmt: skip
    """Return the backend of `paged_wall`, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher, bfloat16, heads of 16, 32, 64, 128 or 256, pages of a
    power of two, and at least 16 tokens per anchor. The kernels must pass a self-test with 32 tokens per anchor, which
    the first call runs.

    Args:
        device: Device of the tensors.
        dtype: Dtype of queries and pools.
        head_dim: Head size.
        page: Tokens of a page.
        chunk: Tokens per anchor.
        fp8: True for an 8-bit cache, which needs compute capability 8.9.
    """
    if page < MIN_PAGE_TOKENS or page & (page - 1):
        return BackendChoice(
            "torch", f"the kernels need a page size that is a power of two of at least {MIN_PAGE_TOKENS}, got {page}"
        )
    if dtype == torch.float16:
        return BackendChoice("torch", "the scaled queries of the kernels exceed the range of float16")
    if chunk < MIN_KERNEL_CHUNK:
        return BackendChoice(
            "torch",
            f"the kernels need {MIN_KERNEL_CHUNK} tokens per sum of gates, here {chunk}: gates fall too steeply or have no limit",
        )
    device = torch.device(device)
    if not fp8:
        return attention_choice("wall step", device, dtype, head_dim, _error)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return BackendChoice("torch", "the kernels convert 8-bit floats from compute capability 8.9 on")
    return attention_choice("wall step, 8-bit cache", device, dtype, head_dim, _fp8_error)


def _fp8_error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the error of `_error` with an 8-bit cache, whose numbers both backends read."""
    return _error(device, dtype, head_dim, backend, seed=seed, fp8=True)


def _error(
    device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int, fp8: bool = False
) -> float:
    """Return the largest relative error of a step with gates per query head and per KV head, against "torch" in float32.

    Two texts of 241 and 70 tokens in pages of 64, with 32 tokens per anchor and a window of 130; natural log gates lie
    between -0.86 and 0.
    """
    draw = torch.Generator().manual_seed(seed)
    tables = torch.tensor([[7, 2, 5, 1], [3, 8, 6, 4]], dtype=torch.int32)
    lengths = torch.tensor([241, 70], dtype=torch.int32)
    texts = Texts(tables.to(device), lengths.to(device), 64)

    def pool(rows: Tensor, per_page: int) -> Tensor:
        """Return a pool [9, per_page, ...] with the rows [2, 4 per_page, ...] of both texts in their pages."""
        pages = torch.zeros(9, per_page, *rows.shape[2:], dtype=rows.dtype)
        pages[tables.long()] = rows.unflatten(1, (4, per_page))
        return pages

    results: list[list[Tensor]] = [[], []]
    for gate_heads in (4, 2):
        q, k, v = (torch.randn(2, *shape, head_dim, generator=draw) for shape in ((4,), (256, 2), (256, 2)))
        fall = -0.86 * torch.rand(2, 256, gate_heads, head_dim, generator=draw, dtype=torch.float64).cumsum(1)
        k, anchor = absorb_decay(k, fall, fall[:, ::32].repeat_interleave(32, 1)), fall[:, ::32]
        newest = fall[torch.arange(2), lengths.long() - 1]
        narrow = [part.to(device, dtype) for part in (q, pool(k, 64), pool(v, 64))]
        wide = [part.to(device) for part in (pool(anchor, 2), newest)]
        shifts: list[Tensor] = []
        if fp8:
            k_shift = key_shifts(fall, anchor.repeat_interleave(32, 1))[:, ::4]
            packed = quantize(k, k_shift.repeat_interleave(4, 1)), quantize(v, value_shifts(v)[..., None])
            narrow[1:] = [pool(part, 64).to(device) for part in packed]
            shifts = [pool(k_shift, 16).to(device), pool(value_shifts(v), 64).to(device)]
        for result, name, kind in zip(results, (backend, "torch"), (dtype, torch.float32), strict=True):
            q_, k_, v_ = (part if part.dtype == torch.uint8 else part.to(kind) for part in narrow)
            result.append(paged_wall(q_, k_, v_, wide[0], wide[1], texts, shifts=shifts, window=130, backend=name))
    return max_relative_error(*results)


# --- as torch ops ---------------------------------------------------------------------------------------------------


def _empty_result(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@torch_op("wall_attend", _empty_result)
def attend(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, anchor_pool: Tensor, fall_BPX: Tensor, shifts: list[Tensor],
    tables_BP: Tensor, lengths_B: Tensor, scale: float, window: int,
) -> Tensor:  # fmt: skip
    """Return y [B, H, X] in q's dtype by the Triton kernels; no gradients.

    Args:
        q_BHX: Queries of the new tokens.
        k_pool: Keys with their decay, [N, page, P, X].
        v_pool: Values [N, page, J, X].
        anchor_pool: Sums R of the natural log gates, float64 [N, page / C, P, X].
        fall_BPX: Sums of the natural log gates up to the new tokens, float64.
        shifts: Powers of two of the keys and of the values of an 8-bit cache (`paged_wall`), or empty.
        tables_BP: int32 page tables.
        lengths_B: int32 lengths of the texts in tokens, the new one included.
        scale: Factor of the products in natural units.
        window: Attention window in keys, 0 for none.
    """
    if shifts:
        k_pool, v_pool = k_pool.view(E4M3), v_pool.view(E4M3)
    return load_kernels(__package__).attend(
        q_BHX, k_pool, v_pool, anchor_pool, fall_BPX, shifts, tables_BP, lengths_B, scale=scale, window=window
    )
