"""Attention of one new token a text over keys in pages: softmax and polar (docs/decoding.md).

B texts, N pages, H query heads, J KV heads, X head size, S keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.polar.op import TINY, null_schedule
from ..custom_ops import load_kernels, torch_op
from ..dispatch import BackendChoice, attention_choice, compile_time_constant, worst
from ..norms import statistics_dtype
from .page_tables import PAGE, Texts, check_step
from .single_query import row_attention, row_scores, row_sums, row_weights

MIN_PAGE_TOKENS = 16
"""Tokens of the smallest page that the kernels take: a block of keys lies in one page."""


def paged_softmax(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, texts: Texts, *, scale: float | None = None,
    window: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """What `softmax_attention` gives at the last token of each text, [B, H, X] of q's type; a text of no token gives 0.

    q [B, H, X] of the new tokens, whose keys and values lie in the pools [N, page, J, X] already. `backend` None is what
    `choose_backend` says. Raises ValueError when shapes disagree.
    """
    _, _, _, x = check_step(q_BHX, k_pool, v_pool, texts)
    if (backend or choose_backend(q_BHX.device, q_BHX.dtype, x, texts.page).backend) == "triton":
        scale = x**-0.5 if scale is None else scale
        return attend(q_BHX, k_pool, v_pool, texts.tables_BP, texts.lengths_B, [], scale, window or 0, 0.0)[0]
    scores_BHS = row_scores(q_BHX, texts.gather(k_pool), scale)
    return row_attention(scores_BHS, texts.gather(v_pool), texts.seen(window)).to(q_BHX.dtype)


def paged_polar(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, null_base_H: Tensor, null_slope_H: Tensor, len_gain_H: Tensor,
    mag_beta_H: Tensor, v_null_HX: Tensor, texts: Texts, *, window: int | None = None, n_eff_floor: float = 1e-30,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `polar_attention` gives at the last token of each text: c [B, H, X] in q's type, magnitude [B, H] in float32 (float64 for float64).

    q [B, H, X] of the new tokens, whose keys and values lie in the pools [N, page, J, X] already; parameters and `backend` as there. A text of
    no token has c = v_null of unit length and magnitude 0. Raises ValueError when shapes disagree.
    """
    _, _, _, x = check_step(q_BHX, k_pool, v_pool, texts)
    dtype = statistics_dtype(q_BHX.dtype)
    if (backend or choose_backend(q_BHX.device, q_BHX.dtype, x, texts.page).backend) == "triton":
        null_params = [part.to(dtype) for part in (null_base_H, null_slope_H, len_gain_H, mag_beta_H, v_null_HX)]
        return attend(
            q_BHX, k_pool, v_pool, texts.tables_BP, texts.lengths_B, null_params, x**-0.5, window or 0, n_eff_floor
        )
    n_B1 = texts.counts(window).to(dtype).clamp(min=1)[:, None]
    temp_BH, null_BH = null_schedule(n_B1, null_base_H, null_slope_H, len_gain_H)
    null_BH = temp_BH * null_BH
    seen_BS = texts.seen(window)
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
    """Keys and values of the new tokens into their pages of the pools [N, page, J, X]. `backend` as for attention."""
    if (backend or choose_backend(k_BJX.device, k_BJX.dtype, k_BJX.shape[2], texts.page).backend) == "triton":
        put(k_BJX, v_BJX, k_pool, v_pool, texts.tables_BP, texts.lengths_B)
        return
    texts.write(k_pool, k_BJX)
    texts.write(v_pool, v_BJX)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int, page: int = PAGE) -> BackendChoice:
    """What `paged_softmax` and `paged_polar` take for such tensors."""
    if page < MIN_PAGE_TOKENS or page & (page - 1):
        return BackendChoice(
            "torch", f"the kernels need a page that is a power of two from {MIN_PAGE_TOKENS}, got {page}"
        )
    return attention_choice("paged attention", torch.device(device), dtype, head_dim, _error)


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Largest relative error of both ops, against "torch" in float32."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v, v_null = (
        torch.randn(shape, generator=draw).to(device, dtype)
        for shape in ((2, 4, head_dim), (9, 64, 2, head_dim), (9, 64, 2, head_dim), (4, head_dim))
    )
    raw = [torch.randn(4, generator=draw).to(device) for _ in range(4)]
    tables = torch.tensor([[7, 2, 5, 1], [3, 8, 0, 0]], dtype=torch.int32, device=device)
    texts = Texts(tables, torch.tensor([241, 70], dtype=torch.int32, device=device), 64)
    results = []
    for name, kind in ((backend, dtype), ("torch", torch.float32)):
        args = (q.to(kind), k.to(kind, copy=True), v.to(kind, copy=True))
        write_pages(args[0][:, :2], args[0][:, 2:], *args[1:], texts, backend=name)
        y = paged_softmax(*args, texts, window=130, backend=name)
        results.append([y, *paged_polar(*args, raw[0], raw[1], raw[2], raw[3], v_null, texts, backend=name)])
    return worst(*results)


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
    """(y [B, H, X], magnitude [B, H] float32, empty without `null`); `window` 0 is none."""
    return load_kernels(__package__).attend(
        q_BHX, k_pool, v_pool, tables_BP, lengths_B, null, scale=scale, window=window, floor=floor
    )


@torch_op("paged_put", lambda *_: None, ("k_pool", "v_pool"))
def put(k_BJX: Tensor, v_BJX: Tensor, k_pool: Tensor, v_pool: Tensor, tables_BP: Tensor, lengths_B: Tensor) -> None:
    """Keys and values of the new tokens into their pages."""
    load_kernels(__package__).put(k_BJX, v_BJX, k_pool, v_pool, tables_BP, lengths_B)
