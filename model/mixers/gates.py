"""Gates that mixers read from their block's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.norms import statistics_dtype


class Gate(nn.Module):
    """logsigmoid(W x + b) in the statistics' type; W starts normal with the deviation `std`, b at `offset`. Without biases b stays: it says how much a gate keeps."""

    def __init__(self, inputs: int, outputs: int, *, std: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)
        self.offset = nn.Parameter(torch.full((outputs,), offset))

    def forward(self, x_BTD: Tensor) -> Tensor:
        dtype = statistics_dtype(x_BTD.dtype)
        logit = functional.linear(x_BTD, self.weight.to(x_BTD.dtype)).to(dtype) + self.offset.to(dtype)
        return functional.logsigmoid(logit)
