"""Forgetting attention: softmax whose scores decay by every gate between key and query (docs/reference/mechanisms.md).

B batch, T length, H query heads, J KV heads, X head size, M queries of a block, S the keys in its reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...custom_ops import differentiate, empty_like, keep_inputs, load_kernels, rows_like, torch_op
from ...dispatch import BackendChoice, checked_backend, compile_time_constant, gluon_choice, self_test
from ...shapes import check_qkv, check_window, cut
from ..scored import QueryBlock, dot_scores, running_sum, scored_attention
from ..softmax.op import factor_in_log2


def forgetting_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gate_BTH: Tensor, *, scale: float | None = None,
    window: int | None = None, query_block: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax over keys j <= i of scale q_i·k_j + (sum of log_gate_u over j < u <= i), times v.

    [B, T, H, X] of q's dtype, for query i. A key's own gate does not act on it, the query's does. Causal and
    differentiable. The sums of gates are float64, whose differences stay exact where the sums are large.

    Args:
        q_BTHX: Queries; head h uses KV head h // (H / J).
        k_BTJX: Keys, of q's dtype.
        v_BTJX: Values, of q's dtype.
        log_gate_BTH: Natural log gates <= 0 of any float dtype; also [1, T, H], shared by all rows.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries that "torch" scores at a time; None: 1024.
        backend: "gluon" (its own forward, the backward of "triton"), "triton" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes disagree, the window is below 1, or below 128 with "gluon".
    """
    b, t, h, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    if log_gate_BTH.shape not in ((b, t, h), (1, t, h)):
        raise ValueError(f"q has shape {tuple(q_BTHX.shape)}, but log_gate {tuple(log_gate_BTH.shape)}")
    backend = (
        checked_backend(backend, "gluon", "triton") or choose_backend(q_BTHX.device, q_BTHX.dtype, d, window).backend
    )
    if backend != "torch":
        factor = factor_in_log2(d, scale)
        # the kernels divide by the factor; products with a query of 0 do without scale as well
        q, factor = (q_BTHX, factor) if factor else (q_BTHX * 0, 1.0)
        gate = log_gate_BTH if log_gate_BTH.dtype == torch.float64 else log_gate_BTH.float()
        window = cut(window, t)
        return forgetting_forward(q, k_BTJX, v_BTJX, gate.expand(b, t, h), factor, window, backend)[0]
    f_BHT = running_sum(log_gate_BTH).transpose(1, 2)

    def logits(span: QueryBlock) -> Tensor:
        fade_BHMS = f_BHT[:, :, span.queries, None] - f_BHT[:, :, None, span.keys]
        scores = dot_scores(q_BTHX, k_BTJX, span, scale)
        # the sums of hidden pairs are positive and may overflow exp
        return scores + torch.where(span.visible_MS, fade_BHMS, 0.0).to(scores.dtype)

    return scored_attention(v_BTJX, h, logits, window=window, query_block=query_block)


@compile_time_constant
def choose_backend(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, window: int | None = None
) -> BackendChoice:
    """Return the backend of `forgetting_attention`: "gluon" on Hopper, "triton" from Ampere on, "torch" elsewhere.

    The kernels need 16-bit activations, heads of 16, 32, 64, 128 or 256, and must pass a self-test, which the first
    call for a case runs. "gluon" needs heads of 64 or 128 and no window below 128.
    """
    return gluon_choice("forgetting attention", torch.device(device), dtype, head_dim, window, _error)


# odd, longer than three tiles, and a window that ends inside one
_error = self_test(forgetting_attention, 397, lambda _, draw: [-torch.rand(1, 397, 2, generator=draw) / 8], window=150)


# --- as torch ops ---------------------------------------------------------------------------------------------------


@torch_op("forgetting_forward", lambda q, *_: (q.new_empty(q.shape), *(rows_like(q) for _ in range(3))))
def forgetting_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, factor: float, window: int, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (o [B, T, H, X], lse, high and low part of F, [B, H, T] float32) by the kernels; only o has a gradient.

    Scores are factor q·k + F_i - F_j in units of log 2.

    Args:
        q: Queries [B, T, H, X], not scaled.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        log_gate: Natural log gates [B, T, H], float32 or float64; F is their running sum over ln 2.
        factor: Factor of q·k, not 0.
        window: Attention window in keys, 0 for none.
        backend: Backend of the forward, "triton" or "gluon"; the backward is plain Triton's.
    """
    return load_kernels(__package__, backend).forward(
        *(x.contiguous() for x in (q, k, v, log_gate)), factor=factor, window=window or None
    )


@torch_op("forgetting_backward", lambda g_o, *tensors: empty_like(*tensors[:4]))
def forgetting_backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, o: Tensor, lse: Tensor, high: Tensor, low: Tensor,
    factor: float, window: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and log_gate, in their dtypes, by the Triton kernels.

    g_o is the gradient of the output; o, lse, high and low are the results of `forgetting_forward`, the other arguments
    its inputs. `backend` is ignored.
    """
    args = (x.contiguous() for x in (g_o, q, k, v, o))
    *grads, d_gate = load_kernels(__package__).backward(*args, lse, (high, low), factor=factor, window=window or None)
    return *grads, d_gate.to(log_gate.dtype)


differentiate(forgetting_forward, forgetting_backward, keep_inputs(4))
