"""Wall attention: every channel of a score decays by its own gates between key and query.

See docs/reference/mechanisms.md, "Wall attention". B batch, T length, H query heads, J KV heads, P gate heads (H or J), X head
size, M queries of a block, S the keys in reach.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ...custom_ops import differentiate, empty_like, load_kernels, rows_like, torch_op
from ...dispatch import (
    BackendChoice,
    checked_backend,
    compile_time_constant,
    gluon_choice,
    max_relative_error,
    result_and_gradients,
)
from ...norms import statistics_dtype
from ...shapes import check_qkv, check_window, cut, expand_kv
from ..scored import QueryBlock, running_sum, scored_attention

LOG2E = math.log2(math.e)
DIRECT_QUERIES = 32
"""Queries whose scores with each other are computed channel by channel."""
STEEPEST = 1.19
"""Largest fall of a natural log gate that the kernels support: 64 of them stay within 2^110."""


def soft_clamp(log_gate: Tensor, g_max: float) -> Tensor:
    """Map numbers <= 0 smoothly into (-g_max, 0]: slope 1 at 0, limit -g_max at minus infinity."""
    return g_max * torch.expm1(log_gate / g_max)


def wall_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gate_BTPX: Tensor, *, scale: float | None = None,
    window: int | None = None, query_block: int | None = None, steepest: float | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax attention with one decay per channel, [B, T, H, X] of q's dtype.

    The score of query i and key j is scale sum_x q_ix k_jx exp(sum of log_gate_x over j < u <= i): a key's own gate
    does not act on it, the query's does. The sums of gates are float64 in "torch"; the kernels sum blocks in float32
    and across blocks in float64. Causal and differentiable.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys, of q's dtype; query head h uses KV head h // (H / J).
        v_BTJX: Values, of q's dtype.
        log_gate_BTPX: Natural log gates <= 0 of any float dtype, with P = H or P = J heads.
        scale: Factor of the products; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries that "torch" scores at a time; None: 1024.
        steepest: Promise that no log gate lies below -steepest, which is not checked; None: no limit is known. It only
            serves the choice of the backend: the kernels need at most 1.19.
        backend: "gluon" (its own forward, the backward of "triton"), "triton" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes disagree, the window is below 1, or below 128 with "gluon".
    """
    b, t, h, j, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    y = log_gate_BTPX.shape[2] if log_gate_BTPX.ndim == 4 else 0
    if log_gate_BTPX.shape != (b, t, y, d) or y not in (h, j):
        raise ValueError(f"q has shape {tuple(q_BTHX.shape)}, but log_gate {tuple(log_gate_BTPX.shape)}")
    scale = d**-0.5 if scale is None else scale
    dtype = statistics_dtype(q_BTHX.dtype)
    backend = (
        checked_backend(backend, "gluon", "triton")
        or choose_backend(q_BTHX.device, q_BTHX.dtype, d, steepest, window).backend
    )
    if backend != "torch":
        f, window = log_gate_BTPX.to(dtype), cut(window, t)
        return wall_forward(q_BTHX, k_BTJX, v_BTJX, f, scale * LOG2E, window, backend)[0]
    q, k = q_BTHX.to(dtype) * scale, k_BTJX.to(dtype)
    p_BTPX = running_sum(log_gate_BTPX)
    return scored_attention(v_BTJX, h, lambda span: _logits(q, k, p_BTPX, span), window=window, query_block=query_block)


@compile_time_constant
def choose_backend(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, steepest: float | None = None,
    window: int | None = None,
) -> BackendChoice:  # fmt: skip
    """Return the backend of `wall_attention`: "gluon" on Hopper, "triton" from Ampere on, "torch" elsewhere.

    It is "torch" as well for float16 and for gates without a known limit or steeper than 1.19. "gluon" also needs heads
    of 64 or 128 and no window below 128. The kernels must pass a
    self-test, which the first call for a case runs.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the activations.
        head_dim: Head size.
        steepest: No log gate lies below -steepest; None: no limit is known.
        window: Attention window in keys, or None.
    """
    if steepest is None or steepest > STEEPEST:
        limit = "no limit" if steepest is None else f"the limit {steepest:g}"
        return BackendChoice(
            "torch", f"the kernels support gates that fall by at most {STEEPEST} per token; these have {limit}"
        )
    if dtype == torch.float16:
        return BackendChoice(
            "torch",
            "the kernels scale q and k by up to 2^80 within a block of tokens, which exceeds the range of float16",
        )
    return gluon_choice("wall attention", torch.device(device), dtype, head_dim, window, _error)


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of results and gradients, against "torch" in float32.

    One row of 397 tokens with a window of 150. Both kinds of gates are tried, one per query head and one per KV head;
    the natural log gates lie between -0.25 and 0.
    """
    # odd, longer than three tiles, and a window that ends inside one
    t, window = 397, 150
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, t, heads, head_dim, generator=draw).to(device, dtype) for heads in (2, 1, 1)]
    gates = [(-torch.rand(1, t, heads, head_dim, generator=draw) / 4).to(device) for heads in (2, 1)]
    attention = functools.partial(wall_attention, window=window)
    apart, tied = (result_and_gradients(attention, backend, dtype, tensors, [gate]) for gate in gates)
    return max_relative_error(apart[0] + tied[0], apart[1] + tied[1])


def _logits(q_BTHX: Tensor, k_BTJX: Tensor, p_BTPX: Tensor, span: QueryBlock) -> Tensor:
    """Return the scores of a block, [B, H, M, S] in natural units; hidden pairs get arbitrary finite numbers.

    Args:
        q_BTHX: All queries, scaled, in the statistics' dtype.
        k_BTJX: All keys, in the same dtype.
        p_BTPX: Running sums of the natural log gates, float64.
        span: Block of queries and its keys.
    """
    far = _scores_before_block(q_BTHX, k_BTJX, p_BTPX, span.start, span.stop, span.first)
    near = []
    for start in range(span.start, span.stop, DIRECT_QUERIES):
        stop = min(start + DIRECT_QUERIES, span.stop)
        earlier_keys = _scores_before_block(q_BTHX, k_BTJX, p_BTPX, start, stop, span.start)
        own_keys = _scores_in_block(q_BTHX[:, start:stop], k_BTJX[:, start:stop], p_BTPX[:, start:stop])
        near.append(torch.cat([earlier_keys, own_keys, own_keys.new_zeros(*own_keys.shape[:3], span.stop - stop)], -1))
    return torch.cat([far, torch.cat(near, 2)], -1)


def _scores_before_block(q_BTHX: Tensor, k_BTJX: Tensor, p_BTPX: Tensor, start: int, stop: int, first: int) -> Tensor:
    """Return the scores of the queries start <= i < stop and the keys first <= j < start before them.

    They are [B, H, stop - start, start - first] in natural units. The decay is split at `start`, so that both exponents
    are at most 0. Queries are scaled already; p_BTPX are the running sums of the natural log gates, float64.
    """
    anchor = p_BTPX[:, start : start + 1]
    dtype, heads = q_BTHX.dtype, q_BTHX.shape[2]
    grown = torch.exp((p_BTPX[:, start:stop] - anchor).to(dtype))
    faded = torch.exp((anchor - p_BTPX[:, first:start]).to(dtype))
    q = q_BTHX[:, start:stop] * expand_kv(grown, heads)
    # with gates per KV head the keys need not be expanded to query heads
    k = expand_kv(k_BTJX[:, first:start], p_BTPX.shape[2]) * faded
    return torch.einsum("bmpgx,bspx->bpgms", q.unflatten(2, (k.shape[2], -1)), k).flatten(1, 2)


def _scores_in_block(q_BMHX: Tensor, k_BMJX: Tensor, p_BMPX: Tensor) -> Tensor:
    """Return the scores [B, H, M, M] of a few queries with their own keys, channel by channel.

    Holds [B, M, M, P, X] numbers. Pairs with the key after the query are scored without decay.

    Args:
        q_BMHX: Queries of the block, scaled.
        k_BMJX: Keys of the block.
        p_BMPX: Running sums of the natural log gates, float64.
    """
    seen = torch.ones(q_BMHX.shape[1], q_BMHX.shape[1], dtype=torch.bool, device=q_BMHX.device).tril()
    fall = (p_BMPX[:, :, None] - p_BMPX[:, None]).to(q_BMHX.dtype)
    # the decay of hidden pairs may overflow, and infinity times 0 is NaN
    fade = torch.where(seen[:, :, None, None], fall, 0.0).exp()
    k = expand_kv(k_BMJX, p_BMPX.shape[2])
    q = q_BMHX.unflatten(2, (k.shape[2], -1))
    return torch.einsum("bmpgx,bspx,bmspx->bpgms", q, k, fade).flatten(1, 2)


# --- as torch ops ---------------------------------------------------------------------------------------------------


BLOCK = 64
"""Largest number of tokens whose gates one exponent sums."""


def _empty_results(q: Tensor, k: Tensor, v: Tensor, f: Tensor, *_: Any) -> tuple[Tensor, ...]:
    b, t, d, y = *q.shape[:2], q.shape[3], f.shape[2]
    edges = q.new_empty(2, b, y, -(-t // BLOCK) + 1, d, dtype=torch.float32)
    return q.new_empty(q.shape), rows_like(q), q.new_empty(q.shape), k.new_empty(b, t, y, d), edges


@torch_op("wall_forward", _empty_results)
def wall_forward(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, factor: float, window: int, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (o, lse, q', k', E) of `triton.forward` by the kernels; only o has a gradient.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.

    Args:
        q: Queries [B, T, H, X].
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        f: Natural log gates, float32 [B, T, P, X], none below -1.19.
        factor: Factor of the products that gives units of log 2.
        window: Attention window in keys, 0 for none.
        backend: Backend of the forward, "triton" or "gluon".
    """
    return load_kernels(__package__, backend).forward(
        *(x.contiguous() for x in (q, k, v, f)), factor=factor, window=window or None
    )


@torch_op("wall_backward", lambda g_o, q_, k_, v, f, *_: empty_like(q_, v, v, f))
def wall_backward(
    g_o: Tensor, q_: Tensor, k_: Tensor, v: Tensor, f: Tensor, o: Tensor, lse: Tensor, edges: Tensor, factor: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and f, in their dtypes, by the Triton kernels.

    Args:
        g_o: Gradient of the output.
        q_: q' of `wall_forward`, with the gates applied.
        k_: k' of `wall_forward`, one per gate head.
        v: Values [B, T, J, X].
        f: Natural log gates, float32 [B, T, P, X].
        o: Output of `wall_forward`.
        lse: Log-sum-exp of `wall_forward`.
        edges: E of `wall_forward`.
        factor: Factor of the products that gives units of log 2.
        window: Attention window in keys, 0 for none.
    """
    return load_kernels(__package__).backward(
        g_o.contiguous(), q_, k_, v.contiguous(), f.contiguous(), o, lse, edges, factor=factor, window=window or None
    )


def _saved(inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    _, _, v, f, factor, window, _ = inputs
    o, lse, q_, k_, edges = results
    return (q_, k_, v, f, o, lse, edges), (factor, window)


differentiate(wall_forward, wall_backward, _saved)
