"""The state of a memory while the network reads, and what other writes would have made of it (docs/mechanisms.md, "Diagnostics").

B documents, T tokens, H heads, J KV heads, X head size, L layers with a memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.gated_delta.op import NORM_FLOOR
from ...kernels.norms import statistics_dtype
from ...kernels.shapes import expand_kv
from ...model.attention import Attention
from ...model.backbone import Backbone
from ...model.layers import spans
from ...model.memory.gated_delta import Delta, DeltaRates
from ...model.memory.recurrent import Recurrent
from .subject import evaluations

STATES = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")
"""Metrics of the probe `state_norm`: trained retention first, then retention 1 (`kept`), where nothing is forgotten but what a write erases."""
OWN = ("delta_norm", "delta_norm_kept")
"""Those of them that every memory has: its own writes."""


class Seen(NamedTuple):
    """What a memory reads: the normed input, and the mixer's q, k and v."""

    x_BTD: Tensor
    q_BTHX: Tensor
    k_BTJX: Tensor
    v_BTJX: Tensor


def memories_of(model: Backbone) -> dict[int, Any]:
    """The memories of a network by layer, in the order of its layers."""
    mixes = {layer: block.mix for layer, block in enumerate(model.blocks) if isinstance(block.mix, Attention)}
    return {layer: mix.memory for layer, mix in mixes.items() if mix.memory is not None}


def lacking(model: Backbone, *methods: str) -> str | None:
    """Why the memories of a network cannot be asked for these methods of `Recurrent`; None: they can."""
    memories = memories_of(model)
    if not memories:
        return "n/a: the network has no memory"
    memory = type(next(iter(memories.values())))
    absent = [name for name in methods if getattr(memory, name, None) in (None, getattr(Recurrent, name))]
    return f"n/a: memory {model.config.memory} defines no {' and no '.join(absent)}" if absent else None


@contextlib.contextmanager
def watched(memories: Mapping[int, Any], look: Callable[[int, Seen], None]) -> Iterator[None]:
    """Inside, `look` is told of every evaluation of a memory, by its layer; the outputs stay as they are."""
    layers = list(memories)

    def seen(place: int, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> None:
        look(layers[place], Seen(x_BTD, q_BTHX, k_BTJX, v_BTJX))

    with evaluations(list(memories.values()), seen):
        yield


def keeping(rates: Any) -> Any:
    """The same rates of a memory that forgets nothing by itself."""
    return rates._replace(**{rates._fields[0]: torch.zeros_like(rates[0])})


def norms(memory: Recurrent, seen: Seen, chunk: int) -> dict[str, Tensor]:
    """By metric of STATES, of OWN for what is no delta rule: Frobenius norm of the state after the last token, [B, H].

    Hebbian control: S <- S gamma + beta v kᵀ, the memory's own writes without erasing. Keys have unit length.
    """
    b, t, h, _ = seen.q_BTHX.shape
    metrics = STATES if isinstance(memory, Delta) else OWN
    states: dict[str, Any] = dict.fromkeys(metrics)
    for start, stop in spans(b, t, chunk, memory.together(seen.x_BTD.device, seen.x_BTD.dtype)):
        x, q, k, v = (part[:, start:stop] for part in seen)
        trained = memory.read_rates(x)
        for metric in metrics:
            rates = keeping(trained) if metric.endswith("kept") else trained
            if metric in OWN:
                states[metric] = memory.write(rates, q, k, v, states[metric])[1]
            else:
                states[metric] = _hebbian(expand_kv(k, h), expand_kv(v, h), rates, states[metric])
    return {metric: memory.norm(state) for metric, state in states.items()}


def _hebbian(k_BTHX: Tensor, v_BTHX: Tensor, rates: DeltaRates, state: Tensor | None) -> Tensor:
    """The state [B, H, X_v, X_k] after these tokens in closed form: every write, weighted by what is kept of it until the end."""
    dtype = statistics_dtype(k_BTHX.dtype)
    k_BTHX = functional.normalize(k_BTHX.to(dtype), dim=-1, eps=NORM_FLOOR)
    log = rates.log_keep.to(dtype)
    # one retention a head stands for those of all its channels
    total_BTHX = (log if log.ndim == 4 else log[..., None]).cumsum(1)
    kept_BTHX = (total_BTHX[:, -1:] - total_BTHX).exp() * rates.step_BTH.to(dtype)[..., None]
    written = torch.einsum("bthv,bthk->bhvk", v_BTHX.to(dtype), kept_BTHX * k_BTHX)
    return written if state is None else written + total_BTHX[:, -1].exp()[..., None, :] * state


def norms_after(model: Backbone, read: Callable[[], None], chunk: int) -> dict[str, Tensor]:
    """By metric, the norms once `read` has put rows through the network: [B, L, H], float64 on the CPU."""
    memories = memories_of(model)
    found: dict[int, list[dict[str, Tensor]]] = {layer: [] for layer in memories}

    def look(layer: int, seen: Seen) -> None:
        found[layer].append({name: norm.cpu() for name, norm in norms(memories[layer], seen, chunk).items()})

    with watched(memories, look):
        read()
    metrics = next(iter(found.values()))[0]
    return {
        metric: torch.stack([torch.cat([part[metric] for part in parts]) for parts in found.values()], 1).double()
        for metric in metrics
    }
