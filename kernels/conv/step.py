"""Causal convolutions one token at a time, from the inputs before it (docs/decoding.md).

B texts, C channels, W taps, R texts that a table has rows for.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..choice import Choice, constant, failure, triton_or_torch, why_no_triton, worst


def conv_step(
    x_BC: Tensor,
    tails_RWC: Tensor,
    slots_B: Tensor,
    w_CW: Tensor,
    residual: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """What `causal_conv` gives at the token after those whose inputs are in the table, [B, C] of x's type.

    `tails` [R, W - 1, C] holds the last W - 1 inputs of each text, zeros before its start, and has x among them afterwards;
    `slots` int64 says which row each text has, `backend` None is what `choose_backend` says. Raises ValueError when shapes
    disagree.
    """
    taps = w_CW.shape[1]
    if x_BC.ndim != 2 or tails_RWC.shape[1:] != (taps - 1, x_BC.shape[1]) or w_CW.shape[0] != x_BC.shape[1]:
        raise ValueError(
            f"x must be [B, C], w [C, W] and the tails [R, W - 1, C], got {tuple(x_BC.shape)}, {tuple(w_CW.shape)}, {tuple(tails_RWC.shape)}"
        )
    if (backend or choose_backend(x_BC.device, x_BC.dtype).backend) == "triton":
        y: Tensor = _kernels().step(x_BC, tails_RWC, slots_B, w_CW, residual=residual)
        return y
    seen_BWC = torch.cat([tails_RWC[slots_B], x_BC[:, None]], 1)
    tails_RWC.index_copy_(0, slots_B, seen_BWC[:, 1:])
    w_WC = w_CW.t()
    y_BC = x_BC * (w_WC[-1] + 1 if residual else w_WC[-1])
    for back in range(1, taps):
        y_BC.addcmul_(seen_BWC[:, taps - 1 - back], w_WC[taps - 1 - back])
    return y_BC


def tail_of(x_TC: Tensor, taps: int) -> Tensor:
    """The last W - 1 inputs of a text, [W - 1, C], zeros before its start."""
    wanted = taps - 1
    last = x_TC[max(0, len(x_TC) - wanted) :]
    return torch.cat([last.new_zeros(wanted - len(last), x_TC.shape[1]), last])


@constant
def choose_backend(device: torch.device | str, dtype: torch.dtype) -> Choice:
    """What `conv_step` takes for such tensors."""
    device = torch.device(device)
    return triton_or_torch(why_no_triton(device, dtype) or failure("the convolution step", _error, device, dtype))


@functools.cache
def _error(device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative error of a few outputs and of the tails after them, against "torch" in float32."""
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=draw).to(device, dtype) for shape in ((3, 2, 300), (300, 4)))
    slots = torch.tensor([2, 0], device=device)
    found = []
    for name, kind in (("triton", dtype), ("torch", torch.float32)):
        tails = torch.zeros(3, 3, 300, dtype=kind, device=device)
        parts = [conv_step(row, tails, slots, w.to(kind), residual=True, backend=name) for row in x.to(kind)]
        found.append([*parts, tails[slots]])
    return worst(*found)


def _kernels() -> Any:
    return importlib.import_module(".step_triton", __package__)
