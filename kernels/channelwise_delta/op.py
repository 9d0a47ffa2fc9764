"""Delta rule with a decay per channel of the keys, as in Kimi Linear (docs/reference/mechanisms.md, "Delta rules").

B batch, T length, H heads, X head size, J KV heads (J divides H), C chunk, N chunks. The state is [B, H, X_v, X_k].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..custom_ops import differentiate, empty_like, torch_op
from ..dispatch import BackendChoice, checked_backend, compile_time_constant, is_torch_only, self_test_failure, version
from ..fla_configs import channelwise_configs, pin_configs
from ..gated_delta.op import NORM_FLOOR, delta_rule_error, in_chunks, running_sum, why_no_fla
from ..norms import statistics_dtype
from ..shapes import check_length, check_qkv, expand_kv

SIZES = (16, 32, 64, 128, 256)
"""Head sizes that fla has kernels for."""


def channelwise_delta(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gamma_BTHX: Tensor, beta_BTH: Tensor, *, chunk: int = 16,
    initial_state: Tensor | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the readout of the delta rule with a decay per key channel, and the last state.

    Per token: M <- M diag(gamma); u = beta (v - M k); M <- M + u kᵀ; r = M q: a token's readout includes its own write.
    k and q are divided here by their length, at least 1e-12. Head h uses KV head h // (H / J). T is at least 1.
    Differentiable in all tensors.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys, of q's dtype; J divides H.
        v_BTJX: Values, of q's dtype.
        log_gamma_BTHX: Natural logarithm of the decay of each key channel, <= 0, which is not checked.
        beta_BTH: Write strength in (0, 1), which is not checked.
        chunk: Tokens that "torch" solves together; "fla" always takes 64.
        initial_state: [B, H, X_v, X_k], left unchanged; None for zeros.
        backend: "fla" (CUDA, 16 bits) or "torch"; None: `choose_backend`.

    Returns:
        (readout r [B, T, H, X] in q's dtype, last state [B, H, X_v, X_k] in float32, float64 for float64).

    Raises:
        ValueError: Shapes or the backend do not fit, or T is 0.
    """
    b, t, h, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_length(t)
    if log_gamma_BTHX.shape != (b, t, h, d) or beta_BTH.shape != (b, t, h):
        raise ValueError(
            f"q has shape {tuple(q_BTHX.shape)}, but log_gamma {tuple(log_gamma_BTHX.shape)} and beta {tuple(beta_BTH.shape)}"
        )
    if initial_state is not None and initial_state.shape != (b, h, d, d):
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, expected [{b}, {h}, {d}, {d}]")
    dtype = statistics_dtype(q_BTHX.dtype)
    state = q_BTHX.new_zeros(b, h, d, d, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    q, k = (functional.normalize(x.to(dtype), dim=-1, eps=NORM_FLOOR) for x in (q_BTHX, expand_kv(k_BTJX, h)))
    v, decay, beta = expand_kv(v_BTJX, h).to(dtype), log_gamma_BTHX.to(dtype), beta_BTH.to(dtype)
    backend = checked_backend(backend, "fla") or choose_backend(q_BTHX.device, q_BTHX.dtype, d).backend
    if backend == "fla":
        narrow = (x.to(q_BTHX.dtype) for x in (q, k, v))
        r, state, *_ = fla_forward(*narrow, decay, beta, state)
        return r, state
    r, state = _chunked(q, k, v, decay, beta, chunk, state)
    return r.to(q_BTHX.dtype), state


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> BackendChoice:
    """Return the backend of `channelwise_delta`, "fla" or "torch", with the reason.

    "fla" needs CUDA, 16 bits, a head size of 16 to 256 that is a power of two, and a passed self-test, which the first
    call for a case runs.
    """
    device = torch.device(device)
    why = "train.kernels is torch" if is_torch_only() else _why_no_fla(device, dtype, head_dim)
    why = why or self_test_failure("channelwise delta", _error, device, dtype, head_dim, "fla")
    return BackendChoice("fla", f"fla {version('fla-core')}") if why is None else BackendChoice("torch", why)


def _why_no_fla(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type == "cuda" and head_dim not in SIZES:
        return f"fla needs a head_dim of {', '.join(map(str, SIZES))}, got {head_dim}"
    return why_no_fla(device, dtype)


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of `channelwise_delta` by `backend` against "torch" in float32.

    Compares the readout and the gradients of q, k, v and of the logits of both gates, for one row of 131 tokens with 2
    query heads and 1 KV head (`delta_rule_error`).
    """
    return delta_rule_error(channelwise_delta, (1, 131, 2, head_dim), device, dtype, head_dim, backend, seed)


def channelwise_delta_reference(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gamma_BTHX: Tensor, beta_BTH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (readout [B, T, H, X], last state [B, H, X_v, X_k]) of `channelwise_delta`, token by token; slow.

    Computed in the inputs' dtype, from a state of zeros; differentiable by autograd.

    Args:
        q_BTHX: Queries; T is at least 1.
        k_BTJX: Keys.
        v_BTJX: Values.
        log_gamma_BTHX: Natural logarithm of the decay of each key channel.
        beta_BTH: Write strength.
    """
    _, t, h, _, _ = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    q, k = functional.normalize(q_BTHX, dim=-1), functional.normalize(expand_kv(k_BTJX, h), dim=-1)
    v = expand_kv(v_BTJX, h)
    state = torch.einsum("bhv,bhk->bhvk", v[:, 0], k[:, 0]) * 0
    readouts = []
    for i in range(t):
        state = state * log_gamma_BTHX[:, i].exp()[..., None, :]
        missing = v[:, i] - torch.einsum("bhvk,bhk->bhv", state, k[:, i])
        state = state + torch.einsum("bh,bhv,bhk->bhvk", beta_BTH[:, i], missing, k[:, i])
        readouts.append(torch.einsum("bhvk,bhk->bhv", state, q[:, i]))
    return torch.stack(readouts, 1), state


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta_BTH: Tensor, chunk: int, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (readout [B, T, H, X], last state) in plain torch, a chunk of tokens at a time, in the inputs' dtype.

    It solves the same triangular system as `gated_delta`. The decay stands inside each product of two keys as a
    difference of logarithms, so that no exponent exceeds 0.

    Args:
        q: Unit-length queries [B, T, H, X].
        k: Unit-length keys [B, T, H, X], expanded to every head.
        v: Values [B, T, H, X], expanded to every head.
        decay: Natural log decays [B, T, H, X] of each token, not summed.
        beta_BTH: Write strengths.
        chunk: Tokens of a chunk; the last one may be shorter.
        state: Initial state [B, H, X_v, X_k].
    """
    b, t, h, d = q.shape
    chunk = min(chunk, t)
    n = -(-t // chunk)
    q, k, v, decay, beta = (in_chunks(x, chunk) for x in (q, k, v, decay, beta_BTH.unsqueeze(-1)))
    decay = running_sum(decay, -2)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)[..., None]
    fade = (decay.unsqueeze(-2) - decay.unsqueeze(-3)).masked_fill(later, -torch.inf).exp()
    of_keys = torch.einsum("bhnpx,bhnsx,bhnpsx->bhnps", k, k, fade)
    of_queries = torch.einsum("bhnpx,bhnsx,bhnpsx->bhnps", q, k, fade)
    grown = decay.exp()
    solved = torch.linalg.solve_triangular(
        beta * of_keys, torch.cat([beta * v, beta * grown * k], -1), upper=False, unitriangular=True
    )
    own, carried = solved.split(d, -1)
    last = decay[..., -1:, :]
    chunk_decay, decayed_keys = last.exp(), k * (last - decay).exp()
    readouts = []
    for i in range(n):
        write = own[:, :, i] - carried[:, :, i] @ state.mT
        readouts.append((grown[:, :, i] * q[:, :, i]) @ state.mT + of_queries[:, :, i] @ write)
        state = chunk_decay[:, :, i] * state + write.mT @ decayed_keys[:, :, i]
    r_BTHX = torch.stack(readouts, 2).permute(0, 2, 3, 1, 4).reshape(b, n * chunk, h, d)[:, :t]
    return r_BTHX, state


# --- flash-linear-attention: keys and values already expanded to every head, states [X_v, X_k] ------------------------

CHUNK_TOKENS = 64
"""Tokens that fla's kernels solve together."""


def _empty_results(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    """Return uninitialised results of `fla_forward`, for torch.compile; only shapes, dtypes and device count.

    They are the readout like q, the last state like `state`, running log decays [B, T, H, X] like log_gamma, and two
    tensors [B, T, H, 64] in k's dtype.
    """
    inside = k.new_empty(*k.shape[:3], CHUNK_TOKENS)
    row = q.new_empty(q.shape)
    return row, state.new_empty(state.shape), log_gamma.new_empty(q.shape), inside, torch.empty_like(inside)


@torch_op("channelwise_delta_fla_forward", _empty_results)
def fla_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run flash-linear-attention's forward kernels on the current GPU.

    Restricts fla's autotuners (`pin_configs`).

    Args:
        q: Unit-length queries [B, T, H, X] in 16 bits.
        k: Unit-length keys like q, expanded to every head.
        v: Values like q.
        log_gamma: float32 [B, T, H, X], natural logarithms.
        beta: float32 [B, T, H].
        state: Initial state, float32 [B, H, X_v, X_k].

    Returns:
        (readout in q's dtype, last state, then three tensors that `fla_backward` reads: running log decays [B, T, H,
        X], query-key products and key-key products within chunks, [B, T, H, 64] each). Only the first two have
        gradients.
    """
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd

    pin_configs(channelwise_configs, q.size(-1))
    q, k, v, log_gamma, beta, state = (x.contiguous() for x in (q, k, v, log_gamma, beta, state))
    r, last, decay, of_queries, of_keys, *_ = chunk_kda_fwd(
        q=q, k=k, v=v, g=log_gamma, beta=beta, scale=1.0, initial_state=state, output_final_state=True,
        state_v_first=True,
    )  # fmt: skip
    return r.to(q.dtype), last, decay, of_queries, of_keys


@torch_op(
    "channelwise_delta_fla_backward",
    lambda g_r, g_last, q, k, v, beta, state, decay, *_: empty_like(q, k, v, decay, beta, state),
)
def fla_backward(
    g_r: Tensor, g_last: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, decay: Tensor,
    of_queries: Tensor, of_keys: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_gamma, beta and the initial state.

    The first three are in the inputs' dtype, the last three float32. g_r and g_last are the gradients of readout and
    last state, `g_last` None for zeros; q, k, v, beta and state are the inputs of `fla_forward`, and decay, of_queries
    and of_keys its last three results.
    """
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd

    pin_configs(channelwise_configs, q.size(-1))
    q, k, v, beta, state, g_r = (x.contiguous() for x in (q, k, v, beta, state, g_r))
    dq, dk, dv, d_beta, d_gamma, d_state, *_ = chunk_kda_bwd(
        q=q, k=k, v=v, beta=beta, Aqk=of_queries, Akk=of_keys, scale=1.0, initial_state=state, do=g_r,
        dht=None if g_last is None else g_last.contiguous(), g=decay, state_v_first=True,
    )  # fmt: skip
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_gamma.float(), d_beta.float(), d_state.float()


def _saved(inputs: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[()]]:
    """Return the tensors that `fla_backward` reads, and no options."""
    q, k, v, _, beta, state = inputs
    return (q, k, v, beta, state, *results[2:]), ()


differentiate(fla_forward, fla_backward, _saved, results=2, zeros_like=0)
