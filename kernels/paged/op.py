"""Attention of one new token per text over keys in pages: softmax and polar (docs/explanation/decoding.md).

B texts, N pages of a pool, H query heads, J KV heads, X head size, S keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.polar.op import TINY, null_schedule
from ..custom_ops import load_kernels, torch_op
from ..dispatch import BackendChoice, attention_choice, checked_backend, compile_time_constant, max_relative_error
from ..norms import statistics_dtype
from .page_tables import PAGE, Texts, check_step
from .single_query import row_attention, row_scores, row_sums, row_weights

MIN_PAGE_TOKENS = 16
"""Tokens of the smallest page that the kernels take: a block of keys lies in one page."""


def paged_softmax(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, texts: Texts, *, scale: float | None = None,
    window: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return `softmax_attention` at the last token of each text, [B, H, X] of q's dtype; an empty text gives 0.

    Query head h uses KV head h // (H / J). Softmax and sums are float32 (float64 for float64 in torch). No gradients.

    Args:
        q_BHX: Queries of the new tokens.
        k_pool: Keys [N, page, J, X]; those of the new tokens are already written (`write_pages`).
        v_pool: Values, like `k_pool`.
        texts: Page tables and lengths of the texts, the new tokens counted.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all.
        backend: "triton" or "torch", which copies every text's pages; None: `choose_backend`.

    Raises:
        ValueError: Shapes disagree.
    """
    _, _, _, x = check_step(q_BHX, k_pool, v_pool, texts)
    if (
        checked_backend(backend, "triton") or choose_backend(q_BHX.device, q_BHX.dtype, x, texts.page).backend
    ) == "triton":
        scale = x**-0.5 if scale is None else scale
        return attend(q_BHX, k_pool, v_pool, texts.tables_BP, texts.lengths_B, [], scale, window or 0, 0.0)[0]
    scores_BHS = row_scores(q_BHX, texts.gather(k_pool), scale)
    return row_attention(scores_BHS, texts.gather(v_pool), texts.visible_keys(window)).to(q_BHX.dtype)


def paged_polar(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, null_base_H: Tensor, null_slope_H: Tensor, len_gain_H: Tensor,
    mag_beta_H: Tensor, v_null_HX: Tensor, texts: Texts, *, window: int | None = None, n_eff_floor: float = 1e-30,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `polar_attention` at the last token of each text: direction and magnitude.

    The direction is s / |s| (s / 1e-6 for a shorter s), with s the softmax mean of the values, null included. The
    magnitude is tanh(softplus(mag_beta) ln(1 + n_eff r)), from 0 to 1, where r is the weight of all real keys together
    and n_eff is (sum of weights)^2 / (sum of squared weights) over them. An empty text has the direction v_null, scaled
    to unit length (0 for a v_null of 0), and magnitude 0. No gradients.

    Args:
        q_BHX: Queries of the new tokens.
        k_pool: Keys [N, page, J, X]; those of the new tokens are already written (`write_pages`).
        v_pool: Values, like `k_pool`.
        null_base_H: Offset of the null key's score, used as it is.
        null_slope_H: Raw growth of the null key's score; softplus is applied here, as to the following two.
        len_gain_H: Raw gain of the temperature with the number of keys.
        mag_beta_H: Raw gain of the magnitude.
        v_null_HX: Value of the null key.
        texts: Page tables and lengths of the texts, the new tokens counted.
        window: Number of keys that a query sees, its own included; None for all.
        n_eff_floor: Lower bound of the sum of squared weights, in units of the largest weight, null included.
        backend: "triton" or "torch", which copies every text's pages; None: `choose_backend`.

    Returns:
        (direction [B, H, X] in q's dtype, magnitude [B, H] in float32, float64 for float64).

    Raises:
        ValueError: Shapes disagree.
    """
    _, _, _, x = check_step(q_BHX, k_pool, v_pool, texts)
    dtype = statistics_dtype(q_BHX.dtype)
    if (
        checked_backend(backend, "triton") or choose_backend(q_BHX.device, q_BHX.dtype, x, texts.page).backend
    ) == "triton":
        null_params = [part.to(dtype) for part in (null_base_H, null_slope_H, len_gain_H, mag_beta_H, v_null_HX)]
        return attend(
            q_BHX, k_pool, v_pool, texts.tables_BP, texts.lengths_B, null_params, x**-0.5, window or 0, n_eff_floor
        )
    n_B1 = texts.visible_counts(window).to(dtype).clamp(min=1)[:, None]
    temp_BH, null_BH = null_schedule(n_B1, null_base_H, null_slope_H, len_gain_H)
    null_BH = temp_BH * null_BH
    seen_BS = texts.visible_keys(window)
    scores_BHS = row_scores(q_BHX, texts.gather(k_pool)) * temp_BH[..., None]
    weight_BHS = row_weights(scores_BHS, seen_BS)
    top_BH = scores_BHS.masked_fill(~seen_BS[:, None], -torch.inf).amax(-1)
    # The largest weight is exp(largest score - lse).
    lse_BH = top_BH - weight_BHS.amax(-1).log()
    lse_BH = torch.where(seen_BS.any(-1)[:, None], lse_BH, -torch.inf)
    n_eff_BH = weight_BHS.square().sum(-1)
    n_eff_BH = torch.where(n_eff_BH > 0, 1 / torch.where(n_eff_BH > 0, n_eff_BH, 1.0), 0.0)
    n_eff_BH = torch.minimum(n_eff_BH, (2 * (lse_BH - null_BH)).exp() / n_eff_floor)
    real_BH, none_BH = torch.sigmoid(lse_BH - null_BH), torch.sigmoid(null_BH - lse_BH)
    s_BHX = row_sums(weight_BHS, texts.gather(v_pool), seen_BS) * real_BH[..., None]
    s_BHX = s_BHX + none_BH[..., None] * v_null_HX.to(dtype)
    c_BHX = s_BHX / torch.linalg.vector_norm(s_BHX, dim=-1, keepdim=True).clamp(min=TINY)
    beta_H = functional.softplus(mag_beta_H.to(dtype))
    return c_BHX.to(q_BHX.dtype), torch.tanh(beta_H * torch.log1p(n_eff_BH * real_BH))


def write_pages(
    k_BJX: Tensor, v_BJX: Tensor, k_pool: Tensor, v_pool: Tensor, texts: Texts, *, backend: str | None = None
) -> None:
    """Write keys and values [B, J, X] of the new tokens into their pages of the pools, in place.

    A text's new token is its last, at position length - 1. "triton" skips padding rows of length 0; torch writes them
    to the first row of their table's first page, which must be `DUMMY`.

    Args:
        k_BJX: Keys.
        v_BJX: Values.
        k_pool: Keys [N, page, J, X], changed in place.
        v_pool: Values, like `k_pool`, changed in place.
        texts: Page tables and lengths of the texts, the new tokens counted.
        backend: "triton" or "torch"; None: `choose_backend`.
    """
    if (
        checked_backend(backend, "triton")
        or choose_backend(k_BJX.device, k_BJX.dtype, k_BJX.shape[2], texts.page).backend
    ) == "triton":
        put(k_BJX, v_BJX, k_pool, v_pool, texts.tables_BP, texts.lengths_B)
        return
    texts.write(k_pool, k_BJX)
    texts.write(v_pool, v_BJX)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int, page: int = PAGE) -> BackendChoice:
    """Return the backend of paged attention, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher, 16 bits and heads of 16, 32, 64, 128 or 256. The kernels
    must pass a self-test with pages of 64 tokens, which the first call runs.

    Args:
        device: Device of the tensors.
        dtype: Dtype of queries and pools.
        head_dim: Head size.
        page: Tokens of a page; the kernels need a power of two from 16.
    """
    if page < MIN_PAGE_TOKENS or page & (page - 1):
        return BackendChoice(
            "torch", f"the kernels need a page size that is a power of two of at least {MIN_PAGE_TOKENS}, got {page}"
        )
    return attention_choice("paged attention", torch.device(device), dtype, head_dim, _error)


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of both ops after a write of the new tokens, against "torch" in float32.

    Two texts of 241 and 70 tokens; softmax attention has a window of 130, polar attention none.
    """
    draw = torch.Generator().manual_seed(seed)
    q, k, v, v_null = (
        torch.randn(shape, generator=draw).to(device, dtype)
        for shape in ((2, 4, head_dim), (9, 64, 2, head_dim), (9, 64, 2, head_dim), (4, head_dim))
    )
    null_params = [torch.randn(4, generator=draw).to(device) for _ in range(4)]
    tables = torch.tensor([[7, 2, 5, 1], [3, 8, 0, 0]], dtype=torch.int32, device=device)
    texts = Texts(tables, torch.tensor([241, 70], dtype=torch.int32, device=device), 64)
    results = []
    for name, kind in ((backend, dtype), ("torch", torch.float32)):
        args = (q.to(kind), k.to(kind, copy=True), v.to(kind, copy=True))
        write_pages(args[0][:, :2], args[0][:, 2:], *args[1:], texts, backend=name)
        y = paged_softmax(*args, texts, window=130, backend=name)
        results.append(
            [
                y,
                *paged_polar(
                    *args, null_params[0], null_params[1], null_params[2], null_params[3], v_null, texts, backend=name
                ),
            ]
        )
    return max_relative_error(*results)


# --- as torch ops ---------------------------------------------------------------------------------------------------


def _empty_results(q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, lengths: Tensor, null: list[Tensor],
                   *_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, h = q.shape[:2]
    return q.new_empty(q.shape), q.new_empty(b, h if null else 0, dtype=torch.float32)


@torch_op("paged_attend", _empty_results)
def attend(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor, null: list[Tensor],
    scale: float, window: int, floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (y [B, H, X] in q's dtype, magnitude float32 [B, H], or [B, 0] without `null`) by the Triton kernels.

    No gradients.

    Args:
        q_BHX: Queries of the new tokens.
        k_pool: Keys [N, page, J, X].
        v_pool: Values, like `k_pool`.
        tables_BP: int32 page tables.
        lengths_B: int32 lengths of the texts in tokens, the new one included.
        null: Empty for softmax attention; for polar attention float32 raw base, slope, gain, beta [H] and v_null [H,
            X].
        scale: Factor of q·k in natural units; polar attention multiplies it by its temperature.
        window: Attention window in keys, 0 for none.
        floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1; for
            polar attention.
    """
    return load_kernels(__package__).attend(
        q_BHX, k_pool, v_pool, tables_BP, lengths_B, null, scale=scale, window=window, floor=floor
    )


@torch_op("paged_put", lambda *_: None, ("k_pool", "v_pool"))
def put(k_BJX: Tensor, v_BJX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor) -> None:
    """Write keys and values [B, J, X] of the new tokens into their pages by the Triton kernel, in place."""
    load_kernels(__package__).put(k_BJX, v_BJX, k_pool, v_pool, tables_BP, lengths_B)
