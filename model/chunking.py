"""Evaluation of long sequences a bounded number of tokens at a time. B batch, T length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor


def spans(rows: int, length: int, chunk: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """(first token, end) of pieces of `length` tokens; `rows` times a piece is about `chunk` tokens, and at least `rows`.

    Every piece but the last is a multiple of `multiple` tokens long. Raises ValueError for a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    step = -(-max(1, chunk // rows) // multiple) * multiple
    for start in range(0, length, step):
        yield start, min(start + step, length)


def in_pieces(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], chunk: int, halo: int = 0
) -> tuple[Tensor, ...]:
    """`function` of inputs [B, T, ...], called with about `chunk` tokens at a time; its results are [B, T, ...] too.

    The result at a token may depend on that token and the `halo` tokens before it. One piece is the plain call.
    """
    b, t = inputs[0].shape[:2]
    wholes: tuple[Tensor, ...] = ()
    for start, stop in spans(b, t, chunk):
        first = max(0, start - halo)
        parts = function(*(x[:, first:stop] for x in inputs))
        if stop - start == t:
            return parts
        if not wholes:
            wholes = tuple(part.new_empty(b, t, *part.shape[2:]) for part in parts)
        for whole, part in zip(wholes, parts, strict=True):
            whole[:, start:stop] = part[:, start - first :]
    return wholes
