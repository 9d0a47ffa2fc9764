"""Gates that mixers read from their block's input, or from their keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.norms import statistics_dtype


class Gate(nn.Module):
    """logsigmoid(W x + b) in the statistics' type; W starts normal with the deviation `std`, b at `offset`. Without biases b stays: it says how much a gate keeps.

    x is [B, T, groups * inputs], and each group has an equal share of the outputs.
    """

    def __init__(self, inputs: int, outputs: int, *, std: float, offset: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)
        self.offset = nn.Parameter(torch.full((outputs,), offset))
        self.groups = groups

    def forward(self, x_BTD: Tensor) -> Tensor:
        dtype, weight = statistics_dtype(x_BTD.dtype), self.weight.to(x_BTD.dtype)
        if self.groups == 1:
            logit = functional.linear(x_BTD, weight)
        else:
            apart = x_BTD.unflatten(-1, (self.groups, -1))
            logit = torch.einsum("btgx,gnx->btgn", apart, weight.unflatten(0, (self.groups, -1))).flatten(2)
        return functional.logsigmoid(logit.to(dtype) + self.offset.to(dtype))
