"""Shape checks shared by the ops: every message prints both sizes."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUERY_BLOCK = 1024
"""Queries scored at a time where nothing asks for fewer."""
SCORES_PER_TOKEN = 2048
"""Scores a head that an evaluation holds for each token of its chunk."""


def check_qkv(q_BTHD: Tensor, k_BTJD: Tensor, v_BTJD: Tensor) -> tuple[int, int, int, int, int]:
    """(B, T, H, J, D), J KV heads for H query heads; raises ValueError when the three do not belong together."""
    for name, x in (("q", q_BTHD), ("k", k_BTJD), ("v", v_BTJD)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, D], got shape {tuple(x.shape)}")
        if x.dtype not in FLOATS or x.dtype != q_BTHD.dtype:
            raise ValueError(f"q has type {q_BTHD.dtype}, but {name} has type {x.dtype}")
    b, t, h, d = q_BTHD.shape
    if k_BTJD.shape != v_BTJD.shape:
        raise ValueError(f"k has shape {tuple(k_BTJD.shape)}, but v has {tuple(v_BTJD.shape)}")
    if k_BTJD.shape[:2] != (b, t) or k_BTJD.shape[3] != d:
        raise ValueError(f"q has shape {tuple(q_BTHD.shape)}, but k has {tuple(k_BTJD.shape)}")
    check_groups(h, k_BTJD.shape[2])
    return b, t, h, k_BTJD.shape[2], d


def check_groups(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless the KV heads divide the query heads."""
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} KV heads must divide {heads} query heads")


def check_window(window: int | None) -> None:
    """Raises ValueError for a window without room for the query's own key."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the query's own key), got {window}")


def query_block(chunk: int, rows: int, length: int) -> int:
    """Queries scored at a time by an evaluation that works through `chunk` tokens at a time.

    The scores of a block, rows x block x length a head, stay within 2048 a token of the chunk: with 8 heads, float32
    and 8192 tokens 512 MiB, and a block holds 256 queries of 65,536 keys. A single query is never divided.
    """
    return max(1, min(QUERY_BLOCK, chunk // rows, chunk * SCORES_PER_TOKEN // (rows * length)))


def expand_kv(x_BTJD: Tensor, heads: int) -> Tensor:
    """[B, T, J, D] -> [B, T, heads, D]; head h gets KV head h // (heads / J)."""
    b, t, j, d = x_BTJD.shape
    return x_BTJD if j == heads else x_BTJD.unsqueeze(3).expand(b, t, j, heads // j, d).reshape(b, t, heads, d)


def visible_mask(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """bool [stop - start, stop - first]: whether query start + r sees key first + s (causal, at most `window` keys)."""
    query = torch.arange(start, stop, device=device).unsqueeze(1)
    key = torch.arange(first, stop, device=device)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
