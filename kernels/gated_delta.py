"""Gated delta rule, the recurrence of the memory (MECHANISMS D).

B batch, T length, H heads, D head size, J KV heads (J divides H), C chunk, N chunks. The state is [B, H, D_v, D_k].
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch
from torch import Tensor
from torch.nn import functional

from .norms import statistics_dtype
from .shapes import check_qkv, expand_kv

NORM_FLOOR = 1e-12
"""Keys and queries are divided by max(their length, this), so a zero key writes nothing."""


def gated_delta(
    q_BTHD: Tensor,
    k_BTJD: Tensor,
    v_BTJD: Tensor,
    log_gamma_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    chunk: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "torch",
) -> Tensor | tuple[Tensor, Tensor]:
    """Readout r [B, T, H, D] in q's type; with `return_state` also the last state [B, H, D_v, D_k] in float32.

    M <- gamma M; u = beta (v - M k); M <- M + u kᵀ; r = M q, with k and q scaled to unit length here. q [B, T, H, D],
    k and v [B, T, J, D] of one type; log_gamma <= 0 and beta in (0, 1), both [B, T, H]. Solve and state are float32
    (float64 for float64). `backend` is "torch" (any device, any `chunk`) or "fla" (CUDA, 16-bit, chunk 64, see
    `choose_backend`). Raises ValueError when shapes, types or the backend do not fit.
    """
    b, t, h, _, d = check_qkv(q_BTHD, k_BTJD, v_BTJD)
    for name, gate in (("log_gamma", log_gamma_BTH), ("beta", beta_BTH)):
        if gate.shape != (b, t, h):
            raise ValueError(f"{name} has shape {tuple(gate.shape)}, but q needs [{b}, {t}, {h}]")
    if initial_state is not None and initial_state.shape != (b, h, d, d):
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, expected [{b}, {h}, {d}, {d}]")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if backend == "torch":
        r, state = _chunked(q_BTHD, k_BTJD, v_BTJD, log_gamma_BTH, beta_BTH, chunk, initial_state)
    elif backend == "fla":
        r, state = _fla(q_BTHD, k_BTJD, v_BTJD, log_gamma_BTH, beta_BTH, chunk, initial_state)
    else:
        raise ValueError(f"unknown backend {backend!r}; allowed: torch, fla")
    return (r, state) if return_state else r


def choose_backend(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> tuple[str, str]:
    """(backend, the reason in words) for tensors of that type on that device: "fla" wherever it is right."""
    device = torch.device(device)
    if device.type != "cuda":
        return "torch", f"fla needs CUDA, the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return "torch", f"fla computes in 16 bits, the activations are {dtype}"
    if torch.are_deterministic_algorithms_enabled():
        return "torch", "fla tunes its tiles by the clock, so another process may round otherwise"
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        return "torch", "flash-linear-attention is not installed"
    capability = torch.cuda.get_device_capability(device)
    triton = importlib.metadata.version("triton")
    if not fla_is_right(capability, triton):
        return (
            "torch",
            f"fla gives wrong gradients on compute capability {capability[0]}.{capability[1]} with Triton {triton}",
        )
    return "fla", f"fla {importlib.metadata.version('flash-linear-attention')}, Triton {triton}"


def fla_is_right(capability: tuple[int, int], triton: str) -> bool:
    """False for Hopper with Triton 3.4.0 up to, not including, 3.7.1: fla's backward is miscompiled there."""
    version = tuple(int(part) for part in triton.split("+")[0].split(".")[:3] if part.isdigit())
    return not (capability[0] == 9 and (3, 4, 0) <= version < (3, 7, 1))


def gated_delta_reference(
    q_BTHD: Tensor,
    k_BTJD: Tensor,
    v_BTJD: Tensor,
    log_gamma_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    initial_state: Tensor | None = None,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Step by step: (readout, last state). `normalize` False leaves keys and queries as they are (diagnostics)."""
    b, t, h, _, d = check_qkv(q_BTHD, k_BTJD, v_BTJD)
    dtype = statistics_dtype(q_BTHD.dtype)
    q, k, v = q_BTHD.to(dtype), expand_kv(k_BTJD, h).to(dtype), expand_kv(v_BTJD, h).to(dtype)
    if normalize:
        q, k = functional.normalize(q, dim=-1, eps=NORM_FLOOR), functional.normalize(k, dim=-1, eps=NORM_FLOOR)
    state = q.new_zeros(b, h, d, d) if initial_state is None else initial_state.to(dtype)
    readouts = []
    for i in range(t):
        state = state * log_gamma_BTH[:, i].to(dtype).exp()[..., None, None]
        missing = v[:, i] - torch.einsum("bhvk,bhk->bhv", state, k[:, i])
        state = state + torch.einsum("bhv,bhk->bhvk", beta_BTH[:, i].to(dtype).unsqueeze(-1) * missing, k[:, i])
        readouts.append(torch.einsum("bhvk,bhk->bhv", state, q[:, i]))
    return torch.stack(readouts, 1).to(q_BTHD.dtype), state


def running_sum(x: Tensor) -> Tensor:
    """cumsum over the last axis, [..., C], as a product with a triangle of ones.

    For deterministic runs: the order in which torch's own adds on CUDA may change, so torch then refuses it.
    """
    return x @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device).triu()


def _chunked(
    q_BTHD: Tensor, k_BTJD: Tensor, v_BTJD: Tensor, log_gamma_BTH: Tensor, beta_BTH: Tensor, chunk: int,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, t, h, d = q_BTHD.shape
    dtype = statistics_dtype(q_BTHD.dtype)
    chunk = min(chunk, t)
    n = -(-t // chunk)

    def chunks(x_BTHX: Tensor) -> Tensor:
        """[B, T, H, X] -> [B, H, N, C, X]; zeros at the end neither decay nor write."""
        padded = functional.pad(x_BTHX, (0, 0, 0, 0, 0, n * chunk - t)) if n * chunk > t else x_BTHX
        return padded.reshape(b, n, chunk, h, -1).permute(0, 3, 1, 2, 4).contiguous()

    q = chunks(functional.normalize(q_BTHD.to(dtype), dim=-1, eps=NORM_FLOOR))
    k = chunks(expand_kv(functional.normalize(k_BTJD.to(dtype), dim=-1, eps=NORM_FLOOR), h))
    v = chunks(expand_kv(v_BTJD.to(dtype), h))
    decay = chunks(log_gamma_BTH.to(dtype).unsqueeze(-1)).squeeze(-1)
    exactly = decay.device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
    decay = running_sum(decay) if exactly else decay.cumsum(-1)
    beta = chunks(beta_BTH.to(dtype).unsqueeze(-1))

    # ratio[p, s] = g_p / g_s for s <= p, masked before exp so that the other half cannot overflow.
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    ratio = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    k_t = k.transpose(-1, -2)
    grown = decay.exp().unsqueeze(-1)
    # (I + beta D) U = beta (V - g K M0ᵀ): solve for both terms at once; the unit diagonal is implied and not read.
    solved = torch.linalg.solve_triangular(
        beta * ratio * (k @ k_t), torch.cat([beta * v, beta * grown * k], -1), upper=False, unitriangular=True
    )
    own, carried = solved.split(d, -1)
    last = decay[..., -1:]
    kept = last.exp().unsqueeze(-1)
    k_end_t = (k * (last - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    state = q.new_zeros(b, h, d, d) if initial_state is None else initial_state.to(dtype).transpose(-1, -2)
    states, writes = [], []
    for i in range(n):
        write = own[:, :, i] - carried[:, :, i] @ state
        states.append(state)
        writes.append(write)
        state = kept[:, :, i] * state + k_end_t[:, :, i] @ write
    r = (grown * q) @ torch.stack(states, 2) + (ratio * (q @ k_t)) @ torch.stack(writes, 2)
    r_BTHD = r.permute(0, 2, 3, 1, 4).reshape(b, n * chunk, h, d)[:, :t]
    return r_BTHD.to(q_BTHD.dtype), state.transpose(-1, -2)


def _fla(
    q_BTHD: Tensor, k_BTJD: Tensor, v_BTJD: Tensor, log_gamma_BTH: Tensor, beta_BTH: Tensor, chunk: int,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q_BTHD.device.type != "cuda" or q_BTHD.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"backend fla needs 16-bit CUDA tensors, got {q_BTHD.dtype} on {q_BTHD.device}; use torch")
    if chunk != 64:
        raise ValueError(f"backend fla works in chunks of 64, got chunk {chunk}; use backend torch")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    h = q_BTHD.shape[2]
    # fla keeps the state as [D_k, D_v]
    state = None if initial_state is None else initial_state.float().transpose(-1, -2).contiguous()
    r_BTHD, last = chunk_gated_delta_rule(
        q_BTHD.contiguous(),
        expand_kv(k_BTJD, h).contiguous(),
        expand_kv(v_BTJD, h).contiguous(),
        log_gamma_BTH.float().contiguous(),
        beta_BTH.float().contiguous(),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return r_BTHD, last.transpose(-1, -2)
