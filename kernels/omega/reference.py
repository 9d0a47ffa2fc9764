"""Omega memory token by token with gradients by autograd, the oracle of `omega`."""

from __future__ import annotations

import torch
from torch import Tensor

from .newton_schulz import newton_schulz


def answer(layers: list[Tensor], x: Tensor) -> Tensor:
    """Return the readout of a memory of matrices [out, in] for the vectors x [..., in]: [..., out].

    A sigmoid follows each matrix but the last.
    """
    for index, layer in enumerate(layers):
        x = x @ layer.mT
        x = torch.sigmoid(x) if index + 1 < len(layers) else x
    return x


def omega_reference(
    q_TF: Tensor, k_TF: Tensor, v_TX: Tensor, keep_T: Tensor, step_T: Tensor, weight_T: Tensor,
    momentum_T: Tensor | None, layers: list[Tensor], *, window: int, chunk: int, orthogonal: str = "none",
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Return (readout [T, X], matrices after the last token) of one head of one row, computed token by token.

    The momentum starts at zero and there are no pairs before the first token. Gradients are taken at the memory before
    the token's chunk.

    Args:
        q_TF: Features of the queries; T is at least 1.
        k_TF: Features of the keys.
        v_TX: Values.
        keep_T: Decay alpha of the memory, not its logarithm.
        step_T: Step size eta.
        weight_T: Weight gamma of each pair.
        momentum_T: Decay theta of the momentum, not its logarithm; None for 0.
        layers: Initial matrices [out, in], one or the two of a network; left unchanged.
        window: Number of pairs in the loss of a token, its own included.
        chunk: Tokens whose gradients are taken at the same memory.
        orthogonal: "none"; "token": the momentum is orthogonalised at each token; "chunk": once at the end of a chunk,
            whose tokens read the memory before it.
    """
    memory = [layer.clone() for layer in layers]
    momentum = [torch.zeros_like(layer) for layer in layers]
    readouts = []
    for t in range(len(k_TF)):
        if t % chunk == 0:
            frozen = [layer.clone().requires_grad_() for layer in memory]
            at_start = memory
        first = max(0, t + 1 - window)
        with torch.enable_grad():
            errors = answer(frozen, k_TF[first : t + 1].detach()) - v_TX[first : t + 1].detach()
            loss = (weight_T[first : t + 1].detach() * errors.square().sum(-1)).sum() / 2
            gradients = torch.autograd.grad(loss, frozen)
        theta = 0.0 if momentum_T is None else momentum_T[t]
        momentum = [theta * old + new for old, new in zip(momentum, gradients, strict=True)]
        last = t % chunk == chunk - 1 or t == len(k_TF) - 1
        if orthogonal == "chunk":
            readouts.append(answer(at_start, q_TF[t]))
            memory = [keep_T[t] * layer for layer in memory]
            if last:
                mean = step_T[t - t % chunk : t + 1].mean()
                memory = [layer - mean * newton_schulz(s) for layer, s in zip(memory, momentum, strict=True)]
        else:
            moved = [newton_schulz(s) for s in momentum] if orthogonal == "token" else momentum
            memory = [keep_T[t] * layer - step_T[t] * s for layer, s in zip(memory, moved, strict=True)]
            readouts.append(answer(memory, q_TF[t]))
    return torch.stack(readouts), memory
