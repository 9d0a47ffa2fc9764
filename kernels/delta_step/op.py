"""The delta rules one token at a time, in place (docs/decoding.md; docs/mechanisms.md, "Gated delta memory").

B texts, H query heads, J KV heads, X head size, R texts that a table has rows for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..custom_ops import load_kernels, torch_op
from ..dispatch import BackendChoice, attention_choice, compile_time_constant, worst
from ..gated_delta.op import NORM_FLOOR


def delta_step(
    q_BHX: Tensor, k_BJX: Tensor, v_BJX: Tensor, log_gamma: Tensor, beta_BH: Tensor, states_RHXX: Tensor,
    slots_B: Tensor, *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """The readout after one token, [B, H, X] in q's type; its texts' states [R, H, X_v, X_k] are changed in place.

    M <- gamma M; u = beta (v - M k); M <- M + u kᵀ; r = M q, with k and q scaled to unit length here. log_gamma <= 0 is [B, H],
    as in `gated_delta`, or [B, H, X], one a channel of the keys, as in `channelwise_delta`. Arithmetic is that of the states'
    type, `slots` int64 says which row each text has, `backend` None is what `choose_backend` says. Raises ValueError when shapes
    disagree.
    """
    b, h, x = q_BHX.shape
    if states_RHXX.shape[1:] != (h, x, x) or log_gamma.shape not in ((b, h), (b, h, x)) or beta_BH.shape != (b, h):
        raise ValueError(
            f"q has shape {tuple(q_BHX.shape)}, but the states {tuple(states_RHXX.shape)}, log_gamma {tuple(log_gamma.shape)}, beta {tuple(beta_BH.shape)}"
        )
    if (backend or choose_backend(q_BHX.device, q_BHX.dtype, x).backend) == "triton":
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
    """What `delta_step` takes for such tensors."""
    return attention_choice("the delta step", torch.device(device), dtype, head_dim, _error)


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Largest relative error of readouts and states after a few steps of both rules, against "torch" in float32."""
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
    return worst(*results)


@torch_op("delta_step", lambda q, *_: q.new_empty(q.shape), ("states_RHXX",))
def step(
    q_BHX: Tensor, k_BJX: Tensor, v_BJX: Tensor, log_gamma: Tensor, beta_BH: Tensor, states_RHXX: Tensor,
    slots_B: Tensor,
) -> Tensor:  # fmt: skip
    """As `delta_step`."""
    return load_kernels(__package__).step(q_BHX, k_BJX, v_BJX, log_gamma, beta_BH, states_RHXX, slots_B)
