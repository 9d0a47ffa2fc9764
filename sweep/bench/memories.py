"""Memories as the model calls them, their rates read from logits as there, by every backend that can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.fla_configs import channelwise
from ...kernels.gated_delta.op import choose_backend, gated_delta
from ...kernels.norms import statistics_dtype
from ...kernels.omega.chunk_loop import Steps
from ...kernels.omega.op import Rates, first_state, omega, unit
from ...kernels.shapes import expand_kv
from ...model.memory.gated_delta import GAMMA_OFFSET, KDAConfig
from ...model.memory.omega import AtlasConfig, OmegaConfig

OPS = ("deltanet", "kda", "omega", "atlas")
OMEGA, ATLAS = OmegaConfig(), AtlasConfig()
"""Their defaults; made here, where no compiler looks on."""
TRITON, TORCH, COMPILED = "triton", "torch", "torch, compiled"


def rates(op: str, heads: int, size: int) -> list[tuple[int, ...]]:
    """What stands behind [B, T] in the shape of each of the op's rates."""
    shapes: dict[str, list[tuple[int, ...]]] = {
        "deltanet": [(heads,)],
        "kda": [(heads, size), (heads,)],
        "omega": [(heads,)] * 3,
        "atlas": [(heads,)] * 4,
    }
    return shapes[op]


def variants(op: str, device: torch.device, size: int) -> dict[str, Callable[..., Any]]:
    """By name what there is on that device: our kernels, our references and, where it can be taken, flash-linear-attention."""
    if op == "deltanet":
        names = gated_delta.available(device, torch.bfloat16, size)
        return {str(name): _deltanet(str(name)) for name in names if name != TORCH}
    if op == "kda":
        chosen = channelwise.choose_backend(device, torch.bfloat16, size).backend
        return {name: _kda(name) for name in dict.fromkeys((chosen, TORCH))}
    config, orthogonal, slow, call = _stepping(op)
    backend = choose_backend(device, torch.bfloat16, size, config.window, config.chunk, orthogonal, slow).backend
    ours = {TRITON: _by(TRITON, call)} if backend == TRITON else {}
    return ours | dict.fromkeys((COMPILED, TORCH), _by(TORCH, call))


def flops(op: str, size: int) -> float:
    """Of the forward pass, for a token and head."""
    if op in ("deltanet", "kda"):
        return size * (4.0 * size + 6 * 64)
    config = OMEGA if op == "omega" else ATLAS
    seen = config.chunk + config.window - 1
    return 2.0 * size * size * (2 * seen / config.chunk + 1) + 4.0 * seen * size


def _deltanet(backend: str) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Any:
        kept = torch.zeros_like(beta, dtype=torch.float32)
        return gated_delta.gated_delta(q, k, v, kept, beta.float().sigmoid(), backend=backend)

    return call


def _kda(backend: str) -> Callable[..., Any]:
    chunk = KDAConfig().chunk  # settings are checked here, which no compiler looks into

    def call(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, beta: Tensor) -> Any:
        log_gamma = functional.logsigmoid(keep.float() + GAMMA_OFFSET)
        r, _ = channelwise.channelwise_delta(q, k, v, log_gamma, beta.float().sigmoid(), chunk=chunk, backend=backend)
        return r

    return call


def _by(backend: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Tensor) -> Tensor:
        return function(backend, *args)

    return call


def _stepping(op: str) -> tuple[OmegaConfig, Steps, bool, Callable[..., Tensor]]:
    """(its defaults, what is done to a step, whether it has a momentum, its call behind a backend's name)."""
    if op == "omega":
        return OMEGA, "none", False, _omega
    return ATLAS, ATLAS.orthogonal, True, _atlas


def _omega(backend: str, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, step: Tensor, weight: Tensor) -> Tensor:
    return _stepped(OMEGA, "none", backend, q, k, v, keep, step, weight, None)


def _atlas(
    backend: str, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, step: Tensor, weight: Tensor, momentum: Tensor
) -> Tensor:
    slow = functional.logsigmoid(momentum.float() + ATLAS.momentum_offset)
    return _stepped(ATLAS, ATLAS.orthogonal, backend, q, k, v, keep, step, weight, slow)


def _stepped(
    config: OmegaConfig, orthogonal: Steps, backend: str, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, step: Tensor,
    weight: Tensor, momentum: Tensor | None,
) -> Tensor:  # fmt: skip
    b, _, heads, size = q.shape
    rates = Rates(
        functional.logsigmoid(keep.float() + config.keep_offset), (step.float() + config.step_offset).sigmoid(),
        weight.float().sigmoid() / config.window, momentum,
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
