"""Device functions that the Triton attention kernels share: visible keys, tile bounds and an online softmax step.

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
    """Return a bool mask [M, S]: True where query p_M may see key n_S.

    Args:
        p_M: int32 positions of the queries; they may lie behind the last key.
        n_S: int32 positions of the keys.
        TK: Number of keys; positions from TK on are hidden.
        window: Number of keys that a query sees, its own included; read only when WINDOWED.
        WINDOWED: constexpr bool, True with an attention window.
    """
    # queries may lie beyond the last key
    seen = n_S[None, :] <= tl.minimum(p_M, TK - 1)[:, None]
    if WINDOWED:
        seen = seen & (n_S[None, :] > p_M[:, None] - window)
    return seen


@triton.jit
def bounds(m0, T, window, BM: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the range of key tiles that a tile of queries sees, and the part of it that needs no mask.

    Args:
        m0: Position of the tile's first query.
        T: Number of tokens.
        window: Number of keys that a query sees; read only when WINDOWED.
        BM: constexpr, queries of a tile.
        BN: constexpr, keys of a tile.
        WINDOWED: constexpr bool, True with an attention window.

    Returns:
        (first, unmasked_from, unmasked_to, last), indices of key tiles: the tiles first <= n < last have a visible
        pair; in those of unmasked_from <= n < unmasked_to every query sees every key. The tiles from unmasked_to on are
        cut by the causal mask, those before unmasked_from by the window.
    """
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
    """Return the range of queries that see a key of a tile, and the part of it that needs no mask.

    Args:
        n0: Position of the tile's first key.
        T: Number of tokens.
        window: Number of keys that a query sees; read only when WINDOWED.
        BM: constexpr, queries of a tile.
        BN: constexpr, keys of a tile.
        WINDOWED: constexpr bool, True with an attention window.

    Returns:
        (first, unmasked_from, unmasked_to, end), positions of queries; all but `end` are multiples of BM. Queries
        outside of first <= m < end see no key of the tile; `first` is rounded down to a tile; those of unmasked_from <=
        m < unmasked_to, whole tiles, see all of its keys.
    """
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
    """Add one tile of keys to the running softmax of a tile of queries.

    A row may still have seen hidden keys only; its sums then stay 0 and its maximum -inf. The caller divides acc by
    row_sum at the end; lse = row_max + log2(row_sum).

    Args:
        acc: float32 [M, X], sum of weights times values so far, relative to 2^row_max.
        row_max: float32 [M], largest logit so far, -inf before the first visible key.
        row_sum: float32 [M], sum of weights so far, relative to 2^row_max.
        logits: float32 [M, S] in units of log 2; -inf where the key is hidden.
        v: [S, X], values of the tile.
        PRECISION: constexpr, input precision of the float32 product: "ieee" or "tf32".

    Returns:
        (acc, row_max, row_sum) with the tile included.
    """
    higher = tl.maximum(row_max, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(row_max - base)
    p = tl.exp2(logits - base[:, None])
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, row_sum


@triton.jit
def log1p(x):
    """Return the natural logarithm of 1 + x for x >= 0, accurate for small x."""
    return tl.where(x < 1e-3, x * (1.0 - x * (0.5 - x * 0.33333334)), tl.log(1.0 + x))


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of x >= 0, accurate for small x."""
    # for small x >= 0 the fraction would lose digits
    square = x * x
    e = tl.exp(-2.0 * x)
    return tl.where(x < 0.05, x * (1.0 - square * (0.33333334 - square * 0.13333334)), (1.0 - e) / (1.0 + e))
