"""Torch ops of the gated delta kernels, so that torch.compile keeps one graph; shapes and names as in `gated_delta`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_ops import differentiate, empty_like, keep_inputs, load_kernels, torch_op
from ..fla_configs import gated_delta_configs, pin_configs

CHUNK = 64
NUM_PLANES = 7
"""Number of row statistics that our forward saves."""


def _empty_results(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Return uninitialised results of `forward`, for torch.compile; only shapes, dtypes and device count.

    They are the readout like q, the last state [B, H, X, X] and stats [7, B, H, N C] in float32, then T and P [B, H, N,
    C, C], S [B, H, N, X, X] and u [B, H, N, X, C] in q's dtype (float32 for float16), with C = 64.
    """
    b, t, h, d = q.shape
    n = -(-t // CHUNK)
    saved_dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
    square = [q.new_empty(b, h, n, CHUNK, CHUNK, dtype=saved_dtype) for _ in range(2)]
    state, writes = (q.new_empty(b, h, n, d, width, dtype=saved_dtype) for width in (d, CHUNK))
    stats = q.new_empty(NUM_PLANES, b, h, n * CHUNK, dtype=torch.float32)
    return q.new_empty(q.shape), q.new_empty(b, h, d, d, dtype=torch.float32), stats, *square, state, writes


def _empty_gradients(g_r: Tensor, g_last: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return uninitialised results of `backward`, for torch.compile; only shapes, dtypes and device count.

    They are like q, k, v, log_gamma and beta, then float32 like the initial state, empty if there was none.
    """
    *tensors, initial_state, stats = rest[:7]
    return *empty_like(*tensors), stats.new_empty(0 if initial_state is None else initial_state.shape)


@torch_op("gated_delta_forward", _empty_results)
def forward(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (readout, last state, then the five tensors that `backward` reads) by our Triton kernels.

    The readout [B, T, H, X] has q's dtype, the last state [B, H, X_v, X_k] is float32. The five are stats, inverse, p,
    s and u of `backward`. Inputs are made contiguous.

    Args:
        q: Queries [B, T, H, X] on a GPU.
        k: Keys [B, T, J, X], of q's dtype.
        v: Values [B, T, J, X], of q's dtype.
        log_gamma: Natural log decays, float32 [B, T, H].
        beta: Write strengths, float32 [B, T, H].
        initial_state: float32 [B, H, X_v, X_k], or None for zeros.
    """
    first = None if initial_state is None else initial_state.contiguous()
    r, last, saved = load_kernels(__package__).forward(*(x.contiguous() for x in (q, k, v, log_gamma, beta)), first)
    return r, last, *saved


@torch_op("gated_delta_backward", _empty_gradients)
def backward(
    g_r: Tensor, g_last: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor,
    initial_state: Tensor | None, stats: Tensor, inverse: Tensor, p: Tensor, s: Tensor, u: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_gamma, beta and the initial state, the last empty if there was none.

    Those of q, k and v have q's dtype, the others are float32. q to initial_state are the inputs of `forward`, and
    stats to u its last five results. C = 64 tokens of a chunk, N chunks; float16 inputs save float32.

    Args:
        g_r: Gradient of the readout.
        g_last: Gradient of the last state, or None for zeros.
        q: Queries [B, T, H, X].
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        log_gamma: Natural log decays [B, T, H].
        beta: Write strengths [B, T, H].
        initial_state: [B, H, X_v, X_k] or None.
        stats: Row statistics, float32 [7, B, H, N C].
        inverse: Inverse matrices T of the chunks [B, H, N, C, C].
        p: Query-key matrices P of the chunks [B, H, N, C, C].
        s: States at the start of the chunks [B, H, N, X_v, X_k].
        u: Writes of the chunks [B, H, N, X_v, C].
    """
    args = [None if x is None else x.contiguous() for x in (g_r, g_last, q, k, v, log_gamma, beta, initial_state)]
    *grads, d_first = load_kernels(__package__).backward(*args, stats, inverse, p, s, u)
    return *grads, stats.new_empty(0) if d_first is None else d_first


differentiate(forward, backward, keep_inputs(6, 2), results=2, zeros_like=0)


# --- flash-linear-attention: keys and values already expanded to every head, states [X_k, X_v] ------------------------


def _empty_fla_results(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Return uninitialised results of `fla_forward`, for torch.compile; only shapes, dtypes and device count.

    They are readout like q, last state float32 [B, H, X, X], unit queries like q, their scales [B, T, H], unit keys
    like k, their scales and running log decays [B, T, H], all float32, and inverse matrices [B, T, H, 64] in q's dtype.
    """
    b, t, h, d = q.shape
    row = [q.new_empty(b, t, h, dtype=torch.float32) for _ in range(3)]
    last = q.new_empty(b, h, d, d, dtype=torch.float32)
    return (
        q.new_empty(q.shape), last, q.new_empty(q.shape), row[0], k.new_empty(k.shape), row[1], row[2],
        q.new_empty(b, t, h, CHUNK),
    )  # fmt: skip


def _empty_fla_gradients(
    g_r: Tensor, g_last: Tensor | None, v: Tensor, beta: Tensor, initial_state: Tensor | None, q: Tensor,
    q_scale: Tensor, k: Tensor, k_scale: Tensor, decay: Tensor, inverse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return uninitialised results of `fla_backward`, for torch.compile; only shapes, dtypes and device count.

    They are like q, k, v and twice beta (for log_gamma and beta), then float32 like the initial state, empty if there
    was none.
    """
    first = decay.new_empty(0 if initial_state is None else initial_state.shape)
    return *empty_like(q, k, v, beta, beta), first


@torch_op("gated_delta_fla_forward", _empty_fla_results)
def fla_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (readout, last state, then the six tensors that `fla_backward` reads) by fla's kernels.

    The readout [B, T, H, X] has q's dtype. States are float32 [B, H, X_k, X_v], transposed against `forward`. The six
    are unit queries and their scales, unit keys and theirs, running log decays within chunks, and inverse matrices.
    Restricts fla's autotuners (`pin_configs`).

    Args:
        q: Queries [B, T, H, X], 16-bit on a GPU; scaled to unit length here, as k is.
        k: Keys [B, T, H, X], one per query head.
        v: Values [B, T, H, X].
        log_gamma: Natural log decays, float32 [B, T, H].
        beta: Write strengths, float32 [B, T, H].
        initial_state: float32 [B, H, X_k, X_v], or None for zeros.
    """
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    pin_configs(gated_delta_configs, q.size(-1))
    q, k, v, log_gamma, beta = (x.contiguous() for x in (q, k, v, log_gamma, beta))
    q, q_scale = l2norm_fwd(q)
    k, k_scale = l2norm_fwd(k)
    decay, r, inverse, last, _, _ = chunk_gated_delta_rule_fwd(
        q=q, k=k, v=v, g=log_gamma, beta=beta, scale=1.0, initial_state=initial_state, output_final_state=True
    )
    return r.to(q.dtype), last, q, q_scale, k, k_scale, decay, inverse


@torch_op("gated_delta_fla_backward", _empty_fla_gradients)
def fla_backward(
    g_r: Tensor, g_last: Tensor | None, v: Tensor, beta: Tensor, initial_state: Tensor | None, q: Tensor,
    q_scale: Tensor, k: Tensor, k_scale: Tensor, decay: Tensor, inverse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_gamma, beta and the initial state, the last empty if there was none.

    The gradients of q, k and v are those of the tensors before scaling to unit length, in their dtype; those of gates
    and state are float32. The last six arguments are the last six results of `fla_forward`.

    Args:
        g_r: Gradient of the readout.
        g_last: Gradient of the last state [B, H, X_k, X_v], or None for zeros.
        v: Values [B, T, H, X].
        beta: Write strengths [B, T, H].
        initial_state: [B, H, X_k, X_v] or None.
        q: Queries of unit length.
        q_scale: Inverse lengths of the queries [B, T, H].
        k: Keys of unit length.
        k_scale: Inverse lengths of the keys [B, T, H].
        decay: Running sums of the log decays within chunks [B, T, H].
        inverse: Inverse matrices of the chunks, a row of 64 per token and head.
    """
    from fla.modules.norm.l2norm import l2norm_bwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    pin_configs(gated_delta_configs, q.size(-1))
    dq, dk, dv, d_beta, d_gamma, d_first, *_ = chunk_gated_delta_rule_bwd(
        q=q, k=k, v=v.contiguous(), g=decay, beta=beta.contiguous(), A=inverse, scale=1.0,
        initial_state=initial_state, do=g_r.contiguous(), dht=g_last,
    )  # fmt: skip
    dq, dk = l2norm_bwd(q, q_scale, dq), l2norm_bwd(k, k_scale, dk)
    d_first = decay.new_empty(0) if initial_state is None else d_first
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_gamma.float(), d_beta.float(), d_first


def _saved_fla(inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[tuple[Tensor | None, ...], tuple[()]]:
    _, _, v, _, beta, first = inputs
    return (v, beta, first, *results[2:]), ()


differentiate(fla_forward, fla_backward, _saved_fla, results=2, zeros_like=3)
