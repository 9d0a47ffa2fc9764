"""The delta rules one token at a time as one pass over the states (docs/decoding.md).

B texts, H query heads, J KV heads, X head size, V rows of a state that a program has. Rows do not depend on each other.
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
    """As `delta_step`; states float32."""
    b, h, x = q.shape
    r = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = (part if part[0].is_contiguous() else part.contiguous() for part in (q, k, v))
    rows = min(x, 64 if b >= 256 else 32)
    _step[(b, h, x // rows)](
        q, k, v, log_gamma.float().contiguous(), beta.float().contiguous(), states, slots, r, q.stride(0), k.stride(0),
        v.stride(0), H=h, J=k.shape[1], X=x, V=rows, CHANNELS=log_gamma.ndim == 3, num_warps=4,
    )  # fmt: skip
    return r
