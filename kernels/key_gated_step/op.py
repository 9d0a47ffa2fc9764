"""Wall attention of one new token per text, over plain cached keys from which its gates are projected.

See docs/explanation/decoding.md, "Wall attention". A token's log gates g are a function of its key, so the cache holds
keys and values alone. A step projects them again and adds them up from the newest token backwards: the decay of key j
is exp(sum of g over the tokens after j).

B texts, N pages of a pool, H query heads, J KV heads, P gate heads (H or J), X head size, S keys.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.scored import running_sum
from ..attention.wall.op import soft_clamp
from ..custom_ops import load_kernels, torch_op
from ..dispatch import BackendChoice, attention_choice, checked_backend, compile_time_constant, max_relative_error
from ..norms import statistics_dtype
from ..paged.op import MIN_PAGE_TOKENS
from ..paged.page_tables import PAGE, Texts, check_step
from ..paged.single_query import row_attention
from ..rotary import Kind, frequencies, rotate
from ..shapes import check_groups, expand_kv

MAX_KERNEL_HEAD = 128
"""Largest head size of the kernels: a program holds a matrix of gates of this width."""


class KeyGates(NamedTuple):
    """Projection of keys to log gates, and rotation of the keys that are scored."""

    weight_PNX: Tensor
    """Projection of a KV head's key to N gates of each of its gate heads."""
    offset_PN: Tensor
    """Bias of the gates' logits; inf for a channel that never decays."""
    g_max: float | None
    """Limit of the soft clamp, in nats; None: no clamp."""
    rotary: Kind | Literal["none"] = "none"
    """Rotation of queries and keys; gates read keys that are not rotated."""
    base: float = 10000.0
    """Base of the rotary frequencies."""


def key_log_gates(k_BSJX: Tensor, gates: KeyGates) -> Tensor:
    """Return natural log gates [B, S, P, N] <= 0 of keys that are not rotated, float32 (float64 for float64).

    Those of a head are soft_clamp(logsigmoid(W k + b)) with the key of its KV head. The product W k has k's dtype.
    """
    dtype, (p, n, x) = statistics_dtype(k_BSJX.dtype), gates.weight_PNX.shape
    weight_JEX = gates.weight_PNX.to(k_BSJX.dtype).reshape(k_BSJX.shape[2], -1, x)
    logit = torch.einsum("bsjx,jex->bsje", k_BSJX, weight_JEX).flatten(2).unflatten(2, (p, n))
    log_gate = functional.logsigmoid(logit.to(dtype) + gates.offset_PN.to(dtype))
    return log_gate if gates.g_max is None else soft_clamp(log_gate, gates.g_max)


def paged_wall_from_keys(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, gates: KeyGates, texts: Texts, *,
    scale: float | None = None, window: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return `wall_attention` at the last token of each text, [B, H, X] of q's dtype; an empty text gives 0.

    Query head h uses gate head h // (H / P) and KV head h // (H / J). Softmax and sums are float32 (float64 for float64
    in torch). No gradients.

    Args:
        q_BHX: Queries of the new tokens, rotated if keys are to be.
        k_pool: Keys [N, page, J, X], not rotated; those of the new tokens are already written.
        v_pool: Values, like `k_pool`.
        gates: Projection of keys to gates, one per channel: N = X.
        texts: Page tables and lengths of the texts, the new tokens counted.
        scale: Factor of the products; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all.
        backend: "triton" or "torch", which copies every text's pages; None: `choose_backend`.

    Raises:
        ValueError: Shapes disagree.
    """
    _, h, j, x = check_step(q_BHX, k_pool, v_pool, texts)
    p = len(gates.weight_PNX)
    if gates.weight_PNX.shape != (p, x, x) or gates.offset_PN.shape != (p, x):
        shapes = tuple(gates.weight_PNX.shape), tuple(gates.offset_PN.shape)
        raise ValueError(f"gates have shapes {shapes[0]} and {shapes[1]}, expected {(p, x, x)} and {(p, x)}")
    check_groups(h, p)
    check_groups(p, j)
    scale = x**-0.5 if scale is None else scale
    choice = checked_backend(backend, "triton")
    if (choice or choose_backend(q_BHX.device, q_BHX.dtype, x, texts.page).backend) == "triton":
        kind = gates.rotary
        turns = [] if kind == "none" else [frequencies(kind, x, gates.base, q_BHX.device).float()]
        weight, offset = gates.weight_PNX.to(q_BHX.dtype), gates.offset_PN.float()
        return attend(
            q_BHX, k_pool, v_pool, weight, offset, turns, texts.tables_BP, texts.lengths_B, gates.g_max or 0.0, scale, window or 0
        )  # fmt: skip
    seen_BS = texts.visible_keys(window)
    k_BSJX = texts.gather(k_pool).masked_fill(~seen_BS[..., None, None], 0.0)
    fall_BSPX = running_sum(key_log_gates(k_BSJX, gates).masked_fill(~seen_BS[..., None, None], 0.0))
    decay_BSPX = torch.exp(fall_BSPX[:, -1:] - fall_BSPX)
    at_BS = torch.arange(k_BSJX.shape[1], device=k_BSJX.device).expand(seen_BS.shape)
    k_BSJX = rotate(k_BSJX, gates.rotary, gates.base, at_BS)
    dtype = statistics_dtype(q_BHX.dtype)
    decayed_BSPX = expand_kv(k_BSJX.to(dtype), p) * decay_BSPX.to(dtype)
    logits_BPGS = torch.einsum("bpgx,bspx->bpgs", q_BHX.to(dtype).unflatten(1, (p, -1)), decayed_BSPX)
    return row_attention(logits_BPGS.flatten(1, 2) * scale, texts.gather(v_pool), seen_BS).to(q_BHX.dtype)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int, page: int = PAGE) -> BackendChoice:
    """Return the backend of `paged_wall_from_keys`, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher, 16 bits, heads of 16, 32, 64 or 128 and pages of a power
    of two. The kernels must pass a self-test, which the first call runs.

    Args:
        device: Device of the tensors.
        dtype: Dtype of queries and pools.
        head_dim: Head size.
        page: Tokens of a page.
    """
    if page < MIN_PAGE_TOKENS or page & (page - 1):
        return BackendChoice(
            "torch", f"the kernels need a page size that is a power of two of at least {MIN_PAGE_TOKENS}, got {page}"
        )
    if head_dim > MAX_KERNEL_HEAD:
        return BackendChoice("torch", f"the kernels need heads of at most {MAX_KERNEL_HEAD} channels, got {head_dim}")
    return attention_choice("key-gated step", torch.device(device), dtype, head_dim, _error)


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of a step, against "torch" in float32.

    Two texts of 241 and 70 tokens in pages of 64, with a window of 130: gates per query head without a limit, and gates
    per KV head with one and rotated keys. Products of keys and gates' matrices are exact in every dtype.
    """
    draw = torch.Generator().manual_seed(seed)
    tables = torch.tensor([[7, 2, 5, 1], [3, 8, 0, 0]], dtype=torch.int32)
    texts = Texts(tables.to(device), torch.tensor([241, 70], dtype=torch.int32, device=device), 64)
    results: list[list[Tensor]] = [[], []]
    cases: list[tuple[int, float | None, Kind | Literal["none"]]] = [(4, None, "none"), (2, 0.86, "full")]
    for gate_heads, g_max, rotary in cases:
        q, v = (torch.randn(*shape, head_dim, generator=draw) for shape in ((2, 4), (9, 64, 2)))
        k = torch.randint(-4, 5, (9, 64, 2, head_dim), generator=draw) / 4
        weight = torch.randint(-2, 3, (gate_heads, head_dim, head_dim), generator=draw) / 16
        weight = weight * (torch.rand(weight.shape, generator=draw) < 16 / head_dim)
        offset = torch.full((gate_heads, head_dim), 3.0, device=device)
        narrow = [part.to(device, dtype) for part in (q, k, v, weight)]
        for result, name, kind in zip(results, (backend, "torch"), (dtype, torch.float32), strict=True):
            q_, k_, v_, weight_ = (part.to(kind) for part in narrow)
            gates = KeyGates(weight_, offset, g_max, rotary)
            result.append(paged_wall_from_keys(q_, k_, v_, gates, texts, window=130, backend=name))
    return max_relative_error(*results)


# --- as torch ops ---------------------------------------------------------------------------------------------------


def _empty_result(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@torch_op("key_gated_attend", _empty_result)
def attend(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, weight_PXX: Tensor, offset_PX: Tensor, frequency_F: list[Tensor],
    tables_BP: Tensor, lengths_B: Tensor, g_max: float, scale: float, window: int,
) -> Tensor:  # fmt: skip
    """Return y [B, H, X] in q's dtype by the Triton kernels; no gradients.

    Args:
        q_BHX: Queries of the new tokens.
        k_pool: Keys [N, page, J, X], not rotated.
        v_pool: Values, like `k_pool`.
        weight_PXX: Projection of keys to the gates' logits, in the keys' dtype.
        offset_PX: Bias of the gates' logits, float32.
        frequency_F: Angle of each rotated pair per position, float32 [X / 2], in a list; empty: no rotation.
        tables_BP: int32 page tables.
        lengths_B: int32 lengths of the texts in tokens, the new one included.
        g_max: Limit of the soft clamp, in nats; 0 for none.
        scale: Factor of the products in natural units.
        window: Attention window in keys, 0 for none.
    """
    return load_kernels(__package__).attend(
        q_BHX, k_pool, v_pool, weight_PXX, offset_PX, frequency_F, tables_BP, lengths_B, g_max=g_max, scale=scale, window=window
    )  # fmt: skip
