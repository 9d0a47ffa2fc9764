"""Gates that mixers read from their block's input, or from their keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.attention.scored import running_sum
from ...kernels.norms import statistics_dtype
from ...kernels.paged.single_query import row_attention
from ..bases import PreviousToken
from ..kv_cache import KVView


class Gate(nn.Module):
    """logsigmoid(W x + b) in the statistics' type; W starts normal with the deviation `std`, b at `offset`. Without biases b stays: it says how much a gate keeps.

    x is [B, T, groups * inputs], and each group has an equal share of the outputs.
    """

    def __init__(self, inputs: int, outputs: int, *, std: float, offset: float, groups: int = 1) -> None:
        super().__init__()
        # in place, since a product on the meta device, where sizes are counted, imports torch's compiler
        self.weight = nn.Parameter(torch.randn(outputs, inputs).mul_(std))
        self.offset = nn.Parameter(torch.full((outputs,), offset))
        self.groups = groups

    def forward(self, x_BTD: Tensor) -> Tensor:
        dtype, weight = statistics_dtype(x_BTD.dtype), self.weight.to(x_BTD.dtype)
        if self.groups == 1:
            logit = functional.linear(x_BTD, weight)
        else:
            grouped = x_BTD.unflatten(-1, (self.groups, -1))
            logit = torch.einsum("btgx,gnx->btgn", grouped, weight.unflatten(0, (self.groups, -1))).flatten(2)
        return functional.logsigmoid(logit.to(dtype) + self.offset.to(dtype))


def cumulative_log_gate(log_gate_BTP: Tensor, before: PreviousToken | None) -> Tensor:
    """Sum of the gates up to each token, float64 [B, T, P, ...], going on from what was kept of the token before."""
    fall = running_sum(log_gate_BTP)
    return fall if before is None else fall + before("fall")[:, None]


def decayed_attention(scores_BHS: Tensor, cache: KVView) -> Tensor:
    """Attention of the new tokens, [B, H, X], whose scores fade by what every gate since the key says."""
    fall_BSH = cache.gather("fall")
    current_B1H = fall_BSH.gather(1, cache.places.view(-1, 1, 1).expand(-1, 1, fall_BSH.shape[2]))
    fade_BHS = (current_B1H - fall_BSH).transpose(1, 2)
    seen_BS = cache.seen
    # what is hidden may be any number
    logits_BHS = scores_BHS + torch.where(seen_BS[:, None], fade_BHS, 0.0).to(scores_BHS.dtype)
    return row_attention(logits_BHS, cache.gather("v"), seen_BS)
