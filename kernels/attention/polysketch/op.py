"""PolySketch attention (docs/reference/mechanisms.md, "PolySketch attention"), in time linear in the text's length.

"torch" goes block by block; "triton" computes all blocks at once.

B batch, T length, H query heads, J KV heads, G = H / J, X head size, r columns of a half sketch, F = r² columns of a
feature, M queries, S keys.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...custom_ops import differentiate, empty_like, keep_inputs, load_kernels, rows_like, torch_op
from ...dispatch import (
    BackendChoice,
    checked_backend,
    compile_time_constant,
    max_relative_error,
    result_and_gradients,
    self_test_failure,
    triton_or_torch,
    why_no_triton,
)
from ...features import half_sketch, sketch_draws, square
from ...norms import statistics_dtype
from ...shapes import QUERY_BLOCK, check_qkv, check_window, visible_mask
from ..scored import QueryBlock, dot_scores, query_block_at

MAX_DEGREE, MAX_SKETCH, MIN_BLOCK = 8, 64, 64
"""Limits of the kernels: degree, columns of a half sketch, and tokens of a block, below which sums take much memory."""


@torch_op("polysketch_forward", lambda q, *_: (q.new_empty(q.shape), rows_like(q)))
def polysketch_forward(
    q: Tensor, k: Tensor, v: Tensor, draws: Tensor, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (o [B, T, H, X], 1 / (1 + the sum of weights), float32 [B, H, T]) by Triton, without a window.

    Only o has a gradient, by q, k and v. Inputs need not be contiguous; `draws` is float32 [K, J, X, r].
    """
    args = (x.contiguous() for x in (q, k, v, draws))
    results: tuple[Tensor, Tensor] = load_kernels(__package__).forward(*args, block=block, scale=scale)
    return results


@torch_op("polysketch_backward", lambda g_o, *tensors: empty_like(*tensors[:3]))
def polysketch_backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, draws: Tensor, o: Tensor, inverse: Tensor, block: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from that of o; the other arguments are those and the results of the forward."""
    args = (x.contiguous() for x in (g_o, q, k, v, draws, o, inverse))
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = load_kernels(__package__).backward(*args, block=block, scale=scale)
    return gradients


differentiate(polysketch_forward, polysketch_backward, keep_inputs(4))


def polysketch_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, draws_KJXR: Tensor, *, block: int, scale: float | None = None,
    window: int | None = None, query_block: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of w_ij v_j over 1 + the sum of w_ij, over the keys j that query i sees: [B, T, H, X].

    Tokens are divided into blocks from the row's start. With p = 2 K, w_ij is (scale q_i·k_j)^p within a block, and
    (m(q_i)·m(k_j))² for a key of an earlier block; m of `features.half_sketch` estimates powers of p / 2. Causal and
    differentiable; of q's dtype. Without a window earlier blocks are read as one sum of features; with one, every pair
    in it is scored.

    Args:
        q_BTHX: Queries; head h uses KV head h // (H / J).
        k_BTJX: Keys, of q's dtype.
        v_BTJX: Values, of q's dtype.
        draws_KJXR: Directions of the sketch, one set per KV head; K is half the degree p.
        block: Tokens of a block.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries that "torch" processes at a time, for memory only; None: a block, with a window 1024.
        backend: "triton" (no window shorter than T, fixed `draws`) or "torch"; None: `choose_backend`, and "torch" with
            such a window.

    Raises:
        ValueError: Shapes or dtypes disagree, the window or the block is below 1, or "triton" does not support a call.
    """
    _, t, _, j, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    _check_sketch(draws_KJXR, j, d, block)
    scale = d**-0.5 if scale is None else scale
    pairs = window is not None and window < t
    unsupported = "a window" if pairs else "learned draws" if draws_KJXR.requires_grad else None
    if checked_backend(backend, "triton") == "triton" and unsupported:
        raise ValueError(f"backend triton does not support {unsupported}; use backend torch")
    if backend is None and not unsupported:
        degree, _, _, sketch = draws_KJXR.shape
        backend = choose_backend(q_BTHX.device, q_BTHX.dtype, d, 2 * degree, sketch, block).backend
    if backend == "triton":
        return polysketch_forward(q_BTHX, k_BTJX, v_BTJX, draws_KJXR.float(), block, scale)[0]
    halves = half_sketches(q_BTHX, draws_KJXR, scale), half_sketches(k_BTJX, draws_KJXR, scale)
    degree = 2 * len(draws_KJXR)
    values = with_ones(v_BTJX)
    if pairs:
        assert window is not None
        return _by_pairs(
            q_BTHX, k_BTJX, values, halves, degree, block, scale, window, query_block or QUERY_BLOCK
        ).to(v_BTJX.dtype)  # fmt: skip
    sums, rows = None, []
    for start in range(0, t, block):
        stop = min(start + block, t)
        for first in range(start, stop, query_block or block):
            last = min(first + (query_block or block), stop)
            span = QueryBlock(first, last, start, visible_mask(first, last, start, None, q_BTHX.device))
            scores_BHMS = dot_scores(q_BTHX, k_BTJX, span, scale).masked_fill(~span.visible_MS, 0)
            weight_BHMS = scores_BHMS**degree
            total_BMHY = weigh(weight_BHMS, values[:, span.keys])
            if sums is not None:
                total_BMHY = total_BMHY + read_sums(halves[0][:, span.queries], sums, q_BTHX.dtype)
            rows.append(divided(total_BMHY))
        if stop < t:
            for first in range(start, stop, query_block or block):
                piece = slice(first, min(first + (query_block or block), stop))
                added = feature_sums(halves[1][:, piece], values[:, piece], q_BTHX.dtype)
                sums = added if sums is None else sums + added
    return torch.cat(rows, 1).to(v_BTJX.dtype)


@compile_time_constant
def choose_backend(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, degree: int, sketch: int, block: int
) -> BackendChoice:
    """Return the backend of `polysketch_attention` without a window, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher, 16 bits, heads of 16, 32, 64, 128 or 256, and a degree, a
    sketch and a block within the kernels' limits. The kernels must pass a self-test, which the first call for a case
    runs.
    """
    device = torch.device(device)
    why = why_no_triton(device, dtype)
    if why is None:
        why = next(
            (f"the kernels need {limit}, got {value}" for met, limit, value in (
                (head_dim in (16, 32, 64, 128, 256), "a head_dim that is a power of two from 16 to 256", head_dim),
                (degree <= MAX_DEGREE, f"a degree of at most {MAX_DEGREE}", degree),
                (sketch <= MAX_SKETCH, f"a sketch of at most {MAX_SKETCH} columns", sketch),
                (block >= MIN_BLOCK, f"blocks of at least {MIN_BLOCK} tokens", block),
            ) if not met),
            None,
        )  # fmt: skip
    return triton_or_torch(
        why or self_test_failure("PolySketch attention", _error, device, dtype, head_dim, degree, sketch, "triton")
    )


def _error(
    device: torch.device, dtype: torch.dtype, head_dim: int, degree: int, sketch: int, backend: str, *, seed: int
) -> float:
    """Return the largest relative error of the result and of its gradients, against "torch" in float32.

    One row of 331 tokens, two query heads and one KV head, in blocks of 100 tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(1, 331, heads, head_dim, generator=draw).to(device, dtype) for heads in (2, 1, 1)]
    draws = sketch_draws(1, head_dim, sketch, degree, draw).to(device)
    attention = functools.partial(polysketch_attention, draws_KJXR=draws, block=100)
    return max_relative_error(*result_and_gradients(attention, backend, dtype, qkv))


def _check_sketch(draws_KJXR: Tensor, heads: int, size: int, block: int) -> None:
    """Raise ValueError unless directions fit `heads` KV heads of `size` channels and the block has tokens."""
    if draws_KJXR.ndim != 4 or not len(draws_KJXR) or draws_KJXR.shape[1:3] != (heads, size):
        raise ValueError(f"draws have shape {tuple(draws_KJXR.shape)}, but k needs [degree / 2, {heads}, {size}, r]")
    if block < 1:
        raise ValueError(f"block must be at least 1 token, got {block}")


def half_sketches(x_BTPX: Tensor, draws_KJXR: Tensor, scale: float) -> Tensor:
    """Return m(sqrt(scale) x) of queries or keys, [B, T, P, r] in the statistics' dtype; P = H or J.

    Args:
        x_BTPX: Queries or keys.
        draws_KJXR: Directions per KV head; query heads use those of their KV head.
        scale: Factor of q·k; its sign does not matter, because the degree is even.
    """
    draws = draws_KJXR.repeat_interleave(x_BTPX.shape[2] // draws_KJXR.shape[1], 1)
    return half_sketch(x_BTPX.to(statistics_dtype(x_BTPX.dtype)) * abs(scale) ** 0.5, draws)


def with_ones(v_BTJX: Tensor) -> Tensor:
    """Return values with a last channel of ones, [B, T, J, X + 1], so that one product sums weights too."""
    return torch.cat([v_BTJX, torch.ones_like(v_BTJX[..., :1])], -1)


def divided(total_BMHY: Tensor) -> Tensor:
    """Return the weighted sums over 1 + the sum of the weights, the last channel: [B, M, H, X + 1] -> [B, M, H, X]."""
    return total_BMHY[..., :-1] / (1 + total_BMHY[..., -1:])


def weigh(weight_BHMS: Tensor, values_BSJY: Tensor) -> Tensor:
    """Return the sums of weights times values, [B, M, H, Y] in the weights' dtype; head h uses KV head h // (H / J)."""
    groups = weight_BHMS.unflatten(1, (values_BSJY.shape[2], -1))
    return torch.einsum("bjgms,bsjy->bmjgy", groups, values_BSJY.to(weight_BHMS.dtype)).flatten(2, 3)


def feature_sums(m_BSJR: Tensor, values_BSJY: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the keys of feature times value, [B, J, F, Y] in m's dtype, multiplied in `_factor_dtype`.

    Args:
        m_BSJR: Half sketches of the keys.
        values_BSJY: Values with a channel of ones.
        dtype: Type of the activations.
    """
    dtype = _factor_dtype(dtype)
    features = square(m_BSJR).to(dtype)
    return torch.einsum("bsjf,bsjy->bjfy", features, values_BSJY.to(dtype)).to(m_BSJR.dtype)


def read_sums(m_BMHR: Tensor, sums_BJFY: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of w v over the keys in `sums`, for queries: [B, M, H, Y] in m's dtype, multiplied in `_factor_dtype`.

    Args:
        m_BMHR: Half sketches of the queries.
        sums_BJFY: From `feature_sums`.
        dtype: Type of the activations.
    """
    dtype = _factor_dtype(dtype)
    features = square(m_BMHR).to(dtype).unflatten(2, (sums_BJFY.shape[1], -1))
    return torch.einsum("bmjgf,bjfy->bmjgy", features, sums_BJFY.to(dtype)).flatten(2, 3).to(m_BMHR.dtype)


def _factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which features are multiplied: `dtype`, but float32 for float16, beyond which sums grow."""
    return torch.float32 if dtype == torch.float16 else dtype


def pair_weights(exact_BHMS: Tensor, sketched_BHMS: Tensor, degree: int, in_block: Tensor, visible: Tensor) -> Tensor:
    """Return the weights of pairs: score^degree within a block, the square of the half sketches' product across.

    Args:
        exact_BHMS: Scores scale q·k.
        sketched_BHMS: Products m(q)·m(k).
        degree: Degree of the polynomial.
        in_block: True where query and key are in one block; broadcasts to [B, H, M, S].
        visible: True where the query sees the key; others weigh 0.
    """
    return torch.where(in_block, exact_BHMS**degree, sketched_BHMS.square()).masked_fill(~visible, 0)


def _by_pairs(
    q_BTHX: Tensor, k_BTJX: Tensor, values_BTJY: Tensor, halves: tuple[Tensor, Tensor], degree: int, block: int,
    scale: float, window: int, query_block: int,
) -> Tensor:  # fmt: skip
    """Return the attention with every visible pair scored, [B, T, H, X] in the statistics' dtype.

    Arguments as in `polysketch_attention`; `halves` are the half sketches of queries and keys. With gradients and
    several blocks of queries, scores are computed again in the backward pass.
    """

    def rows(span: QueryBlock) -> Tensor:
        """Return the output of one block of queries, [B, M, H, X]."""
        blocks_S = torch.arange(span.first, span.stop, device=q_BTHX.device) // block
        weight_BHMS = pair_weights(
            dot_scores(q_BTHX, k_BTJX, span, scale), dot_scores(*halves, span, 1.0), degree,
            blocks_S[span.start - span.first :, None] == blocks_S, span.visible_MS,
        )  # fmt: skip
        return divided(weigh(weight_BHMS, values_BTJY[:, span.keys]))

    t = q_BTHX.shape[1]
    spans = [
        query_block_at(start, min(start + query_block, t), window, q_BTHX.device) for start in range(0, t, query_block)
    ]
    if len(spans) == 1 or not torch.is_grad_enabled():
        return torch.cat([rows(span) for span in spans], 1)
    return torch.cat([checkpoint(rows, span, use_reentrant=False) for span in spans], 1)
