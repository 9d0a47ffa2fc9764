"""How large the memory's state grows with the text, beside writes that erase nothing (docs/mechanisms.md, "Gated delta memory" and "Diagnostics").

B documents, T tokens, H heads, J KV heads, X head size, L layers with a memory. The state is [B, H, X_v, X_k].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.gated_delta.gated_delta import NORM_FLOOR, gated_delta
from ...kernels.norms import statistics_dtype
from ...kernels.shapes import expand_kv
from ...model.attention import Attention
from ...model.memory.gated_delta import GatedDelta
from ...model.pieces import spans
from ...results.store.records import Example, Measurement
from . import Result
from .subject import Subject, unmeasured

UNIT = "frobenius"
METRICS = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")
"""Trained retention first, then gamma = 1 (`kept`), where nothing is forgotten but what the delta rule erases."""
TOGETHER = 64  # tokens that the kernels solve together


class _Seen(NamedTuple):
    """What a memory reads: the normed input, and the mixer's q, k and v."""

    x_BTD: Tensor
    q_BTHX: Tensor
    k_BTJX: Tensor
    v_BTJX: Tensor


@contextlib.contextmanager
def _watched(memories: list[GatedDelta], look: Callable[[int, _Seen], None]) -> Iterator[None]:
    """Inside, `look` is told of every evaluation of a memory, by its place in the list; the outputs stay as they are."""

    def watch(place: int, memory: GatedDelta) -> None:
        plain = memory.evaluate

        def evaluate(x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> Tensor:
            look(place, _Seen(x_BTD, q_BTHX, k_BTJX, v_BTJX))
            return plain(x_BTD, q_BTHX, k_BTJX, v_BTJX, chunk=chunk)

        vars(memory)["evaluate"] = evaluate

    try:
        for place, memory in enumerate(memories):
            watch(place, memory)
        yield
    finally:
        for memory in memories:
            vars(memory).pop("evaluate", None)


def norms(memory: GatedDelta, seen: _Seen, chunk: int) -> Tensor:
    """Frobenius norm of the state after the last token, one row for each of METRICS: [4, B, H].

    Delta: M <- gamma M; M <- M + beta (v - M k) kᵀ. Hebbian control: S <- gamma S + beta v kᵀ. Keys have unit length.
    """
    b, t, h, _ = seen.q_BTHX.shape
    states: list[Tensor | None] = [None] * len(METRICS)
    for start, stop in spans(b, t, chunk, TOGETHER):
        x, q, k, v = (part[:, start:stop] for part in seen)
        log_gamma_BTH, beta_BTH = memory.gates(x)
        for place, metric in enumerate(METRICS):
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


@torch.no_grad()
def state_norm(subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """Norms of METRICS after the first L tokens of each document, mean over documents, layers and heads.

    The trained network runs at full context; the three controls read the same keys, values and gates and change nothing
    in it. Examples hold the mean over heads by document (`item`) and memory layer (`position`).
    """
    mixes = [block.mix for block in subject.model.blocks if isinstance(block.mix, Attention)]
    memories = [mix.memory for mix in mixes if isinstance(mix.memory, GatedDelta)]
    for length in lengths:
        reason = (
            (subject.lacking(length) or subject.beyond(length))
            if memories
            else "n/a: the network has no gated delta memory"
        )
        if reason is not None:
            yield [unmeasured("state_norm", metric, length, UNIT, reason) for metric in METRICS], []
            continue
        rows = torch.from_numpy(np.stack([d[:length] for d in subject.documents]).astype(np.int64))
        found: list[list[Tensor]] = [[] for _ in memories]

        def look(place: int, seen: _Seen, found: list[list[Tensor]] = found) -> None:
            found[place].append(norms(memories[place], seen, subject.config.eval.chunk_tokens).cpu())

        with _watched(memories, look):
            for batch in subject.batches(*rows.shape):
                subject.features(rows[batch])
        yield _measured(length, torch.stack([torch.cat(parts, 1) for parts in found], 2).double())


def _measured(length: int, norms_4BLH: Tensor) -> Result:
    values, examples = [], []
    for metric, norms_BLH in zip(METRICS, norms_4BLH, strict=True):
        mean = float(norms_BLH.mean())
        values.append(
            Measurement(probe="state_norm", metric=metric, length=length, value=mean, unit=UNIT, n=norms_BLH.numel())
        )
        for item, layers in enumerate(norms_BLH.mean(2)):
            for position, value in enumerate(layers):
                examples.append(
                    Example(
                        probe="state_norm",
                        metric=metric,
                        length=length,
                        item=item,
                        position=position,
                        value=float(value),
                    )
                )
    return values, examples
