"""Gated delta rule, the recurrence of the memory (docs/reference/mechanisms.md, "Gated delta memory").

B batch, T length, H heads, X head size, J KV heads (J divides H), C chunk, N chunks. The state is [B, H, X_v, X_k].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import dispatch
from ..dispatch import (
    SIXTEEN_BITS,
    BackendChoice,
    attention_choice,
    checked_backend,
    compile_time_constant,
    is_torch_only,
    max_relative_error,
    version,
)
from ..norms import statistics_dtype
from ..shapes import check_length, check_qkv, expand_kv
from . import torch_op

NORM_FLOOR = 1e-12
"""Lower bound of the length that keys and queries are divided by, so that a zero key writes nothing."""


def gated_delta(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gamma_BTH: Tensor, beta_BTH: Tensor, *, chunk: int = 64,
    initial_state: Tensor | None = None, return_state: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the readout of the gated delta rule, [B, T, H, X] in q's dtype.

    With `return_state` return (readout, last state). Per token: M <- gamma M; u = beta (v - M k); M <- M + u kᵀ; r = M
    q: a token's readout includes its own write. k and q are divided here by their length, at least 1e-12. Head h uses
    KV head h // (H / J). Solve and state are float32 (float64 for float64). T is at least 1 and needs no alignment.
    Differentiable in all tensors; "triton" gives 0 as the gradient of a beta of 0.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys, of q's dtype; J divides H.
        v_BTJX: Values, of q's dtype.
        log_gamma_BTH: Natural logarithm of the decay, <= 0, which is not checked.
        beta_BTH: Write strength in (0, 1), which is not checked.
        chunk: Tokens that "torch" solves together; the other backends always take 64.
        initial_state: [B, H, X_v, X_k], left unchanged; None for zeros.
        return_state: True to return the last state as well, float32 (float64 for float64) [B, H, X_v, X_k].
        backend: "triton" (our kernels; CUDA, 16 bits), "fla" (the same) or "torch" (any device); None:
            `choose_backend`.

    Raises:
        ValueError: Shapes, dtypes or the backend do not fit, T is 0, or `chunk` is below 1.
    """
    b, t, h, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_length(t)
    for name, gate in (("log_gamma", log_gamma_BTH), ("beta", beta_BTH)):
        if gate.shape != (b, t, h):
            raise ValueError(f"{name} has shape {tuple(gate.shape)}, but q needs [{b}, {t}, {h}]")
    if initial_state is not None and initial_state.shape != (b, h, d, d):
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, expected [{b}, {h}, {d}, {d}]")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    backend = checked_backend(backend, "triton", "fla") or choose_backend(q_BTHX.device, q_BTHX.dtype, d).backend
    if backend == "triton":
        gates = (log_gamma_BTH.float(), beta_BTH.float())
        first = None if initial_state is None else initial_state.float()
        r, state, *_ = torch_op.forward(q_BTHX, k_BTJX, v_BTJX, *gates, first)
    elif backend == "fla":
        r, state = _fla(q_BTHX, k_BTJX, v_BTJX, log_gamma_BTH, beta_BTH, initial_state)
    else:
        r, state = _chunked(q_BTHX, k_BTJX, v_BTJX, log_gamma_BTH, beta_BTH, chunk, initial_state)
    return (r, state) if return_state else r


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> BackendChoice:
    """Return the backend of `gated_delta`: our "triton" kernels, else "fla", else "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher, 16 bits and heads of 16, 32, 64, 128 or 256. Ours must
    pass a self-test, forward and backward, on a small input; the first call for a case runs it. "fla" needs
    CUDA, 16 bits, fla and Triton installed, torch outside its deterministic mode and, on compute capability 9, a Triton
    outside 3.4.0 to 3.7.0, with which its backward is wrong. Float32, a process set to torch only (`use_torch_backend`)
    and a device other than CUDA get "torch".
    """
    device = torch.device(device)
    ours = attention_choice("gated delta", device, dtype, head_dim, _error)
    if ours.backend == "triton" or device.type != "cuda" or is_torch_only():
        return ours
    why = why_no_fla(device, dtype)
    return (
        BackendChoice("fla", f"fla {version('fla-core')}; {ours.reason}")
        if why is None
        else BackendChoice("torch", f"{ours.reason}; {why}")
    )


def available(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the names of all backends that give right results for such tensors, the chosen one first.

    "triton" is listed only where it is chosen; "fla" also in a process set to torch only; "torch" always.
    """
    backends = [choose_backend(device, dtype, head_dim).backend]
    if why_no_fla(torch.device(device), dtype) is None:
        backends.append("fla")
    return list(dict.fromkeys([*backends, "torch"]))


def why_no_fla(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why flash-linear-attention cannot run on such tensors, or None when it can.

    It needs CUDA, 16-bit activations, installed fla and Triton, torch outside of its deterministic mode, and on compute
    capability 9 a Triton other than 3.4.0 to 3.7.0, which miscompile its backward. Nothing is run, and
    `use_torch_backend` is not considered.
    """
    why = dispatch.why_no_fla(device, dtype)
    if why is not None:
        return why
    major, minor = torch.cuda.get_device_capability(device)
    if not fla_is_right((major, minor), version("triton")):
        return f"fla gives wrong gradients on compute capability {major}.{minor} with Triton {version('triton')}"
    return None


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of `gated_delta` by `backend` against "torch" in float32.

    Compares the readout and the gradients. One row of 131 tokens, with 2 query heads and 1 KV head; the last state and
    its gradient are not compared.
    """
    return delta_rule_error(
        functools.partial(gated_delta, return_state=True), (1, 131, 2), device, dtype, head_dim, backend, seed
    )


def delta_rule_error(
    rule: Callable[..., Any], gamma: tuple[int, ...], device: torch.device, dtype: torch.dtype, head_dim: int, backend: str,
    seed: int,
) -> float:  # fmt: skip
    """Return the largest relative error of a delta rule's readout and gradients, against its "torch" in float32.

    Draws one row of 131 tokens with 2 query heads and 1 KV head. The loss is the sum of the readout times fixed normal
    numbers; the gradients are those of q, k, v and of the logits of both gates. An error is ||actual - expected|| /
    ||expected||; the result is NaN if one is.

    Args:
        rule: Function (q, k, v, log_gamma, beta, backend=) -> (readout, state).
        gamma: Shape of log_gamma: (1, 131, 2), or (1, 131, 2, head_dim) for a decay per channel.
        device: Device under test.
        dtype: Dtype under test, of q, k and v; gates are float32.
        head_dim: Head size.
        backend: Backend under test.
        seed: Seed of the random inputs.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1, 131, 2, head_dim), (1, 131, 1, head_dim), (1, 131, 1, head_dim), gamma, (1, 131, 2)]
    tensors = [torch.randn(shape, generator=draw).to(device) for shape in shapes]
    results = []
    for name, kind in ((backend, dtype), ("torch", torch.float32)):
        q, k, v = (x.to(dtype).to(kind).requires_grad_() for x in tensors[:3])
        log_gamma, beta = (x.clone().requires_grad_() for x in tensors[3:])
        with torch.enable_grad():
            r, _ = rule(q, k, v, functional.logsigmoid(log_gamma + 3.9), beta.sigmoid(), backend=name)
            grads = torch.autograd.grad((r.float() * tensors[0]).sum(), (q, k, v, log_gamma, beta))
        results.append([r, *grads])
    return max_relative_error(*results)


def fla_is_right(capability: tuple[int, int], triton: str) -> bool:
    """Return False where fla's backward is miscompiled: Hopper with Triton from 3.4.0 up to, not including, 3.7.1.

    True for every other compute capability or version.

    Args:
        capability: Compute capability (major, minor).
        triton: Version of Triton, such as "3.5.1"; a local suffix after "+" is ignored.
    """
    version = tuple(int(part) for part in triton.split("+")[0].split(".")[:3] if part.isdigit())
    return not (capability[0] == 9 and (3, 4, 0) <= version < (3, 7, 1))


def gated_delta_reference(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gamma_BTH: Tensor, beta_BTH: Tensor, *,
    initial_state: Tensor | None = None, normalize: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (readout [B, T, H, X], last state [B, H, X_v, X_k]) of `gated_delta`, computed token by token; slow.

    The readout has q's dtype, the state float32 (float64 for float64). Shapes of gates and state are not checked.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys.
        v_BTJX: Values.
        log_gamma_BTH: Natural logarithm of the decay.
        beta_BTH: Write strength.
        initial_state: [B, H, X_v, X_k]; None for zeros.
        normalize: False leaves keys and queries at their own length (diagnostics).
    """
    b, t, h, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_length(t)
    dtype = statistics_dtype(q_BTHX.dtype)
    q, k, v = q_BTHX.to(dtype), expand_kv(k_BTJX, h).to(dtype), expand_kv(v_BTJX, h).to(dtype)
    if normalize:
        q, k = functional.normalize(q, dim=-1, eps=NORM_FLOOR), functional.normalize(k, dim=-1, eps=NORM_FLOOR)
    state = q.new_zeros(b, h, d, d) if initial_state is None else initial_state.to(dtype)
    readouts = []
    for i in range(t):
        state = state * log_gamma_BTH[:, i].to(dtype).exp()[..., None, None]
        missing = v[:, i] - torch.einsum("bhvk,bhk->bhv", state, k[:, i])
        state = state + torch.einsum("bhv,bhk->bhvk", beta_BTH[:, i].to(dtype).unsqueeze(-1) * missing, k[:, i])
        readouts.append(torch.einsum("bhvk,bhk->bhv", state, q[:, i]))
    return torch.stack(readouts, 1).to(q_BTHX.dtype), state


def running_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Return the cumulative sums of x over an axis, each including its own element, in x's shape and dtype.

    In deterministic runs on CUDA they are a matrix product: the order in which torch's own cumsum adds there may
    change, so torch raises in deterministic mode.
    """
    exactly = x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
    return sum_by_ones(x.movedim(dim, -1)).movedim(-1, dim) if exactly else x.cumsum(dim)


def sum_by_ones(x: Tensor) -> Tensor:
    """Return the cumulative sums over the last axis, [..., C], as a product with a triangle of ones."""
    return x @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device).triu()


def in_chunks(x_BTHX: Tensor, chunk: int) -> Tensor:
    """Return x [B, T, H, X] as [B, H, N, C, X] with N = ceil(T / C), contiguous; C is `chunk`.

    The last chunk is padded by zeros, which as log decay, key and beta neither decay nor write.
    """
    missing = -x_BTHX.shape[1] % chunk
    padded = functional.pad(x_BTHX, (0, 0, 0, 0, 0, missing)) if missing else x_BTHX
    return padded.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4).contiguous()


def _chunked(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gamma_BTH: Tensor, beta_BTH: Tensor, chunk: int,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (readout in q's dtype, last state [B, H, X_v, X_k]) in plain torch, a chunk of tokens at a time.

    The state is float32 (float64 for float64). Within a chunk the writes come from one triangular solve; states pass
    from chunk to chunk. log_gamma is the natural log decay and beta the write strength of each token; keys and queries
    are scaled to unit length here; initial_state [B, H, X_v, X_k] or None for zeros. T is at least 1, and `chunk`, the
    tokens solved together, is cut to T.
    """
    b, t, h, d = q_BTHX.shape
    dtype = statistics_dtype(q_BTHX.dtype)
    chunk = min(chunk, t)
    n = -(-t // chunk)
    q = in_chunks(functional.normalize(q_BTHX.to(dtype), dim=-1, eps=NORM_FLOOR), chunk)
    k = in_chunks(expand_kv(functional.normalize(k_BTJX.to(dtype), dim=-1, eps=NORM_FLOOR), h), chunk)
    v = in_chunks(expand_kv(v_BTJX.to(dtype), h), chunk)
    decay = running_sum(in_chunks(log_gamma_BTH.to(dtype).unsqueeze(-1), chunk).squeeze(-1))
    beta = in_chunks(beta_BTH.to(dtype).unsqueeze(-1), chunk)

    # ratio[p, s] = g_p / g_s for s <= p, masked before exp so that the other half cannot overflow.
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    ratio = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    k_t = k.transpose(-1, -2)
    grown = decay.exp().unsqueeze(-1)
    # (I + beta A) U = beta (V - g K M0ᵀ): solve for both terms at once; the unit diagonal is implied and not read.
    solved = torch.linalg.solve_triangular(
        beta * ratio * (k @ k_t), torch.cat([beta * v, beta * grown * k], -1), upper=False, unitriangular=True
    )
    own, carried = solved.split(d, -1)
    last = decay[..., -1:]
    chunk_decay = last.exp().unsqueeze(-1)
    k_end_t = (k * (last - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    state = q.new_zeros(b, h, d, d) if initial_state is None else initial_state.to(dtype).transpose(-1, -2)
    states, writes = [], []
    for i in range(n):
        write = own[:, :, i] - carried[:, :, i] @ state
        states.append(state)
        writes.append(write)
        state = chunk_decay[:, :, i] * state + k_end_t[:, :, i] @ write
    r = (grown * q) @ torch.stack(states, 2) + (ratio * (q @ k_t)) @ torch.stack(writes, 2)
    r_BTHX = r.permute(0, 2, 3, 1, 4).reshape(b, n * chunk, h, d)[:, :t]
    return r_BTHX.to(q_BTHX.dtype), state.transpose(-1, -2)


def _fla(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gamma_BTH: Tensor, beta_BTH: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (readout in q's dtype, last state float32 [B, H, X_v, X_k]) by flash-linear-attention's kernels.

    log_gamma is the natural log decay and beta the write strength of each token; initial_state [B, H, X_v, X_k] or None
    for zeros. KV heads are repeated for all heads first. fla's autotuners are restricted (`pin_configs`).

    Raises:
        ValueError: The tensors are not 16-bit CUDA tensors.
    """
    if q_BTHX.device.type != "cuda" or q_BTHX.dtype not in SIXTEEN_BITS:
        raise ValueError(f"backend fla needs 16-bit CUDA tensors, got {q_BTHX.dtype} on {q_BTHX.device}; use torch")
    h = q_BTHX.shape[2]
    # fla keeps the state as [X_k, X_v]
    state = None if initial_state is None else initial_state.float().transpose(-1, -2).contiguous()
    k, v = expand_kv(k_BTJX, h), expand_kv(v_BTJX, h)
    r_BTHX, last, *_ = torch_op.fla_forward(q_BTHX, k, v, log_gamma_BTH.float(), beta_BTH.float(), state)
    return r_BTHX, last.transpose(-1, -2)
