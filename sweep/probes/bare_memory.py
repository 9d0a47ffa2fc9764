"""A memory on its own: pairs written with the rates that it has on a text, and read back (docs/mechanisms.md, "Memory recall").

B draws, K pairs, H heads, X head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.norms import statistics_dtype
from ...kernels.omega.op import unit
from ...kernels.shapes import expand_kv
from ...model.memory.recurrent import Recurrent
from .diagnostics.memory_state import Seen, memories_of, watched
from .subject import Network

TOGETHER = 1 << 24
"""Comparisons of an answer with a value at a time, which bounds memory."""


class Habit(NamedTuple):
    """What a memory does with a text on average."""

    rates: Any
    """Its rates [H] or [H, X], each the mean over the text's tokens: of what stays, the mean of the logs."""
    scale_H: Tensor
    """Root mean square of the values that each head writes."""
    dtype: torch.dtype
    """Of what it reads."""


def habits(subject: Network, inputs_BT: Tensor) -> dict[int, Habit]:
    """Of every memory by its layer, over these rows."""
    memories = memories_of(subject.model)
    rates: dict[int, Any] = {}
    squares: dict[int, Tensor] = {}
    dtypes: dict[int, torch.dtype] = {}

    def look(layer: int, seen: Seen) -> None:
        told = memories[layer].read_rates(seen.x_BTD)
        sums = type(told)(*(None if one is None else one.double().sum((0, 1)) for one in told))
        before = rates.get(layer)
        rates[layer] = sums if before is None else type(told)(*map(_plus, before, sums))
        values = expand_kv(seen.v_BTJX, seen.q_BTHX.size(2)).double().square().mean(-1).sum((0, 1))
        squares[layer] = squares[layer] + values if layer in squares else values
        dtypes[layer] = seen.q_BTHX.dtype

    with watched(memories, look):
        for rows in subject.batches(*inputs_BT.shape):
            subject.features(inputs_BT[rows], full_context=False)
    n = inputs_BT.numel()
    return {
        layer: Habit(
            type(sums)(*(None if one is None else one / n for one in sums)), (squares[layer] / n).sqrt(), dtypes[layer]
        )
        for layer, sums in rates.items()
    }


def _plus(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    return None if left is None or right is None else left + right


def shares_right(subject: Network, known: dict[int, Habit], pairs: int, draws: int, seed: int) -> dict[int, Tensor]:
    """By layer: which part of all keys of all draws every head of its memory answers with their own value, [H] on the CPU.

    The same keys and values for every layer, and for every network of as many heads of that size; a layer's values have the
    size that it is used to.
    """
    memories = memories_of(subject.model)
    heads, size = subject.config.model.n_heads, subject.config.model.head_dim
    draw = torch.Generator().manual_seed((seed << 20) + pairs)
    keys, values = torch.randn(2, draws, pairs, heads, size, generator=draw)
    # no more tokens at a time than an evaluation reads
    together = max(1, min(subject.config.eval.chunk_tokens // pairs, TOGETHER // (heads * pairs**2)))
    found = {}
    for layer, habit in known.items():
        right = torch.zeros(heads)
        for start in range(0, draws, together):
            subject.pause()
            part = slice(start, start + together)
            scaled = values[part].to(subject.device) * habit.scale_H.float()[:, None]
            told = keys[part].to(subject.device, habit.dtype), scaled.to(habit.dtype)
            right += recalled(memories[layer], habit.rates, *told).float().sum((0, 1)).cpu()
        found[layer] = right / (draws * pairs)
    return found


def recalled(memory: Recurrent, rates: Any, keys_BKHX: Tensor, values_BKHX: Tensor) -> Tensor:
    """Whether each key is answered with its own value: [B, K, H].

    The pairs are written one after the other into an empty state, each with these rates ([H] or [H, X], or None).
    """
    b, k = keys_BKHX.shape[:2]
    dtype = statistics_dtype(keys_BKHX.dtype)
    alike = type(rates)(*(None if one is None else one.to(dtype).expand(b, k, *one.shape) for one in rates))
    _, state = memory.write(alike, keys_BKHX, keys_BKHX, values_BKHX, None)
    return nearest(memory.answer(state, keys_BKHX), values_BKHX)


def nearest(answers_BKHX: Tensor, values_BKHX: Tensor) -> Tensor:
    """Whether each answer lies nearer, by cosine, to its own value than to any other of its draw: [B, K, H]; no answer does not."""
    near_BHKK = torch.einsum("bkhx,bjhx->bhkj", unit(answers_BKHX), unit(values_BKHX).to(answers_BKHX.dtype))
    own_BHK = near_BHKK.diagonal(dim1=-2, dim2=-1)
    others_BHK = near_BHKK - torch.diag_embed(torch.full_like(own_BHK, torch.inf))
    return (own_BHK > others_BHK.amax(-1)).transpose(1, 2)
