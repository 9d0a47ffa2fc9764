"""Gated activations of the MLP: squared ReLU and swish gates with their own backward.

See docs/reference/mechanisms.md, "Backbone".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def squared_relu_gate(ag: Tensor) -> Tensor:
    """Return g relu(a)^2 of [a | g], the halves of the last axis: [..., 2F] -> [..., F] in the same dtype.

    Computed in ag's dtype. Differentiable; only the input is saved for the backward.

    Raises:
        ValueError: The last axis is odd.
    """
    if ag.shape[-1] % 2:
        raise ValueError(f"the last axis must have an even number of entries (two halves), got {ag.shape[-1]}")
    return _SquaredReluGate.apply(ag)


def swish_gate(ag: Tensor) -> Tensor:
    """Return g silu(a) of [a | g], the halves of the last axis: [..., 2F] -> [..., F] in the same dtype.

    silu(a) = a sigmoid(a), computed in ag's dtype. Differentiable; only the input is saved for the backward.

    Raises:
        ValueError: The last axis is odd.
    """
    if ag.shape[-1] % 2:
        raise ValueError(f"the last axis must have an even number of entries (two halves), got {ag.shape[-1]}")
    return _SwishGate.apply(ag)


def swish_gate_reference(ag: Tensor) -> Tensor:
    """Return `swish_gate` of [a | g] from plain operations, with autograd's own backward."""
    a, gate = ag.chunk(2, -1)
    return gate * a * torch.sigmoid(a)


def squared_relu_gate_reference(ag: Tensor) -> Tensor:
    """Return `squared_relu_gate` of [a | g] from plain operations, with autograd's own backward."""
    a, gate = ag.chunk(2, -1)
    return gate * functional.relu(a) ** 2


def squared_relu_gate_forward(ag: Tensor) -> Tensor:
    """Return `squared_relu_gate` of [a | g], [..., 2F] -> [..., F], without a gradient."""
    a, gate = ag.chunk(2, -1)
    positive = a.clamp(min=0)
    return (positive * gate).mul_(positive)


def squared_relu_gate_backward(ag: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of [a | g], a new tensor [..., 2F] in ag's dtype.

    With dy the gradient of the result: d_a = 2 relu(a) g dy and d_g = relu(a)^2 dy.

    Args:
        ag: Input of `squared_relu_gate`; its last axis is even, which is not checked.
        dy: Gradient of the result [..., F], of ag's dtype.
    """
    a, gate = ag.chunk(2, -1)
    out = torch.empty_like(ag)
    d_a, d_gate = out.chunk(2, -1)
    positive = a.clamp(min=0)
    scaled = positive * dy
    d_gate.copy_(positive.mul_(scaled))
    d_a.copy_(scaled.mul_(gate).mul_(2))
    return out


class _SquaredReluGate(torch.autograd.Function):
    """Autograd function of `squared_relu_gate`."""

    @staticmethod
    def forward(ctx: Any, ag: Tensor) -> Tensor:
        ctx.save_for_backward(ag)
        return squared_relu_gate_forward(ag)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (ag,) = ctx.saved_tensors
        return squared_relu_gate_backward(ag, grads[0])


class _SwishGate(torch.autograd.Function):
    """Autograd function of `swish_gate`."""

    @staticmethod
    def forward(ctx: Any, ag: Tensor) -> Tensor:
        ctx.save_for_backward(ag)
        a, gate = ag.chunk(2, -1)
        return functional.silu(a).mul_(gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient of [a | g], [..., 2F], from that of the result, [..., F]."""
        (ag,) = ctx.saved_tensors
        a, gate = ag.chunk(2, -1)
        out = torch.empty_like(ag)
        d_a, d_gate = out.chunk(2, -1)
        sigmoid = torch.sigmoid(a)
        d_gate.copy_(sigmoid * a * grads[0])
        # silu'(a) = s (1 + a (1 - s)) with s = sigmoid(a)
        d_a.copy_((1 - sigmoid).mul_(a).add_(1).mul_(sigmoid).mul_(gate).mul_(grads[0]))
        return out
