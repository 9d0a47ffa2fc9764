"""Soft-capped cross-entropy of rows of logits, with the gradient written over the logits.

N tokens, V vocabulary. See docs/reference/mechanisms.md, "Backbone". Two roots and two exponentials per element. Each logit is
read twice, the second time from the cache, and written once. Agrees with the formula in float32 up to the rounding of
the exponential, 2e-6.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
SAFE_CAP = 60.0
"""Largest soft cap without a running maximum: exp(60) times any vocabulary fits into float32."""

WIDE_VOCABULARY = 16_384
"""Number of logits of a row from which on the rows in flight outgrow the cache."""

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _capped_rows(
    z_ptr, target_ptr, loss_ptr, V,
    CAP: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, SAFE: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Store the loss of one token in nats, and with GRADIENT overwrite its logits by the gradient of that loss.

    Grid: (N,), one row of V logits per program. Sums are float32 in units of log 2.

    Args:
        z_ptr: Contiguous raw logits [N, V]; overwritten with GRADIENT, in their own dtype.
        target_ptr: int64 [N]; a negative target gives loss 0 and gradient 0.
        loss_ptr: float32 [N], written.
        V: Vocabulary.
        CAP: constexpr, soft cap, z -> CAP z / sqrt(z^2 + CAP^2), read only when CAPPED.
        CAPPED: constexpr bool, True for soft-capped logits.
        BLOCK: constexpr, logits read at a time.
        SAFE: constexpr bool, True when the cap makes a running maximum unnecessary.
        GRADIENT: constexpr bool, True to overwrite the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * V
    at = tl.arange(0, BLOCK)
    # each lane keeps its own sum (and maximum) until the end of the row
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK):
        inside = start + at < V
        z = tl.load(z_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        y = z * _LOG2E
        if CAPPED:
            y = z * (CAP * _LOG2E * tl.rsqrt(z * z + CAP * CAP))
        if SAFE:
            row_sum += tl.where(inside, tl.exp2(y), 0.0)
        else:
            higher = tl.maximum(row_max, tl.where(inside, y, float("-inf")))
            # a lane without an element yet has no maximum to subtract
            base = tl.where(higher == float("-inf"), 0.0, higher)
            row_sum = row_sum * tl.exp2(row_max - base) + tl.where(inside, tl.exp2(y - base), 0.0)
            row_max = higher
    if SAFE:
        lse = tl.log2(tl.sum(row_sum, 0))
    else:
        highest = tl.max(row_max, 0)
        lse = highest + tl.log2(tl.sum(row_sum * tl.exp2(row_max - highest), 0))
    target = tl.load(target_ptr + row)
    counts = target >= 0
    target_logit = tl.load(z_ptr + tl.where(counts, target, 0)).to(tl.float32)
    target_logit = (
        target_logit * (CAP * _LOG2E * tl.rsqrt(target_logit * target_logit + CAP * CAP))
        if CAPPED
        else target_logit * _LOG2E
    )
    # where the target is almost certain, rounding may put its logit above the log-sum-exp
    tl.store(loss_ptr + row, tl.where(counts, tl.maximum(lse - target_logit, 0.0) / _LOG2E, 0.0))
    if GRADIENT:
        # with an infinite log-sum-exp every exponential is zero
        lse = tl.where(counts, lse, float("inf"))
        # every lane must have read the target's logit before one of them overwrites it
        tl.debug_barrier()
        for start in tl.range(0, V, BLOCK):
            inside = start + at < V
            z = tl.load(z_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
            if CAPPED:
                slope = CAP * tl.rsqrt(z * z + CAP * CAP)
                d = tl.exp2(z * (slope * _LOG2E) - lse) - tl.where(start + at == target, 1.0, 0.0)
                d = d * slope * slope * slope
            else:
                d = tl.exp2(z * _LOG2E - lse) - tl.where(start + at == target, 1.0, 0.0)
            tl.store(z_ptr + start + at, d.to(z_ptr.dtype.element_ty), mask=inside)


def rows(z_NV: Tensor, targets_N: Tensor, cap: float, gradient: bool) -> Tensor:
    """Return the losses in nats, float32 [N], 0 where the target is negative.

    Args:
        z_NV: Contiguous raw logits on a GPU; with `gradient` overwritten by the gradient of the summed losses.
        targets_N: int64 targets below V, which is not checked.
        cap: Soft cap, z -> cap z / sqrt(z^2 + cap^2); infinity for none.
        gradient: True to overwrite `z_NV`.
    """
    n, v = z_NV.shape
    capped = cap < math.inf
    losses_N = torch.empty(n, device=z_NV.device, dtype=torch.float32)
    _capped_rows[(n,)](
        z_NV,
        targets_N,
        losses_N,
        v,
        CAP=float(cap) if capped else 0.0,
        CAPPED=capped,
        BLOCK=4096,
        SAFE=cap <= SAFE_CAP,
        GRADIENT=gradient,
        # fewer rows in flight, so that more of them is still cached at the second read
        num_warps=32 if v >= WIDE_VOCABULARY else 8,
    )
    return losses_N
