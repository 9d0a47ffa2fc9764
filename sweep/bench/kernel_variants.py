"""Attention with gates as the model calls it, by our kernels and by flash-linear-attention's, each tried before it is timed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.attention.contextual.op import contextual_attention
from ...kernels.attention.forgetting import op as forgetting_op
from ...kernels.attention.relative.op import relative_attention
from ...kernels.attention.threshold.op import threshold_attention
from ...kernels.attention.wall import op as wall_op
from ...kernels.dispatch import failure, worst
from ...kernels.shapes import expand_kv
from ...model.mixers.wall import soft_clamp

FALL, OPEN = 0.86, 6.0
"""The mixer's limit of a gate and its first bias."""
FLA = "fla"
BACKENDS = ("triton", FLA)
GLUON = "gluon"
"""On Hopper."""


def forgetting(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, logit_BTH: Tensor, *, backend: str) -> Tensor:
    """Forgetting attention of gates sigmoid(logit); `backend` is one of ours, or "fla"."""
    log_gate = functional.logsigmoid(logit_BTH.float())
    if backend != FLA:
        return forgetting_op.forgetting_attention(q_BTHX, k_BTJX, v_BTJX, log_gate, backend=backend)
    o: Tensor = _fla("forgetting_attn").parallel_forgetting_attn(q_BTHX, k_BTJX, v_BTJX, log_gate)
    return o


def wall(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, logit_BTPX: Tensor, *, backend: str) -> Tensor:
    """Wall attention of gates that are sigmoid(logit + 6) under the mixer's clamp; fla has gates for query heads alone."""
    log_gate = soft_clamp(functional.logsigmoid(logit_BTPX.float() + OPEN), FALL)
    if backend != FLA:
        return wall_op.wall_attention(q_BTHX, k_BTJX, v_BTJX, log_gate, backend=backend)
    o: Tensor = _fla("wall_attn").parallel_wall_attn(q_BTHX, k_BTJX, v_BTJX, expand_kv(log_gate, q_BTHX.shape[2]))
    return o


def threshold(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, logit_BTH: Tensor, *, backend: str) -> Tensor:
    """Threshold attention of decays sigmoid(logit); `backend` is one of ours, for there is no other."""
    return threshold_attention(q_BTHX, k_BTJX, v_BTJX, functional.logsigmoid(logit_BTH.float()), backend=backend)


def contextual(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, vectors_PX: Tensor, *, backend: str) -> Tensor:
    """Contextual positions of those vectors; `backend` is one of ours, for there is no other."""
    return contextual_attention(q_BTHX, k_BTJX, v_BTJX, vectors_PX.float() / 8, backend=backend)


def relative(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, bias_HR: Tensor, *, backend: str) -> Tensor:
    """A number for each head and distance; `backend` is one of ours, for there is no other."""
    return relative_attention(q_BTHX, k_BTJX, v_BTJX, bias_HR.float(), backend=backend)


Gated = Callable[..., Tensor]


def available(
    op: Gated, device: torch.device, head_dim: int, *, gates_tied: bool = False, without_fla: str | None = None
) -> dict[str, str | None]:
    """Backend -> why it is left out, None where it is right: result and gradients near torch's in float32.

    `without_fla`, a reason, leaves out fla's without a trial, which may take minutes.
    """
    if op is forgetting:
        chosen = forgetting_op.choose_backend(device, torch.bfloat16, head_dim)
    else:
        chosen = wall_op.choose_backend(device, torch.bfloat16, head_dim, FALL)
    why: dict[str, str | None] = {GLUON: None if chosen.backend == GLUON else chosen.reason}
    for backend in BACKENDS:
        if backend == FLA and without_fla is not None:
            why[backend] = without_fla
        elif backend == FLA and importlib.util.find_spec(FLA) is None:
            why[backend] = "flash-linear-attention is not installed"
        else:
            why[backend] = failure(f"{op.__name__} by {backend}", error, op, device, head_dim, gates_tied, backend)
    return why


@functools.cache
def error(op: Gated, device: torch.device, head_dim: int, gates_tied: bool, backend: str, *, seed: int = 0) -> float:
    """Largest relative error in bf16, against "torch" in float32."""
    draw = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(1, 131, heads, head_dim) for heads in (2, 1, 1)]
    shapes.append((1, 131, 2) if op is forgetting else (1, 131, 1 if gates_tied else 2, head_dim))
    made = [torch.randn(shape, generator=draw).to(device, torch.bfloat16) for shape in shapes]
    found = []
    for name, kind in ((backend, torch.bfloat16), ("torch", torch.float32)):
        args = [x.detach().to(kind).requires_grad_() for x in made]
        with torch.enable_grad():
            y = op(*args, backend=name)
            found.append([y, *torch.autograd.grad((y.float() * made[0].float()).sum(), args)])
    return worst(*found)


def _fla(op: str) -> Any:
    return importlib.import_module(f"fla.ops.{op}")
