"""Delta rules one token at a time, with states updated in place (docs/explanation/decoding.md).

B texts, H query heads, J KV heads, X head size, R rows of the table of states. See docs/reference/mechanisms.md, "Gated delta
memory".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..custom_ops import load_kernels, torch_op
from ..dispatch import BackendChoice, attention_choice, checked_backend, compile_time_constant, max_relative_error
from ..gated_delta.op import NORM_FLOOR


def delta_step(
    q_BHX: Tensor, k_BJX: Tensor, v_BJX: Tensor, log_gamma: Tensor, beta_BH: Tensor, states_RHXX: Tensor,
    slots_B: Tensor, *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Update each text's state by one token in place, and return the readout, [B, H, X] in q's dtype.

    M <- gamma M; u = beta (v - M k); M <- M + u kᵀ; r = M q, so the readout includes the token's own write. k and q are
    divided here by their length, at least 1e-12. Arithmetic runs in the states' dtype. Query head h uses KV head h //
    (H / J). No gradients.

    Args:
        q_BHX: Queries of the new tokens.
        k_BJX: Keys.
        v_BJX: Values.
        log_gamma: Natural log decay <= 0: [B, H] as in `gated_delta`, or [B, H, X] per key channel as in
            `channelwise_delta`.
        beta_BH: Write strength in (0, 1).
        states_RHXX: States [R, H, X_v, X_k], changed in place; "triton" needs contiguous float32.
        slots_B: int64, row of `states_RHXX` of each text; rows named twice end undefined.
        backend: "triton" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes of q, states and gates disagree.
    """
    b, h, x = q_BHX.shape
    if states_RHXX.shape[1:] != (h, x, x) or log_gamma.shape not in ((b, h), (b, h, x)) or beta_BH.shape != (b, h):
        raise ValueError(
            f"q has shape {tuple(q_BHX.shape)}, but the states {tuple(states_RHXX.shape)}, log_gamma {tuple(log_gamma.shape)}, beta {tuple(beta_BH.shape)}"
        )
    if (checked_backend(backend, "triton") or choose_backend(q_BHX.device, q_BHX.dtype, x).backend) == "triton":
        return step(q_BHX, k_BJX, v_BJX, log_gamma, beta_BH, states_RHXX, slots_B)
    dtype = states_RHXX.dtype
    q = functional.normalize(q_BHX.to(dtype), dim=-1, eps=NORM_FLOOR)
    k, v = (part.to(dtype).repeat_interleave(h // k_BJX.shape[1], 1) for part in (k_BJX, v_BJX))
    k = functional.normalize(k, dim=-1, eps=NORM_FLOOR)
    gamma = log_gamma.to(dtype).exp()
    decayed_states = states_RHXX[slots_B] * (gamma[..., None, None] if gamma.ndim == 2 else gamma[:, :, None])
    u_BHX = beta_BH.to(dtype)[..., None] * (v - torch.einsum("bhvk,bhk->bhv", decayed_states, k))
    state = decayed_states + u_BHX[..., None] * k[:, :, None]
    states_RHXX.index_copy_(0, slots_B, state)
    return torch.einsum("bhvk,bhk->bhv", state, q).to(q_BHX.dtype)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> BackendChoice:
    """Return the backend of `delta_step`, "triton" or "torch", with the reason, as `attention_choice` does."""
    return attention_choice("the delta step", torch.device(device), dtype, head_dim, _error)


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of three steps of both rules against "torch" in float32.

    Compares the readout of every step and the states after the last. Both rules start from states of zeros.
    """
    draw = torch.Generator().manual_seed(seed)
    slots = torch.tensor([2, 0], device=device)
    results: list[list[Tensor]] = []
    for name, kind in ((backend, dtype), ("torch", torch.float32)):
        draw.manual_seed(seed)
        parts = []
        for channels in ((), (head_dim,)):
            states = torch.zeros(3, 4, head_dim, head_dim, device=device)
            for _ in range(3):
                q, k, v, gamma, beta = (
                    torch.randn(shape, generator=draw).to(device)
                    for shape in ((2, 4, head_dim), (2, 2, head_dim), (2, 2, head_dim), (2, 4, *channels), (2, 4))
                )
                q, k, v = (x.to(dtype).to(kind) for x in (q, k, v))
                args = q, k, v, functional.logsigmoid(gamma + 3), beta.sigmoid(), states, slots
                parts.append(delta_step(*args, backend=name))
            parts.append(states[slots])
        results.append(parts)
    return max_relative_error(*results)


@torch_op("delta_step", lambda q, *_: q.new_empty(q.shape), ("states_RHXX",))
def step(
    q_BHX: Tensor, k_BJX: Tensor, v_BJX: Tensor, log_gamma: Tensor, beta_BH: Tensor, states_RHXX: Tensor,
    slots_B: Tensor,
) -> Tensor:  # fmt: skip
    """Return the readout of `delta_step` by the Triton kernel, [B, H, X] in q's dtype.

    `states_RHXX`, contiguous float32, is changed in place; no gradients. log_gamma is the natural log decay, [B, H] or
    per key channel [B, H, X]; beta_BH the write strength; slots_B, int64, the row of `states_RHXX` of each text. q and
    k are scaled to unit length here.
    """
    return load_kernels(__package__).step(q_BHX, k_BJX, v_BJX, log_gamma, beta_BH, states_RHXX, slots_B)
