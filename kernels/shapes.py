"""Shape checks shared by the ops, and the meaning of the letters in shape suffixes.

Every error message prints both sizes. `q_BTHX` is [B, T, H, X]. In every file of kernels/ and model/ a letter of a
suffix is one of these:

B rows of a batch
T tokens of a row
N tokens of all rows, B T
D width of the residual stream
V vocabulary
L layers
H query heads
J KV heads: J divides H, and head h uses KV head h // (H / J)
G query heads that share a KV head, H / J
X head size
Y channels of a value and one more, whose entries are 1, X + 1
S keys that a query may see; tokens that may be others than the T queries
R distractors
C channels of a convolution
W taps of a convolution
E channels of [b | c | u], 3 C
K directions of a sketch
F pairs that a rotary embedding rotates, X / 2
M queries of a tile or a block
P parts that add up to one tensor; heads that have gates of their own
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUERY_BLOCK = 1024
"""Queries scored at a time by default."""
SCORES_PER_TOKEN = 2048
"""Scores per head that an evaluation holds for each token of its chunk."""


def check_qkv(q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> tuple[int, int, int, int, int]:
    """Return (B, T, H, J, X) of q [B, T, H, X], k and v [B, T, J, X]: J KV heads for H query heads.

    Raises:
        ValueError: A tensor has no four axes or another float dtype than q, B, T or X differ, k and v differ in shape,
            or J does not divide H.
    """
    for name, x in (("q", q_BTHX), ("k", k_BTJX), ("v", v_BTJX)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, X], got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS or x.dtype != q_BTHX.dtype:
            raise ValueError(f"q has type {q_BTHX.dtype}, but {name} has type {x.dtype}")
    b, t, h, d = q_BTHX.shape
    if k_BTJX.shape != v_BTJX.shape:
        raise ValueError(f"k has shape {tuple(k_BTJX.shape)}, but v has {tuple(v_BTJX.shape)}")
    if k_BTJX.shape[:2] != (b, t) or k_BTJX.shape[3] != d:
        raise ValueError(f"q has shape {tuple(q_BTHX.shape)}, but k has {tuple(k_BTJX.shape)}")
    check_groups(h, k_BTJX.shape[2])
    return b, t, h, k_BTJX.shape[2], d


def check_length(tokens: int) -> None:
    """Raise ValueError for a sequence without tokens."""
    if tokens < 1:
        raise ValueError("a sequence needs at least 1 token, got 0")


def check_groups(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless the number of KV heads divides that of the query heads."""
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} KV heads must divide {heads} query heads")


def check_window(window: int | None) -> None:
    """Raise ValueError for a window below 1, which would hide the query's own key; None is full attention.

    Args:
        window: Number of keys that a query sees, its own included.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the query's own key), got {window}")


def cut(window: int | None, length: int) -> int:
    """Return the window in keys that a kernel needs for texts of `length` tokens, 0 for full attention.

    A window of at least `length` keys hides nothing, and gives 0 as None does.
    """
    return 0 if window is None or window >= length else window


def query_block(chunk: int, rows: int, length: int) -> int:
    """Return the number of queries per row that an evaluation scores at a time, at least 1 and at most 1024.

    A block holds at most chunk / rows queries, and its rows x block x length scores per head stay within 2048 per token
    of the chunk. With 8 heads, float32 and chunks of 8192 tokens these are 512 MiB, and a block holds 256 queries of
    65,536 keys. A single query is never divided.

    Args:
        chunk: Tokens that the evaluation processes at a time, over all rows.
        rows: Rows B of the batch.
        length: Tokens T of a row, which a query may see.
    """
    return max(1, min(QUERY_BLOCK, chunk // rows, chunk * SCORES_PER_TOKEN // (rows * length)))


def expand_kv(x_BTJX: Tensor, heads: int) -> Tensor:
    """Repeat KV heads for the query heads: [B, T, J, X] -> [B, T, heads, X]; head h gets KV head h // (heads / J).

    Returns x itself when J equals `heads`, else a copy. J must divide `heads`, which is not checked.
    """
    b, t, j, d = x_BTJX.shape
    return x_BTJX if j == heads else x_BTJX.unsqueeze(3).expand(b, t, j, heads // j, d).reshape(b, t, heads, d)


def visible_mask(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Return a bool mask [stop - start, stop - first]: True where query start + r may see key first + s.

    Causal: a query sees its own key and earlier ones, at most `window` keys in all.

    Args:
        start: Position of the first query.
        stop: Position after the last query, and after the last key.
        first: Position of the first key.
        window: Number of keys that a query sees, its own included; None for every earlier key.
        device: Device of the mask.
    """
    query = torch.arange(start, stop, device=device).unsqueeze(1)
    key = torch.arange(first, stop, device=device)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
