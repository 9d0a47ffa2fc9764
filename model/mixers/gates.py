"""Gates that mixers project from their block's input or from their keys.

Letters of shapes: B batch, T length, D inputs, H query heads, X head size, S cached keys, P heads that have gates.
"""

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
    """Projection to log gates: logsigmoid(W x + b), in float32 (float64 for float64).

    W starts normal with standard deviation `std`, b at `offset`. b exists even in networks without biases, because it
    sets the gate's initial value. `Backbone.init_weights` leaves both as they are.
    """

    def __init__(self, inputs: int, outputs: int, *, std: float, offset: float) -> None:
        """Create W [outputs, inputs], drawn from torch's global generator, and b [outputs].

        Args:
            inputs: input channels.
            outputs: gates.
            std: standard deviation of W's initial values.
            offset: initial value of b.
        """
        super().__init__()
        # in place, because a product on the meta device (used to count sizes) imports torch's compiler
        self.weight = nn.Parameter(torch.randn(outputs, inputs).mul_(std))
        self.offset = nn.Parameter(torch.full((outputs,), offset))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return natural log gates logsigmoid(W x + b) <= 0, [B, T, outputs], of inputs [B, T, D].

        The product has x's type, the rest is float32 (float64 for float64).
        """
        dtype = statistics_dtype(x_BTD.dtype)
        logit = functional.linear(x_BTD, self.weight.to(x_BTD.dtype))
        return functional.logsigmoid(logit.to(dtype) + self.offset.to(dtype))


def cumulative_log_gate(log_gate_BTP: Tensor, before: PreviousToken | None) -> Tensor:
    """Return the cumulative sum of log gates up to each token, its own included, float64 [B, T, P, ...].

    Args:
        log_gate_BTP: log gates [B, T, P, ...] of T consecutive tokens.
        before: cached entries of the token before the first one, whose "fall" (its cumulative sum) the sums continue;
            None: start from 0.
    """
    fall = running_sum(log_gate_BTP)
    return fall if before is None else fall + before("fall")[:, None]


def decayed_attention(scores_BHS: Tensor, cache: KVView) -> Tensor:
    """Return the attention output [B, H, X] of the new tokens, whose scores decay by the log gates since each key.

    The gates of the tokens after a key, up to the new one, add to its score; the key's own does not. Softmax runs over
    the keys that the cache's window shows; a padding row gives 0. The result has the values' type.

    Args:
        scores_BHS: scaled scores of the new tokens with all cached keys.
        cache: cached entries; "fall" is the cumulative log gate [.., H] and "v" the values.
    """
    fall_BSH = cache.gather("fall")
    current_B1H = fall_BSH.gather(1, cache.places.view(-1, 1, 1).expand(-1, 1, fall_BSH.shape[2]))
    fade_BHS = (current_B1H - fall_BSH).transpose(1, 2)
    seen_BS = cache.seen
    # entries of hidden keys are arbitrary
    logits_BHS = scores_BHS + torch.where(seen_BS[:, None], fade_BHS, 0.0).to(scores_BHS.dtype)
    return row_attention(logits_BHS, cache.gather("v"), seen_BS)
