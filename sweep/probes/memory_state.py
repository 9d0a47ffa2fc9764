"""The state of a gated delta memory while the network reads, and what other writes would have made of it (docs/mechanisms.md, "Gated delta memory").

B documents, T tokens, H heads, J KV heads, X head size, L layers with a memory. The state is [B, H, X_v, X_k].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.gated_delta.gated_delta import NORM_FLOOR, gated_delta
from ...kernels.norms import statistics_dtype
from ...kernels.shapes import expand_kv
from ...model.attention import Attention
from ...model.backbone import Backbone
from ...model.memory.gated_delta import GatedDelta
from ...model.pieces import spans
from .watching import evaluations

STATES = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")
"""Metrics of the probe `state_norm`: trained retention first, then gamma = 1 (`kept`), where nothing is forgotten but what the delta rule erases."""
TOGETHER = 64  # tokens that the kernels solve together


class Seen(NamedTuple):
    """What a memory reads: the normed input, and the mixer's q, k and v."""

    x_BTD: Tensor
    q_BTHX: Tensor
    k_BTJX: Tensor
    v_BTJX: Tensor


@contextlib.contextmanager
def watched(memories: list[GatedDelta], look: Callable[[int, Seen], None]) -> Iterator[None]:
    """Inside, `look` is told of every evaluation of a memory, by its place in the list; the outputs stay as they are."""

    def seen(place: int, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> None:
        look(place, Seen(x_BTD, q_BTHX, k_BTJX, v_BTJX))

    with evaluations(memories, seen):
        yield


def norms(memory: GatedDelta, seen: Seen, chunk: int) -> Tensor:
    """Frobenius norm of the state after the last token, one row for each of STATES: [4, B, H].

    Delta: M <- gamma M; M <- M + beta (v - M k) kᵀ. Hebbian control: S <- gamma S + beta v kᵀ. Keys have unit length.
    """
    b, t, h, _ = seen.q_BTHX.shape
    states: list[Tensor | None] = [None] * len(STATES)
    for start, stop in spans(b, t, chunk, TOGETHER):
        x, q, k, v = (part[:, start:stop] for part in seen)
        log_gamma_BTH, beta_BTH = memory.gates(x)
        for place, metric in enumerate(STATES):
            log = torch.zeros_like(log_gamma_BTH) if metric.endswith("kept") else log_gamma_BTH
            if metric.startswith("delta"):
                read = gated_delta(q, k, v, log, beta_BTH, initial_state=states[place], return_state=True)
                states[place] = read[1]
            else:
                states[place] = _hebbian(expand_kv(k, h), expand_kv(v, h), log, beta_BTH, states[place])
    return torch.stack([torch.linalg.matrix_norm(state) for state in states if state is not None])


def _hebbian(k_BTHX: Tensor, v_BTHX: Tensor, log_BTH: Tensor, beta_BTH: Tensor, state: Tensor | None) -> Tensor:
    """The state after these tokens in closed form: every write, weighted by what is kept of it until the end."""
    dtype = statistics_dtype(k_BTHX.dtype)
    k_BTHX = functional.normalize(k_BTHX.to(dtype), dim=-1, eps=NORM_FLOOR)
    total_BTH = log_BTH.to(dtype).cumsum(1)
    kept_BTH = (total_BTH[:, -1:] - total_BTH).exp() * beta_BTH.to(dtype)
    written = torch.einsum("bth,bthv,bthk->bhvk", kept_BTH, v_BTHX.to(dtype), k_BTHX)
    return written if state is None else written + total_BTH[:, -1].exp()[..., None, None] * state


def memories_of(model: Backbone) -> list[GatedDelta]:
    """The gated delta memories of a network, in the order of its layers."""
    mixes = [block.mix for block in model.blocks if isinstance(block.mix, Attention)]
    return [mix.memory for mix in mixes if isinstance(mix.memory, GatedDelta)]


def norms_after(model: Backbone, read: Callable[[], None], chunk: int) -> Tensor:
    """Norms of STATES once `read` has put rows through the network: [4, B, L, H], float64 on the CPU."""
    memories = memories_of(model)
    found: list[list[Tensor]] = [[] for _ in memories]

    def look(place: int, seen: Seen) -> None:
        found[place].append(norms(memories[place], seen, chunk).cpu())

    with watched(memories, look):
        read()
    return torch.stack([torch.cat(parts, 1) for parts in found], 2).double()
