"""Scan of a memory that is one matrix over chunks: the only sequential part of the omega memory.

N chunks, G rows times heads, S pairs that a chunk sees, F columns of a feature, X head size. With M and S the memory
and its momentum before a chunk, K and V the pairs that it sees, E = K Mᵀ − V:

    S' = momentum_decay S + (share ⊙ E)ᵀ K
    M' = keep M − step S − (pair_weights ⊙ E)ᵀ K     or, orthogonal,     M' = keep M − step N(S')

The scan is a torch op with a backward of its own, so that torch.compile gets one operation and not a loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_ops import differentiate, torch_op
from .newton_schulz import NewtonSchulzTape, newton_schulz

CHUNKS_PER_GROUP = 8
"""Chunks whose Newton-Schulz steps the backward holds at a time."""


def _empty_memories(
    keys: Tensor, values: Tensor, pair_weights: Tensor | None, share: Tensor | None, keep: Tensor, to: Tensor, old: Tensor,
    memory: Tensor, momentum: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return uninitialised results of `scan`, for torch.compile; only shapes, dtypes and device count.

    They are memories and momenta, [N + 1, G, X, F] each; the momenta are empty without `share`.
    """
    n = len(keys) + 1
    return memory.new_empty(n, *memory.shape), memory.new_empty(0 if share is None else n, *memory.shape)


def _empty_gradients(
    g_memories: Tensor, g_momenta: Tensor, keys: Tensor, values: Tensor, pair_weights: Tensor | None, share: Tensor | None,
    keep: Tensor, to: Tensor, old: Tensor, memories: Tensor, momenta: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return uninitialised results of `scan_backward`, for torch.compile; only shapes, dtypes and device count.

    They are like keys, values, pair_weights, share, keep, to, old and twice the memory [G, X, F]; those of pair_weights
    and share are empty where these are None.
    """
    coefficient_grads = [keep.new_empty(0) if x is None else torch.empty_like(x) for x in (pair_weights, share)]
    rest = (torch.empty_like(x) for x in (keep, to, old, memories[0], memories[0]))
    return torch.empty_like(keys), torch.empty_like(values), *coefficient_grads, *rest


@torch_op("omega_scan_forward", _empty_memories)
def scan(
    keys_NGSF: Tensor, values_NGSX: Tensor, pair_weights_NGS: Tensor | None, share_NGS: Tensor | None, keep_NG: Tensor, step_NG: Tensor,
    momentum_decay_NG: Tensor, memory_GXF: Tensor, momentum_GXF: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the memories and momenta before each chunk and after the last, each [N + 1, G, X, F].

    All tensors are contiguous and of one dtype, float32 or float64.

    Args:
        keys_NGSF: Features of the keys that each chunk sees.
        values_NGSX: Their values.
        pair_weights_NGS: Weights of the pairs in the memory after the chunk; None: steps are orthogonal.
        share_NGS: Weights of the pairs in the momentum after the chunk; None: there is no momentum, an empty tensor is
            returned for it, and step and momentum_decay are ignored.
        keep_NG: Decay of the memory over the chunk.
        step_NG: Step along the momentum before the chunk, or along N(S').
        momentum_decay_NG: Decay of the momentum over the chunk.
        memory_GXF: Memory before the first chunk.
        momentum_GXF: Momentum before the first chunk.
    """
    n = len(keys_NGSF)
    memories = memory_GXF.new_empty(n + 1, *memory_GXF.shape)
    momenta = memory_GXF.new_empty(0 if share_NGS is None else n + 1, *memory_GXF.shape)
    memories[0] = memory_GXF
    if share_NGS is not None:
        momenta[0] = momentum_GXF
    keep, to, old = (x[..., None, None] for x in (keep_NG, step_NG, momentum_decay_NG))
    for i, (k, v, before, after) in enumerate(zip(keys_NGSF, values_NGSX, memories[:-1], memories[1:], strict=True)):
        errors = torch.baddbmm(v, k, before.mT, beta=-1)
        start = keep[i] * before
        if share_NGS is not None:
            torch.baddbmm(old[i] * momenta[i], (share_NGS[i, ..., None] * errors).mT, k, out=momenta[i + 1])
            start -= to[i] * (momenta[i] if pair_weights_NGS is not None else newton_schulz(momenta[i + 1]))
        if pair_weights_NGS is not None:
            torch.baddbmm(start, (pair_weights_NGS[i, ..., None] * errors).mT, k, alpha=-1, out=after)
        else:
            after.copy_(start)
    return memories, momenta


@torch_op("omega_scan_backward", _empty_gradients)
def scan_backward(
    g_memories: Tensor, g_momenta: Tensor, keys_NGSF: Tensor, values_NGSX: Tensor, pair_weights_NGS: Tensor | None,
    share_NGS: Tensor | None, keep_NG: Tensor, step_NG: Tensor, momentum_decay_NG: Tensor, memories: Tensor, momenta: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the nine inputs of `scan` in its order.

    They are empty for inputs that are None, and zero for ignored ones. Orthogonal steps run Newton-Schulz again, for 8
    chunks at a time. The arguments from keys to the momentum's decay are inputs of `scan`.

    Args:
        g_memories: Gradient of the memories [N + 1, G, X, F].
        g_momenta: Gradient of the momenta [N + 1, G, X, F], empty without momentum.
        keys_NGSF: Features of the keys.
        values_NGSX: Values.
        pair_weights_NGS: Weights of the pairs in the memory, or None for orthogonal steps.
        share_NGS: Weights of the pairs in the momentum, or None without momentum.
        keep_NG: Decay of the memory.
        step_NG: Step along the momentum.
        momentum_decay_NG: Decay of the momentum.
        memories: First result of `scan`.
        momenta: Second result of `scan`.
    """
    g_memories, g_momenta = g_memories.contiguous(), g_momenta.contiguous()
    before, n = memories[:-1], len(keys_NGSF)
    keep, to, old = (x[..., None, None] for x in (keep_NG, step_NG, momentum_decay_NG))
    # gradients of each chunk's result, and of its errors E
    g_after, g_slow, g_wrong = torch.empty_like(before), torch.empty_like(momenta[1:]), torch.empty_like(values_NGSX)
    tape: NewtonSchulzTape | None = None
    g_to = torch.zeros_like(step_NG)
    g_m = g_memories[n].clone()
    g_s = g_momenta[n].clone() if share_NGS is not None else g_m
    for i in range(n - 1, -1, -1):
        if pair_weights_NGS is None:
            if tape is None or i % CHUNKS_PER_GROUP == CHUNKS_PER_GROUP - 1:
                first = i // CHUNKS_PER_GROUP * CHUNKS_PER_GROUP
                tape = NewtonSchulzTape(momenta[first + 1 : i + 2])
            g_to[i] = -(g_m * tape.result[i % CHUNKS_PER_GROUP]).sum((-2, -1))
            g_s = g_s + tape.gradient(i % CHUNKS_PER_GROUP, -to[i] * g_m)
        g_after[i] = g_m
        k = keys_NGSF[i]
        g_e = None if pair_weights_NGS is None else -pair_weights_NGS[i, ..., None] * (k @ g_m.mT)
        if share_NGS is not None:
            g_slow[i] = g_s
            more = share_NGS[i, ..., None] * (k @ g_s.mT)
            g_e = more if g_e is None else g_e + more
            g_s = torch.addcmul(g_momenta[i], old[i], g_s)
            if pair_weights_NGS is not None:
                g_s = g_s - to[i] * g_m
        assert g_e is not None, "orthogonalised steps need a momentum"
        g_wrong[i] = g_e
        g_m = torch.baddbmm(torch.addcmul(g_memories[i], keep[i], g_m), g_e.mT, k)

    # the rest is the same for all chunks at once
    errors = keys_NGSF @ before.mT - values_NGSX
    g_keys = g_wrong @ before
    g_felt, g_share = keep_NG.new_empty(0), keep_NG.new_empty(0)
    g_old = torch.zeros_like(momentum_decay_NG)
    if pair_weights_NGS is not None:
        g_keys -= (pair_weights_NGS[..., None] * errors) @ g_after
        g_felt = -(errors * (keys_NGSF @ g_after.mT)).sum(-1)
    if share_NGS is not None:
        g_keys += (share_NGS[..., None] * errors) @ g_slow
        g_share = (errors * (keys_NGSF @ g_slow.mT)).sum(-1)
        g_old = (g_slow * momenta[:-1]).sum((-2, -1))
        if pair_weights_NGS is not None:
            g_to = -(g_after * momenta[:-1]).sum((-2, -1))
    g_keep = (g_after * before).sum((-2, -1))
    g_momentum = g_s if share_NGS is not None else torch.zeros_like(g_m)
    return g_keys, -g_wrong, g_felt, g_share, g_keep, g_to, g_old, g_m, g_momentum


differentiate(scan, scan_backward, lambda inputs, results: ((*inputs[:7], *results), ()), results=2)
