"""Triton kernel of the delta rules one token at a time, as one pass over the states (docs/explanation/decoding.md).

B texts, H query heads, J KV heads, X head size, V rows of a state per program. Rows of a state do not depend on each
other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gated_delta.op import NORM_FLOOR

_FLOOR = tl.constexpr(NORM_FLOOR)


@triton.jit
def _unit(ptr, at):
    x = tl.load(ptr + at).to(tl.float32)
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), _FLOOR)


@triton.jit
def _step(
    q_ptr, k_ptr, v_ptr, gamma_ptr, beta_ptr, states_ptr, slots_ptr, r_ptr, q_text, k_text, v_text,
    H: tl.constexpr, J: tl.constexpr, X: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Update V rows of one text's and head's state in place, and store their readout.

    Grid: (B, H, X / V). Arithmetic is float32; keys and queries are scaled to unit length here.

    Args:
        q_ptr: [B, H, X], contiguous within a text.
        k_ptr: [B, J, X], contiguous within a text.
        v_ptr: [B, J, X], contiguous within a text.
        gamma_ptr: Contiguous float32 natural log decay, [B, H], or [B, H, X] with CHANNELS.
        beta_ptr: Contiguous float32 [B, H].
        states_ptr: Contiguous float32 [R, H, X_v, X_k], changed in place.
        slots_ptr: int64 [B], row of the table of each text.
        r_ptr: Contiguous [B, H, X], written in its own dtype.
        q_text: Elements from one text of q to the next; k_text and v_text alike.
        k_text: Elements from one text of k to the next.
        v_text: Elements from one text of v to the next.
        H: constexpr, query heads.
        J: constexpr, KV heads.
        X: constexpr, head size, a power of two.
        V: constexpr, rows of a program.
        CHANNELS: constexpr bool, True for a decay per key channel.
    """
    b = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.program_id(2) * V + tl.arange(0, V)
    x = tl.arange(0, X)
    kv = h // (H // J) * X
    q = _unit(q_ptr, b * q_text + h * X + x)
    k = _unit(k_ptr, b * k_text + kv + x)
    v = tl.load(v_ptr + b * v_text + kv + row).to(tl.float32)
    if CHANNELS:
        gamma = tl.exp(tl.load(gamma_ptr + (b * H + h) * X + x))
    else:
        gamma = tl.exp(tl.load(gamma_ptr + b * H + h)) + tl.zeros([X], tl.float32)
    slot = tl.load(slots_ptr + b)
    at = states_ptr + ((slot * H + h) * X + row)[:, None] * X + x[None, :]
    state = tl.load(at) * gamma[None, :]
    u = tl.load(beta_ptr + b * H + h) * (v - tl.sum(state * k[None, :], 1))
    state += u[:, None] * k[None, :]
    tl.store(at, state)
    tl.store(r_ptr + (b * H + h) * X + row, tl.sum(state * q[None, :], 1).to(r_ptr.dtype.element_ty))


def step(q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    """Update the states by one token in place, and return the readout, [B, H, X] in q's dtype; see `op.delta_step`.

    Args:
        q: Queries [B, H, X] on a GPU; X is a power of two.
        k: Keys [B, J, X].
        v: Values [B, J, X].
        log_gamma: Natural log decay, [B, H] or [B, H, X].
        beta: Write strengths [B, H].
        states: Contiguous float32 [R, H, X_v, X_k], changed in place.
        slots: int64 [B], row of `states` of each text.
    """
    b, h, x = q.shape
    r = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = (part if part[0].is_contiguous() else part.contiguous() for part in (q, k, v))
    rows = min(x, 64 if b >= 256 else 32)
    _step[(b, h, x // rows)](
        q, k, v, log_gamma.float().contiguous(), beta.float().contiguous(), states, slots, r, q.stride(0), k.stride(0),
        v.stride(0), H=h, J=k.shape[1], X=x, V=rows, CHANNELS=log_gamma.ndim == 3, num_warps=4,
    )  # fmt: skip
    return r
