"""Device code that the attention kernels in Triton share: visible keys, bounds of tiles, an online softmax step.

M queries of a tile, S its keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY = 1e-6
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634
HIDDEN = -1e30


@triton.jit
def visible(p_M, n_S, TK, window, WINDOWED: tl.constexpr):
    # queries may stand behind the last key
    seen = n_S[None, :] <= tl.minimum(p_M, TK - 1)[:, None]
    if WINDOWED:
        seen = seen & (n_S[None, :] > p_M[:, None] - window)
    return seen


@triton.jit
def bounds(m0, T, window, BM: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """Tiles of keys [first, last) of a tile of queries; from `unmasked_to` on and before `unmasked_from` some pairs are hidden."""
    last = tl.cdiv(tl.minimum(m0 + BM, T), BN)
    unmasked_to = (m0 + 1) // BN
    first = 0
    unmasked_from = 0
    if WINDOWED:
        first = tl.maximum(0, m0 - window + 1) // BN
        unmasked_from = tl.maximum(first, tl.cdiv(tl.maximum(0, m0 + BM - window), BN))
    unmasked_to = tl.maximum(unmasked_to, first)
    unmasked_from = tl.minimum(unmasked_from, unmasked_to)
    return first, unmasked_from, unmasked_to, last


@triton.jit
def query_bounds(n0, T, window, BM: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """Queries first <= . < end that see a key of a tile; those of whole_from <= . < whole_to, in whole tiles, see all of them."""
    # queries at m see key n when n <= m < n + window
    first = n0 // BM * BM
    end = T
    unmasked_from = tl.cdiv(n0 + BN - 1, BM) * BM
    unmasked_to = T // BM * BM
    if WINDOWED:
        end = tl.minimum(T, n0 + BN - 1 + window)
        unmasked_to = tl.minimum(unmasked_to, (n0 + window) // BM * BM)
    unmasked_from = tl.maximum(first, tl.minimum(unmasked_from, tl.cdiv(end, BM) * BM))
    unmasked_to = tl.maximum(unmasked_from, tl.minimum(unmasked_to, tl.cdiv(end, BM) * BM))
    return first, unmasked_from, unmasked_to, end


@triton.jit
def online_softmax_step(acc, row_max, row_sum, logits, v, PRECISION: tl.constexpr):
    """A row's sums with a tile of keys more, whose logits are a, -inf where hidden, even for all that a row has seen."""
    higher = tl.maximum(row_max, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(row_max - base)
    p = tl.exp2(logits - base[:, None])
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, row_sum


@triton.jit
def log1p(x):
    return tl.where(x < 1e-3, x * (1.0 - x * (0.5 - x * 0.33333334)), tl.log(1.0 + x))


@triton.jit
def tanh(x):
    # x >= 0; the fraction loses the digits of a small x
    square = x * x
    e = tl.exp(-2.0 * x)
    return tl.where(x < 0.05, x * (1.0 - square * (0.33333334 - square * 0.13333334)), (1.0 - e) / (1.0 + e))
