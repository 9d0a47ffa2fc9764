"""Ops as the model calls them, by each available backend: gated attention, memories, and eager polar attention."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.attention.contextual.op import contextual_attention
from ...kernels.attention.forgetting import op as forgetting_op
from ...kernels.attention.polar.op import TINY
from ...kernels.attention.relative.op import relative_attention
from ...kernels.attention.threshold.op import threshold_attention
from ...kernels.attention.wall import op as wall_op
from ...kernels.channelwise_delta import op as channelwise
from ...kernels.dispatch import max_relative_error, self_test_failure
from ...kernels.gated_delta import op as gated_delta
from ...kernels.norms import statistics_dtype
from ...kernels.omega.chunk_loop import OrthogonalMode
from ...kernels.omega.op import Rates, choose_backend, first_state, omega, unit
from ...kernels.shapes import expand_kv, visible_mask
from ...model.memory.gated_delta import GAMMA_OFFSET, KDAConfig
from ...model.memory.omega import AtlasConfig, OmegaConfig

WALL_CLAMP, GATE_BIAS = 0.86, 6.0
"""Wall attention: clamp of a gate and initial bias, as the mixer has them."""
FLA = "fla"
BACKENDS = ("triton", FLA)
GLUON = "gluon"
"""Backend for Hopper GPUs."""


def forgetting(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, logit_BTH: Tensor, *, backend: str) -> Tensor:
    """Return forgetting attention [B, T, H, X] with gates sigmoid(logit), in the dtype of the backend's result.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys.
        v_BTJX: Values.
        logit_BTH: Logits of the forget gates, cast to float32.
        backend: "gluon", "triton" or "torch" of this package, or "fla", which must be installed.
    """
    log_gate = functional.logsigmoid(logit_BTH.float())
    if backend != FLA:
        return forgetting_op.forgetting_attention(q_BTHX, k_BTJX, v_BTJX, log_gate, backend=backend)
    o: Tensor = _fla("forgetting_attn").parallel_forgetting_attn(q_BTHX, k_BTJX, v_BTJX, log_gate)
    return o


def wall(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, logit_BTPX: Tensor, *, backend: str) -> Tensor:
    """Return wall attention [B, T, H, X] with gates sigmoid(logit + 6) under the mixer's clamp.

    The soft clamp maps the natural log of a gate into (-0.86, 0]. The bias 6 is the mixer's at initialisation.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys.
        v_BTJX: Values.
        logit_BTPX: Logits of the gates, per query head (P = H) or per KV head (P = J), cast to float32; "fla" gets them
            expanded to query heads.
        backend: "gluon", "triton" or "torch" of this package, or "fla", which must be installed.
    """
    log_gate = wall_op.soft_clamp(functional.logsigmoid(logit_BTPX.float() + GATE_BIAS), WALL_CLAMP)
    if backend != FLA:
        return wall_op.wall_attention(q_BTHX, k_BTJX, v_BTJX, log_gate, backend=backend)
    o: Tensor = _fla("wall_attn").parallel_wall_attn(q_BTHX, k_BTJX, v_BTJX, expand_kv(log_gate, q_BTHX.shape[2]))
    return o


def threshold(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, logit_BTH: Tensor, *, backend: str) -> Tensor:
    """Return threshold attention with decays sigmoid(logit); `backend` is one of this package's."""
    return threshold_attention(q_BTHX, k_BTJX, v_BTJX, functional.logsigmoid(logit_BTH.float()), backend=backend)


def contextual(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, vectors_PX: Tensor, *, backend: str) -> Tensor:
    """Return attention with contextual positions of the given vectors; `backend` is one of this package's."""
    return contextual_attention(q_BTHX, k_BTJX, v_BTJX, vectors_PX.float() / 8, backend=backend)


def relative(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, bias_HR: Tensor, *, backend: str) -> Tensor:
    """Return attention with a bias per head and distance; `backend` is one of this package's."""
    return relative_attention(q_BTHX, k_BTJX, v_BTJX, bias_HR.float(), backend=backend)


Gated = Callable[..., Tensor]


def gated_available(
    op: Gated, device: torch.device, head_dim: int, *, gates_tied: bool = False, without_fla: str | None = None
) -> dict[str, str | None]:
    """Return backend -> reason to leave it out; None means that it is usable.

    Keys are "gluon", "triton" and "fla". Triton and fla are usable if a self-test finds result and gradients in bf16
    close to torch's in float32; "gluon" if it is the backend that the op chooses on this device.

    Args:
        op: `forgetting` or `wall`.
        device: Device to test on.
        head_dim: Head size.
        gates_tied: True if wall's gates are per KV head.
        without_fla: Reason to leave out "fla" without a test, which may take minutes; None tests it.
    """
    if op is forgetting:
        choice = forgetting_op.choose_backend(device, torch.bfloat16, head_dim)
    else:
        choice = wall_op.choose_backend(device, torch.bfloat16, head_dim, WALL_CLAMP)
    reasons: dict[str, str | None] = {GLUON: None if choice.backend == GLUON else choice.reason}
    for backend in BACKENDS:
        if backend == FLA and without_fla is not None:
            reasons[backend] = without_fla
        elif backend == FLA and importlib.util.find_spec(FLA) is None:
            reasons[backend] = "flash-linear-attention is not installed"
        else:
            reasons[backend] = self_test_failure(
                f"{op.__name__} by {backend}", gated_error, op, device, head_dim, gates_tied, backend
            )
    return reasons


@functools.cache
def gated_error(
    op: Gated, device: torch.device, head_dim: int, gates_tied: bool, backend: str, *, seed: int = 0
) -> float:
    """Return the largest relative error of result and gradients in bf16, against "torch" in float32; cached.

    Inputs are random, of 1 row of 131 tokens with 2 query heads and 1 KV head. The loss is the sum of result x queries.

    Args:
        op: `forgetting` or `wall`.
        device: Device to test on.
        head_dim: Head size.
        gates_tied: True if wall's gates are per KV head.
        backend: Backend to test.
        seed: Seed of the inputs.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(1, 131, heads, head_dim) for heads in (2, 1, 1)]
    shapes.append((1, 131, 2) if op is forgetting else (1, 131, 1 if gates_tied else 2, head_dim))
    inputs = [torch.randn(shape, generator=draw).to(device, torch.bfloat16) for shape in shapes]
    results = []
    for name, kind in ((backend, torch.bfloat16), ("torch", torch.float32)):
        args = [x.detach().to(kind).requires_grad_() for x in inputs]
        with torch.enable_grad():
            y = op(*args, backend=name)
            results.append([y, *torch.autograd.grad((y.float() * inputs[0].float()).sum(), args)])
    return max_relative_error(*results)


def _fla(op: str) -> Any:
    return importlib.import_module(f"fla.ops.{op}")


# --- memories ---------------------------------------------------------------------------------------------------------


MEMORY_OPS = ("deltanet", "kda", "omega", "atlas")
OMEGA, ATLAS = OmegaConfig(), AtlasConfig()
"""Default settings, made at import time because the compiler must not trace it."""
TRITON, TORCH, COMPILED = "triton", "torch", "torch, compiled"


def memory_rates(op: str, heads: int, size: int) -> list[tuple[int, ...]]:
    """Return the shapes, after [B, T], of the logits that a memory op takes besides q, k and v, in order.

    `op` is "deltanet" (step size), "kda" (decay per channel, step size), "omega" (decay, step size, weight) or "atlas"
    (these and momentum), else KeyError; `size` the head size.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {
        "deltanet": [(heads,)],
        "kda": [(heads, size), (heads,)],
        "omega": [(heads,)] * 3,
        "atlas": [(heads,)] * 4,
    }
    return shapes[op]


def memory_variants(op: str, device: torch.device, size: int) -> dict[str, Callable[..., Any]]:
    """Return name -> variant of a memory op, as a function of q, k, v and the logits of `memory_rates`.

    "deltanet" has each available backend but "torch"; "kda" the chosen backend and "torch". "omega" and "atlas" have
    "triton" if it is chosen, then torch's operations twice: as "torch, compiled" and as "torch".

    Args:
        op: "deltanet", "kda", "omega" or "atlas".
        device: Device on which the variants will run.
        size: Head size.
    """
    if op == "deltanet":
        names = gated_delta.available(device, torch.bfloat16, size)
        return {str(name): _deltanet(str(name)) for name in names if name != TORCH}
    if op == "kda":
        chosen = channelwise.choose_backend(device, torch.bfloat16, size).backend
        return {name: _kda(name) for name in dict.fromkeys((chosen, TORCH))}
    config, orthogonal, slow, call = _omega_variant(op)
    backend = choose_backend(device, torch.bfloat16, size, config.window, config.chunk, orthogonal, slow).backend
    ours = {TRITON: _bind_backend(TRITON, call)} if backend == TRITON else {}
    return ours | dict.fromkeys((COMPILED, TORCH), _bind_backend(TORCH, call))


def memory_flops(op: str, size: int) -> float:
    """Return the FLOPs of the forward pass per token and head of that size.

    For size X, that is X (4 X + 384) for deltanet and kda, and 2 X² (2 V / chunk + 1) + 4 V X for others, with V =
    chunk + window - 1 of the default settings. Any op but deltanet, kda and omega counts as atlas.
    """
    if op in ("deltanet", "kda"):
        return size * (4.0 * size + 6 * 64)
    config = OMEGA if op == "omega" else ATLAS
    visible = config.chunk + config.window - 1
    return 2.0 * size * size * (2 * visible / config.chunk + 1) + 4.0 * visible * size


def _deltanet(backend: str) -> Callable[..., Any]:
    """Return the delta rule by a backend, as a function of q, k, v and the logits of beta.

    It is the gated delta rule without decay.
    """

    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Any:
        log_gamma = torch.zeros_like(beta, dtype=torch.float32)
        return gated_delta.gated_delta(q, k, v, log_gamma, beta.float().sigmoid(), backend=backend)

    return call


def _kda(backend: str) -> Callable[..., Any]:
    """Return the channelwise delta rule by a backend, as a function of q, k, v and the logits of decay and beta.

    The retention is sigmoid(decay logit + GAMMA_OFFSET), the step size sigmoid(logit of beta).
    """
    chunk = KDAConfig().chunk  # outside `call`, since the compiler cannot trace the validation of settings

    def call(q: Tensor, k: Tensor, v: Tensor, decay_logit: Tensor, beta: Tensor) -> Any:
        log_gamma = functional.logsigmoid(decay_logit.float() + GAMMA_OFFSET)
        r, _ = channelwise.channelwise_delta(q, k, v, log_gamma, beta.float().sigmoid(), chunk=chunk, backend=backend)
        return r

    return call


def _bind_backend(backend: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Tensor) -> Tensor:
        return function(backend, *args)

    return call


def _omega_variant(op: str) -> tuple[OmegaConfig, OrthogonalMode, bool, Callable[..., Tensor]]:
    """Return (default config, orthogonalisation of the update, has momentum, function of backend and inputs).

    `op` is "omega"; any other text gives atlas.
    """
    if op == "omega":
        return OMEGA, "none", False, _omega
    return ATLAS, ATLAS.orthogonal, True, _atlas


def _omega(
    backend: str, q: Tensor, k: Tensor, v: Tensor, keep_logit: Tensor, step_logit: Tensor, weight_logit: Tensor
) -> Tensor:
    return _run_omega(OMEGA, "none", backend, q, k, v, keep_logit, step_logit, weight_logit, None)


def _atlas(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep_logit: Tensor,
    step_logit: Tensor,
    weight_logit: Tensor,
    momentum_logit: Tensor,
) -> Tensor:
    """Return the values [B, T, H, X] read from an atlas memory that starts empty.

    Arguments as `_run_omega` with the default settings; the momentum comes as logits [B, T, H].
    """
    slow = functional.logsigmoid(momentum_logit.float() + ATLAS.momentum_offset)
    return _run_omega(ATLAS, ATLAS.orthogonal, backend, q, k, v, keep_logit, step_logit, weight_logit, slow)


def _run_omega(
    config: OmegaConfig, orthogonal: OrthogonalMode, backend: str, q: Tensor, k: Tensor, v: Tensor, keep_logit: Tensor,
    step_logit: Tensor, weight_logit: Tensor, log_momentum: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the values [B, T, H, X] read from an omega memory that starts empty.

    The retention is sigmoid(keep_logit + keep_offset), the step size sigmoid(step_logit + step_offset), the weight
    sigmoid(weight_logit) / window.

    Args:
        config: Settings of the memory.
        orthogonal: Treatment of the update.
        backend: Backend.
        q: Queries [B, T, H, X].
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        keep_logit: Logits [B, T, H] of the decay.
        step_logit: Logits [B, T, H] of the step size.
        weight_logit: Logits [B, T, H] of the weights inside the window.
        log_momentum: Logarithm of the momentum [B, T, H]; None without.
    """
    b, _, heads, size = q.shape
    rates = Rates(
        functional.logsigmoid(keep_logit.float() + config.keep_offset),
        (step_logit.float() + config.step_offset).sigmoid(),
        weight_logit.float().sigmoid() / config.window, log_momentum,
    )  # fmt: skip
    start = first_state(
        [torch.zeros(size, size, dtype=statistics_dtype(q.dtype), device=q.device)], b, heads, size, size, config.window
    )
    keys, values = expand_kv(k, heads), expand_kv(v, heads)
    read, _ = omega(
        unit(q), unit(keys), values, rates, start,
        window=config.window, chunk=config.chunk, orthogonal=orthogonal, backend=backend,
    )  # fmt: skip
    return read


# --- polar attention --------------------------------------------------------------------------------------------------


SQUARES = 7
"""Upper bound on float32 matrices [B, H, T, T] at the peak of a forward and backward pass (5.8 counted on H100)."""


def peak_bytes(b: int, h: int, t: int) -> int:
    """Return an upper bound on the bytes that eager polar attention allocates in a forward and backward pass.

    It is that of seven (SQUARES) float32 arrays [b, h, t, t], 28 b h t².

    Args:
        b: Batch size.
        h: Query heads.
        t: Tokens per row.
    """
    return SQUARES * 4 * b * h * t * t


def polar_attention_eager(
    q_BTHX: Tensor,
    k_BTJX: Tensor,
    v_BTJX: Tensor,
    null_base_H: Tensor,
    null_slope_H: Tensor,
    len_gain_H: Tensor,
    mag_beta_H: Tensor,
    v_null_HX: Tensor,
    *,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return polar attention without blocks and without recomputation; autograd keeps every T x T matrix.

    Products have the dtype of q, everything else is float32 (float64 for float64 inputs).

    Args:
        q_BTHX: Queries [B, T, H, X].
        k_BTJX: Keys [B, T, J, X]; query head h reads KV head h // (H / J).
        v_BTJX: Values [B, T, J, X].
        null_base_H: Base of the null key's score per head.
        null_slope_H: Slope of the null key's score per head, before softplus.
        len_gain_H: Length gain per head, before softplus.
        mag_beta_H: Magnitude gain per head, before softplus.
        v_null_HX: Value of the null key per head.
        window: Number of keys that a query sees, its own included; None for all before it.

    Returns:
        Direction [B, T, H, X] of unit length in the dtype of q, and magnitude [B, T, H], in [0, 1), in float32 (float64
        for float64 inputs). The magnitude is tanh(softplus(mag_beta) ln(1 + n_eff r)), with n_eff the effective number
        of real keys and r their weight against the null key.

    Source:
        docs/reference/mechanisms.md, "Polar attention".
    """
    _, t, h, d = q_BTHX.shape
    dtype = torch.promote_types(q_BTHX.dtype, torch.float32)
    n_T1 = torch.arange(1, t + 1, dtype=dtype, device=q_BTHX.device)[:, None].clamp(max=window or t)
    temp_TH = 1 + functional.softplus(len_gain_H.to(dtype)) * n_T1.log()
    null_TH = null_base_H.to(dtype) + functional.softplus(null_slope_H.to(dtype)) * n_T1.log1p().sqrt()
    q_BHTX, k_BHTX, v_BHTX = (x.transpose(1, 2) for x in (q_BTHX, expand_kv(k_BTJX, h), expand_kv(v_BTJX, h)))
    scores_BHTS = (q_BHTX @ k_BHTX.mT).to(dtype) * (temp_TH.t()[..., None] / math.sqrt(d))
    visible_TS = visible_mask(0, t, 0, window, q_BTHX.device)
    scores_BHTS = scores_BHTS.masked_fill(~visible_TS, -math.inf)
    null_HT1 = (temp_TH * null_TH).t()[..., None]
    null_BHT1 = null_HT1.expand(scores_BHTS.shape[0], h, t, 1)
    weights = torch.softmax(torch.cat([scores_BHTS, null_BHT1], -1), -1)
    real_BHTS, null_BHT1 = weights[..., :-1], weights[..., -1:]
    s_BHTX = (real_BHTS.to(v_BTJX.dtype) @ v_BHTX).to(dtype) + null_BHT1 * v_null_HX.to(dtype)[:, None]
    c_BHTX = s_BHTX / torch.linalg.vector_norm(s_BHTX, dim=-1, keepdim=True).clamp(min=TINY)
    sum_BHT = real_BHTS.sum(-1)
    # (sum p)^3 / (sum p^2 (sum p + p_null)) of unnormalised weights; normalised ones sum to 1 with the null
    m_eff_BHT = sum_BHT**3 / real_BHTS.square().sum(-1)
    mag_BHT = torch.tanh(functional.softplus(mag_beta_H.to(dtype))[:, None] * m_eff_BHT.log1p())
    return c_BHTX.transpose(1, 2).to(q_BTHX.dtype), mag_BHT.transpose(1, 2)
